package controllers

import (
	"context"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
)

// store holds the table, counts its writes and shows leases of its own, as a
// cache does.
type store struct {
	client.Client
	leases []v1alpha1.FencedLease
	writes *int
	// reads counts those of the table.
	reads int
	// meanwhile happens after the table was read.
	meanwhile func()
}

func (s *store) List(_ context.Context, into client.ObjectList, _ ...client.ListOption) error {
	into.(*v1alpha1.FencedLeaseList).Items = append([]v1alpha1.FencedLease(nil), s.leases...)
	return nil
}

func (s *store) Get(ctx context.Context, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
	s.reads++
	err := s.Client.Get(ctx, key, o, opts...)
	if s.meanwhile != nil {
		s.meanwhile()
	}
	return err
}

func (s *store) Create(ctx context.Context, o client.Object, opts ...client.CreateOption) error {
	*s.writes++
	return s.Client.Create(ctx, o, opts...)
}

func (s *store) Update(ctx context.Context, o client.Object, opts ...client.UpdateOption) error {
	*s.writes++
	return s.Client.Update(ctx, o, opts...)
}

// tabled is a keeper of the table whose cache shows some leases and the API
// server others.
func tabled(cached, live []v1alpha1.FencedLease) (*leaseTable, *store) {
	objects, writes := fake.NewClientBuilder().Build(), 0
	cache := &store{Client: objects, leases: cached, writes: &writes}
	return &leaseTable{
		client: cache, live: &store{Client: objects, leases: live, writes: &writes},
		key:   types.NamespacedName{Namespace: "fencedlease-system", Name: fence.TableName},
		ahead: map[types.UID]*v1alpha1.FencedLease{}, again: make(chan event.GenericEvent, 1),
	}, cache
}

// at is a lease at a revision of the store.
func at(name string, token, revision int64) v1alpha1.FencedLease {
	lease := v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, UID: types.UID("uid-" + name)}}
	lease.ResourceVersion, lease.Status.Token = strconv.FormatInt(revision, 10), token
	return lease
}

// current gives the token that the stored table has for a lease, and up to
// which revision it says that it is complete.
func current(t *testing.T, table *leaseTable, name string) (token fence.Token, seen string) {
	t.Helper()
	data := stored(t, table)
	lease, _, _ := fence.LookupTable(data, "shop", name, 0)
	return lease.Lease.Current, data[fence.TableSeen]
}

// stored is what the stored table says.
func stored(t *testing.T, table *leaseTable) map[string]string {
	t.Helper()
	cm := &corev1.ConfigMap{}
	if err := table.client.(*store).Client.Get(t.Context(), table.key, cm); err != nil {
		t.Fatal(err)
	}
	return cm.Data
}

func reconcileTable(t *testing.T, table *leaseTable) ctrl.Result {
	t.Helper()
	result, err := table.Reconcile(t.Context(), ctrl.Request{})
	if err != nil {
		t.Fatal(err)
	}
	return result
}

func TestLeaseTable(t *testing.T) {
	main := func(token, revision int64) []v1alpha1.FencedLease {
		return []v1alpha1.FencedLease{at("main", token, revision)}
	}
	tests := map[string]struct {
		run        func(t *testing.T, table *leaseTable, cache *store)
		wantToken  fence.Token
		wantSeen   string
		wantWrites int
	}{
		"an unchanged table is written once and looked at again": {
			run: func(t *testing.T, table *leaseTable, _ *store) {
				reconcileTable(t, table)
				if got := reconcileTable(t, table); got.RequeueAfter != tableCheck {
					t.Errorf("looks again after %s, want %s", got.RequeueAfter, tableCheck)
				}
			},
			wantToken: 41, wantSeen: "100", wantWrites: 1,
		},
		"a lease that changed nothing of what the table says causes no write": {
			run: func(t *testing.T, table *leaseTable, cache *store) {
				reconcileTable(t, table)
				cache.leases = main(41, 120)
				reconcileTable(t, table)
			},
			wantToken: 41, wantSeen: "100", wantWrites: 1,
		},
		"a token stands there before it is published, complete no further than the cache": {
			run: func(t *testing.T, table *leaseTable, _ *store) {
				lease := at("main", 42, 150)
				if err := table.expect(t.Context(), &lease); err != nil {
					t.Fatal(err)
				}
			},
			wantToken: 42, wantSeen: "100", wantWrites: 1,
		},
		"it stays while the cache lags, and then costs no write": {
			run: func(t *testing.T, table *leaseTable, cache *store) {
				lease := at("main", 42, 150)
				if err := table.expect(t.Context(), &lease); err != nil {
					t.Fatal(err)
				}
				reconcileTable(t, table)
				cache.leases = main(42, 160)
				reconcileTable(t, table)
				if len(table.ahead) != 0 {
					t.Error("what the cache shows is still kept")
				}
			},
			wantToken: 42, wantSeen: "100", wantWrites: 1,
		},
		"what was not published is taken back without a change of the lease": {
			run: func(t *testing.T, table *leaseTable, _ *store) {
				lease := at("main", 42, 150)
				if err := table.expect(t.Context(), &lease); err != nil {
					t.Fatal(err)
				}
				table.retract(&lease)
				table.retract(&lease) // nobody waits for the first one to be taken up
				<-table.again
				reconcileTable(t, table)
			},
			wantToken: 41, wantSeen: "100", wantWrites: 2,
		},
		"somebody's bypass is put right": {
			run: func(t *testing.T, table *leaseTable, cache *store) {
				reconcileTable(t, table)
				cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: table.key.Namespace, Name: table.key.Name}}
				if err := cache.Client.Update(t.Context(), cm); err != nil {
					t.Fatal(err)
				}
				reconcileTable(t, table)
			},
			wantToken: 41, wantSeen: "100", wantWrites: 2,
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			table, cache := tabled(main(41, 100), main(41, 100))
			test.run(t, table, cache)
			token, seen := current(t, table, "main")
			if token != test.wantToken || seen != test.wantSeen || *cache.writes != test.wantWrites {
				t.Errorf("token %s, seen %s, %d writes; want %s, %s, %d", token, seen, *cache.writes, test.wantToken, test.wantSeen, test.wantWrites)
			}
		})
	}
}

// replaceTable is another replica, which has seen leases up to revision 200.
func replaceTable(t *testing.T, objects client.Client, key types.NamespacedName, leases []v1alpha1.FencedLease) {
	t.Helper()
	data, _ := fence.PackTable(tableOf(append([]v1alpha1.FencedLease(nil), leases...), nil), 200, 0)
	cm := &corev1.ConfigMap{}
	if err := objects.Get(t.Context(), key, cm); err != nil {
		t.Fatal(err)
	}
	cm.Data = data
	if err := objects.Update(t.Context(), cm); err != nil {
		t.Fatal(err)
	}
}

// TestPausedReplicaDoesNotTurnTheTableBack: wherever a replica was stopped
// while another one went on, a token in the table never goes down.
func TestPausedReplicaDoesNotTurnTheTableBack(t *testing.T) {
	before := []v1alpha1.FencedLease{at("main", 41, 100)}
	after := []v1alpha1.FencedLease{at("main", 42, 200)}
	t.Run("before it read the table", func(t *testing.T) {
		table, cache := tabled(before, before)
		reconcileTable(t, table)
		table.live.(*store).leases = after
		replaceTable(t, cache.Client, table.key, after)
		reconcileTable(t, table)
		if token, _ := current(t, table, "main"); token != 42 {
			t.Errorf("the table says %s, want 42", token)
		}
	})
	t.Run("while its successor published what the table had already", func(t *testing.T) {
		paused, cache := tabled(before, before)
		reconcileTable(t, paused)
		successor, _ := tabled(before, before)
		successor.client.(*store).Client, successor.live.(*store).Client = cache.Client, cache.Client
		// Its cache, too, ends where that of the paused one does: the table is
		// complete up to the same revision.
		next := at("main", 42, 100)
		if err := successor.expect(t.Context(), &next); err != nil {
			t.Fatal(err)
		}
		paused.live.(*store).leases = after
		reconcileTable(t, paused)
		if token, _ := current(t, paused, "main"); token != 42 {
			t.Errorf("the table says %s, want 42", token)
		}
	})
	t.Run("between its read and its write", func(t *testing.T) {
		table, cache := tabled(before, before)
		reconcileTable(t, table)
		cache.leases = []v1alpha1.FencedLease{at("main", 41, 110), at("other", 105, 105)}
		live := table.live.(*store)
		live.meanwhile = func() {
			live.meanwhile, live.leases = nil, after
			replaceTable(t, cache.Client, table.key, after)
		}
		if got := reconcileTable(t, table); got.RequeueAfter == tableCheck {
			t.Error("a conflict is not tried again at once")
		}
		reconcileTable(t, table)
		if token, _ := current(t, table, "main"); token != 42 {
			t.Errorf("the table says %s, want 42", token)
		}
	})
}

// TestWhereTokensBegin: what is below the first token of a lease is worthless by
// the table, and its own reservation is not: an API server may see the table of
// that moment when the token is told already. What changes of it meanwhile is
// not worth a write.
func TestWhereTokensBegin(t *testing.T) {
	least := func(table *leaseTable) fence.Token {
		t.Helper()
		lease, _, _ := fence.LookupTable(stored(t, table), "shop", "main", 0)
		return lease.Lease.Min
	}
	table, cache := tabled([]v1alpha1.FencedLease{at("main", 0, 100)}, nil)
	reconcileTable(t, table)
	reserved := at("main", 0, 120)
	reserved.Annotations = map[string]string{fence.AnnotationLastToken: "101"}
	cache.leases = []v1alpha1.FencedLease{reserved}
	reconcileTable(t, table)
	if got := least(table); got != 100 || *cache.writes != 1 {
		t.Errorf("its tokens begin at %s after %d writes, want 100 after one", got, *cache.writes)
	}
	// Another process sees it with the reservation that is about to be published.
	cache.leases[0].ResourceVersion = "99"
	after, _ := tabled(cache.leases, cache.leases)
	reconcileTable(t, after)
	if got := least(after); got != 101 {
		t.Errorf("beside a reservation of 101 its tokens begin at %s", got)
	}
}

// TestTokensAheadOfTheStore: the table keeps what was issued above the store's
// revision when its lease is gone, so that nobody takes such a token for a
// newer lease's.
func TestTokensAheadOfTheStore(t *testing.T) {
	table, cache := tabled([]v1alpha1.FencedLease{at("main", 1000, 100)}, nil)
	table.runsAhead(1000)
	reconcileTable(t, table)
	for what, leases := range map[string][]v1alpha1.FencedLease{
		"its lease is gone": {at("other", 7, 120)},
		"it is made anew":   {at("main", 0, 130)},
	} {
		// Another process, which issued nothing itself.
		after, _ := tabled(leases, leases)
		after.client.(*store).Client, after.live.(*store).Client = cache.Client, cache.Client
		reconcileTable(t, after)
		data := stored(t, after)
		if data[fence.TableAhead] != "1000" {
			t.Errorf("%s: the table says that tokens ran up to %q ahead", what, data[fence.TableAhead])
		}
		lease, found, newer := fence.LookupTable(data, "shop", "main", 1000)
		if newer || found && lease.Lease.Min != 1001 {
			t.Errorf("%s: token 1000 finds %+v, newer %t", what, lease.Lease, newer)
		}
		if _, found, newer := fence.LookupTable(data, "shop", "third", 1001); found || !newer {
			t.Errorf("%s: a token above it may not be a newer lease's", what)
		}
	}
}

// TestReplicaThatWroteLastLooksAgain: what a process wrote last is no proof of
// what the table says.
func TestReplicaThatWroteLastLooksAgain(t *testing.T) {
	before := []v1alpha1.FencedLease{at("main", 41, 100), at("other", 7, 90)}
	table, cache := tabled(before, before)
	reconcileTable(t, table) // writes it
	after := []v1alpha1.FencedLease{at("main", 42, 200), at("other", 7, 90)}
	table.live.(*store).leases = after
	replaceTable(t, cache.Client, table.key, after)
	other := at("other", 8, 90)
	if err := table.expect(t.Context(), &other); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]fence.Token{"main": 42, "other": 8} {
		if token, _ := current(t, table, name); token != want {
			t.Errorf("%s: the table says %s, want %s", name, token, want)
		}
	}
}

// TestManyExpectationsAreOneWrite: what is asked for while the table is being
// written goes into one more write.
func TestManyExpectationsAreOneWrite(t *testing.T) {
	const many = 20
	var leases []v1alpha1.FencedLease
	for i := range many {
		leases = append(leases, at(strconv.Itoa(i), 41, 100))
	}
	table, cache := tabled(leases, leases)
	var asking sync.WaitGroup
	expect := func(i int) {
		lease := at(strconv.Itoa(i), 42, 150)
		if err := table.expect(t.Context(), &lease); err != nil {
			t.Error(err)
		}
	}
	live := table.live.(*store)
	live.meanwhile = func() {
		live.meanwhile = nil
		for i := range many - 1 {
			asking.Go(func() { expect(i + 1) })
		}
		for asked := int64(0); asked < many; { // the others come while the first one writes
			runtime.Gosched()
			table.mu.Lock()
			asked = table.asked
			table.mu.Unlock()
		}
	}
	expect(0)
	asking.Wait()
	for i := range many {
		if token, _ := current(t, table, strconv.Itoa(i)); token != 42 {
			t.Errorf("lease %d: the table says %s, want 42", i, token)
		}
	}
	if *cache.writes > 2 || live.reads > 2 {
		t.Errorf("%d writes and %d reads", *cache.writes, live.reads)
	}
}

func TestTableOfLeases(t *testing.T) {
	minute := func(m int) metav1.Time { return metav1.Date(2026, 1, 1, 0, m, 0, 0, time.UTC) }
	held := at("b", 42, 9)
	held.CreationTimestamp = minute(1)
	held.Spec = v1alpha1.FencedLeaseSpec{
		HolderBinding: v1alpha1.HolderBindingUser, LapsedWrites: v1alpha1.LapsedWritesDeny, Presentation: v1alpha1.PresentationHeader,
		MinToken: 50, AllowedNamespaces: []string{"cart"}, UnstampedWrites: &v1alpha1.UnstampedWrites{Default: v1alpha1.UnstampedWarn},
	}
	held.Status.Holder = &v1alpha1.Holder{Identity: "pod-b", User: &v1alpha1.ClaimUser{Username: "bob", PodUID: "p1"}}
	excepted := at("a", 0, 8)
	excepted.CreationTimestamp = minute(2)
	excepted.Spec.UnstampedWrites = &v1alpha1.UnstampedWrites{
		Default: v1alpha1.UnstampedAllow, Except: []v1alpha1.UnstampedException{{Action: v1alpha1.UnstampedDeny}},
	}
	want := []fence.TableLease{
		{Namespace: "shop", Name: "b", Lease: fence.Lease{
			Current: 42, Min: 50, Held: true, Holder: "pod-b", HolderUser: "bob", HolderPodUID: "p1",
			BindUser: true, DenyLapsed: true, HeaderOnly: true,
		}, AllowedNamespaces: []string{"cart"}, UnstampedAllowed: true},
		// An exception may deny, so the table must not let everybody pass.
		// What is below where its tokens begin was another's.
		{Namespace: "shop", Name: "a", Lease: fence.Lease{Min: 8}},
	}
	if diff := cmp.Diff(want, tableOf([]v1alpha1.FencedLease{excepted, held}, map[types.UID]fence.Token{excepted.UID: 8})); diff != "" {
		t.Errorf("the oldest first (-want +got):\n%s", diff)
	}
}
