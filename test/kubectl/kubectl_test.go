// Package kubectl tests what people do with the real kubectl to a guarded
// object, as docs/kubectl.md says it.
package kubectl

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/test/env"
)

func TestMain(m *testing.M) { os.Exit(env.Main(m)) }

var installed = env.Shared(env.Options{Webhook: true, Policy: true})

// Two tokens above every revision of the store, as issued tokens of a lease
// that the policies have not seen yet are.
const first, second = "1000041", "1000042"

// makeLease makes the lease main, and the mark that leases are used there.
func makeLease(t *testing.T, e *env.Environment, namespace string, spec v1alpha1.FencedLeaseSpec) *v1alpha1.FencedLease {
	t.Helper()
	if err := e.Admin.Patch(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}},
		client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"labels":{"fencedlease.io/leases":"true"}}}`))); err != nil {
		t.Fatal(err)
	}
	lease := &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "main"}, Spec: spec}
	if err := e.Admin.Create(t.Context(), lease); err != nil {
		t.Fatal(err)
	}
	return lease
}

// issue makes token the current one, held by identity.
func issue(t *testing.T, e *env.Environment, lease *v1alpha1.FencedLease, token, identity string) {
	t.Helper()
	n, err := fence.ParseToken(token)
	if err != nil {
		t.Fatal(err)
	}
	lease.Status.Token, lease.Status.Holder = int64(n), &v1alpha1.Holder{ClaimName: identity, ClaimUID: "uid-" + identity, Identity: identity}
	if err := e.Admin.Status().Update(t.Context(), lease); err != nil {
		t.Fatal(err)
	}
}

func TestKubectl(t *testing.T) {
	const manifest = `{"apiVersion":"apps/v1","kind":"Deployment","metadata":{"name":"web","labels":{"fencedlease.io/lease":"main"}},
"spec":{"replicas":2,"selector":{"matchLabels":{"app":"web"}},"template":{"metadata":{"labels":{"app":"web"}},"spec":{"containers":[{"name":"c","image":"registry.example.com/c:2"}]}}}}`
	as := func(extra string) []string {
		return []string{"--as=person", "--as-group=system:masters", "--as-user-extra=" + extra}
	}
	token, bypass := as(fence.ExtraToken+"="+second), as(fence.ExtraBypass+"=incident 7")
	join := func(parts ...any) (args []string) {
		for _, p := range parts {
			switch p := p.(type) {
			case string:
				args = append(args, strings.Fields(p)...)
			case []string:
				args = append(args, p...)
			}
		}
		return args
	}
	for name, c := range map[string]struct {
		args  []string
		stdin string
		says  string // empty where it passes
		warns string
	}{
		"apply":                         {args: join("apply -f -"), stdin: manifest, says: "Unstamped"},
		"apply --server-side":           {args: join("apply --server-side --force-conflicts -f -"), stdin: manifest, says: "Unstamped"},
		"apply of a file saved before":  {args: join("apply -f SAVED"), says: "StaleToken"},
		"replace by a file saved":       {args: join("replace -f SAVED"), says: "StaleToken"},
		"replace --force":               {args: join("replace --force -f -"), stdin: manifest, says: "Unstamped"},
		"edit":                          {args: join("edit deployment web"), says: "Unstamped"},
		"patch, merge":                  {args: join("patch deployment web --type=merge -p", []string{`{"spec":{"replicas":3}}`}), says: "Unstamped"},
		"patch, strategic":              {args: join("patch deployment web -p", []string{`{"spec":{"replicas":3}}`}), says: "Unstamped"},
		"patch, JSON":                   {args: join("patch deployment web --type=json -p", []string{`[{"op":"replace","path":"/spec/replicas","value":3}]`}), says: "Unstamped"},
		"annotate":                      {args: join("annotate deployment web a=b"), says: "Unstamped"},
		"label":                         {args: join("label deployment web a=b"), says: "Unstamped"},
		"taking the label off":          {args: join("label deployment web fencedlease.io/lease-"), says: "FenceRemoved"},
		"pointing the label elsewhere":  {args: join("label deployment web --overwrite fencedlease.io/lease=mine"), says: "FenceRemoved"},
		"taking the record off":         {args: join("annotate deployment web fencedlease.io/token-"), says: "Unstamped"},
		"scale":                         {args: join("scale deployment web --replicas=3"), says: "Unstamped"},
		"rollout restart":               {args: join("rollout restart deployment web"), says: "Unstamped"},
		"set image":                     {args: join("set image deployment web c=registry.example.com/c:3"), says: "Unstamped"},
		"delete":                        {args: join("delete deployment web --wait=false"), says: "Unstamped"},
		"dry-run":                       {args: join("scale deployment web --replicas=3 --dry-run=server"), says: "Unstamped"},
		"diff changes nothing":          {args: join("diff -f -"), stdin: manifest, says: "Unstamped"},
		"get":                           {args: join("get deployment web")},
		"apply that changes nothing":    {args: join("apply --server-side --field-manager=kubectl-create -f SAME")},
		"scale with the token":          {args: join("scale deployment web --replicas=3", token)},
		"patch with the token":          {args: join("patch deployment web -p", []string{`{"spec":{"replicas":3}}`}, token)},
		"delete with the token":         {args: join("delete deployment web --wait=false", token)},
		"scale with a stale token":      {args: join("scale deployment web --replicas=3", as(fence.ExtraToken+"="+first)), says: "StaleToken"},
		"a deliberate bypass":           {args: join("scale deployment web --replicas=3", bypass), warns: "bypassed: incident 7"},
		"a bypass that deletes":         {args: join("delete deployment web --wait=false", bypass), warns: "bypassed: incident 7"},
		"a bypass that takes the label": {args: join("label deployment web fencedlease.io/lease-", bypass), warns: "bypassed: incident 7"},
		"a bypass that fakes a record":  {args: join("annotate deployment web --overwrite fencedlease.io/token=7", bypass), says: "FenceRemoved"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := installed(t)
			namespace := e.Namespace(t)
			must := func(err error) {
				t.Helper()
				if err != nil {
					t.Fatal(err)
				}
			}
			lease := makeLease(t, e, namespace, v1alpha1.FencedLeaseSpec{})
			issue(t, e, lease, first, "a")
			d := &appsv1.Deployment{}
			must(json.Unmarshal([]byte(strings.ReplaceAll(manifest, "c:2", "c:1")), d))
			d.Namespace = namespace
			must(e.Admin.Create(t.Context(), d, client.FieldOwner("kubectl-create")))
			write := func(token, id string) {
				must(e.Admin.Patch(t.Context(), d, client.RawPatch("application/merge-patch+json",
					[]byte(`{"metadata":{"annotations":{"fencedlease.io/token":"`+token+`","fencedlease.io/write-id":"`+id+`"}}}`))))
			}
			write(first, "first")
			person := e.UserConfig(t, "person", "system:masters")
			saved, _, err := e.Kubectl(t, person, "", "get", "deployment", "web", "-n", namespace, "-o", "json")
			must(err)
			object := map[string]any{}
			must(json.Unmarshal([]byte(saved), &object))
			delete(object["metadata"].(map[string]any), "resourceVersion") // or it is a conflict, like any old file
			object["spec"].(map[string]any)["replicas"] = 7
			text, err := json.Marshal(object)
			must(err)
			file := filepath.Join(t.TempDir(), "saved.json")
			must(os.WriteFile(file, text, 0o600))
			same := filepath.Join(t.TempDir(), "same.json")
			must(os.WriteFile(same, []byte(`{"apiVersion":"apps/v1","kind":"Deployment","metadata":{"name":"web"}}`), 0o600))
			issue(t, e, lease, second, "b")
			write(second, "second")

			args := []string{"-n", namespace}
			for _, a := range c.args {
				args = append(args, strings.NewReplacer("SAVED", file, "SAME", same).Replace(a))
			}
			out, errOut, err := e.Kubectl(t, person, c.stdin, args...)
			all := out + errOut
			switch {
			case c.says == "" && err != nil:
				t.Errorf("%v: %s", err, all)
			case c.says != "" && (err == nil || !strings.Contains(all, c.says+": ")):
				t.Errorf("want %s, got %v: %s", c.says, err, all)
			case !strings.Contains(all, c.warns):
				t.Errorf("want the warning %q: %s", c.warns, all)
			}
		})
	}
}

// TestKubectlOnConfigMap: what a file saved before a hand-over, and people
// without a token, can do to a guarded ConfigMap.
func TestKubectlOnConfigMap(t *testing.T) {
	e := installed(t)
	namespace := e.Namespace(t)
	person := e.UserConfig(t, "person", "system:masters")
	run := func(stdin string, args ...string) (string, error) {
		out, errOut, err := e.Kubectl(t, person, stdin, append([]string{"-n", namespace}, args...)...)
		return out + errOut, err
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	lease := makeLease(t, e, namespace, v1alpha1.FencedLeaseSpec{})
	issue(t, e, lease, first, "a")
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "settings", Labels: map[string]string{fence.LabelLease: "main"},
		Annotations: map[string]string{fence.AnnotationToken: first, fence.AnnotationWriteID: "first"}}, Data: map[string]string{"a": "1"}}
	must(e.Admin.Create(t.Context(), cm))
	cm.ResourceVersion, cm.UID, cm.ManagedFields, cm.Data["a"] = "", "", nil, "7"
	cm.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"}
	saved, err := json.Marshal(cm)
	must(err)
	issue(t, e, lease, second, "b")
	must(e.Admin.Patch(t.Context(), cm.DeepCopy(), client.RawPatch("application/merge-patch+json",
		[]byte(`{"metadata":{"annotations":{"fencedlease.io/token":"`+second+`","fencedlease.io/write-id":"second"}}}`))))
	for _, c := range []struct{ args, says string }{
		{"apply -f -", "StaleToken"},
		{"apply --server-side --force-conflicts -f -", "StaleToken"},
		{"replace -f -", "StaleToken"},
		{"replace --force -f -", "Unstamped"},
		{"annotate configmap settings a=b", "Unstamped"},
		{"label configmap settings a=b", "Unstamped"},
		{"delete configmap settings --wait=false", "Unstamped"},
	} {
		if all, err := run(string(saved), strings.Fields(c.args)...); err == nil || !strings.Contains(all, c.says+": ") {
			t.Errorf("%s: want %s, got %v: %s", c.args, c.says, err, all)
		}
	}
	must(e.Admin.Get(t.Context(), client.ObjectKeyFromObject(cm), cm))
	if cm.Data["a"] != "1" {
		t.Errorf("data is %v", cm.Data)
	}
}

// TestDryRunOfOurOwnKinds: a dry run of a lease and of a claim is judged as
// the real write is, and leaves nothing.
func TestDryRunOfOurOwnKinds(t *testing.T) {
	e := installed(t)
	namespace := e.Namespace(t)
	person := e.UserConfig(t, "person", "system:masters")
	for name, c := range map[string]struct{ manifest, says string }{
		"a lease":               {`{"apiVersion":"fencedlease.io/v1alpha1","kind":"FencedLease","metadata":{"name":"dry"}}`, ""},
		"a lease out of bounds": {`{"apiVersion":"fencedlease.io/v1alpha1","kind":"FencedLease","metadata":{"name":"dry"},"spec":{"leaseDurationSeconds":0}}`, "leaseDurationSeconds"},
		"a claim":               {`{"apiVersion":"fencedlease.io/v1alpha1","kind":"LeaseClaim","metadata":{"name":"dry"},"spec":{"leaseName":"dry"}}`, ""},
		"a claim for another":   {`{"apiVersion":"fencedlease.io/v1alpha1","kind":"LeaseClaim","metadata":{"name":"dry"},"spec":{"leaseName":"dry","user":{"username":"else"}}}`, "NotHolder"},
	} {
		out, errOut, err := e.Kubectl(t, person, c.manifest, "-n", namespace, "create", "--dry-run=server", "-f", "-")
		if all := out + errOut; (err == nil) != (c.says == "") || !strings.Contains(all, c.says) {
			t.Errorf("%s: want %q, got %v: %s", name, c.says, err, all)
		}
	}
	for _, kind := range []client.ObjectList{&v1alpha1.FencedLeaseList{}, &v1alpha1.LeaseClaimList{}, &corev1.EventList{}} {
		if err := e.Admin.List(t.Context(), kind, client.InNamespace(namespace)); err != nil {
			t.Fatal(err)
		}
		if n := meta.LenList(kind); n > 0 {
			t.Errorf("%d of %T are left", n, kind)
		}
	}
}

// TestHighestToken: the highest token there can be comes through every client
// as it is, through those too whose numbers are all floating-point, and what is
// rounded above it is refused.
func TestHighestToken(t *testing.T) {
	const highest = "9007199254740991"
	e := installed(t)
	namespace := e.Namespace(t)
	lease := makeLease(t, e, namespace, v1alpha1.FencedLeaseSpec{})
	issue(t, e, lease, highest, "a")
	guarded := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "guarded",
		Labels: map[string]string{fence.LabelLease: "main"}, Annotations: map[string]string{fence.AnnotationToken: highest}}}
	if err := e.Admin.Create(t.Context(), guarded); err != nil {
		t.Fatal(err)
	}
	person := e.UserConfig(t, "person", "system:masters")
	kubectl := func(stdin string, args ...string) string {
		t.Helper()
		out, errOut, err := e.Kubectl(t, person, stdin, append([]string{"-n", namespace}, args...)...)
		if err != nil {
			t.Fatalf("%v: %v %s", args, err, errOut)
		}
		return out
	}
	for _, args := range [][]string{
		{"get", "fencedlease", "main", "-o", "json"}, {"get", "fencedlease", "main", "-o", "yaml"}, {"get", "fencedlease", "main"},
		{"get", "fencedlease", "main", "-o", "jsonpath={.status.token}"}, {"get", "fencedlease", "main", "-o", "go-template={{.status.token}}"},
		{"get", "fencedlease", "main", "-o", "custom-columns=T:.status.token"}, {"get", "configmap", "guarded", "-o", "yaml"},
	} {
		if out := kubectl("", args...); !strings.Contains(out, highest) {
			t.Errorf("%v: %s", args, out)
		}
	}
	u := &unstructured.Unstructured{}
	u.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind("FencedLease"))
	if err := e.Admin.Get(t.Context(), client.ObjectKeyFromObject(lease), u); err != nil {
		t.Fatal(err)
	}
	if n, _, err := unstructured.NestedInt64(u.Object, "status", "token"); err != nil || n != lease.Status.Token {
		t.Errorf("unstructured: %d, %v", n, err)
	}
	var float struct{ Status struct{ Token float64 } }
	if err := json.Unmarshal([]byte(kubectl("", "get", "fencedlease", "main", "-o", "json")), &float); err != nil || strconv.FormatFloat(float.Status.Token, 'f', -1, 64) != highest {
		t.Errorf("floating-point: %v, %v", float, err)
	}
	// Through JavaScript and jq, whose numbers are floating-point, and yq.
	for _, through := range [][]string{
		{"node", "-e", `let t = ""; process.stdin.on("data", d => t += d).on("end", () => console.log(JSON.stringify(JSON.parse(t))))`},
		{"jq", "."}, {"yq", "."},
	} {
		through := exec.CommandContext(t.Context(), through[0], through[1:]...)
		through.Stdin = strings.NewReader(kubectl("", "get", "fencedlease/main", "configmap/guarded", "-o", "json"))
		back, err := through.Output()
		if err != nil {
			t.Fatalf("%v: %v; install it, on Debian with: apt-get install nodejs jq yq", through.Args, err)
		}
		if n := strings.Count(string(back), highest); n < 2 {
			t.Errorf("%v leaves the number %d times in %s", through.Args, n, back)
		}
		kubectl(string(back), "apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=true",
			"--as=person", "--as-group=system:masters", "--as-user-extra="+fence.ExtraToken+"="+highest, "-f", "-")
	}
	// There and back.
	kubectl(strings.Replace(kubectl("", "get", "configmap", "guarded", "-o", "yaml"), "metadata:", "data:\n  a: b\nmetadata:", 1),
		"replace", "--as=person", "--as-group=system:masters", "--as-user-extra="+fence.ExtraToken+"="+highest, "-f", "-")
	for _, rounded := range []string{"9007199254740992", "9.007199254740991e+15", "9.007199254740992e15"} {
		_, errOut, err := e.Kubectl(t, person, "", "-n", namespace, "label", "configmap", "guarded", "rounded=",
			"--as=person", "--as-group=system:masters", "--as-user-extra="+fence.ExtraToken+"="+rounded)
		if err == nil || !strings.Contains(errOut, string(fence.MalformedToken)) {
			t.Errorf("%s: %v %s", rounded, err, errOut)
		}
	}
}

// TestDrain: a drain evicts what is not guarded, and guarded Pods for who may
// delete them.
func TestDrain(t *testing.T) {
	as := func(extra string) []string {
		return []string{"--as=person", "--as-group=system:masters", "--as-user-extra=" + extra}
	}
	for name, c := range map[string]struct {
		args   []string
		except []v1alpha1.UnstampedException
		says   string // empty where it passes
	}{
		"unstamped":                {says: "Unstamped"},
		"with the token":           {args: as(fence.ExtraToken + "=" + second)},
		"with a stale token":       {args: as(fence.ExtraToken + "=" + first), says: "StaleToken"},
		"a deliberate bypass":      {args: as(fence.ExtraBypass + "=incident 7")},
		"an excepted principal":    {except: []v1alpha1.UnstampedException{{User: "person", Action: v1alpha1.UnstampedAllow}}},
		"as a dry run":             {args: []string{"--dry-run=server"}, says: "Unstamped"},
		"with deletes and a token": {args: append(as(fence.ExtraToken+"="+second), "--disable-eviction")},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := installed(t)
			namespace := e.Namespace(t)
			must := func(err error) {
				t.Helper()
				if err != nil {
					t.Fatal(err)
				}
			}
			var spec v1alpha1.FencedLeaseSpec
			if c.except != nil {
				spec.UnstampedWrites = &v1alpha1.UnstampedWrites{Except: c.except}
			}
			lease := makeLease(t, e, namespace, spec)
			issue(t, e, lease, second, "b")
			node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: namespace}}
			must(e.Admin.Create(t.Context(), node))
			pod := func(name string) *corev1.Pod {
				return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
					Spec: corev1.PodSpec{NodeName: node.Name, Containers: []corev1.Container{{Name: "c", Image: "registry.example.com/c:1"}}}}
			}
			guarded, plain := pod("guarded"), pod("plain")
			guarded.Labels = map[string]string{fence.LabelLease: "main"}
			guarded.Annotations = map[string]string{fence.AnnotationToken: second}
			must(e.Admin.Create(t.Context(), guarded))
			must(e.Admin.Create(t.Context(), plain))

			out, errOut, err := e.Kubectl(t, e.UserConfig(t, "person", "system:masters"), "",
				append([]string{"drain", node.Name, "--force", "--grace-period=0", "--timeout=60s"}, c.args...)...)
			all := out + errOut
			if c.says == "" && err != nil || c.says != "" && (err == nil || !strings.Contains(all, c.says+": ")) {
				t.Errorf("want %q, got %v: %s", c.says, err, all)
			}
			dry := slices.Contains(c.args, "--dry-run=server")
			must(e.Admin.Get(t.Context(), client.ObjectKeyFromObject(node), node))
			if node.Spec.Unschedulable == dry {
				t.Errorf("cordoned: %t", node.Spec.Unschedulable)
			}
			for _, p := range []*corev1.Pod{guarded, plain} {
				err := e.Admin.Get(t.Context(), client.ObjectKeyFromObject(p), p)
				must(client.IgnoreNotFound(err))
				if gone, want := err != nil, !dry && (p.Name == "plain" || c.says == ""); gone != want {
					t.Errorf("%s is gone: %t", p.Name, gone)
				}
			}
		})
	}
}
