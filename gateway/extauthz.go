package gateway

import (
	"context"
	"crypto/x509"
	"maps"
	"net/http"
	"slices"
	"strings"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	authv3 "github.com/envoyproxy/go-control-plane/envoy/service/auth/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"

	"github.com/fencedlease/fencedlease/fence"
)

// extAuthz is the Decider as Envoy's ext_authz v3 over gRPC. A refusal is
// always an answer and never an error of the RPC, which Envoy may be told to
// let pass.
type extAuthz struct {
	authv3.UnimplementedAuthorizationServer

	decider *Decider
}

// Check decides on one request.
func (e *extAuthz) Check(ctx context.Context, r *authv3.CheckRequest) (*authv3.CheckResponse, error) {
	attributes := r.GetAttributes().GetRequest().GetHttp()
	var certificate *x509.Certificate
	if p, ok := peer.FromContext(ctx); ok {
		if info, ok := p.AuthInfo.(credentials.TLSInfo); ok {
			certificate = peerCertificate(&info.State)
		}
	}
	c, problem := e.decider.decide(ctx, surfaceExtAuth, attributes.GetMethod(), request{headersOf(attributes), certificate}, nil)
	if problem != nil {
		return refusal(problem), nil
	}
	ok := &authv3.OkHttpResponse{HeadersToRemove: []string{strings.ToLower(fence.HeaderAuthorization)}}
	for _, judged := range c.judgedHeaders() {
		ok.Headers = append(ok.Headers, setHeader(judged[0], judged[1]))
	}
	return &authv3.CheckResponse{
		Status:       &status.Status{Code: int32(codes.OK)},
		HttpResponse: &authv3.CheckResponse_OkResponse{OkResponse: ok},
	}, nil
}

// headersOf gives the headers in canonical form. Envoy joins repeated ones
// with a comma, unless it is told to send them raw; either way they are seen.
func headersOf(r *authv3.AttributeContext_HttpRequest) http.Header {
	h := http.Header{}
	for _, header := range r.GetHeaderMap().GetHeaders() {
		value := header.GetValue()
		if raw := header.GetRawValue(); len(raw) > 0 {
			value = string(raw)
		}
		h.Add(header.GetKey(), value)
	}
	if len(h) == 0 {
		for name, value := range r.GetHeaders() {
			h.Add(name, value)
		}
	}
	return h
}

func setHeader(name, value string) *corev3.HeaderValueOption {
	return &corev3.HeaderValueOption{
		Header:       &corev3.HeaderValue{Key: strings.ToLower(name), Value: value},
		AppendAction: corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD,
	}
}

func refusal(problem *Problem) *authv3.CheckResponse {
	code := codes.PermissionDenied
	switch problem.Status {
	case http.StatusUnauthorized:
		code = codes.Unauthenticated
	case http.StatusServiceUnavailable:
		code = codes.Unavailable
	}
	denied := &authv3.DeniedHttpResponse{
		Status: &typev3.HttpStatus{Code: typev3.StatusCode(problem.Status)},
		Body:   string(problem.body()),
	}
	header := problem.header()
	for _, name := range slices.Sorted(maps.Keys(header)) {
		denied.Headers = append(denied.Headers, setHeader(name, header.Get(name)))
	}
	return &authv3.CheckResponse{
		Status:       &status.Status{Code: int32(code), Message: problem.Detail},
		HttpResponse: &authv3.CheckResponse_DeniedResponse{DeniedResponse: denied},
	}
}
