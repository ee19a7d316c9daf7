package controllers

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

// claimOf makes a claim that has waited since its ticket; its UID is its name.
func claimOf(name string, ticket int64, changes ...func(*v1alpha1.LeaseClaim)) *v1alpha1.LeaseClaim {
	c := &v1alpha1.LeaseClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name)},
		Spec:       v1alpha1.LeaseClaimSpec{HolderIdentity: name},
		Status:     v1alpha1.LeaseClaimStatus{Ticket: ticket},
	}
	for _, change := range changes {
		change(c)
	}
	return c
}

func withToken(token int64) func(*v1alpha1.LeaseClaim) {
	return func(c *v1alpha1.LeaseClaim) { c.Status.Token = token }
}

func withPriority(n int32) func(*v1alpha1.LeaseClaim) {
	return func(c *v1alpha1.LeaseClaim) { c.Spec.Priority = &n }
}

func withReaffirm(n int64) func(*v1alpha1.LeaseClaim) {
	return func(c *v1alpha1.LeaseClaim) { c.Spec.Reaffirm = &n }
}

func ended(reason string) func(*v1alpha1.LeaseClaim) {
	return func(c *v1alpha1.LeaseClaim) {
		c.Status.Conditions = []metav1.Condition{{Type: v1alpha1.LeaseClaimHeld, Status: metav1.ConditionFalse, Reason: reason}}
	}
}

func nativeOf(uid, holder string, transitions int32) *coordinationv1.Lease {
	return &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{UID: types.UID(uid)},
		Spec:       coordinationv1.LeaseSpec{HolderIdentity: &holder, LeaseTransitions: &transitions},
	}
}

func TestDecide(t *testing.T) {
	a, held := claimOf("a", 1), claimOf("a", 1, withToken(7))
	b, c := claimOf("b", 2), claimOf("c", 3)
	adopts := v1alpha1.FencedLeaseSpec{LeaseRef: &v1alpha1.LeaseReference{Name: "native"}}
	const (
		seconds = int32(30)
		delay   = 30 * time.Second
	)
	lapse := ending{v1alpha1.ReasonLapsed, "not renewed for 15 s"}
	for name, c := range map[string]struct {
		spec   v1alpha1.FencedLeaseSpec
		token  int64
		holder *v1alpha1.Holder
		claims []*v1alpha1.LeaseClaim
		native *coordinationv1.Lease
		lapsed []types.UID
		delay  time.Duration
		want   plan
	}{
		"a lease that nobody wants stays free": {want: plan{}},
		"the first in the queue is granted": {
			claims: []*v1alpha1.LeaseClaim{c, b, a},
			want:   plan{holder: holderOf(a), issue: true, waiting: 2},
		},
		"who holds goes on, whoever waits": {
			token: 7, holder: holderOf(a), claims: []*v1alpha1.LeaseClaim{b, held},
			want: plan{holder: holderOf(a), waiting: 1},
		},
		"places follow the order of creation after those that are given": {
			token: 7, holder: holderOf(a),
			claims: []*v1alpha1.LeaseClaim{held, claimOf("y", 0, createdAt(2, "9")), claimOf("x", 0, createdAt(1, "5")), claimOf("z", 0, createdAt(2, "10")), c},
			want:   plan{holder: holderOf(a), waiting: 4, tickets: map[types.UID]int64{"x": 4, "y": 5, "z": 6}},
		},
		"a higher priority goes first": {
			spec: v1alpha1.FencedLeaseSpec{MaxPriority: new(int32(5))}, claims: []*v1alpha1.LeaseClaim{a, claimOf("urgent", 9, withPriority(5))},
			want: plan{holder: holderOf(claimOf("urgent", 9)), issue: true, waiting: 1},
		},
		"a priority above maxPriority is refused": {
			claims: []*v1alpha1.LeaseClaim{claimOf("urgent", 1, withPriority(1)), b},
			want: plan{holder: holderOf(b), issue: true, finish: map[types.UID]ending{
				"urgent": {v1alpha1.ReasonRefused, "priority 1 is above the lease's maxPriority 0"},
			}},
		},
		"a claim without account is refused where holders are bound": {
			spec: v1alpha1.FencedLeaseSpec{HolderBinding: v1alpha1.HolderBindingUser}, claims: []*v1alpha1.LeaseClaim{a},
			want: plan{finish: map[types.UID]ending{"a": {v1alpha1.ReasonRefused, "the lease binds its holder to an account: set spec.user to your own"}}},
		},
		"a release hands over at once, delay or not": {
			spec: v1alpha1.FencedLeaseSpec{HandoverDelaySeconds: new(seconds)}, token: 7, holder: holderOf(a), claims: []*v1alpha1.LeaseClaim{b},
			want: plan{holder: holderOf(b), issue: true, left: v1alpha1.ReasonFree},
		},
		"a lapse hands over": {
			token: 7, holder: holderOf(a), claims: []*v1alpha1.LeaseClaim{held, b}, lapsed: []types.UID{"a"},
			want: plan{holder: holderOf(b), issue: true, left: v1alpha1.ReasonLapsed, finish: map[types.UID]ending{"a": lapse}},
		},
		"a lapse hands over after the delay": {
			spec: v1alpha1.FencedLeaseSpec{HandoverDelaySeconds: new(seconds)}, token: 7, holder: holderOf(a),
			claims: []*v1alpha1.LeaseClaim{held, b}, lapsed: []types.UID{"a"},
			want: plan{left: v1alpha1.ReasonLapsed, finish: map[types.UID]ending{"a": lapse}, waiting: 1, delay: delay, delayed: true},
		},
		"a lapse that was told before it was published is delayed too": {
			spec: v1alpha1.FencedLeaseSpec{HandoverDelaySeconds: new(seconds)}, token: 7, holder: holderOf(a),
			claims: []*v1alpha1.LeaseClaim{claimOf("a", 1, withToken(7), ended(v1alpha1.ReasonLapsed)), b},
			want:   plan{left: v1alpha1.ReasonLapsed, waiting: 1, delay: delay, delayed: true},
		},
		"nobody is granted while the delay runs": {
			token: 7, claims: []*v1alpha1.LeaseClaim{b}, delay: time.Second,
			want: plan{waiting: 1, delay: time.Second, delayed: true},
		},
		"a delay that is over holds nobody up": {
			token: 7, claims: []*v1alpha1.LeaseClaim{b}, delay: -time.Second,
			want: plan{holder: holderOf(b), issue: true, delay: -time.Second},
		},
		"a dead claim in the queue lapses and is passed over": {
			claims: []*v1alpha1.LeaseClaim{a, b}, lapsed: []types.UID{"a"},
			want: plan{holder: holderOf(b), issue: true, finish: map[types.UID]ending{"a": lapse}},
		},
		"a claim is granted once": {
			token: 9, claims: []*v1alpha1.LeaseClaim{held, b},
			want: plan{holder: holderOf(b), issue: true, finish: map[types.UID]ending{
				"a": {v1alpha1.ReasonLapsed, "the lease has moved on: a claim is granted once"},
			}},
		},
		"a finished claim is not looked at": {
			claims: []*v1alpha1.LeaseClaim{claimOf("a", 1, ended(v1alpha1.ReasonRevoked)), claimOf("b", 2, ended(v1alpha1.ReasonRefused))},
			want:   plan{},
		},
		"a claim of the holder's name is not the holder": {
			token: 7, holder: &v1alpha1.Holder{ClaimName: "b", ClaimUID: "former", Identity: "b"}, claims: []*v1alpha1.LeaseClaim{b},
			want: plan{holder: holderOf(b), issue: true, left: v1alpha1.ReasonFree},
		},
		"reaffirm issues the holder a higher token": {
			token: 7, holder: holderOf(a), claims: []*v1alpha1.LeaseClaim{claimOf("a", 1, withToken(7), withReaffirm(1)), b},
			want: plan{holder: holderOf(claimOf("a", 1, withReaffirm(1))), issue: true, waiting: 1},
		},
		"the same reaffirm again issues nothing": {
			token: 8, holder: holderOf(claimOf("a", 1, withReaffirm(1))), claims: []*v1alpha1.LeaseClaim{claimOf("a", 1, withToken(8), withReaffirm(1))},
			want: plan{holder: holderOf(claimOf("a", 1, withReaffirm(1)))},
		},
		"minToken revokes the holder, and the next one is granted": {
			spec: v1alpha1.FencedLeaseSpec{MinToken: 8}, token: 7, holder: holderOf(a), claims: []*v1alpha1.LeaseClaim{held, b},
			want: plan{revoke: true, holder: holderOf(b), issue: true, left: v1alpha1.ReasonRevoked, finish: map[types.UID]ending{
				"a": {v1alpha1.ReasonRevoked, "minToken was raised to 8"},
			}},
		},
		"minToken revokes the current token of a free lease": {
			spec: v1alpha1.FencedLeaseSpec{MinToken: 8}, token: 7, want: plan{revoke: true},
		},
		"minToken at the current token revokes nothing": {
			spec: v1alpha1.FencedLeaseSpec{MinToken: 7}, token: 7, holder: holderOf(a), claims: []*v1alpha1.LeaseClaim{held},
			want: plan{holder: holderOf(a)},
		},
		"the newest claim takes over": {
			spec: v1alpha1.FencedLeaseSpec{Preemption: v1alpha1.PreemptionNewestClaim}, token: 7, holder: holderOf(a),
			claims: []*v1alpha1.LeaseClaim{held, claimOf("new", 0), b},
			want: plan{
				holder: holderOf(claimOf("new", 0)), issue: true, left: v1alpha1.ReasonPreempted, tickets: map[types.UID]int64{"new": 3},
				finish: map[types.UID]ending{"a": {v1alpha1.ReasonPreempted, "claim new took over"}, "b": {v1alpha1.ReasonPreempted, "claim new took over"}},
			},
		},
		"an adopted Lease names the holder, and claims are refused": {
			spec: adopts, native: nativeOf("n", "pod", 1), claims: []*v1alpha1.LeaseClaim{a},
			want: plan{holder: holderOfLease(nativeOf("n", "pod", 1)), issue: true, finish: map[types.UID]ending{
				"a": {v1alpha1.ReasonRefused, "the lease adopts Lease native, whose elector decides: claims are not granted"},
			}},
		},
		"a renewed adopted Lease changes nothing": {
			spec: adopts, token: 7, holder: holderOfLease(nativeOf("n", "pod", 1)), native: nativeOf("n", "pod", 1),
			want: plan{holder: holderOfLease(nativeOf("n", "pod", 1))},
		},
		"the same identity in another transition is another acquisition": {
			spec: adopts, token: 7, holder: holderOfLease(nativeOf("n", "pod", 1)), native: nativeOf("n", "pod", 2),
			want: plan{holder: holderOfLease(nativeOf("n", "pod", 2)), issue: true},
		},
		"an adopted Lease made anew is another acquisition": {
			spec: adopts, token: 7, holder: holderOfLease(nativeOf("n", "pod", 1)), native: nativeOf("m", "pod", 1),
			want: plan{holder: holderOfLease(nativeOf("m", "pod", 1)), issue: true},
		},
		"an adopted Lease that expired is free": {
			spec: adopts, token: 7, holder: holderOfLease(nativeOf("n", "pod", 1)), native: nativeOf("n", "pod", 1), lapsed: []types.UID{"n"},
			want: plan{left: v1alpha1.ReasonLapsed},
		},
		"an adopted Lease that was given up is free": {
			spec: adopts, token: 7, holder: holderOfLease(nativeOf("n", "pod", 1)), native: nativeOf("n", "", 1),
			want: plan{left: v1alpha1.ReasonFree},
		},
		"an adopted Lease that is gone is free": {
			spec: adopts, token: 7, holder: holderOfLease(nativeOf("n", "pod", 1)), want: plan{left: v1alpha1.ReasonFree},
		},
		"minToken gives the holder of an adopted Lease a token above it": {
			spec: withMinToken(adopts, 8), token: 7, holder: holderOfLease(nativeOf("n", "pod", 1)), native: nativeOf("n", "pod", 1),
			want: plan{revoke: true, holder: holderOfLease(nativeOf("n", "pod", 1)), issue: true},
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := situation{lease: &v1alpha1.FencedLease{Spec: c.spec}, claims: c.claims, native: c.native, lapsed: map[types.UID]bool{}, delay: c.delay}
			s.lease.Spec.LeaseDurationSeconds = 15
			s.lease.Status.Token, s.lease.Status.Holder = c.token, c.holder
			for _, uid := range c.lapsed {
				s.lapsed[uid] = true
			}
			if c.want.finish == nil {
				c.want.finish = map[types.UID]ending{}
			}
			if c.want.tickets == nil {
				c.want.tickets = map[types.UID]int64{}
			}
			if diff := cmp.Diff(c.want, decide(s), cmp.AllowUnexported(plan{}, ending{})); diff != "" {
				t.Errorf("plan (-want +got):\n%s", diff)
			}
		})
	}
}

func withMinToken(spec v1alpha1.FencedLeaseSpec, minimum int64) v1alpha1.FencedLeaseSpec {
	spec.MinToken = minimum
	return spec
}

func createdAt(second int64, revision string) func(*v1alpha1.LeaseClaim) {
	return func(c *v1alpha1.LeaseClaim) {
		c.CreationTimestamp, c.ResourceVersion = metav1.Unix(second, 0), revision
	}
}

// TestDecideSettles: carried out, a plan leads to one that changes nothing, and
// whoever holds is a live claim that no other one comes before.
func TestDecideSettles(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := situation{lease: &v1alpha1.FencedLease{}, lapsed: map[types.UID]bool{}}
		s.lease.Spec.MaxPriority = new(int32(3))
		s.lease.Spec.Preemption = rapid.SampledFrom([]v1alpha1.Preemption{v1alpha1.PreemptionNever, v1alpha1.PreemptionNewestClaim}).Draw(t, "preemption")
		for i := range rapid.IntRange(0, 6).Draw(t, "claims") {
			name := fmt.Sprintf("c%d", i)
			c := claimOf(name, rapid.Int64Range(0, 4).Draw(t, "ticket"), withPriority(rapid.Int32Range(0, 4).Draw(t, "priority")))
			s.claims = append(s.claims, c)
			s.lapsed[c.UID] = rapid.Bool().Draw(t, "lapsed")
		}
		p := decide(s)
		var live int
		for _, c := range s.claims {
			if _, ends := p.finish[c.UID]; !ends {
				live++
			}
		}
		if (p.holder != nil) != (live > 0) {
			t.Fatalf("%d live claims, holder %+v", live, p.holder)
		}
		for _, c := range s.claims {
			c.Status.Ticket = p.ticket(c)
			if end, ends := p.finish[c.UID]; ends {
				ended(end.reason)(c)
				if p.holder != nil && p.holder.ClaimUID == string(c.UID) {
					t.Fatalf("holder %+v ends: %+v", p.holder, end)
				}
			}
		}
		s.lease.Status.Token, s.lease.Status.Holder = 1, p.holder
		again := decide(s)
		if again.issue || again.left != "" || len(again.finish)+len(again.tickets) > 0 || again.waiting != p.waiting {
			t.Fatalf("after %+v comes %+v", p, again)
		}
	})
}
