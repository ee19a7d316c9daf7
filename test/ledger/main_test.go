// Package ledger tests what the gateway remembers, at the partner: across
// kill -9 of the real process, and across replicas.
package ledger

import (
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/fencedlease/fencedlease/fence"
)

const lease = "shop/orders"

// partner is where calls go. It knows what arrived.
type partner struct {
	*httptest.Server

	mu       sync.Mutex
	arrivals int
	// tokens are the highest that arrived, by key; running are those of the
	// calls that have arrived and not ended.
	tokens  map[string]fence.Token
	running map[string]map[fence.Token]int
	open    map[net.Conn]bool
	// cut tells that calls are cut off, which it may learn late.
	cut bool
	t   testing.TB
}

// newPartner starts one; work is done while a call is there.
func newPartner(t testing.TB, work func(arrivals int, r *http.Request)) *partner {
	p := &partner{tokens: map[string]fence.Token{}, running: map[string]map[fence.Token]int{}, open: map[net.Conn]bool{}, t: t}
	p.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		arrivals, left := p.arrive(r)
		defer left()
		work(arrivals, r)
	}))
	p.Config.ConnState = func(c net.Conn, state http.ConnState) {
		p.mu.Lock()
		defer p.mu.Unlock()
		switch state {
		case http.StateNew:
			p.open[c] = true
		case http.StateClosed:
			delete(p.open, c)
		}
	}
	p.Start()
	t.Cleanup(p.Close)
	return p
}

// arrive checks that tokens never go down, and that no older call of the key
// is still there.
func (p *partner) arrive(r *http.Request) (arrivals int, left func()) {
	key := r.Header.Get(fence.HeaderKey)
	token, err := fence.ParseToken(r.Header.Get(fence.HeaderToken))
	if err != nil {
		p.t.Errorf("a call arrived without a token: %v", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.arrivals++
	if highest := p.tokens[key]; token < highest {
		p.t.Errorf("key %s: token %s arrived after %s", key, token, highest)
	}
	p.tokens[key] = max(p.tokens[key], token)
	if p.running[key] == nil {
		p.running[key] = map[fence.Token]int{}
	}
	for other := range p.running[key] {
		if other < token && !p.cut {
			p.t.Errorf("key %s: token %s arrived while a call with %s was in flight", key, token, other)
		}
	}
	p.running[key][token]++
	return p.arrivals, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.running[key][token]--; p.running[key][token] == 0 {
			delete(p.running[key], token)
		}
	}
}

// highest gives the highest token that arrived, of each key.
func (p *partner) highest() map[string]fence.Token {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := map[string]fence.Token{}
	for key, token := range p.tokens {
		all[key] = token
	}
	return all
}

// quiet tells whether nobody is connected.
func (p *partner) quiet() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.open) == 0
}

// newCaller gives a client that shares no connection with another.
func newCaller(t testing.TB) *http.Client {
	transport := &http.Transport{MaxIdleConnsPerHost: 64}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

// call makes one call, and gives the status of the answer.
func call(t testing.TB, c *http.Client, address, key string, token fence.Token) (int, error) {
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+address+"/capture", nil)
	if err != nil {
		return 0, err
	}
	req.Header.Set(fence.HeaderLease, lease)
	req.Header.Set(fence.HeaderKey, key)
	req.Header.Set(fence.HeaderToken, strconv.FormatInt(int64(token), 10))
	resp, err := c.Do(req)
	if err != nil {
		return 0, err
	}
	_, err = io.Copy(io.Discard, resp.Body)
	_ = resp.Body.Close()
	return resp.StatusCode, err
}

func await(t testing.TB, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	limit := time.After(time.Minute)
	for !ok() {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatalf("waited a minute until %s", what)
		}
	}
}
