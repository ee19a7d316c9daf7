package conformance

import (
	"context"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	crclient "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/internal/controlplane"
	"github.com/fencedlease/fencedlease/test/env"
)

// TestCorners: what a reader of JSON, the lease table or a selector could get
// wrong lets no stale write commit and keeps no honest one out.
func TestCorners(t *testing.T) {
	for name, opts := range layers {
		t.Run(name, func(t *testing.T) {
			w := newWorkshop(t, env.Start(t, opts), opts.Policy)
			t.Run("tokens of a former lease", func(t *testing.T) { w.with(t).formerTokens(opts) })
			t.Run("sealed", func(t *testing.T) { w.with(t).sealed() })
			t.Run("namespaces", func(t *testing.T) { w.with(t).namespaces(opts.Policy) })
			t.Run("numbers", func(t *testing.T) { w.with(t).numbers() })
			t.Run("spellings", func(t *testing.T) { w.with(t).spellings(opts.Policy) })
			t.Run("a label without a namespace", func(t *testing.T) { w.with(t).clusterScoped() })
			t.Run("binding", func(t *testing.T) { w.with(t).binding() })
			t.Run("scale of the cluster's own", func(t *testing.T) { w.with(t).clusterScale(opts.Webhook) })
		})
	}
}

// known waits until the policies have a line of the lease table.
func (w *workshop) known(policy bool, lease, line string) {
	w.Helper()
	if !policy {
		return
	}
	w.await("the table has the lease", func() bool {
		table := &corev1.ConfigMap{}
		err := w.Admin.Get(w.Context(), crclient.ObjectKey{Namespace: controlplane.OperatorNamespace, Name: fence.TableName}, table)
		return err == nil && strings.Contains(table.Data[w.namespace], "\n"+lease+"\t"+line)
	})
	// And the API server has it where it knows of a probe that came later.
	probe := lease + "-probe"
	w.issue(probe)
	o := w.put(probe, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: probe}}, "42")
	w.await("the policies know the lease", func() bool {
		return reasonOf(crclient.NewDryRunClient(w.as("41")).Delete(w.Context(), o)) == fence.StaleToken
	})
}

// make makes a lease that has issued nothing.
func (w *workshop) make(name string, spec v1alpha1.FencedLeaseSpec) {
	w.Helper()
	w.must(w.Admin.Create(w.Context(), &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name}, Spec: spec}))
}

func (w *workshop) patch(as crclient.Client, o crclient.Object, format string, a ...any) error {
	return as.Patch(w.Context(), o.DeepCopyObject().(crclient.Object), crclient.RawPatch(types.MergePatchType, fmt.Appendf(nil, format, a...)))
}

func (w *workshop) reason() crclient.Client {
	return w.Impersonating(w, "writer", map[string][]string{fence.ExtraBypass: {"incident 7"}})
}

// formerTokens: before the first claim of a restored lease, and of one that was
// made anew, the tokens of the one before it are worth nothing.
func (w *workshop) formerTokens(opts env.Options) {
	w.make("restored", v1alpha1.FencedLeaseSpec{MinToken: 1000042})
	restored := w.put("restored", &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "restored"}}, "42")
	w.must(w.Admin.Delete(w.Context(), w.issue("again")))
	w.make("again", v1alpha1.FencedLeaseSpec{})
	again := w.put("again", &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "again"}}, "42")
	w.known(opts.Policy, "restored", "0\t1000042\t")
	w.known(opts.Policy, "again", "0\t")

	w.expect("a write before the restored lease's first claim", w.patch(w.as("42"), restored, `{"data":{"a":"b"}}`), fence.StaleToken)
	w.expect("a delete then", w.as("42").Delete(w.Context(), restored), fence.StaleToken)
	unissued := fence.UnissuedToken
	if opts.Policy { // by the table what is below its first token is revoked
		unissued = fence.StaleToken
	}
	w.expect("a write before the first claim of a lease made anew", w.patch(w.as("42"), again, `{"data":{"a":"b"}}`), unissued)
}

// sealed: a floor neither keeps the holder from what carries no annotation, nor
// counts as issued.
func (w *workshop) sealed() {
	d := w.deployment("sealed")
	pod := (&instance{namespace: w.namespace}).object(cell{"eviction", "sealed"}).(*corev1.Pod)
	pod.Name = "sealed"
	config := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "sealing"}}
	floors := map[crclient.Object]string{d: "42", pod: "42", config: "43"}
	operator := w.User(w.T, controlplane.OperatorUser, "system:masters")
	for o, floor := range floors {
		w.put("main", o, "42")
		w.must(w.patch(operator, o, `{"metadata":{"annotations":{%q:%q}}}`, fence.AnnotationFloor, floor))
	}
	w.expect("the holder scales", w.as("42").SubResource("scale").Patch(w.Context(), d.DeepCopyObject().(crclient.Object),
		crclient.RawPatch(types.MergePatchType, []byte(`{"spec":{"replicas":5}}`))), passes)
	w.expect("the holder evicts", w.as("42").SubResource("eviction").Create(w.Context(), pod, &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name}}), passes)
	w.expect("the token that a hand-over has reserved", w.patch(w.as("43"), config, `{"data":{"a":"b"}}`), fence.UnissuedToken)
	w.expect("and records", w.patch(w.as("43"), config, `{"metadata":{"annotations":{%q:"43"}}}`, fence.AnnotationToken), fence.UnissuedToken)
}

// namespaces are objects of the cluster, though requests on them name one.
func (w *workshop) namespaces(policy bool) {
	w.issue("star", v1alpha1.FencedLeaseSpec{AllowedNamespaces: []string{"*"}})
	w.known(policy, "star", "42\t")
	made := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.namespace + "-made",
		Labels: map[string]string{fence.LabelLease: "star", fence.LabelLeaseNamespace: w.namespace}, Annotations: map[string]string{fence.AnnotationToken: "42"}}}
	w.expect("the holder makes a Namespace", w.as("42").Create(w.Context(), made), passes)
	w.expect("and writes it", w.patch(w.as("42"), made, `{"metadata":{"labels":{"a":"b"}}}`), passes)
	w.expect("a former one writes it", w.patch(w.as("41"), made, `{"metadata":{"labels":{"a":"c"}}}`), fence.StaleToken)
	plain := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.namespace + "-plain"}}
	w.must(w.Admin.Create(w.Context(), plain))
	w.expect("one comes under guard", w.patch(w.as(""), plain, `{"metadata":{"labels":{%q:"star",%q:%q}}}`, fence.LabelLease, fence.LabelLeaseNamespace, w.namespace), passes)
	own := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.namespace}}
	w.expect("one whose label names no namespace", w.patch(w.as(""), own, `{"metadata":{"labels":{%q:"main"}}}`, fence.LabelLease), fence.UnknownLease)
}

// numbers: two integers that are one in floating-point are a change.
func (w *workshop) numbers() {
	big := w.put("main", w.thing("big"), "42")
	status := func(as crclient.Client, seq int64) error {
		return as.Status().Patch(w.Context(), big.DeepCopyObject().(crclient.Object), crclient.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"status":{"seq":%d}}`, seq)), crclient.FieldOwner("ctl"))
	}
	w.must(status(w.exempt(), 1<<53))
	w.expect("the next integer, unstamped", status(w.as(""), 1<<53+1), fence.Unstamped)
	w.expect("the next integer, stale", status(w.as("41"), 1<<53+1), fence.StaleToken)
	w.expect("the same integer", status(w.as(""), 1<<53), passes)
}

// spellings: a field that is called like metadata but for its case is none.
func (w *workshop) spellings(policy bool) {
	w.issue("lax", v1alpha1.FencedLeaseSpec{UnstampedWrites: &v1alpha1.UnstampedWrites{Default: v1alpha1.UnstampedAllow}})
	w.known(policy, "lax", "42\t")
	behind := w.put("lax", w.thing("behind"), "42")
	w.expect("label and record taken off behind METADATA", w.patch(w.as(""), behind,
		`{"METADATA":{"labels":{%q:"lax"},"annotations":{%q:"42",%q:"first"}},"metadata":{"labels":{%q:null},"annotations":{%q:null,%q:null}}}`,
		fence.LabelLease, fence.AnnotationToken, fence.AnnotationWriteID, fence.LabelLease, fence.AnnotationToken, fence.AnnotationWriteID), fence.FenceRemoved)
	held := w.put("main", w.thing("held"), "42")
	w.expect("by the holder", w.patch(w.as("42"), held, `{"METADATA":{"labels":{%q:"main"}},"metadata":{"labels":{%q:null}}}`, fence.LabelLease, fence.LabelLease), fence.FenceRemoved)
	text := w.thing("text").(*unstructured.Unstructured)
	text.Object["Metadata"] = "text"
	w.put("main", text, "42")
	w.expect("the holder, where such a field is a text", w.patch(w.as(""), text, `{"metadata":{"annotations":{%q:"42",%q:"second"}},"spec":{"replicas":2}}`, fence.AnnotationToken, fence.AnnotationWriteID), passes)
	w.expect("a bypass there", w.patch(w.reason(), text, `{"spec":{"replicas":3}}`), passes)
}

// clusterScoped: a label that names no lease keeps nobody with a reason out.
func (w *workshop) clusterScoped() {
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: w.namespace + "-role"}}
	w.put("main", role, "42")
	w.expect("a stamped write", w.patch(w.as("42"), role, `{"metadata":{"labels":{"a":"b"}}}`), fence.UnknownLease)
	w.expect("a bypass", w.patch(w.reason(), role, `{"metadata":{"labels":{"a":"b"}}}`), passes)
	w.expect("a bypass that takes the label off", w.patch(w.reason(), role, `{"metadata":{"labels":{%q:null}}}`, fence.LabelLease), passes)
}

// binding: nothing of the fence's comes onto a Pod by its Binding.
func (w *workshop) binding() {
	pod := (&instance{namespace: w.namespace}).object(cell{"eviction", "bound"}).(*corev1.Pod)
	pod.Name = "bound"
	w.put("main", pod, "42")
	bind := func(meta metav1.ObjectMeta) error {
		meta.Namespace, meta.Name = pod.Namespace, pod.Name
		return w.as("").SubResource("binding").Create(w.Context(), pod.DeepCopy(), &corev1.Binding{ObjectMeta: meta, Target: corev1.ObjectReference{Kind: "Node", Name: "n"}})
	}
	w.expect("a Binding with a record", bind(metav1.ObjectMeta{Annotations: map[string]string{fence.AnnotationToken: "7"}}), fence.FenceRemoved)
	w.expect("a Binding with a label", bind(metav1.ObjectMeta{Labels: map[string]string{fence.LabelLeaseNamespace: "elsewhere"}}), fence.FenceRemoved)
	w.expect("a plain one", bind(metav1.ObjectMeta{}), passes)
}

// clusterScale: what the operator may not read, and no mark keeps out of reach,
// is scaled as ever; what it may read is judged.
func (w *workshop) clusterScale(webhook bool) {
	crd := &apiextensionsv1.CustomResourceDefinition{ObjectMeta: metav1.ObjectMeta{Name: "pools.example.com"}, Spec: apiextensionsv1.CustomResourceDefinitionSpec{
		Group: "example.com", Scope: apiextensionsv1.ClusterScoped,
		Names: apiextensionsv1.CustomResourceDefinitionNames{Plural: "pools", Singular: "pool", Kind: "Pool", ListKind: "PoolList"},
		Versions: []apiextensionsv1.CustomResourceDefinitionVersion{{Name: "v1", Served: true, Storage: true,
			Schema:       &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: &apiextensionsv1.JSONSchemaProps{Type: "object", XPreserveUnknownFields: new(true)}},
			Subresources: &apiextensionsv1.CustomResourceSubresources{Scale: &apiextensionsv1.CustomResourceSubresourceScale{SpecReplicasPath: ".spec.replicas", StatusReplicasPath: ".status.replicas"}},
		}},
	}}
	w.must(w.Admin.Create(w.Context(), crd))
	pool := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "example.com/v1", "kind": "Pool", "metadata": map[string]any{"name": "pool"}, "spec": map[string]any{"replicas": int64(1)}}}
	w.await("the kind is served", func() bool { return w.Admin.Create(w.Context(), pool.DeepCopy()) == nil })
	scale := func(ctx context.Context, as crclient.Client) error {
		return as.SubResource("scale").Patch(ctx, pool.DeepCopy(), crclient.RawPatch(types.MergePatchType, []byte(`{"spec":{"replicas":3}}`)))
	}
	w.expect("nobody guards it", scale(w.Context(), w.as("")), passes)
	if !webhook {
		return
	}
	if err := scale(w.Context(), w.as("42")); err == nil {
		w.Error("a token passed without a look at what it is for")
	}
	w.Grant(w.T, "", controlplane.OperatorUser, rbacv1.PolicyRule{APIGroups: []string{"example.com"}, Resources: []string{"pools"}, Verbs: []string{"get"}})
	w.await("the operator may look", func() bool { return scale(w.Context(), w.as("42")) == nil })
}
