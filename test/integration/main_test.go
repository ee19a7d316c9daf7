// Package integration tests the operator on a real API server.
package integration

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/test/env"
)

func TestMain(m *testing.M) { os.Exit(env.Main(m)) }

// operated runs the operator on the real clock.
var operated = env.Shared(env.Options{Operator: true})

// await polls until done says so; every 20 ms, for half a minute.
func await(t *testing.T, what string, done func() bool) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	limit := time.After(30 * time.Second)
	for !done() {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatalf("waited half a minute until %s", what)
		}
	}
}

// world is one lease in a namespace of its own.
type world struct {
	*testing.T
	*env.Environment
	namespace, name string
}

func newWorld(t *testing.T, e *env.Environment, spec v1alpha1.FencedLeaseSpec) *world {
	t.Helper()
	w := &world{T: t, Environment: e, namespace: e.Namespace(t), name: "lease"}
	w.makeLease(spec)
	return w
}

func (w *world) makeLease(spec v1alpha1.FencedLeaseSpec) *v1alpha1.FencedLease {
	w.Helper()
	lease := &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: w.name}, Spec: spec}
	if err := w.Admin.Create(w.Context(), lease); err != nil {
		w.Fatal(err)
	}
	return lease
}

func (w *world) lease() *v1alpha1.FencedLease {
	w.Helper()
	lease := &v1alpha1.FencedLease{}
	if err := w.Admin.Get(w.Context(), client.ObjectKey{Namespace: w.namespace, Name: w.name}, lease); err != nil {
		w.Fatal(err)
	}
	return lease
}

// claim makes a claim; change may be nil.
func (w *world) claim(name string, change func(*v1alpha1.LeaseClaim)) *v1alpha1.LeaseClaim {
	w.Helper()
	c := &v1alpha1.LeaseClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name},
		Spec:       v1alpha1.LeaseClaimSpec{LeaseName: w.name},
	}
	if change != nil {
		change(c)
	}
	if err := w.Admin.Create(w.Context(), c); err != nil {
		w.Fatal(err)
	}
	return c
}

func (w *world) find(name string) (*v1alpha1.LeaseClaim, error) {
	c := &v1alpha1.LeaseClaim{}
	return c, w.Admin.Get(w.Context(), client.ObjectKey{Namespace: w.namespace, Name: name}, c)
}

func (w *world) get(name string) (*v1alpha1.LeaseClaim, string) {
	w.Helper()
	c, err := w.find(name)
	if err != nil {
		w.Fatal(err)
	}
	held := meta.FindStatusCondition(c.Status.Conditions, v1alpha1.LeaseClaimHeld)
	if held == nil {
		return c, ""
	}
	return c, held.Reason
}

// awaitReason waits until a claim's Held condition has the reason.
func (w *world) awaitReason(name, reason string) *v1alpha1.LeaseClaim {
	w.Helper()
	var c *v1alpha1.LeaseClaim
	await(w.T, fmt.Sprintf("claim %s is %s", name, reason), func() (ok bool) {
		var got string
		c, got = w.get(name)
		return got == reason
	})
	return c
}

func (w *world) release(c *v1alpha1.LeaseClaim) {
	w.Helper()
	if err := w.Admin.Delete(context.WithoutCancel(w.Context()), c, client.Preconditions{UID: &c.UID}); err != nil {
		w.Fatal(err)
	}
}

// renew changes the claim's renewTime until the test ends or stop is called.
func (w *world) renew(c *v1alpha1.LeaseClaim, every time.Duration) (stop func()) {
	ctx, cancel := context.WithCancel(w.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(every)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case now := <-tick.C:
				patch := fmt.Appendf(nil, `{"spec":{"renewTime":%q}}`, now.UTC().Format(metav1.RFC3339Micro))
				_ = w.Admin.Patch(ctx, c.DeepCopy(), client.RawPatch("application/merge-patch+json", patch))
			}
		}
	}()
	stop = func() { cancel(); <-done }
	w.Cleanup(stop)
	return stop
}

func rule(group, resource string, verbs ...string) rbacv1.PolicyRule {
	return rbacv1.PolicyRule{APIGroups: []string{group}, Resources: []string{resource}, Verbs: verbs}
}
