package gateway

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	authv3 "github.com/envoyproxy/go-control-plane/envoy/service/auth/v3"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/fencedlease/fencedlease/fence"
)

func decisions(o *Options) { o.DecisionAddress, o.ExtAuthzAddress = "127.0.0.1:0", "127.0.0.1:0" }

// check asks the decision service over gRPC, as Envoy does: with a map of
// headers, or with every header as it came.
func (g *running) check(t *testing.T, h http.Header, asTheyCame bool) answer {
	t.Helper()
	conn, err := grpc.NewClient(g.address["ext-authz"], grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	attributes := &authv3.AttributeContext_HttpRequest{Method: http.MethodPost, Path: "/", Headers: map[string]string{}}
	for name, values := range h {
		if attributes.Headers[strings.ToLower(name)] = strings.Join(values, ","); !asTheyCame {
			continue
		}
		for _, value := range values {
			if attributes.HeaderMap == nil {
				attributes.HeaderMap = &corev3.HeaderMap{}
			}
			attributes.HeaderMap.Headers = append(attributes.HeaderMap.Headers, &corev3.HeaderValue{Key: strings.ToLower(name), RawValue: []byte(value)})
		}
	}
	if asTheyCame {
		attributes.Headers = nil
	}
	response, err := authv3.NewAuthorizationClient(conn).Check(t.Context(), &authv3.CheckRequest{
		Attributes: &authv3.AttributeContext{Request: &authv3.AttributeContext_Request{Http: attributes}},
	})
	if err != nil {
		t.Fatal(err)
	}
	a := answer{status: http.StatusOK, header: http.Header{}}
	passed := response.GetOkResponse().GetHeaders()
	if denied := response.GetDeniedResponse(); denied != nil {
		a.status, a.body, passed = int(denied.GetStatus().GetCode()), denied.GetBody(), denied.GetHeaders()
	}
	for _, option := range passed {
		a.header.Add(option.GetHeader().GetKey(), option.GetHeader().GetValue())
	}
	if (response.GetStatus().GetCode() == 0) != (a.status == http.StatusOK) {
		t.Errorf("gRPC code %d with HTTP status %d", response.GetStatus().GetCode(), a.status)
	}
	a.reason = fence.Reason(a.header.Get(HeaderReason))
	return a
}

// TestHeaders: what one reader could take for another value than the next one
// is refused, 400 as a proxy and 403 as a decision service, and never arrives.
func TestHeaders(t *testing.T) {
	p := newPartner(t, nil)
	g := start(t, p.URL, decisions)
	long := strings.Repeat("k", mostValue)
	with := func(name string, values ...string) http.Header {
		h := stamped("42")
		h[name] = values
		return h
	}
	without := func(name string) http.Header {
		h := stamped("42")
		delete(h, name)
		return h
	}
	type judged = [3]string
	type row struct {
		header http.Header
		// reason is empty where the call passes; then judged is what arrives.
		reason fence.Reason
		judged judged
	}
	plain := judged{lease, "42", lease}
	rows := map[string]row{
		"the least":                      {stamped("42"), "", plain},
		"a key":                          {with(fence.HeaderKey, "order-7"), "", judged{lease, "42", "order-7"}},
		"the longest key":                {with(fence.HeaderKey, long), "", judged{lease, "42", long}},
		"a key of punctuation":           {with(fence.HeaderKey, `!"#$%&'()*+-./:;<=>?@[\]^_{|}~`+"`"), "", judged{lease, "42", `!"#$%&'()*+-./:;<=>?@[\]^_{|}~` + "`"}},
		"keys tell case apart":           {with(fence.HeaderKey, "Order-7"), "", judged{lease, "42", "Order-7"}},
		"a name with dots":               {with(fence.HeaderLease, "shop/a.b"), "", judged{"shop/a.b", "42", "shop/a.b"}},
		"the highest token":              {http.Header{fence.HeaderLease: {"shop/high"}, fence.HeaderToken: {"9007199254740991"}}, "", judged{"shop/high", "9007199254740991", "shop/high"}},
		"no token":                       {without(fence.HeaderToken), fence.Unstamped, judged{}},
		"no lease":                       {without(fence.HeaderLease), fence.Unstamped, judged{}},
		"nothing":                        {http.Header{}, fence.Unstamped, judged{}},
		"a token twice":                  {with(fence.HeaderToken, "41", "42"), MalformedRequest, judged{}},
		"the same token twice":           {with(fence.HeaderToken, "42", "42"), MalformedRequest, judged{}},
		"a lease twice":                  {with(fence.HeaderLease, lease, lease), MalformedRequest, judged{}},
		"a key twice":                    {with(fence.HeaderKey, "a", "b"), MalformedRequest, judged{}},
		"an idempotency key twice":       {with(HeaderIdempotencyKey, "a", "a"), MalformedRequest, judged{}},
		"a bearer token":                 {with(fence.HeaderAuthorization, "Bearer a"), "", plain},
		"a bearer token twice":           {with(fence.HeaderAuthorization, "Bearer a", "Bearer a"), MalformedRequest, judged{}},
		"two bearer tokens in one":       {with(fence.HeaderAuthorization, "Bearer a, Bearer b"), MalformedRequest, judged{}},
		"two tokens in one":              {with(fence.HeaderToken, "41, 42"), fence.MalformedToken, judged{}},
		"two tokens without a blank":     {with(fence.HeaderToken, "42,42"), fence.MalformedToken, judged{}},
		"two leases in one":              {with(fence.HeaderLease, "shop/orders,shop/orders"), MalformedRequest, judged{}},
		"two keys in one":                {with(fence.HeaderKey, "a,b"), MalformedRequest, judged{}},
		"two idempotency keys in one":    {with(HeaderIdempotencyKey, "a,b"), MalformedRequest, judged{}},
		"an empty token":                 {with(fence.HeaderToken, ""), fence.MalformedToken, judged{}},
		"an empty lease":                 {with(fence.HeaderLease, ""), MalformedRequest, judged{}},
		"an empty key":                   {with(fence.HeaderKey, ""), MalformedRequest, judged{}},
		"an empty idempotency key":       {with(HeaderIdempotencyKey, ""), MalformedRequest, judged{}},
		"a key that is too long":         {with(fence.HeaderKey, long+"k"), MalformedRequest, judged{}},
		"an idempotency key too long":    {with(HeaderIdempotencyKey, long+"k"), MalformedRequest, judged{}},
		"a lease that is too long":       {with(fence.HeaderLease, "shop/"+long), MalformedRequest, judged{}},
		"a token of 8 kB":                {with(fence.HeaderToken, strings.Repeat("4", 8<<10)), fence.MalformedToken, judged{}},
		"a key with a blank":             {with(fence.HeaderKey, "a b"), MalformedRequest, judged{}},
		"a key with a tab":               {with(fence.HeaderKey, "a\tb"), MalformedRequest, judged{}},
		"a key that is not ASCII":        {with(fence.HeaderKey, "\u00fcber"), MalformedRequest, judged{}},
		"a key that is not UTF-8":        {with(fence.HeaderKey, "a\xff"), MalformedRequest, judged{}},
		"a lease without a namespace":    {with(fence.HeaderLease, "orders"), MalformedRequest, judged{}},
		"a lease without a name":         {with(fence.HeaderLease, "shop/"), MalformedRequest, judged{}},
		"a lease of three parts":         {with(fence.HeaderLease, "shop/orders/x"), MalformedRequest, judged{}},
		"a lease that climbs":            {with(fence.HeaderLease, "shop/.."), MalformedRequest, judged{}},
		"a lease in capitals":            {with(fence.HeaderLease, "shop/Orders"), MalformedRequest, judged{}},
		"a name of 64 characters":        {with(fence.HeaderLease, "shop/"+strings.Repeat("a", 64)), MalformedRequest, judged{}},
		"a header that is not one of us": {with("Fencing-Tokens", "42"), MalformedRequest, judged{}},
		"an answer's header":             {with(HeaderOutcome, outcomeRecorded), MalformedRequest, judged{}},
		"an underscore":                  {with("Fencing_Token", "42"), MalformedRequest, judged{}},
		"an underscore beside the dash":  {with("Fencing-Token_", "42"), MalformedRequest, judged{}},
		"an underscore in another":       {with("Idempotency_Key", "k"), MalformedRequest, judged{}},
		"a dot":                          {with("Fencing.Key", "k"), MalformedRequest, judged{}},
		"another sign":                   {with("Fencing~Key", "k"), MalformedRequest, judged{}},
		"Connection names one":           {with("Connection", "fencing-token"), MalformedRequest, judged{}},
		"Connection names one of many":   {with("Connection", "close, Fencing-Key ,x"), MalformedRequest, judged{}},
		"a second Connection names one":  {with("Connection", "", "Fencing-Lease"), MalformedRequest, judged{}},
		"Connection names idempotency":   {with("Connection", "Idempotency-Key"), MalformedRequest, judged{}},
		"Connection names a variant":     {with("Connection", "Fencing_Token"), MalformedRequest, judged{}},
		"Connection names others":        {with("Connection", "X-Other"), "", plain},
		"names that only look alike":     {with("X-Fencing-Token", "41"), "", plain},
	}
	// What is no token in one place is none in any: the parser's own table is
	// longer, and these are the ones that other parsers take.
	for _, token := range []string{"+42", "-1", "0", "042", "0x2a", "4_2", "42.0", "4e1", "1.0e+09", "9007199254740992", "1234567890123456789", "12345678901234567890", "\u0664\u0662", "\uff14\uff12"} {
		rows[fmt.Sprintf("token %+q", token)] = row{with(fence.HeaderToken, token), fence.MalformedToken, judged{}}
	}
	for name, c := range rows {
		t.Run(name, func(t *testing.T) {
			check := func(surface string, refused int, a answer) {
				t.Helper()
				want := http.StatusOK
				if c.reason != "" {
					want = refused
				}
				if a.status != want || a.reason != c.reason {
					t.Errorf("%s: %d %s, want %d %s: %s", surface, a.status, a.reason, want, c.reason, a.body)
				}
			}
			ours := func(h http.Header) judged {
				return judged{h.Get(fence.HeaderLease), h.Get(fence.HeaderToken), h.Get(fence.HeaderKey)}
			}
			check("proxy", http.StatusBadRequest, raw(t, g.address["proxy"], lined("POST", "/capture", c.header)))
			arrived := p.calls()
			if (len(arrived) > 0) != (c.reason == "") {
				t.Errorf("arrived %d times", len(arrived))
			}
			for _, a := range arrived {
				for _, name := range []string{fence.HeaderLease, fence.HeaderToken, fence.HeaderKey} {
					if len(a.header[name]) != 1 {
						t.Errorf("%s arrived as %q", name, a.header[name])
					}
				}
				if diff := cmp.Diff(c.judged, ours(a.header)); diff != "" {
					t.Errorf("arrived (-want +got):\n%s", diff)
				}
			}
			decided := map[string]answer{
				"decision service":       raw(t, g.address["decision"], lined("GET", "/", c.header)),
				"ext_authz, as they are": g.check(t, c.header, true),
			}
			if utf8.ValidString(c.header.Get(fence.HeaderKey)) { // the map holds nothing else
				decided["ext_authz"] = g.check(t, c.header, false)
			}
			for surface, a := range decided {
				// Envoy joins what is repeated, so that it reads as a list.
				if surface == "ext_authz" && c.reason == MalformedRequest && a.reason == fence.MalformedToken {
					a.reason = c.reason
				}
				check(surface, http.StatusForbidden, a)
				if c.reason == "" && ours(a.header) != c.judged {
					t.Errorf("%s passes on %v, want %v", surface, ours(a.header), c.judged)
				}
			}
		})
	}
}

// lined writes a request as bytes, headers as they are.
func lined(method, target string, h http.Header) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s HTTP/1.1\r\nHost: gateway\r\n", method, target)
	for _, name := range slices.Sorted(maps.Keys(h)) {
		for _, value := range h[name] {
			fmt.Fprintf(&b, "%s: %s\r\n", name, value)
		}
	}
	b.WriteString("\r\n")
	return b.String()
}

// TestBytes: requests as no client library writes them. What net/http refuses
// itself has no reason.
func TestBytes(t *testing.T) {
	p := newPartner(t, nil)
	g := start(t, p.URL, func(o *Options) { decisions(o); o.MaxBody = 1 << 10 })
	const fencing = "Host: gateway\r\nFencing-Lease: " + lease + "\r\nFencing-Token: 42\r\n"
	for name, c := range map[string]struct {
		request string
		status  int
		reason  fence.Reason
		// body is what arrives; judged are the values of the fencing headers.
		body string
		key  string
	}{
		"in small letters":                        {"POST /c HTTP/1.1\r\n" + strings.ToLower(fencing) + "\r\n", 200, "", "", lease},
		"blanks around a value are no part of it": {"POST /c HTTP/1.1\r\n" + fencing + "Fencing-Key: \t k \t\r\n\r\n", 200, "", "", "k"},
		"other white space is":                    {"POST /c HTTP/1.1\r\n" + fencing + "Fencing-Key: k\u00a0\r\n\r\n", 400, MalformedRequest, "", ""},
		"a blank before the colon":                {"POST /c HTTP/1.1\r\n" + fencing + "Fencing-Key : k\r\n\r\n", 400, "", "", ""},
		"a blank before the name":                 {"POST /c HTTP/1.1\r\n Fencing-Key: k\r\n" + fencing + "\r\n", 400, "", "", ""},
		"a folded value":                          {"POST /c HTTP/1.1\r\n" + fencing + "Fencing-Key: a\r\n b\r\n\r\n", 400, MalformedRequest, "", ""},
		"a folded token":                          {"POST /c HTTP/1.1\r\nHost: gateway\r\nFencing-Lease: " + lease + "\r\nFencing-Token: 4\r\n 2\r\n\r\n", 400, fence.MalformedToken, "", ""},
		"a fold before a value is such a blank":   {"POST /c HTTP/1.1\r\n" + fencing + "Fencing-Key:\r\n k\r\n\r\n", 200, "", "", "k"},
		"a zero byte":                             {"POST /c HTTP/1.1\r\n" + fencing + "Fencing-Key: a\x00b\r\n\r\n", 400, "", "", ""},
		"a bare carriage return":                  {"POST /c HTTP/1.1\r\n" + fencing + "Fencing-Key: a\rFencing-Token: 43\r\n\r\n", 400, "", "", ""},
		"a name that is not ASCII":                {"POST /c HTTP/1.1\r\n" + fencing + "Fencing-K\u00e9y: k\r\n\r\n", 400, "", "", ""},
		"no colon":                                {"POST /c HTTP/1.1\r\n" + fencing + "Fencing-Key\r\n\r\n", 400, "", "", ""},
		"headers of 80 kB":                        {"POST /c HTTP/1.1\r\n" + fencing + "X: " + strings.Repeat("x", 80<<10) + "\r\n\r\n", 431, "", "", ""},
		"a token in trailers":                     {"POST /c HTTP/1.1\r\n" + fencing + "Trailer: Fencing-Token\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nFencing-Token: 43\r\n\r\n", 400, MalformedRequest, "", ""},
		"a token in trailers alone":               {"POST /c HTTP/1.1\r\nHost: gateway\r\nFencing-Lease: " + lease + "\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nFencing-Token: 42\r\n\r\n", 400, fence.Unstamped, "", ""},
		"trailers are dropped":                    {"POST /c HTTP/1.1\r\n" + fencing + "Trailer: X-Sum\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX-Sum: 1\r\nFencing-Token: 43\r\n\r\n", 200, "", "ok", lease},
		"Content-Length twice":                    {"POST /c HTTP/1.1\r\n" + fencing + "Content-Length: 2\r\nContent-Length: 3\r\n\r\nabc", 400, "", "", ""},
		"a list of Content-Lengths":               {"POST /c HTTP/1.1\r\n" + fencing + "Content-Length: 2, 3\r\n\r\nabc", 400, "", "", ""},
		"a signed Content-Length":                 {"POST /c HTTP/1.1\r\n" + fencing + "Content-Length: +2\r\n\r\nab", 400, "", "", ""},
		"a body within the limit":                 {"POST /c HTTP/1.1\r\n" + fencing + "Content-Length: 2\r\n\r\nab", 200, "", "ab", lease},
		"Content-Length and chunks: the chunks":   {"POST /c HTTP/1.1\r\n" + fencing + "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", 200, "", "ok", lease},
		"an unknown transfer encoding":            {"POST /c HTTP/1.1\r\n" + fencing + "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 501, "", "", ""},
		"a malformed chunk":                       {"POST /c HTTP/1.1\r\n" + fencing + "Idempotency-Key: k\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nok\r\n0\r\n\r\n", 400, MalformedRequest, "", ""},
		"an announced body that is too long":      {"POST /c HTTP/1.1\r\n" + fencing + "Content-Length: 1025\r\n\r\n", 413, BodyTooLarge, "", ""},
		"an absolute target":                      {"POST http://partner.example.com/c HTTP/1.1\r\n" + fencing + "\r\n", 400, MalformedRequest, "", ""},
		"a target without a slash":                {"OPTIONS * HTTP/1.1\r\n" + fencing + "\r\n", 400, MalformedRequest, "", ""},
		"CONNECT":                                 {"CONNECT partner.example.com:443 HTTP/1.1\r\n" + fencing + "\r\n", 400, MalformedRequest, "", ""},
		"TRACE":                                   {"TRACE /c HTTP/1.1\r\n" + fencing + "\r\n", 400, MalformedRequest, "", ""},
		"an upgrade to websocket":                 {"GET /c HTTP/1.1\r\n" + fencing + "Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n", 400, MalformedRequest, "", ""},
		"an upgrade to HTTP/2":                    {"GET /c HTTP/1.1\r\n" + fencing + "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n", 400, MalformedRequest, "", ""},
		"an upgrade after an empty one":           {"GET /c HTTP/1.1\r\n" + fencing + "Connection: Upgrade\r\nUpgrade:\r\nUpgrade: websocket\r\n\r\n", 400, MalformedRequest, "", ""},
		"no host":                                 {"GET /c HTTP/1.1\r\nFencing-Lease: " + lease + "\r\nFencing-Token: 42\r\n\r\n", 400, "", "", ""},
		"HTTP/1.0":                                {"GET /c HTTP/1.0\r\n" + fencing + "\r\n", 200, "", "", lease},
	} {
		t.Run(name, func(t *testing.T) {
			a := raw(t, g.address["proxy"], c.request)
			if a.status != c.status || a.reason != c.reason {
				t.Errorf("%d %q, want %d %q: %s", a.status, a.reason, c.status, c.reason, a.body)
			}
			arrived := p.calls()
			if c.status != http.StatusOK {
				if len(arrived) > 0 {
					t.Errorf("it arrived: %+v", arrived)
				}
				if strings.Contains(name, "folded") || strings.Contains(name, "trailers") {
					// A proxy that asks for a verdict takes any other status for a failure.
					if a := raw(t, g.address["decision"], c.request); a.status != http.StatusForbidden || a.reason != c.reason {
						t.Errorf("the decision service answers %d %q: %s", a.status, a.reason, a.body)
					}
				}
				return
			}
			if len(arrived) != 1 {
				t.Fatalf("%d calls arrived", len(arrived))
			}
			got := arrived[0]
			want := map[string][]string{fence.HeaderLease: {lease}, fence.HeaderToken: {"42"}, fence.HeaderKey: {c.key}}
			for name, values := range want {
				if !slices.Equal(got.header[name], values) {
					t.Errorf("%s arrived as %q, want %q", name, got.header[name], values)
				}
			}
			if got.body != c.body || len(got.trailer) > 0 || len(got.header["Trailer"]) > 0 {
				t.Errorf("arrived with body %q and trailers %v, want %q and none", got.body, got.trailer, c.body)
			}
		})
	}
}

// asVariable is a header's name as CGI and its kin hand it on.
func asVariable(name string) string {
	return strings.Map(func(r rune) rune {
		if r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' {
			return r
		}
		return '_'
	}, strings.ToUpper(name))
}

// FuzzReadCall: no headers make it panic or let through what has two readings,
// and what passes reads the same once more.
func FuzzReadCall(f *testing.F) {
	f.Add("shop/orders", "42", "order-7", "Fencing_Token", "42", "close, Fencing-Token")
	f.Add("shop/orders", "41,42", "a b", "Fencing-Token", "43", "")
	f.Add("/", "", "", "idempotency-key", "\x00", ",,")
	f.Fuzz(func(t *testing.T, leaseName, token, key, name, value, connection string) {
		h := http.Header{}
		h.Add(fence.HeaderLease, leaseName)
		h.Add(fence.HeaderToken, token)
		h.Add(fence.HeaderKey, key)
		h.Add("Connection", connection)
		h.Add(name, value)
		c, problem := readCall(h, nil)
		if problem != nil {
			if problem.Status != http.StatusBadRequest || problem.Reason != MalformedRequest && problem.Reason != fence.Unstamped {
				t.Fatalf("%+v", problem)
			}
			if len(problem.Detail) > 1<<10 {
				t.Fatalf("a detail of %d bytes", len(problem.Detail))
			}
			return
		}
		for _, values := range [][]string{h[fence.HeaderLease], h[fence.HeaderToken], h[fence.HeaderKey]} {
			if len(values) != 1 {
				t.Fatalf("passed with %q", h)
			}
		}
		if strings.ContainsAny(c.id.Lease+c.id.Key+c.idempotencyKey, ", \t\r\n\x00") {
			t.Fatalf("passed as %+v", c)
		}
		for name := range h {
			for _, ours := range known {
				if name != ours && asVariable(name) == asVariable(ours) {
					t.Fatalf("passed with header %q", name)
				}
			}
		}
		anew := http.Header{}
		for _, judged := range c.judgedHeaders() {
			anew.Set(judged[0], judged[1])
		}
		if c.idempotencyKey != "" {
			anew.Set(HeaderIdempotencyKey, c.idempotencyKey)
		}
		if again, problem := readCall(anew, nil); problem != nil || again != c {
			t.Fatalf("%+v reads as %+v, %v", c, again, problem)
		}
	})
}
