package client

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
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
	annotations := obj.GetAnnotations()
	if annotations == nil {
		annotations = map[string]string{}
	}
	delete(annotations, fence.AnnotationWriteID)
	annotations[fence.AnnotationToken] = token.String()
	obj.SetAnnotations(annotations)
	// The keys of a JSON object are sorted, so the digest is stable.
	body, err := json.Marshal(obj.Object)
	if err != nil {
		return fmt.Errorf("stamp %s %s: %w", obj.GetKind(), obj.GetName(), err)
	}
	sum := sha256.Sum256(append(body, salt...))
	annotations[fence.AnnotationWriteID] = hex.EncodeToString(sum[:8])
	obj.SetAnnotations(annotations)
	return nil
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
