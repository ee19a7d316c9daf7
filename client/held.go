package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/utils/clock"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
)

// Held is a lease that this process holds, until Done.
//
// One goroutine owns the renewals, another the watch on the claim; both end
// with the lease. What they learn only moves forward (progress), so a late
// answer never revives what is lost.
type Held struct {
	api   claims
	clock clock.Clock
	// lease is "namespace/name", name the lease's alone.
	lease, name string
	claim       string
	uid         types.UID
	// manual leaves the moments of renewal to renew's callers, once granted;
	// until then it renews only while somebody asks for the grant.
	manual bool

	doubts  singleflight.Group
	cancel  context.CancelFunc
	stopped chan struct{}
	asks    chan chan<- error
	done    chan struct{}

	mu       sync.Mutex
	duration time.Duration
	progress progress
	reaffirm int64
	// sent is when the last successful renewal was sent.
	sent time.Time
	// asked is when somebody last began to wait for the grant.
	asked time.Time
	// held tells that the grant was handed out; from then on end counts.
	held bool
	err  error
	// changed is closed and replaced whenever something above changes.
	changed chan struct{}
}

var _ Holder = (*Held)(nil)

// hold keeps a claim that was created by a request sent at the given time.
func hold(api claims, o options, lease *v1alpha1.FencedLease, claim *v1alpha1.LeaseClaim, sent time.Time) *Held {
	ctx, cancel := context.WithCancel(context.Background())
	h := &Held{
		api: api, clock: o.clock, lease: lease.Namespace + "/" + lease.Name, name: lease.Name,
		claim: claim.Name, uid: claim.UID, manual: o.manual,
		cancel: cancel, stopped: make(chan struct{}), asks: make(chan chan<- error), done: make(chan struct{}),
		duration: durationOf(lease), sent: sent, asked: sent, changed: make(chan struct{}),
	}
	h.observe(claim)
	go h.run(ctx, claim.ResourceVersion)
	return h
}

func durationOf(lease *v1alpha1.FencedLease) time.Duration {
	seconds := lease.Spec.LeaseDurationSeconds
	if seconds <= 0 {
		seconds = v1alpha1.DefaultLeaseDurationSeconds
	}
	return time.Duration(seconds) * time.Second
}

// Lease is the lease as "namespace/name".
func (h *Held) Lease() string { return h.lease }

// Claim is the name of the claim that holds, in the lease's namespace.
func (h *Held) Claim() string { return h.claim }

// Token is the token of this acquisition, 0 once it is lost or released.
func (h *Held) Token() fence.Token {
	token, _ := h.Present()
	return token
}

// Present gives the token, or why there is none any more. It looks at the
// clock itself: a process that was stopped past the end learns so from its
// first call, before any timer has run.
func (h *Held) Present() (fence.Token, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.err == nil && !h.held {
		return 0, fmt.Errorf("%w: [%s] not granted yet", fence.ErrLost, h.lease)
	}
	if h.err == nil && !h.clock.Now().Before(h.end()) {
		h.lose(LossExpired)
	}
	switch {
	case h.err == nil:
		return h.progress.token, nil
	case errors.Is(h.err, fence.ErrLost):
		return 0, h.err
	default:
		return 0, fmt.Errorf("%w: [%s] %w", fence.ErrLost, h.lease, h.err)
	}
}

// Done is closed when the lease is lost or released.
func (h *Held) Done() <-chan struct{} { return h.done }

// Err is nil until Done is closed, then a *LostError or ErrReleased.
func (h *Held) Err() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.err
}

// Context is a context that ends with the lease; its cause is then Err.
func (h *Held) Context(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	go func() {
		select {
		case <-h.done:
			cancel(h.Err())
		case <-ctx.Done():
		}
	}()
	return ctx, func() { cancel(context.Canceled) }
}

// Reaffirm is issued a higher token for the same claim and returns it. It
// settles writes of unknown outcome: none of the old token commits any more
// where the new one is recorded.
func (h *Held) Reaffirm(ctx context.Context) (fence.Token, error) {
	h.mu.Lock()
	before, counter := h.progress.token, h.reaffirm+1
	h.mu.Unlock()
	wait := 50 * time.Millisecond
	for {
		sent := h.clock.Now()
		claim, err := h.api.patch(ctx, h.claim, h.patchBody(sent, &counter))
		if err == nil {
			h.renewed(claim, sent, 0)
			break
		}
		if !transient(err) {
			return 0, fmt.Errorf("reaffirm [%s]: %w", h.lease, Outcome(err))
		}
		if stop := h.sleep(ctx, wait); stop != nil {
			return 0, fmt.Errorf("reaffirm [%s]: %w: %w", h.lease, stop, err)
		}
		wait = backoff(wait, time.Second)
	}
	for {
		h.mu.Lock()
		token, err, changed := h.progress.token, h.err, h.changed
		h.mu.Unlock()
		switch {
		case err != nil:
			return 0, err
		case token > before:
			return token, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return 0, fmt.Errorf("reaffirm [%s]: no newer token than %s yet: %w", h.lease, before, context.Cause(ctx))
		}
	}
}

// Release gives the lease up: it deletes this very claim, compared by UID, so
// it never touches a successor's. Renewals have ended when it returns. Where
// the API server does not answer until ctx ends, the error wraps
// fence.ErrOutcomeUnknown, and the claim lapses by itself.
func (h *Held) Release(ctx context.Context) error {
	h.mu.Lock()
	h.finish(ErrReleased)
	h.mu.Unlock()
	<-h.stopped
	defer h.api.reset()
	wait := 50 * time.Millisecond
	for {
		err := h.api.delete(ctx, h.claim, h.uid)
		switch {
		case err == nil, gone(err), apierrors.IsConflict(err):
			// Conflict: the name belongs to another claim now.
			return nil
		case !transient(err):
			return fmt.Errorf("release [%s]: %w", h.lease, err)
		}
		if h.pause(ctx, wait) != nil {
			return fmt.Errorf("release [%s]: %w: %w", h.lease, fence.ErrOutcomeUnknown, err)
		}
		wait = backoff(wait, time.Second)
	}
}

// renew renews now and waits for the answer.
func (h *Held) renew(ctx context.Context) error {
	answer := make(chan error, 1)
	select {
	case h.asks <- answer:
	case <-h.stopped:
		return h.Err()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	select {
	case err := <-answer:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// lifetime is the lease's duration.
func (h *Held) lifetime() time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.duration
}

// end is when this holder stops. h.mu is held.
func (h *Held) end() time.Time { return h.sent.Add(paceOf(h.duration).end) }

// lose ends the holding as lost. h.mu is held.
func (h *Held) lose(reason Loss) {
	h.finish(&LostError{Lease: h.lease, Token: h.progress.token, Reason: reason})
}

// finish ends the holding; the first reason stays. h.mu is held.
func (h *Held) finish(err error) {
	if h.err != nil {
		return
	}
	h.err = err
	close(h.done)
	h.cancel()
	h.notify()
}

// notify wakes everybody who waits for a change. h.mu is held.
func (h *Held) notify() {
	close(h.changed)
	h.changed = make(chan struct{})
}

// observe takes in what a claim's status says.
func (h *Held) observe(claim *v1alpha1.LeaseClaim) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if claim.UID != h.uid {
		h.learn(h.progress.vanish())
		return
	}
	if claim.Spec.Reaffirm != nil {
		h.reaffirm = max(h.reaffirm, *claim.Spec.Reaffirm)
	}
	h.learn(h.progress.advance(claim))
}

// learn takes in progress. h.mu is held.
func (h *Held) learn(p progress) {
	if h.err != nil || p == h.progress {
		return
	}
	h.progress = p
	if p.phase == finished {
		h.lose(p.loss)
		return
	}
	h.notify()
}

// renewed takes in a successful renewal that was sent at the given time. A
// duration of 0 leaves the known one.
func (h *Held) renewed(claim *v1alpha1.LeaseClaim, sent time.Time, duration time.Duration) {
	h.mu.Lock()
	if h.err == nil {
		if sent.After(h.sent) {
			h.sent = sent
		}
		if duration > 0 {
			h.duration = duration
		}
		h.notify()
	}
	h.mu.Unlock()
	h.observe(claim)
}

// deliver hands the grant out, if there is one that can still be trusted.
func (h *Held) deliver() (ok bool, p progress, changed <-chan struct{}) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.progress.phase == granted && h.err == nil && h.clock.Now().Before(h.end()) {
		h.held = true
		h.notify()
	}
	return h.held && h.err == nil, h.progress, h.changed
}

// sleep waits, or says why not: ctx or the holding ended.
func (h *Held) sleep(ctx context.Context, wait time.Duration) error {
	timer := h.clock.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C():
		return nil
	case <-h.done:
		return h.Err()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// pause is sleep for when the holding has ended already.
func (h *Held) pause(ctx context.Context, wait time.Duration) error {
	timer := h.clock.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C():
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// run renews and watches the claim until the holding ends.
func (h *Held) run(ctx context.Context, resourceVersion string) {
	var others sync.WaitGroup
	others.Go(func() { h.follow(ctx, resourceVersion) })
	defer close(h.stopped)
	defer h.api.reset()
	defer others.Wait()

	first := paceOf(h.lifetime()).interval
	// The first renewal comes at any time of the first interval: claimants
	// that started together are spread over it at once.
	next := h.clock.NewTimer(time.Duration(rand.Float64() * float64(first)))
	defer next.Stop()
	end := h.clock.NewTimer(first)
	defer end.Stop()

	answers := make(chan error, 1)
	var asking []chan<- error
	renewing := false
	defer func() {
		for _, ask := range asking {
			ask <- h.Err()
		}
	}()
	start := func() {
		if renewing {
			return
		}
		renewing = true
		others.Go(func() { answers <- h.renewOnce(ctx) })
	}
	for {
		h.mu.Lock()
		pace, left, held, changed := paceOf(h.duration), h.end().Sub(h.clock.Now()), h.held, h.changed
		if held && left <= 0 {
			h.lose(LossExpired)
		}
		h.mu.Unlock()
		var expired <-chan time.Time
		if held {
			end.Reset(max(left, 0))
			expired = end.C()
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-expired:
		case <-next.C():
			if h.renews() {
				start()
			}
		case ask := <-h.asks:
			asking = append(asking, ask)
			start()
		case err := <-answers:
			renewing = false
			for _, ask := range asking {
				ask <- err
			}
			asking = nil
			if err == nil {
				next.Reset(spread(pace.interval, rand.Float64()))
			} else {
				next.Reset(spread(pace.retry, rand.Float64()))
			}
		}
	}
}

// abandoned is how long a claim in the queue is renewed for an elector that
// does not ask any more.
const abandoned = time.Minute

// renews tells whether the next renewal is this Held's own business.
func (h *Held) renews() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return !h.manual || !h.held && h.clock.Since(h.asked) < abandoned
}

// outcome tells whether the grant was handed out, and what ended it.
func (h *Held) outcome() (held bool, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.held, h.err
}

// renewOnce sends one renewal. Whatever goes wrong, quota and conflict
// included, is neither a sign of holding nor of having lost: only the claim's
// own status, its absence, or the clock decides.
func (h *Held) renewOnce(ctx context.Context) error {
	h.mu.Lock()
	call, held := paceOf(h.duration).call, h.held
	h.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, call)
	defer cancel()
	sent := h.clock.Now()
	claim, err := h.api.patch(ctx, h.claim, h.patchBody(sent, nil))
	if err == nil {
		// A waiting claim lives by the duration it was made under; a holder
		// follows the lease's, so that it stops in time when that is shortened.
		var duration time.Duration
		if held {
			if lease, err := h.api.lease(ctx, h.name); err == nil {
				duration = durationOf(lease)
			}
		}
		h.renewed(claim, sent, duration)
		return nil
	}
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		h.api.reset()
		return err
	}
	var status apierrors.APIStatus
	if errors.As(err, &status) {
		h.look(ctx)
	}
	return err
}

// doubt looks at the claim now: a fence has refused the token, and the watch
// that tells of a loss may be late. The refusal alone ends nothing, since a
// record above every token issued refuses who rightly holds.
func (h *Held) doubt(ctx context.Context) {
	// One look for all that are refused meanwhile, by the holding's own limits:
	// a caller's would end in the loss of a connection that renewals use.
	looked := h.doubts.DoChan("", func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), paceOf(h.lifetime()).call)
		defer cancel()
		h.look(ctx)
		return nil, nil
	})
	select {
	case <-looked:
	case <-ctx.Done():
	}
}

// look reads the claim and takes in what it says.
func (h *Held) look(ctx context.Context) (resourceVersion string) {
	claim, err := h.api.get(ctx, h.claim)
	switch {
	case err == nil:
		h.observe(claim)
		return claim.ResourceVersion
	case gone(err):
		h.mu.Lock()
		defer h.mu.Unlock()
		h.learn(h.progress.vanish())
	}
	return ""
}

// patchBody changes renewTime, and reaffirm if given, of this very claim.
func (h *Held) patchBody(now time.Time, reaffirm *int64) []byte {
	spec := map[string]any{"renewTime": metav1.NewMicroTime(now)}
	if reaffirm != nil {
		spec["reaffirm"] = *reaffirm
	}
	body, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": h.uid}, "spec": spec})
	if err != nil {
		panic(err) // strings, a time and a number
	}
	return body
}

// follow watches the claim. After every gap it reads the claim first.
func (h *Held) follow(ctx context.Context, resourceVersion string) {
	const first, most = 50 * time.Millisecond, 2 * time.Second
	wait := first
	for ctx.Err() == nil {
		if resourceVersion == "" {
			resourceVersion = h.look(ctx)
		}
		if resourceVersion != "" {
			if w, err := h.api.watch(ctx, h.claim, resourceVersion); err == nil {
				if h.drain(ctx, w) {
					wait = first
				}
			}
			resourceVersion = ""
		}
		if h.sleep(ctx, spread(wait, rand.Float64())) != nil {
			return
		}
		wait = backoff(wait, most)
	}
}

// drain takes in events until the watch ends, and tells if there were any.
func (h *Held) drain(ctx context.Context, w watch.Interface) (some bool) {
	defer w.Stop()
	for {
		select {
		case <-ctx.Done():
			return some
		case event, ok := <-w.ResultChan():
			if !ok {
				return some
			}
			claim, isClaim := event.Object.(*v1alpha1.LeaseClaim)
			if !isClaim {
				return some // an error, as of a version too old: read again
			}
			some = true
			if event.Type == watch.Deleted && claim.UID == h.uid {
				h.mu.Lock()
				h.learn(h.progress.vanish())
				h.mu.Unlock()
				return some
			}
			h.observe(claim)
		}
	}
}

// gone tells that the object does not exist. A server that is starting may
// answer 404 for a path that it does not serve yet; that says nothing.
func gone(err error) bool {
	return apierrors.IsNotFound(err) && !apierrors.IsUnexpectedServerError(err)
}

// transient tells whether the same request may succeed later.
func transient(err error) bool {
	return !gone(err) && !apierrors.IsForbidden(err) && !apierrors.IsInvalid(err) &&
		!apierrors.IsUnauthorized(err) && !apierrors.IsBadRequest(err) && !apierrors.IsMethodNotSupported(err) &&
		!apierrors.IsRequestEntityTooLargeError(err)
}
