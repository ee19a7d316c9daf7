package gateway

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"sync/atomic"
	"testing"
)

// TestProxy: a stale call never reaches the partner, nor does one that does
// not say what it presents; and none does after the gateway was restarted.
func TestProxy(t *testing.T) {
	var reached atomic.Int64
	partner := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		reached.Add(1)
		_, _ = io.WriteString(w, r.Header.Get("Fencing-Token"))
	}))
	defer partner.Close()
	file := filepath.Join(t.TempDir(), "ledger")
	start := func() (address string, stop func()) {
		o := Defaults()
		o.Authority, o.Authentication = AuthorityNone, AuthenticationNone
		o.LedgerFile, o.Upstream = file, partner.URL
		o.ProxyAddress, o.ProbeAddress, o.MetricsAddress = "127.0.0.1:0", "", ""
		ctx, cancel := context.WithCancel(t.Context())
		listening, done := make(chan string, 1), make(chan error, 1)
		go func() {
			done <- Run(ctx, nil, o, io.Discard, func(_ string, a net.Addr) { listening <- a.String() })
		}()
		select {
		case address = <-listening:
		case err := <-done:
			t.Fatalf("the gateway ended: %v", err)
		}
		return address, func() {
			cancel()
			if err := <-done; err != nil {
				t.Errorf("the gateway ended with %v", err)
			}
		}
	}
	call := func(address string, headers ...string) int {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+address+"/capture", nil)
		if err != nil {
			t.Fatal(err)
		}
		for i := 0; i < len(headers); i += 2 {
			req.Header.Add(headers[i], headers[i+1])
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		return resp.StatusCode
	}
	const lease = "shop/orders"
	address, stop := start()
	for _, c := range []struct {
		name    string
		headers []string
		want    int
		arrives bool
	}{
		{"a first token", []string{"Fencing-Lease", lease, "Fencing-Token", "41"}, http.StatusOK, true},
		{"a newer one", []string{"Fencing-Lease", lease, "Fencing-Token", "42"}, http.StatusOK, true},
		{"the same again", []string{"Fencing-Lease", lease, "Fencing-Token", "42"}, http.StatusOK, true},
		{"a stale one", []string{"Fencing-Lease", lease, "Fencing-Token", "41"}, http.StatusForbidden, false},
		{"another key of the lease", []string{"Fencing-Lease", lease, "Fencing-Token", "41", "Fencing-Key", "other"}, http.StatusOK, true},
		{"no token", []string{"Fencing-Lease", lease}, http.StatusBadRequest, false},
		{"no lease", []string{"Fencing-Token", "42"}, http.StatusBadRequest, false},
		{"a malformed token", []string{"Fencing-Lease", lease, "Fencing-Token", "042"}, http.StatusBadRequest, false},
		{"a repeated token", []string{"Fencing-Lease", lease, "Fencing-Token", "42", "Fencing-Token", "42"}, http.StatusBadRequest, false},
		{"two in one", []string{"Fencing-Lease", lease, "Fencing-Token", "41, 42"}, http.StatusBadRequest, false},
		{"a Connection header that names one", []string{"Fencing-Lease", lease, "Fencing-Token", "42", "Connection", "Fencing-Token"}, http.StatusBadRequest, false},
	} {
		before := reached.Load()
		if got := call(address, c.headers...); got != c.want || (reached.Load() > before) != c.arrives {
			t.Errorf("%s: status %d, arrived %t; want %d, %t", c.name, got, reached.Load() > before, c.want, c.arrives)
		}
	}
	stop()
	address, stop = start()
	defer stop()
	if got := call(address, "Fencing-Lease", lease, "Fencing-Token", "41"); got != http.StatusForbidden {
		t.Errorf("after a restart a stale token gets %d", got)
	}
}
