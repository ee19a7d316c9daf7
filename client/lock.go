package client

import (
	"context"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	crclient "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/fence"
)

// Lock is a client-go resource lock on a FencedLease: give it to an elector,
// or to a manager as LeaderElectionResourceLockInterface, with NewClient as
// the manager's NewClient.
type Lock struct{}

var (
	_ resourcelock.Interface = (*Lock)(nil)
	_ Holder                 = (*Lock)(nil)
)

// NewLock makes a lock. What is wrong with cfg shows at the first use.
func NewLock(cfg *rest.Config, namespace, lease string, opts ...Option) *Lock { return nil }

// NewClient makes a client stamped with the lock's token; it fits
// controller-runtime's manager.Options.NewClient.
func (l *Lock) NewClient(cfg *rest.Config, options crclient.Options) (crclient.Client, error) {
	return nil, nil
}

// Lease is the lease as "namespace/name".
func (l *Lock) Lease() string { return "" }

// Present gives the token while the lock is held.
func (l *Lock) Present() (fence.Token, error) { return 0, nil }

// Get reads who leads; it waits in the queue for a while.
func (l *Lock) Get(ctx context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	return nil, nil, nil
}

// Create is not needed: a FencedLease is declared, not made by a candidate.
func (l *Lock) Create(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	return nil
}

// Update renews, or releases where record names no holder.
func (l *Lock) Update(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	return nil
}

// RecordEvent does nothing: the operator tells of hand-overs.
func (l *Lock) RecordEvent(string) {}

// Identity is this candidate's identity.
func (l *Lock) Identity() string { return "" }

// Describe names the lease.
func (l *Lock) Describe() string { return "" }
