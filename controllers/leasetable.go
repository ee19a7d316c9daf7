package controllers

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
)

// SetupLeaseTable adds the keeper of the lease table alone.
func SetupLeaseTable(mgr ctrl.Manager, operatorNamespace string) error {
	return newLeaseTable(mgr, operatorNamespace).setup(mgr)
}

// setup adds the keeper of the lease table, which the admission policies read.
// The table follows the leases: a policy may take a token for current that was
// superseded a moment ago, never one below an object's record.
func (t *leaseTable) setup(mgr ctrl.Manager) error {
	always := func(context.Context, client.Object) []reconcile.Request {
		return []reconcile.Request{{NamespacedName: t.key}}
	}
	return ctrl.NewControllerManagedBy(mgr).
		Named("lease-table").
		Watches(&v1alpha1.FencedLease{}, handler.EnqueueRequestsFromMapFunc(always)).
		WatchesRawSource(source.Func(func(_ context.Context, q queue) error {
			q.Add(reconcile.Request{NamespacedName: t.key}) // an empty table too has to be there
			return nil
		})).
		Complete(t)
}

// leaseTable writes the one ConfigMap.
type leaseTable struct {
	client client.Client
	live   client.Reader
	key    types.NamespacedName

	mu sync.Mutex
	// ahead are leases that are being published, or were and the cache does not
	// show it yet.
	ahead map[types.UID]*v1alpha1.FencedLease
}

func newLeaseTable(mgr ctrl.Manager, operatorNamespace string) *leaseTable {
	return &leaseTable{
		client: mgr.GetClient(), live: mgr.GetAPIReader(), ahead: map[types.UID]*v1alpha1.FencedLease{},
		key: types.NamespacedName{Namespace: operatorNamespace, Name: fence.TableName},
	}
}

// expect brings the table to a lease that is about to be published: once the
// new token shows, the policies know that the former one is superseded.
func (t *leaseTable) expect(ctx context.Context, lease *v1alpha1.FencedLease) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.ahead[lease.UID] = lease.DeepCopy()
	err := t.write(ctx)
	if err != nil {
		delete(t.ahead, lease.UID)
	}
	return err
}

// retract takes back what was not published after all. Who was faster has
// changed the lease, so the table is written again.
func (t *leaseTable) retract(uid types.UID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.ahead, uid)
}

// Reconcile implements reconcile.Reconciler.
func (t *leaseTable) Reconcile(ctx context.Context, _ ctrl.Request) (ctrl.Result, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	err := t.write(ctx)
	if apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) {
		return ctrl.Result{RequeueAfter: 1}, nil // another replica was faster
	}
	return ctrl.Result{}, err
}

// write writes the table where it says something else than the leases. t.mu is
// held.
func (t *leaseTable) write(ctx context.Context) error {
	all := &v1alpha1.FencedLeaseList{}
	if err := t.client.List(ctx, all); err != nil {
		return err
	}
	cached := map[types.UID]bool{}
	for i := range all.Items {
		item := &all.Items[i]
		cached[item.UID] = true
		if newer := t.ahead[item.UID]; newer != nil && newer.Status.Token > item.Status.Token {
			all.Items[i] = *newer
		} else {
			delete(t.ahead, item.UID)
		}
	}
	maps.DeleteFunc(t.ahead, func(uid types.UID, _ *v1alpha1.FencedLease) bool { return !cached[uid] })
	leases, seen := tableOf(all.Items)
	data, _ := fence.PackTable(leases, seen)

	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: t.key.Namespace, Name: t.key.Name}}
	err := t.live.Get(ctx, t.key, cm)
	switch {
	case apierrors.IsNotFound(err):
		cm.Data = data
		err = t.client.Create(ctx, cm)
	case err == nil && !sameTable(cm.Data, data):
		cm.Data = data
		err = t.client.Update(ctx, cm)
	}
	if err != nil {
		return fmt.Errorf("write the lease table %s: %w", t.key, err)
	}
	return nil
}

// sameTable tells whether two tables say the same of every lease. That one is
// complete up to a later revision is not worth a write: an older one only
// leaves more to the webhook.
func sameTable(a, b map[string]string) bool {
	a, b = maps.Clone(a), maps.Clone(b)
	delete(a, fence.TableSeen)
	delete(b, fence.TableSeen)
	return maps.Equal(a, b)
}

// tableOf gives the table's leases, the oldest first, and the revision up to
// which it is complete: a lease that it lacks was created later, or is gone.
func tableOf(items []v1alpha1.FencedLease) (leases []fence.TableLease, seen int64) {
	slices.SortFunc(items, func(a, b v1alpha1.FencedLease) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.UID, b.UID))
	})
	for i := range items {
		lease := &items[i]
		if revision, err := strconv.ParseInt(lease.ResourceVersion, 10, 64); err == nil {
			seen = max(seen, revision)
		}
		l := fence.TableLease{
			Namespace: lease.Namespace, Name: lease.Name,
			Lease: fence.Lease{
				Current: fence.Token(lease.Status.Token), Min: fence.Token(lease.Spec.MinToken),
				BindUser:   lease.Spec.HolderBinding == v1alpha1.HolderBindingUser,
				DenyLapsed: lease.Spec.LapsedWrites == v1alpha1.LapsedWritesDeny,
				HeaderOnly: lease.Spec.Presentation == v1alpha1.PresentationHeader,
			},
			AllowedNamespaces: lease.Spec.AllowedNamespaces,
		}
		if u := lease.Spec.UnstampedWrites; u != nil {
			// An exception may deny, so only a plain default is known to pass.
			l.UnstampedAllowed = len(u.Except) == 0 && (u.Default == v1alpha1.UnstampedAllow || u.Default == v1alpha1.UnstampedWarn)
		}
		if h := lease.Status.Holder; h != nil {
			l.Lease.Held, l.Lease.Holder = true, h.Identity
			if h.User != nil {
				l.Lease.HolderUser, l.Lease.HolderPodUID = h.User.Username, h.User.PodUID
			}
		}
		leases = append(leases, l)
	}
	return leases, seen
}
