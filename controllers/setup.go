// Package controllers turns claims into tokens: it decides who holds each
// lease and issues every acquisition a higher token, by compare-and-swap on
// the lease.
//
// No token is issued twice, whatever number of operators run, crash or are
// paused, and whatever their clocks say. Who holds, and when a hand-over
// happens, does rest on this process's clock and on what it has seen: a
// hand-over can be late, and a holder that is alive can lapse. That a former
// holder stops writing is the fence's to guarantee, not this package's.
package controllers

import (
	"context"
	"fmt"

	"github.com/go-logr/logr"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"k8s.io/client-go/util/workqueue"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
)

// +kubebuilder:rbac:groups=fencedlease.io,resources=fencedleases,verbs=get;list;watch;update
// +kubebuilder:rbac:groups=fencedlease.io,resources=fencedleases/status,verbs=update
// +kubebuilder:rbac:groups=fencedlease.io,resources=leaseclaims,verbs=get;list;watch;delete
// +kubebuilder:rbac:groups=fencedlease.io,resources=leaseclaims/status,verbs=patch
// +kubebuilder:rbac:groups=coordination.k8s.io,resources=leases,verbs=get;list;watch
// +kubebuilder:rbac:groups="",resources=namespaces,verbs=get;list;watch;patch
// +kubebuilder:rbac:groups=events.k8s.io,resources=events,verbs=create;patch
// +kubebuilder:rbac:groups="",namespace=fencedlease-system,resources=configmaps,verbs=create
// +kubebuilder:rbac:groups="",namespace=fencedlease-system,resources=configmaps,resourceNames=fencedlease-floor;fencedlease-table,verbs=get;update

const (
	claimsByLease     = "spec.leaseName"
	leasesByRef       = "spec.leaseRef.name"
	leasesByNamespace = "spec.allowedNamespaces"
)

// Options are what the controllers need besides the manager.
type Options struct {
	// OperatorNamespace is where the operator keeps its own objects.
	OperatorNamespace string
	// Clock is what lapses are judged by. Nil means the real one.
	Clock clock.PassiveClock
	// Wrap changes the client by which tokens are issued, as tests do that
	// inject faults. Nil changes nothing.
	Wrap func(client.Client) client.Client
}

// SetupWithManager adds the controllers to a manager.
func SetupWithManager(mgr ctrl.Manager, o Options) error {
	if o.Clock == nil {
		o.Clock = clock.RealClock{}
	}
	writer := mgr.GetClient()
	if o.Wrap != nil {
		writer = o.Wrap(writer)
	}
	ctx := context.Background()
	if err := mgr.GetFieldIndexer().IndexField(ctx, &v1alpha1.LeaseClaim{}, claimsByLease, func(o client.Object) []string {
		return []string{o.(*v1alpha1.LeaseClaim).Spec.LeaseName}
	}); err != nil {
		return fmt.Errorf("index claims: %w", err)
	}
	if err := mgr.GetFieldIndexer().IndexField(ctx, &v1alpha1.FencedLease{}, leasesByRef, func(o client.Object) []string {
		if ref := o.(*v1alpha1.FencedLease).Spec.LeaseRef; ref != nil {
			return []string{ref.Name}
		}
		return nil
	}); err != nil {
		return fmt.Errorf("index leases: %w", err)
	}
	if err := mgr.GetFieldIndexer().IndexField(ctx, &v1alpha1.FencedLease{}, leasesByNamespace, func(o client.Object) []string {
		return guardedNamespaces(o.(*v1alpha1.FencedLease))
	}); err != nil {
		return fmt.Errorf("index leases: %w", err)
	}
	waiting.follow(mgr.GetClient(), o.Clock)
	table := newLeaseTable(mgr, o.OperatorNamespace)
	if err := table.setup(mgr); err != nil {
		return fmt.Errorf("set up the lease table: %w", err)
	}
	r := &leaseReconciler{
		table:  table,
		client: writer, live: mgr.GetAPIReader(), clock: o.Clock, events: mgr.GetEventRecorder("fencedlease"),
		renewals: newRenewals(o.Clock), finished: newRenewals(o.Clock), delays: newRenewals(o.Clock), waited: newRenewals(o.Clock), vacant: newRenewals(o.Clock),
		floor: &floor{client: writer, live: mgr.GetAPIReader(), namespace: o.OperatorNamespace},
		seal:  &sealer{client: writer, live: mgr.GetAPIReader()},
	}
	return ctrl.NewControllerManagedBy(mgr).
		Named("fencedlease").
		For(&v1alpha1.FencedLease{}).
		Watches(&v1alpha1.LeaseClaim{}, r.claimEvents()).
		Watches(&coordinationv1.Lease{}, leasesOf(mgr.GetClient(), func(native client.Object) []client.ListOption {
			return []client.ListOption{client.InNamespace(native.GetNamespace()), client.MatchingFields{leasesByRef: native.GetName()}}
		})).
		Watches(&corev1.Namespace{}, leasesOf(mgr.GetClient(), func(namespace client.Object) []client.ListOption {
			return []client.ListOption{client.MatchingFields{leasesByNamespace: namespace.GetName()}}
		}), builder.WithPredicates(predicate.NewPredicateFuncs(func(namespace client.Object) bool {
			return namespace.GetLabels()[fence.LabelNamespaceMark] != "true"
		}))).
		WithOptions(controller.Options{
			MaxConcurrentReconciles: 16,
			// Every line on a lease names it as the fences do.
			LogConstructor: func(req *reconcile.Request) logr.Logger {
				log := mgr.GetLogger().WithValues("controller", "fencedlease")
				if req == nil {
					return log
				}
				return log.WithValues("lease", req.String())
			},
		}).
		Complete(r)
}

// leasesOf looks at the leases that an event of another kind concerns.
func leasesOf(reader client.Reader, which func(client.Object) []client.ListOption) handler.EventHandler {
	return handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, o client.Object) []reconcile.Request {
		leases := &v1alpha1.FencedLeaseList{}
		if err := reader.List(ctx, leases, which(o)...); err != nil {
			return nil
		}
		var requests []reconcile.Request
		for i := range leases.Items {
			requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&leases.Items[i])})
		}
		return requests
	})
}

type queue = workqueue.TypedRateLimitingInterface[reconcile.Request]

// claimEvents takes note of renewals as they are seen, and looks at the lease
// only for what is more than a renewal.
func (r *leaseReconciler) claimEvents() handler.EventHandler {
	enqueue := func(o client.Object, q queue) {
		q.Add(reconcile.Request{NamespacedName: types.NamespacedName{Namespace: o.GetNamespace(), Name: o.(*v1alpha1.LeaseClaim).Spec.LeaseName}})
	}
	return handler.Funcs{
		CreateFunc: func(_ context.Context, e event.CreateEvent, q queue) {
			r.renewals.see(e.Object.GetUID(), renewalOf(e.Object.(*v1alpha1.LeaseClaim)))
			r.waited.see(e.Object.GetUID(), "")
			enqueue(e.Object, q)
		},
		UpdateFunc: func(_ context.Context, e event.UpdateEvent, q queue) {
			before, after := e.ObjectOld.(*v1alpha1.LeaseClaim), e.ObjectNew.(*v1alpha1.LeaseClaim)
			r.renewals.see(after.UID, renewalOf(after))
			if justRenewed(before, after) {
				return
			}
			enqueue(after, q)
		},
		DeleteFunc: func(_ context.Context, e event.DeleteEvent, q queue) {
			c := e.Object.(*v1alpha1.LeaseClaim)
			for _, memory := range []*renewals{r.renewals, r.finished, r.waited} {
				memory.forget(c.UID)
			}
			if c.Status.Token > 0 && !finished(c) && !e.DeleteStateUnknown {
				r.gone.Store(types.NamespacedName{Namespace: c.Namespace, Name: c.Spec.LeaseName}, string(c.UID))
			}
			enqueue(e.Object, q)
		},
	}
}

// justRenewed tells that a claim changed in its renewal alone.
func justRenewed(before, after *v1alpha1.LeaseClaim) bool {
	return !equalTimes(before, after) && before.Spec.LeaseName == after.Spec.LeaseName &&
		reaffirm(before.Spec.Reaffirm) == reaffirm(after.Spec.Reaffirm) && priority(before) == priority(after) &&
		before.DeletionTimestamp.Equal(after.DeletionTimestamp) && heldCondition(before) == heldCondition(after) &&
		before.Status.Token == after.Status.Token && before.Status.Ticket == after.Status.Ticket
}

func equalTimes(a, b *v1alpha1.LeaseClaim) bool { return a.Spec.RenewTime.Equal(b.Spec.RenewTime) }
