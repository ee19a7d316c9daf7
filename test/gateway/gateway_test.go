// Package gateway tests the side-effect gateway against the real API server:
// who may call, which tokens are current, and what happens without the API.
package gateway

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
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

// api has the API server alone: tests issue tokens as the operator would.
var api = env.Shared(env.Options{})

const patience = time.Minute

// account is the gateway's own, with the least that it needs.
func account(t *testing.T, e *env.Environment) *rest.Config {
	t.Helper()
	const name = "gateway"
	e.Grant(t, "", name,
		rbacv1.PolicyRule{APIGroups: []string{fence.Group}, Resources: []string{"fencedleases"}, Verbs: []string{"get", "list", "watch"}},
		rbacv1.PolicyRule{APIGroups: []string{"authentication.k8s.io"}, Resources: []string{"tokenreviews"}, Verbs: []string{"create"}},
		rbacv1.PolicyRule{APIGroups: []string{"authorization.k8s.io"}, Resources: []string{"subjectaccessreviews"}, Verbs: []string{"create"}})
	return e.UserConfig(t, name)
}

// running is a gateway under test, with a partner that counts.
type running struct {
	proxy, probe string
	reached      atomic.Int64
}

func start(t *testing.T, cfg *rest.Config, changes ...func(*gateway.Options)) *running {
	t.Helper()
	g := &running{}
	partner := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { g.reached.Add(1) }))
	t.Cleanup(partner.Close)
	o := gateway.Defaults()
	o.ProxyAddress, o.ProbeAddress, o.MetricsAddress = "127.0.0.1:0", "127.0.0.1:0", ""
	o.Upstream, o.LedgerFile = partner.URL, filepath.Join(t.TempDir(), "ledger")
	o.Authentication = gateway.AuthenticationNone
	for _, change := range changes {
		change(&o)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	type service struct{ flag, address string }
	services, done := make(chan service, 2), make(chan error, 1)
	go func() {
		done <- gateway.Run(ctx, cfg, o, io.Discard, func(flag string, a net.Addr) { services <- service{flag, a.String()} })
	}()
	for range 2 {
		select {
		case s := <-services:
			if s.flag == "proxy-bind-address" {
				g.proxy = s.address
			} else {
				g.probe = s.address
			}
		case err := <-done:
			cancel()
			t.Fatalf("the gateway ended: %v", err)
		}
	}
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("the gateway ended with %v", err)
		}
	})
	return g
}

// answer is the status and the reason of a problem; message is its detail.
type answer struct {
	status  int
	reason  fence.Reason
	message string
}

func (g *running) call(t *testing.T, lease string, token int64, header http.Header) answer {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+g.proxy+"/capture", nil)
	if err != nil {
		t.Fatal(err)
	}
	if header != nil {
		req.Header = header.Clone()
	}
	req.Header[fence.HeaderLease] = []string{lease}
	req.Header[fence.HeaderToken] = []string{strconv.FormatInt(token, 10)}
	before := g.reached.Load()
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	var problem struct {
		Reason fence.Reason `json:"reason"`
		Detail string       `json:"detail"`
	}
	var body bytes.Buffer
	if _, err := body.ReadFrom(resp.Body); err != nil {
		t.Fatal(err)
	}
	if body.Len() > 0 {
		if err := json.Unmarshal(body.Bytes(), &problem); err != nil {
			t.Fatal(err)
		}
	}
	if arrived := g.reached.Load() > before; arrived != (resp.StatusCode == http.StatusOK) {
		t.Errorf("status %d, and it arrived: %t", resp.StatusCode, arrived)
	}
	if resp.StatusCode == http.StatusUnauthorized && !strings.Contains(resp.Header.Get("WWW-Authenticate"), fence.HeaderAuthorization) {
		t.Errorf("401 says %q", resp.Header.Get("WWW-Authenticate"))
	}
	return answer{resp.StatusCode, problem.Reason, problem.Detail}
}

func (g *running) expect(t *testing.T, what, lease string, token int64, header http.Header, status int, reason fence.Reason) {
	t.Helper()
	if a := g.call(t, lease, token, header); a.status != status || a.reason != reason {
		t.Errorf("%s: %d %s, want %d %s: %s", what, a.status, a.reason, status, reason, a.message)
	}
}

func (g *running) ready(t *testing.T) int {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+g.probe+"/readyz", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	return resp.StatusCode
}

func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	limit := time.After(patience)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !condition() {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatalf("not in %s: %s", patience, what)
		}
	}
}

// makeLease makes a lease with a current token, held unless its spec says
// that who holds matters.
func makeLease(t *testing.T, e *env.Environment, namespace, name string, token int64, spec v1alpha1.FencedLeaseSpec, user string) *v1alpha1.FencedLease {
	t.Helper()
	lease := &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Spec: spec}
	if err := e.Admin.Create(t.Context(), lease); err != nil {
		t.Fatal(err)
	}
	issue(t, e, lease, token, user)
	return lease
}

// issue makes a token the current one. It is held where a user is named.
func issue(t *testing.T, e *env.Environment, lease *v1alpha1.FencedLease, token int64, user string) {
	t.Helper()
	lease.Status.Token, lease.Status.Holder = token, nil
	if user != "" {
		lease.Status.Holder = &v1alpha1.Holder{ClaimName: "claim", ClaimUID: strconv.FormatInt(token, 10), Identity: "worker", User: &v1alpha1.ClaimUser{Username: user}}
	}
	if err := e.Admin.Status().Update(t.Context(), lease); err != nil {
		t.Fatal(err)
	}
}

// bearer gives the header with a token of a service account, which it makes.
func bearer(t *testing.T, e *env.Environment, namespace, name string, audiences ...string) http.Header {
	t.Helper()
	sa := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	_ = e.Admin.Create(t.Context(), sa.DeepCopy()) // it may be there
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{Audiences: audiences}}
	if err := e.Admin.SubResource("token").Create(t.Context(), sa, request); err != nil {
		t.Fatal(err)
	}
	return http.Header{fence.HeaderAuthorization: {"Bearer " + request.Status.Token}}
}

func mayUse(names ...string) rbacv1.PolicyRule {
	return rbacv1.PolicyRule{APIGroups: []string{fence.Group}, Resources: []string{"fencedleases"}, ResourceNames: names, Verbs: []string{fence.VerbUse}}
}

// TestBearerTokens: a caller is who the API server says that its token is, and
// may use the leases that RBAC gives it the verb use on.
func TestBearerTokens(t *testing.T) {
	e := api(t)
	namespace := e.Namespace(t)
	user := func(name string) string { return "system:serviceaccount:" + namespace + ":" + name }
	orders, mail, bound := namespace+"/orders", namespace+"/mail", namespace+"/bound"
	makeLease(t, e, namespace, "orders", 42, v1alpha1.FencedLeaseSpec{}, user("alice"))
	makeLease(t, e, namespace, "mail", 42, v1alpha1.FencedLeaseSpec{}, user("alice"))
	makeLease(t, e, namespace, "bound", 42, v1alpha1.FencedLeaseSpec{HolderBinding: v1alpha1.HolderBindingUser}, user("alice"))
	e.Grant(t, namespace, user("alice"), mayUse("orders", "bound"))
	e.Grant(t, namespace, user("carol"), mayUse())
	// Reading a lease is not using it.
	e.Grant(t, namespace, user("bob"), rbacv1.PolicyRule{APIGroups: []string{fence.Group}, Resources: []string{"fencedleases"}, Verbs: []string{"get", "list", "update"}})
	alice := bearer(t, e, namespace, "alice")
	g := start(t, account(t, e), func(o *gateway.Options) { o.Authentication = gateway.AuthenticationToken })
	for _, c := range []struct {
		name, lease string
		token       int64
		header      http.Header
		status      int
		reason      fence.Reason
	}{
		{"who may use the lease", orders, 42, alice, http.StatusOK, ""},
		{"who may, with a stale token", orders, 41, alice, http.StatusForbidden, fence.StaleToken},
		{"who may use another lease", mail, 42, alice, http.StatusForbidden, gateway.NotAllowed},
		{"who may use all", mail, 42, bearer(t, e, namespace, "carol"), http.StatusOK, ""},
		{"who may read it", orders, 42, bearer(t, e, namespace, "bob"), http.StatusForbidden, gateway.NotAllowed},
		{"who may nothing learns no verdict", orders, 41, bearer(t, e, namespace, "dave"), http.StatusForbidden, gateway.NotAllowed},
		{"nobody", orders, 42, nil, http.StatusUnauthorized, gateway.Unauthenticated},
		{"a token that nobody signed", orders, 42, http.Header{fence.HeaderAuthorization: {"Bearer x.y.z"}}, http.StatusUnauthorized, gateway.Unauthenticated},
		{"a token for somebody else", orders, 42, bearer(t, e, namespace, "alice", "elsewhere"), http.StatusUnauthorized, gateway.Unauthenticated},
		{"another scheme", orders, 42, http.Header{fence.HeaderAuthorization: {"Basic YTpi"}}, http.StatusUnauthorized, gateway.Unauthenticated},
		{"no token behind the scheme", orders, 42, http.Header{fence.HeaderAuthorization: {"Bearer "}}, http.StatusUnauthorized, gateway.Unauthenticated},
		{"the header twice", orders, 42, http.Header{fence.HeaderAuthorization: {alice.Get(fence.HeaderAuthorization), "Bearer x"}}, http.StatusBadRequest, gateway.MalformedRequest},
		{"a token in the partner's header", orders, 42, http.Header{"Authorization": alice[fence.HeaderAuthorization]}, http.StatusUnauthorized, gateway.Unauthenticated},
		{"the account that a lease is bound to", bound, 42, alice, http.StatusOK, ""},
		{"another account with its token", bound, 42, bearer(t, e, namespace, "carol"), http.StatusForbidden, fence.NotHolder},
	} {
		g.expect(t, c.name, c.lease, c.token, c.header, c.status, c.reason)
	}

	t.Run("for an audience of its own", func(t *testing.T) {
		g := start(t, account(t, e), func(o *gateway.Options) {
			o.Authentication, o.TokenAudience = gateway.AuthenticationToken, "gateway.example.com"
		})
		g.expect(t, "a token for the gateway", orders, 42, bearer(t, e, namespace, "alice", "gateway.example.com"), http.StatusOK, "")
		g.expect(t, "a token for the API server", orders, 42, alice, http.StatusUnauthorized, gateway.Unauthenticated)
	})
	t.Run("by a list of its own", func(t *testing.T) {
		g := start(t, account(t, e), func(o *gateway.Options) {
			o.Authentication, o.Allow = gateway.AuthenticationToken, []string{user("bob") + "=" + orders}
		})
		g.expect(t, "who is listed", orders, 42, bearer(t, e, namespace, "bob"), http.StatusOK, "")
		g.expect(t, "who is not, though RBAC would", orders, 42, alice, http.StatusForbidden, gateway.NotAllowed)
	})
}

// TestAuthority: the lease in the API says which token is current.
func TestAuthority(t *testing.T) {
	e := api(t)
	namespace := e.Namespace(t)
	// No read confirms anything in time: the watch alone tells of a hand-over.
	g := start(t, account(t, e), func(o *gateway.Options) { o.AuthorityMaxAge = time.Hour })
	eventually(t, "the gateway is ready", func() bool { return g.ready(t) == http.StatusOK })

	for name, c := range map[string]struct {
		current int64
		spec    v1alpha1.FencedLeaseSpec
		user    string
		token   int64
		reason  fence.Reason
	}{
		"the current token":            {42, v1alpha1.FencedLeaseSpec{}, "alice", 42, ""},
		"an older one":                 {42, v1alpha1.FencedLeaseSpec{}, "alice", 41, fence.StaleToken},
		"one that nobody issued":       {42, v1alpha1.FencedLeaseSpec{}, "alice", 43, fence.UnissuedToken},
		"the highest, forged":          {42, v1alpha1.FencedLeaseSpec{}, "alice", int64(fence.MaxToken), fence.UnissuedToken},
		"a revoked one":                {42, v1alpha1.FencedLeaseSpec{MinToken: 50}, "alice", 42, fence.StaleToken},
		"the current one without":      {42, v1alpha1.FencedLeaseSpec{}, "", 42, ""},
		"the current one, but lapsed":  {42, v1alpha1.FencedLeaseSpec{LapsedWrites: v1alpha1.LapsedWritesDeny}, "", 42, fence.Lapsed},
		"a token of a bound lease":     {42, v1alpha1.FencedLeaseSpec{HolderBinding: v1alpha1.HolderBindingUser}, "alice", 42, fence.NotHolder},
		"a lease that issued none yet": {0, v1alpha1.FencedLeaseSpec{}, "", 1, fence.UnissuedToken},
	} {
		lease := &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, GenerateName: "table-"}, Spec: c.spec}
		if err := e.Admin.Create(t.Context(), lease); err != nil {
			t.Fatal(err)
		}
		if c.current > 0 {
			issue(t, e, lease, c.current, c.user)
		}
		status := http.StatusForbidden
		if c.reason == "" {
			status = http.StatusOK
		}
		// The first look is a live one, the second is not; both say the same.
		for range 2 {
			g.expect(t, name, namespace+"/"+lease.Name, c.token, nil, status, c.reason)
		}
	}
	g.expect(t, "a lease that does not exist", namespace+"/nothing", 1, nil, http.StatusForbidden, fence.UnknownLease)

	// A token counts as soon as it is issued, whatever the watch has brought: it
	// is read live, and so never unissued.
	lease := makeLease(t, e, namespace, "orders", 100, v1alpha1.FencedLeaseSpec{}, "alice")
	for token := int64(101); token < 120; token++ {
		issue(t, e, lease, token, "alice")
		g.expect(t, "a token just issued", namespace+"/orders", token, nil, http.StatusOK, "")
		g.expect(t, "its predecessor", namespace+"/orders", token-1, nil, http.StatusForbidden, fence.StaleToken)
	}
	// And it ends its predecessor though its own holder has not called yet.
	issue(t, e, lease, 200, "bob")
	began := time.Now()
	eventually(t, "the superseded token is stale", func() bool {
		return g.call(t, namespace+"/orders", 119, nil).reason == fence.StaleToken
	})
	t.Logf("stale %s after the issue", time.Since(began))
	g.expect(t, "the new one", namespace+"/orders", 200, nil, http.StatusOK, "")

	if err := e.Admin.Delete(t.Context(), lease); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a deleted lease's token is refused", func() bool {
		return g.call(t, namespace+"/orders", 200, nil).reason == fence.UnknownLease
	})
}

// relay stands between a gateway and the API server, and can be told to stop.
type relay struct {
	listener net.Listener
	target   string

	mu      sync.Mutex
	hanging bool
	open    map[net.Conn]struct{}
	wg      sync.WaitGroup
}

func newRelay(t *testing.T, cfg *rest.Config) (*relay, *rest.Config) {
	t.Helper()
	target, err := url.Parse(cfg.Host)
	if err != nil || target.Host == "" {
		target = &url.URL{Host: cfg.Host}
	}
	r := &relay{target: target.Host, open: map[net.Conn]struct{}{}}
	if r.listener, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	r.wg.Go(r.serve)
	t.Cleanup(func() {
		_ = r.listener.Close()
		r.stop(true)
		r.wg.Wait()
	})
	cfg = rest.CopyConfig(cfg)
	cfg.Host = "https://" + r.listener.Addr().String()
	return r, cfg
}

func (r *relay) serve() {
	for {
		conn, err := r.listener.Accept()
		if err != nil {
			return
		}
		r.mu.Lock()
		r.open[conn] = struct{}{}
		if r.hanging { // it is taken, and nothing comes of it
			r.mu.Unlock()
			continue
		}
		onward, err := net.Dial("tcp", r.target)
		if err != nil {
			_ = conn.Close()
			r.mu.Unlock()
			continue
		}
		r.open[onward] = struct{}{}
		r.mu.Unlock()
		for _, pair := range [][2]net.Conn{{conn, onward}, {onward, conn}} {
			r.wg.Go(func() {
				_, _ = io.Copy(pair[0], pair[1])
				_ = pair[0].Close()
			})
		}
	}
}

// stop breaks all connections; from then on new ones hang, or do not.
func (r *relay) stop(hanging bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.hanging = hanging
	for conn := range r.open {
		_ = conn.Close()
	}
	clear(r.open)
}

// TestWithoutAPI: a gateway that cannot ask the API answers 503 and lets
// nothing out, until it can.
func TestWithoutAPI(t *testing.T) {
	e := api(t)
	namespace := e.Namespace(t)
	user := "system:serviceaccount:" + namespace + ":alice"
	name := namespace + "/orders"
	lease := makeLease(t, e, namespace, "orders", 42, v1alpha1.FencedLeaseSpec{}, user)
	e.Grant(t, namespace, user, mayUse("orders"))
	relay, cfg := newRelay(t, account(t, e))
	g := start(t, cfg, func(o *gateway.Options) { o.AuthorityMaxAge = 100 * time.Millisecond })
	callers := start(t, cfg, func(o *gateway.Options) { o.Authentication = gateway.AuthenticationToken })
	g.expect(t, "with the API", name, 42, nil, http.StatusOK, "")

	relay.stop(true)
	eventually(t, "what the watch told before no longer counts", func() bool {
		return g.call(t, name, 42, nil).status == http.StatusServiceUnavailable
	})
	g.expect(t, "the recorded token", name, 42, nil, http.StatusServiceUnavailable, gateway.Undecided)
	g.expect(t, "a newer one", name, 43, nil, http.StatusServiceUnavailable, gateway.Undecided)
	g.expect(t, "another lease", namespace+"/mail", 1, nil, http.StatusServiceUnavailable, gateway.Undecided)
	callers.expect(t, "a caller that nobody can review", name, 42, bearer(t, e, namespace, "alice"), http.StatusServiceUnavailable, gateway.Undecided)
	issue(t, e, lease, 43, user)

	relay.stop(false)
	eventually(t, "it decides again", func() bool { return g.call(t, name, 43, nil).status == http.StatusOK })
	g.expect(t, "the token superseded meanwhile", name, 42, nil, http.StatusForbidden, fence.StaleToken)
	eventually(t, "it reviews callers again", func() bool {
		return callers.call(t, name, 43, bearer(t, e, namespace, "alice")).status == http.StatusOK
	})
}

// TestStartsWithoutRights: a gateway that may not watch leases is not ready, and
// says so; it lets nothing out.
func TestStartsWithoutRights(t *testing.T) {
	e := api(t)
	namespace := e.Namespace(t)
	makeLease(t, e, namespace, "orders", 42, v1alpha1.FencedLeaseSpec{}, "alice")
	g := start(t, e.UserConfig(t, "nobody"))
	if status := g.ready(t); status != http.StatusServiceUnavailable {
		t.Errorf("ready: %d", status)
	}
	g.expect(t, "a call", namespace+"/orders", 42, nil, http.StatusServiceUnavailable, gateway.Undecided)
}

// TestStartsWithoutAPI: where no API server is, the gateway ends with an error.
func TestStartsWithoutAPI(t *testing.T) {
	t.Parallel()
	o := gateway.Defaults()
	o.ProxyAddress, o.ProbeAddress, o.MetricsAddress = "127.0.0.1:0", "", ""
	o.Upstream, o.LedgerFile = "http://127.0.0.1:1", filepath.Join(t.TempDir(), "ledger")
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	err := gateway.Run(ctx, &rest.Config{Host: "http://127.0.0.1:1"}, o, io.Discard, func(flag string, _ net.Addr) {
		t.Errorf("it serves --%s", flag)
	})
	if err == nil || errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil {
		t.Errorf("it ended with %v", err)
	}
}
