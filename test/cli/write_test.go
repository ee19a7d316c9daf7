package cli

import (
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fencedlease/fencedlease/fence"
)

const appManifest = `apiVersion: v1
kind: ConfigMap
metadata:
  name: app
  labels: {fencedlease.io/lease: deploy}
data: {version: "VERSION"}
---
apiVersion: v1
kind: ConfigMap
metadata:
  name: plain
data: {version: "VERSION"}
`

func app(version string) *strings.Reader {
	return strings.NewReader(strings.ReplaceAll(appManifest, "VERSION", version))
}

// acquired acquires the lease and gives its token.
func (f *fixture) acquired(t *testing.T, args ...string) string {
	t.Helper()
	return f.must(t, append([]string{"acquire", "deploy", "--wait=20s", "-o", "jsonpath={.status.token}"}, args...)...)
}

func TestApplyPresentsTheTokenWhereALeaseGuards(t *testing.T) {
	f := newFixture(t)
	f.lease(t, "deploy")
	token := f.acquired(t)
	apply := []string{"apply", "--lease=deploy", "--fencing-token=" + token, "-f", "-"}
	for _, version := range []string{"1", "2", "2"} {
		if r := f.fenceWith(t, app(version), apply...); r.code != 0 {
			t.Fatalf("version %s: %v", version, r)
		}
	}
	if c := f.readConfigMap(t, "app"); c.Data["version"] != "2" || fence.Recorded(c.Annotations).String() != token {
		t.Fatalf("holds %v, records %v", c.Data, c.Annotations)
	}
	if c := f.readConfigMap(t, "plain"); c.Data["version"] != "2" || len(c.Annotations) > 0 {
		t.Fatalf("an unguarded object holds %v, annotations %v", c.Data, c.Annotations)
	}
	before := f.readConfigMap(t, "app").ResourceVersion
	if r := f.fenceWith(t, app("3"), append(apply, "--dry-run=server")...); r.code != 0 || f.readConfigMap(t, "app").ResourceVersion != before {
		t.Fatalf("a dry run changed the object: %v", r)
	}
	if r := f.fenceWith(t, app("2"), apply...); r.code != 0 || f.readConfigMap(t, "app").ResourceVersion != before {
		t.Fatalf("applying the same again changed the object: %v", r)
	}
}

func TestTheOlderOfTwoPipelinesIsRejectedWhenItFinishesLast(t *testing.T) {
	f := newFixture(t)
	f.lease(t, "deploy", duration(1))
	older := f.acquired(t, "--identity=older")
	newer := f.acquired(t, "--identity=newer")
	apply := func(token, version string, more ...string) result {
		return f.fenceWith(t, app(version), append([]string{"apply", "--lease=deploy", "--fencing-token=" + token, "-f", "-"}, more...)...)
	}
	if r := apply(newer, "2"); r.code != 0 {
		t.Fatal(r)
	}
	if r := apply(older, "1"); r.code != 3 || !strings.Contains(r.stderr, "StaleToken: ["+f.namespace+"/deploy]") {
		t.Fatalf("got %v, want exit code 3 and StaleToken", r)
	}
	stamped := f.fenceWith(t, app("1"), "stamp", "--lease=deploy", "--fencing-token="+older, "-f", "-")
	if r := f.end(t, strings.NewReader(stamped.stdout), f.Assets+"/kubectl", "apply", "-f", "-"); r.code == 0 || !strings.Contains(r.stderr, "StaleToken") {
		t.Fatalf("stamped manifests: %v, want StaleToken", r)
	}
	for _, command := range [][]string{{"delete", "configmap/app"}} {
		r := f.fence(t, append(command, "--lease=deploy", "--fencing-token="+older)...)
		if r.code != 3 || !strings.Contains(r.stderr, "StaleToken") {
			t.Fatalf("%s: %v, want exit code 3 and StaleToken", command, r)
		}
	}
	if c := f.readConfigMap(t, "app"); c.Data["version"] != "2" || fence.Recorded(c.Annotations).String() != newer {
		t.Fatalf("holds %v, records %v", c.Data, c.Annotations)
	}
}

func TestStampPutsTheTokenOnTheLeasesObjectsAlone(t *testing.T) {
	f := newFixture(t)
	f.lease(t, "deploy")
	token := f.acquired(t)
	stamp := func(more ...string) string {
		r := f.fenceWith(t, app("1"), append([]string{"stamp", "--lease=deploy", "--fencing-token=" + token, "-f", "-"}, more...)...)
		if r.code != 0 {
			t.Fatal(r)
		}
		return r.stdout
	}
	once := stamp()
	if strings.Count(once, fence.AnnotationToken+`: "`+token+`"`) != 1 || strings.Count(once, fence.AnnotationWriteID) != 1 || strings.Count(once, "kind: ConfigMap") != 2 {
		t.Fatalf("printed\n%s", once)
	}
	if again := stamp(); again != once {
		t.Fatalf("the same manifest is stamped differently:\n%s\n%s", once, again)
	}
	if salted := stamp("--salt=x"); salted == once {
		t.Fatal("a salt changes nothing")
	}
	if guarded := stamp("--guard"); strings.Count(guarded, fence.AnnotationWriteID) != 2 || strings.Count(guarded, "fencedlease.io/lease: deploy") != 2 {
		t.Fatalf("--guard printed\n%s", guarded)
	}
	for i, text := range []string{once, once, stamp("--salt=x"), stamp("--guard", "--salt=y")} {
		if r := f.end(t, strings.NewReader(text), f.Assets+"/kubectl", "apply", "-f", "-"); r.code != 0 {
			t.Fatalf("apply %d: %v", i, r)
		}
	}
}

func TestDeleteAndScalePresentTheToken(t *testing.T) {
	f := newFixture(t)
	f.lease(t, "deploy")
	web := &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: f.namespace, Name: "web", Labels: map[string]string{fence.LabelLease: "deploy"}},
		Spec: appsv1.DeploymentSpec{
			Replicas: new(int32(1)),
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": "web"}},
				Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "web", Image: "web"}}},
			},
		},
	}
	if err := f.Admin.Create(t.Context(), web); err != nil {
		t.Fatal(err)
	}
	if r := f.kubectl(t, "scale", "deployment/web", "--replicas=5"); r.code == 0 {
		t.Fatal("scaled without a token")
	}
	// The environment of run names lease and token.
	f.must(t, "run", "deploy", "--", "kubectl-fence", "--namespace="+f.namespace, "scale", "deployment/web", "--replicas=3")
	key := types.NamespacedName{Namespace: f.namespace, Name: "web"}
	if err := f.Admin.Get(t.Context(), key, web); err != nil || *web.Spec.Replicas != 3 {
		t.Fatalf("%v, %d replicas", err, *web.Spec.Replicas)
	}
	// Another lease's token is no token of this object's guard, whatever it is.
	f.lease(t, "other")
	for _, write := range [][]string{{"scale", "deployment/web", "--replicas=4"}, {"delete", "deployment/web"}} {
		r := f.fence(t, append([]string{"run", "other", "--", "kubectl-fence", "--namespace=" + f.namespace}, write...)...)
		if r.code != 2 || !strings.Contains(r.stderr, "guards it, and the token is one of ["+f.namespace+"/other]") {
			t.Errorf("%s under another lease: %v", write[0], r)
		}
	}
	plain := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: f.namespace, Name: "plain"}}
	if err := f.Admin.Create(t.Context(), plain); err != nil {
		t.Fatal(err)
	}
	if r := f.fence(t, "run", "deploy", "--", "kubectl-fence", "--namespace="+f.namespace, "delete", "configmap/plain"); r.code != 0 || !strings.Contains(r.stderr, "no fence judges this write") {
		t.Errorf("what nothing guards: %v", r)
	}
	f.must(t, "run", "deploy", "--", "kubectl-fence", "--namespace="+f.namespace, "delete", "deployment/web")
	if err := f.Admin.Get(t.Context(), key, web); !apierrors.IsNotFound(err) {
		t.Fatalf("after the delete: %v", err)
	}
}
