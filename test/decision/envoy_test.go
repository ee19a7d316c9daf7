package decision

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"testing"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	bufferv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/buffer/v3"
	extauthzv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_authz/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/router/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/upstreams/http/v3"
	authv3 "github.com/envoyproxy/go-control-plane/envoy/service/auth/v3"
	matcherv3 "github.com/envoyproxy/go-control-plane/envoy/type/matcher/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	rpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/anypb"
	"sigs.k8s.io/yaml"

	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/gateway"
)

// bootstrap reads a configuration of Envoy's as Envoy would: every message in
// it is known and valid, packed ones too.
func bootstrap(t *testing.T, text string) *bootstrapv3.Bootstrap {
	t.Helper()
	b := &bootstrapv3.Bootstrap{}
	data, err := yaml.YAMLToJSONStrict([]byte(text))
	if err == nil {
		err = protojson.Unmarshal(data, b)
	}
	if err == nil {
		err = valid(b)
	}
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// valid validates a message by its rules, and those packed in it.
func valid(m proto.Message) error {
	if v, ok := m.(interface{ ValidateAll() error }); ok {
		if err := v.ValidateAll(); err != nil {
			return err
		}
	}
	if packed, ok := m.(*anypb.Any); ok {
		inner, err := packed.UnmarshalNew()
		if err != nil {
			return err
		}
		return valid(inner)
	}
	var err error
	each := func(v protoreflect.Value) bool {
		err = valid(v.Message().Interface())
		return err == nil
	}
	m.ProtoReflect().Range(func(field protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case field.IsMap() && field.MapValue().Message() != nil:
			v.Map().Range(func(_ protoreflect.MapKey, v protoreflect.Value) bool { return each(v) })
		case field.IsList() && field.Message() != nil:
			for i := 0; i < v.List().Len() && err == nil; i++ {
				each(v.List().Get(i))
			}
		case !field.IsMap() && field.Message() != nil:
			each(v)
		}
		return err == nil
	})
	return err
}

// unpack gives a packed message as what it has to be.
func unpack[M proto.Message](t *testing.T, packed *anypb.Any, m M) M {
	t.Helper()
	if err := packed.UnmarshalTo(m); err != nil {
		t.Fatal(err)
	}
	return m
}

// envoy does what Envoy's filters buffer, ext_authz and router do, as the
// configuration says, as far as it bears on a verdict.
type envoy struct {
	filter  *extauthzv3.ExtAuthz
	route   *routev3.VirtualHost
	gateway string
	client  authv3.AuthorizationClient
	partner http.Handler
}

func newEnvoy(t *testing.T, text string) *envoy {
	t.Helper()
	b := bootstrap(t, text)
	manager := unpack(t, b.GetStaticResources().GetListeners()[0].GetFilterChains()[0].GetFilters()[0].GetTypedConfig(), &hcmv3.HttpConnectionManager{})
	var names []string
	for _, filter := range manager.GetHttpFilters() {
		names = append(names, strings.TrimPrefix(filter.GetName(), "envoy.filters.http."))
	}
	if want := []string{"buffer", "ext_authz", "router"}; !slices.Equal(names, want) {
		t.Fatalf("the filters are %q, want %q", names, want)
	}
	unpack(t, manager.GetHttpFilters()[0].GetTypedConfig(), &bufferv3.Buffer{})
	clusters := map[string]string{}
	for _, c := range b.GetStaticResources().GetClusters() {
		clusters[c.GetName()] = addressOf(c)
	}
	e := &envoy{
		filter: unpack(t, manager.GetHttpFilters()[1].GetTypedConfig(), &extauthzv3.ExtAuthz{}),
		route:  manager.GetRouteConfig().GetVirtualHosts()[0],
	}
	e.partner = httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: clusters[e.route.GetRoutes()[0].GetRoute().GetCluster()]})
	name := e.filter.GetHttpService().GetServerUri().GetCluster()
	if service := e.filter.GetGrpcService().GetEnvoyGrpc(); service != nil {
		name = service.GetClusterName()
		conn, err := grpc.NewClient("passthrough:///"+clusters[name], grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		e.client = authv3.NewAuthorizationClient(conn)
	}
	e.gateway = clusters[name]
	return e
}

func addressOf(c *clusterv3.Cluster) string {
	a := c.GetLoadAssignment().GetEndpoints()[0].GetLbEndpoints()[0].GetEndpoint().GetAddress().GetSocketAddress()
	return net.JoinHostPort(a.GetAddress(), strconv.Itoa(int(a.GetPortValue())))
}

// checkRequest is what Envoy sends over gRPC: names in lower case, repeated
// headers joined by a comma, the pseudo-headers of HTTP/2 among them.
func checkRequest(r *http.Request) *authv3.CheckRequest {
	headers := map[string]string{":authority": r.Host, ":method": r.Method, ":path": r.RequestURI, ":scheme": "http", "x-forwarded-proto": "http", "x-request-id": "1"}
	for name, values := range r.Header {
		headers[strings.ToLower(name)] = strings.Join(values, ",")
	}
	return &authv3.CheckRequest{Attributes: &authv3.AttributeContext{Request: &authv3.AttributeContext_Request{Http: &authv3.AttributeContext_HttpRequest{
		Id: "1", Method: r.Method, Path: r.RequestURI, Host: r.Host, Scheme: "http", Protocol: r.Proto, Size: r.ContentLength, Headers: headers,
	}}}}
}

func (e *envoy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	r.Header.Del("Connection")
	passes := false
	if e.client != nil {
		passes, err = e.askGRPC(w, r)
	} else {
		passes, err = e.askHTTP(w, r)
	}
	switch {
	case err != nil && !e.filter.GetFailureModeAllow():
		w.WriteHeader(int(e.filter.GetStatusOnError().GetCode()))
	case err != nil || passes:
		for _, name := range e.route.GetRequestHeadersToRemove() {
			r.Header.Del(name)
		}
		e.partner.ServeHTTP(w, r)
	}
}

// askGRPC asks by RPC: an error of it is the filter's, a status other than OK
// a refusal.
func (e *envoy) askGRPC(w http.ResponseWriter, r *http.Request) (passes bool, err error) {
	ctx, cancel := context.WithTimeout(r.Context(), e.filter.GetGrpcService().GetTimeout().AsDuration())
	defer cancel()
	answer, err := e.client.Check(ctx, checkRequest(r))
	if err != nil {
		return false, err
	}
	if answer.GetStatus().GetCode() == int32(codes.OK) {
		for _, h := range answer.GetOkResponse().GetHeaders() {
			r.Header.Set(h.GetHeader().GetKey(), h.GetHeader().GetValue())
		}
		for _, name := range answer.GetOkResponse().GetHeadersToRemove() {
			r.Header.Del(name)
		}
		return true, nil
	}
	denied := answer.GetDeniedResponse()
	for _, h := range denied.GetHeaders() {
		w.Header().Set(h.GetHeader().GetKey(), h.GetHeader().GetValue())
	}
	w.WriteHeader(int(denied.GetStatus().GetCode()))
	_, _ = io.WriteString(w, denied.GetBody())
	return false, nil
}

// askHTTP asks with the call's method and path, and of its headers those that
// the configuration names and Authorization: 200 passes, 5xx is an error, and
// anything else a refusal, sent on with all its headers.
func (e *envoy) askHTTP(w http.ResponseWriter, r *http.Request) (passes bool, err error) {
	service := e.filter.GetHttpService()
	ctx, cancel := context.WithTimeout(r.Context(), service.GetServerUri().GetTimeout().AsDuration())
	defer cancel()
	ask, err := http.NewRequestWithContext(ctx, r.Method, "http://"+e.gateway+service.GetPathPrefix()+r.RequestURI, nil)
	if err != nil {
		return false, err
	}
	ask.Host = r.Host
	for name, values := range r.Header {
		if matches(e.filter.GetAllowedHeaders(), name) || name == "Authorization" {
			ask.Header[name] = []string{strings.Join(values, ",")}
		}
	}
	answer, err := http.DefaultClient.Do(ask)
	if err != nil {
		return false, err
	}
	defer func() { _ = answer.Body.Close() }()
	switch {
	case answer.StatusCode >= http.StatusInternalServerError:
		return false, fmt.Errorf("status %d", answer.StatusCode)
	case answer.StatusCode == http.StatusOK:
		for name, values := range answer.Header {
			if matches(service.GetAuthorizationResponse().GetAllowedUpstreamHeaders(), name) {
				r.Header[name] = values
			}
		}
		return true, nil
	}
	for name, values := range answer.Header {
		w.Header()[name] = values
	}
	w.WriteHeader(answer.StatusCode)
	_, _ = io.Copy(w, answer.Body)
	return false, nil
}

func matches(list *matcherv3.ListStringMatcher, name string) bool {
	return slices.ContainsFunc(list.GetPatterns(), func(p *matcherv3.StringMatcher) bool {
		wanted, name := p.GetExact()+p.GetPrefix(), strings.ToLower(name)
		return p.GetExact() != "" && name == wanted || p.GetPrefix() != "" && strings.HasPrefix(name, wanted)
	})
}

func openEnvoy(file string, overHTTP bool) open {
	return func(t *testing.T, decision, extAuthz, partner string) door {
		t.Helper()
		asked, port, undecided := extAuthz, "9090", gateway.Undecided
		if overHTTP {
			// Envoy makes its own answer of the gateway's 503.
			asked, port, undecided = decision, "9080", ""
		}
		place := func(address string) string {
			host, port, err := net.SplitHostPort(address)
			if err != nil {
				t.Fatal(err)
			}
			return fmt.Sprintf("{address: %s, port_value: %s}", host, port)
		}
		server := httptest.NewServer(newEnvoy(t, configure(t, file,
			"{address: 127.0.0.1, port_value: "+port+"}", place(asked), "{address: 127.0.0.1, port_value: 9002}", place(partner))))
		t.Cleanup(server.Close)
		return door{
			address:   server.Listener.Addr().String(),
			forged:    "Forged",
			undecided: outcome{status: http.StatusServiceUnavailable, reason: undecided},
			silent:    outcome{status: http.StatusServiceUnavailable},
			differs: map[string]outcome{
				// Envoy takes Connection off, and drops nothing that it names.
				"named by Connection": passes("43"),
				// It joins repeated headers.
				"token repeated":                     {status: http.StatusForbidden, reason: fence.MalformedToken},
				"stale token beside the current one": {status: http.StatusForbidden, reason: fence.MalformedToken},
			},
		}
	}
}

var (
	envoyGRPC = openEnvoy("envoy.yaml", false)
	envoyHTTP = openEnvoy("envoy-http.yaml", true)
)

func TestEnvoyGRPC(t *testing.T)        { testDoor(t, envoyGRPC) }
func TestEnvoyGRPCFailing(t *testing.T) { testFailing(t, envoyGRPC) }
func TestEnvoyHTTP(t *testing.T)        { testDoor(t, envoyHTTP) }
func TestEnvoyHTTPFailing(t *testing.T) { testFailing(t, envoyHTTP) }

// TestEnvoyGRPCErrors: no call passes where the RPC itself ends with an error.
func TestEnvoyGRPCErrors(t *testing.T) {
	f := newFixture(t)
	for _, code := range []codes.Code{codes.Unavailable, codes.Internal, codes.Unimplemented, codes.DeadlineExceeded, codes.PermissionDenied} {
		failing := grpc.NewServer(grpc.UnknownServiceHandler(func(any, grpc.ServerStream) error { return rpcstatus.Error(code, "failing") }))
		listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		served := make(chan error, 1)
		go func() { served <- failing.Serve(listener) }()
		d := envoyGRPC(t, listener.Addr().String(), listener.Addr().String(), f.partner.address)
		if got := f.call(t, d, http.MethodPost, f.head("42")); got != d.silent {
			t.Errorf("%s: %+v, want %+v", code, got, d.silent)
		}
		failing.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	}
}

// TestEnvoyCheck: what Envoy gets for a call is this, byte for byte, and never
// an error of the RPC, which Envoy may be told to let pass.
func TestEnvoyCheck(t *testing.T) {
	f := newFixture(t)
	conn, err := grpc.NewClient("passthrough:///"+f.extAuthz, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	client := authv3.NewAuthorizationClient(conn)
	lease := f.namespace + "/payments"
	set := func(name, value string) *corev3.HeaderValueOption {
		return &corev3.HeaderValueOption{Header: &corev3.HeaderValue{Key: name, Value: value}, AppendAction: corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD}
	}
	denied := func(code codes.Code, http typev3.StatusCode, title string, reason fence.Reason, detail string, more ...*corev3.HeaderValueOption) *authv3.CheckResponse {
		quoted, err := json.Marshal(detail)
		if err != nil {
			t.Fatal(err)
		}
		return &authv3.CheckResponse{
			Status: &status.Status{Code: int32(code), Message: detail},
			HttpResponse: &authv3.CheckResponse_DeniedResponse{DeniedResponse: &authv3.DeniedHttpResponse{
				Status: &typev3.HttpStatus{Code: http},
				Headers: append([]*corev3.HeaderValueOption{
					set("cache-control", "no-store"), set("content-type", "application/problem+json"), set("fencing-reason", string(reason)),
				}, more...),
				Body: fmt.Sprintf(`{"type":"tag:fencedlease.io,2026:%[1]s","title":%[2]q,"status":%[3]d,"detail":%[4]s,"reason":"%[1]s"}`+"\n", reason, title, http, quoted),
			}},
		}
	}
	check := func(name string, want *authv3.CheckResponse, headers ...string) {
		t.Helper()
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/capture", nil)
		for i := 0; i < len(headers); i += 2 {
			r.Header.Add(headers[i], headers[i+1])
		}
		got, err := client.Check(t.Context(), checkRequest(r))
		if err != nil {
			t.Errorf("%s: %v", name, err)
			return
		}
		if got, want := wire(t, got), wire(t, want); got != want {
			t.Errorf("%s (-want +got):\n%s", name, cmp.Diff(want, got))
		}
		if err := valid(got); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	check("allowed", &authv3.CheckResponse{
		Status: &status.Status{Code: int32(codes.OK)},
		HttpResponse: &authv3.CheckResponse_OkResponse{OkResponse: &authv3.OkHttpResponse{
			Headers:         []*corev3.HeaderValueOption{set("fencing-lease", lease), set("fencing-token", "42"), set("fencing-key", lease)},
			HeadersToRemove: []string{"fencing-authorization"},
		}},
	}, "Fencing-Lease", lease, "Fencing-Token", "42", "Fencing-Authorization", f.bearer)
	check("stale", denied(codes.PermissionDenied, 403, "Forbidden", fence.StaleToken,
		"StaleToken: ["+lease+"] token 41 is stale; recorded 42, current 42, held by nobody; stop: a newer holder has written here"),
		"Fencing-Lease", lease, "Fencing-Token", "41", "Fencing-Authorization", f.bearer)
	check("malformed", denied(codes.PermissionDenied, 403, "Forbidden", gateway.MalformedRequest, `MalformedRequest: header Fencing-Lease is "payments": it must be <namespace>/<name>`),
		"Fencing-Lease", "payments", "Fencing-Token", "42", "Fencing-Authorization", f.bearer)
	check("unauthenticated", denied(codes.Unauthenticated, 401, "Unauthorized", gateway.Unauthenticated, "Unauthenticated: send Fencing-Authorization: Bearer <service account token>",
		set("www-authenticate", `Bearer realm="fencedlease", header="Fencing-Authorization"`)),
		"Fencing-Lease", lease, "Fencing-Token", "42")

	f.api.set(true)
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/capture", nil)
	for _, line := range f.head("43") {
		name, value, _ := strings.Cut(line, ": ")
		r.Header.Set(name, value)
	}
	got, err := client.Check(t.Context(), checkRequest(r))
	if err != nil {
		t.Fatal(err)
	}
	want := denied(codes.Unavailable, 503, "Service Unavailable", gateway.Undecided, got.GetStatus().GetMessage())
	if diff := cmp.Diff(wire(t, want), wire(t, got)); diff != "" {
		t.Errorf("undecided (-want +got):\n%s", diff)
	}
}

func wire(t *testing.T, m proto.Message) string {
	t.Helper()
	data, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}
