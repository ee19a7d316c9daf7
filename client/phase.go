package client

import (
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
)

// phase is what a claim's status says of it. Phases only go up.
type phase int

const (
	waiting phase = iota
	granted
	finished
)

// progress is what is known of a claim. It only moves forward, so an answer
// that arrives late, or from a lagging cache, cannot undo a newer one.
type progress struct {
	phase phase
	// queued tells that the operator has seen the claim.
	queued bool
	token  fence.Token
	// loss and message say why, where the claim is finished.
	loss    Loss
	refused bool
	message string
}

// advance joins what a claim's status says to what was known.
func (p progress) advance(claim *v1alpha1.LeaseClaim) progress {
	if p.phase == finished {
		return p
	}
	held := meta.FindStatusCondition(claim.Status.Conditions, v1alpha1.LeaseClaimHeld)
	if held == nil {
		return p
	}
	p.queued = p.queued || claim.Status.Ticket > 0
	switch held.Reason {
	case v1alpha1.ReasonGranted:
		token := fence.Token(claim.Status.Token)
		if held.Status == metav1.ConditionTrue && token.Valid() {
			p.phase, p.token = granted, max(p.token, token)
		}
		return p
	case v1alpha1.ReasonLapsed:
		p.loss = LossLapsed
	case v1alpha1.ReasonPreempted:
		p.loss = LossPreempted
	case v1alpha1.ReasonRevoked:
		p.loss = LossRevoked
	case v1alpha1.ReasonRefused:
		p.refused = true
	default:
		return p
	}
	p.phase, p.message = finished, held.Message
	return p
}

// vanish is what the absence of a claim that existed says.
func (p progress) vanish() progress {
	if p.phase != finished {
		p.phase, p.loss, p.message = finished, LossDeleted, "the claim was deleted"
	}
	return p
}
