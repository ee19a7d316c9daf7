package controllers

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
)

const (
	sealPage     = 500
	sealParallel = 8
)

// sealer raises the recorded token of guarded objects before a new holder is
// told, as HDFS's quorum journal and BookKeeper fence their old writer.
type sealer struct {
	client client.Client
	live   client.Reader
}

// seal brings every guarded object of the lease's sealed kinds to token. It
// lists until nothing lower appears; creates below the reserved token are
// refused by the fence. Where it cannot, it fails with cannotIssueError or, where
// the lease says so, names in incomplete what is not sealed.
func (s *sealer) seal(ctx context.Context, lease *v1alpha1.FencedLease, token fence.Token) (incomplete string, err error) {
	spec := lease.Spec.Seal
	if spec == nil {
		return "", nil
	}
	limited, cancel := context.WithTimeout(ctx, time.Duration(spec.TimeoutSeconds)*time.Second)
	defer cancel()
	for _, resource := range spec.Resources {
		if err = s.kind(limited, lease, resource, token); err != nil {
			err = fmt.Errorf("seal %s: %w", schema.GroupResource{Group: resource.Group, Resource: resource.Resource}, err)
			break
		}
	}
	switch {
	case err == nil:
		return "", nil
	case ctx.Err() != nil:
		return "", ctx.Err()
	case apierrors.IsForbidden(err):
		err = fmt.Errorf("%w; grant the operator list and patch on this kind", err)
	case errors.Is(err, context.DeadlineExceeded):
		err = fmt.Errorf("not done in %d s: %w", spec.TimeoutSeconds, err)
	}
	if spec.OnTimeout == v1alpha1.SealProceed {
		return err.Error(), nil
	}
	return "", &cannotIssueError{v1alpha1.ReasonSealing, err.Error()}
}

func (s *sealer) kind(ctx context.Context, lease *v1alpha1.FencedLease, resource v1alpha1.SealedResource, token fence.Token) error {
	kind, err := s.client.RESTMapper().KindFor(schema.GroupVersionResource{Group: resource.Group, Resource: resource.Resource})
	if err != nil {
		return err
	}
	mapping, err := s.client.RESTMapper().RESTMapping(kind.GroupKind(), kind.Version)
	if err != nil {
		return err
	}
	namespaces := guardedNamespaces(lease)
	if slices.Contains(namespaces, "*") {
		namespaces = []string{metav1.NamespaceAll}
	} else if mapping.Scope.Name() == meta.RESTScopeNameRoot {
		return nil // such a lease guards no cluster-scoped object
	}
	for _, namespace := range namespaces {
		for lower := true; lower; {
			if lower, err = s.pass(ctx, lease, kind, namespace, token); err != nil {
				return err
			}
		}
	}
	return nil
}

// pass seals what one listing shows, and tells whether it showed anything
// lower than token.
func (s *sealer) pass(ctx context.Context, lease *v1alpha1.FencedLease, kind schema.GroupVersionKind, namespace string, token fence.Token) (lower bool, err error) {
	list := &metav1.PartialObjectMetadataList{}
	list.SetGroupVersionKind(kind.GroupVersion().WithKind(kind.Kind + "List"))
	for more := true; more; more = list.Continue != "" {
		if err := s.live.List(ctx, list, client.InNamespace(namespace), client.MatchingLabels{fence.LabelLease: lease.Name},
			client.Limit(sealPage), client.Continue(list.Continue)); err != nil {
			return false, err
		}
		work, ctx := errgroup.WithContext(ctx)
		work.SetLimit(sealParallel)
		for i := range list.Items {
			object := &list.Items[i]
			if !guards(lease, object) || fence.Recorded(object.Annotations) >= token {
				continue
			}
			lower = true
			object.SetGroupVersionKind(kind)
			work.Go(func() error { return s.raise(ctx, object, token) })
		}
		if err := work.Wait(); err != nil {
			return false, err
		}
	}
	return lower, nil
}

// raise writes the floor of one object. A conflict is no failure: the next
// pass looks again.
func (s *sealer) raise(ctx context.Context, object *metav1.PartialObjectMetadata, token fence.Token) error {
	patch := fmt.Appendf(nil, `{"metadata":{"uid":%q,"resourceVersion":%q,"annotations":{%q:%q}}}`,
		object.UID, object.ResourceVersion, fence.AnnotationFloor, token.String())
	err := s.client.Patch(ctx, object, client.RawPatch(types.MergePatchType, patch))
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// guards tells whether lease is the one that object's labels name.
func guards(lease *v1alpha1.FencedLease, object client.Object) bool {
	namespace, ok := object.GetLabels()[fence.LabelLeaseNamespace]
	if !ok {
		namespace = object.GetNamespace()
	}
	return namespace == lease.Namespace && object.GetLabels()[fence.LabelLease] == lease.Name
}
