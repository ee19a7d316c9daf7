package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	gonet "net"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/net"

	"github.com/fencedlease/fencedlease/fence"
)

var (
	// ErrNotAcquired is wrapped by Acquire's error where another claim holds
	// the lease and the caller did not want to wait (longer).
	ErrNotAcquired = errors.New("lease not acquired")
	// ErrReleased is what Held.Err gives after Release.
	ErrReleased = errors.New("lease released")
)

// Loss says why a lease was lost.
type Loss string

const (
	// LossExpired: this process could not renew in time by its own clock.
	LossExpired Loss = "Expired"
	// LossLapsed: the operator saw no renewal for a lease duration.
	LossLapsed Loss = "Lapsed"
	// LossPreempted: a newer claim took over.
	LossPreempted Loss = "Preempted"
	// LossRevoked: minToken was raised above the token.
	LossRevoked Loss = "Revoked"
	// LossDeleted: the claim was deleted by someone else.
	LossDeleted Loss = "Deleted"
)

// LostError tells which lease was lost and why. It matches fence.ErrLost.
type LostError struct {
	Lease  string
	Token  fence.Token
	Reason Loss
}

func (e *LostError) Error() string {
	return fmt.Sprintf("%v: [%s] token %s: %s", fence.ErrLost, e.Lease, e.Token, e.Reason)
}

// Is tells that e is a fence.ErrLost.
func (e *LostError) Is(target error) bool { return target == fence.ErrLost }

// Reason gives the fence's reason of a rejection, and false where err is not
// an answer of the admission fence. A webhook gives it as the cause of the
// status; a policy can only start its message with it.
func Reason(err error) (fence.Reason, bool) {
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return "", false
	}
	s := status.Status()
	if s.Code != 403 && s.Code != 422 {
		return "", false
	}
	if s.Details != nil {
		for _, cause := range s.Details.Causes {
			if reason := fence.Reason(cause.Type); known(reason) {
				return reason, true
			}
		}
	}
	return messageReason(s)
}

// messageReason finds the reason that the fence's own part of the message
// starts with. The API server puts "denied the request: " before a webhook's
// message and "denied request: " before a policy's.
func messageReason(s metav1.Status) (fence.Reason, bool) {
	text := s.Message
	for _, lead := range []string{"denied the request: ", "denied request: "} {
		if i := strings.Index(text, lead); i >= 0 {
			text = text[i+len(lead):]
			break
		}
	}
	head, _, found := strings.Cut(text, ": ")
	if reason := fence.Reason(head); found && known(reason) {
		return reason, true
	}
	return "", false
}

func known(reason fence.Reason) bool {
	switch reason {
	case fence.StaleToken, fence.UnissuedToken, fence.MalformedToken, fence.Unstamped,
		fence.UnknownLease, fence.NotRecorded, fence.Lapsed, fence.FenceRemoved, fence.NotHolder:
		return true
	}
	return false
}

// IsStale tells whether a fence rejected the write because a newer token
// exists: the write did not happen and this holder has to stop.
func IsStale(err error) bool {
	if errors.Is(err, fence.ErrStale) {
		return true
	}
	reason, ok := Reason(err)
	return ok && reason == fence.StaleToken
}

// Outcome makes errors.Is work on what a write returned: a stale rejection
// then matches fence.ErrStale, a write without an answer
// fence.ErrOutcomeUnknown, one that was not sent fence.ErrLost. The original
// stays in the chain.
func Outcome(err error) error {
	switch {
	case err == nil, errors.Is(err, fence.ErrStale), errors.Is(err, fence.ErrLost), errors.Is(err, fence.ErrOutcomeUnknown):
		return err
	case IsStale(err):
		return fmt.Errorf("%w: %w", fence.ErrStale, err)
	case unanswered(err):
		return fmt.Errorf("%w: %w", fence.ErrOutcomeUnknown, err)
	}
	return err
}

// unanswered tells whether a request that was sent may have been carried out
// although err came back.
func unanswered(err error) bool {
	if net.IsConnectionRefused(err) {
		return false
	}
	var status apierrors.APIStatus
	if errors.As(err, &status) {
		// The server gave up waiting for its own store or was going down.
		return apierrors.IsTimeout(err) || apierrors.IsServerTimeout(err) || apierrors.IsInternalError(err)
	}
	if op, ok := errors.AsType[*gonet.OpError](err); ok && op.Op != "dial" {
		return true // it broke while the request was written or the answer read
	}
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) ||
		errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		net.IsConnectionReset(err) || net.IsProbableEOF(err) || net.IsTimeout(err) || net.IsHTTP2ConnectionLost(err)
}
