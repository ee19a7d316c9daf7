// Package fence is the rule of FencedLease, written once: given the token
// that a write presents, the token recorded for what it changes and what is
// known of the lease, Judge says whether the write counts.
//
// Judge is pure, so what it guarantees is bounded by what it is told: a
// verdict on a recorded token that the store compares and swaps is free of
// races; a verdict on a lease read from a cache is as old as the cache. It
// does not make a holder stop believing that it holds.
package fence

import (
	"errors"
	"fmt"
	"strconv"
)

// Token is a fencing token: strictly increasing per lease, issued once per
// acquisition, never reused. The zero value means "none".
type Token int64

const (
	// MinToken is the lowest token.
	MinToken Token = 1
	// MaxToken is the highest token, 2^53-1: the largest integer that every
	// JSON reader holds exactly (RFC 8259, section 6).
	MaxToken Token = 1<<53 - 1

	maxTokenDigits = 16
)

// ErrMalformed is wrapped by every error of ParseToken.
var ErrMalformed = errors.New("malformed token")

// ParseToken reads the canonical decimal form of a token: ASCII digits, no
// sign, no leading zero, no blanks, from 1 to 2^53-1. Nothing is trimmed or
// guessed. Errors wrap ErrMalformed and quote at most the beginning of s.
func ParseToken(s string) (Token, error) {
	fail := func(why string) (Token, error) {
		return 0, fmt.Errorf("%w %s: %s", ErrMalformed, quote(s), why)
	}
	if s == "" {
		return fail("it is empty")
	}
	if len(s) > maxTokenDigits {
		return fail("it is longer than 16 digits")
	}
	for i := range len(s) {
		if s[i] < '0' || s[i] > '9' {
			return fail("it must be decimal digits only")
		}
	}
	if s[0] == '0' {
		return fail("it must not start with 0")
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || Token(n) > MaxToken {
		return fail("it must be at most 9007199254740991")
	}
	return Token(n), nil
}

// Valid tells whether t is in the range of tokens.
func (t Token) Valid() bool { return t >= MinToken && t <= MaxToken }

// String gives the canonical decimal form, and "none" for the zero value.
func (t Token) String() string {
	if t == 0 {
		return "none"
	}
	return strconv.FormatInt(int64(t), 10)
}

// Recorded is the recorded token that an object's annotations hold: the
// higher of its token and its floor. A malformed value counts as none, so
// that what no authority issued never locks an honest holder out.
func Recorded(annotations map[string]string) Token {
	token, _ := ParseToken(annotations[AnnotationToken])
	floor, _ := ParseToken(annotations[AnnotationFloor])
	return max(token, floor)
}

// quote bounds and escapes untrusted text for a message.
func quote(s string) string {
	const most = 24
	if len(s) > most {
		return strconv.QuoteToASCII(s[:most]) + "..."
	}
	return strconv.QuoteToASCII(s)
}
