package postgres

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"go.uber.org/goleak"

	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/gateway/ledger"
	"github.com/fencedlease/fencedlease/gateway/ledger/ledgertest"
	"github.com/fencedlease/fencedlease/sqlfence"
	"github.com/fencedlease/fencedlease/sqlfence/pgtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// account is what the ledger under test connects as: it may do what the
// schema grants, and no more.
const account = "gateway"

// start starts a server with the account.
func start(t testing.TB) *pgtest.Server {
	t.Helper()
	server := pgtest.Start(t)
	exec(t, server.URL("postgres", "postgres"), "CREATE ROLE fence_gateway NOLOGIN; CREATE ROLE "+account+" LOGIN IN ROLE fence_gateway")
	return server
}

// database makes a database of its own with the schema, installed twice. What
// isolation it starts transactions with must not matter.
func database(t testing.TB, server *pgtest.Server, name string) (url string) {
	t.Helper()
	exec(t, server.URL("postgres", "postgres"), "CREATE DATABASE "+name)
	exec(t, server.URL("postgres", "postgres"), "ALTER DATABASE "+name+" SET default_transaction_isolation = 'repeatable read'")
	for range 2 {
		exec(t, server.URL("postgres", name), sqlfence.Schema)
		exec(t, server.URL("postgres", name), Schema)
	}
	return server.URL(account, name)
}

func exec(t testing.TB, url, statement string) {
	t.Helper()
	c, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Exec(t.Context(), statement); err != nil {
		t.Fatal(err)
	}
	if err := c.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func open(t testing.TB, url string, wait time.Duration) *Ledger {
	t.Helper()
	l, err := Open(t.Context(), url, Options{Wait: wait, Keep: time.Hour, MaxKeys: ledgertest.Most})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

func TestLedger(t *testing.T) {
	server := start(t)
	databases, name := 0, ""
	ledgertest.Run(t, ledgertest.Target{
		Open: func(t testing.TB) (ledger.Ledger, func() ledger.Ledger) {
			databases++
			name = fmt.Sprintf("ledger_%d", databases)
			url := database(t, server, name)
			l := open(t, url, time.Second)
			return l, func() ledger.Ledger {
				_ = l.Close()
				l = open(t, url, time.Second)
				return l
			}
		},
		Later: func(t testing.TB) {
			exec(t, server.URL("postgres", name), "UPDATE fence.call_outcome SET expires = now() - interval '1 second'")
		},
	})
}

var id = ledger.ID{Lease: "shop/orders", Key: "order-7"}

type entered struct {
	recorded fence.Token
	leave    func()
	err      error
}

func enter(t testing.TB, l *Ledger, token fence.Token, lost func()) chan entered {
	out := make(chan entered, 1)
	go func() {
		var e entered
		e.recorded, e.leave, e.err = l.Enter(t.Context(), id, token, lost)
		out <- e
	}()
	return out
}

func never(t testing.TB) func() { return func() { t.Error("the call was ended") } }

func mustEnter(t testing.TB, c chan entered, token fence.Token) func() {
	t.Helper()
	e := <-c
	if e.err != nil || e.recorded != token {
		t.Fatalf("enter with %s: recorded %s, %v", token, e.recorded, e.err)
	}
	return e.leave
}

// waiters counts sessions of the database that wait for an advisory lock.
func waiters(t testing.TB, l *Ledger) (n int) {
	t.Helper()
	if err := l.questions.QueryRow(t.Context(), `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted
		AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

func await(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for range 1000 {
		if ok() {
			return
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-t.Context().Done():
		}
	}
	t.Fatalf("never: %s", what)
}

func TestReplicas(t *testing.T) {
	server := start(t)
	n := 0
	replicas := func(t *testing.T, wait time.Duration) (*Ledger, *Ledger) {
		n++
		url := database(t, server, fmt.Sprintf("replicas_%d", n))
		return open(t, url, wait), open(t, url, wait)
	}
	t.Run("a newer token waits for an older call in another replica, and shuts its successors out", func(t *testing.T) {
		a, b := replicas(t, time.Minute)
		leave := mustEnter(t, enter(t, a, 41, never(t)), 41)
		newer := enter(t, b, 42, never(t))
		await(t, "the newer one waits", func() bool { return waiters(t, b) == 1 })
		late := enter(t, a, 41, never(t))
		await(t, "a late older one waits too", func() bool { return waiters(t, b) == 2 })
		select {
		case <-newer:
			t.Fatal("the newer one did not wait")
		default:
		}
		leave()
		mustEnter(t, newer, 42)()
		if e := <-late; e.err != nil || e.recorded != 42 {
			t.Fatalf("the late older one: %+v", e)
		}
	})
	t.Run("calls of one token do not wait for each other", func(t *testing.T) {
		a, b := replicas(t, time.Minute)
		var leave []func()
		all := []chan entered{}
		for range 4 {
			all = append(all, enter(t, a, 42, never(t)), enter(t, b, 42, never(t)))
		}
		for _, c := range all {
			leave = append(leave, mustEnter(t, c, 42))
		}
		for _, f := range leave {
			f()
		}
	})
	t.Run("past the limit an older call is told to end, and the newer one leaves after it has", func(t *testing.T) {
		a, b := replicas(t, 20*time.Millisecond)
		told := make(chan struct{})
		leave := mustEnter(t, enter(t, a, 41, func() { close(told) }), 41)
		newer := enter(t, b, 42, never(t))
		<-told
		select {
		case <-newer:
			t.Fatal("the newer one did not wait for the end")
		default:
		}
		leave()
		mustEnter(t, newer, 42)()
	})
	t.Run("a call of another key is left alone", func(t *testing.T) {
		a, b := replicas(t, 20*time.Millisecond)
		_, leaveOther, err := a.Enter(t.Context(), ledger.ID{Lease: id.Lease, Key: "order-8"}, 41, never(t))
		if err != nil {
			t.Fatal(err)
		}
		leave := mustEnter(t, enter(t, a, 41, never(t)), 41)
		leave()
		mustEnter(t, enter(t, b, 42, never(t)), 42)()
		leaveOther()
	})
	t.Run("a replica that does not answer loses its session", func(t *testing.T) {
		a, b := replicas(t, 20*time.Millisecond)
		b.end = 50 * time.Millisecond
		told := make(chan struct{})
		leave := mustEnter(t, enter(t, a, 41, func() { close(told) }), 41)
		mustEnter(t, enter(t, b, 42, never(t)), 42)()
		<-told
		leave()
	})
	t.Run("a call is ended with its session", func(t *testing.T) {
		a, b := replicas(t, time.Minute)
		told := make(chan struct{})
		leave := mustEnter(t, enter(t, a, 41, func() { close(told) }), 41)
		if _, err := b.questions.Exec(t.Context(), `SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'
			AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`); err != nil {
			t.Fatal(err)
		}
		<-told
		leave()
		mustEnter(t, enter(t, a, 41, never(t)), 41)()
	})
	t.Run("a writer to the database under a newer token shuts the older one out of the gateway", func(t *testing.T) {
		a, b := replicas(t, time.Minute)
		mustEnter(t, enter(t, a, 41, never(t)), 41)()
		if _, err := b.questions.Exec(t.Context(), "SELECT fence.present('shop/orders', 42::bigint)"); err != nil {
			t.Fatal(err)
		}
		if e := <-enter(t, a, 41, never(t)); e.err != nil || e.recorded != 42 {
			t.Fatalf("the older one: %+v", e)
		}
	})
}

func TestOpenNamesWhatIsMissing(t *testing.T) {
	server := pgtest.Start(t)
	_, err := Open(t.Context(), server.URL("postgres", "postgres"), Options{Wait: time.Second, Keep: time.Hour})
	if err == nil || !strings.Contains(err.Error(), "fencedlease gateway schema") {
		t.Fatalf("open without tables: %v", err)
	}
}
