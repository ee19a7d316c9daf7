package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	crclient "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/fence"
)

// Lock is a client-go resource lock on a FencedLease: give it to an elector,
// or to a manager as LeaderElectionResourceLockInterface, with NewClient as
// the manager's NewClient. The elector's own durations only bound how long its
// callbacks go on; who holds is the lease's to say. A release deletes this
// lock's own claim, by UID, so it never touches a successor's.
//
// A lock leads once. When it is lost or released it stays so: an elector that
// got the lease back between two polls would go on with its old work, and this
// work with a new token. Who runs another elector makes another lock.
type Lock struct {
	connect          func() (claims, error)
	namespace, lease string
	options          options

	calls atomic.Int64
	mu    sync.Mutex
	held  *Held
}

var (
	_ resourcelock.Interface = (*Lock)(nil)
	_ Holder                 = (*Lock)(nil)
)

// NewLock makes a lock. What is wrong with cfg shows at the first use.
func NewLock(cfg *rest.Config, namespace, lease string, opts ...Option) *Lock {
	o := newOptions(opts)
	o.manual = true
	connect := func() (claims, error) { return newClaims(cfg, namespace) }
	return &Lock{connect: connect, namespace: namespace, lease: lease, options: o}
}

// NewClient makes a client that presents the lock's token on every write; it
// fits controller-runtime's manager.Options.NewClient.
func (l *Lock) NewClient(cfg *rest.Config, options crclient.Options) (crclient.Client, error) {
	cfg, err := Config(context.Background(), cfg, l)
	if err != nil {
		return nil, err
	}
	options.HTTPClient = nil // made of the configuration without the stamp
	return crclient.New(cfg, options)
}

// Lease is the lease as "namespace/name".
func (l *Lock) Lease() string { return l.namespace + "/" + l.lease }

// Present gives the token while the lock is held.
func (l *Lock) Present() (fence.Token, error) {
	held := l.claimed()
	if held == nil {
		return 0, fmt.Errorf("%w: [%s] not acquired", fence.ErrLost, l.Lease())
	}
	return held.Present()
}

func (l *Lock) doubt(ctx context.Context) {
	if held := l.claimed(); held != nil {
		held.doubt(ctx)
	}
}

// claimed is the claim that the lock has made last, nil before the first.
func (l *Lock) claimed() *Held {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.held
}

// getWait is how long Get stays in the queue before it tells the elector that
// somebody else leads.
const getWait = 10 * time.Second

// Get reads who leads. A candidate that does not waits in the queue meanwhile,
// so that the elector hears of its turn at once and not at its next poll.
func (l *Lock) Get(ctx context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	held, err := l.candidate(ctx)
	if err != nil {
		return nil, nil, err
	}
	wait, cancel := context.WithTimeoutCause(ctx, getWait, ErrNotAcquired)
	defer cancel()
	record := &resourcelock.LeaderElectionRecord{LeaseDurationSeconds: int(held.lifetime() / time.Second)}
	switch err := held.await(wait, l.options); {
	case err == nil:
		record.HolderIdentity = l.Identity()
	case held.Err() != nil:
		return nil, nil, err
	case ctx.Err() != nil:
		// The elector ends, and nobody would take the grant any more.
		return nil, nil, errors.Join(err, held.leave(ctx))
	default:
		// Never the own identity, and never the same record twice: the elector
		// must not take the holder for dead by its own clock.
		record.HolderIdentity = fmt.Sprintf("another claim of %s (%d)", l.Lease(), l.calls.Add(1))
	}
	raw, err := json.Marshal(record)
	return record, raw, err
}

// candidate gives the claim that this lock has in the queue, a new one where
// the last was finished before it was granted.
func (l *Lock) candidate(ctx context.Context) (*Held, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.held != nil {
		switch led, err := l.held.outcome(); {
		case err == nil:
			return l.held, nil
		case led:
			return nil, err
		}
	}
	api, err := l.connect()
	if err != nil {
		return nil, err
	}
	l.held, err = enter(ctx, api, l.namespace, l.lease, l.options)
	return l.held, err
}

// Create is not needed: a FencedLease is declared, not made by a candidate.
func (l *Lock) Create(context.Context, resourcelock.LeaderElectionRecord) error {
	return fmt.Errorf("lease [%s] has to be declared: candidates do not create it", l.Lease())
}

// Update renews, or releases where record names no holder.
func (l *Lock) Update(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	held := l.claimed()
	switch {
	case held == nil:
		return fmt.Errorf("%w: [%s] not acquired", fence.ErrLost, l.Lease())
	case record.HolderIdentity == "":
		return held.Release(ctx)
	}
	return held.renew(ctx)
}

// RecordEvent does nothing: the operator tells of hand-overs.
func (l *Lock) RecordEvent(string) {}

// Identity is this candidate's identity.
func (l *Lock) Identity() string { return l.options.identity }

// Describe names the lease.
func (l *Lock) Describe() string { return "fencedlease " + l.Lease() }
