package integration

import (
	"fmt"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/internal/controlplane"
	"github.com/fencedlease/fencedlease/test/env"
)

func (w *world) merge(o client.Object, body string) {
	w.Helper()
	if err := w.Admin.Patch(w.Context(), o, client.RawPatch(types.MergePatchType, []byte(body))); err != nil {
		w.Fatal(err)
	}
}

// awaitCondition waits until a condition of the lease has the reason.
func (w *world) awaitCondition(kind, reason string) *v1alpha1.FencedLease {
	w.Helper()
	var lease *v1alpha1.FencedLease
	await(w.T, fmt.Sprintf("the lease's %s is %s", kind, reason), func() bool {
		lease = w.lease()
		c := meta.FindStatusCondition(lease.Status.Conditions, kind)
		return c != nil && c.Reason == reason
	})
	return lease
}

func long() v1alpha1.FencedLeaseSpec { return v1alpha1.FencedLeaseSpec{LeaseDurationSeconds: 600} }

func TestReaffirm(t *testing.T) {
	t.Parallel()
	w := newWorld(t, operated(t), long())
	w.claim("a", nil)
	a := w.awaitReason("a", v1alpha1.ReasonGranted)
	w.merge(a.DeepCopy(), `{"spec":{"reaffirm":1}}`)
	await(t, "the claim has a higher token", func() bool { c, _ := w.get("a"); return c.Status.Token > a.Status.Token })
	lease := w.lease()
	if c, _ := w.get("a"); lease.Status.Holder.ClaimUID != string(a.UID) || lease.Status.Token != c.Status.Token {
		t.Errorf("lease %+v, claim %+v", lease.Status, c.Status)
	}
}

func TestPriority(t *testing.T) {
	t.Parallel()
	spec := long()
	spec.MaxPriority = new(int32(10))
	w := newWorld(t, operated(t), spec)
	a := w.claim("a", nil)
	w.awaitReason("a", v1alpha1.ReasonGranted)
	w.claim("low", nil)
	w.awaitReason("low", v1alpha1.ReasonWaiting)
	w.claim("high", func(c *v1alpha1.LeaseClaim) { c.Spec.Priority = new(int32(10)) })
	w.awaitReason("high", v1alpha1.ReasonWaiting)
	w.claim("too-high", func(c *v1alpha1.LeaseClaim) { c.Spec.Priority = new(int32(11)) })
	w.awaitReason("too-high", v1alpha1.ReasonRefused)
	w.release(a)
	w.awaitReason("high", v1alpha1.ReasonGranted)
	w.awaitReason("low", v1alpha1.ReasonWaiting)
}

func TestNewestClaimPreempts(t *testing.T) {
	t.Parallel()
	spec := long()
	spec.Preemption = v1alpha1.PreemptionNewestClaim
	w := newWorld(t, operated(t), spec)
	last := int64(0)
	for i := range 3 {
		name := fmt.Sprintf("run-%d", i)
		w.claim(name, nil)
		c := w.awaitReason(name, v1alpha1.ReasonGranted)
		if c.Status.Token <= last {
			t.Errorf("token %d after %d", c.Status.Token, last)
		}
		last = c.Status.Token
		if i > 0 {
			w.awaitReason(fmt.Sprintf("run-%d", i-1), v1alpha1.ReasonPreempted)
		}
	}
}

// TestTwoClaimsOfOneIdentity: the identity is for people, and two claims are
// two acquisitions.
func TestTwoClaimsOfOneIdentity(t *testing.T) {
	t.Parallel()
	w := newWorld(t, operated(t), long())
	for _, name := range []string{"a", "b"} {
		w.claim(name, func(c *v1alpha1.LeaseClaim) { c.Spec.HolderIdentity = "same-host" })
	}
	w.awaitReason("a", v1alpha1.ReasonGranted)
	w.awaitReason("b", v1alpha1.ReasonWaiting)
}

func TestRevoke(t *testing.T) {
	t.Parallel()
	w := newWorld(t, operated(t), long())
	w.claim("a", nil)
	a := w.awaitReason("a", v1alpha1.ReasonGranted)
	minimum := a.Status.Token + 1_000_000_000
	w.merge(w.lease(), fmt.Sprintf(`{"spec":{"minToken":%d}}`, minimum))
	w.awaitReason("a", v1alpha1.ReasonRevoked)
	revoked := w.awaitCondition(v1alpha1.FencedLeaseHeld, v1alpha1.ReasonFree)
	if revoked.Status.Token < minimum {
		t.Errorf("the current token is %d after minToken %d", revoked.Status.Token, minimum)
	}
	// Taking it back revives nothing.
	w.merge(w.lease(), `{"spec":{"minToken":null}}`)
	w.claim("b", nil)
	b := w.awaitReason("b", v1alpha1.ReasonGranted)
	if b.Status.Token <= minimum {
		t.Errorf("token %d after minToken %d", b.Status.Token, minimum)
	}
	// The token ran ahead of the store, and a lease that is made anew knows.
	if err := w.Admin.Delete(t.Context(), w.lease()); err != nil {
		t.Fatal(err)
	}
	w.awaitReason("b", v1alpha1.ReasonLapsed)
	w.makeLease(long())
	w.claim("c", nil)
	if c := w.awaitReason("c", v1alpha1.ReasonGranted); c.Status.Token <= b.Status.Token {
		t.Errorf("token %d after %d", c.Status.Token, b.Status.Token)
	}
}

func TestAdoptedLease(t *testing.T) {
	t.Parallel()
	w := newWorld(t, operated(t), v1alpha1.FencedLeaseSpec{LeaseRef: &v1alpha1.LeaseReference{Name: "native"}})
	w.awaitCondition(v1alpha1.FencedLeaseReady, v1alpha1.ReasonLeaseNotFound)
	w.claim("claim", nil)
	w.awaitReason("claim", v1alpha1.ReasonRefused)

	now := metav1.NewMicroTime(time.Unix(1_800_000_000, 123_000).UTC())
	native := &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "native"},
		Spec: coordinationv1.LeaseSpec{
			HolderIdentity: new("pod-a"), LeaseDurationSeconds: new(int32(600)), AcquireTime: &now, RenewTime: &now, LeaseTransitions: new(int32(0)),
		},
	}
	if err := w.Admin.Create(t.Context(), native); err != nil {
		t.Fatal(err)
	}
	held := w.awaitCondition(v1alpha1.FencedLeaseHeld, v1alpha1.ReasonHeld)
	if ready := meta.FindStatusCondition(held.Status.Conditions, v1alpha1.FencedLeaseReady); ready == nil || !strings.Contains(ready.Message, "processes that share one identity there share one token") {
		t.Errorf("nobody is told what cannot be told apart: %+v", ready)
	}
	last := held.Status.Token
	version := w.lease().ResourceVersion
	w.merge(native, `{"spec":{"renewTime":"2027-01-15T08:00:10.000000Z"}}`)

	for name, patch := range map[string]string{
		"another holder":       `{"spec":{"holderIdentity":"pod-b"}}`,
		"another acquisition":  `{"spec":{"acquireTime":"2027-01-15T08:01:00.000000Z"}}`,
		"another transition":   `{"spec":{"leaseTransitions":1}}`,
		"no transitions known": `{"spec":{"leaseTransitions":null}}`,
	} {
		if got := w.lease(); got.Status.Token == last && got.ResourceVersion != version && version != "" {
			t.Errorf("a renewal wrote the lease")
		}
		version = ""
		w.merge(native, patch)
		await(t, name+" is issued a token", func() bool { return w.lease().Status.Token > last })
		last = w.lease().Status.Token
	}
	w.merge(native, `{"spec":{"holderIdentity":""}}`)
	if free := w.awaitCondition(v1alpha1.FencedLeaseHeld, v1alpha1.ReasonFree); free.Status.Holder != nil || free.Status.Token != last {
		t.Errorf("free lease: %+v", free.Status)
	}
	w.merge(native, `{"spec":{"holderIdentity":"pod-b"}}`)
	await(t, "the same holder is issued a new token", func() bool { return w.lease().Status.Token > last })
	last = w.lease().Status.Token
	native.Spec.HolderIdentity = new("pod-b")
	again := native.DeepCopy()
	again.ObjectMeta = metav1.ObjectMeta{Namespace: w.namespace, Name: "native"}
	if err := w.Admin.Delete(t.Context(), native); err != nil {
		t.Fatal(err)
	}
	if err := w.Admin.Create(t.Context(), again); err != nil {
		t.Fatal(err)
	}
	await(t, "another UID is issued a new token", func() bool { return w.lease().Status.Token > last })
}

func TestAdoptedLeaseLapses(t *testing.T) {
	t.Parallel()
	w := newWorld(t, operated(t), v1alpha1.FencedLeaseSpec{LeaseRef: &v1alpha1.LeaseReference{Name: "native"}})
	native := &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "native"},
		Spec:       coordinationv1.LeaseSpec{HolderIdentity: new("pod-a"), LeaseDurationSeconds: new(int32(1))},
	}
	if err := w.Admin.Create(t.Context(), native); err != nil {
		t.Fatal(err)
	}
	held := w.awaitCondition(v1alpha1.FencedLeaseHeld, v1alpha1.ReasonHeld)
	free := w.awaitCondition(v1alpha1.FencedLeaseHeld, v1alpha1.ReasonFree)
	if free.Status.Token != held.Status.Token || free.Status.Holder != nil {
		t.Errorf("after the lapse: %+v", free.Status)
	}
	w.merge(native, `{"spec":{"renewTime":"2027-01-15T08:00:10.000000Z"}}`)
	await(t, "who comes back is issued a new token", func() bool { return w.lease().Status.Token > held.Status.Token })
}

func TestFinishedClaimIsRemoved(t *testing.T) {
	t.Parallel()
	w := newWorld(t, operated(t), v1alpha1.FencedLeaseSpec{LeaseDurationSeconds: 1})
	for name, ttl := range map[string]int32{"at-once": 0, "soon": 1, "kept": 600} {
		w.claim(name, func(c *v1alpha1.LeaseClaim) { c.Spec.TTLSecondsAfterFinished = &ttl })
	}
	w.awaitReason("kept", v1alpha1.ReasonLapsed)
	for _, name := range []string{"at-once", "soon"} {
		await(t, name+" is gone", func() bool { _, err := w.find(name); return apierrors.IsNotFound(err) })
	}
	w.awaitReason("kept", v1alpha1.ReasonLapsed)
}

func TestHandoverDelay(t *testing.T) {
	t.Parallel()
	w := newWorld(t, operated(t), v1alpha1.FencedLeaseSpec{LeaseDurationSeconds: 1, HandoverDelaySeconds: new(int32(1))})
	w.claim("a", nil)
	w.awaitReason("a", v1alpha1.ReasonGranted)
	b := w.claim("b", nil)
	w.renew(b, 200*time.Millisecond)
	w.awaitReason("a", v1alpha1.ReasonLapsed)
	if _, reason := w.get("b"); reason == v1alpha1.ReasonGranted {
		t.Error("b was granted without the delay")
	}
	w.awaitCondition(v1alpha1.FencedLeaseHeld, v1alpha1.ReasonHandoverDelay)
	w.awaitReason("b", v1alpha1.ReasonGranted)
	// A release is not delayed, nor is the queue after it.
	c := w.claim("c", nil)
	w.renew(c, 200*time.Millisecond)
	w.awaitReason("c", v1alpha1.ReasonWaiting)
	w.release(b)
	await(t, "c is granted with no delay in between", func() bool {
		held := meta.FindStatusCondition(w.lease().Status.Conditions, v1alpha1.FencedLeaseHeld)
		if held.Reason == v1alpha1.ReasonHandoverDelay {
			t.Fatal("a release was delayed")
		}
		_, reason := w.get("c")
		return reason == v1alpha1.ReasonGranted
	})
}

// TestRestoredMetadata: a backup keeps metadata and drops status.
func TestRestoredMetadata(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		last   string
		reason string
	}{
		"ahead of the store":        {last: "4000000000000"},
		"at the most":               {last: "4503599627370496"},
		"above what can be":         {last: "9007199254740000", reason: v1alpha1.ReasonInvalidLastToken},
		"not a token":               {last: "0x2a", reason: v1alpha1.ReasonInvalidLastToken},
		"with blanks":               {last: " 42", reason: v1alpha1.ReasonInvalidLastToken},
		"empty":                     {last: "", reason: v1alpha1.ReasonInvalidLastToken},
		"behind the store, no harm": {last: "1"},
	} {
		t.Run(name, func(t *testing.T) {
			e := operated(t)
			w := &world{T: t, Environment: e, namespace: e.Namespace(t), name: "lease"}
			lease := &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{
				Namespace: w.namespace, Name: w.name, Annotations: map[string]string{fence.AnnotationLastToken: c.last},
			}}
			if err := w.Admin.Create(t.Context(), lease); err != nil {
				t.Fatal(err)
			}
			w.claim("a", nil)
			if c.reason != "" {
				got := w.awaitCondition(v1alpha1.FencedLeaseReady, c.reason)
				if got.Status.Token != 0 || got.Status.Holder != nil {
					t.Errorf("issued %+v all the same", got.Status)
				}
				return
			}
			a := w.awaitReason("a", v1alpha1.ReasonGranted)
			if last, _ := fence.ParseToken(c.last); a.Status.Token <= int64(last) {
				t.Errorf("token %d after %s", a.Status.Token, c.last)
			}
		})
	}
}

// TestRestartGivesOneDuration: what a new operator sees first counts as a
// renewal, and one uninterrupted duration is enough.
func TestRestartGivesOneDuration(t *testing.T) {
	e := bare(t)
	w := newWorld(t, e, v1alpha1.FencedLeaseSpec{LeaseDurationSeconds: 2})
	first := start(t, e, func(o *env.Options) { o.Operator = true })
	w.claim("dead", nil)
	w.awaitReason("dead", v1alpha1.ReasonGranted)
	next := w.claim("next", nil)
	w.renew(next, 200*time.Millisecond)
	w.awaitReason("next", v1alpha1.ReasonWaiting)
	first.Stop()
	// Restarts in a row postpone the hand-over.
	for range 3 {
		again := start(t, e, func(o *env.Options) { o.Operator = true })
		<-time.After(800 * time.Millisecond)
		again.Stop()
	}
	if _, reason := w.get("dead"); reason != v1alpha1.ReasonGranted {
		t.Errorf("the claim is %s though no operator ran for one duration", reason)
	}
	// What is waited for shows meanwhile.
	if held := meta.FindStatusCondition(w.lease().Status.Conditions, v1alpha1.FencedLeaseHeld); held == nil || !strings.Contains(held.Message, `"dead"`) {
		t.Errorf("the lease does not say whose end is awaited: %+v", held)
	}
	begin := time.Now()
	start(t, e, func(o *env.Options) { o.Operator = true })
	w.awaitReason("next", v1alpha1.ReasonGranted)
	if took := time.Since(begin); took < 2*time.Second {
		t.Errorf("handed over %v after the restart", took)
	}
	w.awaitReason("dead", v1alpha1.ReasonLapsed)
}

// TestSteadyStateWritesNothing: renewals reach claims alone.
func TestSteadyStateWritesNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t, operated(t), v1alpha1.FencedLeaseSpec{LeaseDurationSeconds: 5})
	a := w.claim("a", nil)
	w.awaitReason("a", v1alpha1.ReasonGranted)
	before := w.lease().ResourceVersion
	status, _ := w.get("a")
	for i := range 50 {
		w.merge(a.DeepCopy(), fmt.Sprintf(`{"spec":{"renewTime":"2026-01-01T00:00:%02d.000000Z"}}`, i))
	}
	// Another lease of the same operator is served after all of these events.
	other := &world{T: t, Environment: w.Environment, namespace: w.namespace, name: "other"}
	other.makeLease(long())
	other.claim("b", nil)
	other.awaitReason("b", v1alpha1.ReasonGranted)
	if got := w.lease().ResourceVersion; got != before {
		t.Errorf("50 renewals moved the lease from %s to %s", before, got)
	}
	after, reason := w.get("a")
	if reason != v1alpha1.ReasonGranted || !status.Status.AcquireTime.Equal(after.Status.AcquireTime) {
		t.Errorf("the claim's status moved from %+v to %+v", status.Status, after.Status)
	}
}

func TestNamespaceIsMarked(t *testing.T) {
	t.Parallel()
	w := newWorld(t, operated(t), long())
	other := w.Namespace(t)
	w.merge(w.lease(), fmt.Sprintf(`{"spec":{"allowedNamespaces":[%q]}}`, other))
	w.claim("a", nil)
	w.awaitReason("a", v1alpha1.ReasonGranted)
	// A namespace that comes later is marked as it comes.
	later := other + "-later"
	w.merge(w.lease(), fmt.Sprintf(`{"spec":{"allowedNamespaces":[%q,%q]}}`, other, later))
	await(t, "the operator has seen that", func() bool { l := w.lease(); return *l.Status.ObservedGeneration == l.Generation })
	if err := w.Admin.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: later}}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{w.namespace, other, later} {
		await(t, name+" is marked", func() bool {
			ns := &corev1.Namespace{}
			return w.Admin.Get(t.Context(), client.ObjectKey{Name: name}, ns) == nil && ns.Labels[fence.LabelNamespaceMark] == "true"
		})
	}
}

func TestSeal(t *testing.T) {
	t.Parallel()
	spec := long()
	spec.Seal = &v1alpha1.Seal{Resources: []v1alpha1.SealedResource{{Resource: "configmaps"}}, TimeoutSeconds: 5}
	w := newWorld(t, operated(t), spec)
	for i := range 30 {
		cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: fmt.Sprintf("guarded-%d", i), Labels: map[string]string{fence.LabelLease: w.name}}}
		if err := w.Admin.Create(t.Context(), cm); err != nil {
			t.Fatal(err)
		}
	}
	unguarded := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "unguarded"}}
	if err := w.Admin.Create(t.Context(), unguarded); err != nil {
		t.Fatal(err)
	}
	w.claim("a", nil)
	lease := w.awaitCondition(v1alpha1.FencedLeaseReady, v1alpha1.ReasonSealing)
	if c := meta.FindStatusCondition(lease.Status.Conditions, v1alpha1.FencedLeaseReady); !strings.Contains(c.Message, "configmaps") || !strings.Contains(c.Message, "grant the operator list and patch") {
		t.Errorf("the condition does not name the missing permission: %s", c.Message)
	}
	w.Grant(t, "", controlplane.OperatorUser, rule("", "configmaps", "list", "patch"))
	a := w.awaitReason("a", v1alpha1.ReasonGranted)
	all := &corev1.ConfigMapList{}
	if err := w.Admin.List(t.Context(), all, client.InNamespace(w.namespace), client.HasLabels{fence.LabelLease}); err != nil {
		t.Fatal(err)
	}
	if len(all.Items) != 30 {
		t.Fatalf("%d guarded objects", len(all.Items))
	}
	for _, cm := range all.Items {
		if got := fence.Recorded(cm.Annotations); got != fence.Token(a.Status.Token) {
			t.Errorf("%s is sealed at %s, and the claim has %d", cm.Name, got, a.Status.Token)
		}
	}
	if err := w.Admin.Get(t.Context(), client.ObjectKeyFromObject(unguarded), unguarded); err != nil || len(unguarded.Annotations) > 0 {
		t.Errorf("an unguarded object was touched: %v, %v", unguarded.Annotations, err)
	}
}

func TestSealProceeds(t *testing.T) {
	t.Parallel()
	spec := long()
	spec.Seal = &v1alpha1.Seal{Resources: []v1alpha1.SealedResource{{Group: "example.com", Resource: "widgets"}}, TimeoutSeconds: 1, OnTimeout: v1alpha1.SealProceed}
	w := newWorld(t, operated(t), spec)
	w.claim("a", nil)
	w.awaitReason("a", v1alpha1.ReasonGranted)
	lease := w.awaitCondition(v1alpha1.FencedLeaseReady, v1alpha1.ReasonSealIncomplete)
	if c := meta.FindStatusCondition(lease.Status.Conditions, v1alpha1.FencedLeaseReady); !strings.Contains(c.Message, "widgets.example.com") {
		t.Errorf("the condition does not name what is not sealed: %s", c.Message)
	}
}
