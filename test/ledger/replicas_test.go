package ledger

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/gateway"
	"github.com/fencedlease/fencedlease/gateway/ledger/postgres"
	"github.com/fencedlease/fencedlease/sqlfence"
	"github.com/fencedlease/fencedlease/sqlfence/pgtest"
)

// newReplicas starts two gateways on one database.
func newReplicas(t *testing.T, upstream string, wait time.Duration) (addresses [2]string) {
	server := pgtest.Start(t)
	url := server.URL("postgres", "postgres")
	c, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Exec(t.Context(), sqlfence.Schema+postgres.Schema); err != nil {
		t.Fatal(err)
	}
	if err := c.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	for i := range addresses {
		o := gateway.Defaults()
		o.Authority, o.Authentication, o.AccessLog = gateway.AuthorityNone, gateway.AuthenticationNone, false
		o.LedgerURL, o.Upstream, o.Wait = url, upstream, wait
		o.ProxyAddress, o.ProbeAddress, o.MetricsAddress = "127.0.0.1:0", "", ""
		ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
		listening, done := make(chan string, 1), make(chan error, 1)
		go func() {
			done <- gateway.Run(ctx, nil, o, io.Discard, func(_ string, a net.Addr) { listening <- a.String() })
		}()
		select {
		case addresses[i] = <-listening:
		case err := <-done:
			cancel()
			t.Fatalf("the gateway ended: %v", err)
		}
		t.Cleanup(func() {
			cancel()
			if err := <-done; err != nil {
				t.Errorf("the gateway ended with %v", err)
			}
		})
	}
	return addresses
}

// TestReplicas: whichever replica old and new tokens come to, and in whatever
// order, at the partner those of one key never go down, and no older call is
// there beside a newer one.
func TestReplicas(t *testing.T) {
	const workers, calls, keys, seed = 12, 40, 2, 1
	p := newPartner(t, func(arrivals int, r *http.Request) {
		select { // held for some time, so that others come meanwhile
		case <-time.After(time.Duration(arrivals%7) * time.Millisecond):
		case <-r.Context().Done():
		}
	})
	addresses := newReplicas(t, p.URL, time.Minute)
	var newest [keys]atomic.Int64
	var allowed, stale atomic.Int64
	var wg sync.WaitGroup
	for worker := range workers {
		random := rand.New(rand.NewPCG(seed, uint64(worker))) //nolint:gosec // a schedule
		c := newCaller(t)
		wg.Go(func() {
			for range calls {
				key := random.IntN(keys)
				token := newest[key].Load()
				switch random.IntN(4) {
				case 0: // a hand-over
					token = newest[key].Add(1)
				case 1: // somebody who was paused
					token -= int64(random.IntN(3))
				}
				status, err := call(t, c, addresses[random.IntN(len(addresses))], fmt.Sprintf("order-%d", key), fence.Token(max(1, token)))
				switch {
				case err == nil && status == http.StatusOK:
					allowed.Add(1)
				case err == nil && status == http.StatusForbidden:
					stale.Add(1)
				default:
					t.Errorf("token %d: status %d, %v", token, status, err)
				}
			}
		})
	}
	wg.Wait()
	t.Logf("%d calls were let through, %d were stale", allowed.Load(), stale.Load())
	if allowed.Load() < calls || stale.Load() < calls {
		t.Error("the schedule shows nothing")
	}
	// Each replica knows what came to the other.
	c := newCaller(t)
	for key, token := range p.highest() {
		for _, address := range addresses {
			for presented, want := range map[fence.Token]int{token: http.StatusOK, token - 1: http.StatusForbidden} {
				if status, err := call(t, c, address, key, presented); err != nil || status != want {
					t.Errorf("key %s, token %s: status %d, %v; want %d", key, presented, status, err, want)
				}
			}
		}
	}
}

// TestReplicasCancel: past the limit a newer call that waits in one replica
// cancels the older one in the other, and leaves once that has ended.
func TestReplicasCancel(t *testing.T) {
	const key = "order-7"
	arrived := make(chan struct{}, 2)
	p := newPartner(t, func(_ int, r *http.Request) {
		arrived <- struct{}{}
		if r.Header.Get(fence.HeaderToken) == "41" {
			<-r.Context().Done() // it never answers
		}
	})
	p.cut = true
	addresses := newReplicas(t, p.URL, 100*time.Millisecond)
	older := make(chan int, 1)
	go func() {
		status, err := call(t, newCaller(t), addresses[0], key, 41)
		if err != nil {
			t.Errorf("the older call: %v", err)
		}
		older <- status
	}()
	<-arrived
	if status, err := call(t, newCaller(t), addresses[1], key, 42); err != nil || status != http.StatusOK {
		t.Fatalf("the newer call: status %d, %v", status, err)
	}
	if status := <-older; status != http.StatusBadGateway {
		t.Errorf("the older call's outcome is unknown, and its caller gets %d", status)
	}
	if status, err := call(t, newCaller(t), addresses[0], key, 41); err != nil || status != http.StatusForbidden {
		t.Errorf("the older token again: status %d, %v", status, err)
	}
}
