package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	crclient "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/client"
	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/test/env"
)

// TestHandoversLeaveNothingBehind applies a guarded object again and again,
// with 200 holders in turn. An apply that changes nothing commits nothing, the
// first change of each holder costs one patch more, later ones none, and all
// of it leaves one entry of managed fields.
func TestHandoversLeaveNothingBehind(t *testing.T) {
	t.Parallel()
	const handovers = 200
	e := everything(t)
	namespace := e.Namespace(t)
	makeLease(t, e, namespace, 60)
	cfg := worker(t, e, namespace, "applies")
	commits, err := e.Admin.Watch(t.Context(), &corev1.ConfigMapList{}, crclient.InNamespace(namespace), crclient.MatchingFields{"metadata.name": "app"})
	if err != nil {
		t.Fatal(err)
	}
	defer commits.Stop()
	now := &corev1.ConfigMap{}
	// since counts the commits up to what is stored now.
	since := func() (n int) {
		t.Helper()
		if err := e.Admin.Get(t.Context(), crclient.ObjectKey{Namespace: namespace, Name: "app"}, now); err != nil {
			t.Fatal(err)
		}
		for event := range commits.ResultChan() {
			n++
			if event.Object.(*corev1.ConfigMap).ResourceVersion == now.ResourceVersion {
				return n
			}
		}
		t.Fatal("the watch ended")
		return 0
	}
	app := func(value string) *corev1ac.ConfigMapApplyConfiguration {
		return corev1ac.ConfigMap("app", namespace).WithLabels(map[string]string{fence.LabelLease: "main"}).WithData(map[string]string{"value": value})
	}
	var holder swapped
	c := stamped(t, e, cfg, &holder)
	apply := func(value string) {
		t.Helper()
		if err := c.Apply(t.Context(), app(value), crclient.FieldOwner("app")); err != nil {
			t.Fatalf("apply %s: %v", value, err)
		}
	}
	values := []string{"a", "b", "c"}
	var entries int
	// A Deployment is scaled and given a status by each of them.
	web := guardedDeployment(namespace, "web")
	if err := e.Admin.Create(t.Context(), web); err != nil {
		t.Fatal(err)
	}
	var webEntries, webSize int
	subresources := func(i int) {
		t.Helper()
		scale := &autoscalingv1.Scale{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "web"}, Spec: autoscalingv1.ScaleSpec{Replicas: int32(2 + i%7)}}
		if err := c.SubResource("scale").Update(t.Context(), web.DeepCopy(), crclient.WithSubResourceBody(scale)); err != nil {
			t.Fatalf("hand-over %d: scale: %v", i, err)
		}
		if err := c.Status().Patch(t.Context(), web.DeepCopy(), crclient.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"status":{"observedGeneration":%d}}`, 100+i))); err != nil {
			t.Fatalf("hand-over %d: status: %v", i, err)
		}
		stored := &appsv1.Deployment{}
		if err := e.Admin.Get(t.Context(), crclient.ObjectKeyFromObject(web), stored); err != nil {
			t.Fatal(err)
		}
		text, err := json.Marshal(stored)
		if err != nil {
			t.Fatal(err)
		}
		if i == 1 {
			webEntries, webSize = len(stored.ManagedFields), len(text)
		}
		// Numbers grow by a few digits.
		if i > 1 && (len(stored.ManagedFields) > webEntries || len(text) > webSize+50) {
			t.Fatalf("hand-over %d: %d entries of managed fields and %d bytes, after %d and %d", i, len(stored.ManagedFields), len(text), webEntries, webSize)
		}
	}
	for i := range handovers {
		held, err := client.Acquire(t.Context(), cfg, namespace, "main")
		if err != nil {
			t.Fatal(err)
		}
		holder.Held = held
		if i == 0 {
			apply(values[2])
			apply(values[2]) // gives up the record that the create had to carry
			since()
			entries = len(now.ManagedFields)
		}
		before := now.ResourceVersion
		apply(now.Data["value"])
		if err := e.Admin.Get(t.Context(), crclient.ObjectKeyFromObject(now), now); err != nil || now.ResourceVersion != before {
			t.Fatalf("hand-over %d: an idle apply committed %s after %s, %v", i, now.ResourceVersion, before, err)
		}
		apply(values[i%3])
		if n := since(); i > 0 && n != 2 {
			t.Fatalf("hand-over %d: the first change took %d commits, want the record and the change", i, n)
		}
		apply(values[i%3] + values[i%3])
		if n := since(); n != 1 {
			t.Fatalf("hand-over %d: a further change took %d commits", i, n)
		}
		subresources(i)
		if got := fence.Recorded(now.Annotations); got != held.Token() {
			t.Fatalf("hand-over %d: recorded %s, want %s", i, got, held.Token())
		}
		if err := held.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if more := len(now.ManagedFields) - entries; more > 1 {
		t.Errorf("%d entries of managed fields more", more)
	}
	if _, ok := now.Annotations[fence.AnnotationWriteID]; ok {
		t.Error("a write by header left a write-id")
	}
}

// swapped is a holder whose lease changes.
type swapped struct{ *client.Held }

// TestAPIServerGone stops the API server while a lease is held. The holder
// stops in time, writes nothing afterwards, and the lease can be acquired
// again.
func TestAPIServerGone(t *testing.T) {
	t.Parallel()
	e := env.Start(t, env.Options{Operator: true, Webhook: true, Policy: true,
		APIServerArgs: map[string]string{"request-timeout": "3s"}}) // it also bounds how long it takes to stop
	namespace := e.Namespace(t)
	makeLease(t, e, namespace, 5)
	if err := e.Admin.Create(t.Context(), guardedDeployment(namespace, "app")); err != nil {
		t.Fatal(err)
	}
	cfg := worker(t, e, namespace, "worker")
	held := acquire(t, cfg, namespace, "a")
	c := stamped(t, e, cfg, held)
	d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "app"}}
	write := func(c crclient.Client, body string) error {
		return c.Patch(t.Context(), d, crclient.RawPatch("application/merge-patch+json", []byte(body)))
	}
	if err := write(c, `{"spec":{"replicas":2}}`); err != nil {
		t.Fatal(err)
	}
	first := held.Token()
	if err := e.APIServerStop(); err != nil {
		t.Fatal(err)
	}
	gone := time.Now()
	if err := write(c, `{"spec":{"replicas":3}}`); err == nil || errors.Is(err, fence.ErrLost) {
		t.Errorf("with the API server away: %v", err)
	}
	<-held.Done()
	if after := time.Since(gone); after > 4*time.Second+500*time.Millisecond {
		t.Errorf("it stopped after %s", after)
	}
	if !errors.Is(held.Err(), fence.ErrLost) {
		t.Errorf("it ended with %v", held.Err())
	}
	if err := e.APIServerStart(); err != nil {
		t.Fatal(err)
	}
	if err := write(c, `{"spec":{"replicas":4}}`); !errors.Is(err, fence.ErrLost) {
		t.Errorf("after the loss: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	again, err := client.Acquire(ctx, cfg, namespace, "main", client.WithIdentity("a"))
	if err != nil {
		t.Fatal(err)
	}
	if again.Token() <= first {
		t.Errorf("token %s after %s", again.Token(), first)
	}
	await(t, "the new token writes", func() bool { return write(stamped(t, e, cfg, again), `{"spec":{"replicas":5}}`) == nil })
	if err := again.Release(ctx); err != nil {
		t.Error(err)
	}
}
