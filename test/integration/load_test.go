package integration

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/internal/controlplane"
	"github.com/fencedlease/fencedlease/test/env"
)

// late delays what watches of a resource deliver, but for what is there when
// they begin; of all resources, where none is named.
type late struct {
	http.RoundTripper
	resource string
	by       time.Duration
}

// lateInformers gives a manager informers that are late.
func lateInformers(m *ctrl.Options, resource string, by time.Duration) {
	m.NewCache = func(cfg *rest.Config, o cache.Options) (cache.Cache, error) {
		cfg = rest.CopyConfig(cfg)
		cfg.Wrap(func(rt http.RoundTripper) http.RoundTripper { return late{rt, resource, by} })
		o.HTTPClient = nil
		return cache.New(cfg, o)
	}
}

func (l late) RoundTrip(r *http.Request) (*http.Response, error) {
	response, err := l.RoundTripper.RoundTrip(r)
	if err == nil && r.URL.Query().Get("watch") == "true" && strings.HasSuffix(r.URL.Path, l.resource) {
		response.Body = newLateBody(r.Context(), response.Body, l.by, r.URL.Query().Get("sendInitialEvents") == "true")
	}
	return response, err
}

type chunk struct {
	data []byte
	err  error
	due  <-chan time.Time
}

type lateBody struct {
	io.Closer
	ctx    context.Context
	chunks chan chunk
	now    chunk
}

func newLateBody(ctx context.Context, body io.ReadCloser, by time.Duration, lists bool) *lateBody {
	l := &lateBody{Closer: body, ctx: ctx, chunks: make(chan chunk, 10_000)}
	go func() {
		defer close(l.chunks)
		var listed []byte
		for {
			data := make([]byte, 64<<10)
			n, err := body.Read(data)
			due := time.After(by)
			if lists {
				due = time.After(0)
				listed = append(listed, data[:n]...)
				lists = !bytes.Contains(listed, []byte(metav1.InitialEventsAnnotationKey))
			}
			select {
			case l.chunks <- chunk{data[:n], err, due}:
			case <-ctx.Done():
				return
			}
			if err != nil {
				return
			}
		}
	}()
	return l
}

func (l *lateBody) Read(into []byte) (int, error) {
	if len(l.now.data) == 0 {
		if l.now.err != nil {
			return 0, l.now.err
		}
		select {
		case l.now = <-l.chunks:
		case <-l.ctx.Done():
			return 0, l.ctx.Err()
		}
		select {
		case <-l.now.due:
		case <-l.ctx.Done():
			return 0, l.ctx.Err()
		}
	}
	n := copy(into, l.now.data)
	if l.now.data = l.now.data[n:]; len(l.now.data) > 0 {
		return n, nil
	}
	return n, l.now.err
}

// followTable watches the lease table until the test ends, and fails the test
// where the lease's token in it goes down: it was expected, and nobody was
// issued it, while who rightly held was refused.
func followTable(t *testing.T, w *world) {
	t.Helper()
	var highest fence.Token
	t.Cleanup(func() {
		if highest == 0 {
			t.Error("the lease table never knew the lease")
		}
	})
	w.watch(&corev1.ConfigMapList{}, controlplane.OperatorNamespace, func(event watch.Event) {
		table, ok := event.Object.(*corev1.ConfigMap)
		if !ok || table.Name != fence.TableName {
			return
		}
		l, _, _ := fence.LookupTable(table.Data, w.namespace, w.name, 0)
		if l.Lease.Current < highest {
			t.Errorf("the lease table went from %s to %s", highest, l.Lease.Current)
		}
		highest = max(highest, l.Lease.Current)
	})
}

// TestLateInformers: an operator that sees its own writes a second late grants
// each claim once, skips no token, has no holder refused for a token that it
// does not issue, and calls nothing an error.
func TestLateInformers(t *testing.T) {
	e := bare(t)
	w := newWorld(t, e, long())
	h := follow(t, w)
	followTable(t, w)
	var failures sync.Map
	start(t, e, func(o *env.Options) {
		o.Operator = true
		o.Manager = func(m *ctrl.Options) {
			m.Logger = funcr.New(func(_, args string) {
				if strings.Contains(args, `"error"=`) {
					failures.Store(args, true)
				}
			}, funcr.Options{})
			lateInformers(m, "", time.Second)
		}
	})
	const claims = 6
	for i := range claims {
		w.renew(w.claim(fmt.Sprintf("c%d", i), nil), 100*time.Millisecond)
	}
	waiting := map[string]bool{}
	for i := range claims {
		waiting[fmt.Sprintf("c%d", i)] = true
	}
	var last int64
	for len(waiting) > 0 {
		var c *v1alpha1.LeaseClaim
		await(t, "another claim is granted", func() bool {
			for name := range waiting {
				if got, reason := w.get(name); reason == v1alpha1.ReasonGranted {
					c = got
					return true
				} else if reason != v1alpha1.ReasonWaiting && reason != "" && reason != "Pending" {
					t.Fatalf("claim %s is %s", name, reason)
				}
			}
			return false
		})
		if last != 0 && c.Status.Token != last+1 {
			t.Errorf("token %d after %d", c.Status.Token, last)
		}
		last = c.Status.Token
		delete(waiting, c.Name)
		w.release(c)
	}
	await(t, "the lease is free", func() bool { return w.lease().Status.Holder == nil })
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.tokens) != claims {
		t.Errorf("%d claims were issued %d tokens: %v", claims, len(h.tokens), h.tokens)
	}
	failures.Range(func(line, _ any) bool { t.Errorf("logged as an error: %s", line); return true })
}

// TestReleasedClaimStaysReleased: an operator that still sees a claim that is
// gone, beside another one that knows, grants it nothing.
func TestReleasedClaimStaysReleased(t *testing.T) {
	e := bare(t)
	w := newWorld(t, e, long())
	h := follow(t, w)
	start(t, e, func(o *env.Options) { o.Operator = true })
	start(t, e, func(o *env.Options) {
		o.Operator = true
		o.Manager = func(m *ctrl.Options) { lateInformers(m, "leaseclaims", time.Second) }
	})
	const claims = 3
	var last *v1alpha1.LeaseClaim
	for i := range claims {
		w.claim(fmt.Sprintf("c%d", i), nil)
		last = w.awaitReason(fmt.Sprintf("c%d", i), v1alpha1.ReasonGranted)
		// The late one sees it wait, and then go.
		await(t, "a second has passed", func() bool { return time.Since(last.Status.AcquireTime.Time) > time.Second })
		w.release(last)
		await(t, "the lease is free", func() bool { return w.lease().Status.Holder == nil })
	}
	await(t, "the late one has seen the last go", func() bool { return time.Since(last.Status.AcquireTime.Time) > 3*time.Second })
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.tokens) != claims {
		t.Errorf("%d claims were issued %d tokens: %v", claims, len(h.tokens), h.tokens)
	}
}

// TestWritesOfAHandover: a hand-over costs as many writes with a hundred claims
// in the queue as with one, and between hand-overs there are none.
func TestWritesOfAHandover(t *testing.T) {
	e := bare(t)
	w := newWorld(t, e, long())
	writes := &crasher{at: math.MaxInt64}
	start(t, e, func(o *env.Options) { o.Operator, o.Controllers.Wrap = true, writes.wrap })
	a := w.claim("a", nil)
	w.awaitReason("a", v1alpha1.ReasonGranted)
	var queue errgroup.Group
	queue.SetLimit(8)
	for i := range 100 {
		queue.Go(func() error {
			return w.Admin.Create(t.Context(), &v1alpha1.LeaseClaim{
				ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: fmt.Sprintf("c%d", i)}, Spec: v1alpha1.LeaseClaimSpec{LeaseName: w.name},
			})
		})
	}
	if err := queue.Wait(); err != nil {
		t.Fatal(err)
	}
	claims := func() (list v1alpha1.LeaseClaimList) {
		if err := w.Admin.List(t.Context(), &list, client.InNamespace(w.namespace)); err != nil {
			t.Fatal(err)
		}
		return list
	}
	first := func() *v1alpha1.LeaseClaim {
		all := claims()
		var found *v1alpha1.LeaseClaim
		for i := range all.Items {
			if c := &all.Items[i]; c.Status.Ticket == 0 {
				return nil
			} else if c.Name != "a" && (found == nil || c.Status.Ticket < found.Status.Ticket) {
				found = c
			}
		}
		return found
	}
	var next *v1alpha1.LeaseClaim
	await(t, "all have a place, and the lease counts them", func() bool {
		next = first()
		return next != nil && *w.lease().Status.Waiting == 100
	})
	before, lease := writes.writes.Load(), w.lease().ResourceVersion
	for _, c := range claims().Items {
		w.merge(c.DeepCopy(), `{"spec":{"renewTime":"2026-01-01T00:00:00.000000Z"}}`)
	}
	if n := writes.writes.Load() - before; n > 0 || w.lease().ResourceVersion != lease {
		t.Errorf("101 renewals led to %d writes", n)
	}
	w.release(a)
	w.awaitReason(next.Name, v1alpha1.ReasonGranted)
	other := &world{T: t, Environment: e, namespace: w.namespace, name: "other"}
	other.makeLease(long()) // what the hand-over led to is done before this one is served
	await(t, "the other lease is served", func() bool { return other.lease().Status.Waiting != nil })
	// The lease table adds one.
	if n := writes.writes.Load() - before - 1; n > 3 {
		t.Errorf("a hand-over took %d writes, want 3: reserve, publish, tell", n)
	}
}

// TestManyClaims lets 100 claims come, reaffirm, and go in any order, served by
// two operators that both believe to lead. The watch tells whether a token was
// ever issued twice or a lower one after a higher.
func TestManyClaims(t *testing.T) {
	e := bare(t)
	w := newWorld(t, e, long())
	follow(t, w)
	for range 2 {
		start(t, e, func(o *env.Options) { o.Operator = true })
	}
	var workers errgroup.Group
	workers.SetLimit(25)
	var mu sync.Mutex
	tokens := map[int64]string{}
	for i := range 100 {
		workers.Go(func() error {
			c := &v1alpha1.LeaseClaim{
				ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: fmt.Sprintf("c%d", i)}, Spec: v1alpha1.LeaseClaimSpec{LeaseName: w.name},
			}
			if err := w.Admin.Create(t.Context(), c); err != nil {
				return err
			}
			patience := rand.IntN(20)
			reaffirms := rand.IntN(2)
			tick := time.NewTicker(30 * time.Millisecond)
			defer tick.Stop()
			for tries := 0; ; tries++ {
				<-tick.C
				if err := w.Admin.Get(t.Context(), client.ObjectKeyFromObject(c), c); err != nil {
					return fmt.Errorf("claim %s after %d tries: %w", c.Name, tries, err)
				}
				held := meta.FindStatusCondition(c.Status.Conditions, v1alpha1.LeaseClaimHeld)
				switch {
				case held != nil && held.Reason == v1alpha1.ReasonGranted:
					mu.Lock()
					other, taken := tokens[c.Status.Token]
					tokens[c.Status.Token] = c.Name
					mu.Unlock()
					if taken && other != c.Name {
						return fmt.Errorf("token %d was given to %s and to %s", c.Status.Token, other, c.Name)
					}
					if reaffirms--; reaffirms >= 0 {
						c.Spec.Reaffirm = new(deref(c.Spec.Reaffirm) + 1)
						if err := w.Admin.Patch(t.Context(), c, client.RawPatch("application/merge-patch+json", fmt.Appendf(nil, `{"spec":{"reaffirm":%d}}`, *c.Spec.Reaffirm))); err != nil {
							return err
						}
						continue
					}
				case held != nil && held.Reason == v1alpha1.ReasonLapsed:
					return fmt.Errorf("claim %s: %s", c.Name, held.Message)
				case i%5 != 0 || tries < patience:
					continue // the others leave the queue
				}
				return client.IgnoreNotFound(w.Admin.Delete(t.Context(), c))
			}
		})
	}
	if err := workers.Wait(); err != nil {
		t.Fatal(err)
	}
	await(t, "the lease is free", func() bool { l := w.lease(); return l.Status.Holder == nil && *l.Status.Waiting == 0 })
}

// TestZeroArrives: what goes back to zero or to nothing does so in the object.
func TestZeroArrives(t *testing.T) {
	t.Parallel()
	spec := long()
	spec.HandoverDelaySeconds, spec.MinToken, spec.MaxPriority = new(int32(30)), 5, new(int32(3))
	w := newWorld(t, operated(t), spec)
	w.awaitCondition(v1alpha1.FencedLeaseReady, v1alpha1.ReasonReady)
	if got := w.lease(); got.Status.Token != 0 || got.Status.Holder != nil {
		t.Errorf("a lease that was never issued says %+v", got.Status)
	}
	a := w.claim("a", func(c *v1alpha1.LeaseClaim) { c.Spec.Priority = new(int32(3)) })
	w.awaitReason("a", v1alpha1.ReasonGranted)
	for _, name := range []string{"b", "c"} {
		w.claim(name, nil)
	}
	await(t, "two wait", func() bool { return *w.lease().Status.Waiting == 2 })
	for _, c := range []string{"b", "c"} {
		got, _ := w.get(c)
		w.release(got)
	}
	await(t, "nobody waits", func() bool { n := w.lease().Status.Waiting; return n != nil && *n == 0 })
	w.merge(a.DeepCopy(), `{"spec":{"priority":0}}`)
	w.merge(w.lease(), `{"spec":{"handoverDelaySeconds":0,"minToken":null,"maxPriority":0}}`)
	lease := w.lease()
	if got, _ := w.get("a"); *got.Spec.Priority != 0 || *lease.Spec.HandoverDelaySeconds != 0 || lease.Spec.MinToken != 0 || *lease.Spec.MaxPriority != 0 {
		t.Errorf("lease %+v, claim %+v", lease.Spec, got.Spec)
	}
	w.release(a)
	await(t, "nothing of the holder is left, and the token stands", func() bool {
		l := w.lease()
		return l.Status.Holder == nil && l.Status.Token > 0
	})
}

// TestNoPodIsRead: a claim lapses, whatever its Pod is said to be.
func TestNoPodIsRead(t *testing.T) {
	t.Parallel()
	w := newWorld(t, operated(t), v1alpha1.FencedLeaseSpec{LeaseDurationSeconds: 1})
	for _, phase := range []corev1.PodPhase{corev1.PodRunning, corev1.PodFailed, corev1.PodSucceeded, corev1.PodUnknown} {
		name := strings.ToLower(string(phase))
		pod := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name},
			Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "none"}}},
		}
		if err := w.Admin.Create(t.Context(), pod); err != nil {
			t.Fatal(err)
		}
		pod.Status.Phase = phase
		if err := w.Admin.Status().Update(t.Context(), pod); err != nil {
			t.Fatal(err)
		}
		w.claim(name, func(c *v1alpha1.LeaseClaim) {
			c.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID}}
		})
		w.awaitReason(name, v1alpha1.ReasonGranted)
		w.awaitReason(name, v1alpha1.ReasonLapsed)
	}
}
