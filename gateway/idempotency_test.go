package gateway

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/fencedlease/fencedlease/fence"
)

// TestRecordedOutcome: a call with an idempotency key happens once. Whoever
// may make it again gets what came of it, and the partner sees it once.
func TestRecordedOutcome(t *testing.T) {
	const key = HeaderIdempotencyKey
	long, tooLong := strings.Repeat("x", mostRecorded), strings.Repeat("x", mostRecorded+1)
	// The partner answers as the path says.
	respond := func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/plain")
		w.Header().Set("Location", "/captures/1")
		w.Header().Set("Set-Cookie", "session=1")
		switch r.URL.Path {
		case "/declined":
			w.WriteHeader(http.StatusPaymentRequired)
			_, _ = io.WriteString(w, "declined")
		case "/empty":
			w.WriteHeader(http.StatusNoContent)
		case "/long":
			_, _ = io.WriteString(w, long)
		case "/too-long":
			_, _ = io.WriteString(w, tooLong)
		case "/breaks":
			w.Header().Set("Content-Length", "100")
			w.WriteHeader(http.StatusCreated)
			_, _ = io.WriteString(w, "half")
			_ = http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		default:
			w.WriteHeader(http.StatusCreated)
			_, _ = io.WriteString(w, "captured\xff")
		}
	}
	type result struct {
		Status  int
		Reason  fence.Reason
		Outcome string
		Body    string
	}
	captured := result{Status: http.StatusCreated, Body: "captured\xff"}
	recorded := result{Status: http.StatusCreated, Body: "captured\xff", Outcome: outcomeRecorded}
	another := result{Status: http.StatusUnprocessableEntity, Reason: AnotherRequest}
	type call struct {
		method, path, body string
		header             http.Header
	}
	capture := func(token string, more ...string) call {
		return call{http.MethodPost, "/capture", "order 7", stamped(token, more...)}
	}
	for name, c := range map[string]struct {
		first  call
		want   result
		again  call
		repeat result
		// calls is how often the partner is called in all.
		calls int
	}{
		"the same holder again":         {capture("41", key, "k"), captured, capture("41", key, "k"), recorded, 1},
		"a newer holder, who finishes":  {capture("41", key, "k"), captured, capture("42", key, "k"), recorded, 1},
		"without a key nothing is kept": {capture("41"), captured, capture("41"), captured, 2},
		"another idempotency key":       {capture("41", key, "k"), captured, capture("41", key, "l"), captured, 2},
		"another workflow key":          {capture("41", key, "k"), captured, capture("41", key, "k", fence.HeaderKey, "other"), captured, 2},
		"a refusal is an outcome too": {
			call{http.MethodPost, "/declined", "", stamped("41", key, "k")}, result{Status: http.StatusPaymentRequired, Body: "declined"},
			call{http.MethodPost, "/declined", "", stamped("42", key, "k")}, result{Status: http.StatusPaymentRequired, Body: "declined", Outcome: outcomeRecorded}, 1,
		},
		"no body": {
			call{http.MethodDelete, "/empty", "", stamped("41", key, "k")}, result{Status: http.StatusNoContent},
			call{http.MethodDelete, "/empty", "", stamped("41", key, "k")}, result{Status: http.StatusNoContent, Outcome: outcomeRecorded}, 1,
		},
		"the longest body that is kept": {
			call{http.MethodPost, "/long", "", stamped("41", key, "k")}, result{Status: http.StatusOK, Body: long},
			call{http.MethodPost, "/long", "", stamped("41", key, "k")}, result{Status: http.StatusOK, Body: long, Outcome: outcomeRecorded}, 1,
		},
		"a longer one is left out, and said so": {
			call{http.MethodPost, "/too-long", "", stamped("41", key, "k")}, result{Status: http.StatusOK, Body: tooLong},
			call{http.MethodPost, "/too-long", "", stamped("41", key, "k")}, result{Status: http.StatusOK, Outcome: outcomeWithoutBody}, 1,
		},
		"an answer that broke off keeps its status": {
			call{http.MethodPost, "/breaks", "", stamped("41", key, "k")}, result{Status: http.StatusCreated, Body: "half"},
			call{http.MethodPost, "/breaks", "", stamped("41", key, "k")}, result{Status: http.StatusCreated, Outcome: outcomeWithoutBody}, 1,
		},
		"the key with another body":   {capture("41", key, "k"), captured, call{http.MethodPost, "/capture", "order 8", stamped("41", key, "k")}, another, 1},
		"the key with another path":   {capture("41", key, "k"), captured, call{http.MethodPost, "/refund", "order 7", stamped("41", key, "k")}, another, 1},
		"the key with another query":  {capture("41", key, "k"), captured, call{http.MethodPost, "/capture?x", "order 7", stamped("41", key, "k")}, another, 1},
		"the key with another method": {capture("41", key, "k"), captured, call{http.MethodPut, "/capture", "order 7", stamped("41", key, "k")}, another, 1},
		"the key with another type":   {capture("41", key, "k"), captured, capture("41", key, "k", "Content-Type", "text/html"), another, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newPartner(t, respond)
			file := filepath.Join(t.TempDir(), "ledger")
			inFile := func(o *Options) { o.LedgerFile = file }
			g := start(t, p.URL, inFile)
			do := func(c call) result {
				t.Helper()
				a, err := g.tryCall(t.Context(), c.method, c.path, strings.NewReader(c.body), c.header)
				// An answer that broke off breaks off here too.
				if broke := c.path == "/breaks" && a.header.Get(HeaderOutcome) == ""; (err != nil) != broke {
					t.Fatalf("%+v: %+v, %v", c, a, err)
				}
				if a.header.Get(HeaderOutcome) != "" {
					if a.header.Get("Content-Type") != "text/plain" && a.body != "" || a.header.Get("Location") != "/captures/1" || a.header.Get("Set-Cookie") != "" {
						t.Errorf("headers of the recorded answer: %v", a.header)
					}
				}
				if a.reason != "" {
					a.body = ""
				}
				return result{a.status, a.reason, a.header.Get(HeaderOutcome), a.body}
			}
			if diff := cmp.Diff(c.want, do(c.first)); diff != "" {
				t.Errorf("first (-want +got):\n%s", diff)
			}
			// What is recorded is durable.
			if err := g.stop(); err != nil {
				t.Fatal(err)
			}
			g = start(t, p.URL, inFile)
			for range 2 {
				if diff := cmp.Diff(c.repeat, do(c.again)); diff != "" {
					t.Errorf("again (-want +got):\n%s", diff)
				}
				if c.calls > 1 {
					break
				}
			}
			if got := len(p.calls()); got != c.calls {
				t.Errorf("the partner was called %d times, want %d", got, c.calls)
			}
		})
	}
}

// TestOlderTokenGetsNoOutcome: an older token is stale, whatever is recorded.
func TestOlderTokenGetsNoOutcome(t *testing.T) {
	t.Parallel()
	p := newPartner(t, nil)
	g := start(t, p.URL)
	header := func(token string) http.Header { return stamped(token, HeaderIdempotencyKey, "k") }
	if a := g.call(t, http.MethodPost, "/capture", "", header("41")); a.status != http.StatusOK {
		t.Fatalf("%+v", a)
	}
	if a := g.call(t, http.MethodPost, "/other", "", stamped("42")); a.status != http.StatusOK {
		t.Fatalf("%+v", a)
	}
	if a := g.call(t, http.MethodPost, "/capture", "", header("41")); a.status != http.StatusForbidden || a.reason != fence.StaleToken || a.header.Get(HeaderOutcome) != "" {
		t.Errorf("an older token gets %+v", a)
	}
	if a := g.call(t, http.MethodPost, "/capture", "", header("42")); a.status != http.StatusOK || a.body != "41" || a.header.Get(HeaderOutcome) != outcomeRecorded {
		t.Errorf("the newer token gets %+v", a)
	}
	sameTokens(t, p, "41", "42")
}

// resetting is a partner that takes a request and then breaks the connection.
func resetting(t *testing.T, calls *atomic.Int64) (url string) {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if r.URL.Path == "/fine" { // the next call reuses the connection
			return
		}
		calls.Add(1)
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		_ = conn.(*net.TCPConn).SetLinger(0) // a reset
		_ = conn.Close()
	}))
	t.Cleanup(s.Close)
	return s.URL
}

// TestNoRepeat: the gateway does not send a call twice by itself, whatever its
// method, and says that the outcome is unknown.
func TestNoRepeat(t *testing.T) {
	for _, method := range []string{http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodDelete, http.MethodPost, http.MethodPut, http.MethodPatch} {
		for _, body := range []string{"", "order 7"} {
			for _, name := range []string{"", HeaderIdempotencyKey, "X-Idempotency-Key"} {
				t.Run(fmt.Sprintf("%s with %d bytes and %q", method, len(body), name), func(t *testing.T) {
					t.Parallel()
					var calls atomic.Int64
					g := start(t, resetting(t, &calls))
					if a := g.call(t, http.MethodGet, "/fine", "", stamped("41")); a.status != http.StatusOK {
						t.Fatalf("%+v", a)
					}
					header := stamped("41")
					if name != "" {
						header.Set(name, "k")
					}
					a := g.call(t, method, "/breaks", body, header)
					if reason := fence.Reason(a.header.Get(HeaderReason)); a.status != http.StatusBadGateway || reason != OutcomeUnknown {
						t.Errorf("got %d %s", a.status, a.body)
					}
					if calls.Load() != 1 {
						t.Errorf("the partner was called %d times", calls.Load())
					}
				})
			}
		}
	}
}

// TestNoRepeatOverHTTP2: nor over HTTP/2, where a partner resets the stream.
func TestNoRepeatOverHTTP2(t *testing.T) {
	for _, method := range []string{http.MethodGet, http.MethodDelete, http.MethodPost, http.MethodPatch} {
		for _, code := range []http2.ErrCode{http2.ErrCodeProtocol, http2.ErrCodeInternal, http2.ErrCodeCancel} {
			t.Run(fmt.Sprint(method, " ", code), func(t *testing.T) {
				t.Parallel()
				certificate := newAuthority(t).server(t)
				listener, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{certificate.pair}, NextProtos: []string{"h2"}})
				if err != nil {
					t.Fatal(err)
				}
				var calls atomic.Int64
				var wg sync.WaitGroup
				// A stream that was reset a moment ago still keeps its connection from
				// being closed as idle.
				ctx, hangUp := context.WithCancel(t.Context())
				defer hangUp()
				wg.Go(func() {
					for {
						conn, err := listener.Accept()
						if err != nil {
							return
						}
						wg.Go(func() {
							defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
							resetStreams(conn, code, &calls)
						})
					}
				})
				g := start(t, "https://"+listener.Addr().String(), func(o *Options) { o.UpstreamCAFile = certificate.caFile })
				a := g.call(t, method, "/breaks", "", stamped("41"))
				if a.status != http.StatusBadGateway || a.reason != OutcomeUnknown {
					t.Errorf("got %d %s", a.status, a.body)
				}
				if calls.Load() != 1 {
					t.Errorf("the partner was called %d times", calls.Load())
				}
				if err := g.stop(); err != nil {
					t.Error(err)
				}
				_ = listener.Close()
				hangUp()
				wg.Wait()
			})
		}
	}
}

// resetStreams serves HTTP/2 and resets every stream once its headers came.
func resetStreams(conn net.Conn, code http2.ErrCode, calls *atomic.Int64) {
	defer func() { _ = conn.Close() }()
	reader := bufio.NewReader(conn)
	if _, err := reader.Discard(len(http2.ClientPreface)); err != nil {
		return
	}
	framer := http2.NewFramer(conn, reader)
	framer.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	if framer.WriteSettings() != nil {
		return
	}
	for {
		frame, err := framer.ReadFrame()
		if err != nil {
			return
		}
		switch f := frame.(type) {
		case *http2.SettingsFrame:
			if !f.IsAck() && framer.WriteSettingsAck() != nil {
				return
			}
		case *http2.MetaHeadersFrame:
			calls.Add(1)
			if framer.WriteRSTStream(f.StreamID, code) != nil {
				return
			}
		}
	}
}

// TestUnknownOutcome: a call that was sent and has no answer is told so to
// whoever asks again, and is not repeated; one of which nothing was sent may be.
func TestUnknownOutcome(t *testing.T) {
	t.Parallel()
	var calls atomic.Int64
	file := filepath.Join(t.TempDir(), "ledger")
	inFile := func(o *Options) { o.LedgerFile = file }
	// Nobody listens there, so nothing is sent.
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_ = closed.Close()
	header := func(token string) http.Header { return stamped(token, HeaderIdempotencyKey, "k") }
	g := start(t, "http://"+closed.Addr().String(), inFile)
	for range 2 {
		if a := g.call(t, http.MethodPost, "/capture", "order 7", header("41")); a.status != http.StatusBadGateway || a.reason != NotSent {
			t.Errorf("a partner that does not listen: %+v", a)
		}
	}
	if err := g.stop(); err != nil {
		t.Fatal(err)
	}
	g = start(t, resetting(t, &calls), inFile)
	for _, token := range []string{"41", "41", "42", "42"} {
		if a := g.call(t, http.MethodPost, "/capture", "order 7", header(token)); a.status != http.StatusBadGateway || a.reason != OutcomeUnknown {
			t.Errorf("token %s: %+v", token, a)
		}
	}
	if err := g.stop(); err != nil {
		t.Fatal(err)
	}
	g = start(t, resetting(t, &calls), inFile)
	if a := g.call(t, http.MethodPost, "/capture", "order 7", header("42")); a.reason != OutcomeUnknown {
		t.Errorf("after a restart: %+v", a)
	}
	if a := g.call(t, http.MethodPost, "/capture", "order 7", header("41")); a.reason != fence.StaleToken {
		t.Errorf("the older token: %+v", a)
	}
	if calls.Load() != 1 {
		t.Errorf("the partner was called %d times", calls.Load())
	}
}

// TestOneOfManyAtOnce: of many retries at once one call leaves.
func TestOneOfManyAtOnce(t *testing.T) {
	t.Parallel()
	h := newHeld(t)
	g := start(t, h.URL)
	header := stamped("41", HeaderIdempotencyKey, "k")
	first := make(chan answer, 1)
	go func() {
		a, err := g.tryCall(t.Context(), http.MethodPost, "/a", nil, header)
		if err != nil {
			t.Error(err)
		}
		first <- a
	}()
	eventually(t, "the call begins", func() bool { return len(h.seen()) > 0 })
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() {
			if a, err := g.tryCall(t.Context(), http.MethodPost, "/a", nil, header); err != nil || a.reason != OutcomeUnknown {
				t.Errorf("while the first has no answer: %+v, %v", a, err)
			}
		})
	}
	wg.Wait()
	close(h.gate("a"))
	if a := <-first; a.status != http.StatusOK || a.header.Get(HeaderOutcome) != "" {
		t.Errorf("the first: %+v", a)
	}
	if a := g.call(t, http.MethodPost, "/a", "", header); a.body != "done" || a.header.Get(HeaderOutcome) != outcomeRecorded {
		t.Errorf("once it has one: %+v", a)
	}
	if n := len(h.calls()); n != 1 {
		t.Errorf("the partner was called %d times", n)
	}
}

// TestCrashedHoldersWork: a call with an idempotency key goes on though its
// caller is gone, so that a newer holder, who waits for its end, gets what came
// of it. One without a key is cut off, and so is one that takes too long; what
// came of that nobody knows.
func TestCrashedHoldersWork(t *testing.T) {
	for name, c := range map[string]struct {
		wait   time.Duration
		key    []string
		ends   bool
		want   answer
		events []string
	}{
		"with a key":           {time.Hour, []string{HeaderIdempotencyKey, "k"}, true, answer{status: http.StatusOK, body: "done"}, []string{"begin a", "end a"}},
		"with a key, too long": {50 * time.Millisecond, []string{HeaderIdempotencyKey, "k"}, false, answer{status: http.StatusBadGateway, reason: OutcomeUnknown}, []string{"begin a", "cut a"}},
		"without a key":        {time.Hour, nil, false, answer{status: http.StatusOK, body: "done"}, []string{"begin a", "cut a", "begin a", "end a"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHeld(t)
			g := start(t, h.URL, func(o *Options) { o.Wait, o.DecisionAddress = c.wait, "127.0.0.1:0" })
			ctx, crash := context.WithCancel(t.Context())
			defer crash()
			gone := make(chan struct{})
			go func() {
				defer close(gone)
				_, _ = g.tryCall(ctx, http.MethodPost, "/a", nil, stamped("41", c.key...))
			}()
			eventually(t, "the call begins", func() bool { return len(h.seen()) > 0 })
			crash()
			<-gone
			if c.key == nil {
				eventually(t, "the call is cut off", func() bool { return len(h.seen()) > 1 })
				close(h.gate("a"))
			}
			next := make(chan answer, 1)
			go func() {
				a, err := g.tryCall(t.Context(), http.MethodPost, "/a", nil, stamped("42", c.key...))
				if err != nil {
					t.Error(err)
				}
				next <- a
			}()
			if c.ends {
				eventually(t, "the newer holder waits", func() bool { return g.decide(t, stamped("41")).reason == fence.StaleToken })
				close(h.gate("a"))
			}
			a := <-next
			if a.status != c.want.status || a.reason != c.want.reason || a.reason == "" && a.body != c.want.body {
				t.Errorf("the newer holder gets %+v", a)
			}
			if got := h.seen(); !slices.Equal(got, c.events) {
				t.Errorf("the partner saw %q, want %q", got, c.events)
			}
		})
	}
}

// TestCallerGoneInTheAnswer: an answer is recorded as it comes from the partner,
// however much of it its caller took.
func TestCallerGoneInTheAnswer(t *testing.T) {
	t.Parallel()
	// More than is copied at a time: what is written to the caller fails before
	// all of it has been read.
	const rest = mostRecorded * 3 / 4
	for name, c := range map[string]struct {
		// rest is how much the partner sends once the caller is gone.
		rest    int
		ends    func(context.Context)
		outcome string
	}{
		"no more comes":             {0, nil, outcomeRecorded},
		"the rest comes":            {rest, nil, outcomeRecorded},
		"the rest is too long":      {2 * mostRecorded, nil, outcomeWithoutBody},
		"the rest breaks off":       {rest, func(context.Context) { panic(http.ErrAbortHandler) }, outcomeWithoutBody},
		"the rest never ends":       {rest, func(ctx context.Context) { <-ctx.Done() }, outcomeWithoutBody},
		"no more comes and no end":  {0, func(ctx context.Context) { <-ctx.Done() }, outcomeWithoutBody},
		"too much comes and no end": {2 * mostRecorded, func(ctx context.Context) { <-ctx.Done() }, outcomeWithoutBody},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			gone := make(chan struct{})
			p := newPartner(t, func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.WriteString(w, "first")
				_ = http.NewResponseController(w).Flush()
				<-gone
				_, _ = io.WriteString(w, strings.Repeat("x", c.rest))
				_ = http.NewResponseController(w).Flush()
				if c.ends != nil {
					c.ends(r.Context())
				}
			})
			g := start(t, p.URL, func(o *Options) {
				if o.CallTimeout = time.Hour; strings.HasSuffix(name, "no end") || strings.HasSuffix(name, "never ends") {
					o.CallTimeout = time.Second
				}
			})
			caller, err := net.Dial("tcp", g.address["proxy"])
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = caller.Close() }()
			if _, err := io.WriteString(caller, "POST / HTTP/1.1\r\nHost: gateway\r\nFencing-Lease: "+lease+"\r\nFencing-Token: 41\r\nIdempotency-Key: k\r\nContent-Length: 0\r\n\r\n"); err != nil {
				t.Fatal(err)
			}
			resp, err := http.ReadResponse(bufio.NewReader(caller), nil)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(resp.Body, make([]byte, len("first"))); err != nil {
				t.Fatal(err)
			}
			// A reset: every further write to the caller fails.
			if err := caller.(*net.TCPConn).SetLinger(0); err != nil {
				t.Fatal(err)
			}
			_ = caller.Close()
			close(gone)
			var a answer
			eventually(t, "the outcome is recorded", func() bool {
				a = g.call(t, http.MethodPost, "/", "", stamped("41", HeaderIdempotencyKey, "k"))
				return a.reason != OutcomeUnknown
			})
			body := ""
			if c.outcome == outcomeRecorded {
				body = "first" + strings.Repeat("x", c.rest)
			}
			if a.status != http.StatusOK || a.header.Get(HeaderOutcome) != c.outcome || a.body != body {
				t.Errorf("the outcome: %d %s, %d bytes; want %s, %d bytes", a.status, a.header.Get(HeaderOutcome), len(a.body), c.outcome, len(body))
			}
			if n := len(p.calls()); n != 1 {
				t.Errorf("the partner was called %d times", n)
			}
		})
	}
}

// TestRecordedBytes: what is recorded comes back byte for byte.
func TestRecordedBytes(t *testing.T) {
	t.Parallel()
	all := make([]byte, 0, 256)
	for b := range 256 {
		all = append(all, byte(b))
	}
	p := newPartner(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header()["Location"] = []string{"/caf\xe9?\xff<>&\u2028"}
		w.Header()["Content-Language"] = []string{"de", "en"}
		_, _ = w.Write(all)
	})
	g := start(t, p.URL)
	first := g.call(t, http.MethodPost, "/", "", stamped("41", HeaderIdempotencyKey, "k"))
	again := g.call(t, http.MethodPost, "/", "", stamped("41", HeaderIdempotencyKey, "k"))
	for _, name := range recordedHeaders {
		if !slices.Equal(first.header[name], again.header[name]) {
			t.Errorf("%s: %q, and then %q", name, first.header[name], again.header[name])
		}
	}
	if again.header.Get(HeaderOutcome) != outcomeRecorded || first.body != string(all) || again.body != first.body {
		t.Errorf("%q, and then %q", first.body, again.body)
	}
}

// TestRepeatByTheCaller: a repeat by the holder itself, without an idempotency
// key, is a call like any other, which the partner has to tell apart; after the
// hand-over it is stale.
func TestRepeatByTheCaller(t *testing.T) {
	t.Parallel()
	var calls atomic.Int64
	g := start(t, resetting(t, &calls))
	for _, c := range []struct {
		what, path, token string
		reason            fence.Reason
		calls             int64
	}{
		{"the first try", "/breaks", "41", OutcomeUnknown, 1},
		{"a repeat before the hand-over", "/breaks", "41", OutcomeUnknown, 2},
		{"the hand-over", "/fine", "42", "", 2},
		{"a repeat after it", "/breaks", "41", fence.StaleToken, 2},
		{"the new holder's", "/breaks", "42", OutcomeUnknown, 3},
	} {
		if a := g.call(t, http.MethodPost, c.path, "order 7", stamped(c.token)); a.reason != c.reason || calls.Load() != c.calls {
			t.Errorf("%s: %d %s and %d calls, want %s and %d", c.what, a.status, a.reason, calls.Load(), c.reason, c.calls)
		}
	}
}

// TestOneMailForEachTick: a scheduler that loses its lease and regains it within
// one tick, and a paused one that resumes, send one mail for each job and tick.
func TestOneMailForEachTick(t *testing.T) {
	t.Parallel()
	p := newPartner(t, nil)
	g := start(t, p.URL)
	mail := func(token, job, tick string) answer {
		t.Helper()
		return g.call(t, http.MethodPost, "/mail", job+tick, stamped(token, fence.HeaderKey, job, HeaderIdempotencyKey, tick))
	}
	for _, c := range []struct {
		what, token, job, tick string
		status                 int
		outcome                string
	}{
		{"a tick", "41", "report", "08:00", http.StatusOK, ""},
		{"the same after lease and token were regained", "42", "report", "08:00", http.StatusOK, outcomeRecorded},
		{"another job of the tick", "42", "invoice", "08:00", http.StatusOK, ""},
		{"the next tick", "42", "report", "09:00", http.StatusOK, ""},
		{"another scheduler, the same tick", "43", "report", "09:00", http.StatusOK, outcomeRecorded},
		{"the paused one resumes", "42", "report", "09:00", http.StatusForbidden, ""},
		{"and goes on to the next tick", "42", "report", "10:00", http.StatusForbidden, ""},
		{"the other goes on", "43", "report", "10:00", http.StatusOK, ""},
	} {
		if a := mail(c.token, c.job, c.tick); a.status != c.status || a.header.Get(HeaderOutcome) != c.outcome {
			t.Errorf("%s: %d %q, want %d %q: %s", c.what, a.status, a.header.Get(HeaderOutcome), c.status, c.outcome, a.body)
		}
	}
	var mails []string
	for _, a := range p.calls() {
		mails = append(mails, a.body)
	}
	if diff := cmp.Diff([]string{"report08:00", "invoice08:00", "report09:00", "report10:00"}, mails); diff != "" {
		t.Errorf("mails (-want +got):\n%s", diff)
	}
}
