package bolt

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	testclock "k8s.io/utils/clock/testing"

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
