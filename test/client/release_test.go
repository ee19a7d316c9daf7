package client

import (
	"context"
	"net/http"
	"sync"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coordinationclient "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	crclient "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/client"
)

// network is a connection that can be cut: what is sent meanwhile waits.
type network struct {
	mu   sync.Mutex
	cut  chan struct{}
	next http.RoundTripper
}

func newNetwork(cfg *rest.Config) (*network, *rest.Config) {
	n := &network{}
	cfg = rest.CopyConfig(cfg)
	cfg.Wrap(func(next http.RoundTripper) http.RoundTripper { n.next = next; return n })
	return n, cfg
}

func (n *network) RoundTrip(req *http.Request) (*http.Response, error) {
	n.mu.Lock()
	cut := n.cut
	n.mu.Unlock()
	if cut != nil {
		select {
		case <-cut:
		case <-req.Context().Done():
			return nil, req.Context().Err()
		}
	}
	return n.next.RoundTrip(req)
}

func (n *network) partition() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.cut = make(chan struct{})
}

func (n *network) heal() {
	n.mu.Lock()
	defer n.mu.Unlock()
	close(n.cut)
	n.cut = nil
}

// TestReleaseByAHealedLeader cuts a leader off that releases on its way out.
// Its release is under way when the other leads and the network heals. On a
// Lease, client-go's elector clears what its successor holds; on a FencedLease
// nothing happens to it.
func TestReleaseByAHealedLeader(t *testing.T) {
	for name, test := range map[string]struct {
		lock func(t *testing.T, cfg *rest.Config, namespace, identity string) resourcelock.Interface
		list crclient.ObjectList
		// holder reads who holds the lease.
		holder func(lease any) string
		// cleared tells that the release takes the lease from the other.
		cleared bool
	}{
		"a Lease": {
			lock: func(t *testing.T, cfg *rest.Config, namespace, identity string) resourcelock.Interface {
				t.Helper()
				leases, err := coordinationclient.NewForConfig(cfg)
				if err != nil {
					t.Fatal(err)
				}
				return &resourcelock.LeaseLock{Client: leases, LeaseMeta: metav1.ObjectMeta{Namespace: namespace, Name: "main"}, LockConfig: resourcelock.ResourceLockConfig{Identity: identity}}
			},
			list: &coordinationv1.LeaseList{},
			holder: func(lease any) string {
				if l := lease.(*coordinationv1.Lease); l.Spec.HolderIdentity != nil {
					return *l.Spec.HolderIdentity
				}
				return ""
			},
			cleared: true,
		},
		"a FencedLease": {
			lock: func(_ *testing.T, cfg *rest.Config, namespace, identity string) resourcelock.Interface {
				return client.NewLock(cfg, namespace, "main", client.WithIdentity(identity))
			},
			list: &v1alpha1.FencedLeaseList{},
			holder: func(lease any) string {
				if l := lease.(*v1alpha1.FencedLease); l.Status.Holder != nil {
					return l.Status.Holder.Identity
				}
				return ""
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := everything(t)
			namespace := e.Namespace(t)
			makeLease(t, e, namespace, 3)
			net, cfg := newNetwork(e.Config)
			run := func(cfg *rest.Config, identity string) (leads, over <-chan struct{}) {
				led, stopped := make(chan struct{}), make(chan struct{})
				lock := test.lock(t, cfg, namespace, identity)
				elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
					Lock: lock, LeaseDuration: 4 * time.Second, RenewDeadline: 3500 * time.Millisecond, RetryPeriod: 250 * time.Millisecond, ReleaseOnCancel: true,
					Callbacks: leaderelection.LeaderCallbacks{OnStartedLeading: func(context.Context) { close(led) }, OnStoppedLeading: func() {}},
				})
				if err != nil {
					t.Fatal(err)
				}
				go func() { defer close(stopped); elector.Run(t.Context()) }()
				return led, stopped
			}
			leads, over := run(cfg, "first")
			<-leads
			successor, _ := run(e.Config, "successor")
			net.partition()
			<-successor
			watch, err := e.Admin.Watch(t.Context(), test.list, crclient.InNamespace(namespace))
			if err != nil {
				t.Fatal(err)
			}
			defer watch.Stop()
			net.heal()
			<-over
			cleared := false
			for seen := time.After(time.Second); seen != nil; {
				select {
				case event := <-watch.ResultChan():
					cleared = cleared || test.holder(event.Object) == ""
				case <-seen:
					seen = nil
				}
			}
			if cleared != test.cleared {
				t.Errorf("cleared: %t, want %t", cleared, test.cleared)
			}
		})
	}
}
