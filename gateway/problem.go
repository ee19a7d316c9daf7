package gateway

import (
	"encoding/json"
	"fmt"
	"net/http"

	"github.com/fencedlease/fencedlease/fence"
)

// Reasons of the gateway itself, besides those of the fence.
const (
	// MalformedRequest: a header of the fence is repeated, malformed or
	// smuggled, or the request is of a form that the gateway refuses.
	MalformedRequest fence.Reason = "MalformedRequest"
	// Unauthenticated: the caller did not say who it is, or was not believed.
	Unauthenticated fence.Reason = "Unauthenticated"
	// NotAllowed: the caller may not use the lease.
	NotAllowed fence.Reason = "NotAllowed"
	// Undecided: the ledger, the API or an older call in flight kept the
	// gateway from a verdict. Nothing was sent; trying again is safe.
	Undecided fence.Reason = "Undecided"
	// NotSent: the partner could not be reached. Nothing was sent; trying
	// again is safe.
	NotSent fence.Reason = "NotSent"
	// OutcomeUnknown: the call was sent and no answer came, so it may have
	// taken effect.
	OutcomeUnknown fence.Reason = "OutcomeUnknown"
	// AnotherRequest: the idempotency key stands for another request.
	AnotherRequest fence.Reason = "AnotherRequest"
	// BodyTooLarge: the body exceeds the gateway's limit.
	BodyTooLarge fence.Reason = "BodyTooLarge"
)

// HeaderReason carries a denial's reason where a proxy relays no body.
const HeaderReason = "Fencing-Reason"

// Problem is an answer of the gateway's own, with an RFC 9457 body.
type Problem struct { //nolint:errname // RFC 9457 calls it so
	Status int
	Reason fence.Reason
	// Detail starts with the reason, as every message of the fence does.
	Detail string
}

func problemf(status int, reason fence.Reason, format string, a ...any) *Problem {
	return &Problem{Status: status, Reason: reason, Detail: string(reason) + ": " + fmt.Sprintf(format, a...)}
}

// denied is the problem of a verdict.
func denied(v fence.Verdict) *Problem {
	status := http.StatusForbidden
	if v.Reason == fence.MalformedToken {
		status = http.StatusBadRequest
	}
	return &Problem{Status: status, Reason: v.Reason, Detail: v.Message}
}

func (p *Problem) Error() string { return p.Detail }

// decision is the problem as a decision service tells it: proxies relay 401
// and 403 alone as denials.
func (p *Problem) decision() *Problem {
	if p.Status == http.StatusBadRequest {
		return &Problem{Status: http.StatusForbidden, Reason: p.Reason, Detail: p.Detail}
	}
	return p
}

// body is the RFC 9457 object.
func (p *Problem) body() []byte {
	body, err := json.Marshal(struct {
		Type   string       `json:"type"`
		Title  string       `json:"title"`
		Status int          `json:"status"`
		Detail string       `json:"detail"`
		Reason fence.Reason `json:"reason"`
	}{"tag:fencedlease.io,2026:" + string(p.Reason), http.StatusText(p.Status), p.Status, p.Detail, p.Reason})
	if err != nil {
		return nil // no text fails to marshal
	}
	return append(body, '\n')
}

// header gives the headers that go with the body.
func (p *Problem) header() http.Header {
	h := http.Header{
		"Content-Type":  {"application/problem+json"},
		"Cache-Control": {"no-store"},
		HeaderReason:    {string(p.Reason)},
	}
	if p.Status == http.StatusUnauthorized {
		h.Set("WWW-Authenticate", `Bearer realm="fencedlease", header="`+fence.HeaderAuthorization+`"`)
	}
	return h
}

func (p *Problem) write(w http.ResponseWriter) {
	for name, values := range p.header() {
		w.Header()[name] = values
	}
	w.WriteHeader(p.Status)
	_, _ = w.Write(p.body()) // whoever asked is gone: nobody is left to tell
}
