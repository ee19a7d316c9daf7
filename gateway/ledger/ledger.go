// Package ledger is what the gateway remembers: the highest token that it has
// accepted for each key of a lease, and the outcomes of calls.
//
// What a ledger has answered it never forgets, whatever is killed: a token is
// durable before the call leaves. Keys cost no memory, and nothing that is
// compacted lowers what is recorded: a lease's own record covers all its keys.
package ledger

import (
	"context"

	"github.com/fencedlease/fencedlease/fence"
)

// MaxKeys is how many keys of one lease are recorded each for itself. Beyond
// it the highest token among them is recorded for the whole lease, and they
// are dropped: a token is issued once per acquisition of the lease, so whoever
// presents a lower one under any key has been superseded.
const MaxKeys = 1_000_000

// ID names what tokens are compared for.
type ID struct {
	// Lease is "namespace/name".
	Lease string
	// Key is the workflow key.
	Key string
}

// Ledger records tokens. It is safe for concurrent use.
type Ledger interface {
	// Recorded gives the recorded token of a key: the higher of its own and
	// its lease's. 0 means none.
	Recorded(ctx context.Context, id ID) (fence.Token, error)
	// Advance records a token unless it, or a higher one, is, and gives what is
	// recorded then; it is durable once Advance returns. With wholeLease
	// every key of the lease is meant: for a token that its authority knows as
	// the current one.
	Advance(ctx context.Context, id ID, token fence.Token, wholeLease bool) (fence.Token, error)
	// Enter is the last thing before a call leaves. It gives what is recorded:
	// where that is above the token the call must not leave, and nothing was
	// entered. Otherwise no replica has an older call of the key in flight any
	// more, and none lets one leave. Older calls are waited for, up to a limit
	// of the ledger's, and then ended. The call runs until leave; lost is called,
	// at most once and by another goroutine, where it has to end at once.
	Enter(ctx context.Context, id ID, token fence.Token, lost func()) (recorded fence.Token, leave func(), err error)
	// Ready tells whether the ledger can be reached.
	Ready(ctx context.Context) error
	Outcomes
	// Close releases the ledger.
	Close() error
}

// CallID names a call that is to happen once.
type CallID struct {
	ID

	// IdempotencyKey is the caller's name of the call.
	IdempotencyKey string
}

// Outcomes remembers what became of calls, for a bounded time.
type Outcomes interface {
	// Begin notes durably that a call is about to leave, and gives nil. Where
	// the call is noted already it changes nothing and gives what is known.
	Begin(ctx context.Context, id CallID, attempt Attempt) (*Outcome, error)
	// Finish records the answer of a call that was begun.
	Finish(ctx context.Context, id CallID, answer Answer) error
	// Forget drops a call of which nothing was sent.
	Forget(ctx context.Context, id CallID) error
}

// Attempt is what a call is begun with.
type Attempt struct {
	// Token is the token under which it leaves.
	Token fence.Token
	// Digest tells one request from another under the same idempotency key.
	Digest []byte
}

// Outcome is what is known of a call that has left.
type Outcome struct {
	Attempt

	// Answer is nil where none is known: the call may have taken effect.
	Answer *Answer
}

// Answer is what came back.
type Answer struct {
	Status int
	// Header holds values by canonical name, as bytes: HTTP does not promise UTF-8.
	Header map[string][][]byte
	Body   []byte
	// BodyOmitted tells that the body was not kept: it was too long, or broke off.
	BodyOmitted bool
}
