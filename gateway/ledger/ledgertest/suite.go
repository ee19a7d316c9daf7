// Package ledgertest is what every ledger has to pass.
package ledgertest

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/gateway/ledger"
)

// Most is the limit of keys that the ledgers under test are opened with.
const Most = 8

// Target opens ledgers under test.
type Target struct {
	// Open opens one on storage that holds nothing of another test. reopen
	// closes it as a crash would and opens it again on the same storage.
	Open func(t testing.TB) (l ledger.Ledger, reopen func() ledger.Ledger)
	// Later lets the time pass for which outcomes are kept.
	Later func(t testing.TB)
}

// Run runs the suite.
func Run(t *testing.T, target Target) {
	for name, test := range map[string]func(*testing.T, Target){
		"records never go down, and survive":           testRecords,
		"a lease's record covers its keys":             testCovers,
		"too many keys are recorded as one":            testFolds,
		"of many at once one token wins":               testConcurrent,
		"nobody reads below what was told":             testReads,
		"a record is what a model says it is":          testModel,
		"nothing enters below the record":              testEnter,
		"outcomes are begun once, kept, and forgotten": testOutcomes,
		"outcomes expire":                              testExpiry,
	} {
		t.Run(name, func(t *testing.T) { test(t, target) })
	}
}

var key = ledger.ID{Lease: "shop/orders", Key: "order-7"}

func recorded(t testing.TB, l ledger.Ledger, id ledger.ID, want fence.Token) {
	t.Helper()
	got, err := l.Recorded(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	if got != want {
		t.Fatalf("recorded for %v: %s, want %s", id, got, want)
	}
}

func advance(t testing.TB, l ledger.Ledger, id ledger.ID, token fence.Token, wholeLease bool, want fence.Token) {
	t.Helper()
	got, err := l.Advance(t.Context(), id, token, wholeLease)
	if err != nil {
		t.Fatal(err)
	}
	if got != want {
		t.Fatalf("advance %v to %s: recorded %s, want %s", id, token, got, want)
	}
}

func testRecords(t *testing.T, target Target) {
	l, reopen := target.Open(t)
	recorded(t, l, key, 0)
	advance(t, l, key, 42, false, 42)
	advance(t, l, key, 41, false, 42)
	l = reopen()
	recorded(t, l, key, 42)
	advance(t, l, key, fence.MaxToken, false, fence.MaxToken)
	l = reopen()
	advance(t, l, key, 43, false, fence.MaxToken)
	recorded(t, l, ledger.ID{Lease: "shop/orders", Key: "order-8"}, 0)
	recorded(t, l, ledger.ID{Lease: "shop/orders-2", Key: "order-7"}, 0)
}

func testCovers(t *testing.T, target Target) {
	l, reopen := target.Open(t)
	advance(t, l, key, 41, false, 41)
	advance(t, l, ledger.ID{Lease: key.Lease, Key: "other"}, 42, true, 42)
	recorded(t, l, key, 42)
	l = reopen()
	recorded(t, l, ledger.ID{Lease: key.Lease, Key: "never seen"}, 42)
	// A key that is ahead of its lease stays ahead.
	advance(t, l, key, 44, false, 44)
	advance(t, l, ledger.ID{Lease: key.Lease, Key: "other"}, 43, true, 43)
	recorded(t, l, key, 44)
	recorded(t, l, ledger.ID{Lease: key.Lease, Key: "other"}, 43)
}

func testFolds(t *testing.T, target Target) {
	l, reopen := target.Open(t)
	id := func(i int) ledger.ID { return ledger.ID{Lease: key.Lease, Key: fmt.Sprint(i)} }
	for i := range Most {
		advance(t, l, id(i), fence.Token(10+i), false, fence.Token(10+i))
	}
	recorded(t, l, id(0), 10)
	advance(t, l, id(Most), 5, false, 5)
	recorded(t, l, id(0), 10+Most-1)
	recorded(t, reopen(), id(Most), 10+Most-1)
}

func testConcurrent(t *testing.T, target Target) {
	l, reopen := target.Open(t)
	var wg sync.WaitGroup
	for i := range 50 {
		wg.Go(func() {
			token := fence.Token(1 + i*7%50)
			got, err := l.Advance(t.Context(), key, token, i%2 == 0)
			if err != nil || got < token {
				t.Errorf("advance to %s: recorded %s, %v", token, got, err)
			}
		})
	}
	wg.Wait()
	recorded(t, reopen(), key, 50)
}

// Whoever was told that a token is recorded reads it, however many others read
// while it was being recorded.
func testReads(t *testing.T, target Target) {
	l, _ := target.Open(t)
	var told atomic.Int64
	done := make(chan struct{})
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			id := ledger.ID{Lease: key.Lease, Key: fmt.Sprint(i % 2)}
			for {
				select {
				case <-done:
					return
				default:
				}
				least := fence.Token(told.Load())
				got, err := l.Recorded(t.Context(), id)
				if err != nil || got < least {
					t.Errorf("recorded for %v: %s, %v, after %s was told", id, got, err, least)
					return
				}
			}
		})
	}
	for token := fence.Token(1); token <= 300 && !t.Failed(); token++ {
		advance(t, l, key, token, true, token)
		told.Store(int64(token))
	}
	close(done)
	wg.Wait()
}

// A model in memory: what is recorded is the highest token of the key and of
// the lease, whatever came in which order and was reopened.
func testModel(t *testing.T, target Target) {
	l, reopen := target.Open(t)
	run := 0
	rapid.Check(t, func(rt *rapid.T) {
		run++
		model := map[ledger.ID]fence.Token{}
		for range rapid.IntRange(1, 20).Draw(rt, "steps") {
			id := ledger.ID{
				Lease: fmt.Sprintf("model/%d-%s", run, rapid.SampledFrom([]string{"a", "b"}).Draw(rt, "lease")),
				Key:   rapid.SampledFrom([]string{"x", "y", "z"}).Draw(rt, "key"),
			}
			token := fence.Token(rapid.Int64Range(1, 6).Draw(rt, "token"))
			whole := rapid.Bool().Draw(rt, "whole lease")
			if rapid.IntRange(0, 20).Draw(rt, "reopen") == 0 {
				l = reopen()
			}
			was := max(model[id], model[ledger.ID{Lease: id.Lease}])
			want := max(was, token)
			if whole && token > was {
				model[ledger.ID{Lease: id.Lease}] = token
			} else if token > was {
				model[id] = token
			}
			if got, err := l.Advance(t.Context(), id, token, whole); err != nil || got != want {
				rt.Fatalf("advance %v to %s: recorded %s, %v; want %s", id, token, got, err, want)
			}
		}
		for id, token := range model {
			if id.Key == "" {
				continue
			}
			want := max(token, model[ledger.ID{Lease: id.Lease}])
			if got, err := l.Recorded(t.Context(), id); err != nil || got != want {
				rt.Fatalf("%v: recorded %s, %v; want %s", id, got, err, want)
			}
		}
	})
}

func testEnter(t *testing.T, target Target) {
	l, _ := target.Open(t)
	enter := func(token, want fence.Token) {
		t.Helper()
		got, leave, err := l.Enter(t.Context(), key, token, func() { t.Error("the call was lost") })
		if err != nil || got != want {
			t.Fatalf("enter with %s: recorded %s, %v; want %s", token, got, err, want)
		}
		if got <= token {
			leave()
		}
	}
	advance(t, l, key, 42, true, 42)
	enter(42, 42)
	enter(42, 42)
	enter(41, 42)
	advance(t, l, key, 43, true, 43)
	enter(42, 43)
	enter(43, 43)
}

func testOutcomes(t *testing.T, target Target) {
	l, reopen := target.Open(t)
	id := ledger.CallID{ID: key, IdempotencyKey: "capture-1"}
	attempt := ledger.Attempt{Token: 42, Digest: []byte{1, 2}}
	begin := func(id ledger.CallID, want *ledger.Outcome) {
		t.Helper()
		// Another token and digest change nothing of what is noted.
		a := attempt
		if want != nil {
			a = ledger.Attempt{Token: 43, Digest: []byte{3}}
		}
		got, err := l.Begin(t.Context(), id, a)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatalf("begin %v (-want +got):\n%s", id, diff)
		}
	}
	begin(id, nil)
	l = reopen()
	begin(id, &ledger.Outcome{Attempt: attempt}) // unknown
	answer := ledger.Answer{Status: 201, Header: map[string][][]byte{"Location": {[]byte("/caf\xe9")}}, Body: []byte("paid\xff")}
	if err := l.Finish(t.Context(), id, answer); err != nil {
		t.Fatal(err)
	}
	l = reopen()
	begin(id, &ledger.Outcome{Attempt: attempt, Answer: &answer})
	for _, other := range []ledger.CallID{
		{ID: key, IdempotencyKey: "capture-2"},
		{ID: ledger.ID{Lease: key.Lease, Key: "order-8"}, IdempotencyKey: "capture-1"},
		{ID: ledger.ID{Lease: "shop/other", Key: key.Key}, IdempotencyKey: "capture-1"},
	} {
		begin(other, nil)
		if err := l.Forget(t.Context(), other); err != nil {
			t.Fatal(err)
		}
		begin(other, nil)
	}
}

func testExpiry(t *testing.T, target Target) {
	l, _ := target.Open(t)
	id := ledger.CallID{ID: key, IdempotencyKey: "capture-1"}
	for range 2 {
		if known, err := l.Begin(t.Context(), id, ledger.Attempt{Token: 42}); err != nil || known != nil {
			t.Fatalf("begin: %v, %v", known, err)
		}
		if known, err := l.Begin(t.Context(), id, ledger.Attempt{Token: 42}); err != nil || known == nil {
			t.Fatalf("begin again: %v, %v", known, err)
		}
		target.Later(t)
	}
}
