// Package decision tests the gateway's decision service behind the proxies that
// ask it, with the configuration files that the documentation shows: NGINX for
// real, Envoy and Traefik as their own documentation and source say that they
// ask and act.
package decision

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/gateway"
	"github.com/fencedlease/fencedlease/test/env"
)

func TestMain(m *testing.M) { os.Exit(env.Main(m)) }

var cluster = env.Shared(env.Options{})

// patience bounds what a test waits for that has to come.
const patience = 30 * time.Second

// fixture is a lease with current token 42, a caller that may use it, a
// partner, and a gateway between them.
type fixture struct {
	e         *env.Environment
	namespace string
	lease     *v1alpha1.FencedLease
	// bearer is the caller's.
	bearer  string
	partner *partner
	// decision and extAuthz are where the gateway listens.
	decision, extAuthz string
	api                *cable
	stop               func()
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	f := &fixture{e: cluster(t), partner: newPartner(t), api: &cable{}}
	f.namespace = f.e.Namespace(t)
	f.lease = &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: f.namespace, Name: "payments"}}
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: f.namespace, Name: "worker"}}
	for _, err := range []error{f.e.Admin.Create(t.Context(), f.lease), f.e.Admin.Create(t.Context(), account)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	f.issue(t, 42)
	f.e.Grant(t, f.namespace, "system:serviceaccount:"+f.namespace+":worker",
		rbacv1.PolicyRule{APIGroups: []string{fence.Group}, Resources: []string{"fencedleases"}, ResourceNames: []string{"payments"}, Verbs: []string{fence.VerbUse}})
	request := &authenticationv1.TokenRequest{}
	if err := f.e.Admin.SubResource("token").Create(t.Context(), account, request); err != nil {
		t.Fatal(err)
	}
	f.bearer = "Bearer " + request.Status.Token

	o := gateway.Defaults()
	o.ProxyAddress, o.MetricsAddress, o.ProbeAddress = "", "", ""
	o.DecisionAddress, o.ExtAuthzAddress = "127.0.0.1:0", "127.0.0.1:0"
	o.LedgerFile, o.AuthorityMaxAge = filepath.Join(t.TempDir(), "ledger"), 100*time.Millisecond
	cfg := rest.CopyConfig(f.e.Config)
	cfg.Dial = f.api.dial
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	listening, done := make(chan net.Addr, 2), make(chan error, 1)
	go func() {
		done <- gateway.Run(ctx, cfg, o, io.Discard, func(_ string, a net.Addr) { listening <- a })
	}()
	f.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("the gateway ended with %v", err)
		}
	})
	t.Cleanup(f.stop)
	for _, address := range []*string{&f.decision, &f.extAuthz} {
		select {
		case a := <-listening:
			*address = a.String()
		case err := <-done:
			done <- nil
			t.Fatalf("the gateway ended: %v", err)
		}
	}
	return f
}

// issue makes a token the lease's current one.
func (f *fixture) issue(t *testing.T, token int64) {
	t.Helper()
	f.lease.Status.Token = token
	if err := f.e.Admin.Status().Update(t.Context(), f.lease); err != nil {
		t.Fatal(err)
	}
}

// cable leads to the API server, until it is cut.
type cable struct {
	mu    sync.Mutex
	cut   bool
	conns []net.Conn
}

func (c *cable) dial(ctx context.Context, network, address string) (net.Conn, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cut {
		return nil, errors.New("the cable is cut")
	}
	conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
	c.conns = append(c.conns, conn)
	return conn, err
}

func (c *cable) set(cut bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cut = cut
	for _, conn := range c.conns {
		_ = conn.Close()
	}
	c.conns = nil
}

// partner keeps the headers of the calls that arrived.
type partner struct {
	address string
	// breaks ends the connection of a call instead of answering it.
	breaks atomic.Bool

	mu      sync.Mutex
	arrived []http.Header
}

func newPartner(t *testing.T) *partner {
	t.Helper()
	p := &partner{}
	server := httptest.NewServer(p)
	t.Cleanup(server.Close)
	p.address = server.Listener.Addr().String()
	return p
}

func (p *partner) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p.mu.Lock()
	p.arrived = append(p.arrived, r.Header.Clone())
	p.mu.Unlock()
	if p.breaks.Load() {
		panic(http.ErrAbortHandler)
	}
	w.Header().Set(gateway.HeaderReason, "Forged")
	_, _ = io.Copy(w, r.Body)
}

// calls gives what arrived since the last time.
func (p *partner) calls() []http.Header {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := p.arrived
	p.arrived = nil
	return all
}

// door is a proxy that asks the gateway before it lets a call through to the
// partner.
type door struct {
	// address is where callers come.
	address string
	// undecided is what a caller gets where the gateway says that it could not
	// decide, silent where the gateway does not answer.
	undecided, silent outcome
	// forged is what a caller gets of a reason that the partner puts into its
	// answer. Empty where the proxy takes it off.
	forged fence.Reason
	// differs has the outcomes of the cases in which the proxy changes the call
	// before it asks.
	differs map[string]outcome
	// failing has what a caller gets, where that is not silent, of a gateway
	// that fails.
	failing map[string]outcome
}

// open starts a proxy with the shipped configuration, its addresses changed.
type open func(t *testing.T, decision, extAuthz, partner string) door

// outcome is what becomes of a call.
type outcome struct {
	status int
	reason fence.Reason
	// token is that of what arrived at the partner.
	token string
}

func passes(token string) outcome { return outcome{status: http.StatusOK, token: token} }

// call sends a call through a proxy, and looks at what the partner got.
func (f *fixture) call(t *testing.T, d door, method string, head []string) outcome {
	t.Helper()
	got := send(t, d.address, method, head, nil)
	arrived := f.partner.calls()
	for _, h := range arrived {
		// Whatever came, the partner gets what was judged, and no credential.
		if len(arrived) > 1 || len(h[fence.HeaderToken]) != 1 || len(h[fence.HeaderKey]) != 1 ||
			!slices.Equal(h[fence.HeaderLease], []string{f.namespace + "/payments"}) ||
			len(h[fence.HeaderAuthorization]) > 0 || len(h["Fencing_token"]) > 0 {
			t.Errorf("the partner got %d calls, the last with %q", len(arrived), slices.Sorted(maps.Keys(h)))
		}
		got.token += h.Get(fence.HeaderToken)
	}
	return got
}

// send sends lines of a request's head as they are, lets write send its body,
// and reads the answer.
func send(t *testing.T, address, method string, head []string, write func(io.Writer)) outcome {
	t.Helper()
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Fprintf(conn, "%s /v1/capture?order=7 HTTP/1.1\r\nHost: pay.example.com\r\n%s\r\n\r\n", method, strings.Join(head, "\r\n")); err != nil {
		t.Fatal(err)
	}
	if write != nil {
		write(conn)
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), &http.Request{Method: method})
	if err != nil {
		t.Fatalf("no answer to %q: %v", head, err)
	}
	defer func() { _ = resp.Body.Close() }()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		t.Fatal(err)
	}
	return outcome{status: resp.StatusCode, reason: fence.Reason(resp.Header.Get(gateway.HeaderReason))}
}

// configure writes a shipped configuration file with other text in some of its
// places, each of which it must have once.
func configure(t *testing.T, name string, places ...string) string {
	t.Helper()
	data, err := os.ReadFile("../../docs/examples/gateway/" + name)
	if err != nil {
		t.Fatal(err)
	}
	text := string(data)
	for i := 0; i < len(places); i += 2 {
		if n := strings.Count(text, places[i]); n != 1 {
			t.Fatalf("%s has %q %d times", name, places[i], n)
		}
		text = strings.Replace(text, places[i], places[i+1], 1)
	}
	return text
}

// eventually waits for a condition that has to come.
func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !condition() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("not in %s: %s", patience, what)
		}
	}
}

// head gives the lines of a call with a token, and more of them.
func (f *fixture) head(token string, more ...string) []string {
	return append([]string{
		"Content-Length: 0", fence.HeaderAuthorization + ": " + f.bearer,
		fence.HeaderLease + ": " + f.namespace + "/payments", fence.HeaderToken + ": " + token,
	}, more...)
}

// testDoor lets every kind of call come to a proxy. The order of the cases is
// that of a hand-over.
func testDoor(t *testing.T, start open) {
	t.Helper()
	f := newFixture(t)
	d := start(t, f.decision, f.extAuthz, f.partner.address)
	lease := f.namespace + "/payments"
	// A call that says only what is given.
	bare := func(lines ...string) []string {
		return append([]string{"Content-Length: 0", fence.HeaderAuthorization + ": " + f.bearer}, lines...)
	}
	type headers = []string
	refused := func(reason fence.Reason) outcome { return outcome{status: http.StatusForbidden, reason: reason} }
	for _, c := range []struct {
		name  string
		issue int64
		head  headers
		want  outcome
	}{
		{"fresh", 0, f.head("42"), passes("42")},
		{"equal", 0, f.head("42"), passes("42")},
		{"stale", 0, f.head("41"), refused(fence.StaleToken)},
		{"unissued", 0, f.head("43"), refused(fence.UnissuedToken)},
		{"fresh after a hand-over", 43, f.head("43"), passes("43")},
		{"stale after a hand-over", 0, f.head("42"), refused(fence.StaleToken)},
		{"stale under another key", 0, f.head("42", "Fencing-Key: other"), refused(fence.StaleToken)},
		{"with a key", 0, f.head("43", "Fencing-Key: order-7"), passes("43")},
		{"in lower case", 0, bare("fencing-lease: "+lease, "fencing-token: 43"), passes("43")},
		{"no token", 0, bare("Fencing-Lease: " + lease), refused(fence.Unstamped)},
		{"no lease", 0, bare("Fencing-Token: 43"), refused(fence.Unstamped)},
		{"nothing", 0, bare(), refused(fence.Unstamped)},
		{"malformed token", 0, f.head("043"), refused(fence.MalformedToken)},
		{"empty token", 0, f.head(""), refused(fence.MalformedToken)},
		{"malformed lease", 0, bare("Fencing-Lease: payments", "Fencing-Token: 43"), refused(gateway.MalformedRequest)},
		{"token repeated", 0, f.head("43", "Fencing-Token: 43"), refused(gateway.MalformedRequest)},
		{"stale token beside the current one", 0, f.head("43", "Fencing-Token: 42"), refused(gateway.MalformedRequest)},
		{"lease repeated", 0, f.head("43", "Fencing-Lease: "+lease), refused(gateway.MalformedRequest)},
		{"tokens joined by a comma", 0, f.head("42, 43"), refused(fence.MalformedToken)},
		{"leases joined by a comma", 0, bare("Fencing-Lease: "+lease+","+lease, "Fencing-Token: 43"), refused(gateway.MalformedRequest)},
		{"underscore", 0, bare("Fencing-Lease: "+lease, "Fencing_Token: 43"), refused(gateway.MalformedRequest)},
		{"underscore beside the header", 0, f.head("43", "Fencing_Token: 42"), refused(gateway.MalformedRequest)},
		{"named by Connection", 0, f.head("43", "Connection: Fencing-Token"), refused(gateway.MalformedRequest)},
		{"no bearer token", 0, headers{"Content-Length: 0", "Fencing-Lease: " + lease, "Fencing-Token: 43"}, outcome{status: http.StatusUnauthorized, reason: gateway.Unauthenticated}},
		{"another's lease", 0, bare("Fencing-Lease: default/payments", "Fencing-Token: 43"), refused(gateway.NotAllowed)},
	} {
		if c.issue != 0 {
			f.issue(t, c.issue)
		}
		if differs, ok := d.differs[c.name]; ok {
			c.want = differs
		}
		if c.want.token != "" {
			c.want.reason = d.forged
		}
		for _, method := range []string{http.MethodPost, http.MethodGet, http.MethodDelete} {
			if got := f.call(t, d, method, c.head); got != c.want {
				t.Errorf("%s, %s: %+v, want %+v", c.name, method, got, c.want)
			}
		}
	}

	f.api.set(true)
	eventually(t, "undecided with the API gone", func() bool { return f.call(t, d, http.MethodPost, f.head("43")) == d.undecided })
	for _, token := range []string{"42", "43", "44"} {
		if got := f.call(t, d, http.MethodPost, f.head(token)); got != d.undecided {
			t.Errorf("%s with the API gone: %+v, want %+v", token, got, d.undecided)
		}
	}
	f.api.set(false)
	if got := f.call(t, d, http.MethodPost, f.head("43")); got.token != "43" {
		t.Errorf("with the API back: %+v", got)
	}

	f.stop()
	if got := f.call(t, d, http.MethodPost, f.head("43")); got != d.silent {
		t.Errorf("without the gateway: %+v, want %+v", got, d.silent)
	}
}

// testFailing: no call passes where the gateway hangs, breaks off or answers
// what it never would.
func testFailing(t *testing.T, start open) {
	t.Helper()
	f := newFixture(t)
	ended := make(chan struct{})
	for name, answer := range map[string]http.HandlerFunc{
		"hangs":       func(http.ResponseWriter, *http.Request) { <-ended },
		"breaks off":  func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
		"answers 500": func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusInternalServerError) },
		"answers 502": func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusBadGateway) },
		"answers no HTTP": func(w http.ResponseWriter, _ *http.Request) {
			conn, _, err := http.NewResponseController(w).Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			_, _ = io.WriteString(conn, "SSH-2.0-OpenSSH\r\n")
			_ = conn.Close()
		},
	} {
		failing := httptest.NewServer(answer)
		t.Cleanup(failing.Close)
		address := failing.Listener.Addr().String()
		d := start(t, address, address, f.partner.address)
		want := d.silent
		if failing, ok := d.failing[name]; ok {
			want = failing
		}
		if got := f.call(t, d, http.MethodPost, f.head("42")); got != want {
			t.Errorf("the gateway %s: %+v, want %+v", name, got, want)
		}
	}
	close(ended)
}
