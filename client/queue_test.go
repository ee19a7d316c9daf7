package client

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
)

// tellLease tells the watches on the lease who holds it.
func (f *fakeClaims) tellLease(what watch.EventType, claimUID string, token int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	lease := &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "main"}}
	lease.Status.Token, lease.Status.Holder = token, &v1alpha1.Holder{ClaimUID: claimUID, Identity: "jane"}
	for _, w := range f.leaseWatches {
		w.Action(what, lease.DeepCopy())
	}
}

// The lease's status is the grant. It says whose the token is by the claim's
// UID; whatever it says of others, or late, changes nothing.
func TestTheLeaseTellsOfTheGrant(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := newFake()
		got := make(chan *Held, 1)
		go func() {
			h, err := acquire(t.Context(), api, "shop", "main", newOptions(nil))
			if err != nil {
				t.Error(err)
			}
			got <- h
		}()
		synctest.Wait()
		uid := string(api.all()[0].UID)
		api.tellLease(watch.Modified, "another", 40)
		api.tellLease(watch.Deleted, uid, 41)
		api.tellLease(watch.Modified, uid, 0)
		synctest.Wait()
		if len(got) > 0 {
			t.Fatal("granted by what the lease says of another claim, of its past, or without a token")
		}
		api.tellLease(watch.Modified, uid, 42)
		synctest.Wait()
		if len(got) == 0 {
			t.Fatal("the lease named the claim as its holder, and it still waits")
		}
		h := <-got
		if h.Token() != 42 {
			t.Errorf("token %s, want 42", h.Token())
		}
		// The claim is told later, and at first of its place in the queue.
		api.set(metav1.ConditionFalse, v1alpha1.ReasonWaiting, 0)
		synctest.Wait()
		if token, err := h.Present(); token != 42 || err != nil {
			t.Errorf("presents %s, %v after the claim's older status", token, err)
		}
		api.set(metav1.ConditionFalse, v1alpha1.ReasonPreempted, 42)
		synctest.Wait()
		lostBy(t, h, LossPreempted)
		if late := h.progress.granted(&v1alpha1.FencedLease{Status: v1alpha1.FencedLeaseStatus{Token: 42, Holder: &v1alpha1.Holder{ClaimUID: uid}}}, h.uid); late != h.progress {
			t.Errorf("what the lease said late makes %+v of %+v", late, h.progress)
		}
		if err := h.Release(context.Background()); err != nil && !errors.Is(err, fence.ErrLost) {
			t.Error(err)
		}
	})
}

// An account that may not watch leases acquires by its claim's status, and does
// not ask again and again.
func TestWithoutTheRightToWatchLeases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := newFake()
		var asked atomic.Int64
		api.fail(func(_ context.Context, verb string) error {
			if verb == "watch lease" {
				asked.Add(1)
				return apierrors.NewForbidden(leaseclaims, "main", errors.New("no watch"))
			}
			return nil
		})
		go func() {
			<-time.After(5 * time.Second)
			api.set(metav1.ConditionTrue, v1alpha1.ReasonGranted, 41)
		}()
		h, err := acquire(t.Context(), api, "shop", "main", newOptions(nil))
		if err != nil {
			t.Fatal(err)
		}
		if asked.Load() != 1 || h.Token() != 41 {
			t.Errorf("asked %d times, token %s", asked.Load(), h.Token())
		}
		if err := h.Release(context.Background()); err != nil {
			t.Error(err)
		}
	})
}
