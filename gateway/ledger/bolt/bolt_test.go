package bolt

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"go.etcd.io/bbolt"
	"go.uber.org/goleak"
	testclock "k8s.io/utils/clock/testing"

	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/gateway/ledger"
	"github.com/fencedlease/fencedlease/gateway/ledger/ledgertest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestLedger(t *testing.T) {
	clock := testclock.NewFakePassiveClock(time.Unix(1_700_000_000, 0))
	const keep = time.Hour
	ledgertest.Run(t, ledgertest.Target{
		Open: func(t testing.TB) (ledger.Ledger, func() ledger.Ledger) {
			file := filepath.Join(t.TempDir(), "ledger")
			var l *Ledger
			open := func() ledger.Ledger {
				var err error
				if l, err = Open(file, Options{Keep: keep, MaxKeys: ledgertest.Most, Clock: clock}); err != nil {
					t.Fatal(err)
				}
				return l
			}
			closeIt := func() {
				if err := l.Close(); err != nil {
					t.Error(err)
				}
			}
			t.Cleanup(closeIt)
			return open(), func() ledger.Ledger { closeIt(); return open() }
		},
		Later: func(testing.TB) { clock.SetTime(clock.Now().Add(keep + time.Second)) },
	})
}

func TestOneProcessAlone(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "ledger")
	l, err := Open(file, Options{Keep: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}()
	if _, err := Open(file, Options{Keep: time.Hour}); err == nil || !strings.Contains(err.Error(), "another process has it open") {
		t.Fatalf("a second one opens it: %v", err)
	}
}

// TestBounded: many times as many keys as are recorded each for itself cost
// neither memory nor a file that grows on, and none of their tokens is lost.
func TestBounded(t *testing.T) {
	const most, times, writers = 2000, 6, 250
	file := filepath.Join(t.TempDir(), "ledger")
	l, err := Open(file, Options{Keep: time.Hour, MaxKeys: most})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}()
	id := func(i int) ledger.ID {
		return ledger.ID{Lease: "shop/orders", Key: fmt.Sprintf("order-%09d", i*7919%(most*times))}
	}
	cost := func() (heap, size int64) {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		info, err := os.Stat(file)
		if err != nil {
			t.Fatal(err)
		}
		return int64(m.HeapAlloc), info.Size()
	}
	var heapOnce, sizeOnce int64
	for n := range times {
		var wg sync.WaitGroup
		for w := range writers {
			wg.Go(func() {
				for i := n*most + w; i < (n+1)*most; i += writers {
					token := fence.Token(1 + i)
					if recorded, err := l.Advance(t.Context(), id(i), token, false); err != nil || recorded < token {
						t.Errorf("advance to %s: recorded %s, %v", token, recorded, err)
					}
				}
			})
		}
		wg.Wait()
		if err := l.db.View(func(tx *bbolt.Tx) error {
			var kept uint64
			if b := tx.Bucket(keys).Bucket([]byte("shop/orders")); b != nil {
				kept = uint64(b.Stats().KeyN) //nolint:gosec // it is not negative
			}
			if r := readRecord(tx, "shop/orders"); kept > most || r.count != kept {
				t.Errorf("%d keys are recorded each for itself, at most %d may be; the count says %d", kept, most, r.count)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		if n == 1 {
			heapOnce, sizeOnce = cost()
		}
	}
	heap, size := cost()
	if heap > heapOnce+1<<20 || size > 2*sizeOnce {
		t.Errorf("after %d keys: heap %d, file %d bytes; after %d: %d, %d", 2*most, heapOnce, sizeOnce, times*most, heap, size)
	}
	for i := range most * times {
		if recorded, err := l.Recorded(t.Context(), id(i)); err != nil || recorded < fence.Token(1+i) {
			t.Fatalf("token %d is forgotten: recorded %s, %v", 1+i, recorded, err)
		}
	}
}
