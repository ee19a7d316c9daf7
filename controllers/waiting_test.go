package controllers

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

func TestStanding(t *testing.T) {
	now := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	ago := func(d time.Duration) metav1.Time { return metav1.NewTime(now.Add(-d)) }
	claim := func(name string, age time.Duration, changes ...func(*v1alpha1.LeaseClaim)) v1alpha1.LeaseClaim {
		c := claimOf(name, 1, changes...)
		c.Namespace, c.Spec.LeaseName, c.CreationTimestamp = "shop", "main", ago(age)
		return *c
	}
	lapsed := func(c *v1alpha1.LeaseClaim) {
		c.Status.Conditions = []metav1.Condition{{Type: v1alpha1.LeaseClaimHeld, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonLapsed}}
	}
	deleted := func(c *v1alpha1.LeaseClaim) { c.DeletionTimestamp = new(ago(0)) }
	// lease is four hours old and has had its holder, or none, for age.
	lease := func(holder, reason string, age time.Duration) v1alpha1.FencedLease {
		l := leaseWith("100", "none", 101, 0)
		l.CreationTimestamp = ago(4 * time.Hour)
		held := metav1.Condition{Type: v1alpha1.FencedLeaseHeld, Status: metav1.ConditionFalse, Reason: reason, LastTransitionTime: ago(age)}
		if holder != "" {
			held.Status, l.Status.Holder = metav1.ConditionTrue, &v1alpha1.Holder{ClaimName: holder, ClaimUID: holder}
		}
		l.Status.Conditions = []metav1.Condition{held}
		return *l
	}
	delayed := lease("", v1alpha1.ReasonHandoverDelay, 3*time.Minute)
	delayed.Spec.HandoverDelaySeconds = new(int32(120))
	patient := lease("", v1alpha1.ReasonHandoverDelay, 3*time.Minute)
	patient.Spec.HandoverDelaySeconds = new(int32(600))
	unseen := *leaseWith("100", "none", 0, 0)
	unseen.CreationTimestamp = ago(7 * time.Minute)

	for name, c := range map[string]struct {
		claims []v1alpha1.LeaseClaim
		leases []v1alpha1.FencedLease
		want   stand
	}{
		"nobody is there": {},
		"a free lease that nobody wants": {
			leases: []v1alpha1.FencedLease{lease("", v1alpha1.ReasonFree, time.Hour)},
		},
		"a holder, and nobody waits": {
			claims: []v1alpha1.LeaseClaim{claim("a", time.Hour)},
			leases: []v1alpha1.FencedLease{lease("a", v1alpha1.ReasonHeld, time.Hour)},
		},
		"two wait for a holder": {
			claims: []v1alpha1.LeaseClaim{claim("a", time.Hour), claim("b", 20*time.Minute), claim("c", 2*time.Minute)},
			leases: []v1alpha1.FencedLease{lease("a", v1alpha1.ReasonHeld, time.Hour)},
			want:   stand{waiting: 2, oldest: 20 * time.Minute},
		},
		"one waits though nobody holds: since the claim came": {
			claims: []v1alpha1.LeaseClaim{claim("a", 6*time.Minute)},
			leases: []v1alpha1.FencedLease{lease("", v1alpha1.ReasonFree, time.Hour)},
			want:   stand{waiting: 1, oldest: 6 * time.Minute, without: 1, longest: 6 * time.Minute},
		},
		"one waits though nobody holds: since the holder went": {
			claims: []v1alpha1.LeaseClaim{claim("a", time.Hour), claim("b", time.Minute)},
			leases: []v1alpha1.FencedLease{lease("", v1alpha1.ReasonFree, 6*time.Minute)},
			want:   stand{waiting: 2, oldest: time.Hour, without: 1, longest: 6 * time.Minute},
		},
		"the hand-over delay is over": {
			claims: []v1alpha1.LeaseClaim{claim("a", time.Hour)},
			leases: []v1alpha1.FencedLease{delayed},
			want:   stand{waiting: 1, oldest: time.Hour, without: 1, longest: time.Minute},
		},
		"the hand-over delay runs": {
			claims: []v1alpha1.LeaseClaim{claim("a", time.Hour)},
			leases: []v1alpha1.FencedLease{patient},
			want:   stand{waiting: 1, oldest: time.Hour, without: 1},
		},
		"a lease that the operator has not seen": {
			claims: []v1alpha1.LeaseClaim{claim("a", time.Hour)},
			leases: []v1alpha1.FencedLease{unseen},
			want:   stand{waiting: 1, oldest: time.Hour, without: 1, longest: 7 * time.Minute},
		},
		"a lease that does not exist": {
			claims: []v1alpha1.LeaseClaim{claim("a", time.Hour)},
			want:   stand{waiting: 1, oldest: time.Hour, without: 1, longest: time.Hour},
		},
		"who is finished or goes waits for nothing": {
			claims: []v1alpha1.LeaseClaim{claim("a", time.Hour, lapsed), claim("b", time.Hour, deleted)},
			leases: []v1alpha1.FencedLease{lease("", v1alpha1.ReasonFree, time.Hour)},
		},
		"a clock that is behind": {
			claims: []v1alpha1.LeaseClaim{claim("a", -time.Minute)},
			leases: []v1alpha1.FencedLease{lease("", v1alpha1.ReasonFree, -time.Minute)},
			want:   stand{waiting: 1, without: 1},
		},
	} {
		t.Run(name, func(t *testing.T) {
			if got := standing(c.claims, c.leases, now); got != c.want {
				t.Errorf("got %+v, want %+v", got, c.want)
			}
		})
	}
}
