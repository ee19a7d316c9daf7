package fencecli

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/cli-runtime/pkg/resource"
	crclient "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
)

// guardOf is the lease that an object's labels name, false where none.
func guardOf(obj metav1.Object) (types.NamespacedName, bool) {
	labels := obj.GetLabels()
	key := types.NamespacedName{Namespace: labels[fence.LabelLeaseNamespace], Name: labels[fence.LabelLease]}
	if key.Namespace == "" {
		key.Namespace = obj.GetNamespace()
	}
	return key, key.Name != ""
}

// leases reads leases live, each once.
type leases struct {
	api  crclient.Client
	read map[types.NamespacedName]*v1alpha1.FencedLease
}

func newLeases(api crclient.Client) *leases {
	return &leases{api: api, read: map[types.NamespacedName]*v1alpha1.FencedLease{}}
}

// get gives a lease, nil where it does not exist.
func (l *leases) get(ctx context.Context, key types.NamespacedName) (*v1alpha1.FencedLease, error) {
	if found, ok := l.read[key]; ok {
		return found, nil
	}
	found, err := lease(ctx, l.api, key)
	if apierrors.IsNotFound(err) {
		found, err = nil, nil
	}
	if err == nil {
		l.read[key] = found
	}
	return found, err
}

// factsOf is what a fence knows of a lease for an object of a namespace.
func factsOf(key types.NamespacedName, l *v1alpha1.FencedLease, namespace string) fence.Lease {
	facts := fence.Lease{Name: key.String()}
	if l == nil || !l.Allows(namespace) {
		return facts
	}
	facts.Found = true
	facts.Current, facts.Min = fence.Token(l.Status.Token), fence.Token(l.Spec.MinToken)
	facts.DenyLapsed = l.Spec.LapsedWrites == v1alpha1.LapsedWritesDeny
	if h := l.Status.Holder; h != nil {
		facts.Held, facts.Holder = true, h.Identity
	}
	return facts
}

// objects reads the objects that arguments such as "deploy/web" name.
func (c *cli) objects(from resource.RESTClientGetter, s selection) ([]*resource.Info, error) {
	namespace, err := c.namespace()
	if err != nil {
		return nil, err
	}
	infos, err := resource.NewBuilder(from).Unstructured().
		NamespaceParam(namespace).DefaultNamespace().
		LabelSelectorParam(s.selector).
		ResourceTypeOrNameArgs(false, s.args...).
		Flatten().Latest().Do().Infos()
	if err != nil {
		return nil, err
	}
	return infos, nil
}

// named is how messages name an object.
func named(info *resource.Info) string {
	return fmt.Sprintf("%s/%s", info.Mapping.Resource.GroupResource(), info.Name)
}

// accessor gives the metadata of a read object.
func accessor(info *resource.Info) (metav1.Object, error) {
	obj, ok := info.Object.(metav1.Object)
	if !ok {
		return nil, fmt.Errorf("%s has no metadata", named(info))
	}
	return obj, nil
}
