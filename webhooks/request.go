package webhooks

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"maps"
	"reflect"

	admissionv1 "k8s.io/api/admission/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	kjson "sigs.k8s.io/json"

	"github.com/fencedlease/fencedlease/fence"
)

// podUIDExtra is where the API server names the Pod of a service account's
// token.
const podUIDExtra = "authentication.kubernetes.io/pod-uid"

// write is what the fence reads of a request.
type write struct {
	request *admissionv1.AdmissionRequest
	// old and new are the metadata of the object as stored and as it would be
	// committed, nil where there is none. On a path that carries another kind
	// than the object's, old is the object as read live.
	old, new *metav1.PartialObjectMetadata
	// presented is the token that the request carries.
	presented fence.Presented
	// bypass is the reason for a bypass, empty for none.
	bypass string
}

// paths of a write, as metrics name them.
const (
	pathCreate, pathUpdate, pathDelete = "create", "update", "delete"
	pathStatus, pathScale              = "status", "scale"
	pathEviction, pathBinding          = "eviction", "binding"
	pathOther                          = "other"
)

func pathOf(r *admissionv1.AdmissionRequest) string {
	switch {
	case r.SubResource == "binding", r.SubResource == "" && r.Resource.Group == "" && r.Resource.Resource == "bindings":
		return pathBinding
	case r.SubResource == "eviction":
		return pathEviction
	case r.SubResource == "scale":
		return pathScale
	case r.SubResource == "status":
		return pathStatus
	case r.SubResource != "":
		return pathOther
	case r.Operation == admissionv1.Create:
		return pathCreate
	case r.Operation == admissionv1.Delete:
		return pathDelete
	}
	return pathUpdate
}

// labelless tells whether a path carries another kind than the object's, so
// that the object has to be read.
func labelless(path string) bool { return path == pathScale || path == pathEviction }

// readRequest reads a request. It fails where the metadata of an object cannot
// be read, or more than one token or reason is presented.
func readRequest(r *admissionv1.AdmissionRequest) (*write, error) {
	w := &write{request: r}
	var err error
	if w.old, err = metadata(r.OldObject.Raw); err != nil {
		return nil, fmt.Errorf("read the stored object: %w", err)
	}
	if w.new, err = metadata(r.Object.Raw); err != nil {
		return nil, fmt.Errorf("read the object of the request: %w", err)
	}
	if r.Resource.Group == "" && r.Resource.Resource == "namespaces" {
		r.Namespace = "" // the API server gives a Namespace's own name
	}
	if r.Name == "" { // generated, or of a collection
		r.Name = nameOf(w.old, w.new)
	}
	w.presented.User = r.UserInfo.Username
	if pods := r.UserInfo.Extra[podUIDExtra]; len(pods) > 0 {
		w.presented.PodUID = pods[0]
	}
	if header := r.UserInfo.Extra[fence.ExtraToken]; len(header) > 0 {
		w.presented.Stamped, w.presented.ByHeader, w.presented.Text = true, true, header[0]
		if len(header) > 1 {
			// Not canonical, whatever the values are.
			w.presented.Text = fmt.Sprintf("%s,%s", header[0], header[1])
		}
	} else if w.presentsByAnnotations() {
		w.presented.Stamped, w.presented.Text = true, w.new.Annotations[fence.AnnotationToken]
	}
	if reasons := r.UserInfo.Extra[fence.ExtraBypass]; len(reasons) > 0 {
		w.bypass = reasons[0]
	} else if w.new != nil && !labelless(pathOf(r)) {
		if reason := w.new.Annotations[fence.AnnotationBypass]; w.old == nil || reason != w.old.Annotations[fence.AnnotationBypass] {
			w.bypass = reason
		}
	}
	return w, nil
}

// presentsByAnnotations tells whether the annotations present a token rather
// than inherit one: by a write-id that was not stored, or in a new object.
func (w *write) presentsByAnnotations() bool {
	if w.new == nil || labelless(pathOf(w.request)) {
		return false
	}
	if w.old == nil {
		_, ok := w.new.Annotations[fence.AnnotationToken]
		return ok
	}
	id, ok := w.new.Annotations[fence.AnnotationWriteID]
	return ok && id != w.old.Annotations[fence.AnnotationWriteID]
}

// nameOf gives the name of the first object that there is, as far as it is
// known.
func nameOf(objects ...*metav1.PartialObjectMetadata) string {
	for _, o := range objects {
		if o != nil {
			return cmp.Or(o.Name, o.GenerateName)
		}
	}
	return ""
}

var errNoObject = errors.New("it is not an object")

func metadata(raw []byte) (*metav1.PartialObjectMetadata, error) {
	if raw = bytes.TrimSpace(raw); len(raw) == 0 || bytes.Equal(raw, []byte("null")) {
		return nil, nil
	}
	if raw[0] != '{' {
		return nil, errNoObject
	}
	o := &metav1.PartialObjectMetadata{}
	if err := kjson.UnmarshalCaseSensitivePreserveInts(raw, o); err != nil {
		return nil, err
	}
	return o, nil
}

// leaseOf names the lease that guards an object, and tells whether one does.
func leaseOf(o *metav1.PartialObjectMetadata, namespace string) (types.NamespacedName, bool) {
	if o == nil {
		return types.NamespacedName{}, false
	}
	name, ok := o.Labels[fence.LabelLease]
	if !ok {
		return types.NamespacedName{}, false
	}
	if other, ok := o.Labels[fence.LabelLeaseNamespace]; ok {
		namespace = other
	}
	return types.NamespacedName{Namespace: namespace, Name: name}, true
}

// fenceUntouched tells whether the write leaves every annotation of the fence
// as it is.
func (w *write) fenceUntouched() bool {
	if w.old == nil || w.new == nil || labelless(pathOf(w.request)) {
		return true
	}
	for _, name := range fence.AnnotationsOfFence {
		before, was := w.old.Annotations[name]
		after, is := w.new.Annotations[name]
		if was != is || before != after {
			return false
		}
	}
	return true
}

// marksForAnother tells whether the write decides a deletion in the name of
// another token than the given one.
func (w *write) marksForAnother(token fence.Token) bool {
	if w.old == nil || w.new == nil || labelless(pathOf(w.request)) {
		return false
	}
	mark, ok := w.new.Annotations[fence.AnnotationDeleteToken]
	return ok && mark != w.old.Annotations[fence.AnnotationDeleteToken] && mark != token.String()
}

// changesNothing tells whether the write commits nothing: the timestamps of
// managed fields aside, old and new object are the same.
func (w *write) changesNothing() bool {
	before, after, ok := w.contents()
	if !ok {
		return false
	}
	for _, object := range []map[string]any{before, after} {
		meta, _ := object["metadata"].(map[string]any)
		delete(meta, "resourceVersion")
		fields, _ := meta["managedFields"].([]any)
		for _, field := range fields {
			if entry, ok := field.(map[string]any); ok {
				delete(entry, "time")
			}
		}
	}
	return reflect.DeepEqual(before, after)
}

// finishesDeletion tells whether the write only takes finalizers off an object
// that is being deleted.
func (w *write) finishesDeletion() bool {
	if w.old == nil || w.new == nil || w.old.DeletionTimestamp == nil {
		return false
	}
	kept := map[string]bool{}
	for _, f := range w.old.Finalizers {
		kept[f] = true
	}
	for _, f := range w.new.Finalizers {
		if !kept[f] {
			return false
		}
	}
	before, after, ok := w.contents()
	if !ok {
		return false
	}
	for _, object := range []map[string]any{before, after} {
		meta, _ := object["metadata"].(map[string]any)
		maps.DeleteFunc(meta, func(k string, _ any) bool {
			return k == "finalizers" || k == "managedFields" || k == "resourceVersion" || k == "generation"
		})
	}
	return reflect.DeepEqual(before, after)
}

func (w *write) contents() (before, after map[string]any, ok bool) {
	if w.request.Operation != admissionv1.Update {
		return nil, nil, false
	}
	if kjson.UnmarshalCaseSensitivePreserveInts(w.request.OldObject.Raw, &before) != nil || kjson.UnmarshalCaseSensitivePreserveInts(w.request.Object.Raw, &after) != nil {
		return nil, nil, false
	}
	return before, after, before != nil && after != nil
}
