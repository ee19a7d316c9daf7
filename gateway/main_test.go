package gateway

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"go.uber.org/goleak"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/fencedlease/fencedlease/fence"
)

func TestMain(m *testing.M) {
	klog.SetLogger(logr.Discard())
	ctrl.SetLogger(logr.Discard())
	goleak.VerifyTestMain(m)
}

const lease = "shop/orders"

// patience bounds what a test waits for that has to come.
const patience = 30 * time.Second

// partner is who gets the calls. It keeps all that arrived.
type partner struct {
	*httptest.Server

	mu      sync.Mutex
	arrived []arrival
	// answer answers a call; nil says 200 and the token.
	answer http.HandlerFunc
}

// arrival is one call as the partner saw it.
type arrival struct {
	method, uri, body string
	header, trailer   http.Header
}

func newPartner(t *testing.T, answer http.HandlerFunc) *partner {
	t.Helper()
	p := &partner{answer: answer}
	p.Server = httptest.NewServer(p)
	t.Cleanup(p.Close)
	return p
}

// newUnstarted is a server that says nothing of callers that turn away.
func newUnstarted(h http.Handler) *httptest.Server {
	s := httptest.NewUnstartedServer(h)
	s.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	return s
}

func (p *partner) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if p.answer != nil {
		p.note(r, "")
		p.answer(w, r)
		return
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		p.note(r, "cut off: "+string(body))
		return
	}
	p.note(r, string(body))
	_, _ = io.WriteString(w, r.Header.Get(fence.HeaderToken))
}

func (p *partner) note(r *http.Request, body string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.arrived = append(p.arrived, arrival{r.Method, r.RequestURI, body, r.Header.Clone(), r.Trailer.Clone()})
}

// calls gives what arrived since the last time.
func (p *partner) calls() []arrival {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := p.arrived
	p.arrived = nil
	return all
}

// tokens gives the tokens of what arrived since the last time.
func (p *partner) tokens() []string {
	var tokens []string
	for _, a := range p.calls() {
		tokens = append(tokens, a.header.Get(fence.HeaderToken))
	}
	return tokens
}

// running is a gateway under test.
type running struct {
	// address of each service, by its flag without "-bind-address".
	address map[string]string
	log     *lines
	cancel  context.CancelFunc
	done    chan error
	client  *http.Client
}

// start runs a gateway until the test ends. Without changes it judges by the
// ledger alone and believes everybody.
func start(t *testing.T, upstream string, changes ...func(*Options)) *running {
	t.Helper()
	g, err := tryStart(t, nil, upstream, changes...)
	if err != nil {
		t.Fatalf("the gateway ended: %v", err)
	}
	t.Cleanup(func() {
		if err := g.stop(); err != nil {
			t.Errorf("the gateway ended with %v", err)
		}
	})
	return g
}

func tryStart(t *testing.T, cfg *rest.Config, upstream string, changes ...func(*Options)) (*running, error) {
	t.Helper()
	o := Defaults()
	o.Authority, o.Authentication = AuthorityNone, AuthenticationNone
	o.LedgerFile, o.Upstream = filepath.Join(t.TempDir(), "ledger"), upstream
	o.ProxyAddress, o.DecisionAddress, o.ExtAuthzAddress = "127.0.0.1:0", "", ""
	o.ProbeAddress, o.MetricsAddress = "", ""
	for _, change := range changes {
		change(&o)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	g := &running{address: map[string]string{}, log: &lines{}, cancel: cancel, done: make(chan error, 1)}
	transport := &http.Transport{DisableCompression: true}
	g.client = &http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	t.Cleanup(transport.CloseIdleConnections)
	type service struct{ flag, address string }
	services := make(chan service, 5)
	go func() {
		g.done <- Run(ctx, cfg, o, g.log, func(flag string, a net.Addr) { services <- service{flag, a.String()} })
	}()
	for _, wanted := range []string{o.ProxyAddress, o.DecisionAddress, o.ExtAuthzAddress, o.ProbeAddress, o.MetricsAddress} {
		if wanted == "" {
			continue
		}
		select {
		case s := <-services:
			g.address[strings.TrimSuffix(s.flag, "-bind-address")] = s.address
		case err := <-g.done:
			cancel()
			return nil, err
		}
	}
	return g, nil
}

// stop ends the gateway, once, and gives what it ended with.
func (g *running) stop() error {
	g.cancel()
	err, ended := <-g.done
	if ended {
		close(g.done)
	}
	return err
}

// lines is what was written, for other goroutines to read.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// answer is what a caller got.
type answer struct {
	status int
	header http.Header
	body   string
	// reason is that of a problem body; empty where the partner answered.
	reason fence.Reason
}

// stamped gives the headers of a call, and more of them.
func stamped(token string, more ...string) http.Header {
	h := http.Header{fence.HeaderLease: {lease}, fence.HeaderToken: {token}}
	for i := 0; i < len(more); i += 2 {
		h[more[i]] = append(h[more[i]], more[i+1])
	}
	return h
}

// call sends one call through the proxy and reads the whole answer.
func (g *running) call(t *testing.T, method, path, body string, h http.Header) answer {
	t.Helper()
	a, err := g.tryCall(t.Context(), method, path, strings.NewReader(body), h)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func (g *running) tryCall(ctx context.Context, method, path string, body io.Reader, h http.Header) (answer, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://"+g.address["proxy"]+path, body)
	if err != nil {
		return answer{}, err
	}
	req.Header = h
	resp, err := g.client.Do(req)
	if err != nil {
		return answer{}, err
	}
	return readAnswer(resp)
}

// decide asks the decision service over HTTP.
func (g *running) decide(t *testing.T, h http.Header) answer {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+g.address["decision"]+"/", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header = h
	resp, err := g.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	a, err := readAnswer(resp)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func readAnswer(resp *http.Response) (answer, error) {
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	a := answer{status: resp.StatusCode, header: resp.Header, body: string(body)}
	if err == nil && len(body) > 0 && resp.Header.Get("Content-Type") == "application/problem+json" {
		var problem struct {
			Type   string       `json:"type"`
			Status int          `json:"status"`
			Reason fence.Reason `json:"reason"`
		}
		err = json.Unmarshal(body, &problem)
		if a.reason = problem.Reason; problem.Status != a.status || problem.Type != "tag:fencedlease.io,2026:"+string(a.reason) ||
			a.header.Get(HeaderReason) != string(a.reason) || a.header.Get("Cache-Control") != "no-store" {
			a.reason = "(not a whole problem) " + a.reason
		}
	}
	return a, err
}

// raw sends bytes as they are and reads one answer. What net/http itself
// refuses has no reason.
func raw(t *testing.T, address, request string) answer {
	t.Helper()
	conn, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(conn, request); err != nil {
		t.Fatal(err)
	}
	method, _, _ := strings.Cut(request, " ")
	resp, err := http.ReadResponse(bufio.NewReader(conn), &http.Request{Method: method})
	if err != nil {
		t.Fatalf("no answer to %.80q: %v", request, err)
	}
	a, err := readAnswer(resp)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// http2Client speaks HTTP/2 alone, with prior knowledge over plain text.
func http2Client(t *testing.T, config *tls.Config) *http.Client {
	t.Helper()
	protocols := &http.Protocols{}
	protocols.SetHTTP2(config != nil)
	protocols.SetUnencryptedHTTP2(config == nil)
	transport := &http.Transport{Protocols: protocols, TLSClientConfig: config}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

// eventually waits for a condition that has to come.
func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !condition() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("not in %s: %s", patience, what)
		}
	}
}

func sameTokens(t *testing.T, p *partner, want ...string) {
	t.Helper()
	if got := p.tokens(); !slices.Equal(got, want) {
		t.Errorf("tokens at the partner: %q, want %q", got, want)
	}
}
