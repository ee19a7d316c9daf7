package client

import (
	"context"
	"fmt"

	"github.com/fencedlease/fencedlease/fence"
)

// Holder is where a stamping client takes its token from: a Held, a Lock, or
// a token that some other process holds (Static).
type Holder interface {
	// Lease is the lease as "namespace/name".
	Lease() string
	// Present gives the token to present now. The error wraps fence.ErrLost
	// where there is none: nothing may be sent then.
	Present() (fence.Token, error)
}

// doubter is a holder that can look whether it still holds.
type doubter interface{ doubt(ctx context.Context) }

// Static is a holder of a token that another process keeps, as in a pipeline
// step. It cannot know of a loss; the fence does.
func Static(lease string, token fence.Token) Holder { return static{lease, token} }

type static struct {
	lease string
	token fence.Token
}

func (s static) Lease() string { return s.lease }

func (s static) Present() (fence.Token, error) {
	if !s.token.Valid() {
		return 0, fmt.Errorf("%w: no token of %s was given", fence.ErrLost, s.lease)
	}
	return s.token, nil
}
