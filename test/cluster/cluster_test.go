// Package cluster tests the fence beside the real kube-controller-manager: the
// control plane is never hindered, and nobody else slips through.
package cluster

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	crclient "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/client"
	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/test/env"
)

func TestMain(m *testing.M) { os.Exit(env.Main(m)) }

var whole = env.Shared(env.Options{Operator: true, Webhook: true, Policy: true, ControllerManager: true})

func await(t *testing.T, what string, done func() bool) {
	t.Helper()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	limit := time.After(time.Minute)
	for !done() {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatalf("waited a minute until %s", what)
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// acquire makes a lease and holds it as the administrator; c presents its
// token on every write.
func acquire(t *testing.T, e *env.Environment, namespace string) (held *client.Held, c crclient.Client) {
	t.Helper()
	must(t, e.Admin.Create(t.Context(), &v1alpha1.FencedLease{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "main"}, Spec: v1alpha1.FencedLeaseSpec{LeaseDurationSeconds: 60},
	}))
	held, err := client.Acquire(t.Context(), e.Config, namespace, "main", client.WithIdentity("holder"))
	must(t, err)
	cfg, err := client.Config(t.Context(), e.Config, held)
	must(t, err)
	c, err = crclient.New(cfg, crclient.Options{Scheme: e.Scheme})
	must(t, err)
	return held, c
}

func deployment(namespace string) *appsv1.Deployment {
	labels := map[string]string{"app": "web", fence.LabelLease: "main"}
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "web", Labels: map[string]string{fence.LabelLease: "main"}},
		Spec: appsv1.DeploymentSpec{
			Replicas: new(int32(1)), Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}},
			// The guard label on the template too: ReplicaSets and Pods are guarded.
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "registry.example.com/c:1"}}}},
		},
	}
}

func TestGuardedDeploymentLives(t *testing.T) {
	e := whole(t)
	namespace := e.Namespace(t)
	held, c := acquire(t, e, namespace)
	d := deployment(namespace)
	must(t, c.Create(t.Context(), d))

	pods := &corev1.PodList{}
	count := func(n int) func() bool {
		return func() bool {
			must(t, e.Admin.List(t.Context(), pods, crclient.InNamespace(namespace), crclient.MatchingLabels{"app": "web"}))
			live := 0
			for _, pod := range pods.Items {
				if pod.DeletionTimestamp.IsZero() {
					live++
				}
			}
			return live == n
		}
	}
	await(t, "it has its Pod", count(1))
	must(t, c.Patch(t.Context(), d, crclient.RawPatch(types.MergePatchType, []byte(`{"spec":{"template":{"spec":{"containers":[{"name":"c","image":"registry.example.com/c:2"}]}}}}`))))
	await(t, "a second ReplicaSet is rolled out", func() bool {
		sets := &appsv1.ReplicaSetList{}
		must(t, e.Admin.List(t.Context(), sets, crclient.InNamespace(namespace)))
		return len(sets.Items) == 2
	})
	generation := func() int64 {
		now := deployment(namespace)
		must(t, e.Admin.Get(t.Context(), crclient.ObjectKeyFromObject(now), now))
		return now.Generation
	}
	before := generation()
	must(t, e.Admin.Patch(t.Context(), d, crclient.RawPatch(types.MergePatchType,
		fmt.Appendf(nil, `{"metadata":{"annotations":{%q:"%d",%q:"again"}}}`, fence.AnnotationToken, held.Token(), fence.AnnotationWriteID))))
	// Any changed annotation of a Deployment moves its generation, once; it
	// starts no roll-out.
	if after := generation(); after != before+1 {
		t.Errorf("a record moved the generation from %d to %d", before, after)
	}
	sets := &appsv1.ReplicaSetList{}
	must(t, e.Admin.List(t.Context(), sets, crclient.InNamespace(namespace)))
	if len(sets.Items) != 2 {
		t.Errorf("a record rolled out: %d ReplicaSets", len(sets.Items))
	}

	// The autoscaler's own account scales, a person does not.
	scale := func(cfg *rest.Config, replicas int32) error {
		w, err := crclient.New(cfg, crclient.Options{Scheme: e.Scheme})
		must(t, err)
		return w.SubResource("scale").Update(t.Context(), d, crclient.WithSubResourceBody(&autoscalingv1.Scale{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "web"}, Spec: autoscalingv1.ScaleSpec{Replicas: replicas}}))
	}
	must(t, scale(e.UserConfig(t, "system:serviceaccount:kube-system:horizontal-pod-autoscaler", "system:masters"), 3))
	if reason, _ := client.Reason(scale(e.UserConfig(t, "person", "system:masters"), 5)); reason != fence.Unstamped {
		t.Errorf("a person scales: %s", reason)
	}
	await(t, "it has three Pods and those of the roll-out", func() bool { return count(3)() || count(4)() })

	// A node reports the status of its guarded Pod.
	node := e.User(t, "system:node:n1", "system:nodes", "system:masters")
	pod := pods.Items[0].DeepCopy()
	must(t, node.Status().Patch(t.Context(), pod, crclient.RawPatch(types.MergePatchType, []byte(`{"status":{"reason":"seen"}}`))))

	// The holder deletes, and the garbage collector takes what belongs to it.
	must(t, c.Delete(t.Context(), d, crclient.PropagationPolicy(metav1.DeletePropagationForeground)))
	await(t, "everything is gone", func() bool {
		sets := &appsv1.ReplicaSetList{}
		must(t, e.Admin.List(t.Context(), sets, crclient.InNamespace(namespace)))
		must(t, e.Admin.List(t.Context(), pods, crclient.InNamespace(namespace)))
		err := e.Admin.Get(t.Context(), crclient.ObjectKeyFromObject(d), deployment(namespace))
		return len(sets.Items) == 0 && len(pods.Items) == 0 && apierrors.IsNotFound(err)
	})
}

// TestAutoscaler: a HorizontalPodAutoscaler scales what is guarded, and the
// holder goes on beside it.
func TestAutoscaler(t *testing.T) {
	e := whole(t)
	namespace := e.Namespace(t)
	held, c := acquire(t, e, namespace)
	d := deployment(namespace)
	must(t, c.Create(t.Context(), d))
	must(t, e.Admin.Create(t.Context(), &autoscalingv1.HorizontalPodAutoscaler{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "web"},
		Spec: autoscalingv1.HorizontalPodAutoscalerSpec{
			ScaleTargetRef: autoscalingv1.CrossVersionObjectReference{APIVersion: "apps/v1", Kind: "Deployment", Name: "web"},
			MinReplicas:    new(int32(3)), MaxReplicas: 5, // below the minimum it scales without metrics
		},
	}))
	await(t, "it is scaled to the minimum", func() bool {
		must(t, e.Admin.Get(t.Context(), crclient.ObjectKeyFromObject(d), d))
		return *d.Spec.Replicas == 3
	})
	must(t, c.Patch(t.Context(), d, crclient.RawPatch(types.MergePatchType, []byte(`{"spec":{"minReadySeconds":1}}`))))
	if got := fence.Recorded(d.Annotations); got != held.Token() {
		t.Errorf("recorded %s, want %s", got, held.Token())
	}
	must(t, held.Release(t.Context()))
}

// TestNamespaceGoes: a namespace full of guarded objects, leases and claims is
// deleted, and so is one that never had any.
func TestNamespaceGoes(t *testing.T) {
	e := whole(t)
	full, empty := e.Namespace(t), e.Namespace(t)
	_, c := acquire(t, e, full)
	must(t, c.Create(t.Context(), deployment(full)))
	for i := range 20 {
		must(t, e.Admin.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: full, Name: fmt.Sprintf("guarded-%d", i), Labels: map[string]string{fence.LabelLease: "main"}}}))
		must(t, e.Admin.Create(t.Context(), &v1alpha1.LeaseClaim{ObjectMeta: metav1.ObjectMeta{Namespace: full, Name: fmt.Sprintf("waiting-%d", i)}, Spec: v1alpha1.LeaseClaimSpec{LeaseName: "main"}}))
	}
	for _, name := range []string{full, empty} {
		must(t, e.Admin.Delete(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}))
	}
	for _, name := range []string{full, empty} {
		await(t, "namespace "+name+" is gone", func() bool {
			return apierrors.IsNotFound(e.Admin.Get(t.Context(), crclient.ObjectKey{Name: name}, &corev1.Namespace{}))
		})
	}
}

// TestPodGoesAndReleases: a claim that a Pod owns goes with it, and the next
// one is granted without a lapse.
func TestPodGoesAndReleases(t *testing.T) {
	e := whole(t)
	namespace := e.Namespace(t)
	must(t, e.Admin.Create(t.Context(), &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "main"}, Spec: v1alpha1.FencedLeaseSpec{LeaseDurationSeconds: 86400}}))
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "worker"}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "registry.example.com/c:1"}}}}
	must(t, e.Admin.Create(t.Context(), pod))
	_, err := client.Acquire(t.Context(), e.Config, namespace, "main", client.WithOwnerPod(pod.Name, pod.UID))
	must(t, err)
	must(t, e.Admin.Delete(t.Context(), pod, crclient.GracePeriodSeconds(0)))
	b, err := client.Acquire(t.Context(), e.Config, namespace, "main", client.WithWait(time.Minute))
	must(t, err)
	must(t, b.Release(t.Context()))
}

// TestDeleteCollectionByAPerson stops at guarded objects, and removes the rest
// as Kubernetes defines it.
func TestDeleteCollectionByAPerson(t *testing.T) {
	e := whole(t)
	namespace := e.Namespace(t)
	acquire(t, e, namespace)
	for _, name := range []string{"guarded", "plain"} {
		cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
		if name == "guarded" {
			cm.Labels = map[string]string{fence.LabelLease: "main"}
		}
		must(t, e.Admin.Create(t.Context(), cm))
	}
	person := e.UserConfig(t, "person", "system:masters")
	_, errOut, err := e.Kubectl(t, person, "", "delete", "configmaps", "--all", "-n", namespace)
	if err == nil || !strings.Contains(errOut, string(fence.Unstamped)) {
		t.Errorf("%v: %s", err, errOut)
	}
	must(t, e.Admin.Get(t.Context(), crclient.ObjectKey{Namespace: namespace, Name: "guarded"}, &corev1.ConfigMap{}))
	await(t, "the plain one is gone", func() bool {
		return apierrors.IsNotFound(e.Admin.Get(t.Context(), crclient.ObjectKey{Namespace: namespace, Name: "plain"}, &corev1.ConfigMap{}))
	})
}

// TestRolloutUndo: an undo brings back the annotations of an old ReplicaSet,
// with the token and the write-id of the holder of that time.
func TestRolloutUndo(t *testing.T) {
	e := whole(t)
	namespace := e.Namespace(t)
	held, _ := acquire(t, e, namespace)
	d := deployment(namespace)
	delete(d.Spec.Template.Labels, fence.LabelLease) // the Pods do not matter
	must(t, e.Admin.Create(t.Context(), d))
	// write stamps by annotations, and waits until the ReplicaSet has them.
	write := func(token fence.Token, image string) {
		t.Helper()
		must(t, e.Admin.Patch(t.Context(), d, crclient.RawPatch(types.StrategicMergePatchType, fmt.Appendf(nil,
			`{"metadata":{"annotations":{%q:"%d",%q:%q}},"spec":{"template":{"spec":{"containers":[{"name":"c","image":%q}]}}}}`,
			fence.AnnotationToken, token, fence.AnnotationWriteID, image, image))))
		await(t, "the ReplicaSet of "+image+" is there", func() bool {
			sets := &appsv1.ReplicaSetList{}
			must(t, e.Admin.List(t.Context(), sets, crclient.InNamespace(namespace)))
			return slices.ContainsFunc(sets.Items, func(set appsv1.ReplicaSet) bool {
				return set.Spec.Template.Spec.Containers[0].Image == image && set.Annotations[fence.AnnotationWriteID] == image
			})
		})
	}
	// undo goes back to the revision before, unless it is refused.
	undo := func(want fence.Reason, image string, flags ...string) {
		t.Helper()
		args := append([]string{"rollout", "undo", "deployment/web", "-n", namespace}, flags...)
		out, errOut, err := e.Kubectl(t, e.UserConfig(t, "person", "system:masters"), "", args...)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(errOut, string(want)+": ")) {
			t.Errorf("want %q, got %v: %s%s", want, err, out, errOut)
		}
		must(t, e.Admin.Get(t.Context(), crclient.ObjectKeyFromObject(d), d))
		if got := d.Spec.Template.Spec.Containers[0].Image; got != image {
			t.Errorf("it has the image %s, want %s", got, image)
		}
	}
	as := func(extra, value string) []string {
		return []string{"--as=person", "--as-group=system:masters", "--as-user-extra=" + extra + "=" + value}
	}
	write(held.Token(), "registry.example.com/c:1")
	write(held.Token(), "registry.example.com/c:2")
	undo("", "registry.example.com/c:1") // a copy of what the holder wrote
	write(held.Token(), "registry.example.com/c:2")
	must(t, held.Release(t.Context()))
	held, err := client.Acquire(t.Context(), e.Config, namespace, "main")
	must(t, err)
	write(held.Token(), "registry.example.com/c:3")
	undo(fence.StaleToken, "registry.example.com/c:3")
	undo(fence.FenceRemoved, "registry.example.com/c:3", as(fence.ExtraToken, fmt.Sprint(held.Token()))...)
	undo(fence.StaleToken, "registry.example.com/c:3", as(fence.ExtraBypass, "incident 7")...)
	must(t, held.Release(t.Context()))
}

// TestStampsReachReplicaSets: the deployment controller copies stamps onto
// ReplicaSets, guarded ones too. There they present nothing, and old ones keep
// nobody from rolling out.
func TestStampsReachReplicaSets(t *testing.T) {
	e := whole(t)
	namespace := e.Namespace(t)
	held, _ := acquire(t, e, namespace)
	d := deployment(namespace)
	d.Spec.Strategy.Type = appsv1.RecreateDeploymentStrategyType // nothing here becomes ready
	must(t, e.Admin.Create(t.Context(), d))
	stamp := func(id, image string) {
		t.Helper()
		must(t, e.Admin.Patch(t.Context(), d, crclient.RawPatch(types.StrategicMergePatchType, fmt.Appendf(nil,
			`{"metadata":{"annotations":{%q:"%d",%q:%q}},"spec":{"template":{"spec":{"containers":[{"name":"c","image":%q}]}}}}`,
			fence.AnnotationToken, held.Token(), fence.AnnotationWriteID, id, image))))
	}
	// sets gives the ReplicaSets by image.
	sets := func() map[string]appsv1.ReplicaSet {
		all := &appsv1.ReplicaSetList{}
		must(t, e.Admin.List(t.Context(), all, crclient.InNamespace(namespace)))
		byImage := map[string]appsv1.ReplicaSet{}
		for _, set := range all.Items {
			byImage[set.Spec.Template.Spec.Containers[0].Image] = set
		}
		if len(byImage) != len(all.Items) {
			t.Errorf("a stamp rolled out: %d ReplicaSets of %d images", len(all.Items), len(byImage))
		}
		return byImage
	}
	const before, after = "registry.example.com/c:1", "registry.example.com/c:2"
	writes, err := e.Admin.Watch(t.Context(), &appsv1.ReplicaSetList{}, crclient.InNamespace(namespace))
	must(t, err)
	defer writes.Stop()
	const stamps = 50
	for i := range stamps {
		stamp(fmt.Sprintf("stamp-%d", i), before)
	}
	await(t, "the last stamp is on the ReplicaSet", func() bool {
		return sets()[before].Annotations[fence.AnnotationWriteID] == "stamp-49"
	})
	old := sets()[before]
	if old.Labels[fence.LabelLease] != "main" {
		t.Fatal("the ReplicaSet is not guarded")
	}
	if fields := len(old.ManagedFields); fields > 3 {
		t.Errorf("its managed fields have %d entries", fields)
	}
	if text, err := json.Marshal(old); err != nil || len(text) > 6_000 {
		t.Errorf("it has %d bytes, %v", len(text), err)
	}
	for n := 1; ; n++ {
		if event := <-writes.ResultChan(); event.Object.(*appsv1.ReplicaSet).ResourceVersion == old.ResourceVersion {
			break
		}
		if n > stamps+10 { // its making and its status
			t.Fatalf("%d stamps were more than %d writes of the ReplicaSet", stamps, n)
		}
	}
	err = e.Admin.Patch(t.Context(), &old, crclient.RawPatch(types.MergePatchType, []byte(`{"spec":{"minReadySeconds":1}}`)))
	if reason, _ := client.Reason(err); reason != fence.Unstamped {
		t.Errorf("a copied stamp presents a token: %v", err)
	}

	former := held.Token()
	must(t, held.Release(t.Context()))
	held, err = client.Acquire(t.Context(), e.Config, namespace, "main")
	must(t, err)
	stamp("of the next", after)
	await(t, "the next holder's template is rolled out", func() bool {
		now := sets()
		return len(now) == 2 && *now[before].Spec.Replicas == 0 && *now[after].Spec.Replicas == 1
	})
	if got := sets()[before].Annotations[fence.AnnotationToken]; got != former.String() {
		t.Errorf("the old ReplicaSet holds token %s, want %s", got, former)
	}
	must(t, held.Release(t.Context()))
}
