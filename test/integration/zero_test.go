package integration

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	applyv1alpha1 "github.com/fencedlease/fencedlease/api/v1alpha1/applyconfiguration/api/v1alpha1"
)

// TestZeroIsApplied: what server-side apply sets to zero is zero, and what it
// leaves out is gone, not zero.
func TestZeroIsApplied(t *testing.T) {
	e := bare(t)
	namespace := e.Namespace(t)
	key := client.ObjectKey{Namespace: namespace, Name: "main"}
	const owner = client.FieldOwner("app")
	read := func() *v1alpha1.FencedLease {
		t.Helper()
		lease := &v1alpha1.FencedLease{}
		if err := e.Admin.Get(t.Context(), key, lease); err != nil {
			t.Fatal(err)
		}
		return lease
	}
	spec := func(s *applyv1alpha1.FencedLeaseSpecApplyConfiguration) *v1alpha1.FencedLease {
		t.Helper()
		if err := e.Admin.Apply(t.Context(), applyv1alpha1.FencedLease(key.Name, namespace).WithSpec(s), owner); err != nil {
			t.Fatal(err)
		}
		return read()
	}
	status := func(s *applyv1alpha1.FencedLeaseStatusApplyConfiguration) *v1alpha1.FencedLease {
		t.Helper()
		if err := e.Admin.Status().Apply(t.Context(), applyv1alpha1.FencedLease(key.Name, namespace).WithStatus(s), owner); err != nil {
			t.Fatal(err)
		}
		return read()
	}

	if l := spec(applyv1alpha1.FencedLeaseSpec().WithHandoverDelaySeconds(30).WithMinToken(5)); *l.Spec.HandoverDelaySeconds != 30 || l.Spec.MinToken != 5 {
		t.Fatalf("%+v", l.Spec)
	}
	if l := spec(applyv1alpha1.FencedLeaseSpec().WithHandoverDelaySeconds(0)); l.Spec.HandoverDelaySeconds == nil || *l.Spec.HandoverDelaySeconds != 0 || l.Spec.MinToken != 0 {
		t.Errorf("handoverDelaySeconds set to zero, minToken left out: %+v", l.Spec)
	}
	if l := read(); l.Status.Token != 0 {
		t.Errorf("a lease without a token has %d", l.Status.Token)
	}

	holder := applyv1alpha1.Holder().WithClaimName("a").WithClaimUID("uid-a").WithIdentity("a").WithAcquireTime(metav1.NowMicro())
	if l := status(applyv1alpha1.FencedLeaseStatus().WithToken(1).WithWaiting(3).WithHolder(holder)); *l.Status.Waiting != 3 || l.Status.Holder == nil {
		t.Fatalf("%+v", l.Status)
	}
	if l := status(applyv1alpha1.FencedLeaseStatus().WithToken(1).WithWaiting(0)); l.Status.Waiting == nil || *l.Status.Waiting != 0 || l.Status.Holder != nil || l.Status.Token != 1 {
		t.Errorf("waiting set to zero, the holder left out: %+v", l.Status)
	}

	claim := func(priority int32) *v1alpha1.LeaseClaim {
		t.Helper()
		apply := applyv1alpha1.LeaseClaim("claim", namespace).WithSpec(applyv1alpha1.LeaseClaimSpec().WithLeaseName(key.Name).WithPriority(priority))
		if err := e.Admin.Apply(t.Context(), apply, owner); err != nil {
			t.Fatal(err)
		}
		c := &v1alpha1.LeaseClaim{}
		if err := e.Admin.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: "claim"}, c); err != nil {
			t.Fatal(err)
		}
		return c
	}
	claim(5)
	if c := claim(0); c.Spec.Priority == nil || *c.Spec.Priority != 0 {
		t.Errorf("priority set to zero: %+v", c.Spec)
	}
}
