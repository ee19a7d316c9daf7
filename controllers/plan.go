package controllers

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

// situation is all that a decision on one lease rests on.
type situation struct {
	lease *v1alpha1.FencedLease
	// claims are those of the lease, but for ones that are being deleted.
	claims []*v1alpha1.LeaseClaim
	// native is the adopted Lease, nil where there is none.
	native *coordinationv1.Lease
	// lapsed tells who was not renewed in time, the adopted Lease included.
	lapsed map[types.UID]bool
	// delay is what is left of the hand-over delay after a lapse.
	delay time.Duration
}

// ending is why a claim is finished.
type ending struct{ reason, message string }

// plan is what has to be true of a lease next.
type plan struct {
	// holder is who holds, nil for nobody. Its token is the current one, or
	// the next one where issue is set.
	holder *v1alpha1.Holder
	issue  bool
	// revoke folds spec.minToken into the current token.
	revoke bool
	// left tells how the holder of before went, "" where it did not.
	left string
	// finish are the claims that end now.
	finish map[types.UID]ending
	// tickets are the places of claims that have none yet.
	tickets map[types.UID]int64
	waiting int32
	// delay is what is left of the hand-over delay; delayed tells that a claim
	// waits for it.
	delay   time.Duration
	delayed bool
	// read is the claim that is granted, as the API server shows it, nil where
	// it was not read.
	read *v1alpha1.LeaseClaim
}

// decide is the rule of hand-overs.
func decide(s situation) plan {
	p := plan{finish: map[types.UID]ending{}, tickets: tickets(s.claims), holder: s.lease.Status.Holder, delay: s.delay}
	current, minimum := s.lease.Status.Token, s.lease.Spec.MinToken
	p.revoke = current > 0 && minimum > current

	var live []*v1alpha1.LeaseClaim
	var held *v1alpha1.LeaseClaim
	for _, c := range s.claims {
		if finished(c) {
			continue
		}
		holds := holdsClaim(s.lease, c)
		end, ends := ending{}, true
		switch {
		case holds && p.revoke:
			end = ending{v1alpha1.ReasonRevoked, fmt.Sprintf("minToken was raised to %d", minimum)}
		case s.lapsed[c.UID]:
			end = ending{v1alpha1.ReasonLapsed, fmt.Sprintf("not renewed for %d s", s.lease.Spec.LeaseDurationSeconds)}
		case !holds && c.Status.Token > 0:
			end = ending{v1alpha1.ReasonLapsed, "the lease has moved on: a claim is granted once"}
		case !holds:
			end.message = refusal(s.lease, c)
			end.reason, ends = v1alpha1.ReasonRefused, end.message != ""
		default:
			ends = false
		}
		if ends {
			p.finish[c.UID] = end
			continue
		}
		live = append(live, c)
		if holds {
			held = c
		}
	}
	if s.lease.Spec.LeaseRef != nil {
		return p.adopt(s)
	}

	slices.SortFunc(live, func(a, b *v1alpha1.LeaseClaim) int {
		return cmp.Or(cmp.Compare(priority(b), priority(a)), cmp.Compare(p.ticket(a), p.ticket(b)), cmp.Compare(a.UID, b.UID))
	})
	if s.lease.Spec.Preemption == v1alpha1.PreemptionNewestClaim && len(live) > 0 {
		newest := slices.MaxFunc(live, func(a, b *v1alpha1.LeaseClaim) int { return cmp.Compare(p.ticket(a), p.ticket(b)) })
		for _, c := range live {
			if c != newest {
				p.finish[c.UID] = ending{v1alpha1.ReasonPreempted, fmt.Sprintf("claim %s took over", newest.Name)}
			}
		}
		live = []*v1alpha1.LeaseClaim{newest}
		if held != newest {
			held = nil
		}
	}

	switch {
	case held != nil:
		p.waiting = int32(len(live) - 1)
		if reaffirm(held.Spec.Reaffirm) > reaffirm(p.holder.Reaffirm) {
			p.holder, p.issue = holderOf(held), true
		}
		return p
	case p.holder != nil:
		p.left = v1alpha1.ReasonFree
		if end, ok := p.finish[types.UID(p.holder.ClaimUID)]; ok {
			p.left = end.reason
		}
		for _, c := range s.claims { // it was finished in an earlier pass
			if held := heldCondition(c); holdsClaim(s.lease, c) && finished(c) {
				p.left = held.Reason
			}
		}
		p.holder = nil
		if p.left == v1alpha1.ReasonLapsed && s.lease.Spec.HandoverDelaySeconds != nil {
			p.delay = time.Duration(*s.lease.Spec.HandoverDelaySeconds) * time.Second
		}
	}
	p.waiting = int32(len(live))
	if len(live) == 0 {
		return p
	}
	if p.delay > 0 {
		p.delayed = true
		return p
	}
	p.holder, p.issue, p.waiting = holderOf(live[0]), true, p.waiting-1
	return p
}

// adopt lets the adopted Lease decide who holds.
func (p plan) adopt(s situation) plan {
	before := p.holder
	p.holder = nil
	if s.native != nil && !s.lapsed[s.native.UID] {
		p.holder = holderOfLease(s.native)
	}
	switch {
	case p.holder == nil && before != nil:
		p.left = v1alpha1.ReasonFree
		if s.native != nil && s.lapsed[s.native.UID] {
			p.left = v1alpha1.ReasonLapsed
		}
	case p.holder == nil:
	case before != nil && !p.revoke && sameAcquisition(before, p.holder):
		p.holder = before
	default:
		p.issue = true
	}
	return p
}

// refusal says why a claim can never be granted, "" where it can.
func refusal(lease *v1alpha1.FencedLease, c *v1alpha1.LeaseClaim) string {
	most := int32(0)
	if lease.Spec.MaxPriority != nil {
		most = *lease.Spec.MaxPriority
	}
	switch {
	case lease.Spec.LeaseRef != nil:
		return fmt.Sprintf("the lease adopts Lease %s, whose elector decides: claims are not granted", lease.Spec.LeaseRef.Name)
	case priority(c) > most:
		return fmt.Sprintf("priority %d is above the lease's maxPriority %d", priority(c), most)
	case lease.Spec.HolderBinding == v1alpha1.HolderBindingUser && c.Spec.User == nil:
		return "the lease binds its holder to an account: set spec.user to your own"
	}
	return ""
}

// tickets gives each claim without one its place after all that have one, in
// the order of creation. A creation time has steps of a second; within one the
// resourceVersion tells, as far as no renewal moved it.
func tickets(claims []*v1alpha1.LeaseClaim) map[types.UID]int64 {
	var last int64
	var fresh []*v1alpha1.LeaseClaim
	for _, c := range claims {
		last = max(last, c.Status.Ticket)
		if c.Status.Ticket == 0 && !finished(c) {
			fresh = append(fresh, c)
		}
	}
	revision := func(c *v1alpha1.LeaseClaim) int64 { n, _ := strconv.ParseInt(c.ResourceVersion, 10, 64); return n }
	slices.SortFunc(fresh, func(a, b *v1alpha1.LeaseClaim) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(revision(a), revision(b)), cmp.Compare(a.UID, b.UID))
	})
	given := make(map[types.UID]int64, len(fresh))
	for _, c := range fresh {
		last++
		given[c.UID] = last
	}
	return given
}

func (p plan) ticket(c *v1alpha1.LeaseClaim) int64 { return max(c.Status.Ticket, p.tickets[c.UID]) }

func priority(c *v1alpha1.LeaseClaim) int32 {
	if c.Spec.Priority == nil {
		return 0
	}
	return *c.Spec.Priority
}

func reaffirm(n *int64) int64 {
	if n == nil {
		return 0
	}
	return *n
}

func heldCondition(c *v1alpha1.LeaseClaim) (held struct{ Reason string }) {
	if condition := meta.FindStatusCondition(c.Status.Conditions, v1alpha1.LeaseClaimHeld); condition != nil {
		held.Reason = condition.Reason
	}
	return held
}

// finished tells that a claim can never hold again.
func finished(c *v1alpha1.LeaseClaim) bool {
	switch heldCondition(c).Reason {
	case v1alpha1.ReasonLapsed, v1alpha1.ReasonPreempted, v1alpha1.ReasonRevoked, v1alpha1.ReasonRefused:
		return true
	}
	return false
}

func holdsClaim(lease *v1alpha1.FencedLease, c *v1alpha1.LeaseClaim) bool {
	return lease.Status.Holder != nil && lease.Status.Holder.ClaimUID == string(c.UID)
}

func holderOf(c *v1alpha1.LeaseClaim) *v1alpha1.Holder {
	return &v1alpha1.Holder{
		ClaimName: c.Name, ClaimUID: string(c.UID), Identity: c.Identity(), User: c.Spec.User.DeepCopy(), Reaffirm: c.Spec.Reaffirm,
	}
}

// holderOfLease gives the holder that an adopted Lease names, nil for nobody.
func holderOfLease(native *coordinationv1.Lease) *v1alpha1.Holder {
	if native.Spec.HolderIdentity == nil || *native.Spec.HolderIdentity == "" {
		return nil
	}
	identity := *native.Spec.HolderIdentity
	if len(identity) > 253 {
		identity = identity[:253]
	}
	return &v1alpha1.Holder{
		Identity: identity,
		Lease: &v1alpha1.AdoptedLease{
			UID: string(native.UID), Transitions: native.Spec.LeaseTransitions, AcquireTime: native.Spec.AcquireTime.DeepCopy(),
		},
	}
}

// sameAcquisition tells whether two holders of an adopted Lease are the same
// acquisition of it: any difference is a new one.
func sameAcquisition(a, b *v1alpha1.Holder) bool {
	if a.Lease == nil || b.Lease == nil || a.Identity != b.Identity || a.Lease.UID != b.Lease.UID {
		return false
	}
	transitions := func(n *int32) int32 {
		if n == nil {
			return -1
		}
		return *n
	}
	return transitions(a.Lease.Transitions) == transitions(b.Lease.Transitions) && a.Lease.AcquireTime.Equal(b.Lease.AcquireTime)
}
