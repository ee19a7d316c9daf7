package ledger

import (
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/test/env"
)

// TestCrash: the process is killed under load, again and again, and never
// forgets a token whose call has reached the partner.
func TestCrash(t *testing.T) {
	const kills, workers, keys = 100, 8, 16
	program, file := env.Program(t), filepath.Join(t.TempDir(), "ledger")
	var arrived atomic.Pointer[func(arrivals int)]
	p := newPartner(t, func(arrivals int, _ *http.Request) {
		if f := arrived.Load(); f != nil {
			(*f)(arrivals)
		}
	})
	address := freeAddress(t)
	start := func() *exec.Cmd {
		cmd := exec.CommandContext(t.Context(), program, "gateway", "--authority=none", "--authentication=none", "--access-log=false",
			"--ledger-file="+file, "--upstream="+p.URL, "--proxy-bind-address="+address, "--metrics-bind-address=", "--health-probe-bind-address=")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		await(t, "the gateway listens", func() bool {
			c, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", address)
			if err != nil {
				return false
			}
			return c.Close() == nil
		})
		return cmd
	}
	kill := func(cmd *exec.Cmd) {
		if err := cmd.Process.Kill(); err != nil {
			t.Error(err)
		}
	}
	settle := func(cmd *exec.Cmd) {
		_ = cmd.Wait() // it was killed
		// What the killed process had sent arrives before its connections end.
		await(t, "the partner has read all of it", p.quiet)
	}
	const seed = 1
	random := rand.New(rand.NewPCG(seed, 0)) //nolint:gosec // a schedule
	var next atomic.Int64
	for range kills {
		cmd := start()
		remembers(t, p, address)
		dead := make(chan struct{})
		var once sync.Once
		p.mu.Lock()
		at := p.arrivals + 1 + random.IntN(100)
		p.mu.Unlock()
		atOnce := random.IntN(2) == 0
		end := func() { once.Do(func() { kill(cmd); close(dead) }) }
		f := func(arrivals int) {
			switch {
			case arrivals < at:
			case atOnce: // while the call that reached the partner is there
				end()
			default: // wherever the others are
				go end()
			}
		}
		arrived.Store(&f)
		var wg sync.WaitGroup
		for range workers {
			c := newCaller(t)
			wg.Go(func() {
				defer c.CloseIdleConnections()
				for {
					token := fence.Token(next.Add(1))
					if _, err := call(t, c, address, fmt.Sprintf("order-%d", token*7%keys), token); err != nil {
						return // it is dead
					}
				}
			})
		}
		wg.Wait()
		await(t, "it is killed", func() bool {
			select {
			case <-dead:
				return true
			default:
				return false
			}
		})
		arrived.Store(nil)
		settle(cmd)
		if t.Failed() {
			return
		}
	}
	cmd := start()
	remembers(t, p, address)
	kill(cmd)
	settle(cmd)
	t.Logf("%d calls reached the partner", p.arrivals)
}

// remembers checks that an older token than the highest that arrived is
// rejected, for each key.
func remembers(t *testing.T, p *partner, address string) {
	t.Helper()
	c := newCaller(t)
	defer c.CloseIdleConnections()
	for key, token := range p.highest() {
		if token == 1 {
			continue
		}
		if status, err := call(t, c, address, key, token-1); err != nil || status != http.StatusForbidden {
			t.Errorf("key %s: %s had reached the partner, and after a restart %s gets %d, %v", key, token, token-1, status, err)
		}
	}
}

// freeAddress gives one that nobody listens on.
func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	return l.Addr().String()
}
