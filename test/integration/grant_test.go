package integration

import (
	"fmt"
	"testing"
	"time"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

func TestGrantReleaseAndQueue(t *testing.T) {
	w := newWorld(t, operated(t), v1alpha1.FencedLeaseSpec{LeaseDurationSeconds: 60})
	w.claim("a", func(c *v1alpha1.LeaseClaim) { c.Spec.HolderIdentity = "pod-a" })
	a := w.awaitReason("a", v1alpha1.ReasonGranted)
	first := w.lease()
	if first.Status.Token != a.Status.Token || first.Status.Holder == nil || first.Status.Holder.Identity != "pod-a" {
		t.Fatalf("lease %+v, claim %+v", first.Status, a.Status)
	}
	var names []string
	for i := range 5 {
		names = append(names, fmt.Sprintf("w%d", i))
		w.claim(names[i], nil)
		w.awaitReason(names[i], v1alpha1.ReasonWaiting)
	}
	last := a.Status.Token
	w.release(a)
	for _, name := range names {
		c := w.awaitReason(name, v1alpha1.ReasonGranted)
		if c.Status.Token <= last {
			t.Errorf("claim %s has token %d after %d", name, c.Status.Token, last)
		}
		last = c.Status.Token
		if h := w.lease().Status.Holder; h == nil || h.Identity != name {
			t.Errorf("claim %s gives no identity, and the holder is %+v", name, h)
		}
		w.release(c)
	}
	await(t, "the lease is free", func() bool { return w.lease().Status.Holder == nil })
	if got := w.lease(); got.Status.Token != last || *got.Status.Waiting != 0 {
		t.Errorf("free lease: %+v", got.Status)
	}
}

func TestLapse(t *testing.T) {
	w := newWorld(t, operated(t), v1alpha1.FencedLeaseSpec{LeaseDurationSeconds: 1})
	a := w.claim("a", nil)
	stop := w.renew(a, 200*time.Millisecond)
	a = w.awaitReason("a", v1alpha1.ReasonGranted)
	b := w.claim("b", nil)
	w.renew(b, 200*time.Millisecond)
	w.awaitReason("b", v1alpha1.ReasonWaiting)
	dead := w.claim("dead", nil)
	w.awaitReason(dead.Name, v1alpha1.ReasonLapsed)
	stop()
	b = w.awaitReason("b", v1alpha1.ReasonGranted)
	w.awaitReason("a", v1alpha1.ReasonLapsed)
	if b.Status.Token <= a.Status.Token {
		t.Errorf("token %d after %d", b.Status.Token, a.Status.Token)
	}
}

func TestRecreatedLeaseStartsAbove(t *testing.T) {
	w := newWorld(t, operated(t), v1alpha1.FencedLeaseSpec{LeaseDurationSeconds: 60})
	last := int64(0)
	for i := range 3 {
		name := fmt.Sprintf("c%d", i)
		w.claim(name, nil)
		c := w.awaitReason(name, v1alpha1.ReasonGranted)
		if c.Status.Token <= last {
			t.Fatalf("token %d after %d", c.Status.Token, last)
		}
		last = c.Status.Token
		if err := w.Admin.Delete(t.Context(), w.lease()); err != nil {
			t.Fatal(err)
		}
		w.awaitReason(name, v1alpha1.ReasonLapsed)
		w.makeLease(v1alpha1.FencedLeaseSpec{LeaseDurationSeconds: 60})
	}
}
