package gateway

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"k8s.io/utils/clock"

	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/gateway/ledger"
)

// errSuperseded is the cause with which a call in flight is cancelled for a
// newer token's sake.
var errSuperseded = errors.New("a newer token waits for this call to end")

// endLimit bounds how long a cancelled call may take to end, and answerLimit how
// much of it its caller may take to be told.
const (
	endLimit    = 5 * time.Second
	answerLimit = time.Second
)

// inflight keeps the order of the calls of each key in this process.
type inflight struct {
	clock clock.Clock
	limit time.Duration

	mu   sync.Mutex
	keys map[ledger.ID][]*flight
}

func newInflight(c clock.Clock, limit time.Duration) *inflight {
	return &inflight{clock: c, limit: limit, keys: map[ledger.ID][]*flight{}}
}

// flight is one call, from before its last look at the record until its end.
type flight struct {
	token  fence.Token
	cancel context.CancelCauseFunc
	// ended is closed once the call has ended; nil where nobody waits for that.
	ended chan struct{}
}

// enter notes a call. From then on newer calls of the key wait for leave.
func (f *inflight) enter(id ledger.ID, token fence.Token, cancel context.CancelCauseFunc) (leave func()) {
	one := &flight{token: token, cancel: cancel}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.keys[id] = append(f.keys[id], one)
	return func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		if rest := slices.DeleteFunc(f.keys[id], func(other *flight) bool { return other == one }); len(rest) > 0 {
			f.keys[id] = rest
		} else {
			delete(f.keys, id)
		}
		if one.ended != nil {
			close(one.ended)
		}
	}
}

// older gives the calls of the key that a token has to wait for.
func (f *inflight) older(id ledger.ID, token fence.Token) []*flight {
	f.mu.Lock()
	defer f.mu.Unlock()
	var all []*flight
	for _, one := range f.keys[id] {
		if one.token < token {
			if one.ended == nil {
				one.ended = make(chan struct{})
			}
			all = append(all, one)
		}
	}
	return all
}

// drain waits until no older call of the key is in flight, and cancels those
// that take longer than the limit.
func (f *inflight) drain(ctx context.Context, id ledger.ID, token fence.Token) error {
	older := f.older(id, token)
	if len(older) == 0 {
		return nil
	}
	timer := f.clock.NewTimer(f.limit)
	defer timer.Stop()
	for cancelled := false; len(older) > 0; older = f.older(id, token) {
		select {
		case <-older[0].ended:
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-timer.C():
			if cancelled {
				return fmt.Errorf("an older call of [%s] did not end within %s of being cancelled", id.Lease, endLimit)
			}
			for _, one := range older {
				one.cancel(errSuperseded)
			}
			cancelled = true
			timer.Reset(endLimit)
		}
	}
	return nil
}
