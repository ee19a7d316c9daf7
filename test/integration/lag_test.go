package integration

import (
	"fmt"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	fenceclient "github.com/fencedlease/fencedlease/client"
	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/internal/controlplane"
	"github.com/fencedlease/fencedlease/test/env"
)

// TestWebhookThatLags: the webhook learns of leases, and of their tokens, half
// a minute late. Nobody who is right is refused for that, and a superseded
// holder gets through only where the contract says so: to an object of a kind
// that is not sealed, and that the new holder has not touched.
func TestWebhookThatLags(t *testing.T) {
	t.Parallel()
	const lag = 30 * time.Second
	e := env.Start(t, env.Options{Webhook: true})
	e.StopManagers()
	start(t, e, func(o *env.Options) { o.Operator, o.Webhook = true, false })
	e.Grant(t, "", controlplane.OperatorUser, rule("", "configmaps", "list", "patch"))
	spec := long()
	spec.Seal = &v1alpha1.Seal{Resources: []v1alpha1.SealedResource{{Resource: "configmaps"}}, TimeoutSeconds: 10}
	old := newWorld(t, e, spec)
	old.claim("a", nil)
	a := old.awaitReason("a", v1alpha1.ReasonGranted)
	// It lists the old lease, with the token of a, and hears of nothing since.
	webhook := start(t, e, func(o *env.Options) {
		o.Manager = func(m *ctrl.Options) { lateInformers(m, "fencedleases", lag) }
	})
	if _, err := webhook.GetCache().GetInformer(t.Context(), &v1alpha1.FencedLease{}); err != nil {
		t.Fatal(err)
	}
	began := time.Now()

	fresh := newWorld(t, e, long())
	fresh.claim("first", nil)
	first := fresh.awaitReason("first", v1alpha1.ReasonGranted)
	for _, o := range fresh.guarded(first) {
		fresh.expect("a new lease's first write", fresh.as(first).Create(t.Context(), o), "")
	}

	for _, o := range old.guarded(a) {
		old.expect("a's create", old.as(a).Create(t.Context(), o), "")
	}
	old.release(a)
	old.claim("b", nil)
	b := old.awaitReason("b", v1alpha1.ReasonGranted)
	for name, write := range old.paths() {
		want := fence.StaleToken
		if name == "patch of what b has not touched" {
			want = "" // within the promised window
		}
		old.expect(name+" by a", write(old.as(a), a), want)
		switch name {
		case "eviction", "delete": // what goes is gone
		default:
			old.expect(name+" by b", write(old.as(b), b), "")
			old.expect(name+" by a afterwards", write(old.as(a), a), fence.StaleToken)
		}
	}
	if took := time.Since(began); took > lag {
		t.Fatalf("it took %s, more than the lag", took)
	}
}

// as gives an administrator's client that presents a claim's token by header.
func (w *world) as(c *v1alpha1.LeaseClaim) client.Client {
	w.Helper()
	return w.Impersonating(w, "worker", map[string][]string{fence.ExtraToken: {strconv.FormatInt(c.Status.Token, 10)}})
}

func (w *world) expect(what string, err error, want fence.Reason) {
	w.Helper()
	if reason, _ := fenceclient.Reason(err); reason != want || want == "" && err != nil {
		w.Errorf("%s: %v, want %q", what, err, want)
	}
}

func (w *world) meta(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: w.namespace, Name: name, Labels: map[string]string{fence.LabelLease: w.name, "app": "web"}}
}

// guarded are objects of the lease that a claim's holder may create: of a sealed
// kind, with a scale, and to be evicted.
func (w *world) guarded(c *v1alpha1.LeaseClaim) []client.Object {
	meta := func(name string) metav1.ObjectMeta {
		m := w.meta(name)
		m.Annotations = map[string]string{fence.AnnotationToken: strconv.FormatInt(c.Status.Token, 10)}
		return m
	}
	template := corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "registry.example.com/c:1"}}}
	labels := map[string]string{"app": "web"}
	deployment := func(name string) client.Object {
		return &appsv1.Deployment{ObjectMeta: meta(name), Spec: appsv1.DeploymentSpec{
			Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: template},
		}}
	}
	return []client.Object{
		&corev1.ConfigMap{ObjectMeta: meta("sealed")}, &corev1.Pod{ObjectMeta: meta("evicted"), Spec: template},
		deployment("patched"), deployment("scaled"), deployment("deleted"),
	}
}

// paths are writes with a client, and a claim's token recorded where the path
// records.
func (w *world) paths() map[string]func(client.Client, *v1alpha1.LeaseClaim) error {
	patch := func(o client.Object) func(client.Client, *v1alpha1.LeaseClaim) error {
		return func(c client.Client, claim *v1alpha1.LeaseClaim) error {
			return c.Patch(w.Context(), o, client.RawPatch(types.MergePatchType,
				fmt.Appendf(nil, `{"metadata":{"annotations":{%q:"%d","by":%q}}}`, fence.AnnotationToken, claim.Status.Token, claim.Name)))
		}
	}
	scaled := &appsv1.Deployment{ObjectMeta: w.meta("scaled")}
	var replicas atomic.Int32 // a write that changes nothing passes
	replicas.Store(1)
	return map[string]func(client.Client, *v1alpha1.LeaseClaim) error{
		"patch of what b has not touched": patch(&appsv1.Deployment{ObjectMeta: w.meta("patched")}),
		"patch of a sealed kind":          patch(&corev1.ConfigMap{ObjectMeta: w.meta("sealed")}),
		"scale": func(c client.Client, claim *v1alpha1.LeaseClaim) error {
			if claim.Name == "b" { // what cannot record asks for the record first
				if err := patch(scaled)(c, claim); err != nil {
					return err
				}
			}
			return c.SubResource("scale").Update(w.Context(), scaled, client.WithSubResourceBody(&autoscalingv1.Scale{
				ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: scaled.Name}, Spec: autoscalingv1.ScaleSpec{Replicas: replicas.Add(1)}}))
		},
		"eviction": func(c client.Client, _ *v1alpha1.LeaseClaim) error {
			return c.SubResource("eviction").Create(w.Context(), &corev1.Pod{ObjectMeta: w.meta("evicted")}, &policyv1.Eviction{})
		},
		"delete": func(c client.Client, _ *v1alpha1.LeaseClaim) error {
			return c.Delete(w.Context(), &appsv1.Deployment{ObjectMeta: w.meta("deleted")})
		},
	}
}
