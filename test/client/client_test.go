// Package client tests the client on a real API server with everything
// installed.
package client

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	appsv1ac "k8s.io/client-go/applyconfigurations/apps/v1"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	crclient "sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/client"
	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/test/env"
)

func TestMain(m *testing.M) { os.Exit(env.Main(m)) }

var everything = env.Shared(env.Options{Operator: true, Webhook: true, Policy: true})

// writer is an account with the least that the client needs to hold a lease
// and to write.
func writer(t *testing.T, e *env.Environment, namespace, name string) *rest.Config {
	t.Helper()
	e.Grant(t, namespace, name,
		rbacv1.PolicyRule{APIGroups: []string{fence.Group}, Resources: []string{"fencedleases"}, Verbs: []string{"get"}},
		rbacv1.PolicyRule{APIGroups: []string{fence.Group}, Resources: []string{"leaseclaims"}, Verbs: []string{"create", "get", "list", "watch", "patch", "delete"}},
		rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"configmaps", "pods", "pods/eviction"}, Verbs: []string{"*"}},
		rbacv1.PolicyRule{APIGroups: []string{"apps"}, Resources: []string{"deployments", "deployments/scale", "deployments/status"}, Verbs: []string{"*"}},
		rbacv1.PolicyRule{APIGroups: []string{"example.com"}, Resources: []string{"widgets", "widgets/status"}, Verbs: []string{"*"}})
	return e.UserConfig(t, name)
}

// worker is a writer that may present tokens by header.
func worker(t *testing.T, e *env.Environment, namespace, name string) *rest.Config {
	t.Helper()
	cfg := writer(t, e, namespace, name)
	e.Grant(t, "", name,
		rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"users"}, ResourceNames: []string{name}, Verbs: []string{"impersonate"}},
		rbacv1.PolicyRule{APIGroups: []string{"authentication.k8s.io"}, Resources: []string{"userextras/" + fence.ExtraToken}, Verbs: []string{"impersonate"}})
	return cfg
}

func makeLease(t *testing.T, e *env.Environment, namespace string, seconds int32) {
	t.Helper()
	lease := &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "main"}, Spec: v1alpha1.FencedLeaseSpec{LeaseDurationSeconds: seconds}}
	if err := e.Admin.Create(t.Context(), lease); err != nil {
		t.Fatal(err)
	}
}

func acquire(t *testing.T, cfg *rest.Config, namespace, identity string, opts ...client.Option) *client.Held {
	t.Helper()
	held, err := client.Acquire(t.Context(), cfg, namespace, "main", append([]client.Option{client.WithIdentity(identity)}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = held.Release(context.Background()) })
	return held
}

// stamped gives a client whose writes present the holder's token.
func stamped(t *testing.T, e *env.Environment, cfg *rest.Config, holder client.Holder) crclient.Client {
	t.Helper()
	cfg, err := client.Config(t.Context(), cfg, holder)
	if err != nil {
		t.Fatal(err)
	}
	c, err := crclient.New(cfg, crclient.Options{Scheme: e.Scheme})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func guardedDeployment(namespace, name string) *appsv1.Deployment {
	labels := map[string]string{"app": name}
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{fence.LabelLease: "main"}},
		Spec: appsv1.DeploymentSpec{
			Replicas: new(int32(1)), Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "registry.example.com/c:1"}}}},
		},
	}
}

// widget is an object of a kind whose status keeps no annotations.
func widget(namespace string) *unstructured.Unstructured {
	o := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "example.com/v1", "kind": "Widget"}}
	o.SetNamespace(namespace)
	o.SetName("w")
	return o
}

func installWidgets(t *testing.T, e *env.Environment) {
	t.Helper()
	object := apiextensionsv1.JSONSchemaProps{Type: "object", XPreserveUnknownFields: new(true)}
	_, err := envtest.InstallCRDs(e.Config, envtest.CRDInstallOptions{CRDs: []*apiextensionsv1.CustomResourceDefinition{{
		ObjectMeta: metav1.ObjectMeta{Name: "widgets.example.com"},
		Spec: apiextensionsv1.CustomResourceDefinitionSpec{
			Group: "example.com", Scope: apiextensionsv1.NamespaceScoped,
			Names: apiextensionsv1.CustomResourceDefinitionNames{Plural: "widgets", Singular: "widget", Kind: "Widget", ListKind: "WidgetList"},
			Versions: []apiextensionsv1.CustomResourceDefinitionVersion{{
				Name: "v1", Served: true, Storage: true,
				Schema:       &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: &object},
				Subresources: &apiextensionsv1.CustomResourceSubresources{Status: &apiextensionsv1.CustomResourceSubresourceStatus{}},
			}},
		},
	}}})
	if err != nil {
		t.Fatal(err)
	}
}

// TestEveryWriteIsStamped: a plain client over the stamped configuration
// writes on every path, by header or, where the account may not impersonate
// itself, by annotations; after a hand-over the former holder is rejected on
// every one of them. What annotations cannot present says which rule is
// missing.
func TestEveryWriteIsStamped(t *testing.T) {
	e := everything(t)
	installWidgets(t, e)
	byHeaderAlone := map[string]bool{"scale": true, "status of a custom resource": true}
	var changing atomic.Int64
	changing.Store(100) // no value that a field has by default: a write that changes nothing passes
	type step func(ctx context.Context, c crclient.Client, namespace string) error
	deployment := func(namespace string) *appsv1.Deployment {
		return &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "app"}}
	}
	patch := func(kind types.PatchType, body string) step {
		return func(ctx context.Context, c crclient.Client, namespace string) error {
			// Another value each time: a write that changes nothing passes.
			return c.Patch(ctx, deployment(namespace), crclient.RawPatch(kind, fmt.Appendf(nil, body, changing.Add(1))))
		}
	}
	steps := map[string]step{
		"merge patch":     patch(types.MergePatchType, `{"spec":{"replicas":%d}}`),
		"strategic patch": patch(types.StrategicMergePatchType, `{"spec":{"replicas":%d}}`),
		"JSON patch":      patch(types.JSONPatchType, `[{"op":"replace","path":"/spec/replicas","value":%d}]`),
		"get, modify, update": func(ctx context.Context, c crclient.Client, namespace string) error {
			d := deployment(namespace)
			if err := c.Get(ctx, crclient.ObjectKeyFromObject(d), d); err != nil {
				return err
			}
			d.Spec.MinReadySeconds++
			return c.Update(ctx, d)
		},
		"server-side apply": func(ctx context.Context, c crclient.Client, namespace string) error {
			u := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "apps/v1", "kind": "Deployment",
				"metadata": map[string]any{"namespace": namespace, "name": "app"}, "spec": map[string]any{"revisionHistoryLimit": changing.Add(1)}}}
			return c.Apply(ctx, crclient.ApplyConfigurationFromUnstructured(u), crclient.FieldOwner("app"), crclient.ForceOwnership)
		},
		"status": func(ctx context.Context, c crclient.Client, namespace string) error {
			return c.Status().Patch(ctx, deployment(namespace), crclient.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"status":{"observedGeneration":%d}}`, changing.Add(1))))
		},
		"scale": func(ctx context.Context, c crclient.Client, namespace string) error {
			scale := &autoscalingv1.Scale{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "app"}, Spec: autoscalingv1.ScaleSpec{Replicas: int32(changing.Add(1))}}
			return c.SubResource("scale").Update(ctx, deployment(namespace), crclient.WithSubResourceBody(scale))
		},
		"status of a custom resource": func(ctx context.Context, c crclient.Client, namespace string) error {
			return c.Status().Patch(ctx, widget(namespace), crclient.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"status":{"seen":%d}}`, changing.Add(1))))
		},
		"create by generateName": func(ctx context.Context, c crclient.Client, namespace string) error {
			return c.Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, GenerateName: "g-", Labels: map[string]string{fence.LabelLease: "main"}}})
		},
		"delete": func(ctx context.Context, c crclient.Client, namespace string) error {
			return c.Delete(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "to-delete"}})
		},
		"delete by eviction": func(ctx context.Context, c crclient.Client, namespace string) error {
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "to-evict"}}
			return c.SubResource("eviction").Create(ctx, pod, &policyv1.Eviction{ObjectMeta: pod.ObjectMeta})
		},
		"delete all of": func(ctx context.Context, c crclient.Client, namespace string) error {
			return c.DeleteAllOf(ctx, &corev1.ConfigMap{}, crclient.InNamespace(namespace), crclient.MatchingLabels{"in": "collection"})
		},
		"metadata alone": func(ctx context.Context, c crclient.Client, namespace string) error {
			m := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "app"}}
			m.SetGroupVersionKind(appsv1.SchemeGroupVersion.WithKind("Deployment"))
			return c.Patch(ctx, m, crclient.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"metadata":{"annotations":{"n":"%d"}}}`, changing.Add(1))))
		},
		"typed apply configuration": func(ctx context.Context, c crclient.Client, namespace string) error {
			d := appsv1ac.Deployment("app", namespace).WithSpec(appsv1ac.DeploymentSpec().WithProgressDeadlineSeconds(int32(1000 + changing.Add(1))))
			return c.Apply(ctx, d, crclient.FieldOwner("typed"), crclient.ForceOwnership)
		},
		"an unguarded object": func(ctx context.Context, c crclient.Client, namespace string) error {
			return c.Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, GenerateName: "u-"}})
		},
	}
	for way, account := range map[string]func(*testing.T, *env.Environment, string, string) *rest.Config{"header": worker, "annotations": writer} {
		for name, do := range steps {
			t.Run(name+" by "+way, func(t *testing.T) {
				t.Parallel()
				namespace := e.Namespace(t)
				makeLease(t, e, namespace, 60)
				cfg := account(t, e, namespace, "worker-of-"+namespace)
				a := acquire(t, cfg, namespace, "a")
				guarded := widget(namespace)
				guarded.SetLabels(map[string]string{fence.LabelLease: "main"})
				for _, o := range []crclient.Object{
					guardedDeployment(namespace, "app"), guarded,
					&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "to-delete", Labels: map[string]string{fence.LabelLease: "main"}}},
					&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "to-evict", Labels: map[string]string{fence.LabelLease: "main"}},
						Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "registry.example.com/c:1"}}}},
					&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "one", Labels: map[string]string{fence.LabelLease: "main", "in": "collection"}}},
					&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "two", Labels: map[string]string{fence.LabelLease: "main", "in": "collection"}}},
					&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "plain", Labels: map[string]string{"in": "collection"}}},
				} {
					if err := e.Admin.Create(t.Context(), o); err != nil {
						t.Fatal(err)
					}
				}
				if way == "annotations" && byHeaderAlone[name] {
					err := do(t.Context(), stamped(t, e, cfg, a), namespace)
					if reason, _ := client.Reason(err); reason != fence.Unstamped || !strings.Contains(err.Error(), "kubectl fence rbac worker-of-"+namespace) {
						t.Errorf("the holder: %v, want a rejection that names the rule", err)
					}
					return
				}
				if !strings.HasPrefix(name, "delete") {
					if err := do(t.Context(), stamped(t, e, cfg, a), namespace); err != nil {
						t.Fatalf("the holder: %v", err)
					}
				}
				old := client.Static(a.Lease(), a.Token())
				if err := a.Release(t.Context()); err != nil {
					t.Fatal(err)
				}
				b := acquire(t, cfg, namespace, "b")
				err := do(t.Context(), stamped(t, e, cfg, old), namespace)
				if name == "an unguarded object" {
					if err != nil {
						t.Errorf("with a former token: %v", err)
					}
				} else if !client.IsStale(err) {
					t.Errorf("the former holder: %v, want a stale rejection", err)
				}
				if err := do(t.Context(), stamped(t, e, cfg, b), namespace); err != nil {
					t.Errorf("the new holder: %v", err)
				}
				if err := do(t.Context(), stamped(t, e, cfg, a), namespace); !errors.Is(err, fence.ErrLost) {
					t.Errorf("after the release: %v, want that nothing was sent", err)
				}
			})
		}
	}
}

// warnings are what a configuration's handler was told.
type warnings struct{ texts []string }

func (w *warnings) HandleWarningHeader(_ int, _, text string) { w.texts = append(w.texts, text) }

// TestPresentingByAnnotations: without the right to impersonate oneself a
// client says so once, leaves what no lease guards as it is, commits nothing
// by a write that is sent again, and can send it again where somebody else
// changed the object in between.
func TestPresentingByAnnotations(t *testing.T) {
	e := everything(t)
	namespace := e.Namespace(t)
	makeLease(t, e, namespace, 60)
	cfg := writer(t, e, namespace, "writer-of-"+namespace)
	held := acquire(t, cfg, namespace, "a")
	told := &warnings{}
	cfg.WarningHandler = told
	c := stamped(t, e, cfg, held)
	if len(told.texts) != 1 || !strings.Contains(told.texts[0], "kubectl fence rbac") {
		t.Errorf("told %q", told.texts)
	}
	for name, labels := range map[string]map[string]string{"plain": nil, "guarded": {fence.LabelLease: "main"}} {
		t.Run(name, func(t *testing.T) {
			key := metav1.ObjectMeta{Namespace: namespace, Name: name}
			steps := map[string]func() error{
				"an apply": func() error {
					show := corev1ac.ConfigMap(name, namespace).WithLabels(labels).WithData(map[string]string{"a": "1"})
					return c.Apply(t.Context(), show, crclient.FieldOwner("app"), crclient.ForceOwnership)
				},
				"a merge patch": func() error {
					return c.Patch(t.Context(), &corev1.ConfigMap{ObjectMeta: key}, crclient.RawPatch(types.MergePatchType, []byte(`{"data":{"b":"1"}}`)))
				},
				"a JSON patch": func() error {
					return c.Patch(t.Context(), &corev1.ConfigMap{ObjectMeta: key}, crclient.RawPatch(types.JSONPatchType, []byte(`[{"op":"add","path":"/data/c","value":"1"}]`)))
				},
				"get, update": func() error {
					o := &corev1.ConfigMap{}
					if err := c.Get(t.Context(), crclient.ObjectKey{Namespace: namespace, Name: name}, o); err != nil {
						return err
					}
					o.Data["d"] = "1"
					return c.Update(t.Context(), o)
				},
			}
			for _, step := range []string{"an apply", "a merge patch", "a JSON patch", "get, update"} {
				var versions []string
				for range 3 {
					if err := steps[step](); err != nil {
						t.Fatalf("%s: %v", step, err)
					}
					versions = append(versions, configMap(t, e, namespace, name).ResourceVersion)
				}
				if versions[1] != versions[2] {
					t.Errorf("%s, sent again, was committed: versions %v", step, versions)
				}
				if labels == nil && len(configMap(t, e, namespace, name).Annotations) > 0 {
					t.Errorf("%s left annotations: %v", step, configMap(t, e, namespace, name).Annotations)
				}
				// The control plane changes it, and leaves the write-id.
				controller := e.User(t, "system:kube-controller-manager", "system:masters")
				if err := controller.Patch(t.Context(), &corev1.ConfigMap{ObjectMeta: key}, crclient.RawPatch(types.MergePatchType, []byte(`{"data":{"a":"0","b":"0","c":"0","d":"0"}}`))); err != nil {
					t.Fatal(err)
				}
				if err := steps[step](); err != nil {
					t.Errorf("%s after another's change: %v", step, err)
				}
			}
		})
	}
}

func configMap(t *testing.T, e *env.Environment, namespace, name string) *corev1.ConfigMap {
	t.Helper()
	o := &corev1.ConfigMap{}
	if err := e.Admin.Get(t.Context(), types.NamespacedName{Namespace: namespace, Name: name}, o); err != nil {
		t.Fatal(err)
	}
	return o
}

// elect runs client-go's elector on a lock until ctx ends.
func elect(ctx context.Context, t *testing.T, lock resourcelock.Interface, leading func(context.Context)) <-chan struct{} {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		leaderelection.RunOrDie(ctx, leaderelection.LeaderElectionConfig{
			Lock: lock, LeaseDuration: 3 * time.Second, RenewDeadline: 2 * time.Second, RetryPeriod: 250 * time.Millisecond, ReleaseOnCancel: true,
			Callbacks: leaderelection.LeaderCallbacks{OnStartedLeading: leading, OnStoppedLeading: func() {}},
		})
	}()
	return done
}

// TestElectorOnALock: client-go's elector leads by the lease, hands over when
// it is cancelled, and the former leader's token is worth nothing.
func TestElectorOnALock(t *testing.T) {
	e := everything(t)
	namespace := e.Namespace(t)
	makeLease(t, e, namespace, 3)
	cfg := worker(t, e, namespace, "elected")
	if err := e.Admin.Create(t.Context(), guardedDeployment(namespace, "app")); err != nil {
		t.Fatal(err)
	}
	tokens := make(chan fence.Token, 2)
	lead := func(lock *client.Lock) func(context.Context) {
		return func(ctx context.Context) {
			token, err := lock.Present()
			if err != nil {
				t.Errorf("leads without a token: %v", err)
			}
			tokens <- token
			<-ctx.Done()
		}
	}
	a, b := client.NewLock(cfg, namespace, "main", client.WithIdentity("a")), client.NewLock(cfg, namespace, "main", client.WithIdentity("b"))
	ctxA, stopA := context.WithCancel(t.Context())
	ctxB, stopB := context.WithCancel(t.Context())
	doneA := elect(ctxA, t, a, lead(a))
	first := <-tokens
	doneB := elect(ctxB, t, b, lead(b))
	old := client.Static(a.Lease(), first)
	// The second leads only after the first has gone, beyond several durations.
	select {
	case token := <-tokens:
		t.Errorf("two lead, with %s and %s", first, token)
	case <-time.After(4 * time.Second):
	}
	stopA()
	<-doneA
	second := <-tokens
	if second <= first {
		t.Errorf("token %s after %s", second, first)
	}
	c, err := b.NewClient(cfg, crclient.Options{Scheme: e.Scheme})
	if err != nil {
		t.Fatal(err)
	}
	d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "app"}}
	pause := crclient.RawPatch(types.MergePatchType, []byte(`{"spec":{"paused":true}}`))
	if err := c.Patch(t.Context(), d, pause); err != nil {
		t.Errorf("the leader: %v", err)
	}
	if err := stamped(t, e, cfg, old).Patch(t.Context(), d, crclient.RawPatch(types.MergePatchType, []byte(`{"spec":{"paused":false}}`))); !client.IsStale(err) {
		t.Errorf("the former leader: %v", err)
	}
	stopB()
	<-doneB
}
