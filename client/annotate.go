package client

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/fencedlease/fencedlease/fence"
)

// StampObject puts the annotations that present token on a manifest: the
// token and a write-id, a digest of token, salt and the rest of the object, so
// that the same manifest applied again changes nothing. A salt is for the
// server's answer that the write-id stands there already.
func StampObject(obj *unstructured.Unstructured, token fence.Token, salt string) error {
	if !token.Valid() {
		return fmt.Errorf("stamp %s %s: %d is no token", obj.GetKind(), obj.GetName(), token)
	}
	if err := stamp(obj.Object, token, salt); err != nil {
		return fmt.Errorf("stamp %s %s: %w", obj.GetKind(), obj.GetName(), err)
	}
	return nil
}

// stamp is StampObject for the body of any write, a merge patch included.
func stamp(object map[string]any, token fence.Token, salt string) error {
	annotations, err := annotationsOf(object)
	if err != nil {
		return err
	}
	delete(annotations, fence.AnnotationWriteID)
	annotations[fence.AnnotationToken] = token.String()
	// The keys of a JSON object are sorted, so the digest is stable.
	body, err := json.Marshal(written(object))
	if err != nil {
		return err
	}
	annotations[fence.AnnotationWriteID] = writeID(body, salt)
	return nil
}

func writeID(body []byte, salt string) string {
	sum := sha256.Sum256(append(bytes.Clone(body), salt...))
	return hex.EncodeToString(sum[:8])
}

// written is object without what changes with every write: an update of an
// object as it was read is the same each time.
func written(object map[string]any) map[string]any {
	metadata, ok := object["metadata"].(map[string]any)
	if !ok {
		return object
	}
	object, metadata = maps.Clone(object), maps.Clone(metadata)
	delete(metadata, "resourceVersion")
	delete(metadata, "managedFields")
	object["metadata"] = metadata
	return object
}

// annotationsOf gives the annotations of an object or of a merge patch, which
// it puts there where there are none.
func annotationsOf(object map[string]any) (map[string]any, error) {
	at := object
	for _, field := range []string{"metadata", "annotations"} {
		if at[field] == nil {
			at[field] = map[string]any{}
		}
		inner, ok := at[field].(map[string]any)
		if !ok {
			return nil, fmt.Errorf("%s is not an object", field)
		}
		at = inner
	}
	return at, nil
}

// Guard labels obj as guarded by lease ("namespace/name"): what an operator
// creates for a guarded object is guarded by the same lease.
func Guard(obj metav1.Object, lease string) error {
	namespace, name, ok := strings.Cut(lease, "/")
	if !ok || namespace == "" || name == "" || strings.Contains(name, "/") {
		return fmt.Errorf("guard %s: lease %q must be namespace/name", obj.GetName(), lease)
	}
	labels := obj.GetLabels()
	if labels == nil {
		labels = map[string]string{}
	}
	labels[fence.LabelLease] = name
	delete(labels, fence.LabelLeaseNamespace)
	if obj.GetNamespace() != namespace {
		labels[fence.LabelLeaseNamespace] = namespace
	}
	obj.SetLabels(labels)
	return nil
}
