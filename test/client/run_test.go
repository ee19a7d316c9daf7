package client

import (
	"context"
	"errors"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	crclient "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/client"
	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/test/env"
)

// working is one call of client.Run whose function is told to end, and goes on.
type working struct {
	*client.Held
	// returns lets the function return, over tells that Run has.
	returns chan<- struct{}
	over    <-chan error
}

// runUnderCancel runs under the lease until its context is cancelled, and on.
func runUnderCancel(t *testing.T, cfg *rest.Config, namespace string) *working {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	held, returns, over := make(chan *client.Held, 1), make(chan struct{}), make(chan error, 1)
	go func() {
		over <- client.Run(ctx, cfg, namespace, "main", func(work context.Context, h *client.Held) error {
			held <- h
			<-work.Done()
			<-returns
			return nil
		}, client.WithIdentity("worker"))
	}()
	w := &working{Held: <-held, returns: returns, over: over}
	cancel()
	return w
}

func patchGuarded(ctx context.Context, c crclient.Client, namespace, value string) error {
	return c.Patch(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "guarded"}},
		crclient.RawPatch(types.MergePatchType, []byte(`{"data":{"by":"`+value+`"}}`)))
}

func makeGuarded(t *testing.T, e *env.Environment, c crclient.Client, namespace string) {
	t.Helper()
	object := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "guarded", Labels: map[string]string{fence.LabelLease: "main"}}}
	if err := c.Create(t.Context(), object); err != nil {
		t.Fatal(err)
	}
}

func readClaim(ctx context.Context, e *env.Environment, namespace, name string) (*v1alpha1.LeaseClaim, error) {
	claim := &v1alpha1.LeaseClaim{}
	return claim, e.Admin.Get(ctx, crclient.ObjectKey{Namespace: namespace, Name: name}, claim)
}

// TestRunGivesNothingAwayUnderWork: the lease is released once the work that
// was told to end has ended. Until then it holds, renewals included; who takes
// it by force finds the work's writes rejected. A renewal that comes late makes
// no claim.
func TestRunGivesNothingAwayUnderWork(t *testing.T) {
	t.Parallel()
	e := everything(t)
	namespace := e.Namespace(t)
	lease := &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "main"},
		Spec: v1alpha1.FencedLeaseSpec{LeaseDurationSeconds: 2, Preemption: v1alpha1.PreemptionNewestClaim}}
	if err := e.Admin.Create(t.Context(), lease); err != nil {
		t.Fatal(err)
	}
	cfg := worker(t, e, namespace, "worker-a07")
	work := runUnderCancel(t, cfg, namespace)
	c := stamped(t, e, cfg, work)
	makeGuarded(t, e, c, namespace)

	// Renewed past the lease's duration, with nobody in the queue.
	before, err := readClaim(t.Context(), e, namespace, work.Claim())
	if err != nil {
		t.Fatal(err)
	}
	since := time.Now()
	err = wait.PollUntilContextTimeout(t.Context(), 50*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
		claim, err := readClaim(ctx, e, namespace, work.Claim())
		return err == nil && !claim.Spec.RenewTime.Equal(before.Spec.RenewTime) && time.Since(since) > 3*time.Second, err
	})
	if err != nil {
		t.Fatalf("the work's claim: %v", err)
	}
	if err := patchGuarded(t.Context(), c, namespace, "while it is told to end"); err != nil {
		t.Errorf("nobody waits: %v", err)
	}

	// Taken by force: its own client stops, and the fence would.
	former := work.Token()
	raw := stamped(t, e, cfg, client.Static(namespace+"/main", former))
	second := acquire(t, e.Config, namespace, "successor")
	if err := patchGuarded(t.Context(), raw, namespace, "after the hand-over"); !client.IsStale(err) {
		t.Errorf("a write after the hand-over: %v", err)
	}
	<-work.Done()
	if err := patchGuarded(t.Context(), c, namespace, "after the hand-over"); !errors.Is(err, fence.ErrLost) {
		t.Errorf("a write of its own client after the hand-over: %v", err)
	}
	if err := patchGuarded(t.Context(), stamped(t, e, e.Config, second), namespace, "successor"); err != nil {
		t.Errorf("the successor: %v", err)
	}
	close(work.returns)
	if err := <-work.over; err != nil {
		t.Errorf("run: %v", err)
	}
	if _, err := second.Present(); err != nil {
		t.Errorf("the release touched the successor: %v", err)
	}
	if _, err := readClaim(t.Context(), e, namespace, work.Claim()); !apierrors.IsNotFound(err) {
		t.Errorf("the claim after the work: %v", err)
	}
	late := &v1alpha1.LeaseClaim{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: work.Claim()}}
	if err := e.Admin.Patch(t.Context(), late, crclient.RawPatch(types.MergePatchType, []byte(`{"spec":{"renewTime":"2026-01-01T00:00:00.000000Z"}}`))); !apierrors.IsNotFound(err) {
		t.Errorf("a late renewal: %v", err)
	}
}

// TestWritesAfterALapse: a process that is cut off from renewing and writes all
// the same passes while nobody took over, or not, as the lease says.
func TestWritesAfterALapse(t *testing.T) {
	for says, reason := range map[v1alpha1.LapsedWrites]fence.Reason{v1alpha1.LapsedWritesAllow: "", v1alpha1.LapsedWritesDeny: fence.Lapsed} {
		t.Run(string(says), func(t *testing.T) {
			t.Parallel()
			e := everything(t)
			namespace := e.Namespace(t)
			lease := &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "main"},
				Spec: v1alpha1.FencedLeaseSpec{LeaseDurationSeconds: 1, LapsedWrites: says}}
			if err := e.Admin.Create(t.Context(), lease); err != nil {
				t.Fatal(err)
			}
			net, cut := newNetwork(e.Config)
			work := runUnderCancel(t, cut, namespace)
			raw := stamped(t, e, e.Config, client.Static(namespace+"/main", work.Token()))
			makeGuarded(t, e, raw, namespace)
			net.partition()
			err := wait.PollUntilContextTimeout(t.Context(), 20*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
				claim, err := readClaim(ctx, e, namespace, work.Claim())
				if err != nil {
					return false, err
				}
				held := meta.FindStatusCondition(claim.Status.Conditions, v1alpha1.LeaseClaimHeld)
				return held != nil && held.Reason == v1alpha1.ReasonLapsed, nil
			})
			if err != nil {
				t.Fatalf("the claim did not lapse: %v", err)
			}
			if err := patchGuarded(t.Context(), raw, namespace, "lapsed"); (reason == "") != (err == nil) || err != nil && first(client.Reason(err)) != reason {
				t.Errorf("with nobody after it: %v, want %q", err, reason)
			}
			second := acquire(t, e.Config, namespace, "successor")
			if err := patchGuarded(t.Context(), raw, namespace, "superseded"); !client.IsStale(err) {
				t.Errorf("after %s was granted: %v", second.Token(), err)
			}
			close(work.returns)
			net.heal()
			if err := <-work.over; err != nil {
				t.Errorf("run: %v", err)
			}
			if _, err := second.Present(); err != nil {
				t.Errorf("the release touched the successor: %v", err)
			}
		})
	}
}

func first[A, B any](a A, _ B) A { return a }
