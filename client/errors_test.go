package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"syscall"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/fencedlease/fencedlease/fence"
)

// TestAnswers: what a write returned is told apart: refused as stale, refused
// for another reason of the fence, refused by somebody else, of unknown
// outcome.
func TestAnswers(t *testing.T) {
	cm := schema.GroupResource{Resource: "configmaps"}
	status := func(code int32, message string, causes ...string) error {
		s := metav1.Status{Status: metav1.StatusFailure, Code: code, Reason: metav1.StatusReasonForbidden, Message: message}
		for _, cause := range causes {
			if s.Details == nil {
				s.Details = &metav1.StatusDetails{}
			}
			s.Details.Causes = append(s.Details.Causes, metav1.StatusCause{Type: metav1.CauseType(cause)})
		}
		return &apierrors.StatusError{ErrStatus: s}
	}
	for name, c := range map[string]struct {
		err    error
		reason fence.Reason
		is     error // fence.ErrStale, fence.ErrOutcomeUnknown, fence.ErrLost, or nil
	}{
		"by the webhook's cause":    {err: status(403, `admission webhook "fence" denied the request: StaleToken: [a/b] token 41 is stale`, "StaleToken"), reason: fence.StaleToken, is: fence.ErrStale},
		"by the policy's message":   {err: status(403, `configmaps "x" is forbidden: ValidatingAdmissionPolicy 'fencedlease' with binding 'fencedlease' denied request: StaleToken: [a/b] token 41 is stale`), reason: fence.StaleToken, is: fence.ErrStale},
		"wrapped":                   {err: fmt.Errorf("patch: %w", status(403, "x denied the request: StaleToken: [a/b] x", "StaleToken")), reason: fence.StaleToken, is: fence.ErrStale},
		"malformed":                 {err: status(422, "x denied the request: MalformedToken: [a/b] x", "MalformedToken"), reason: fence.MalformedToken},
		"unstamped":                 {err: status(403, "x denied request: Unstamped: [a/b] x"), reason: fence.Unstamped},
		"a quota":                   {err: status(403, `leaseclaims "x" is forbidden: exceeded quota: StaleToken, requested: 1`)},
		"a quota that is called so": {err: status(403, `leaseclaims "x" is forbidden: exceeded quota: StaleToken: [a/b], requested: 1`)},
		"no right":                  {err: apierrors.NewForbidden(cm, "x", errors.New("no"))},
		"somebody else's webhook":   {err: status(403, `admission webhook "other" denied the request: image is stale`, "ImageStale")},
		"another code":              {err: status(409, "x denied the request: StaleToken: [a/b] x", "StaleToken")},
		"a conflict":                {err: apierrors.NewConflict(cm, "x", errors.New("changed"))},
		"gone":                      {err: apierrors.NewNotFound(cm, "x")},
		"too many requests":         {err: apierrors.NewTooManyRequests("later", 1)},
		"the server's time ran out": {err: apierrors.NewTimeoutError("x", 1), is: fence.ErrOutcomeUnknown},
		"the server failed":         {err: apierrors.NewInternalError(errors.New("etcd")), is: fence.ErrOutcomeUnknown},
		"the caller's time ran out": {err: context.DeadlineExceeded, is: fence.ErrOutcomeUnknown},
		"the connection broke":      {err: fmt.Errorf("patch: %w", io.ErrUnexpectedEOF), is: fence.ErrOutcomeUnknown},
		"the pipe broke":            {err: &url.Error{Op: "Patch", Err: &net.OpError{Op: "write", Err: syscall.EPIPE}}, is: fence.ErrOutcomeUnknown},
		"the connection was reset":  {err: &url.Error{Op: "Patch", Err: &net.OpError{Op: "read", Err: syscall.ECONNRESET}}, is: fence.ErrOutcomeUnknown},
		"nobody listens":            {err: &url.Error{Op: "Patch", Err: &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}}},
		"no way there":              {err: &url.Error{Op: "Patch", Err: &net.OpError{Op: "dial", Err: syscall.EHOSTUNREACH}}},
		"not sent":                  {err: fmt.Errorf("PATCH /x was not sent: %w", &LostError{Lease: "a/b", Token: 41, Reason: LossExpired}), is: fence.ErrLost},
		"what is known to be stale": {err: fmt.Errorf("x: %w", fence.ErrStale), is: fence.ErrStale},
		"nothing":                   {},
	} {
		t.Run(name, func(t *testing.T) {
			if reason, ok := Reason(c.err); reason != c.reason || ok != (c.reason != "") {
				t.Errorf("reason %q, %t; want %q", reason, ok, c.reason)
			}
			if got := IsStale(c.err); got != errors.Is(c.is, fence.ErrStale) {
				t.Errorf("stale: %t", got)
			}
			got := Outcome(c.err)
			for _, sentinel := range []error{fence.ErrStale, fence.ErrLost, fence.ErrOutcomeUnknown} {
				if errors.Is(got, sentinel) != errors.Is(c.is, sentinel) {
					t.Errorf("%v: is %v, want %v", got, sentinel, c.is)
				}
			}
			if !errors.Is(got, c.err) {
				t.Errorf("%v lost the original", got)
			}
		})
	}
}
