package client

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	crclient "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/client"
	"github.com/fencedlease/fencedlease/fence"
)

// TestCrowd lets 2,000 claims hold one lease in turn. Each holder reads a
// counter of a guarded object and writes it back raised, and leaves: by a
// release, or by going away in the middle; one in five pauses and writes once
// more after it has lost the lease. No token is seen by two claims, tokens of
// committed writes never go down, and the counter loses no update.
func TestCrowd(t *testing.T) {
	const crowd = 2000
	e := everything(t)
	namespace := e.Namespace(t)
	makeLease(t, e, namespace, 3600)
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "counter", Labels: map[string]string{fence.LabelLease: "main"}}, Data: map[string]string{"n": "0"}}
	if err := e.Admin.Create(t.Context(), cm); err != nil {
		t.Fatal(err)
	}
	claims, err := e.Admin.Watch(t.Context(), &v1alpha1.LeaseClaimList{}, crclient.InNamespace(namespace))
	if err != nil {
		t.Fatal(err)
	}
	defer claims.Stop()
	history, err := e.Admin.Watch(t.Context(), &corev1.ConfigMapList{}, crclient.InNamespace(namespace), crclient.MatchingFields{"metadata.name": "counter"})
	if err != nil {
		t.Fatal(err)
	}
	read := make(chan struct{})
	go func() {
		defer close(read)
		last := fence.Token(0)
		for event := range history.ResultChan() {
			if now, ok := event.Object.(*corev1.ConfigMap); ok {
				if recorded := fence.Recorded(now.Annotations); recorded < last {
					t.Errorf("the counter's token went from %s to %s", last, recorded)
				} else {
					last = recorded
				}
			}
		}
	}()

	var making sync.WaitGroup
	for range 8 {
		making.Go(func() {
			for range crowd / 8 {
				c := &v1alpha1.LeaseClaim{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, GenerateName: "c-"}, Spec: v1alpha1.LeaseClaimSpec{LeaseName: "main"}}
				if err := e.Admin.Create(t.Context(), c); err != nil {
					t.Errorf("claim: %v", err)
					return
				}
			}
		})
	}
	write := func(token int64, n int) error {
		body := fmt.Appendf(nil, `{"metadata":{"annotations":{%q:"%d",%q:"%d-%d"}},"data":{"n":"%d"}}`, fence.AnnotationToken, token, fence.AnnotationWriteID, token, n, n)
		return e.Admin.Patch(t.Context(), cm.DeepCopy(), crclient.RawPatch(types.MergePatchType, body))
	}
	tokens := map[int64]types.UID{}
	var paused sync.WaitGroup
	random := rand.New(rand.NewPCG(7, 7))
	writes, last, held := 0, int64(0), 0
	for event := range claims.ResultChan() {
		c, ok := event.Object.(*v1alpha1.LeaseClaim)
		if !ok || c.Status.Token == 0 || c.DeletionTimestamp != nil || tokens[c.Status.Token] == c.UID {
			continue
		}
		token := c.Status.Token
		if other, ok := tokens[token]; ok || token <= last {
			t.Fatalf("claim %s has token %d after %d, which %q had", c.UID, token, last, other)
		}
		tokens[token], last = c.UID, token
		held++
		now := &corev1.ConfigMap{}
		if err := e.Admin.Get(t.Context(), crclient.ObjectKeyFromObject(cm), now); err != nil {
			t.Fatal(err)
		}
		n, _ := strconv.Atoi(now.Data["n"])
		fate := random.IntN(10)
		if fate > 0 { // one in ten goes away before it wrote
			if err := write(token, n+1); err != nil {
				t.Fatalf("the holder of token %d: %v", token, err)
			}
			writes++
		}
		if err := e.Admin.Delete(context.WithoutCancel(t.Context()), c, crclient.Preconditions{UID: &c.UID}); err != nil {
			t.Fatal(err)
		}
		if held == crowd {
			break
		}
		if fate > 7 {
			paused.Go(func() {
				// It writes once a newer token has been issued.
				await(t, "a newer token", func() bool {
					lease := &v1alpha1.FencedLease{}
					return e.Admin.Get(t.Context(), crclient.ObjectKey{Namespace: namespace, Name: "main"}, lease) == nil && lease.Status.Token > token
				})
				if err := write(token, 1_000_000+n); !client.IsStale(err) {
					t.Errorf("the paused holder of token %d: %v", token, err)
				}
			})
		}
	}
	making.Wait()
	paused.Wait()
	history.Stop()
	<-read
	now := &corev1.ConfigMap{}
	if err := e.Admin.Get(t.Context(), crclient.ObjectKeyFromObject(cm), now); err != nil {
		t.Fatal(err)
	}
	if now.Data["n"] != strconv.Itoa(writes) {
		t.Errorf("the counter is %s after %d writes", now.Data["n"], writes)
	}
	t.Logf("%d claims held the lease, tokens up to %d, %d writes", held, last, writes)
}

func await(t *testing.T, what string, done func() bool) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	limit := time.After(time.Minute)
	for !done() {
		select {
		case <-tick.C:
		case <-limit:
			t.Errorf("waited a minute until %s", what)
			return
		}
	}
}
