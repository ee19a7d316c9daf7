package main

import (
	"context"
	"errors"
	"net/http"
	"sync/atomic"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coordinationclient "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"

	"github.com/fencedlease/fencedlease/client"
)

// The durations are client-go's own defaults, and those of a FencedLease.
const (
	leaseDuration = 15 * time.Second
	renewDeadline = 10 * time.Second
	retryPeriod   = 2 * time.Second
)

// candidate is one process's wish to hold a lease.
type candidate struct {
	*wire
	// leads gives when it knew that it holds.
	leads chan time.Time
	// lost is closed when it holds no more.
	lost <-chan struct{}
	// release gives the lease up.
	release func() error
}

// way is a way to be the only one.
type way struct {
	name  string
	enter func(ctx context.Context, cfg *rest.Config, namespace, lease string) (*candidate, error)
	// polls is how long a candidate in the queue may take until it has looked
	// at the lease: releases come at any time of it.
	polls time.Duration
}

var (
	onLease = way{name: "client-go elector on a Lease", polls: 2 * retryPeriod,
		enter: func(ctx context.Context, cfg *rest.Config, namespace, lease string) (*candidate, error) {
			w, cfg := newWire(cfg)
			leases, err := coordinationclient.NewForConfig(cfg)
			if err != nil {
				return nil, err
			}
			return elect(ctx, w, &resourcelock.LeaseLock{
				Client: leases, LeaseMeta: metav1.ObjectMeta{Namespace: namespace, Name: lease},
				LockConfig: resourcelock.ResourceLockConfig{Identity: identity()},
			})
		}}
	onLock = way{name: "client-go elector on a FencedLease", polls: 2 * retryPeriod,
		enter: func(ctx context.Context, cfg *rest.Config, namespace, lease string) (*candidate, error) {
			w, cfg := newWire(cfg)
			return elect(ctx, w, client.NewLock(cfg, namespace, lease, client.WithIdentity(identity())))
		}}
	acquired = way{name: "client.Acquire", polls: 100 * time.Millisecond,
		enter: func(ctx context.Context, cfg *rest.Config, namespace, lease string) (*candidate, error) {
			w, cfg := newWire(cfg)
			c := &candidate{wire: w, leads: make(chan time.Time, 1)}
			ctx, cancel := context.WithCancel(ctx)
			lost := make(chan struct{})
			over := make(chan error, 1)
			c.lost = lost
			c.release = func() error { cancel(); return <-over }
			go func() {
				held, err := client.Acquire(ctx, cfg, namespace, lease, client.WithIdentity(identity()))
				if err != nil {
					over <- err
					return
				}
				c.leads <- time.Now()
				go func() { <-held.Done(); close(lost) }()
				<-ctx.Done()
				over <- held.Release(context.WithoutCancel(ctx))
			}()
			return c, nil
		}}
)

var count atomic.Int64

func identity() string { return "candidate-" + time.Duration(count.Add(1)).String() }

// elect runs client-go's elector, which releases at its end.
func elect(ctx context.Context, w *wire, lock resourcelock.Interface) (*candidate, error) {
	c := &candidate{wire: w, leads: make(chan time.Time, 1)}
	ctx, cancel := context.WithCancel(ctx)
	over := make(chan struct{})
	c.lost = over
	c.release = func() error { cancel(); <-over; return nil }
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: lock, LeaseDuration: leaseDuration, RenewDeadline: renewDeadline, RetryPeriod: retryPeriod, ReleaseOnCancel: true,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(context.Context) { c.leads <- time.Now() }, OnStoppedLeading: func() {},
		},
	})
	if err != nil {
		cancel()
		return nil, err
	}
	go func() { defer close(over); elector.Run(ctx) }()
	return c, nil
}

// wire counts a candidate's requests, and can be cut right after a renewal.
type wire struct {
	next     http.RoundTripper
	requests atomic.Int64
	armed    atomic.Bool
	cut      atomic.Bool
	crashed  chan time.Time
}

func newWire(cfg *rest.Config) (*wire, *rest.Config) {
	w := &wire{crashed: make(chan time.Time, 1)}
	cfg = rest.CopyConfig(cfg)
	cfg.Wrap(func(next http.RoundTripper) http.RoundTripper { w.next = next; return w })
	return w, cfg
}

func (w *wire) RoundTrip(r *http.Request) (*http.Response, error) {
	if w.cut.Load() {
		return nil, errors.New("cut off")
	}
	w.requests.Add(1)
	response, err := w.next.RoundTrip(r)
	renewed := err == nil && response.StatusCode == http.StatusOK && (r.Method == http.MethodPut || r.Method == http.MethodPatch)
	if renewed && w.armed.CompareAndSwap(true, false) {
		w.cut.Store(true)
		w.crashed <- time.Now()
	}
	return response, err
}

// crash cuts the candidate off right after its next renewal, the worst moment,
// and gives when that was.
func (w *wire) crash() time.Time {
	w.armed.Store(true)
	return <-w.crashed
}
