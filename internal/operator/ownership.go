package operator

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// The names are those of AdmissionObjects. Nothing is deleted: under the
// admission plugin OwnerReferencesPermissionEnforcement, whoever sets an owner
// must be allowed to delete.
// +kubebuilder:rbac:groups=admissionregistration.k8s.io,resources=validatingwebhookconfigurations;validatingadmissionpolicies;validatingadmissionpolicybindings,resourceNames=fencedlease;fencedlease-bindings;fencedlease-bypasses;fencedlease-strict;fencedlease-marks;fencedlease-claims;fencedlease-last-token;fencedlease-tables,verbs=get;patch;delete

// ownership lets the cluster's objects by which the fence is asked go with the
// operator's namespace. Where the namespace is deleted in place of the
// installation they would stay: no guarded object could be written, and nothing
// would be there to judge it.
type ownership struct {
	client    client.Client
	live      client.Reader
	namespace string
}

// ownershipCheck is how often to look for objects that were installed since.
const ownershipCheck = 10 * time.Second

// Start implements manager.Runnable.
func (o *ownership) Start(ctx context.Context) error {
	tick := time.NewTicker(ownershipCheck)
	defer tick.Stop()
	for {
		if err := o.take(ctx); err != nil && ctx.Err() == nil {
			ctrl.LoggerFrom(ctx).Error(err, "Could not tie what asks the fence to the operator's namespace")
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// NeedLeaderElection implements manager.LeaderElectionRunnable.
func (o *ownership) NeedLeaderElection() bool { return true }

func (o *ownership) take(ctx context.Context) error {
	namespace := &corev1.Namespace{}
	if err := o.live.Get(ctx, client.ObjectKey{Name: o.namespace}, namespace); err != nil {
		return fmt.Errorf("read the operator's namespace: %w", err)
	}
	owner := metav1.OwnerReference{APIVersion: "v1", Kind: "Namespace", Name: namespace.Name, UID: namespace.UID}
	var failed []error
	for _, object := range AdmissionObjects() {
		err := o.live.Get(ctx, client.ObjectKeyFromObject(object), object)
		if err == nil && !slices.Contains(object.GetOwnerReferences(), owner) {
			before := client.MergeFromWithOptions(object.DeepCopyObject().(client.Object), client.MergeFromWithOptimisticLock{})
			object.SetOwnerReferences(append(object.GetOwnerReferences(), owner))
			err = o.client.Patch(ctx, object, before)
		}
		// What another one changed meanwhile is looked at again.
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			failed = append(failed, fmt.Errorf("%T %s: %w", object, object.GetName(), err))
		}
	}
	return errors.Join(failed...)
}
