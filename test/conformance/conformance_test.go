// Package conformance holds the table of write paths: what each installation
// of the fence answers to each kind of write, on a real API server.
package conformance

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	crclient "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/client"
	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/test/env"
)

// cell is one kind of write on one path.
type cell struct{ path, kind string }

// The rows and columns of the table.
var (
	paths = []string{"create", "update", "patch", "apply", "status", "scale", "delete", "deletecollection", "eviction", "ephemeralcontainers", "resize"}
	kinds = []string{"fresh", "equal", "stale by record", "stale by lease", "unissued", "malformed", "unstamped", "no lease", "moved label", "mark ahead", "dry-run", "dry-run stale", "bypass"}
)

const (
	passes = fence.Reason("passes")
	// none is where the path has no such write.
	none = fence.Reason("-")
)

// want is what an installation with the webhook answers.
func want(c cell) fence.Reason {
	records := c.path == "create" || c.path == "update" || c.path == "patch" || c.path == "apply" || c.path == "status"
	switch c.kind {
	case "fresh":
		if !records {
			return fence.NotRecorded
		}
	case "equal":
		if c.path == "create" {
			return none
		}
	case "stale by record", "stale by lease", "dry-run stale":
		return fence.StaleToken
	case "unissued":
		if !records {
			return fence.NotRecorded
		}
		return fence.UnissuedToken
	case "malformed":
		return fence.MalformedToken
	case "unstamped":
		return fence.Unstamped
	case "no lease":
		return fence.UnknownLease
	case "moved label":
		if c.path == "status" {
			return passes // the API server keeps the label that is stored
		}
		if !records || c.path == "create" {
			return none
		}
		return fence.FenceRemoved
	case "mark ahead":
		if !records {
			return none
		}
		return fence.FenceRemoved
	}
	return passes
}

// wantOfPolicy is what the policies alone answer: what carries no label is out
// of their sight.
func wantOfPolicy(c cell) fence.Reason {
	w := want(c)
	if (c.path == "scale" || c.path == "eviction") && w != none {
		return passes
	}
	return w
}

func TestConformance(t *testing.T) {
	for _, installation := range []struct {
		name string
		opts env.Options
		want func(cell) fence.Reason
	}{
		{"webhook only", env.Options{Webhook: true}, want},
		{"policy only", env.Options{Policy: true}, wantOfPolicy},
		{"webhook and policy", env.Options{Webhook: true, Policy: true}, want},
	} {
		t.Run(installation.name, func(t *testing.T) {
			in := prepare(t, env.Start(t, installation.opts), installation.opts.Policy)
			got := map[cell]fence.Reason{}
			for _, path := range paths {
				for _, kind := range kinds {
					c := cell{path, kind}
					expected := installation.want(c)
					if expected == none {
						got[c] = none
						continue
					}
					err := in.write(t.Context(), c)
					got[c] = reasonOf(err)
					if got[c] != expected {
						t.Errorf("%s, %s: got %v, want %s", path, kind, err, expected)
					}
					if kind == "moved label" && in.label(t, c) != c.name() {
						t.Errorf("%s moved the label", path)
					}
					if strings.HasPrefix(kind, "dry-run") && !in.untouched(t, c) {
						t.Errorf("%s, %s changed something", path, kind)
					}
				}
			}
			t.Logf("\n%s\n%s", installation.name, matrix(got))
		})
	}
}

func reasonOf(err error) fence.Reason {
	if err == nil {
		return passes
	}
	if reason, ok := client.Reason(err); ok {
		return reason
	}
	return fence.Reason(err.Error())
}

func matrix(got map[cell]fence.Reason) string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "\t"+strings.Join(kinds, "\t"))
	for _, path := range paths {
		row := []string{path}
		for _, kind := range kinds {
			row = append(row, string(got[cell{path, kind}]))
		}
		fmt.Fprintln(w, strings.Join(row, "\t"))
	}
	_ = w.Flush()
	return b.String()
}

// instance is one installation with an object, and a lease, for every cell.
type instance struct {
	*env.Environment
	namespace string
	writer    *rest.Config
	before    map[cell]string
}

func (c cell) name() string {
	return strings.ReplaceAll(strings.ReplaceAll(c.path+"-"+c.kind, " ", "-"), "_", "-")
}

// prepare makes what every cell needs: a lease whose current token is 42, and
// an object that records 41 or 42.
func prepare(t *testing.T, e *env.Environment, policy bool) *instance {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	in := &instance{Environment: e, namespace: e.Namespace(t), before: map[cell]string{}}
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: in.namespace}}
	must(e.Admin.Patch(t.Context(), ns, crclient.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"metadata":{"labels":{%q:"true"}}}`, fence.LabelNamespaceMark))))
	in.writer = e.UserConfig(t, "writer")
	e.Grant(t, in.namespace, "writer",
		rbacv1.PolicyRule{APIGroups: []string{"apps"}, Resources: []string{"*"}, Verbs: []string{"*"}},
		rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"pods", "pods/eviction", "pods/ephemeralcontainers", "pods/resize"}, Verbs: []string{"*"}},
		rbacv1.PolicyRule{APIGroups: []string{fence.Group}, Resources: []string{"fencedleases"}, Verbs: []string{fence.VerbBypass}})
	e.Grant(t, "", "writer", rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"users"}, Verbs: []string{"impersonate"}},
		rbacv1.PolicyRule{APIGroups: []string{"authentication.k8s.io"}, Resources: []string{"userextras/" + fence.ExtraToken, "userextras/" + fence.ExtraBypass}, Verbs: []string{"impersonate"}})
	// A principal of the control plane puts the objects there as they are.
	exempt := e.User(t, "system:serviceaccount:kube-system:generic-garbage-collector", "system:masters")
	issue := func(name string) {
		lease := &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: in.namespace, Name: name}}
		must(e.Admin.Create(t.Context(), lease))
		lease.Status.Token = 42
		lease.Status.Holder = &v1alpha1.Holder{ClaimName: "b", ClaimUID: "uid-b", Identity: "pod-b"}
		must(e.Admin.Status().Update(t.Context(), lease))
	}
	for _, path := range paths {
		for _, kind := range kinds {
			c := cell{path, kind}
			if kind != "no lease" {
				issue(c.name())
			}
			if path == "create" {
				continue
			}
			o := in.object(c)
			record := "42"
			if kind == "fresh" || kind == "stale by lease" {
				record = "41"
			}
			o.SetAnnotations(map[string]string{fence.AnnotationToken: record, fence.AnnotationWriteID: "first"})
			must(exempt.Create(t.Context(), o))
			in.before[c] = o.GetResourceVersion()
		}
	}
	issue("probe")
	probe := in.object(cell{"update", "probe"})
	probe.SetLabels(map[string]string{fence.LabelLease: "probe"})
	probe.SetAnnotations(map[string]string{fence.AnnotationToken: "41"})
	must(exempt.Create(t.Context(), probe))
	if policy {
		// The policies know every lease once they know the last one.
		tick := time.NewTicker(50 * time.Millisecond)
		defer tick.Stop()
		limit := time.After(30 * time.Second)
		for err := error(nil); reasonOf(err) != fence.StaleToken; err = in.write(t.Context(), cell{"update", "probe"}) {
			select {
			case <-tick.C:
			case <-limit:
				t.Fatalf("the policies do not know the lease table: %v", err)
			}
		}
	}
	return in
}

func (in *instance) object(c cell) crclient.Object {
	meta := metav1.ObjectMeta{Namespace: in.namespace, Name: c.name(), Labels: map[string]string{fence.LabelLease: c.name(), "cell": c.name()}}
	pod := corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "registry.example.com/c:1"}}}
	if c.path == "eviction" || c.path == "ephemeralcontainers" || c.path == "resize" {
		pod.Containers[0].Resources.Requests = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1")}
		return &corev1.Pod{ObjectMeta: meta, Spec: pod}
	}
	labels := map[string]string{"app": c.name()}
	return &appsv1.Deployment{ObjectMeta: meta, Spec: appsv1.DeploymentSpec{
		Replicas: new(int32(1)), Selector: &metav1.LabelSelector{MatchLabels: labels},
		Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: pod},
	}}
}

func (in *instance) untouched(t *testing.T, c cell) bool {
	t.Helper()
	o := in.object(c)
	err := in.Admin.Get(t.Context(), crclient.ObjectKeyFromObject(o), o)
	if c.path == "create" {
		return crclient.IgnoreNotFound(err) == nil && err != nil
	}
	return err == nil && o.GetResourceVersion() == in.before[c]
}

func (in *instance) label(t *testing.T, c cell) string {
	t.Helper()
	o := in.object(c)
	if err := in.Admin.Get(t.Context(), crclient.ObjectKeyFromObject(o), o); err != nil {
		t.Fatal(err)
	}
	return o.GetLabels()[fence.LabelLease]
}

// write sends the cell's write.
func (in *instance) write(ctx context.Context, c cell) error {
	token := map[string]string{"stale by record": "41", "stale by lease": "41", "dry-run stale": "41", "probe": "41", "unissued": "43", "malformed": "042", "unstamped": "", "bypass": ""}
	text, ok := token[c.kind]
	if !ok {
		text = "42"
	}
	cfg := rest.CopyConfig(in.writer)
	cfg.Impersonate = rest.ImpersonationConfig{UserName: "writer", Extra: map[string][]string{}}
	if text != "" {
		cfg.Impersonate.Extra[fence.ExtraToken] = []string{text}
	}
	if c.kind == "bypass" {
		cfg.Impersonate.Extra[fence.ExtraBypass] = []string{"incident 7"}
	}
	plain, err := crclient.New(cfg, crclient.Options{Scheme: in.Scheme})
	if err != nil {
		return err
	}
	w := plain
	if strings.HasPrefix(c.kind, "dry-run") {
		w = crclient.NewDryRunClient(plain)
	}
	// The body of a path that keeps annotations records what it presents.
	metadata := map[string]any{}
	if text != "" {
		metadata["annotations"] = map[string]any{fence.AnnotationToken: text}
	}
	if c.kind == "mark ahead" {
		metadata["annotations"] = map[string]any{fence.AnnotationToken: text, fence.AnnotationDeleteToken: "43"}
	}
	if c.kind == "moved label" {
		metadata["labels"] = map[string]any{fence.LabelLease: "update-equal"}
	}
	o := in.object(c)
	body := func(more map[string]any) map[string]any {
		more["metadata"] = metadata
		return more
	}
	patch := func(more map[string]any) crclient.Patch {
		return crclient.RawPatch(types.MergePatchType, raw(body(more)))
	}
	switch c.path {
	case "create":
		if text != "" {
			o.SetAnnotations(map[string]string{fence.AnnotationToken: text})
		}
		if c.kind == "mark ahead" {
			o.GetAnnotations()[fence.AnnotationDeleteToken] = "43"
		}
		return w.Create(ctx, o)
	case "update":
		d := &appsv1.Deployment{}
		if err := plain.Get(ctx, crclient.ObjectKeyFromObject(o), d); err != nil {
			return err
		}
		d.Spec.MinReadySeconds = 7
		if text != "" {
			d.Annotations[fence.AnnotationToken] = text
		}
		if c.kind == "mark ahead" {
			d.Annotations[fence.AnnotationDeleteToken] = "43"
		}
		if c.kind == "moved label" {
			d.Labels[fence.LabelLease] = "update-equal"
		}
		return w.Update(ctx, d)
	case "patch":
		return w.Patch(ctx, o, patch(map[string]any{"spec": map[string]any{"minReadySeconds": 7}}))
	case "apply":
		u := &unstructured.Unstructured{Object: body(map[string]any{"apiVersion": "apps/v1", "kind": "Deployment", "spec": map[string]any{"minReadySeconds": int64(7)}})}
		u.SetNamespace(in.namespace)
		u.SetName(c.name())
		return w.Apply(ctx, crclient.ApplyConfigurationFromUnstructured(u), crclient.FieldOwner("writer"), crclient.ForceOwnership)
	case "status":
		return w.Status().Patch(ctx, o, patch(map[string]any{"status": map[string]any{"observedGeneration": 7}}))
	case "scale":
		scale := &autoscalingv1.Scale{ObjectMeta: metav1.ObjectMeta{Namespace: in.namespace, Name: c.name()}, Spec: autoscalingv1.ScaleSpec{Replicas: 7}}
		return w.SubResource("scale").Update(ctx, o, crclient.WithSubResourceBody(scale))
	case "delete":
		return w.Delete(ctx, o)
	case "deletecollection":
		return w.DeleteAllOf(ctx, &appsv1.Deployment{}, crclient.InNamespace(in.namespace), crclient.MatchingLabels{"cell": c.name()})
	case "eviction":
		eviction := &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Namespace: in.namespace, Name: c.name()}}
		return w.SubResource("eviction").Create(ctx, o, eviction)
	case "ephemeralcontainers":
		// What an annotation says is dropped with it.
		return w.SubResource("ephemeralcontainers").Patch(ctx, o, crclient.RawPatch(types.StrategicMergePatchType,
			raw(body(map[string]any{"spec": map[string]any{"ephemeralContainers": []any{map[string]any{"name": "debug", "image": "registry.example.com/debug:1"}}}}))))
	case "resize":
		return w.SubResource("resize").Patch(ctx, o, crclient.RawPatch(types.StrategicMergePatchType,
			raw(body(map[string]any{"spec": map[string]any{"containers": []any{map[string]any{"name": "c", "resources": map[string]any{"requests": map[string]any{"cpu": "2"}}}}}}))))
	}
	return fmt.Errorf("no such path %q", c.path)
}

// raw gives JSON of plain maps.
func raw(o map[string]any) []byte {
	data, err := json.Marshal(o)
	if err != nil {
		panic(err)
	}
	return data
}
