package gateway

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"net/http"

	"k8s.io/utils/clock"

	"github.com/fencedlease/fencedlease/fence"
)

// Decider tells other proxies whether a call may pass: NGINX's auth_request,
// Traefik's ForwardAuth, Envoy's ext_authz over HTTP. It answers 200, and with
// it the headers that were judged, for the proxy to pass on in the place of what
// came; or 401, 403 or 503.
//
// It does not see calls end, so that it does not keep the order of those in
// flight.
type Decider struct {
	gate     *Gate
	observer *observer
	clock    clock.Clock
}

var _ http.Handler = (*Decider)(nil)

// ServeHTTP decides on the call whose headers the request carries.
func (d *Decider) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c, problem := d.decide(r.Context(), surfaceHTTP, r.Method, request{r.Header, peerCertificate(r.TLS)}, r.Trailer)
	if problem != nil {
		problem.write(w)
		return
	}
	c.setJudged(w.Header())
	w.WriteHeader(http.StatusOK)
}

func (d *Decider) decide(ctx context.Context, surface, method string, r request, trailers http.Header) (call, *Problem) {
	began := d.clock.Now()
	var who caller
	c, problem := readCall(r.header, trailers)
	if problem == nil {
		_, who, problem = d.gate.admit(ctx, c, r)
	}
	status, reason := http.StatusOK, fence.Reason("")
	if problem != nil {
		problem = problem.decision()
		status, reason = problem.Status, problem.Reason
	}
	took := d.clock.Since(began)
	d.observer.decided(surface, problem, took)
	d.observer.log(surface, c, who, method, status, reason, took)
	return c, problem
}

func peerCertificate(state *tls.ConnectionState) *x509.Certificate {
	if state == nil || len(state.VerifiedChains) == 0 {
		return nil
	}
	return state.VerifiedChains[0][0]
}
