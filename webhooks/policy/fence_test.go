package policy

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authentication/user"
	"pgregory.net/rapid"

	"github.com/fencedlease/fencedlease/fence"
)

// guarded gives a ConfigMap that the lease named guards, with annotations
// given as pairs.
func guarded(lease string, annotations ...string) *corev1.ConfigMap {
	c := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{
		Namespace: "shop", Name: "orders", UID: "u1", ResourceVersion: "7",
		Labels: map[string]string{fence.LabelLease: lease}, Annotations: map[string]string{},
	}, Data: map[string]string{"total": "1"}}
	for i := 0; i < len(annotations); i += 2 {
		c.Annotations[annotations[i]] = annotations[i+1]
	}
	return c
}

// with gives a copy with other annotations and data changed, as a write.
func with(c *corev1.ConfigMap, annotations ...string) *corev1.ConfigMap {
	c = c.DeepCopy()
	for i := 0; i < len(annotations); i += 2 {
		c.Annotations[annotations[i]] = annotations[i+1]
	}
	c.Data["total"] = "2"
	return c
}

func sender(name string, extra ...string) user.DefaultInfo {
	u := user.DefaultInfo{Name: name, Groups: []string{"system:authenticated"}, Extra: map[string][]string{}}
	for i := 0; i < len(extra); i += 2 {
		u.Extra[extra[i]] = append(u.Extra[extra[i]], extra[i+1])
	}
	return u
}

func tableOf(seen int64, leases ...fence.TableLease) *corev1.ConfigMap {
	data, _ := fence.PackTable(leases, seen, 0)
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "fencedlease-system", Name: fence.TableName}, Data: data}
}

func leaseOf(name string, l fence.Lease) fence.TableLease {
	return fence.TableLease{Namespace: "shop", Name: name, Lease: l}
}

func TestFence(t *testing.T) {
	policy, _ := Fence(testOptions)
	validator := compile(t, policy)
	table := tableOf(1000,
		leaseOf("main", fence.Lease{Current: 42, Held: true, Holder: "pod-b"}),
		leaseOf("bound", fence.Lease{Current: 42, Held: true, Holder: "pod-b", BindUser: true, HolderUser: "bob smith", HolderPodUID: "p1"}),
		leaseOf("revoked", fence.Lease{Current: 42, Min: 50, Held: true, Holder: "pod-b"}),
		leaseOf("header", fence.Lease{Current: 42, HeaderOnly: true}),
		leaseOf("lapsed", fence.Lease{Current: 42, DenyLapsed: true}),
	)
	const token, writeID, floor = fence.AnnotationToken, fence.AnnotationWriteID, fence.AnnotationFloor
	update := func(u user.DefaultInfo, old, object *corev1.ConfigMap) request {
		return request{operation: admission.Update, user: u, old: old, object: object}
	}
	stored := guarded("main", token, "42", writeID, "a")
	behind := guarded("main", token, "41", writeID, "a")
	forbidden := func(message string) denial { return denial{metav1.StatusReasonForbidden, message} }

	tests := map[string]struct {
		request request
		want    denial
	}{
		"an unstamped write is not the policy's to judge": {update(sender("amy"), stored, with(stored)), denial{}},
		"the current token by annotations passes":         {update(sender("amy"), stored, with(stored, writeID, "b")), denial{}},
		"the current token by header passes":              {update(sender("amy", fence.ExtraToken, "42"), stored, with(stored)), denial{}},
		"the first write of a token passes where it records": {
			update(sender("amy"), behind, with(behind, token, "42", writeID, "b")), denial{}},
		"a token below the record is stale": {
			update(sender("amy", fence.ExtraToken, "41"), stored, with(stored)),
			forbidden(`StaleToken: [shop/main] token 41 is stale; recorded 42, current 42, held by "pod-b"; stop: a newer holder has written here`)},
		"a token below the floor is stale": {
			update(sender("amy", fence.ExtraToken, "42"), guarded("main", token, "42", floor, "43"), with(guarded("main", token, "42", floor, "43"))),
			forbidden(`StaleToken: [shop/main] token 42 is stale; recorded 43, current 42, held by "pod-b"; stop: a newer holder has written here`)},
		"a superseded token is stale on an object that the new holder never touched": {
			update(sender("amy", fence.ExtraToken, "41"), behind, with(behind)),
			forbidden(`StaleToken: [shop/main] token 41 is stale; recorded 41, current 42, held by "pod-b"; stop: a newer token was issued`)},
		"the current token by header on a record behind has to be recorded first": {
			update(sender("amy", fence.ExtraToken, "42"), behind, with(behind)),
			forbidden(`NotRecorded: [shop/main] token 42 is not recorded yet; recorded 41, current 42, held by "pod-b"; this path cannot record: first set fencedlease.io/token on the object with this token`)},
		"a token above the table is the webhook's to judge": {
			update(sender("amy"), stored, with(stored, token, "43", writeID, "b")), denial{}},
		"a malformed token is invalid": {
			update(sender("amy", fence.ExtraToken, "042"), stored, with(stored)),
			denial{metav1.StatusReasonInvalid, `MalformedToken: [shop/main] malformed token "042"; present the token exactly as the lease's status shows it`}},
		"two tokens in the header are malformed": {
			update(sender("amy", fence.ExtraToken, "42", fence.ExtraToken, "42"), stored, with(stored)),
			denial{metav1.StatusReasonInvalid, `MalformedToken: [shop/main] the header presents more than one token; present the token exactly as the lease's status shows it`}},
		"a revoked token is stale": {
			update(sender("amy", fence.ExtraToken, "42"), guarded("revoked", token, "42"), with(guarded("revoked", token, "42"))),
			forbidden(`StaleToken: [shop/revoked] token 42 is revoked; recorded 42, current 50, held by "pod-b"; stop, and acquire the lease anew`)},
		"a lease may refuse tokens by annotations": {
			update(sender("amy"), guarded("header", token, "42", writeID, "a"), with(guarded("header", token, "42", writeID, "b"))),
			forbidden(`Unstamped: [shop/header] token 42 was presented by annotations, and the lease accepts it by header alone; impersonate yourself with the extra fencedlease.io/token`)},
		"a bound token of another account is rejected": {
			update(sender("eve", fence.ExtraToken, "42"), guarded("bound", token, "42"), with(guarded("bound", token, "42"))),
			forbidden(`NotHolder: [shop/bound] token 42 belongs to another account than "eve"; recorded 42, current 42, held by "pod-b"; write as the account that made the claim`)},
		"a bound token of the holder's account passes": {
			update(sender("bob smith", fence.ExtraToken, "42"), guarded("bound", token, "42"), with(guarded("bound", token, "42"))), denial{}},
		"a bound token of another pod of the holder's account is rejected": {
			update(sender("bob smith", fence.ExtraToken, "42", extraPodUID, "p2"), guarded("bound", token, "42"), with(guarded("bound", token, "42"))),
			forbidden(`NotHolder: [shop/bound] token 42 belongs to another account than "bob smith"; recorded 42, current 42, held by "pod-b"; write as the account that made the claim`)},
		"a lease may refuse the current token while nobody holds": {
			update(sender("amy", fence.ExtraToken, "42"), guarded("lapsed", token, "42"), with(guarded("lapsed", token, "42"))),
			forbidden(`Lapsed: [shop/lapsed] token 42 is current but its holder is gone; recorded 42, current 42, held by nobody; acquire the lease anew`)},
		"a lease that is gone is unknown": {
			update(sender("amy", fence.ExtraToken, "42"), guarded("gone", token, "42"), with(guarded("gone", token, "42"))),
			forbidden(`UnknownLease: [shop/gone] token 42 belongs to a lease that does not exist; recorded 42, no such lease; create the FencedLease, or take the label off with the right to bypass`)},
		"a lease that may be newer than the table is the webhook's to judge": {
			update(sender("amy", fence.ExtraToken, "1001"), guarded("new", token, "1001"), with(guarded("new", token, "1001"))), denial{}},
		"a stamped write may not take the record off": {
			update(sender("amy", fence.ExtraToken, "42"), stored, with(guarded("main"))),
			forbidden(`FenceRemoved: [shop/main] token 42 comes with a lower record, or another floor; recorded 42, current 42, held by "pod-b"; keep the annotation fencedlease.io/token in the object, equal to this token, and leave fencedlease.io/floor`)},
		"a mark for the holder's own deletion passes": {
			update(sender("amy", fence.ExtraToken, "42"), stored, with(stored, fence.AnnotationDeleteToken, "42")), denial{}},
		"a mark in the name of another token is refused": {
			update(sender("amy", fence.ExtraToken, "42"), stored, with(stored, fence.AnnotationDeleteToken, "43")),
			forbidden(`FenceRemoved: [shop/main] token 42 sets fencedlease.io/delete-token to another one; recorded 42, current 42, held by "pod-b"; set it to the token that is presented, or take it off`)},
		"so is one by annotations": {
			update(sender("amy"), stored, with(stored, writeID, "b", fence.AnnotationDeleteToken, "43")),
			forbidden(`FenceRemoved: [shop/main] token 42 sets fencedlease.io/delete-token to another one; recorded 42, current 42, held by "pod-b"; set it to the token that is presented, or take it off`)},
		"so is one above the table": {
			update(sender("amy", fence.ExtraToken, "43"), guarded("main", token, "43"), with(guarded("main", token, "43"), fence.AnnotationDeleteToken, "44")),
			forbidden(`FenceRemoved: [shop/main] token 43 sets fencedlease.io/delete-token to another one; recorded 43, current 42, held by "pod-b"; set it to the token that is presented, or take it off`)},
		"a mark that stands already is left": {
			update(sender("amy", fence.ExtraToken, "42"), guarded("main", token, "42", fence.AnnotationDeleteToken, "43"), with(guarded("main", token, "42", fence.AnnotationDeleteToken, "43"))), denial{}},
		"a mark may be taken off": {
			update(sender("amy", fence.ExtraToken, "42"), guarded("main", token, "42", fence.AnnotationDeleteToken, "42"), with(stored)), denial{}},
		"an exempt principal is not judged": {
			update(sender("system:apiserver", fence.ExtraToken, "41"), stored, with(stored)), denial{}},
		"a node is not judged": {
			update(user.DefaultInfo{Name: "system:node:a", Groups: []string{"system:nodes"}, Extra: map[string][]string{fence.ExtraToken: {"41"}}}, stored, with(stored)), denial{}},
		"a stale write that changes nothing passes": {
			update(sender("amy", fence.ExtraToken, "41"), stored, stored.DeepCopy()), denial{}},
		"a delete by the recorded token passes": {
			request{operation: admission.Delete, user: sender("amy", fence.ExtraToken, "42"), old: stored}, denial{}},
		"a delete by a stale token is rejected": {
			request{operation: admission.Delete, user: sender("amy", fence.ExtraToken, "41"), old: stored},
			forbidden(`StaleToken: [shop/main] token 41 is stale; recorded 42, current 42, held by "pod-b"; stop: a newer holder has written here`)},
		"a delete by a token that is not recorded is rejected": {
			request{operation: admission.Delete, user: sender("amy", fence.ExtraToken, "42"), old: behind},
			forbidden(`NotRecorded: [shop/main] token 42 is not recorded yet; recorded 41, current 42, held by "pod-b"; this path cannot record: first set fencedlease.io/token on the object with this token`)},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(test.want, judge(t, validator, test.request, table)); diff != "" {
				t.Errorf("verdict (-want +got):\n%s", diff)
			}
		})
	}
}

// TestTokensAheadOfTheStore: a lease that the table lacks is gone where its
// token is not above what ran ahead of the store, and may be newer above it.
func TestTokensAheadOfTheStore(t *testing.T) {
	policy, _ := Fence(testOptions)
	validator := compile(t, policy)
	table := tableOf(1000)
	table.Data[fence.TableAhead] = "2000"
	for token, refused := range map[string]bool{"1000": true, "2000": true, "2001": false} {
		old := guarded("gone", fence.AnnotationToken, token)
		got := judge(t, validator, request{operation: admission.Update, user: sender("amy", fence.ExtraToken, token), old: old, object: with(old)}, table)
		if strings.HasPrefix(got.Message, string(fence.UnknownLease)) != refused {
			t.Errorf("token %s: %+v, want refused %t", token, got, refused)
		}
	}
}

// TestFinishingADeletion: where the object is on its way out, taking a
// finalizer off is no write, but a stale token is refused all the same.
func TestFinishingADeletion(t *testing.T) {
	policy, _ := Fence(testOptions)
	validator := compile(t, policy)
	table := tableOf(1000, leaseOf("lapsed", fence.Lease{Current: 42, DenyLapsed: true}))
	going := guarded("lapsed", fence.AnnotationToken, "42")
	going.DeletionTimestamp = new(metav1.Now())
	going.Finalizers = []string{"a.example/x", "b.example/y"}
	done := going.DeepCopy()
	done.Finalizers = []string{"b.example/y"}
	more := with(done)
	added := going.DeepCopy()
	added.Finalizers = append(added.Finalizers, "c.example/z")

	tests := map[string]struct {
		token  string
		object *corev1.ConfigMap
		denied bool
	}{
		"a removed finalizer passes although the lease refuses the token": {"42", done, false},
		"a stale token is refused":                                        {"41", done, true},
		"a malformed token is refused":                                    {"042", done, true},
		"one more change is a write":                                      {"42", more, true},
		"another finalizer is a write":                                    {"42", added, true},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			got := judge(t, validator, request{operation: admission.Update, user: sender("amy", fence.ExtraToken, test.token), old: going, object: test.object}, table)
			if (got != denial{}) != test.denied {
				t.Errorf("denial %+v, want denied %v", got, test.denied)
			}
		})
	}
}

// TestAgreesWithJudge: on generated requests the policy refuses exactly what
// fence.Judge refuses, with the same words.
func TestAgreesWithJudge(t *testing.T) {
	policy, _ := Fence(testOptions)
	validator := compile(t, policy)
	rapid.Check(t, func(t *rapid.T) {
		token := rapid.OneOf(
			rapid.StringMatching(`[1-5]`),
			rapid.SampledFrom([]string{"", "0", "04", "+4", " 4", "4 ", "4.0", "4e0", "٤", "9007199254740991", "9007199254740992", "99999999999999999", "four\n"}))
		small := rapid.Map(rapid.IntRange(0, 5), func(i int) fence.Token { return fence.Token(i) })
		lease := fence.Lease{
			Found: rapid.Bool().Draw(t, "found"), Current: small.Draw(t, "current"), Min: small.Draw(t, "min"),
			Held: rapid.Bool().Draw(t, "held"), Holder: rapid.SampledFrom([]string{"a", "b \"q\"", "é"}).Draw(t, "holder"),
			BindUser: rapid.Bool().Draw(t, "bind"), HolderUser: rapid.SampledFrom([]string{"amy", "bob smith"}).Draw(t, "holderUser"),
			HolderPodUID: rapid.SampledFrom([]string{"", "p1"}).Draw(t, "holderPod"),
			DenyLapsed:   rapid.Bool().Draw(t, "denyLapsed"), HeaderOnly: rapid.Bool().Draw(t, "headerOnly"),
		}
		// Without the lease the table says at which revision it was complete.
		seen := rapid.Int64Range(0, 5).Draw(t, "seen")
		var leases []fence.TableLease
		for i := range rapid.IntRange(0, 3).Draw(t, "others") {
			leases = append(leases, leaseOf(fmt.Sprintf("main%d", i), fence.Lease{Current: 9}))
		}
		if lease.Found {
			leases = append(leases, leaseOf("main", lease))
		}
		lease.Name = "shop/main"

		old := guarded("main", fence.AnnotationToken, token.Draw(t, "stored"), fence.AnnotationWriteID, "a")
		if rapid.Bool().Draw(t, "sealed") {
			old.Annotations[fence.AnnotationFloor] = token.Draw(t, "floor")
		}
		presented := fence.Presented{
			Stamped: true, Text: token.Draw(t, "presented"), ByHeader: rapid.Bool().Draw(t, "byHeader"),
			User: rapid.SampledFrom([]string{"amy", "bob smith"}).Draw(t, "user"), PodUID: rapid.SampledFrom([]string{"", "p1", "p2"}).Draw(t, "pod"),
		}
		r := request{operation: admission.Update, old: old, user: sender(presented.User)}
		if presented.PodUID != "" {
			r.user.Extra[extraPodUID] = []string{presented.PodUID}
		}
		records := !presented.ByHeader
		if presented.ByHeader {
			r.user.Extra[fence.ExtraToken] = []string{presented.Text}
			records = rapid.Bool().Draw(t, "records")
			if rapid.Bool().Draw(t, "delete") {
				r.operation, records = admission.Delete, false
			}
		}
		if r.operation == admission.Update {
			object := with(old)
			if records {
				object.Annotations[fence.AnnotationToken] = presented.Text
			}
			if !presented.ByHeader {
				object.Annotations[fence.AnnotationWriteID] = "b"
			}
			r.object = object
		}

		known, found, newer := fence.LookupTable(tableOf(seen, leases...).Data, "shop", "main", first(fence.ParseToken(presented.Text)))
		if found != lease.Found {
			t.Fatalf("the table loses the lease: %v", leases)
		}
		known.Lease.Name, known.Lease.Holder = lease.Name, lease.Holder
		want := fence.Judge(presented, fence.Recorded(old.Annotations), known.Lease, fence.Policy{MustEqual: !records, Live: !found && !newer})
		got := judge(t, validator, r, tableOf(seen, leases...))

		switch want.Outcome {
		case fence.Denied:
			reason := metav1.StatusReasonForbidden
			if want.Reason == fence.MalformedToken {
				reason = metav1.StatusReasonInvalid
				// CEL cannot say what is wrong with the text.
				want.Message, _, _ = strings.Cut(want.Message, "] ")
				got.Message, _, _ = strings.Cut(got.Message, "] ")
			}
			if diff := cmp.Diff(denial{reason, want.Message}, got); diff != "" {
				t.Errorf("verdict (-fence.Judge +policy):\n%s", diff)
			}
		default:
			if got != (denial{}) {
				t.Errorf("the policy refuses what fence.Judge %s: %s", map[fence.Outcome]string{fence.Allowed: "allows", fence.Confirm: "leaves to a live read"}[want.Outcome], got.Message)
			}
		}
	})
}

func first[A, B any](a A, _ B) A { return a }

func BenchmarkFence(b *testing.B) {
	policy, _ := Fence(testOptions)
	for _, n := range []int{1, 1000, 10000} {
		var leases []fence.TableLease
		for i := range n {
			leases = append(leases, leaseOf(fmt.Sprintf("lease-%05d", i), fence.Lease{Current: 42, Held: true, Holder: "pod-b-0123456789"}))
		}
		table := tableOf(1000, leases...)
		stored := guarded(fmt.Sprintf("lease-%05d", n-1), fence.AnnotationToken, "42", fence.AnnotationWriteID, "a")
		requests := map[string]request{
			"header":     {operation: admission.Update, user: sender("amy", fence.ExtraToken, "42"), old: stored, object: with(stored)},
			"annotation": {operation: admission.Update, user: sender("amy"), old: stored, object: with(stored, fence.AnnotationWriteID, "b")},
			"unstamped":  {operation: admission.Update, user: sender("amy"), old: stored, object: with(stored)},
			"exempt":     {operation: admission.Update, user: sender("system:apiserver"), old: stored, object: with(stored)},
		}
		validator := compile(b, policy)
		for _, name := range sortedKeys(requests) {
			b.Run(fmt.Sprintf("%s/leases=%d", name, n), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					if d := judge(b, validator, requests[name], table); d != (denial{}) {
						b.Fatal(d.Message)
					}
				}
			})
		}
	}
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
