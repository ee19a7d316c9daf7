package controllers

import (
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
)

// renewals remembers when this process saw the last renewal of each claim and
// adopted Lease, by its own monotonic clock. What it sees first counts as a
// renewal, so after a start everybody has one full duration.
type renewals struct {
	clock clock.PassiveClock
	mu    sync.Mutex
	seen  map[types.UID]renewal
}

type renewal struct {
	mark string
	at   time.Time
}

func newRenewals(c clock.PassiveClock) *renewals {
	return &renewals{clock: c, seen: map[types.UID]renewal{}}
}

// see takes note of what a renewal changes and gives the time since the last
// one.
func (r *renewals) see(uid types.UID, mark string) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.clock.Now()
	last, ok := r.seen[uid]
	if !ok || last.mark != mark {
		last = renewal{mark, now}
		r.seen[uid] = last
	}
	return now.Sub(last.at)
}

func (r *renewals) forget(uid types.UID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.seen, uid)
}
