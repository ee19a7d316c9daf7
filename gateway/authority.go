package gateway

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
)

// Authority knows the leases.
type Authority interface {
	// Lease says what is known of a lease, and whether it was read for this
	// very question, which live demands.
	Lease(ctx context.Context, key types.NamespacedName, live bool) (lease fence.Lease, wasLive bool, err error)
}

// cluster is the Kubernetes API as the authority. A watch tells of hand-overs
// as they come. It may break without a word, so what no read has confirmed for
// maxAge is read anew: with the API server out of reach calls are undecided.
type cluster struct {
	api    client.Reader
	clock  clock.PassiveClock
	maxAge time.Duration

	reads singleflight.Group
	mu    sync.RWMutex
	known map[types.NamespacedName]fact
}

var _ Authority = (*cluster)(nil)

// fact is a lease, and when a read last began that confirmed it.
type fact struct {
	lease   fence.Lease
	version string
	at      time.Time
}

func newCluster(api client.Reader, c clock.PassiveClock, maxAge time.Duration) *cluster {
	return &cluster{api: api, clock: c, maxAge: maxAge, known: map[types.NamespacedName]fact{}}
}

// follow feeds the watch of an informer in.
func (c *cluster) follow(ctx context.Context, informers cache.Informers) error {
	// Until it is synced leases are read one by one, and readiness says so.
	informer, err := informers.GetInformer(ctx, &v1alpha1.FencedLease{}, cache.BlockUntilSynced(false))
	if err != nil {
		return fmt.Errorf("watch leases: %w", err)
	}
	learn := func(o any) {
		if lease, ok := o.(*v1alpha1.FencedLease); ok {
			// It may have been long on its way: that confirms nothing.
			c.learn(lease, time.Time{})
		}
	}
	_, err = informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
		AddFunc:    learn,
		UpdateFunc: func(_, o any) { learn(o) },
		DeleteFunc: func(o any) {
			if tombstone, ok := o.(toolscache.DeletedFinalStateUnknown); ok {
				o = tombstone.Obj
			}
			if lease, ok := o.(*v1alpha1.FencedLease); ok {
				c.forget(client.ObjectKeyFromObject(lease))
			}
		},
	})
	return err
}

// learn keeps the newest of what the watch and live reads say, in whatever
// order they arrive.
func (c *cluster) learn(lease *v1alpha1.FencedLease, at time.Time) fence.Lease {
	facts := factsOf(lease)
	key := client.ObjectKeyFromObject(lease)
	c.mu.Lock()
	defer c.mu.Unlock()
	if was, ok := c.known[key]; ok {
		order, err := resourceversion.CompareResourceVersion(lease.ResourceVersion, was.version)
		if err == nil && order < 0 {
			return was.lease
		}
		if was.at.After(at) {
			at = was.at
		}
	}
	c.known[key] = fact{lease: facts, version: lease.ResourceVersion, at: at}
	return facts
}

func (c *cluster) forget(key types.NamespacedName) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.known, key)
}

// Lease says what is known of a lease.
func (c *cluster) Lease(ctx context.Context, key types.NamespacedName, live bool) (fence.Lease, bool, error) {
	if !live {
		c.mu.RLock()
		known, ok := c.known[key]
		c.mu.RUnlock()
		if ok && c.clock.Since(known.at) < c.maxAge {
			return known.lease, false, nil
		}
	}
	// A read that began before this question does not answer it, so a live
	// one is never shared; those that only refresh are.
	if live {
		lease, err := c.read(ctx, key)
		return lease, true, err
	}
	shared, err, _ := c.reads.Do(key.String(), func() (any, error) {
		return c.read(context.WithoutCancel(ctx), key)
	})
	if err != nil {
		return fence.Lease{}, false, err
	}
	lease, ok := shared.(fence.Lease)
	if !ok {
		return fence.Lease{}, false, errors.New("read lease: no lease came back")
	}
	return lease, false, nil
}

// readLimit bounds one read from the API server.
const readLimit = 5 * time.Second

func (c *cluster) read(ctx context.Context, key types.NamespacedName) (fence.Lease, error) {
	ctx, cancel := context.WithTimeout(ctx, readLimit)
	defer cancel()
	began := c.clock.Now()
	lease := &v1alpha1.FencedLease{}
	if err := c.api.Get(ctx, key, lease); apierrors.IsNotFound(err) {
		c.forget(key)
		return fence.Lease{Name: key.String()}, nil
	} else if err != nil {
		return fence.Lease{}, fmt.Errorf("read lease [%s]: %w", key, err)
	}
	return c.learn(lease, began), nil
}

// factsOf gives a lease as the rule sees it.
func factsOf(l *v1alpha1.FencedLease) fence.Lease {
	facts := fence.Lease{
		Name: client.ObjectKeyFromObject(l).String(), Found: true,
		Current: fence.Token(l.Status.Token), Min: fence.Token(l.Spec.MinToken),
		BindUser:   l.Spec.HolderBinding == v1alpha1.HolderBindingUser,
		DenyLapsed: l.Spec.LapsedWrites == v1alpha1.LapsedWritesDeny,
	}
	if h := l.Status.Holder; h != nil {
		facts.Held, facts.Holder = true, h.Identity
		if h.User != nil {
			facts.HolderUser, facts.HolderPodUID = h.User.Username, h.User.PodUID
		}
	}
	return facts
}
