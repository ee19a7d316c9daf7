package gateway

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/http/httputil"
	"net/textproto"
	"net/url"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/gateway/ledger"
)

// errTimeout is the cause with which a call is cancelled that takes too long.
var errTimeout = errors.New("the call took longer than --call-timeout")

// errLost is the cause where the shared ledger ended a call.
var errLost = errors.New("a newer token waits for this call to end, or the ledger's session of it has ended")

// overtaken tells whether a call was most likely ended for a newer one's sake.
func overtaken(err error) bool { return errors.Is(err, errSuperseded) || errors.Is(err, errLost) }

// errReset is the cause where the transport would send a call once more.
var errReset = errors.New("the partner reset the call")

// errPartner is all that a caller is told of a partner that cannot be reached.
var errPartner = errors.New("the connection to the partner failed")

// Proxy forwards calls that the gate lets through to one partner.
type Proxy struct {
	gate     *Gate
	inflight *inflight
	observer *observer
	clock    clock.WithDelayedExecution
	// timeout bounds a call, maxBody its body in bytes; 0 is no bound.
	timeout time.Duration
	maxBody int64
	reverse *httputil.ReverseProxy
}

func newProxy(g *Gate, o *observer, c clock.WithDelayedExecution, target *url.URL, transport http.RoundTripper, wait, timeout time.Duration, maxBody int64) *Proxy {
	p := &Proxy{gate: g, inflight: newInflight(c, wait), observer: o, clock: c, timeout: timeout, maxBody: maxBody}
	p.reverse = &httputil.ReverseProxy{
		Rewrite:        func(r *httputil.ProxyRequest) { rewrite(r, target) },
		Transport:      traced{transport},
		FlushInterval:  -1,
		BufferPool:     &buffers{},
		ModifyResponse: p.answered,
		ErrorHandler:   p.failed,
		ErrorLog:       klog.NewStandardLogger("ERROR"), // of answers that break off
	}
	return p
}

// buffers are what answers are copied through. One for each call would be most
// of what a call leaves to the garbage collector.
type buffers struct{ pool sync.Pool }

const bufferSize = 32 << 10

// Get gives a buffer.
func (b *buffers) Get() []byte {
	if kept, ok := b.pool.Get().(*[bufferSize]byte); ok {
		return kept[:]
	}
	return make([]byte, bufferSize)
}

// Put keeps it for another call.
func (b *buffers) Put(buffer []byte) { b.pool.Put((*[bufferSize]byte)(buffer)) }

// passage is one call on its way through the proxy.
type passage struct {
	call
	caller caller
	token  fence.Token
	// sent tells that a connection to the partner was given to the call, so
	// that it may have received something.
	sent atomic.Bool
	// wrote tells that its headers have left for the connection's buffer.
	wrote atomic.Bool
	// status and reason are what the caller was told.
	status int
	reason fence.Reason
	// end ends the call on its way, and says why.
	end context.CancelCauseFunc

	mu sync.Mutex
	// hurried tells that its connection is of no use to another call, over that
	// the call has been answered.
	hurried, over bool
}

type passageKey struct{}

func passageOf(ctx context.Context) *passage {
	p, _ := ctx.Value(passageKey{}).(*passage)
	return p
}

// ServeHTTP judges a call and forwards it.
func (p *Proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	began := p.clock.Now()
	c := &passage{}
	defer func() {
		p.observer.log(surfaceProxy, c.call, c.caller, r.Method, c.status, c.reason, p.clock.Since(began))
	}()
	refuse := func(problem *Problem) {
		p.observer.decided(surfaceProxy, problem, p.clock.Since(began))
		p.refuse(w, r, c, problem)
	}
	var problem *Problem
	if problem = p.refuseForm(r); problem != nil {
		refuse(problem)
		return
	}
	if c.call, problem = readCall(r.Header, r.Trailer); problem != nil {
		refuse(problem)
		return
	}
	if c.token, c.caller, problem = p.gate.admit(r.Context(), c.call, request{r.Header, peerCertificate(r.TLS)}); problem != nil {
		refuse(problem)
		return
	}
	ctx := r.Context()
	if c.idempotencyKey != "" {
		// Whoever finishes the work of a caller that crashed needs the outcome.
		ctx = context.WithoutCancel(ctx)
	}
	ctx, cancel := context.WithCancelCause(context.WithValue(ctx, passageKey{}, c))
	defer cancel(nil)
	c.end = cancel
	if p.timeout > 0 {
		timer := p.clock.AfterFunc(p.timeout, func() { cancel(errTimeout) })
		defer timer.Stop()
	}
	defer context.AfterFunc(ctx, func() { p.hurry(w, c) })()
	defer func() {
		if c.leave() {
			panic(http.ErrAbortHandler)
		}
	}()
	if p.maxBody > 0 && r.ContentLength < 0 { // a length that is given has been looked at
		r.Body = http.MaxBytesReader(w, r.Body, p.maxBody)
	}
	var digest []byte
	if c.idempotencyKey != "" {
		// Read before the call is in flight: a slow sender holds up nobody.
		if digest, problem = digestOf(r); problem != nil {
			refuse(problem)
			return
		}
	}
	leave, problem := p.enter(ctx, c)
	if problem != nil {
		refuse(problem)
		return
	}
	defer leave()
	// The server would guess what the partner did not say.
	w.Header()["Content-Type"] = nil
	if c.idempotencyKey != "" {
		if done := p.begin(ctx, w, c, digest, refuse); done {
			return
		}
	}
	p.observer.decided(surfaceProxy, nil, p.clock.Since(began))
	p.observer.inFlight.Inc()
	defer p.observer.inFlight.Dec()
	p.reverse.ServeHTTP(w, r.WithContext(ctx))
}

// traced tells each call's passage how far it got on its way to the partner.
type traced struct{ http.RoundTripper }

// RoundTrip sends a call.
func (t traced) RoundTrip(r *http.Request) (*http.Response, error) {
	ctx := r.Context()
	// The reverse proxy traces each call for itself. To join its trace is cheaper
	// than to have two made into one.
	trace := httptrace.ContextClientTrace(ctx)
	if trace == nil {
		trace = &httptrace.ClientTrace{}
		r = r.WithContext(httptrace.WithClientTrace(ctx, trace))
	}
	c := passageOf(ctx)
	trace.GotConn, trace.WroteHeaders = c.connected, func() { c.wrote.Store(true) }
	if pass := trace.Got1xxResponse; pass != nil {
		trace.Got1xxResponse = func(code int, h textproto.MIMEHeader) error {
			notOurs(http.Header(h))
			return pass(code, h)
		}
	}
	return t.RoundTripper.RoundTrip(r)
}

// connected notes that a connection was given to the call.
func (c *passage) connected(got httptrace.GotConnInfo) {
	// Over HTTP/2 the transport sends a call without a body again and again to a
	// partner that resets it with a protocol error. Nothing is written under a
	// context that has ended.
	if connection, ok := got.Conn.(*tls.Conn); ok && c.wrote.Load() && connection.ConnectionState().NegotiatedProtocol == "h2" {
		c.end(errReset)
	}
	c.sent.Store(true)
}

// hurry bounds what is left of a call once its context has ended. A caller that
// is stopped would hold it up otherwise: reads from its connection, and writes
// to it, know nothing of a context.
func (p *Proxy) hurry(w http.ResponseWriter, c *passage) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.over { // the writer must not be touched any more
		return
	}
	c.hurried = true
	connection := http.NewResponseController(w)
	// Time to tell it what became of the call is left, after the time that
	// refuse gives it. A connection that is gone takes no deadline.
	_ = connection.SetReadDeadline(p.clock.Now())
	_ = connection.SetWriteDeadline(p.clock.Now().Add(2 * answerLimit))
}

// leave notes that the call has been answered, so that it is not hurried any
// more. It tells whether the connection has to be closed: the server takes a
// deadline in the past for a caller that is gone, now and at every later call.
func (c *passage) leave() (hurried bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	hurried, c.over, c.hurried = c.hurried, true, false
	return hurried
}

// refuseForm refuses requests that no verdict could hold for.
func (p *Proxy) refuseForm(r *http.Request) *Problem {
	malformed := func(format string, a ...any) *Problem {
		return problemf(http.StatusBadRequest, MalformedRequest, format, a...)
	}
	switch {
	case r.Method == http.MethodConnect, r.Method == http.MethodTrace:
		return malformed("method %s is not forwarded", r.Method)
	case len(r.Header["Upgrade"]) > 0:
		return malformed("an upgraded connection cannot be judged call by call; send plain requests")
	case r.URL.Host != "", r.URL.Path == "", r.URL.Path[0] != '/':
		return malformed("the target must be a path: this gateway has one partner")
	case len(r.Header["Content-Length"]) > 0 && !slices.Equal(r.Header["Content-Length"], []string{strconv.FormatInt(r.ContentLength, 10)}):
		// Over HTTP/2 the server takes what is no number for 0, and would forward
		// the call without its body.
		return malformed("header Content-Length is no length")
	case p.maxBody > 0 && r.ContentLength > p.maxBody:
		return bodyTooLarge(p.maxBody)
	}
	return nil
}

func bodyTooLarge(limit int64) *Problem {
	return problemf(http.StatusRequestEntityTooLarge, BodyTooLarge, "the body is longer than %d bytes", limit)
}

// enter puts a call in flight once no older one of its key is.
func (p *Proxy) enter(ctx context.Context, c *passage) (func(), *Problem) {
	leaveProcess := p.inflight.enter(c.id, c.token, c.end)
	err := p.inflight.drain(ctx, c.id, c.token)
	if err == nil {
		recorded, leaveLedger, enterErr := p.gate.Ledger.Enter(ctx, c.id, c.token, func() { c.end(errLost) })
		if enterErr == nil && recorded <= c.token {
			return func() { leaveLedger(); leaveProcess() }, nil
		}
		if enterErr == nil {
			leaveProcess()
			return nil, p.gate.stale(c.call, recorded)
		}
		err = enterErr
	}
	leaveProcess()
	return nil, p.unsent(ctx, c, err)
}

// unsent is the problem of a call of which nothing was sent.
func (p *Proxy) unsent(ctx context.Context, c *passage, err error) *Problem {
	if overtaken(context.Cause(ctx)) {
		if recorded, readErr := p.gate.Ledger.Recorded(context.WithoutCancel(ctx), c.id); readErr == nil && recorded > c.token {
			return p.gate.stale(c.call, recorded)
		}
	}
	return undecided(err)
}

// rewrite makes the request that the partner gets. What was judged is written
// anew: the proxy has stripped what the Connection header named.
func rewrite(r *httputil.ProxyRequest, target *url.URL) {
	c := passageOf(r.In.Context())
	r.SetURL(target)
	// The proxy has taken out what readers differ on. The partner gets what the
	// caller sent, and what an idempotency key stands for.
	r.Out.URL.RawQuery = r.In.URL.RawQuery
	h := r.Out.Header
	delete(h, fence.HeaderAuthorization)
	c.setJudged(h)
	r.Out.Trailer = nil
	// The transport repeats by itself, after a connection broke, what has no
	// body and is of a safe method or carries an idempotency key. A body that
	// only turns out to be empty, and a name that it does not recognize, keep it
	// from that: it must not decide when a call is repeated.
	for _, name := range []string{HeaderIdempotencyKey, "X-Idempotency-Key"} {
		if values, ok := h[name]; ok {
			delete(h, name)
			h[lower[name]] = values
		}
	}
	if r.Out.Body == nil {
		switch r.Out.Method {
		case http.MethodGet, http.MethodHead, http.MethodOptions:
			r.Out.Body = emptyBody{}
		}
	}
}

var lower = map[string]string{HeaderIdempotencyKey: "idempotency-key", "X-Idempotency-Key": "x-idempotency-key"}

// emptyBody is a body that has nothing in it.
type emptyBody struct{}

func (emptyBody) Read([]byte) (int, error) { return 0, io.EOF }
func (emptyBody) Close() error             { return nil }

// errStatus is the cause where no answer could be passed on with its status.
var errStatus = errors.New("the partner answered with a status that is none")

// answered sees the partner's answer first.
func (p *Proxy) answered(r *http.Response) error {
	if r.StatusCode < http.StatusContinue || r.StatusCode > 999 { // net/http's bounds
		return errStatus
	}
	c := passageOf(r.Request.Context())
	c.status = r.StatusCode
	notOurs(r.Header)
	notOurs(r.Trailer)
	if r.StatusCode == http.StatusSwitchingProtocols {
		return nil
	}
	if c.idempotencyKey != "" {
		p.record(r, c)
	}
	if r.ContentLength < 0 || r.ProtoMajor > 1 { // trailers may come
		r.Body = &trailed{r.Body, r}
	}
	return nil
}

// notOurs takes from an answer what only the gateway says of itself.
func notOurs(h http.Header) {
	delete(h, HeaderReason)
	delete(h, HeaderOutcome)
}

// trailed is the body of an answer that may have trailers.
type trailed struct {
	io.ReadCloser

	answer *http.Response
}

// Read reads on, and looks at the trailers at the end.
func (t *trailed) Read(p []byte) (int, error) {
	n, err := t.ReadCloser.Read(p)
	if err == io.EOF {
		notOurs(t.answer.Trailer)
	}
	return n, err
}

// failed answers for a partner that did not: a call of which nothing was sent
// has failed; the outcome of any other is unknown.
func (p *Proxy) failed(w http.ResponseWriter, r *http.Request, err error) {
	ctx := r.Context()
	c := passageOf(ctx)
	if cause := context.Cause(ctx); cause != nil {
		err = cause
	}
	if !c.sent.Load() {
		if c.idempotencyKey != "" {
			p.forget(ctx, c)
		}
		problem := problemf(http.StatusBadGateway, NotSent, "[%s] nothing was sent: %v; try again", c.id.Lease, told(ctx, err))
		if overtaken(err) {
			problem = p.unsent(ctx, c, err)
		}
		p.refuse(w, r, c, problem)
		return
	}
	status := http.StatusBadGateway
	if timeout, ok := errors.AsType[net.Error](err); errors.Is(err, errTimeout) || ok && timeout.Timeout() {
		status = http.StatusGatewayTimeout
	}
	if large, ok := errors.AsType[*http.MaxBytesError](err); ok {
		p.refuse(w, r, c, problemf(http.StatusRequestEntityTooLarge, BodyTooLarge,
			"[%s] the body is longer than %d bytes; the partner received a part of the request, which is not valid", c.id.Lease, large.Limit))
		return
	}
	p.refuse(w, r, c, problemf(status, OutcomeUnknown,
		"[%s] the call was sent and no answer came: %v; it may have taken effect, so ask the partner before it is repeated", c.id.Lease, told(ctx, err)))
}

// told is what a caller is told of an error. What names the partner's address,
// which may be a secret, is for the log.
func told(ctx context.Context, err error) error {
	for _, ours := range []error{errTimeout, errSuperseded, errLost, errReset, errStatus, context.Canceled} {
		if errors.Is(err, ours) {
			return ours
		}
	}
	klog.FromContext(ctx).Error(err, "Failed to get an answer of the partner")
	return errPartner
}

// refuse answers in the partner's place. The server would read the rest of the
// body first, for however long the caller takes to send it.
func (p *Proxy) refuse(w http.ResponseWriter, r *http.Request, c *passage, problem *Problem) {
	if c.leave() && r.ProtoMajor == 1 { // over HTTP/2 a deadline is that of one call
		w.Header().Set("Connection", "close")
	}
	_ = http.NewResponseController(w).SetReadDeadline(p.clock.Now().Add(answerLimit)) // a connection that is gone takes none
	c.status, c.reason = problem.Status, problem.Reason
	problem.write(w)
}

var _ http.Handler = (*Proxy)(nil)

// settle gives a context for what has to be noted though the caller is gone.
func settle(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), readLimit)
}

func (c *passage) callID() ledger.CallID {
	return ledger.CallID{ID: c.id, IdempotencyKey: c.idempotencyKey}
}
