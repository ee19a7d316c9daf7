package client

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
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
	manual   bool
}

func newOptions(opts []Option) options {
	o := options{clock: clock.RealClock{}}
	for _, opt := range opts {
		opt(&o)
	}
	if o.identity == "" {
		// An error leaves it empty: the claim's name stands in.
		o.identity, _ = os.Hostname()
	}
	return o
}

// WithIdentity names the holder, for people. The default is the host's name.
// Two claims of the same identity are still two acquisitions.
func WithIdentity(identity string) Option { return func(o *options) { o.identity = identity } }

// WithTry does not wait for another holder: Acquire fails with ErrNotAcquired
// at once where the lease is held, and after one lease duration at the latest.
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
	api, err := newClaims(cfg, namespace)
	if err != nil {
		return nil, err
	}
	return acquire(ctx, api, namespace, lease, newOptions(opts))
}

// Run acquires the lease, calls fn with a context that ends with ctx or with
// the lease, and releases after fn has returned, never before. It waits for fn
// as long as fn takes: what fn writes after the lease is lost is rejected, but
// a lease that is given away under running work would make that the rule. The
// error is fn's, or else the release's.
func Run(ctx context.Context, cfg *rest.Config, namespace, lease string, fn func(context.Context, *Held) error, opts ...Option) error {
	held, err := Acquire(ctx, cfg, namespace, lease, opts...)
	if err != nil {
		return err
	}
	work, cancel := held.Context(ctx)
	err = fn(work, held)
	cancel()
	return errors.Join(err, held.leave(ctx))
}

func acquire(ctx context.Context, api claims, namespace, lease string, o options) (*Held, error) {
	if o.wait > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, o.wait, fmt.Errorf("%w: [%s/%s] waited %s", ErrNotAcquired, namespace, lease, o.wait))
		defer cancel()
	}
	for {
		h, err := enter(ctx, api, namespace, lease, o)
		if err != nil {
			api.reset()
			return nil, err
		}
		err = h.await(ctx, o)
		if err == nil {
			return h, nil
		}
		// The wait's context may be over, the claim has to go all the same.
		leaveErr := h.leave(ctx)
		var lost *LostError
		if errors.As(err, &lost) && lost.Reason == LossLapsed && ctx.Err() == nil {
			continue // it could not renew in the queue: back to its end
		}
		return nil, errors.Join(err, leaveErr)
	}
}

// leave releases, bounded by a lease duration, even where ctx is over.
func (h *Held) leave(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), h.lifetime())
	defer cancel()
	return h.Release(ctx)
}

// enter makes a claim. It goes on trying while the API server is away.
func enter(ctx context.Context, api claims, namespace, name string, o options) (*Held, error) {
	var lease *v1alpha1.FencedLease
	err := persist(ctx, o.clock, func() (err error) { lease, err = api.lease(ctx, name); return err })
	if err != nil {
		return nil, fmt.Errorf("read lease [%s/%s]: %w", namespace, name, err)
	}
	if o.try && lease.Status.Holder != nil && lease.Spec.Preemption != v1alpha1.PreemptionNewestClaim {
		return nil, heldByOther(lease)
	}
	claim := &v1alpha1.LeaseClaim{
		// The name is made here, so that a create whose answer was lost is
		// found again and leaves no claim that nobody renews.
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name + "-" + rand.String(10)},
		Spec: v1alpha1.LeaseClaimSpec{
			LeaseName: name, HolderIdentity: o.identity, Priority: &o.priority, TTLSecondsAfterFinished: o.ttl,
			RenewTime: new(metav1.NewMicroTime(o.clock.Now())),
		},
	}
	if o.pod != "" {
		claim.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: o.pod, UID: o.podUID}}
	}
	if lease.Spec.HolderBinding == v1alpha1.HolderBindingUser {
		err := persist(ctx, o.clock, func() error {
			self, err := api.self(ctx)
			if err != nil {
				return err
			}
			claim.Spec.User = &v1alpha1.ClaimUser{Username: self.Username}
			if pod := self.Extra["authentication.kubernetes.io/pod-uid"]; len(pod) == 1 {
				claim.Spec.User.PodUID = pod[0]
			}
			return nil
		})
		if err != nil {
			return nil, fmt.Errorf("claim [%s/%s]: find out the own account: %w", namespace, name, err)
		}
	}
	sent := o.clock.Now()
	var made *v1alpha1.LeaseClaim
	err = persist(ctx, o.clock, func() (err error) {
		if made, err = api.create(ctx, claim); apierrors.IsAlreadyExists(err) {
			made, err = api.get(ctx, claim.Name)
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("claim [%s/%s]: %w", namespace, name, err)
	}
	return hold(api, o, lease, made, sent), nil //nolint:contextcheck // it holds beyond ctx, until it is released
}

// await waits until the claim is granted.
func (h *Held) await(ctx context.Context, o options) error {
	h.mu.Lock()
	h.asked = h.clock.Now()
	h.mu.Unlock()
	if o.try {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, h.lifetime(), fmt.Errorf("%w: [%s] no answer within its duration", ErrNotAcquired, h.lease))
		defer cancel()
	}
	for {
		ok, p, changed := h.deliver()
		if ok {
			return nil
		}
		if err := h.Err(); err != nil {
			if p.refused {
				return fmt.Errorf("claim [%s]: refused: %s", h.lease, p.message)
			}
			return fmt.Errorf("claim [%s]: %w: %s", h.lease, err, p.message)
		}
		if o.try && p.queued {
			lease, err := h.api.lease(ctx, h.name)
			if err == nil && lease.Status.Holder != nil && lease.Status.Holder.ClaimUID != string(h.uid) {
				return heldByOther(lease)
			}
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func heldByOther(lease *v1alpha1.FencedLease) error {
	return fmt.Errorf("%w: [%s/%s] is held by %q with token %d",
		ErrNotAcquired, lease.Namespace, lease.Name, lease.Status.Holder.Identity, lease.Status.Token)
}

// persist repeats do until it succeeds, fails for good, or ctx ends.
func persist(ctx context.Context, c clock.Clock, do func() error) error {
	wait := 50 * time.Millisecond
	for {
		err := do()
		if err == nil || !transient(err) {
			return err
		}
		timer := c.NewTimer(wait)
		select {
		case <-timer.C():
		case <-ctx.Done():
			timer.Stop()
			return fmt.Errorf("%w (last answer: %w)", context.Cause(ctx), err)
		}
		wait = backoff(wait, 2*time.Second)
	}
}
