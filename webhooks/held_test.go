package webhooks_test

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"sync"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/internal/controlplane"
)

// slowUser is whom the holding webhook holds.
const slowUser = "slow"

// holder is a validating webhook of the test's own beside the fence: it holds
// the first request of slowUser in a namespace until it is let go, so that the
// fence's verdict on it grows old inside the API server.
type holdingWebhook struct {
	mu   sync.Mutex
	held map[string]chan struct{} // by namespace
	seen map[string]chan struct{}
}

func (h *holdingWebhook) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	review := &admissionv1.AdmissionReview{}
	if err := json.NewDecoder(r.Body).Decode(review); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	h.mu.Lock()
	hold, seen := h.held[review.Request.Namespace], h.seen[review.Request.Namespace]
	delete(h.held, review.Request.Namespace)
	h.mu.Unlock()
	if hold != nil {
		close(seen)
		<-hold
	}
	review.Response = &admissionv1.AdmissionResponse{UID: review.Request.UID, Allowed: true}
	_ = json.NewEncoder(w).Encode(review)
}

// next holds the next request in a namespace: seen is closed once it is held,
// and closing hold lets it go.
func (h *holdingWebhook) next(namespace string) (seen <-chan struct{}, hold chan<- struct{}) {
	s, c := make(chan struct{}), make(chan struct{})
	h.mu.Lock()
	defer h.mu.Unlock()
	h.held[namespace], h.seen[namespace] = c, s
	return s, c
}

var holding = sync.OnceValue(func() *holdingWebhook {
	return &holdingWebhook{held: map[string]chan struct{}{}, seen: map[string]chan struct{}{}}
})

func startHolding(t *testing.T) *holdingWebhook {
	t.Helper()
	e, h := served(t), holding()
	certificate, err := tls.LoadX509KeyPair(filepath.Join(e.Webhook.LocalServingCertDir, "tls.crt"), filepath.Join(e.Webhook.LocalServingCertDir, "tls.key"))
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewUnstartedServer(h)
	server.TLS = &tls.Config{Certificates: []tls.Certificate{certificate}, MinVersion: tls.VersionTLS12}
	server.StartTLS()
	t.Cleanup(server.Close)
	url := server.URL + "/hold"
	configuration := &admissionregistrationv1.ValidatingWebhookConfiguration{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "holding-"},
		Webhooks: []admissionregistrationv1.ValidatingWebhook{{
			Name:                    "hold.example.com",
			ClientConfig:            admissionregistrationv1.WebhookClientConfig{URL: &url, CABundle: e.Webhook.LocalServingCAData},
			SideEffects:             new(admissionregistrationv1.SideEffectClassNone),
			AdmissionReviewVersions: []string{"v1"},
			TimeoutSeconds:          new(int32(30)),
			Rules: []admissionregistrationv1.RuleWithOperations{{
				Operations: []admissionregistrationv1.OperationType{admissionregistrationv1.OperationAll},
				Rule:       admissionregistrationv1.Rule{APIGroups: []string{"", "apps"}, APIVersions: []string{"*"}, Resources: []string{"configmaps", "deployments", "deployments/*", "pods", "pods/*"}},
			}},
			MatchConditions: []admissionregistrationv1.MatchCondition{{Name: "slow", Expression: "request.userInfo.username == '" + slowUser + "'"}},
		}},
	}
	if err := e.Admin.Create(t.Context(), configuration); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = e.Admin.Delete(context.Background(), configuration) })
	return h
}

// slow gives a client of slowUser that presents a token by header, or none.
func (s *scene) slow(token string) client.Client {
	s.Helper()
	var extra map[string][]string
	if token != "" {
		extra = map[string][]string{fence.ExtraToken: {token}}
	}
	return s.Impersonating(s, slowUser, extra)
}

func deployment(namespace, name string) *appsv1.Deployment {
	labels := map[string]string{"app": name}
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{fence.LabelLease: "main"}},
		Spec: appsv1.DeploymentSpec{
			Replicas: new(int32(1)),
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "registry.example.com/c:1"}}},
			},
		},
	}
}

func pod(namespace, name string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{fence.LabelLease: "main"}},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{
			Name: "c", Image: "registry.example.com/c:1", Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1")}},
		}}},
	}
}

// record brings an object's record to a token, by a patch of its metadata.
func (s *scene) record(o client.Object, token int64) {
	s.Helper()
	body := fmt.Sprintf(`{"metadata":{"annotations":{%q:"%d",%q:"r-%d"}}}`, fence.AnnotationToken, token, fence.AnnotationWriteID, token)
	s.must(s.Admin.Patch(s.Context(), o.DeepCopyObject().(client.Object), client.RawPatch(types.MergePatchType, []byte(body))))
}

// TestHeldInAdmission: a write with token 41 that the fence has let pass is
// held inside the API server while 42 is issued and recorded. It does not
// commit, on any path.
func TestHeldInAdmission(t *testing.T) {
	hold := startHolding(t)
	stamp := map[string]string{fence.AnnotationToken: "41", fence.AnnotationWriteID: "late"}
	configMap := func(s *scene) client.Object {
		return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: "held", Labels: map[string]string{fence.LabelLease: "main"}}}
	}
	deploy := func(s *scene) client.Object { return deployment(s.namespace, "held") }
	work := func(s *scene) client.Object { return pod(s.namespace, "held") }
	raw := func(kind types.PatchType, body string) func(context.Context, *scene, client.Client, client.Object) error {
		return func(ctx context.Context, _ *scene, c client.Client, o client.Object) error {
			return c.Patch(ctx, o, client.RawPatch(kind, []byte(body)))
		}
	}
	for name, c := range map[string]struct {
		object func(*scene) client.Object
		write  func(context.Context, *scene, client.Client, client.Object) error
	}{
		"merge patch":     {configMap, raw(types.MergePatchType, `{"data":{"by":"41"}}`)},
		"JSON patch":      {configMap, raw(types.JSONPatchType, `[{"op":"add","path":"/data","value":{"by":"41"}}]`)},
		"strategic patch": {configMap, raw(types.StrategicMergePatchType, `{"data":{"by":"41"}}`)},
		"annotations": {configMap, raw(types.MergePatchType,
			`{"metadata":{"annotations":{"`+fence.AnnotationToken+`":"41","`+fence.AnnotationWriteID+`":"late"}},"data":{"by":"41"}}`)},
		"server-side apply": {configMap, func(ctx context.Context, s *scene, c client.Client, _ client.Object) error {
			u := &unstructured.Unstructured{Object: map[string]any{
				"apiVersion": "v1", "kind": "ConfigMap", "metadata": map[string]any{"namespace": s.namespace, "name": "held"}, "data": map[string]any{"by": "41"},
			}}
			return c.Apply(ctx, client.ApplyConfigurationFromUnstructured(u), client.FieldOwner("test"), client.ForceOwnership)
		}},
		"PUT without resourceVersion": {configMap, func(ctx context.Context, s *scene, c client.Client, _ client.Object) error {
			cm := configMap(s).(*corev1.ConfigMap)
			cm.Annotations, cm.Data = stamp, map[string]string{"by": "41"}
			return c.Update(ctx, cm)
		}},
		"/status": {deploy, func(ctx context.Context, _ *scene, c client.Client, o client.Object) error {
			return c.Status().Patch(ctx, o, client.RawPatch(types.MergePatchType, []byte(`{"status":{"observedGeneration":41}}`)))
		}},
		"/scale by patch": {deploy, func(ctx context.Context, _ *scene, c client.Client, o client.Object) error {
			return c.SubResource("scale").Patch(ctx, o, client.RawPatch(types.MergePatchType, []byte(`{"spec":{"replicas":41}}`)))
		}},
		"/scale by PUT": {deploy, func(ctx context.Context, _ *scene, c client.Client, o client.Object) error {
			scale := &autoscalingv1.Scale{ObjectMeta: metav1.ObjectMeta{Namespace: o.GetNamespace(), Name: o.GetName()}, Spec: autoscalingv1.ScaleSpec{Replicas: 41}}
			return c.SubResource("scale").Update(ctx, o, client.WithSubResourceBody(scale))
		}},
		"delete": {configMap, func(ctx context.Context, _ *scene, c client.Client, o client.Object) error { return c.Delete(ctx, o) }},
		"foreground delete": {deploy, func(ctx context.Context, _ *scene, c client.Client, o client.Object) error {
			return c.Delete(ctx, o, client.PropagationPolicy(metav1.DeletePropagationForeground))
		}},
		"deletecollection": {configMap, func(ctx context.Context, s *scene, c client.Client, _ client.Object) error {
			return c.DeleteAllOf(ctx, &corev1.ConfigMap{}, client.InNamespace(s.namespace), client.HasLabels{fence.LabelLease})
		}},
		"/ephemeralcontainers": {work, func(ctx context.Context, _ *scene, c client.Client, o client.Object) error {
			return c.SubResource("ephemeralcontainers").Patch(ctx, o, client.RawPatch(types.StrategicMergePatchType,
				[]byte(`{"spec":{"ephemeralContainers":[{"name":"late","image":"registry.example.com/late:1"}]}}`)))
		}},
		"/resize": {work, func(ctx context.Context, _ *scene, c client.Client, o client.Object) error {
			return c.SubResource("resize").Patch(ctx, o, client.RawPatch(types.StrategicMergePatchType,
				[]byte(`{"spec":{"containers":[{"name":"c","resources":{"requests":{"cpu":"41"}}}]}}`)))
		}},
	} {
		t.Run(name, func(t *testing.T) {
			e := served(t)
			s := &scene{T: t, Environment: e, namespace: e.Namespace(t)}
			s.markNamespace()
			s.lease = s.makeLease("main", oneLease())
			s.issue(s.lease, 41, "pod-a")
			o := c.object(s)
			s.must(s.Admin.Create(t.Context(), o))
			s.record(o, 41)

			s.expect(s.overtaken(hold, o, func(ctx context.Context) error {
				return c.write(ctx, s, s.slow("41"), c.object(s))
			}), fence.StaleToken)

			now := o.DeepCopyObject().(client.Object)
			s.must(e.Admin.Get(t.Context(), client.ObjectKeyFromObject(o), now))
			if got := now.GetAnnotations()[fence.AnnotationToken]; got != "42" || now.GetDeletionTimestamp() != nil {
				t.Errorf("the record is %q, deleted at %v", got, now.GetDeletionTimestamp())
			}
			switch o := now.(type) {
			case *corev1.ConfigMap:
				if o.Data["by"] != "" {
					t.Errorf("the stale write stands: %v", o.Data)
				}
			case *appsv1.Deployment:
				if *o.Spec.Replicas != 1 || o.Status.ObservedGeneration != 0 {
					t.Errorf("the stale write stands: %d replicas, observed %d", *o.Spec.Replicas, o.Status.ObservedGeneration)
				}
			case *corev1.Pod:
				if cpu := o.Spec.Containers[0].Resources.Requests.Cpu().String(); cpu != "1" || len(o.Spec.EphemeralContainers) > 0 {
					t.Errorf("the stale write stands: cpu %s, %d ephemeral containers", cpu, len(o.Spec.EphemeralContainers))
				}
			}
		})
	}
}

// allowed counts what the fence has let pass.
func (s *scene) allowed() (count float64) {
	s.Helper()
	families, err := metrics.Registry.Gather()
	s.must(err)
	for _, family := range families {
		for _, m := range family.GetMetric() {
			for _, l := range m.GetLabel() {
				if family.GetName() == "fencedlease_admission_decisions_total" && l.GetName() == "decision" && l.GetValue() == "allowed" {
					count += m.GetCounter().GetValue()
				}
			}
		}
	}
	return count
}

// overtaken has the writer 41 held inside admission while 42 is issued and
// recorded on an object, and gives the answer to it.
func (s *scene) overtaken(hold *holdingWebhook, o client.Object, write func(context.Context) error) error {
	s.Helper()
	ctx, cancel := context.WithTimeout(s.Context(), 25*time.Second)
	defer cancel()
	before := s.allowed()
	seen, release := hold.next(s.namespace)
	answer := make(chan error, 1)
	go func() { answer <- write(ctx) }()
	select {
	case <-seen:
	case err := <-answer:
		s.Fatalf("answered before it was held: %v", err)
	}
	// The API server asks the fence and the holding webhook at once.
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for s.allowed() == before {
		select {
		case <-tick.C:
		case <-ctx.Done():
			s.Fatal("the fence does not let the write pass")
		}
	}
	s.issue(s.lease, 42, "pod-b")
	s.record(o, 42)
	close(release)
	return <-answer
}

// TestDeleteTokenOvertaken: the decision of a holder that an object goes is
// void once its successor has written there, for a delete under way too.
func TestDeleteTokenOvertaken(t *testing.T) {
	hold := startHolding(t)
	for name, remove := range map[string]func(context.Context, client.Client, client.Object) error{
		"delete": func(ctx context.Context, c client.Client, o client.Object) error { return c.Delete(ctx, o) },
		"deletecollection": func(ctx context.Context, c client.Client, o client.Object) error {
			return c.DeleteAllOf(ctx, &corev1.ConfigMap{}, client.InNamespace(o.GetNamespace()), client.HasLabels{fence.LabelLease})
		},
	} {
		t.Run(name, func(t *testing.T) {
			e := served(t)
			s := &scene{T: t, Environment: e, namespace: e.Namespace(t)}
			s.lease = s.makeLease("main", oneLease())
			s.issue(s.lease, 41, "pod-a")
			s.configMap("held")
			s.expect(s.patch("held", "41", "decided", map[string]any{fence.AnnotationDeleteToken: "41"}), "")
			cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: "held"}}
			s.expect(remove(t.Context(), client.NewDryRunClient(s.Admin), cm.DeepCopy()), "")

			s.expect(s.overtaken(hold, cm, func(ctx context.Context) error { return remove(ctx, s.slow(""), cm.DeepCopy()) }), fence.Unstamped)
			s.must(e.Admin.Get(t.Context(), client.ObjectKeyFromObject(cm), cm))
			if cm.DeletionTimestamp != nil {
				t.Error("it is being deleted")
			}
		})
	}
}

// TestEvictionOvertaken: the API server judges an eviction once. With the
// resourceVersion that it was judged on it does not commit on a Pod that has
// moved; without, it does, and that is the one path that is not free of races.
func TestEvictionOvertaken(t *testing.T) {
	hold := startHolding(t)
	for name, c := range map[string]struct{ precondition, evicts bool }{
		"with the resourceVersion":    {true, false},
		"without the resourceVersion": {false, true},
	} {
		t.Run(name, func(t *testing.T) {
			e := served(t)
			s := &scene{T: t, Environment: e, namespace: e.Namespace(t)}
			s.markNamespace()
			s.lease = s.makeLease("main", oneLease())
			s.issue(s.lease, 41, "pod-a")
			o := pod(s.namespace, "held")
			s.must(s.Admin.Create(t.Context(), o))
			s.record(o, 41)
			s.must(s.Admin.Get(t.Context(), client.ObjectKeyFromObject(o), o))
			eviction := &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: "held"}, DeleteOptions: &metav1.DeleteOptions{}}
			if c.precondition {
				eviction.DeleteOptions.Preconditions = &metav1.Preconditions{ResourceVersion: &o.ResourceVersion}
			}
			err := s.overtaken(hold, o, func(ctx context.Context) error {
				return s.slow("41").SubResource("eviction").Create(ctx, o.DeepCopy(), eviction)
			})
			if (err == nil) != c.evicts || err != nil && !apierrors.IsConflict(err) {
				t.Errorf("answered %v", err)
			}
			err = s.Admin.Get(t.Context(), client.ObjectKeyFromObject(o), o)
			if gone := apierrors.IsNotFound(err) || err == nil && o.DeletionTimestamp != nil; gone != c.evicts {
				t.Errorf("evicted: %t", gone)
			}
		})
	}
}

// TestSealedWhileHeld: an object that the new holder never touched, and that
// its hand-over sealed, takes no write that was judged before.
func TestSealedWhileHeld(t *testing.T) {
	hold := startHolding(t)
	e := served(t)
	s := &scene{T: t, Environment: e, namespace: e.Namespace(t)}
	s.lease = s.makeLease("main", oneLease())
	s.issue(s.lease, 41, "pod-a")
	s.configMap("held")
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: "held"}}
	s.record(cm, 41)
	e.Grant(t, s.namespace, controlplane.OperatorUser, rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"configmaps"}, Verbs: []string{"patch"}})
	operator := e.User(t, controlplane.OperatorUser)

	seen, release := hold.next(s.namespace)
	answer := make(chan error, 1)
	go func() {
		answer <- s.slow("41").Patch(t.Context(), cm.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(`{"data":{"by":"41"}}`)))
	}()
	select {
	case <-seen:
	case err := <-answer:
		t.Fatalf("answered before it was held: %v", err)
	}
	s.must(operator.Patch(t.Context(), cm.DeepCopy(), client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"metadata":{"annotations":{%q:"42"}}}`, fence.AnnotationFloor))))
	s.issue(s.lease, 42, "pod-b")
	close(release)
	s.expect(<-answer, fence.StaleToken)
	// The new holder goes on, and the seal is the operator's.
	s.expect(s.patch("held", "42", "new", nil), "")
	s.expect(s.patch("held", "42", "lower", map[string]any{fence.AnnotationFloor: "1"}), fence.FenceRemoved)
}
