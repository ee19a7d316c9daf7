package integration

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/test/env"
)

var errCrashed = errors.New("the operator crashed")

// crasher ends an operator at its n-th write to leases and claims: before it
// reaches the API server, or after it did and before the answer counts.
// Nothing leaves the operator afterwards.
type crasher struct {
	at      int64
	after   bool
	writes  atomic.Int64
	crashed chan struct{}
	once    sync.Once
}

func (c *crasher) write(do func() error) error {
	n := c.writes.Add(1)
	switch {
	case n < c.at:
		return do()
	case n == c.at:
		if c.after {
			_ = do()
		}
		c.once.Do(func() { close(c.crashed) })
	}
	return errCrashed
}

func (c *crasher) wrap(inner client.Client) client.Client { return crashing{inner, c} }

type crashing struct {
	client.Client
	crasher *crasher
}

func (c crashing) Update(ctx context.Context, o client.Object, opts ...client.UpdateOption) error {
	return c.crasher.write(func() error { return c.Client.Update(ctx, o, opts...) })
}

func (c crashing) Status() client.SubResourceWriter {
	return crashingStatus{c.Client.Status(), c.crasher}
}

type crashingStatus struct {
	client.SubResourceWriter
	crasher *crasher
}

func (c crashingStatus) Update(ctx context.Context, o client.Object, opts ...client.SubResourceUpdateOption) error {
	return c.crasher.write(func() error { return c.SubResourceWriter.Update(ctx, o, opts...) })
}

func (c crashingStatus) Patch(ctx context.Context, o client.Object, p client.Patch, opts ...client.SubResourcePatchOption) error {
	return c.crasher.write(func() error { return c.SubResourceWriter.Patch(ctx, o, p, opts...) })
}

// history follows a lease and fails the test where its tokens go wrong.
type history struct {
	mu      sync.Mutex
	tokens  map[int64]string // by token, the holder it was issued to
	highest int64
}

// watch shows what becomes of objects of a namespace until the test ends.
func (w *world) watch(list client.ObjectList, namespace string, see func(watch.Event)) {
	w.Helper()
	events, err := w.Admin.Watch(w.Context(), list, client.InNamespace(namespace))
	if err != nil {
		w.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for event := range events.ResultChan() {
			see(event)
		}
	}()
	w.Cleanup(func() { events.Stop(); <-done })
}

// follow watches the lease until the test ends.
func follow(t *testing.T, w *world) *history {
	t.Helper()
	h := &history{tokens: map[int64]string{}}
	w.watch(&v1alpha1.FencedLeaseList{}, w.namespace, func(event watch.Event) {
		lease, ok := event.Object.(*v1alpha1.FencedLease)
		if !ok || event.Type == watch.Deleted || lease.Status.Token == 0 {
			return
		}
		h.mu.Lock()
		defer h.mu.Unlock()
		token := lease.Status.Token
		if token < h.highest {
			t.Errorf("the current token went from %d to %d", h.highest, token)
		}
		h.highest = max(h.highest, token)
		if holder := lease.Status.Holder; holder != nil {
			who := fmt.Sprintf("%s/%d", holder.ClaimUID, deref(holder.Reaffirm))
			if before, ok := h.tokens[token]; ok && before != who {
				t.Errorf("token %d was issued to %s and to %s", token, before, who)
			}
			h.tokens[token] = who
		}
	})
	return h
}

func deref(n *int64) int64 {
	if n == nil {
		return 0
	}
	return *n
}

// TestCrash ends the operator before and after each write of a grant, of a
// hand-over and of a reaffirmation, and lets another one go on.
func TestCrash(t *testing.T) {
	e := bare(t)
	for at := int64(1); at <= 8; at++ {
		for _, after := range []bool{false, true} {
			t.Run(fmt.Sprintf("write %d, after=%t", at, after), func(t *testing.T) {
				w := newWorld(t, e, v1alpha1.FencedLeaseSpec{LeaseDurationSeconds: 60})
				follow(t, w)
				c := &crasher{at: at, after: after, crashed: make(chan struct{})}
				first := start(t, e, func(o *env.Options) { o.Operator, o.Controllers.Wrap = true, c.wrap })
				a := w.claim("a", nil)
				crashed := func() bool {
					select {
					case <-c.crashed:
						return true
					default:
						return false
					}
				}
				granted := func(name string) bool { _, reason := w.get(name); return reason == v1alpha1.ReasonGranted }
				await(t, "a is granted, or the crash", func() bool { return crashed() || granted("a") })
				w.claim("b", nil)
				if !crashed() {
					if err := w.Admin.Patch(t.Context(), a, client.RawPatch("application/merge-patch+json", []byte(`{"spec":{"reaffirm":1}}`))); err != nil {
						t.Fatal(err)
					}
					await(t, "a is reaffirmed, or the crash", func() bool {
						got, _ := w.get("a")
						return crashed() || w.lease().Status.Holder != nil && deref(w.lease().Status.Holder.Reaffirm) == 1 && got.Status.Token == w.lease().Status.Token
					})
				}
				if !crashed() {
					w.release(a)
				}
				await(t, "the crash", crashed)
				first.Stop()

				start(t, e, func(o *env.Options) { o.Operator = true })
				if _, err := w.find("a"); err == nil {
					a = w.awaitReason("a", v1alpha1.ReasonGranted)
					w.release(a)
				}
				b := w.awaitReason("b", v1alpha1.ReasonGranted)
				if b.Status.Token <= a.Status.Token {
					t.Errorf("b has token %d after a's %d", b.Status.Token, a.Status.Token)
				}
			})
		}
	}
}

// start starts a replica that ends with the test.
func start(t *testing.T, e *env.Environment, change func(*env.Options)) *env.Manager {
	t.Helper()
	m, err := e.StartManager(change)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Stop)
	if err := m.WaitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
	return m
}

// TestReplicasRace lets three operators, each of which believes that it is the
// only one, hand one lease over and over.
func TestReplicasRace(t *testing.T) {
	e := bare(t)
	w := newWorld(t, e, v1alpha1.FencedLeaseSpec{LeaseDurationSeconds: 60})
	h := follow(t, w)
	for range 3 {
		start(t, e, func(o *env.Options) { o.Operator = true })
	}
	const rounds = 150
	last := int64(0)
	seen := map[int64]bool{}
	for i := range rounds {
		name := fmt.Sprintf("c%d", i)
		w.claim(name, nil)
		c := w.awaitReason(name, v1alpha1.ReasonGranted)
		if c.Status.Token <= last || seen[c.Status.Token] {
			t.Fatalf("round %d: token %d after %d", i, c.Status.Token, last)
		}
		last, seen[c.Status.Token] = c.Status.Token, true
		w.release(c)
	}
	await(t, "the watch has seen the last token", func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		return h.highest >= last
	})
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.tokens) != rounds {
		t.Errorf("%d tokens were issued in %d rounds", len(h.tokens), rounds)
	}
}
