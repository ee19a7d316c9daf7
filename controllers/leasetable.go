package controllers

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
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
		WatchesRawSource(source.Channel(t.again, handler.EnqueueRequestsFromMapFunc(always))).
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
	// ranAhead is the highest token above the store's revision that this process
	// issued.
	ranAhead fence.Token
	// asked counts the calls of expect.
	asked int64
	// again asks for a look at the table that no lease's change asks for.
	again chan event.GenericEvent

	// writing is held while the table is written. What is asked for meanwhile
	// goes into one more write, however much it is.
	writing sync.Mutex
	// first is where the tokens begin of leases that have none yet, as they were
	// first seen: before anything was reserved for them.
	first map[types.UID]fence.Token
	// written is how many calls of expect the table has taken in.
	written int64
	// last is the table as this process last wrote or read it, if nothing says
	// that it changed since.
	last *corev1.ConfigMap
}

func newLeaseTable(mgr ctrl.Manager, operatorNamespace string) *leaseTable {
	return &leaseTable{
		client: mgr.GetClient(), live: mgr.GetAPIReader(),
		key:   types.NamespacedName{Namespace: operatorNamespace, Name: fence.TableName},
		ahead: map[types.UID]*v1alpha1.FencedLease{}, again: make(chan event.GenericEvent, 1),
	}
}

// expect brings the table to a lease that is about to be published: once the
// new token shows, the policies know that the former one is superseded.
func (t *leaseTable) expect(ctx context.Context, lease *v1alpha1.FencedLease) error {
	t.mu.Lock()
	t.ahead[lease.UID] = lease.DeepCopy()
	t.asked++
	mine := t.asked
	t.mu.Unlock()

	t.writing.Lock()
	var err error
	if t.written < mine { // or another call took it along
		err = t.write(ctx)
	}
	t.writing.Unlock()
	if err != nil {
		t.retract(lease) // the write may have arrived all the same
	}
	return err
}

// runsAhead takes note of a token above the store's revision. The next write
// of the table tells of it.
func (t *leaseTable) runsAhead(token fence.Token) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.ranAhead = max(t.ranAhead, token)
}

// retract takes back what was not published after all, and has the table
// written again: no change of a lease may follow.
func (t *leaseTable) retract(lease *v1alpha1.FencedLease) {
	t.mu.Lock()
	delete(t.ahead, lease.UID)
	t.mu.Unlock()
	select {
	case t.again <- event.GenericEvent{Object: lease}:
	default: // asked for already
	}
}

// tableCheck is how often the table is compared with the leases while none of
// them changes: somebody may have bypassed the policy that keeps it.
const tableCheck = time.Minute

// Reconcile implements reconcile.Reconciler.
func (t *leaseTable) Reconcile(ctx context.Context, _ ctrl.Request) (ctrl.Result, error) {
	t.writing.Lock()
	defer t.writing.Unlock()
	t.last = nil // look at what it says
	switch err := t.write(ctx); {
	case apierrors.IsConflict(err), apierrors.IsAlreadyExists(err):
		return ctrl.Result{RequeueAfter: 1}, nil // another replica was faster
	case err != nil:
		return ctrl.Result{}, err
	}
	return ctrl.Result{RequeueAfter: tableCheck}, nil
}

// write writes the table where it says something else than the leases.
// t.writing is held.
func (t *leaseTable) write(ctx context.Context) error {
	t.mu.Lock()
	asked := t.asked
	t.mu.Unlock()
	// What this process knows saves a read: an update of it is a conflict where
	// somebody else has written since.
	if last := t.last; last != nil {
		t.last = nil
		if data, err := t.data(ctx, last.Data); err == nil && !sameTable(last.Data, data) && t.put(ctx, last, data) == nil {
			t.written = asked
			return nil
		}
	}
	// The table is read before the leases: what another replica writes later
	// makes the update below a conflict.
	table := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: t.key.Namespace, Name: t.key.Name}}
	if err := t.live.Get(ctx, t.key, table); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("read the lease table %s: %w", t.key, err)
	}
	data, err := t.data(ctx, table.Data)
	if err != nil {
		return fmt.Errorf("list the leases for the table: %w", err)
	}
	if table.ResourceVersion != "" && sameTable(table.Data, data) {
		t.last = table
	} else if err := t.put(ctx, table, data); err != nil {
		return fmt.Errorf("write the lease table %s: %w", t.key, err)
	}
	t.written = asked
	return nil
}

// put writes the table on top of one that was read, or makes it.
func (t *leaseTable) put(ctx context.Context, table *corev1.ConfigMap, data map[string]string) error {
	table.Data = data
	write := func() error { return t.client.Update(ctx, table) }
	if table.ResourceVersion == "" {
		write = func() error { return t.client.Create(ctx, table) }
	}
	err := write()
	if err == nil {
		t.last = table
	}
	return err
}

// data is what the table has to say in place of what it says.
func (t *leaseTable) data(ctx context.Context, table map[string]string) (map[string]string, error) {
	leases, seen, err := t.leases(ctx, t.client)
	if err == nil && (seen < revisionOr0(table[fence.TableSeen]) || turnsBack(table, leases)) {
		// Who wrote the table had seen more. A replica that was paused must not
		// turn it back.
		leases, seen, err = t.leases(ctx, t.live)
	}
	if err != nil {
		return nil, err
	}
	t.mu.Lock()
	ahead := max(t.ranAhead, fence.Token(revisionOr0(table[fence.TableAhead])))
	t.mu.Unlock()
	for i := range leases {
		if l := &leases[i].Lease; l.Current == 0 && ahead > 0 {
			l.Min = max(l.Min, ahead+1) // as its first token will be
		}
	}
	data, leftOut := fence.PackTable(leases, seen, ahead)
	size := 0
	for key, value := range data {
		size += len(key) + len(value)
	}
	tableBytes.Set(float64(size))
	tableLeftOut.Set(float64(leftOut))
	if leftOut > 0 && !sameTable(table, data) {
		ctrl.LoggerFrom(ctx).Info("Left out the newest leases, the lease table is full: writes to what they guard are rejected by the policies", "leftOut", leftOut)
	}
	return data, nil
}

// leases gives what the table has to say, and up to which revision it is
// complete: a lease that it lacks was created later, or is gone. t.writing is
// held.
func (t *leaseTable) leases(ctx context.Context, from client.Reader) (leases []fence.TableLease, seen int64, err error) {
	t.mu.Lock()
	ahead := maps.Clone(t.ahead)
	t.mu.Unlock()
	all := &v1alpha1.FencedLeaseList{}
	if err := from.List(ctx, all, client.UnsafeDisableDeepCopy); err != nil { // nothing below changes a lease
		return nil, 0, err
	}
	seen = revisionOr0(all.ResourceVersion) // a cache gives none
	for i := range all.Items {
		item := &all.Items[i]
		seen = max(seen, revisionOr0(item.ResourceVersion))
		if newer := ahead[item.UID]; newer != nil && newer.Status.Token > item.Status.Token {
			all.Items[i] = *newer
			delete(ahead, item.UID)
		}
	}
	// The rest of them shows, or is gone.
	t.mu.Lock()
	maps.DeleteFunc(t.ahead, func(uid types.UID, l *v1alpha1.FencedLease) bool { return ahead[uid] == l })
	t.mu.Unlock()
	first := map[types.UID]fence.Token{}
	for i := range all.Items {
		if item := &all.Items[i]; item.Status.Token == 0 {
			known, ok := t.first[item.UID]
			if !ok {
				known = beginning(item)
			}
			first[item.UID] = known
		}
	}
	t.first = first
	return tableOf(all.Items, first), seen, nil
}

// beginning is what no token of a lease that has none yet will be below, and
// every one of a lease of its name before it was: see nextToken.
func beginning(lease *v1alpha1.FencedLease) fence.Token {
	least := fence.Token(revisionOr0(lease.ResourceVersion))
	if last, err := fence.ParseToken(lease.Annotations[fence.AnnotationLastToken]); err == nil && last <= maxRestoredToken {
		least = max(least, last)
	}
	return least
}

// revisionOr0 reads a resourceVersion; one that is not a number counts as none.
func revisionOr0(text string) int64 {
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// turnsBack tells whether the table knows a newer token than leases do.
func turnsBack(table map[string]string, leases []fence.TableLease) bool {
	tokens := fence.TableTokens(table)
	return slices.ContainsFunc(leases, func(l fence.TableLease) bool {
		return tokens[l.Namespace+"/"+l.Name] > l.Lease.Current
	})
}

// sameTable tells whether two tables say the same of every lease. Up to where
// one is complete is not worth a write: an older one only leaves more to the
// webhook.
func sameTable(a, b map[string]string) bool {
	a, b = maps.Clone(a), maps.Clone(b)
	for _, key := range []string{fence.TableSeen, fence.TableAhead} {
		delete(a, key)
		delete(b, key)
	}
	return maps.Equal(a, b)
}

// tableOf gives the table's leases, the oldest first; first is where the tokens
// of those begin that have none yet.
func tableOf(items []v1alpha1.FencedLease, first map[types.UID]fence.Token) []fence.TableLease {
	slices.SortFunc(items, func(a, b v1alpha1.FencedLease) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.UID, b.UID))
	})
	leases := make([]fence.TableLease, 0, len(items))
	for i := range items {
		lease := &items[i]
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
		l.Lease.Min = max(l.Lease.Min, first[lease.UID])
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
	return leases
}
