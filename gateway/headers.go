package gateway

import (
	"net/http"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/utils/lru"

	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/gateway/ledger"
)

// HeaderIdempotencyKey names a call that is to happen once.
const HeaderIdempotencyKey = "Idempotency-Key"

// mostValue bounds a key: of a workflow or of idempotency.
const mostValue = 255

// call is what a request says of itself.
type call struct {
	lease types.NamespacedName
	id    ledger.ID
	token string
	// idempotencyKey is empty where there is none.
	idempotencyKey string
}

// The headers that are read, and that nothing else may be taken for.
var known = []string{
	fence.HeaderLease, fence.HeaderToken, fence.HeaderKey, fence.HeaderAuthorization, HeaderIdempotencyKey,
}

// readCall reads the fencing headers of a request as it came, before anything
// is stripped. Names are in canonical form. What one reader could take for
// another value than the next reader does is refused: a repeated header, a list
// in one, another spelling, a name in the Connection header.
func readCall(h, trailers http.Header) (call, *Problem) {
	malformed := func(format string, a ...any) (call, *Problem) { //nolint:unparam // it is returned as it is
		return call{}, problemf(http.StatusBadRequest, MalformedRequest, format, a...)
	}
	for name := range h {
		if !slices.Contains(known, name) && looksLikeOurs(name) {
			return malformed("header %.64q is not one of %s; take it off", name, strings.Join(known, ", "))
		}
	}
	for _, list := range h["Connection"] {
		for name := range strings.SplitSeq(list, ",") {
			if name = http.CanonicalHeaderKey(strings.TrimSpace(name)); looksLikeOurs(name) {
				return malformed("the Connection header names %.64q, so that one on the way would drop it; take it off", name)
			}
		}
	}
	for name := range trailers {
		if looksLikeOurs(name) {
			return malformed("%.64q must be a header, not a trailer", name)
		}
	}
	var c call
	for _, field := range []struct {
		name     string
		value    *string
		optional bool
	}{
		{fence.HeaderLease, &c.id.Lease, false},
		{fence.HeaderToken, &c.token, false},
		{fence.HeaderKey, &c.id.Key, true},
		{HeaderIdempotencyKey, &c.idempotencyKey, true},
	} {
		values, present := h[field.name]
		switch {
		case !present && field.optional:
			continue
		case !present:
			return call{}, problemf(http.StatusBadRequest, fence.Unstamped, "header %s is missing; send %s: <namespace>/<name> and %s: <the token of your claim>",
				field.name, fence.HeaderLease, fence.HeaderToken)
		case len(values) != 1:
			return malformed("header %s is repeated %d times; send it once", field.name, len(values))
		}
		*field.value = values[0]
		if field.name != fence.HeaderToken && !plain(values[0]) {
			return malformed("header %s is %.64q: it must be 1 to %d visible ASCII characters without blanks and commas", field.name, values[0], mostValue)
		}
	}
	// What it says is for whoever identifies the caller. A bearer token has no
	// comma (RFC 6750, section 2.1).
	if values := h[fence.HeaderAuthorization]; len(values) > 1 || len(values) == 1 && strings.Contains(values[0], ",") {
		return malformed("header %s must stand once, with one bearer token", fence.HeaderAuthorization)
	}
	var ok bool
	if c.lease, ok = leaseNamed(c.id.Lease); !ok {
		return malformed("header %s is %.64q: it must be <namespace>/<name>", fence.HeaderLease, c.id.Lease)
	}
	if c.id.Key == "" {
		c.id.Key = c.id.Lease
	}
	return c, nil
}

// wellFormed remembers names that were checked: the check is most of what it
// takes to read a call.
var wellFormed = lru.New(4096)

// leaseNamed gives the lease that a name stands for, where it is one.
func leaseNamed(text string) (types.NamespacedName, bool) {
	if known, ok := wellFormed.Get(text); ok {
		key, ok := known.(types.NamespacedName)
		return key, ok
	}
	namespace, name, _ := strings.Cut(text, "/")
	if len(validation.IsDNS1123Label(namespace)) > 0 || len(name) > validation.DNS1123LabelMaxLength || len(validation.IsDNS1123Subdomain(name)) > 0 {
		return types.NamespacedName{}, false
	}
	key := types.NamespacedName{Namespace: namespace, Name: name}
	wellFormed.Add(text, key)
	return key, true
}

// looksLikeOurs tells whether some reader could take the name for a header of
// the gateway: many make one character of all that is no letter and no digit.
func looksLikeOurs(name string) bool {
	if name == "" || name[0]|0x20 != 'f' && name[0]|0x20 != 'i' {
		return false
	}
	name = strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' {
			return r
		}
		return '-'
	}, strings.ToLower(name))
	return strings.HasPrefix(name, "fencing-") || name == "idempotency-key"
}

// plain tells whether a value has one meaning: a comma could be two headers
// that were joined, a blank one that was padded.
func plain(s string) bool {
	if s == "" || len(s) > mostValue {
		return false
	}
	for i := range len(s) {
		if s[i] <= ' ' || s[i] > '~' || s[i] == ',' {
			return false
		}
	}
	return true
}

// judgedHeaders are the headers that were judged, as the partner gets them.
func (c call) judgedHeaders() [3][2]string {
	return [3][2]string{{fence.HeaderLease, c.id.Lease}, {fence.HeaderToken, c.token}, {fence.HeaderKey, c.id.Key}}
}

// setJudged puts them in the place of what came.
func (c call) setJudged(h http.Header) {
	values := make([]string, 0, 3)
	for i, judged := range c.judgedHeaders() {
		values = append(values, judged[1])
		h[judged[0]] = values[i : i+1 : i+1]
	}
}
