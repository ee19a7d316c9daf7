package policy

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authentication/user"

	"github.com/fencedlease/fencedlease/fence"
)

// TestStrictGuarding: what comes under guard without a webhook does so with a
// token that counts, or by a right; what it cannot judge it refuses.
func TestStrictGuarding(t *testing.T) {
	policy, _ := Strict(testOptions)
	validator := compile(t, policy)
	bob := fence.Lease{Current: 42, Held: true, Holder: "pod-b", HolderUser: "bob", HolderPodUID: "p1"}
	bound, revoked, header, lapsing := bob, bob, bob, bob
	bound.BindUser, revoked.Min, header.HeaderOnly, lapsing.DenyLapsed = true, 50, true, true
	table := tableOf(1000, leaseOf("main", bob), leaseOf("bound", bound), leaseOf("revoked", revoked), leaseOf("header", header),
		leaseOf("held", lapsing), leaseOf("lapsed", fence.Lease{Current: 42, DenyLapsed: true}))
	byHeader := sender("bob", fence.ExtraToken, "42")
	bypasses := map[string]bool{"bypass shop/main": true, "bypass shop/held": true}
	plain := guarded("")
	delete(plain.Labels, fence.LabelLease)
	stored := guarded("main", fence.AnnotationToken, "42")
	moved := with(stored)
	moved.Labels[fence.LabelLease] = "held"

	for name, c := range map[string]struct {
		by      user.DefaultInfo
		old     *corev1.ConfigMap // none for a create
		object  *corev1.ConfigMap
		may     map[string]bool
		refused bool
	}{
		"a create with the current token":            {by: sender("bob"), object: guarded("main", fence.AnnotationToken, "42")},
		"one by header":                              {by: byHeader, object: guarded("main", fence.AnnotationToken, "42")},
		"one with a superseded token":                {by: sender("bob"), object: guarded("main", fence.AnnotationToken, "41"), refused: true},
		"one above the table":                        {by: sender("bob"), object: guarded("main", fence.AnnotationToken, "43"), refused: true},
		"one with a malformed token":                 {by: sender("bob"), object: guarded("main", fence.AnnotationToken, "042"), refused: true},
		"one with a revoked token":                   {by: sender("bob"), object: guarded("revoked", fence.AnnotationToken, "42"), refused: true},
		"one by the holder's account":                {by: sender("bob"), object: guarded("bound", fence.AnnotationToken, "42")},
		"one by another account":                     {by: sender("eve"), object: guarded("bound", fence.AnnotationToken, "42"), refused: true},
		"one by another pod":                         {by: sender("bob", extraPodUID, "p2"), object: guarded("bound", fence.AnnotationToken, "42"), refused: true},
		"one by annotations where the header counts": {by: sender("bob"), object: guarded("header", fence.AnnotationToken, "42"), refused: true},
		"one by header where the header counts":      {by: byHeader, object: guarded("header", fence.AnnotationToken, "42")},
		"one while the lease is held":                {by: sender("bob"), object: guarded("held", fence.AnnotationToken, "42")},
		"one after it lapsed":                        {by: sender("bob"), object: guarded("lapsed", fence.AnnotationToken, "42"), refused: true},
		"one without a token":                        {by: sender("bob"), object: guarded("main"), refused: true},
		"one with the right to guard":                {by: sender("bob"), object: guarded("main"), may: map[string]bool{"guard shop/main": true}},
		"a bypass that puts the guard on": {by: sender("ops", fence.ExtraBypass, "incident 7"), old: plain, may: bypasses,
			object: guarded("main", fence.AnnotationToken, "42")},
		"one that takes it off":        {by: sender("ops", fence.ExtraBypass, "incident 7"), old: stored, object: plain, may: bypasses},
		"one that points it elsewhere": {by: sender("ops", fence.ExtraBypass, "incident 7"), old: stored, object: moved, may: bypasses},
		"one that leaves the record":   {by: sender("ops", fence.ExtraBypass, "incident 7"), old: stored, object: with(stored), may: bypasses},
		"one that changes the record": {by: sender("ops", fence.ExtraBypass, "incident 7"), old: stored, may: bypasses, refused: true,
			object: with(stored, fence.AnnotationToken, "7")},
		"one without the right": {by: sender("eve", fence.ExtraBypass, "incident 7"), old: stored, object: plain, refused: true},
	} {
		t.Run(name, func(t *testing.T) {
			r := request{operation: admission.Create, user: c.by, object: c.object, may: c.may}
			if c.old != nil {
				r.operation, r.old = admission.Update, c.old
			}
			if got := judge(t, validator, r, table); (got != denial{}) != c.refused {
				t.Errorf("denial %+v, want refused %v", got, c.refused)
			}
		})
	}
}
