package gateway

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/fencedlease/fencedlease/fence"
)

// TestForwards: a call that passes arrives as it was sent, with the headers
// that were judged, and its answer comes back as the partner gave it.
func TestForwards(t *testing.T) {
	t.Parallel()
	p := newPartner(t, func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		w.Header().Set("X-Answer", "1")
		w.Header().Set(HeaderReason, "not the gateway's") // only the gateway speaks for itself
		w.Header().Set(HeaderOutcome, outcomeRecorded)
		w.Header().Set("Location", "https://elsewhere.example.com/")
		w.Header().Set("Trailer", "X-Sum")
		w.WriteHeader(http.StatusSeeOther)
		_, _ = w.Write(body)
		w.Header().Set("X-Sum", "2")
	})
	g := start(t, p.URL+"/v1")
	for name, client := range map[string]*http.Client{"HTTP/1.1": g.client, "HTTP/2": http2Client(t, nil)} {
		t.Run(name, func(t *testing.T) {
			client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
			body := strings.Repeat("order 7 ", 1<<17) // 1 MB
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPatch, "http://"+g.address["proxy"]+"/a%2Fb?x=1&y=%20", strings.NewReader(body))
			if err != nil {
				t.Fatal(err)
			}
			req.Header = stamped("42", fence.HeaderKey, "order-7", HeaderIdempotencyKey, "")
			delete(req.Header, HeaderIdempotencyKey)
			req.Header.Set("Authorization", "Bearer for-the-partner")
			req.Header.Set(fence.HeaderAuthorization, "Bearer for-the-gateway")
			req.Header.Set("X-Idempotency-Key", "x")
			resp, err := client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			a, err := readAnswer(resp)
			if err != nil || a.status != http.StatusSeeOther || a.body != body || a.header.Get("X-Answer") != "1" ||
				a.header.Get(HeaderReason) != "" || a.header.Get(HeaderOutcome) != "" || a.header.Get("Location") == "" || resp.Trailer.Get("X-Sum") != "2" {
				t.Errorf("answer: %d %v, %d bytes, trailers %v, %v", a.status, a.header, len(a.body), resp.Trailer, err)
			}
			calls := p.calls()
			if len(calls) != 1 {
				t.Fatalf("%d calls arrived", len(calls))
			}
			got := calls[0]
			if got.method != http.MethodPatch || got.uri != "/v1/a%2Fb?x=1&y=%20" {
				t.Errorf("arrived as %s %s", got.method, got.uri)
			}
			for name, want := range map[string]string{
				fence.HeaderLease: lease, fence.HeaderToken: "42", fence.HeaderKey: "order-7",
				"Authorization": "Bearer for-the-partner", fence.HeaderAuthorization: "", "X-Idempotency-Key": "x",
			} {
				if value := got.header.Get(name); value != want {
					t.Errorf("%s arrived as %q, want %q", name, value, want)
				}
			}
		})
	}
}

// TestContentTypeIsThePartners: where the partner names none, nor does the
// gateway, of an answer as of a recorded one.
func TestContentTypeIsThePartners(t *testing.T) {
	t.Parallel()
	p := newPartner(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header()["Content-Type"] = nil
		_, _ = io.WriteString(w, "<html>")
	})
	g := start(t, p.URL)
	for _, name := range []string{"an answer", "a recorded one"} {
		a := g.call(t, http.MethodPost, "/", "", stamped("42", HeaderIdempotencyKey, "one"))
		if values, ok := a.header["Content-Type"]; ok || a.status != http.StatusOK || a.body != "<html>" {
			t.Errorf("%s: %d %q with Content-Type %q", name, a.status, a.body, values)
		}
	}
}

// TestStreams: an answer is passed on as it comes, not once it has ended.
func TestStreams(t *testing.T) {
	t.Parallel()
	h := make(chan struct{})
	p := newPartner(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, "first")
		_ = http.NewResponseController(w).Flush()
		<-h
		_, _ = io.WriteString(w, "last")
	})
	g := start(t, p.URL)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+g.address["proxy"]+"/events", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header = stamped("42")
	resp, err := g.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	first := make([]byte, len("first"))
	if _, err := io.ReadFull(resp.Body, first); err != nil || string(first) != "first" {
		t.Errorf("read %q, %v", first, err)
	}
	close(h)
	if last, err := io.ReadAll(resp.Body); err != nil || string(last) != "last" {
		t.Errorf("read %q, %v", last, err)
	}
}

// rawHTTP2 sends a request field by field and gives the status of the answer
// and its reason, or "reset".
func rawHTTP2(t *testing.T, address string, fields, trailers [][2]string, body string) string {
	t.Helper()
	conn, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	framer := http2.NewFramer(conn, bufio.NewReader(conn))
	framer.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	var block bytes.Buffer
	encoder := hpack.NewEncoder(&block)
	send := func(fields [][2]string, end bool) error {
		block.Reset()
		for _, f := range fields {
			if err := encoder.WriteField(hpack.HeaderField{Name: f[0], Value: f[1]}); err != nil {
				return err
			}
		}
		return framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block.Bytes(), EndHeaders: true, EndStream: end})
	}
	_, err = io.WriteString(conn, http2.ClientPreface)
	err = errors.Join(err, framer.WriteSettings(), send(fields, body == "" && trailers == nil))
	if body != "" || trailers != nil {
		err = errors.Join(err, framer.WriteData(1, trailers == nil, []byte(body)))
	}
	if trailers != nil {
		err = errors.Join(err, send(trailers, true))
	}
	if err != nil {
		t.Fatal(err)
	}
	for {
		frame, err := framer.ReadFrame()
		if err != nil {
			return "reset"
		}
		switch f := frame.(type) {
		case *http2.MetaHeadersFrame:
			answer := f.PseudoValue("status")
			for _, field := range f.RegularFields() {
				if field.Name == strings.ToLower(HeaderReason) {
					answer += " " + field.Value
				}
			}
			return answer
		case *http2.RSTStreamFrame, *http2.GoAwayFrame:
			return "reset"
		}
	}
}

// TestFieldsOfHTTP2: the same rules over HTTP/2, where bytes reach further.
func TestFieldsOfHTTP2(t *testing.T) {
	t.Parallel()
	p := newPartner(t, nil)
	g := start(t, p.URL)
	request := func(fields ...string) [][2]string {
		all := [][2]string{{":method", "POST"}, {":scheme", "http"}, {":authority", "gateway"}, {":path", "/capture"}, {"fencing-lease", lease}}
		for i := 0; i < len(fields); i += 2 {
			all = append(all, [2]string{fields[i], fields[i+1]})
		}
		return all
	}
	form := func(method, path string) [][2]string {
		all := request("fencing-token", "42")
		all[0][1], all[3][1] = method, path
		return all
	}
	malformed := "400 " + string(MalformedRequest)
	for name, c := range map[string]struct {
		fields, trailers [][2]string
		body, want       string
	}{
		"a call":                     {request("fencing-token", "42"), nil, "", "200"},
		"a token twice":              {request("fencing-token", "42", "fencing-token", "42"), nil, "", malformed},
		"a padded token":             {request("fencing-token", " 42"), nil, "", "400 " + string(fence.MalformedToken)},
		"a key with a blank behind":  {request("fencing-token", "42", "fencing-key", "k "), nil, "", malformed},
		"an underscore":              {request("fencing-token", "42", "fencing_token", "43"), nil, "", malformed},
		"a name in capitals":         {request("Fencing-Token", "42"), nil, "", "reset"},
		"a line break":               {request("fencing-token", "42", "fencing-key", "a\r\nfencing-token: 43"), nil, "", "reset"},
		"a Connection header":        {request("fencing-token", "42", "connection", "fencing-token"), nil, "", "400"},
		"an Upgrade header":          {request("fencing-token", "42", "upgrade", "websocket"), nil, "", "400"},
		"a Transfer-Encoding header": {request("fencing-token", "42", "transfer-encoding", "chunked"), nil, "x", "400"},
		"an announced trailer":       {request("fencing-token", "42", "trailer", "fencing-token"), [][2]string{{"fencing-token", "43"}}, "x", malformed},
		"a trailer not announced":    {request("fencing-token", "42"), [][2]string{{"fencing-token", "43"}}, "x", "200"},
		"a body that is too short":   {request("fencing-token", "42", "content-length", "5"), nil, "x", "502 " + string(OutcomeUnknown)},
		"a list of lengths":          {request("fencing-token", "42", "content-length", "1, 1"), nil, "", malformed},
		"CONNECT":                    {[][2]string{{":method", "CONNECT"}, {":authority", "gateway:443"}, {"fencing-lease", lease}, {"fencing-token", "42"}}, nil, "", malformed},
		"an absolute path":           {form("GET", "http://elsewhere.example.com/"), nil, "", malformed},
		"a path without a slash":     {form("OPTIONS", "*"), nil, "", malformed},
	} {
		t.Run(name, func(t *testing.T) {
			if got := rawHTTP2(t, g.address["proxy"], c.fields, c.trailers, c.body); got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
			for _, a := range p.calls() {
				if c.want != "200" && !strings.HasPrefix(a.body, "cut off") {
					t.Errorf("it arrived: %+v", a)
				}
				if token := a.header[fence.HeaderToken]; !slices.Equal(token, []string{"42"}) || len(a.trailer) > 0 {
					t.Errorf("token %q and trailers %v arrived", token, a.trailer)
				}
			}
		})
	}
}

// endless is a body of n bytes whose length is not announced.
type endless struct{ n int }

func (e *endless) Read(p []byte) (int, error) {
	if e.n == 0 {
		return 0, io.EOF
	}
	n := min(len(p), e.n)
	clear(p[:n])
	e.n -= n
	return n, nil
}

// TestHugeBody: a body is bounded, announced or not; what the partner got of
// it is not a whole request.
func TestHugeBody(t *testing.T) {
	t.Parallel()
	p := newPartner(t, nil)
	g := start(t, p.URL, func(o *Options) { o.MaxBody = 8 << 20 })
	for name, c := range map[string]struct {
		body   io.Reader
		header http.Header
		status int
		reason fence.Reason
		// whole is how many bytes arrive as a whole request, -1 if none does.
		whole int
	}{
		"at the limit":                       {&endless{8 << 20}, stamped("42"), http.StatusOK, "", 8 << 20},
		"beyond it, not announced":           {&endless{8<<20 + 1}, stamped("42"), http.StatusRequestEntityTooLarge, BodyTooLarge, -1},
		"beyond it, announced":               {bytes.NewReader(make([]byte, 8<<20+1)), stamped("42"), http.StatusRequestEntityTooLarge, BodyTooLarge, -1},
		"with a key, at the limit of those":  {&endless{mostDigested}, stamped("42", HeaderIdempotencyKey, "a"), http.StatusOK, "", mostDigested},
		"with a key, beyond that":            {&endless{mostDigested + 1}, stamped("42", HeaderIdempotencyKey, "b"), http.StatusRequestEntityTooLarge, BodyTooLarge, -1},
		"with a key, beyond the other limit": {&endless{8<<20 + 1}, stamped("42", HeaderIdempotencyKey, "c"), http.StatusRequestEntityTooLarge, BodyTooLarge, -1},
	} {
		t.Run(name, func(t *testing.T) {
			a, err := g.tryCall(t.Context(), http.MethodPost, "/upload", c.body, c.header)
			// A server may close the connection on a sender that goes on, and the
			// answer be lost with it.
			if err == nil && (a.status != c.status || a.reason != c.reason) || err != nil && c.whole >= 0 {
				t.Errorf("%d %s, %v; want %d %s: %s", a.status, a.reason, err, c.status, c.reason, a.body)
			}
			whole := -1
			for _, arrived := range p.calls() {
				if !strings.HasPrefix(arrived.body, "cut off") {
					whole = len(arrived.body)
				}
			}
			if whole != c.whole {
				t.Errorf("%d bytes arrived as a whole request, want %d", whole, c.whole)
			}
		})
	}
}

// TestSlowCaller: a caller that takes its time is cut off, and nothing of an
// idempotent call has left by then.
func TestSlowCaller(t *testing.T) {
	t.Parallel()
	p := newPartner(t, nil)
	g := start(t, p.URL, func(o *Options) { o.CallTimeout = time.Second })
	const fencing = "Host: gateway\r\nFencing-Lease: " + lease + "\r\nFencing-Token: 42\r\nContent-Length: 100\r\n"
	for name, c := range map[string]struct {
		request string
		status  int
		reason  fence.Reason
		arrives bool
	}{
		"in its body":                     {"POST /c HTTP/1.1\r\n" + fencing + "\r\nhalf", http.StatusGatewayTimeout, OutcomeUnknown, true},
		"in the body of an idempotent":    {"POST /c HTTP/1.1\r\n" + fencing + "Idempotency-Key: k\r\n\r\nhalf", http.StatusBadRequest, MalformedRequest, false},
		"in a body that is refused":       {"POST /c HTTP/1.1\r\n" + fencing + "Fencing-Key:\r\n\r\nhalf", http.StatusBadRequest, MalformedRequest, false},
		"in a body of a stale call":       {"POST /c HTTP/1.1\r\n" + strings.Replace(fencing, "42", "7", 1) + "\r\nhalf", http.StatusForbidden, fence.StaleToken, false},
		"before it sends any of the body": {"POST /c HTTP/1.1\r\n" + fencing + "Fencing-Key:\r\n\r\n", http.StatusBadRequest, MalformedRequest, false},
	} {
		t.Run(name, func(t *testing.T) {
			if a := g.call(t, http.MethodPost, "/first", "", stamped("42")); a.status != http.StatusOK {
				t.Fatalf("%+v", a)
			}
			p.calls()
			a := raw(t, g.address["proxy"], c.request)
			if a.status != c.status || a.reason != c.reason {
				t.Errorf("%d %s, want %d %s: %s", a.status, a.reason, c.status, c.reason, a.body)
			}
			if strings.Contains(a.body, g.address["proxy"]) {
				t.Errorf("it is told addresses: %s", a.body)
			}
			if c.arrives {
				eventually(t, "the partner sees it cut off", func() bool {
					calls := p.calls()
					return len(calls) == 1 && strings.HasPrefix(calls[0].body, "cut off")
				})
			} else if calls := p.calls(); len(calls) > 0 {
				t.Errorf("it arrived: %+v", calls)
			}
		})
	}
	t.Run("in its headers", func(t *testing.T) {
		t.Parallel()
		conn, err := net.Dial("tcp", g.address["proxy"])
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close() }()
		if _, err := io.WriteString(conn, "POST /c HTTP/1.1\r\nHost: gat"); err != nil {
			t.Fatal(err)
		}
		if err := conn.SetReadDeadline(time.Now().Add(headerTimeout + patience)); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadAll(conn); err != nil {
			t.Errorf("the connection was not closed: %v", err)
		}
	})
}

// TestPartnerFails: what a partner does wrong is told as what it is: unknown
// once something was sent, and not sent before that. Its address, which may be
// a secret, is not told.
func TestPartnerFails(t *testing.T) {
	t.Parallel()
	bytesOf := func(answer string) func(*testing.T) string {
		return func(t *testing.T) string {
			p := newPartner(t, func(w http.ResponseWriter, r *http.Request) {
				conn, _, err := http.NewResponseController(w).Hijack()
				if err != nil {
					t.Error(err)
					return
				}
				_, _ = io.WriteString(conn, answer)
				_ = conn.Close()
			})
			return p.URL
		}
	}
	for name, c := range map[string]struct {
		partner func(*testing.T) string
		status  int
		reason  fence.Reason
	}{
		"closes the connection":           {bytesOf(""), http.StatusBadGateway, OutcomeUnknown},
		"answers with something else":     {bytesOf("SSH-2.0-secret-partner\r\n"), http.StatusBadGateway, OutcomeUnknown},
		"breaks off in the headers":       {bytesOf("HTTP/1.1 200 OK\r\nX-Half"), http.StatusBadGateway, OutcomeUnknown},
		"answers with a status below 100": {bytesOf("HTTP/1.1 099 Secret-partner\r\nContent-Length: 0\r\n\r\n"), http.StatusBadGateway, OutcomeUnknown},
		"answers with status 000":         {bytesOf("HTTP/1.1 000 Secret-partner\r\nContent-Length: 0\r\n\r\n"), http.StatusBadGateway, OutcomeUnknown},
		"answers with a status of four":   {bytesOf("HTTP/1.1 1000 Secret-partner\r\nContent-Length: 0\r\n\r\n"), http.StatusBadGateway, OutcomeUnknown},
		"switches protocols unasked":      {bytesOf("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: secret-partner\r\n\r\n"), http.StatusBadGateway, OutcomeUnknown},
		"never answers":                   {func(t *testing.T) string { return newHeld(t).URL }, http.StatusGatewayTimeout, OutcomeUnknown},
		"has a name that is nowhere":      {func(*testing.T) string { return "http://secret-partner.invalid" }, http.StatusBadGateway, NotSent},
		"does not listen":                 {func(*testing.T) string { return "http://127.0.0.1:1/secret-partner" }, http.StatusBadGateway, NotSent},
		"speaks plain text, TLS expected": {func(t *testing.T) string { return strings.Replace(newPartner(t, nil).URL, "http", "https", 1) }, http.StatusBadGateway, NotSent},
		"has a certificate of nobody": {func(t *testing.T) string {
			s := newUnstarted(http.NotFoundHandler())
			s.StartTLS()
			t.Cleanup(s.Close)
			return s.URL
		}, http.StatusBadGateway, NotSent},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := c.partner(t)
			g := start(t, url, func(o *Options) { o.CallTimeout = 2 * time.Second })
			a := g.call(t, http.MethodPost, "/capture", "order 7", stamped("42"))
			if a.status != c.status || a.reason != c.reason {
				t.Errorf("%d %s, want %d %s", a.status, a.reason, c.status, c.reason)
			}
			_, host, _ := strings.Cut(url, "://")
			for _, secret := range []string{"secret-partner", host} {
				if strings.Contains(a.body, secret) {
					t.Errorf("the caller is told %q: %s", secret, a.body)
				}
			}
		})
	}
}

// TestNextCall: whatever became of a call, the next one of its caller is judged
// and forwarded as if there had been none, over the same connection where that
// is kept.
func TestNextCall(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		first http.Header
		path  string
		// body is how many bytes it sends.
		body   int
		status int
		reason fence.Reason
		// newer is a token that comes while the first call is in flight.
		newer string
	}{
		"after an answer":              {stamped("41"), "/fine", 0, http.StatusOK, "", ""},
		"after a refused token":        {stamped("40"), "/fine", 0, http.StatusForbidden, fence.StaleToken, ""},
		"after a refused form":         {stamped("41", fence.HeaderKey, ""), "/fine", 0, http.StatusBadRequest, MalformedRequest, ""},
		"after a refused body":         {stamped("41"), "/fine", 2 << 20, http.StatusRequestEntityTooLarge, BodyTooLarge, ""},
		"after a call that timed out":  {stamped("41"), "/never", 0, http.StatusGatewayTimeout, OutcomeUnknown, ""},
		"after one with a body":        {stamped("41"), "/never", 100, http.StatusGatewayTimeout, OutcomeUnknown, ""},
		"after one with a key":         {stamped("41", HeaderIdempotencyKey, "k"), "/never", 0, http.StatusGatewayTimeout, OutcomeUnknown, ""},
		"after one that was overtaken": {stamped("41"), "/never", 0, http.StatusBadGateway, OutcomeUnknown, "42"},
		"after a partner that breaks":  {stamped("41"), "/breaks", 0, http.StatusBadGateway, OutcomeUnknown, ""},
	} {
		for _, protocol := range []string{"HTTP/1.1", "HTTP/2"} {
			t.Run(name+" over "+protocol, func(t *testing.T) {
				t.Parallel()
				p := newPartner(t, func(w http.ResponseWriter, r *http.Request) {
					_, _ = io.Copy(io.Discard, r.Body)
					switch r.URL.Path {
					case "/never":
						<-r.Context().Done()
						panic(http.ErrAbortHandler)
					case "/breaks":
						panic(http.ErrAbortHandler)
					}
				})
				g := start(t, p.URL, func(o *Options) {
					o.MaxBody = 1 << 20
					if o.CallTimeout = 200 * time.Millisecond; c.newer != "" {
						o.CallTimeout, o.Wait = time.Hour, 50*time.Millisecond
					}
				})
				other := *g
				if protocol == "HTTP/2" {
					g.client = http2Client(t, nil)
				}
				if a := g.call(t, http.MethodPost, "/fine", "", stamped("41")); a.status != http.StatusOK {
					t.Fatalf("%+v", a)
				}
				p.calls()
				first := make(chan struct{})
				go func() {
					defer close(first)
					a, err := g.tryCall(t.Context(), http.MethodPost, c.path, &endless{c.body}, c.first)
					// The answer to a body that goes on can be lost with its connection.
					if (err != nil || a.status != c.status || a.reason != c.reason) && (err == nil || c.reason != BodyTooLarge) {
						t.Errorf("the first: %d %s, %v; want %d %s", a.status, a.reason, err, c.status, c.reason)
					}
				}()
				if c.newer != "" {
					eventually(t, "the first call begins", func() bool { return len(p.calls()) > 0 })
					other.call(t, http.MethodPost, "/fine", "", stamped(c.newer))
				}
				<-first
				for range 3 {
					if a := g.call(t, http.MethodPost, "/fine", "", stamped("42")); a.status != http.StatusOK {
						t.Errorf("the next: %d %s", a.status, a.body)
					}
				}
			})
		}
	}
}

// TestTargetArrivesAsSent: the partner gets the target that the caller sent, and
// that an idempotency key stands for, also where readers differ on its meaning.
func TestTargetArrivesAsSent(t *testing.T) {
	t.Parallel()
	p := newPartner(t, nil)
	g := start(t, p.URL)
	for _, target := range []string{
		"/q", "/q?", "/q?x=1&y=%20", "/q?amount=5;cur=EUR", "/q?x=%zz", "/q?x=%", "/q?;", "/q?a&a&a=1", "/q?x=1+1", "/q?=", "/q??", "/q?x=\"<>|^`{}",
		"/q?x=\xe9", "/q?x=a#b", "//q", "/a//b", "/a/../b", "/a/./b", "/%2e%2e/b", "/a%2Fb", "/a%2fb", "/%41", "/a;b=c", "/a/", "/%3F?%3F", "/%00",
		"/q?http://elsewhere.example.com/", "/http://elsewhere.example.com/", "/q?x=" + strings.Repeat("1", 1<<15),
	} {
		a := raw(t, g.address["proxy"], "GET "+target+" HTTP/1.1\r\nHost: gateway\r\nFencing-Lease: "+lease+"\r\nFencing-Token: 42\r\n\r\n")
		calls := p.calls()
		if a.status != http.StatusOK || len(calls) != 1 {
			t.Errorf("%.80q: %d %s, %d calls arrived", target, a.status, a.body, len(calls))
		} else if calls[0].uri != target {
			t.Errorf("%.80q arrived as %.80q", target, calls[0].uri)
		}
	}
}

// TestSpeaksForItself: what the gateway says of itself comes from nobody else,
// whatever part of an answer it stands in.
func TestSpeaksForItself(t *testing.T) {
	t.Parallel()
	say := func(h http.Header, prefix string) {
		for _, name := range []string{HeaderReason, HeaderOutcome, "X-Else"} {
			h.Set(prefix+name, "partner")
		}
	}
	p := newPartner(t, func(w http.ResponseWriter, r *http.Request) {
		say(w.Header(), "")
		w.WriteHeader(http.StatusEarlyHints)
		prefix := http.TrailerPrefix
		if r.URL.Path == "/declared" {
			prefix = ""
			w.Header().Set("Trailer", strings.Join([]string{HeaderReason, HeaderOutcome, "X-Else"}, ", "))
		}
		_, _ = io.WriteString(w, "answer")
		_ = http.NewResponseController(w).Flush()
		say(w.Header(), prefix)
	})
	g := start(t, p.URL)
	for name, client := range map[string]*http.Client{"HTTP/1.1": g.client, "HTTP/2": http2Client(t, nil)} {
		for _, path := range []string{"/declared", "/undeclared"} {
			for _, key := range []string{"", path + name} {
				header := stamped("42")
				if key != "" {
					header.Set(HeaderIdempotencyKey, key)
				}
				var early http.Header
				ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{
					Got1xxResponse: func(_ int, h textproto.MIMEHeader) error { early = http.Header(h); return nil },
				})
				req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+g.address["proxy"]+path, nil)
				if err != nil {
					t.Fatal(err)
				}
				req.Header = header
				resp, err := client.Do(req)
				if err != nil {
					t.Fatal(err)
				}
				if a, err := readAnswer(resp); err != nil || a.body != "answer" {
					t.Errorf("%+v, %v", a, err)
				}
				for part, h := range map[string]http.Header{"early hints": early, "headers": resp.Header, "trailers": resp.Trailer} {
					if h.Get(HeaderReason) != "" || h.Get(HeaderOutcome) != "" || h.Get("X-Else") != "partner" {
						t.Errorf("%s %s: %s of the answer: %v", name, path, part, h)
					}
				}
			}
		}
	}
}

// TestWithheldBody: whoever announces a body and sends none is answered all the
// same, and holds up no end of the gateway.
func TestWithheldBody(t *testing.T) {
	t.Parallel()
	p := newPartner(t, nil)
	g, err := tryStart(t, nil, p.URL, decisions, func(o *Options) {
		o.ProbeAddress, o.MetricsAddress, o.DrainTimeout = "127.0.0.1:0", "127.0.0.1:0", time.Hour
	})
	if err != nil {
		t.Fatal(err)
	}
	defer g.cancel()
	for _, c := range []struct {
		service, target string
		status          int
	}{
		{"decision", "POST /", http.StatusOK},
		{"health-probe", "GET /healthz", http.StatusOK},
		{"health-probe", "GET /readyz", http.StatusOK},
		{"health-probe", "GET /nowhere", http.StatusNotFound},
		{"metrics", "GET /metrics", http.StatusOK},
		{"proxy", "CONNECT /", http.StatusBadRequest},
	} {
		for _, body := range []string{"Content-Length: 7", "Content-Length: 1000000", "Transfer-Encoding: chunked"} {
			a := raw(t, g.address[c.service], c.target+" HTTP/1.1\r\nHost: gateway\r\nFencing-Lease: "+lease+"\r\nFencing-Token: 42\r\n"+body+"\r\n\r\n")
			if a.status != c.status {
				t.Errorf("%s, %s: %d, want %d", c.target, body, a.status, c.status)
			}
			// One that stays.
			conn, err := net.Dial("tcp", g.address[c.service])
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = conn.Close() }()
			if _, err := io.WriteString(conn, c.target+" HTTP/1.1\r\nHost: gateway\r\n"+body+"\r\n\r\n"); err != nil {
				t.Fatal(err)
			}
		}
	}
	ended := make(chan error, 1)
	go func() { ended <- g.stop() }()
	select {
	case err := <-ended:
		if err != nil {
			t.Errorf("the gateway ended with %v", err)
		}
	case <-time.After(patience):
		t.Errorf("the gateway has not ended in %s", patience)
	}
}

// TestAnswerBreaksOff: an answer that the partner breaks off breaks off for the
// caller too, and does not look whole.
func TestAnswerBreaksOff(t *testing.T) {
	t.Parallel()
	p := newPartner(t, func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "half")
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	})
	g := start(t, p.URL)
	for name, client := range map[string]*http.Client{"HTTP/1.1": g.client, "HTTP/2": http2Client(t, nil)} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+g.address["proxy"]+"/", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header = stamped("42")
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		if a, err := readAnswer(resp); err == nil || a.body != "half" {
			t.Errorf("%s: %q, %v", name, a.body, err)
		}
	}
}

// TestDrain: a gateway that ends lets calls in flight end, takes no new ones,
// and cuts off what takes too long.
func TestDrain(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		limit time.Duration
		ends  bool
	}{
		"within the limit": {time.Minute, true},
		"beyond it":        {50 * time.Millisecond, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHeld(t)
			g, err := tryStart(t, nil, h.URL, func(o *Options) { o.DrainTimeout = c.limit })
			if err != nil {
				t.Fatal(err)
			}
			type result struct {
				answer
				err error
			}
			answered := make(chan result, 1)
			go func() {
				a, err := g.tryCall(t.Context(), http.MethodPost, "/a", nil, stamped("42"))
				answered <- result{a, err}
			}()
			eventually(t, "the call begins", func() bool { return len(h.seen()) > 0 })
			g.cancel()
			eventually(t, "new callers are turned away", func() bool {
				conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", g.address["proxy"])
				if err == nil {
					_ = conn.Close()
				}
				return err != nil
			})
			if c.ends {
				close(h.gate("a"))
			}
			ended := g.stop()
			if got := <-answered; c.ends != (got.err == nil && got.status == http.StatusOK) {
				t.Errorf("the call: %+v", got)
			}
			if c.ends != (ended == nil) || !c.ends && !errors.Is(ended, context.DeadlineExceeded) {
				t.Errorf("the gateway ended with %v", ended)
			}
			if !c.ends {
				eventually(t, "the partner sees the call cut off", func() bool { return slices.Contains(h.seen(), "cut a") })
			}
		})
	}
}

// TestProbes: health, readiness and metrics are on ports of their own, and the
// proxy's port judges whatever the path.
func TestProbes(t *testing.T) {
	t.Parallel()
	p := newPartner(t, nil)
	g := start(t, p.URL, decisions, func(o *Options) { o.ProbeAddress, o.MetricsAddress = "127.0.0.1:0", "127.0.0.1:0" })
	get := func(service, path string) answer {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+g.address[service]+path, nil)
		if err != nil {
			t.Fatal(err)
		}
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
	for _, c := range []struct {
		service, path string
		want          int
	}{
		{"health-probe", "/healthz", http.StatusOK},
		{"health-probe", "/readyz", http.StatusOK},
		{"health-probe", "/metrics", http.StatusNotFound},
		{"metrics", "/metrics", http.StatusOK},
		{"metrics", "/healthz", http.StatusNotFound},
		{"proxy", "/healthz", http.StatusBadRequest},
		{"proxy", "/metrics", http.StatusBadRequest},
		{"decision", "/healthz", http.StatusForbidden},
	} {
		if a := get(c.service, c.path); a.status != c.want {
			t.Errorf("%s on %s: %d, want %d", c.path, c.service, a.status, c.want)
		}
	}
	g.call(t, http.MethodPost, "/", "", stamped("42"))
	g.call(t, http.MethodPost, "/", "", stamped("41"))
	g.decide(t, stamped("41"))
	g.check(t, stamped("43"), true)
	metrics := get("metrics", "/metrics").body
	for _, line := range []string{
		`fencedlease_gateway_decisions_total{decision="allowed",reason="",surface="proxy"} 1`,
		`fencedlease_gateway_decisions_total{decision="denied",reason="StaleToken",surface="proxy"} 1`,
		`fencedlease_gateway_decisions_total{decision="denied",reason="StaleToken",surface="http"} 1`,
		`fencedlease_gateway_decisions_total{decision="allowed",reason="",surface="ext_authz"} 1`,
		`fencedlease_gateway_decision_seconds_count{surface="proxy"} 4`,
		`fencedlease_gateway_calls_in_flight 0`,
	} {
		if !strings.Contains(metrics, line+"\n") {
			t.Errorf("no metric %s", line)
		}
	}
	if strings.Contains(metrics, lease) {
		t.Error("a metric names a lease")
	}
}

// TestAccessLog: every call is in the log, and no secret of it.
func TestAccessLog(t *testing.T) {
	t.Parallel()
	p := newPartner(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Set-Cookie", "secret-9")
		_, _ = io.WriteString(w, "secret-10")
	})
	g := start(t, p.URL, decisions)
	secrets := func(token string) http.Header {
		return stamped(token, "Authorization", "Bearer secret-1", fence.HeaderAuthorization, "Bearer secret-2", "Cookie", "secret-3",
			"X-Api-Key", "secret-4", HeaderIdempotencyKey, "secret-5", fence.HeaderKey, "order-7")
	}
	for i, token := range []string{"42", "42", "41", "secret-8"} {
		g.call(t, http.MethodPost, "/secret-6?secret=7", fmt.Sprint("secret-11 ", i), secrets(token))
		g.decide(t, secrets(token))
		g.check(t, secrets(token), true)
	}
	eventually(t, "all lines are there", func() bool { return strings.Count(g.log.String(), "\n") >= 12 })
	log := g.log.String()
	for i := 1; i <= 11; i++ {
		// A token is an order, not a secret, whatever stands there.
		if secret := fmt.Sprint("secret-", i); i != 8 && strings.Contains(log, secret+`"`) || strings.Contains(log, "secret=7") {
			t.Errorf("the log holds %s:\n%s", secret, log)
		}
	}
	for _, want := range []string{`"lease":"shop/orders","key":"order-7","token":"42"`, `"status":200`, `"status":403,"reason":"StaleToken"`, `"surface":"ext_authz"`, `"method":"POST"`} {
		if !strings.Contains(log, want) {
			t.Errorf("the log lacks %s:\n%s", want, log)
		}
	}
}

// TestRunRefuses: what cannot be served is said before anything is.
func TestRunRefuses(t *testing.T) {
	t.Parallel()
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = taken.Close() })
	for name, c := range map[string]struct {
		change func(*Options)
		want   string
	}{
		"an address in use":      {func(o *Options) { o.ProxyAddress = taken.Addr().String() }, "--proxy-bind-address"},
		"a ledger in no folder":  {func(o *Options) { o.LedgerFile = "/nowhere/ledger" }, "/nowhere/ledger"},
		"a certificate nowhere":  {func(o *Options) { o.CertFile, o.KeyFile = "/nowhere/crt", "/nowhere/key" }, "--tls-cert-file"},
		"an authority's nowhere": {func(o *Options) { o.UpstreamCAFile = "/nowhere/ca" }, "--upstream-ca-file"},
		"an option out of range": {func(o *Options) { o.MaxBody = -1 }, "--max-body-bytes=-1"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g, err := tryStart(t, nil, "http://127.0.0.1:1", c.change)
			if err == nil {
				_ = g.stop()
			}
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %s in it", err, c.want)
			}
		})
	}
}
