package cli

import (
	"fmt"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
)

func (f *fixture) configMap(t *testing.T, name string, change ...func(*corev1.ConfigMap)) {
	t.Helper()
	c := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: f.namespace, Name: name}}
	for _, do := range change {
		do(c)
	}
	if err := f.Admin.Create(t.Context(), c); err != nil {
		t.Fatal(err)
	}
}

func (f *fixture) readConfigMap(t *testing.T, name string) *corev1.ConfigMap {
	t.Helper()
	c := &corev1.ConfigMap{}
	if err := f.Admin.Get(t.Context(), types.NamespacedName{Namespace: f.namespace, Name: name}, c); err != nil {
		t.Fatal(err)
	}
	return c
}

func TestGuardAndUnguard(t *testing.T) {
	f := newFixture(t)
	f.lease(t, "deploy")
	f.lease(t, "other")
	f.configMap(t, "web")
	f.configMap(t, "db", func(c *corev1.ConfigMap) { c.Labels = map[string]string{"app": "db"} })

	if r := f.fence(t, "guard", "deploy", "configmap/web", "configmap/gone"); r.code != 1 ||
		!strings.Contains(r.stderr, `nothing was changed: configmaps "gone" not found`) || f.readConfigMap(t, "web").Labels[fence.LabelLease] != "" {
		t.Fatalf("with one that does not exist: %v", r)
	}
	f.must(t, "guard", "deploy", "configmap/web")
	f.must(t, "guard", "deploy", "configmaps", "-l", "app=db")
	for _, name := range []string{"web", "db"} {
		if got := f.readConfigMap(t, name).Labels[fence.LabelLease]; got != "deploy" {
			t.Fatalf("%s is guarded by %q", name, got)
		}
	}
	if got := f.must(t, "guard", "deploy", "configmap/web"); !strings.Contains(got, "already") {
		t.Fatalf("guarding again printed %q", got)
	}
	if r := f.fence(t, "guard", "other", "configmap/web"); r.code != 1 || !strings.Contains(r.stderr, "unguard it first") {
		t.Fatalf("guarding by another lease: %v", r)
	}

	if r := f.fence(t, "unguard", "configmap/web"); r.code != 2 {
		t.Fatalf("without a reason: %v", r)
	}
	if r := f.fence(t, "unguard", "configmap/web", "--reason=moved"); r.code != 0 || !strings.Contains(r.stderr, "/deploy] bypassed") {
		t.Fatalf("a bypass has to be told: %v", r)
	}
	web := f.readConfigMap(t, "web")
	reason := web.Annotations[fence.AnnotationBypass]
	if len(web.Labels) > 0 || len(web.Annotations) != 1 || !strings.HasSuffix(reason, ": moved") {
		t.Fatalf("left labels %v and annotations %v", web.Labels, web.Annotations)
	}
}

func TestExplainSaysWhoHoldsAndWhatTheFenceSays(t *testing.T) {
	f := newFixture(t)
	f.lease(t, "deploy")
	f.configMap(t, "web")
	if got := f.must(t, "explain", "configmap/web"); !strings.Contains(got, "not guarded") {
		t.Fatalf("of an object without a guard: %q", got)
	}
	f.must(t, "guard", "deploy", "configmap/web")
	token := f.must(t, "acquire", "deploy", "--identity=build-7", "-o", "jsonpath={.status.token}")
	for name, test := range map[string]struct {
		args []string
		want string
	}{
		"no token":        {nil, "Unstamped: ["},
		"the current one": {[]string{"--fencing-token=" + token}, "Allowed: token " + token},
		"a malformed one": {[]string{"--fencing-token=0"}, "MalformedToken: ["},
		"a later one":     {[]string{"--fencing-token=9007199254740991"}, "UnissuedToken: ["},
	} {
		t.Run(name, func(t *testing.T) {
			got := f.must(t, append([]string{"explain", "configmap/web"}, test.args...)...)
			for _, want := range []string{test.want, "build-7", f.namespace + "/deploy", token} {
				if !strings.Contains(got, want) {
					t.Errorf("without %q:\n%s", want, got)
				}
			}
		})
	}
}

func TestExplainKnowsWhatTheLeaseSaysOfWritesWithoutAToken(t *testing.T) {
	f := newFixture(t)
	f.lease(t, "deploy")
	f.configMap(t, "web")
	f.must(t, "guard", "deploy", "configmap/web")
	for action, want := range map[v1alpha1.UnstampedAction]string{
		v1alpha1.UnstampedDeny: "Verdict:    Unstamped: [", v1alpha1.UnstampedWarn: "with a warning: Unstamped: [", v1alpha1.UnstampedAllow: "writes without a token pass",
	} {
		if r := f.kubectl(t, "patch", "fencedlease", "deploy", "--type=merge", fmt.Sprintf(`--patch={"spec":{"unstampedWrites":{"default":%q}}}`, action)); r.code != 0 {
			t.Fatal(r)
		}
		if got := f.must(t, "explain", "configmap/web"); !strings.Contains(got, want) {
			t.Errorf("%s: without %q:\n%s", action, want, got)
		}
	}
}

func TestRevokeRaisesTheFloorWithItsReason(t *testing.T) {
	f := newFixture(t)
	f.lease(t, "deploy")
	if r := f.fence(t, "revoke", "deploy", "--reason=disk"); r.code != 2 {
		t.Fatalf("before any token: %v", r)
	}
	cmd := f.background(t, "run", "deploy", "--grace=100ms", "--", "sh", "-c", "echo $FENCING_TOKEN; sleep 300")
	token := cmd.out.next(t, "")
	f.must(t, "revoke", "deploy", "--reason=disk")
	cmd.ends(t, 4)
	next := f.must(t, "acquire", "deploy", "-o", "jsonpath={.status.token}")
	reason := f.must(t, "list", "-o", "jsonpath={.items[0].metadata.annotations.fencedlease\\.io/revoke-reason}")
	if reason != "disk" || next == token {
		t.Fatalf("reason %q, next token %s after %s", reason, next, token)
	}
}

func TestVerifyFindsAndMendsRecordsThatNoAuthorityIssued(t *testing.T) {
	f := newFixture(t)
	f.lease(t, "deploy")
	token := f.must(t, "acquire", "deploy", "-o", "jsonpath={.status.token}")
	if got := f.must(t, "verify"); !strings.Contains(got, "0 guarded objects") {
		t.Fatalf("of nothing: %q", got)
	}
	f.unfenced(t, func() error {
		for name, test := range map[string]struct {
			lease       string
			annotations map[string]string
		}{
			"current":   {"deploy", map[string]string{fence.AnnotationToken: token}},
			"none":      {"deploy", nil},
			"above":     {"deploy", map[string]string{fence.AnnotationToken: "9007199254740991"}},
			"floor":     {"deploy", map[string]string{fence.AnnotationToken: token, fence.AnnotationFloor: "9007199254740991"}},
			"malformed": {"deploy", map[string]string{fence.AnnotationToken: "042"}},
			"orphan":    {"nobody", nil},
		} {
			c := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{
				Namespace: f.namespace, Name: name, Labels: map[string]string{fence.LabelLease: test.lease}, Annotations: test.annotations,
			}}
			if err := f.Admin.Create(t.Context(), c); client.IgnoreAlreadyExists(err) != nil {
				return err
			}
		}
		return nil
	})

	r := f.fence(t, "verify")
	if r.code != 1 || !strings.Contains(r.stderr, "4 of 6") {
		t.Fatalf("got %v", r)
	}
	for name, reason := range map[string]string{"above": "UnissuedToken", "floor": "UnissuedToken", "malformed": "MalformedToken", "orphan": "UnknownLease"} {
		if !strings.Contains(line(r.stdout, "configmaps/"+name), reason) {
			t.Errorf("%s is not found as %s:\n%s", name, reason, r.stdout)
		}
	}
	if r := f.fence(t, "verify", "--fix"); r.code != 2 {
		t.Fatalf("--fix without a reason: %v", r)
	}
	if r := f.fence(t, "verify", "--fix", "--reason=restored"); r.code != 1 || !strings.Contains(r.stderr, "2 of 6") {
		t.Fatalf("got %v", r)
	}
	for _, name := range []string{"current", "above", "floor"} {
		c := f.readConfigMap(t, name)
		if got := fence.Recorded(c.Annotations).String(); got != token {
			t.Errorf("%s records %s, want %s", name, got, token)
		}
	}
}

// line is the line of a table that holds the text.
func line(table, text string) string {
	for l := range strings.Lines(table) {
		if strings.Contains(l, text+" ") {
			return l
		}
	}
	return ""
}

func TestWatchPrintsHandoversAndNotRenewals(t *testing.T) {
	f := newFixture(t)
	f.lease(t, "deploy", duration(1))
	cmd := f.background(t, "watch", "deploy")
	cmd.out.next(t, "TIME")
	first := f.must(t, "run", "deploy", "--identity=first", "--", "sh", "-c", "sleep 2; echo $FENCING_TOKEN")
	second := f.must(t, "run", "deploy", "--identity=second", "--", "sh", "-c", "echo $FENCING_TOKEN")
	first, second = strings.TrimSpace(first), strings.TrimSpace(second)
	for _, want := range [][]string{
		{"<none>", "<none>"}, {"first", first}, {"<none>", first}, {"second", second}, {"<none>", second},
	} {
		got := strings.Fields(cmd.out.next(t, ""))
		if len(got) != 4 || got[1] != "deploy" || got[2] != want[0] || got[3] != want[1] {
			t.Fatalf("printed %q, want %q", got, want)
		}
	}
}

// unfenced does work as if it came from a time without the fence, or by a
// restored backup of the store.
func (f *fixture) unfenced(t *testing.T, work func() error) {
	t.Helper()
	hooks := &admissionv1.ValidatingWebhookConfigurationList{}
	bindings := &admissionv1.ValidatingAdmissionPolicyBindingList{}
	var fences []client.Object
	for _, list := range []client.ObjectList{hooks, bindings} {
		if err := f.Admin.List(t.Context(), list); err != nil {
			t.Fatal(err)
		}
	}
	for i := range hooks.Items {
		fences = append(fences, &hooks.Items[i])
	}
	for i := range bindings.Items {
		fences = append(fences, &bindings.Items[i])
	}
	for _, o := range fences {
		if err := f.Admin.Delete(t.Context(), o); err != nil {
			t.Fatal(err)
		}
	}
	defer func() {
		for _, o := range fences {
			o.SetResourceVersion("")
			o.SetUID("")
			if err := f.Admin.Create(t.Context(), o); err != nil {
				t.Fatal(err)
			}
		}
		eventually(t, "the fence is back", func() bool {
			c := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: f.namespace, GenerateName: "x-", Labels: map[string]string{fence.LabelLease: "no-such-lease"}}}
			return f.Admin.Create(t.Context(), c, client.DryRunAll) != nil
		})
	}()
	eventually(t, "the fence is gone", func() bool { return work() == nil })
}
