package gateway

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencedlease/fencedlease/fence"
)

// held is a partner that answers a call only once the test lets it. It keeps
// the order of what began and ended.
type held struct {
	*partner

	mu     sync.Mutex
	events []string
	let    map[string]chan struct{}
}

func newHeld(t *testing.T) *held {
	t.Helper()
	h := &held{let: map[string]chan struct{}{}}
	h.partner = newPartner(t, func(w http.ResponseWriter, r *http.Request) {
		name := strings.TrimPrefix(r.URL.Path, "/")
		_, _ = io.Copy(io.Discard, r.Body)
		h.event("begin " + name)
		select {
		case <-h.gate(name):
			h.event("end " + name)
			_, _ = io.WriteString(w, "done")
		case <-r.Context().Done():
			h.event("cut " + name)
		}
	})
	return h
}

func (h *held) event(e string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.events = append(h.events, e)
}

func (h *held) seen() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.events)
}

func (h *held) gate(name string) chan struct{} {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.let[name] == nil {
		h.let[name] = make(chan struct{})
	}
	return h.let[name]
}

// TestOrderInFlight: a newer token waits for older calls of its key that are
// in flight, up to the limit, and then cancels them; nobody else waits.
func TestOrderInFlight(t *testing.T) {
	const (
		forever = time.Hour
		short   = 50 * time.Millisecond
	)
	type result struct {
		status int
		reason fence.Reason
	}
	ok := result{status: http.StatusOK}
	unknown := result{http.StatusBadGateway, OutcomeUnknown}
	type step struct {
		// call sends a call with a token, and a key; begins waits until the
		// partner has it; cut waits until the partner hears that it was cut off;
		// let lets the partner answer it; waits says that it is judged and waits
		// for older ones; ends waits for its answer.
		call, token, key, begins, cut, let, waits, ends string
	}
	for name, c := range map[string]struct {
		wait   time.Duration
		steps  []step
		want   map[string]result
		events []string
	}{
		"a newer token waits until the older call has ended": {
			forever,
			[]step{{call: "a", token: "41"}, {begins: "a"}, {call: "b", token: "42"}, {waits: "42"}, {let: "a"}, {let: "b"}, {ends: "b"}},
			map[string]result{"a": ok, "b": ok},
			[]string{"begin a", "end a", "begin b", "end b"},
		},
		"it waits for all older ones": {
			forever,
			[]step{
				{call: "a", token: "41"}, {begins: "a"}, {call: "b", token: "41"}, {begins: "b"}, {call: "c", token: "42"},
				{waits: "42"}, {let: "b"}, {ends: "b"}, {let: "a"}, {let: "c"}, {ends: "c"},
			},
			map[string]result{"a": ok, "b": ok, "c": ok},
			[]string{"begin a", "begin b", "end b", "end a", "begin c", "end c"},
		},
		"after the limit the older call is cut off": {
			short,
			[]step{{call: "a", token: "41"}, {begins: "a"}, {call: "b", token: "42"}, {cut: "a"}, {let: "b"}, {ends: "b"}, {ends: "a"}},
			map[string]result{"a": unknown, "b": ok},
			[]string{"begin a", "cut a", "begin b", "end b"},
		},
		"calls with the same token run side by side": {
			forever,
			[]step{{call: "a", token: "41"}, {begins: "a"}, {let: "b"}, {call: "b", token: "41"}, {ends: "b"}, {let: "a"}},
			map[string]result{"a": ok, "b": ok},
			[]string{"begin a", "begin b", "end b", "end a"},
		},
		"another key waits for nobody": {
			forever,
			[]step{{call: "a", token: "41", key: "x"}, {begins: "a"}, {let: "b"}, {call: "b", token: "42", key: "y"}, {ends: "b"}, {let: "a"}},
			map[string]result{"a": ok, "b": ok},
			[]string{"begin a", "begin b", "end b", "end a"},
		},
		"an older token is refused while a newer one is in flight": {
			forever,
			[]step{{call: "b", token: "42"}, {begins: "b"}, {call: "a", token: "41"}, {ends: "a"}, {let: "b"}},
			map[string]result{"a": {http.StatusForbidden, fence.StaleToken}, "b": ok},
			[]string{"begin b", "end b"},
		},
		"of two that wait the newest alone leaves": {
			forever,
			[]step{
				{call: "a", token: "41"}, {begins: "a"}, {call: "b", token: "42"}, {waits: "42"}, {call: "c", token: "43"},
				{waits: "43"}, {let: "c"}, {let: "a"}, {ends: "b"}, {ends: "c"},
			},
			map[string]result{"a": ok, "b": {http.StatusForbidden, fence.StaleToken}, "c": ok},
			[]string{"begin a", "end a", "begin c", "end c"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHeld(t)
			g := start(t, h.URL, func(o *Options) { o.Wait, o.DecisionAddress = c.wait, "127.0.0.1:0" })
			answers := map[string]chan answer{}
			for _, s := range c.steps {
				switch {
				case s.call != "":
					answered := make(chan answer, 1)
					answers[s.call] = answered
					header := stamped(s.token)
					if s.key != "" {
						header.Set(fence.HeaderKey, s.key)
					}
					go func() {
						a, err := g.tryCall(t.Context(), http.MethodPost, "/"+s.call, nil, header)
						if err != nil {
							t.Errorf("call %s: %v", s.call, err)
						}
						answered <- a
					}()
				case s.begins != "":
					eventually(t, s.begins+" begins", func() bool { return slices.Contains(h.seen(), "begin "+s.begins) })
				case s.cut != "":
					eventually(t, s.cut+" is cut off", func() bool { return slices.Contains(h.seen(), "cut "+s.cut) })
				case s.let != "":
					close(h.gate(s.let))
				case s.waits != "":
					// It is recorded, so that a lower one is refused: from here on
					// only the calls in flight hold it up.
					older := fmt.Sprint(mustParse(t, s.waits) - 1)
					eventually(t, s.waits+" is recorded", func() bool {
						return g.decide(t, stamped(older)).reason == fence.StaleToken
					})
				case s.ends != "":
					select {
					case a := <-answers[s.ends]:
						answers[s.ends] <- a
					case <-time.After(patience):
						t.Fatalf("call %s has no answer; the partner saw %q", s.ends, h.seen())
					}
				}
			}
			for call, want := range c.want {
				a := <-answers[call]
				if got := (result{a.status, a.reason}); got != want {
					t.Errorf("call %s: %+v, want %+v: %s", call, got, want, a.body)
				}
			}
			// The partner learns by another connection that a call was cut off: it
			// may hear of the next one's beginning first.
			got := h.seen()
			if !slices.Equal(uncut(got), uncut(c.events)) || !slices.Equal(slices.Sorted(slices.Values(got)), slices.Sorted(slices.Values(c.events))) {
				t.Errorf("the partner saw %q, want %q", got, c.events)
			}
		})
	}
}

func mustParse(t *testing.T, token string) fence.Token {
	t.Helper()
	parsed, err := fence.ParseToken(token)
	if err != nil {
		t.Fatal(err)
	}
	return parsed
}

// TestStoppedCallerHoldsUpNobody: a caller that is stopped while it sends its
// call, or reads the answer, is cut off for a newer token's sake.
func TestStoppedCallerHoldsUpNobody(t *testing.T) {
	stop := func(t *testing.T, address, request string) {
		t.Helper()
		conn, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		if _, err := io.WriteString(conn, request); err != nil {
			t.Fatal(err)
		}
	}
	const fencing = "Host: gateway\r\nFencing-Lease: " + lease + "\r\nFencing-Token: 41\r\n"
	for name, request := range map[string]string{
		"in the middle of its body":        "POST /sends HTTP/1.1\r\n" + fencing + "Content-Length: 100\r\n\r\nhalf",
		"in the middle of a long answer":   "GET /endless HTTP/1.1\r\n" + fencing + "\r\n",
		"before an answer that never ends": "GET /hangs HTTP/1.1\r\n" + fencing + "\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			began := make(chan struct{}, 1)
			p := newPartner(t, func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path == "/next" {
					return
				}
				began <- struct{}{}
				_, err := io.Copy(io.Discard, r.Body)
				for chunk := make([]byte, 1<<20); r.URL.Path == "/endless" && err == nil; {
					_, err = w.Write(chunk)
				}
				<-r.Context().Done()
			})
			g := start(t, p.URL, func(o *Options) { o.Wait = 50 * time.Millisecond })
			stop(t, g.address["proxy"], request)
			<-began
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			a, err := g.tryCall(ctx, http.MethodPost, "/next", nil, stamped("42"))
			if err != nil || a.status != http.StatusOK {
				t.Errorf("the newer call got %d %s, %v", a.status, a.body, err)
			}
		})
	}
}

// TestCallerThatLeft: a caller that has ended its side of the connection and
// reads nothing either is cut off, though no newer token waits.
func TestCallerThatLeft(t *testing.T) {
	t.Parallel()
	var sent atomic.Int64
	p := newPartner(t, func(w http.ResponseWriter, _ *http.Request) {
		var err error
		for chunk := make([]byte, 1<<16); err == nil; sent.Add(1) {
			_, err = w.Write(chunk)
		}
	})
	g := start(t, p.URL, func(o *Options) { o.MetricsAddress = "127.0.0.1:0" })
	inFlight := func(calls string) bool {
		resp, err := g.client.Get("http://" + g.address["metrics"] + "/metrics")
		if err != nil {
			t.Fatal(err)
		}
		a, err := readAnswer(resp)
		if err != nil {
			t.Fatal(err)
		}
		return strings.Contains(a.body, "fencedlease_gateway_calls_in_flight "+calls+"\n")
	}
	conn, err := net.Dial("tcp", g.address["proxy"])
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	if _, err := io.WriteString(conn, "GET /endless HTTP/1.1\r\nHost: gateway\r\nFencing-Lease: "+lease+"\r\nFencing-Token: 42\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	last, still := int64(0), 0
	eventually(t, "every buffer on the way is full", func() bool {
		if now := sent.Load(); now != last || now == 0 {
			last, still = now, 0
		}
		still++
		return still > 50
	})
	if !inFlight("1") {
		t.Error("the call is not in flight")
	}
	if tcp, ok := conn.(*net.TCPConn); !ok || tcp.CloseWrite() != nil {
		t.Fatal("the caller's side does not close")
	}
	eventually(t, "the call has ended", func() bool { return inFlight("0") })
}

// uncut is what the partner saw but for the ends of calls that were cut off.
func uncut(events []string) []string {
	return slices.DeleteFunc(slices.Clone(events), func(e string) bool { return strings.HasPrefix(e, "cut ") })
}
