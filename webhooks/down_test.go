package webhooks_test

import (
	"net"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/test/env"
	"github.com/fencedlease/fencedlease/webhooks"
)

// TestWebhookDown: what is not guarded is written as ever, and what is guarded
// fails closed, soon and with a message that names the fence: where nobody
// listens, and where somebody does who never answers.
func TestWebhookDown(t *testing.T) {
	t.Run("nobody listens", func(t *testing.T) { testDown(t, func(*env.Environment) {}) })
	t.Run("nobody answers", func(t *testing.T) {
		testDown(t, func(e *env.Environment) {
			address := net.JoinHostPort(e.Webhook.LocalServingHost, strconv.Itoa(e.Webhook.LocalServingPort))
			listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", address)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = listener.Close() }) // the backlog takes connections without being asked
		})
	})
}

func testDown(t *testing.T, instead func(*env.Environment)) {
	t.Helper()
	e := env.Start(t, env.Options{Webhook: true})
	s := &scene{T: t, Environment: e, namespace: e.Namespace(t)}
	s.markNamespace()
	s.lease = s.makeLease("main", oneLease())
	s.issue(s.lease, 41, "pod-a")
	s.configMap("guarded")
	plain := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: "plain"}}
	s.must(e.Admin.Create(t.Context(), plain))
	e.StopManagers()
	instead(e)

	begin := time.Now()
	err := s.patch("guarded", "41", "x", nil)
	if err == nil || !strings.Contains(err.Error(), "objects.fencedlease.io") {
		t.Errorf("a guarded write with the webhook down: %v", err)
	}
	if took := time.Since(begin); took > 10*time.Second {
		t.Errorf("it took %v to say so", took)
	}
	// Nothing is half done.
	half := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: "half", Labels: map[string]string{"fencedlease.io/lease": "main"}}}
	if err := e.Admin.Create(t.Context(), half); err == nil || !strings.Contains(err.Error(), "objects.fencedlease.io") {
		t.Errorf("a guarded create with the webhook down: %v", err)
	}
	if err := e.Admin.Get(t.Context(), client.ObjectKeyFromObject(half), half); !apierrors.IsNotFound(err) {
		t.Errorf("a refused create left %v", err)
	}
	bound := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: "bound"},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "registry.example.com/c:1"}}}}
	s.must(e.Admin.Create(t.Context(), bound))
	scheduler := e.User(t, "system:kube-scheduler", "system:masters")
	for name, write := range map[string]func() error{
		"the scheduler's binding": func() error {
			return scheduler.SubResource("binding").Create(t.Context(), bound, &corev1.Binding{Target: corev1.ObjectReference{Kind: "Node", Name: "node"}})
		},
		"an unguarded patch": func() error {
			return e.Admin.Patch(t.Context(), plain, client.RawPatch(types.MergePatchType, []byte(`{"data":{"a":"b"}}`)))
		},
		"an unguarded delete": func() error {
			gone := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: "gone"}}
			s.must(e.Admin.Create(t.Context(), gone))
			return e.Admin.Delete(t.Context(), gone)
		},
		"an unguarded create": func() error {
			return e.Admin.Create(t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: "pod"},
				Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "registry.example.com/c:1"}}}})
		},
		"a native Lease": func() error {
			native := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: "native"}}
			s.must(e.Admin.Create(t.Context(), native))
			return e.Admin.Patch(t.Context(), native, client.RawPatch(types.MergePatchType, []byte(`{"spec":{"renewTime":"2026-01-01T00:00:00.000000Z"}}`)))
		},
		"a native Lease that carries the label": func() error {
			return e.Admin.Create(t.Context(), &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: "labelled", Labels: map[string]string{"fencedlease.io/lease": "main"}}})
		},
		"a claim and its renewal": func() error {
			c := &v1alpha1.LeaseClaim{ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: "c"}, Spec: v1alpha1.LeaseClaimSpec{LeaseName: "main"}}
			s.must(e.Admin.Create(t.Context(), c))
			return e.Admin.Patch(t.Context(), c, client.RawPatch(types.MergePatchType, []byte(`{"spec":{"renewTime":"2026-01-01T00:00:00.000000Z"}}`)))
		},
		"an exempt principal on a guarded object": func() error {
			gc, err := e.ControlPlane.User("system:serviceaccount:kube-system:generic-garbage-collector", "system:masters")
			s.must(err)
			c, err := client.New(gc, client.Options{Scheme: e.Scheme})
			s.must(err)
			return c.Delete(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: "guarded"}})
		},
	} {
		begin := time.Now()
		if err := write(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if took := time.Since(begin); took > 2*time.Second {
			t.Errorf("%s waited %v for the webhook", name, took)
		}
	}
}

// TestTheControlPlaneIsExempt: every controller that the API server's own RBAC
// gives a role is out of the fence's reach, those of a later version too.
func TestTheControlPlaneIsExempt(t *testing.T) {
	bindings := &rbacv1.ClusterRoleBindingList{}
	if err := served(t).Admin.List(t.Context(), bindings, client.MatchingLabels{"kubernetes.io/bootstrapping": "rbac-defaults"}); err != nil {
		t.Fatal(err)
	}
	seen := 0
	for _, binding := range bindings.Items {
		for _, s := range binding.Subjects {
			if s.Kind != rbacv1.ServiceAccountKind || !strings.HasPrefix(binding.Name, "system:controller:") {
				continue
			}
			seen++
			if user := "system:serviceaccount:" + s.Namespace + ":" + s.Name; !slices.Contains(webhooks.ExemptUsers, user) {
				t.Errorf("%s is judged", user)
			}
		}
	}
	if seen < 30 {
		t.Errorf("%d controllers have a role", seen)
	}
}

// TestScopeNamesTheExempt: the shipped match conditions are the list of this
// package, and what carries no label is selected by namespace alone.
func TestScopeNamesTheExempt(t *testing.T) {
	hooks := served(t).Webhook.ValidatingWebhooks
	if len(hooks) != 1 || hooks[0].Name != webhooks.ConfigurationName {
		t.Fatalf("%d configurations", len(hooks))
	}
	for _, hook := range hooks[0].Webhooks {
		var condition string
		for _, c := range hook.MatchConditions {
			if c.Name == "not-exempt" {
				condition = c.Expression
			}
		}
		for _, user := range webhooks.ExemptUsers {
			if !strings.Contains(condition, "'"+user+"'") {
				t.Errorf("%s: %s is missing", hook.Name, user)
			}
		}
		if got := strings.Count(condition, "'system:"); got != len(webhooks.ExemptUsers)+len(webhooks.ExemptGroups) {
			t.Errorf("%s names %d principals, and %d are exempt", hook.Name, got, len(webhooks.ExemptUsers)+len(webhooks.ExemptGroups))
		}
		if *hook.TimeoutSeconds > 3 || *hook.FailurePolicy != "Fail" || *hook.MatchPolicy != "Equivalent" {
			t.Errorf("%s: timeout %d s, %s, %s", hook.Name, *hook.TimeoutSeconds, *hook.FailurePolicy, *hook.MatchPolicy)
		}
		if hook.Name != "objects.fencedlease.io" && hook.ObjectSelector != nil && len(hook.ObjectSelector.MatchExpressions) > 0 {
			t.Errorf("%s: the objects of its requests carry no label, so an object selector would switch it off", hook.Name)
		}
		for _, reserved := range []string{"kube-system", "kube-node-lease", "fencedlease-system"} {
			if !strings.Contains(hook.NamespaceSelector.String(), reserved) {
				t.Errorf("%s reaches into %s", hook.Name, reserved)
			}
		}
	}
}
