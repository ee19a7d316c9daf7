package conformance

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	crclient "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/test/env"
)

// TestHistory lets writers with old and new tokens write to one object at
// once, over all paths and in random order, while tokens are issued. Read back
// by a watch, the tokens of what was committed never go down: neither the
// record, nor the token that each write leaves of itself in what it wrote.
func TestHistory(t *testing.T) {
	e := env.Start(t, env.Options{Webhook: true, Policy: true})
	namespace := e.Namespace(t)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(e.Admin.Patch(t.Context(), &unstructured.Unstructured{Object: map[string]any{"apiVersion": "v1", "kind": "Namespace", "metadata": map[string]any{"name": namespace}}},
		crclient.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"metadata":{"labels":{%q:"true"}}}`, fence.LabelNamespaceMark))))
	lease := &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "main"}}
	must(e.Admin.Create(t.Context(), lease))
	var current atomic.Int64
	current.Store(100) // above what the fields are by default
	issue := func() {
		token := current.Load() + 1
		lease.Status.Token = token
		lease.Status.Holder = &v1alpha1.Holder{ClaimName: "c", ClaimUID: fmt.Sprint(token), Identity: fmt.Sprint(token)}
		must(e.Admin.Status().Update(t.Context(), lease))
		current.Store(token)
	}
	issue()
	in := &instance{Environment: e, namespace: namespace}
	d := in.object(cell{"update", "history"}).(*appsv1.Deployment)
	d.Name, d.Labels = "web", map[string]string{fence.LabelLease: "main"}
	must(e.Admin.Create(t.Context(), d))

	events, err := e.Admin.Watch(t.Context(), &appsv1.DeploymentList{}, crclient.InNamespace(namespace))
	must(err)
	var seen int
	done := make(chan struct{})
	go func() {
		defer close(done)
		highest := fence.Token(0)
		marks := map[string]int64{}
		for event := range events.ResultChan() {
			now, ok := event.Object.(*appsv1.Deployment)
			if !ok {
				continue
			}
			seen++
			if t.Failed() {
				continue
			}
			if recorded := fence.Recorded(now.Annotations); recorded < highest {
				t.Errorf("the record went from %s to %s", highest, recorded)
			} else {
				highest = recorded
			}
			// What the writes wrote: their own token, each path in its field.
			for path, token := range map[string]int64{
				"main": int64(now.Spec.MinReadySeconds), "status": now.Status.ObservedGeneration, "scale": int64(*now.Spec.Replicas), "apply": int64(deref(now.Spec.RevisionHistoryLimit)),
			} {
				if token > 1_000 { // a field as it was made
					continue
				}
				if token < marks[path] {
					t.Errorf("by path %s token %d committed after %d", path, token, marks[path])
				}
				marks[path] = max(marks[path], token)
			}
		}
	}()

	clients := sync.Map{}
	as := func(token int64) crclient.Client {
		if c, ok := clients.Load(token); ok {
			return c.(crclient.Client)
		}
		c := e.Impersonating(t, "writer", map[string][]string{fence.ExtraToken: {fmt.Sprint(token)}})
		clients.Store(token, c)
		return c
	}
	var committed, refused atomic.Int64
	target := func() *appsv1.Deployment {
		return &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "web"}}
	}
	writes := []func(ctx context.Context, token int64) error{
		func(ctx context.Context, token int64) error { // merge patch that records
			return as(token).Patch(ctx, target(), crclient.RawPatch(types.MergePatchType,
				fmt.Appendf(nil, `{"metadata":{"annotations":{%q:"%d"}},"spec":{"minReadySeconds":%d}}`, fence.AnnotationToken, token, token)))
		},
		func(ctx context.Context, token int64) error { // JSON patch that does not
			return as(token).Patch(ctx, target(), crclient.RawPatch(types.JSONPatchType, fmt.Appendf(nil, `[{"op":"add","path":"/spec/minReadySeconds","value":%d}]`, token)))
		},
		func(ctx context.Context, token int64) error { // by annotations
			return e.Admin.Patch(ctx, target(), crclient.RawPatch(types.MergePatchType,
				fmt.Appendf(nil, `{"metadata":{"annotations":{%q:"%d",%q:"%d"}},"spec":{"minReadySeconds":%d}}`, fence.AnnotationToken, token, fence.AnnotationWriteID, rand.Int64(), token)))
		},
		func(ctx context.Context, token int64) error { // get, modify, update without resourceVersion
			now := target()
			if err := as(token).Get(ctx, crclient.ObjectKeyFromObject(now), now); err != nil {
				return err
			}
			now.ResourceVersion = ""
			// It puts the whole object, so every field is its own.
			now.Spec.MinReadySeconds, now.Spec.Replicas, now.Spec.RevisionHistoryLimit = int32(token), new(int32(token)), new(int32(token))
			return as(token).Update(ctx, now)
		},
		func(ctx context.Context, token int64) error {
			u := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "apps/v1", "kind": "Deployment", "metadata": map[string]any{"namespace": namespace, "name": "web"},
				"spec": map[string]any{"revisionHistoryLimit": token}}}
			return as(token).Apply(ctx, crclient.ApplyConfigurationFromUnstructured(u), crclient.FieldOwner("writer"), crclient.ForceOwnership)
		},
		func(ctx context.Context, token int64) error {
			return as(token).Status().Patch(ctx, target(), crclient.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"status":{"observedGeneration":%d}}`, token)))
		},
		func(ctx context.Context, token int64) error {
			return as(token).SubResource("scale").Update(ctx, target(), crclient.WithSubResourceBody(&autoscalingv1.Scale{
				ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "web"}, Spec: autoscalingv1.ScaleSpec{Replicas: int32(token)}}))
		},
		func(ctx context.Context, token int64) error { // a delete that may not happen: its UID is another
			return as(token).Delete(ctx, target(), crclient.Preconditions{UID: new(types.UID("another"))})
		},
	}
	// Until there is enough to tell: a busy machine takes its time.
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	const enough, perToken = 400, 15
	var wg sync.WaitGroup
	for worker := range 6 {
		random := rand.New(rand.NewPCG(uint64(worker), 7))
		wg.Go(func() {
			for ctx.Err() == nil {
				token := current.Load() - random.Int64N(3)
				if err := writes[random.IntN(len(writes))](ctx, token); err == nil {
					committed.Add(1)
				} else {
					refused.Add(1)
				}
			}
		})
	}
	wg.Go(func() {
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for next := int64(perToken); committed.Load() < enough || refused.Load() < enough; {
			select {
			case <-tick.C:
				if now := committed.Load() + refused.Load(); now >= next {
					issue()
					next = now + perToken
				}
			case <-ctx.Done():
				return
			}
		}
		cancel()
	})
	wg.Wait()
	events.Stop()
	<-done
	if committed.Load() < 100 || refused.Load() < 100 || seen < 100 {
		t.Errorf("%d writes committed, %d were refused, %d versions seen: too few to tell", committed.Load(), refused.Load(), seen)
	}
	t.Logf("%d writes committed, %d were refused, %d tokens issued, %d versions seen", committed.Load(), refused.Load(), current.Load(), seen)
}

func deref(n *int32) int32 {
	if n == nil {
		return 0
	}
	return *n
}
