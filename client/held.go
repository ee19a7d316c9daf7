package client

import (
	"context"

	"github.com/fencedlease/fencedlease/fence"
)

// Held is a lease that this process holds, until Done.
type Held struct{}

var _ Holder = (*Held)(nil)

// Lease is the lease as "namespace/name".
func (h *Held) Lease() string { return "" }

// Claim is the name of the claim that holds, in the lease's namespace.
func (h *Held) Claim() string { return "" }

// Token is the token of this acquisition, 0 once it is lost or released.
func (h *Held) Token() fence.Token { return 0 }

// Present gives the token, or why there is none any more.
func (h *Held) Present() (fence.Token, error) { return 0, nil }

// Done is closed when the lease is lost or released.
func (h *Held) Done() <-chan struct{} { return nil }

// Err is nil until Done is closed, then a *LostError or ErrReleased.
func (h *Held) Err() error { return nil }

// Context is a context that ends with the lease; its cause is then Err.
func (h *Held) Context(ctx context.Context) (context.Context, context.CancelFunc) { return ctx, nil }

// Reaffirm is issued a higher token for the same claim and returns it. It
// settles writes of unknown outcome: none of the old token commits any more
// where the new one is recorded.
func (h *Held) Reaffirm(ctx context.Context) (fence.Token, error) { return 0, nil }

// Release gives the lease up: it deletes this very claim, compared by UID, so
// it never touches a successor's. Renewals have ended when it returns. Where
// the API server does not answer until ctx ends, the error wraps
// fence.ErrOutcomeUnknown, and the claim lapses by itself.
func (h *Held) Release(ctx context.Context) error { return nil }
