package conformance

import (
	"fmt"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	crclient "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/internal/controlplane"
	"github.com/fencedlease/fencedlease/test/env"
)

// workshop is a namespace with a lease whose current token is 42, and a custom
// resource with /status and /scale.
type workshop struct {
	*testing.T
	*env.Environment
	namespace string
}

func newWorkshop(t *testing.T, e *env.Environment, policy bool) *workshop {
	t.Helper()
	w := &workshop{T: t, Environment: e, namespace: e.Namespace(t)}
	w.must(e.Admin.Patch(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.namespace}},
		crclient.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"metadata":{"labels":{%q:"true"}}}`, fence.LabelNamespaceMark))))
	w.issue("main")
	crd := &apiextensionsv1.CustomResourceDefinition{
		ObjectMeta: metav1.ObjectMeta{Name: "things.example.com"},
		Spec: apiextensionsv1.CustomResourceDefinitionSpec{
			Group: "example.com", Scope: apiextensionsv1.NamespaceScoped,
			Names: apiextensionsv1.CustomResourceDefinitionNames{Plural: "things", Singular: "thing", Kind: "Thing", ListKind: "ThingList"},
			Versions: []apiextensionsv1.CustomResourceDefinitionVersion{{
				Name: "v1", Served: true, Storage: true,
				Schema: &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: &apiextensionsv1.JSONSchemaProps{
					Type: "object", XPreserveUnknownFields: new(true),
				}},
				Subresources: &apiextensionsv1.CustomResourceSubresources{
					Status: &apiextensionsv1.CustomResourceSubresourceStatus{},
					Scale:  &apiextensionsv1.CustomResourceSubresourceScale{SpecReplicasPath: ".spec.replicas", StatusReplicasPath: ".status.replicas"},
				},
			}},
		},
	}
	w.must(e.Admin.Create(t.Context(), crd))
	// The webhook reads what a /scale changes.
	e.Grant(t, "", controlplane.OperatorUser, rbacv1.PolicyRule{APIGroups: []string{"example.com"}, Resources: []string{"things"}, Verbs: []string{"get"}})
	w.await("the kind is served", func() bool {
		return e.Admin.List(t.Context(), &unstructured.UnstructuredList{Object: map[string]any{"apiVersion": "example.com/v1", "kind": "ThingList"}}) == nil
	})
	if policy {
		probe := w.put("main", w.thing("probe"), "42")
		w.await("the policies know the lease", func() bool {
			return reasonOf(crclient.NewDryRunClient(w.as("41")).Delete(t.Context(), probe)) == fence.StaleToken
		})
	}
	return w
}

func (w *workshop) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

func (w *workshop) await(what string, done func() bool) {
	w.Helper()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	limit := time.After(30 * time.Second)
	for !done() {
		select {
		case <-tick.C:
		case <-limit:
			w.Fatalf("waited half a minute until %s", what)
		}
	}
}

// issue makes a lease that has issued 42.
func (w *workshop) issue(name string, spec ...v1alpha1.FencedLeaseSpec) *v1alpha1.FencedLease {
	w.Helper()
	lease := &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name}}
	if len(spec) > 0 {
		lease.Spec = spec[0]
	}
	w.must(w.Admin.Create(w.Context(), lease))
	lease.Status.Token, lease.Status.Holder = 42, &v1alpha1.Holder{ClaimName: "b", ClaimUID: "uid-b", Identity: "pod-b"}
	w.must(w.Admin.Status().Update(w.Context(), lease))
	return lease
}

// as gives an administrator's client that presents a token by header, or none.
func (w *workshop) as(token string) crclient.Client {
	w.Helper()
	var extra map[string][]string
	if token != "" {
		extra = map[string][]string{fence.ExtraToken: {token}}
	}
	return w.Impersonating(w, "writer", extra)
}

// put puts an object under guard, with a record, past the fence.
func (w *workshop) put(lease string, o crclient.Object, record string) crclient.Object {
	w.Helper()
	o.SetLabels(map[string]string{fence.LabelLease: lease})
	o.SetAnnotations(map[string]string{fence.AnnotationToken: record, fence.AnnotationWriteID: "first"})
	w.must(w.exempt().Create(w.Context(), o))
	return o
}

// exempt gives the client of a principal that the fence never judges.
func (w *workshop) exempt() crclient.Client {
	w.Helper()
	return w.User(w.T, "system:serviceaccount:kube-system:generic-garbage-collector", "system:masters")
}

func (w *workshop) thing(name string) crclient.Object {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "example.com/v1", "kind": "Thing", "metadata": map[string]any{"namespace": w.namespace, "name": name}, "spec": map[string]any{"replicas": int64(1)},
	}}
}

func (w *workshop) deployment(name string) crclient.Object {
	in := &instance{namespace: w.namespace}
	d := in.object(cell{"update", name}).(*appsv1.Deployment)
	d.Name = name
	return d
}

var layers = map[string]env.Options{"webhook only": {Webhook: true}, "policy only": {Policy: true}, "webhook and policy": {Webhook: true, Policy: true}}

// TestKinds: what is special about a kind makes no way round the fence: the
// scale of any of them, a status that keeps annotations and one that drops
// them, and a finalizer of somebody else's.
func TestKinds(t *testing.T) {
	for name, opts := range layers {
		t.Run(name, func(t *testing.T) {
			e := env.Start(t, opts)
			w := newWorkshop(t, e, opts.Policy)
			if opts.Webhook { // without it /scale is out of sight
				t.Run("scale", func(t *testing.T) { w.with(t).scales() })
			}
			t.Run("status that keeps annotations", func(t *testing.T) { w.with(t).statusKept() })
			t.Run("status that drops them", func(t *testing.T) { w.with(t).statusDropped() })
			t.Run("label", func(t *testing.T) { w.with(t).label() })
			t.Run("finalizer", func(t *testing.T) { w.with(t).finalizer(opts.Policy) })
		})
	}
}

func (w *workshop) with(t *testing.T) *workshop {
	return &workshop{T: t, Environment: w.Environment, namespace: w.namespace}
}

func (w *workshop) expect(what string, err error, want fence.Reason) {
	w.Helper()
	if got := reasonOf(err); got != want {
		w.Errorf("%s: got %v, want %s", what, err, want)
	}
}

func (w *workshop) scales() {
	template := w.deployment("template").(*appsv1.Deployment).Spec
	for kind, o := range map[string]crclient.Object{
		"deployment": w.deployment("scaled"),
		"statefulset": &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "scaled"},
			Spec: appsv1.StatefulSetSpec{Replicas: new(int32(1)), Selector: template.Selector, Template: template.Template}},
		"replicaset": &appsv1.ReplicaSet{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "scaled"},
			Spec: appsv1.ReplicaSetSpec{Replicas: new(int32(1)), Selector: template.Selector, Template: template.Template}},
		"custom resource": w.thing("scaled"),
	} {
		w.put("main", o, "42")
		replicas := int32(1) // each write changes something
		for token, want := range map[string]fence.Reason{"": fence.Unstamped, "41": fence.StaleToken, "42": passes} {
			c := w.as(token)
			replicas++
			w.expect(kind+", PATCH with token "+token, c.SubResource("scale").Patch(w.Context(), o.DeepCopyObject().(crclient.Object),
				crclient.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, replicas))), want)
			replicas++
			var scale crclient.Object = &autoscalingv1.Scale{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "scaled"}, Spec: autoscalingv1.ScaleSpec{Replicas: replicas}}
			if _, ok := o.(*unstructured.Unstructured); ok {
				scale = &unstructured.Unstructured{Object: map[string]any{"apiVersion": "autoscaling/v1", "kind": "Scale",
					"metadata": map[string]any{"namespace": w.namespace, "name": "scaled"}, "spec": map[string]any{"replicas": int64(replicas)}}}
			}
			w.expect(kind+", PUT with token "+token, c.SubResource("scale").Update(w.Context(), o.DeepCopyObject().(crclient.Object), crclient.WithSubResourceBody(scale)), want)
		}
	}
}

// statusWrites writes a status with these annotations in the three ways there
// are.
func (w *workshop) statusWrites(o crclient.Object, c crclient.Client, annotations map[string]any) map[string]error {
	w.Helper()
	meta := map[string]any{"namespace": o.GetNamespace(), "name": o.GetName()}
	if annotations != nil {
		meta["annotations"] = annotations
	}
	n := time.Now().UnixNano() % 1_000_000 // so that each write changes something
	status := func() map[string]any { n++; return map[string]any{"observedGeneration": n} }
	target := func() crclient.Object { return o.DeepCopyObject().(crclient.Object) }
	gvk, err := w.Admin.GroupVersionKindFor(o)
	w.must(err)
	u := &unstructured.Unstructured{}
	u.SetGroupVersionKind(gvk)
	w.must(w.Admin.Get(w.Context(), crclient.ObjectKeyFromObject(o), u))
	u.Object["status"] = status()
	all := u.GetAnnotations()
	for name, value := range annotations {
		all[name] = value.(string)
	}
	u.SetAnnotations(all)
	applied := &unstructured.Unstructured{Object: map[string]any{"metadata": meta, "status": status()}}
	applied.SetGroupVersionKind(gvk)
	return map[string]error{
		"PUT":   c.Status().Update(w.Context(), u),
		"patch": c.Status().Patch(w.Context(), target(), crclient.RawPatch(types.MergePatchType, raw(map[string]any{"metadata": meta, "status": status()}))),
		"apply": c.Status().Apply(w.Context(), crclient.ApplyConfigurationFromUnstructured(applied), crclient.FieldOwner("writer"), crclient.ForceOwnership),
	}
}

func (w *workshop) statusKept() {
	o := w.put("main", w.deployment("status"), "42")
	stamp := func(token, id string) map[string]any {
		return map[string]any{fence.AnnotationToken: token, fence.AnnotationWriteID: id}
	}
	for what, c := range map[string]struct {
		by          string
		annotations map[string]any
		want        fence.Reason
	}{
		"nothing presented":                            {"", nil, fence.Unstamped},
		"the token by header":                          {"42", nil, passes},
		"an old one by header":                         {"41", nil, fence.StaleToken},
		"an old one by annotation":                     {"", stamp("41", "late"), fence.StaleToken},
		"the record lowered":                           {"", map[string]any{fence.AnnotationToken: "41"}, fence.Unstamped},
		"the record lowered by who presents the token": {"42", map[string]any{fence.AnnotationToken: "41"}, fence.FenceRemoved},
	} {
		for way, err := range w.statusWrites(o, w.as(c.by), c.annotations) {
			w.expect(what+", "+way, err, c.want)
		}
	}
	// A write-id presents once.
	for _, way := range []string{"PUT", "patch", "apply"} {
		w.expect("the token by annotation, "+way, w.statusWrites(o, w.as(""), stamp("42", "by "+way))["PUT"], passes)
	}
	w.must(w.Admin.Get(w.Context(), crclient.ObjectKeyFromObject(o), o))
	if got := o.GetAnnotations()[fence.AnnotationToken]; got != "42" {
		w.Errorf("the record is %s", got)
	}
}

func (w *workshop) statusDropped() {
	o := w.put("main", w.thing("status"), "42")
	behind := w.put("main", w.thing("behind"), "41")
	for way, err := range w.statusWrites(o, w.as(""), map[string]any{fence.AnnotationToken: "42", fence.AnnotationWriteID: "dropped"}) {
		w.expect("the token by annotations that are dropped, "+way, err, fence.Unstamped)
		if way == "patch" && w.hints() && !strings.Contains(err.Error(), fence.ExtraToken) {
			w.Errorf("the message does not name the way that works: %v", err)
		}
	}
	for way, err := range w.statusWrites(o, w.as("41"), map[string]any{fence.AnnotationToken: "41"}) {
		w.expect("an old token, "+way, err, fence.StaleToken)
	}
	for way, err := range w.statusWrites(o, w.as("42"), map[string]any{fence.AnnotationToken: "7"}) {
		w.expect("the token, "+way, err, passes)
	}
	for way, err := range w.statusWrites(behind, w.as("42"), map[string]any{fence.AnnotationToken: "42"}) {
		w.expect("a token that is not recorded, "+way, err, fence.NotRecorded)
	}
	w.must(w.Admin.Get(w.Context(), crclient.ObjectKeyFromObject(o), o))
	if got := o.GetAnnotations()[fence.AnnotationToken]; got != "42" {
		w.Errorf("the record is %s", got)
	}
}

// hints tells whether the webhook words what is unstamped.
func (w *workshop) hints() bool { return len(w.Webhook.ValidatingWebhooks) > 0 }

// label is taken off by who owned it in an apply, and by a patch.
func (w *workshop) label() {
	manifest := func(guarded bool) *unstructured.Unstructured {
		u := w.thing("labelled").(*unstructured.Unstructured)
		if guarded {
			u.SetLabels(map[string]string{fence.LabelLease: "main"})
			u.SetAnnotations(map[string]string{fence.AnnotationToken: "42"})
		}
		return u
	}
	apply := func(c crclient.Client, guarded bool) error {
		return c.Apply(w.Context(), crclient.ApplyConfigurationFromUnstructured(manifest(guarded)), crclient.FieldOwner("git"), crclient.ForceOwnership)
	}
	w.must(apply(w.User(w.T, "system:serviceaccount:kube-system:generic-garbage-collector", "system:masters"), true))
	for who, token := range map[string]string{"nobody": "", "the holder": "42"} {
		w.expect(who+" applies a manifest that has lost the label", apply(w.as(token), false), fence.FenceRemoved)
		w.expect(who+" patches it away", w.as(token).Patch(w.Context(), manifest(false),
			crclient.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"metadata":{"labels":{%q:null}}}`, fence.LabelLease))), fence.FenceRemoved)
	}
	now := manifest(false)
	w.must(w.Admin.Get(w.Context(), crclient.ObjectKeyFromObject(now), now))
	if now.GetLabels()[fence.LabelLease] != "main" || now.GetAnnotations()[fence.AnnotationToken] != "42" {
		w.Errorf("it has labels %v and annotations %v", now.GetLabels(), now.GetAnnotations())
	}
}

func (w *workshop) finalizer(policy bool) {
	lease := w.issue("going")
	o := w.thing("going")
	o.SetFinalizers([]string{"example.com/keep", "example.com/also"})
	w.put("going", o, "42")
	if policy {
		w.await("the policies know the lease", func() bool {
			return reasonOf(crclient.NewDryRunClient(w.as("41")).Delete(w.Context(), o)) == fence.StaleToken
		})
	}
	w.expect("the holder decides", w.as("42").Patch(w.Context(), o, crclient.RawPatch(types.MergePatchType,
		fmt.Appendf(nil, `{"metadata":{"annotations":{%q:"42"}}}`, fence.AnnotationDeleteToken))), passes)
	w.must(w.Admin.Delete(w.Context(), lease))
	person := w.as("")
	w.expect("anybody deletes it", person.Delete(w.Context(), o), passes)
	patch := func(body string) error {
		return person.Patch(w.Context(), o.DeepCopyObject().(crclient.Object), crclient.RawPatch(types.MergePatchType, []byte(body)))
	}
	if err := patch(`{"metadata":{"finalizers":["example.com/also"]},"spec":{"replicas":7}}`); err == nil {
		w.Error("a write passes as the end of a deletion")
	}
	w.expect("a finalizer taken off with the lease gone", patch(`{"metadata":{"finalizers":["example.com/also"]}}`), passes)
	w.expect("the last one taken off", patch(`{"metadata":{"finalizers":[]}}`), passes)
	if err := w.Admin.Get(w.Context(), crclient.ObjectKeyFromObject(o), o); !apierrors.IsNotFound(err) {
		w.Errorf("it is still there: %v", err)
	}
}
