package sqlfence_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	_ "github.com/jackc/pgx/v5/stdlib" // the driver of database/sql

	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/sqlfence"
	"github.com/fencedlease/fencedlease/sqlfence/pgtest"
)

const lease = "shop/orders"

var levels = []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}

// holder presents a fixed token.
type holder fence.Token

func (h holder) Lease() string                 { return lease }
func (h holder) Present() (fence.Token, error) { return fence.Token(h), nil }

var (
	once   sync.Once
	server *pgtest.Server
	failed error
)

func TestMain(m *testing.M) {
	code := m.Run()
	if server != nil {
		if err := server.Stop(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = max(code, 1)
		}
	}
	os.Exit(code)
}

// database makes a database of its own with the fence installed, and an
// account app that owns its tables but not the fence.
type database struct {
	*testing.T
	name string
}

func newDatabase(t *testing.T, ddl ...string) *database {
	t.Helper()
	pgtest.Need(t, "initdb")
	once.Do(func() { server, failed = pgtest.New(context.Background(), pgtest.ForTests...) })
	if failed != nil {
		t.Fatal(failed)
	}
	d := &database{T: t, name: strings.ToLower(strings.NewReplacer("/", "_", ",", "", " ", "_", "=", "", "-", "_").Replace(t.Name()))}
	if len(d.name) > 50 {
		d.name = d.name[:50]
	}
	admin := d.connectTo("postgres", "postgres")
	d.exec(admin, "CREATE DATABASE "+d.name)
	_, _ = admin.Exec(t.Context(), "CREATE ROLE app LOGIN")
	in := d.connect("postgres")
	// Twice: installing again is an upgrade.
	for range 2 {
		d.exec(in, sqlfence.Schema)
	}
	d.exec(in, "GRANT CREATE ON SCHEMA public TO app")
	app := d.connect("app")
	for _, statement := range ddl {
		d.exec(app, statement)
	}
	return d
}

func (d *database) connectTo(account, name string) *pgx.Conn {
	d.Helper()
	conn, err := pgx.Connect(d.Context(), server.URL(account, name))
	if err != nil {
		d.Fatal(err)
	}
	d.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

func (d *database) connect(account string) *pgx.Conn {
	d.Helper()
	return d.connectTo(account, d.name)
}

// version is the server's major version.
func (d *database) version(conn *pgx.Conn) (major int) {
	d.Helper()
	if err := conn.QueryRow(d.Context(), `SELECT current_setting('server_version_num')::int / 10000`).Scan(&major); err != nil {
		d.Fatal(err)
	}
	return major
}

func (d *database) exec(conn *pgx.Conn, statement string) {
	d.Helper()
	if _, err := conn.Exec(d.Context(), statement); err != nil {
		d.Fatalf("%v\n%s", err, statement)
	}
}

// in runs statements in one transaction that presents a token, none where it
// is 0.
func (d *database) in(conn *pgx.Conn, token int64, statements ...string) error {
	tx, err := conn.Begin(d.Context())
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	if token > 0 {
		if _, err := tx.Exec(d.Context(), sqlfence.PresentSQL, lease, token); err != nil {
			return err
		}
	}
	for _, s := range statements {
		if _, err := tx.Exec(d.Context(), s); err != nil {
			return err
		}
	}
	return tx.Commit(d.Context())
}

func code(err error) string {
	var pg *pgconn.PgError
	switch {
	case err == nil:
		return "passes"
	case errors.As(err, &pg):
		return pg.Code
	}
	return err.Error()
}

// ddl makes the tables that every path writes to.
var ddl = []string{
	`CREATE TABLE parent (id int PRIMARY KEY)`,
	`CREATE TABLE orders (id int PRIMARY KEY, n int, parent int REFERENCES parent ON DELETE CASCADE, other int REFERENCES parent ON DELETE SET NULL)`,
	`CREATE TABLE source (id int, n int)`,
	`CREATE VIEW orders_view AS SELECT id, n FROM orders`,
	`CREATE VIEW orders_rule AS SELECT id, n FROM orders WHERE n > 0`,
	`CREATE RULE through AS ON INSERT TO orders_rule DO INSTEAD INSERT INTO orders (id, n) VALUES (new.id, new.n)`,
	`CREATE FUNCTION write_orders() RETURNS void LANGUAGE sql SECURITY DEFINER AS $$ UPDATE orders SET n = n + 1 $$`,
	`CREATE TABLE parts (id int, n int) PARTITION BY RANGE (id)`,
	`CREATE TABLE parts_low PARTITION OF parts FOR VALUES FROM (0) TO (100)`,
	`CREATE TABLE base (id int, n int)`,
	`CREATE TABLE heir () INHERITS (base)`,
	`INSERT INTO parent VALUES (1), (2)`, `INSERT INTO orders VALUES (1, 1, 1, NULL), (2, 1, NULL, 2)`,
	`INSERT INTO source VALUES (1, 7), (9, 7)`, `INSERT INTO parts VALUES (1, 1)`, `INSERT INTO heir VALUES (1, 1)`,
}

// paths are the ways to write.
var paths = map[string]string{
	"insert":                        `INSERT INTO orders VALUES (3, 1)`,
	"update":                        `UPDATE orders SET n = 2`,
	"delete":                        `DELETE FROM orders`,
	"truncate":                      `TRUNCATE orders`,
	"truncate cascade from parent":  `TRUNCATE parent CASCADE`,
	"upsert that updates":           `INSERT INTO orders VALUES (1, 5) ON CONFLICT (id) DO UPDATE SET n = excluded.n`,
	"upsert that does nothing":      `INSERT INTO orders VALUES (1, 5) ON CONFLICT DO NOTHING`,
	"merge":                         `MERGE INTO orders o USING source s ON o.id = s.id WHEN MATCHED THEN UPDATE SET n = s.n WHEN NOT MATCHED THEN INSERT VALUES (s.id, s.n)`,
	"update from":                   `UPDATE orders SET n = s.n FROM source s WHERE s.id = orders.id`,
	"writable CTE":                  `WITH gone AS (DELETE FROM orders RETURNING id) SELECT count(*) FROM gone`,
	"insert select":                 `INSERT INTO orders SELECT id + 100, n FROM source`,
	"view":                          `UPDATE orders_view SET n = 3`,
	"view with a rule":              `INSERT INTO orders_rule VALUES (11, 1)`,
	"function of another owner":     `SELECT write_orders()`,
	"cascading delete":              `DELETE FROM parent WHERE id = 1`,
	"set null by a foreign key":     `DELETE FROM parent WHERE id = 2`,
	"partitioned table":             `INSERT INTO parts VALUES (2, 2)`,
	"partition written directly":    `UPDATE parts_low SET n = 9`,
	"partition truncated":           `TRUNCATE parts_low`,
	"partitioned table truncated":   `TRUNCATE parts`,
	"inheritance child":             `UPDATE heir SET n = 9`,
	"inheritance child from parent": `UPDATE base SET n = 9`,
	"replica role":                  `SET LOCAL session_replication_role = replica; UPDATE orders SET n = 4`,
}

// TestEveryPath: nothing, a stale token and the recorded one, by every way to
// write.
func TestEveryPath(t *testing.T) {
	d := newDatabase(t, ddl...)
	app := d.connect("app")
	for _, table := range []string{"orders", "parts", "base"} {
		statement, err := sqlfence.GuardSQL(table, lease, "")
		if err != nil {
			t.Fatal(err)
		}
		for range 2 { // guarding again replaces
			d.exec(app, statement)
		}
	}
	d.exec(app, `CREATE TABLE parts_later PARTITION OF parts FOR VALUES FROM (100) TO (200)`)
	root := d.connect("postgres") // session_replication_role is a superuser's, and so is a change of owner
	d.exec(root, `ALTER FUNCTION write_orders() OWNER TO postgres`)
	if err := d.in(app, 42); err != nil {
		t.Fatal(err)
	}
	all := map[string]string{"partition made later": `INSERT INTO parts_later VALUES (150, 1)`}
	for name, statement := range paths {
		all[name] = statement
	}
	if d.version(app) < 15 {
		delete(all, "merge") // there is none
	}
	var table strings.Builder
	w := tabwriter.NewWriter(&table, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "path\tnothing\tstale\trecorded")
	for name, statement := range all {
		conn := app
		if name == "replica role" {
			conn = root
		}
		attempt := func(token int64) string {
			tx, err := conn.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = tx.Rollback(context.Background()) }()
			if token > 0 {
				// Forged: what present would refuse stands there all the same.
				if _, err := tx.Exec(t.Context(), fmt.Sprintf(`SELECT set_config('fence.presented', '|%s=%d|', true)`, lease, token)); err != nil {
					t.Fatal(err)
				}
			}
			_, err = tx.Exec(t.Context(), statement)
			return code(err)
		}
		nothing, stale, recorded := attempt(0), attempt(41), attempt(42)
		if nothing != sqlfence.CodeUnstamped || stale != sqlfence.CodeStale || recorded != "passes" {
			t.Errorf("%s: nothing %s, stale %s, recorded %s", name, nothing, stale, recorded)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", name, nothing, stale, recorded)
	}
	copyIn := func(token int64) error {
		tx, err := app.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = tx.Rollback(context.Background()) }()
		if token > 0 {
			if _, err := tx.Exec(t.Context(), sqlfence.PresentSQL, lease, token); err != nil {
				return err
			}
		}
		_, err = tx.CopyFrom(t.Context(), pgx.Identifier{"orders"}, []string{"id", "n"}, pgx.CopyFromRows([][]any{{77, 1}}))
		return err
	}
	if got := [...]string{code(copyIn(0)), code(copyIn(41)), code(copyIn(42))}; got != [...]string{sqlfence.CodeUnstamped, sqlfence.CodeStale, "passes"} {
		t.Errorf("COPY: %v", got)
	}
	_ = w.Flush()
	t.Log("\n" + table.String())
}

// TestPerRow: the column of each row names its lease.
func TestPerRow(t *testing.T) {
	d := newDatabase(t, `CREATE TABLE kinds (id int PRIMARY KEY)`, `CREATE TABLE jobs (id int PRIMARY KEY, lease text, n int, kind int REFERENCES kinds)`,
		`INSERT INTO jobs VALUES (1, 'shop/orders', 1), (2, 'shop/other', 1), (3, NULL, 1)`)
	app := d.connect("app")
	statement, err := sqlfence.GuardSQL("jobs", "", "lease")
	if err != nil {
		t.Fatal(err)
	}
	d.exec(app, statement)
	if err := d.in(app, 42); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		token     int64
		statement string
		want      string
	}{
		"its own row":                      {42, `UPDATE jobs SET n = 2 WHERE id = 1`, "passes"},
		"a stale one":                      {41, `UPDATE jobs SET n = 2 WHERE id = 1`, sqlfence.CodeStale},
		"another lease's row":              {42, `UPDATE jobs SET n = 2 WHERE id = 2`, sqlfence.CodeUnstamped},
		"a row of none":                    {0, `UPDATE jobs SET n = 2 WHERE id = 3`, "passes"},
		"a row that comes under the lease": {0, `UPDATE jobs SET lease = 'shop/orders' WHERE id = 3`, sqlfence.CodeUnstamped},
		"a row that leaves it":             {42, `UPDATE jobs SET lease = NULL WHERE id = 1`, sqlfence.CodeUnstamped},
		"a row that goes to another":       {42, `UPDATE jobs SET lease = 'shop/other' WHERE id = 1`, sqlfence.CodeUnstamped},
		"truncate has no row":              {42, `TRUNCATE jobs`, sqlfence.CodeUnstamped},
		"truncate with nothing":            {0, `TRUNCATE jobs`, sqlfence.CodeUnstamped},
		"a stale truncate":                 {41, `TRUNCATE jobs`, sqlfence.CodeStale},
		"truncate from a parent":           {42, `TRUNCATE kinds CASCADE`, sqlfence.CodeUnstamped},
		"that with nothing":                {0, `TRUNCATE kinds CASCADE`, sqlfence.CodeUnstamped},
		"a stale one from a parent":        {41, `TRUNCATE kinds CASCADE`, sqlfence.CodeStale},
		"delete":                           {42, `DELETE FROM jobs WHERE id = 1`, "passes"},
	} {
		t.Run(name, func(t *testing.T) {
			tx, err := app.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = tx.Rollback(context.Background()) }()
			if c.token > 0 {
				_, err = tx.Exec(t.Context(), sqlfence.PresentSQL, lease, c.token)
			}
			if err == nil {
				_, err = tx.Exec(t.Context(), c.statement)
			}
			if code(err) != c.want {
				t.Errorf("got %v, want %s", err, c.want)
			}
		})
	}
}

// TestTokensAsText: only the canonical form is a token.
func TestTokensAsText(t *testing.T) {
	d := newDatabase(t)
	app := d.connect("app")
	for _, text := range []string{"", " 42", "42 ", "+42", "-1", "0", "042", "0x2a", "4_2", "42.0", "4e1", "٤٢", "４２", "42\n", "9007199254740992",
		"1234567890123456789", "12345678901234567890", strings.Repeat("9", 10_000)} {
		_, err := app.Exec(t.Context(), "SELECT fence.present($1::text, $2::text)", lease, text)
		if reason, _ := sqlfence.Reason(err); reason != fence.MalformedToken {
			t.Errorf("%.30q: %v", text, err)
		}
	}
	for _, name := range []string{"", "orders", "a/b/c", "A/b", "shop/", strings.Repeat("x", 200) + "/y"} {
		if _, err := app.Exec(t.Context(), sqlfence.PresentSQL, name, 1); code(err) != sqlfence.CodeMalformed {
			t.Errorf("lease %.30q: %v", name, err)
		}
	}
	if _, err := app.Exec(t.Context(), "SELECT fence.present($1::text, '9007199254740991')", lease); err != nil {
		t.Error(err)
	}
}

// TestJudge: presented and recorded give the same verdict as the rule does.
func TestJudge(t *testing.T) {
	d := newDatabase(t, `CREATE TABLE orders (n int)`)
	app := d.connect("app")
	d.exec(app, `SELECT fence.guard('orders', lease => 'shop/orders')`)
	root := d.connect("postgres")
	for _, recorded := range []int64{0, 1, 41, 42, int64(fence.MaxToken)} {
		for _, presented := range []int64{0, 1, 41, 42, 43, int64(fence.MaxToken)} {
			d.exec(root, "DELETE FROM fence.lease")
			if recorded > 0 {
				d.exec(root, fmt.Sprintf("SELECT fence.reset('%s', %d, 'test')", lease, recorded))
			}
			p := fence.Presented{Stamped: presented > 0, Text: fmt.Sprint(presented)}
			want := fence.Judge(p, fence.Token(recorded), fence.Lease{Name: lease}, fence.Policy{NoAuthority: true})
			err := d.in(app, presented, `INSERT INTO orders VALUES (1)`)
			got, _ := sqlfence.Reason(err)
			if (err == nil) != (want.Outcome == fence.Allowed) || got != want.Reason {
				t.Errorf("presented %d, recorded %d: %v, want %+v", presented, recorded, err, want)
			}
			if want.Reason == fence.StaleToken && (!errors.Is(sqlfence.Error(err), fence.ErrStale) || !strings.Contains(err.Error(), strings.SplitAfter(want.Message, "; recorded")[0])) {
				t.Errorf("%v, want %s", err, want.Message)
			}
		}
	}
}

// TestOlderTransactionsFinishFirst: a newer token waits for an open
// transaction of an older one, and then shuts it out; both orders, at every
// isolation level.
func TestOlderTransactionsFinishFirst(t *testing.T) {
	for _, level := range levels {
		t.Run(strings.ReplaceAll(string(level), " ", "-"), func(t *testing.T) {
			d := newDatabase(t, `CREATE TABLE orders (n int)`)
			a, b := d.connect("app"), d.connect("app")
			d.exec(a, `SELECT fence.guard('orders', lease => 'shop/orders')`)
			old, err := sqlfence.BeginPgx(t.Context(), a, pgx.TxOptions{IsoLevel: level}, holder(41))
			if err != nil {
				t.Fatal(err)
			}
			newer := make(chan error, 1)
			go func() {
				tx, err := sqlfence.BeginPgx(t.Context(), b, pgx.TxOptions{IsoLevel: level}, holder(42))
				if err == nil {
					if _, err = tx.Exec(t.Context(), `INSERT INTO orders VALUES (42)`); err == nil {
						err = tx.Commit(t.Context())
					}
				}
				newer <- err
			}()
			awaitBlocked(t, d)
			for range 2 { // a second statement is fenced too
				if _, err := old.Exec(t.Context(), `INSERT INTO orders VALUES (41)`); err != nil {
					t.Fatalf("the older transaction, which holds: %v", err)
				}
			}
			if err := old.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
			err = <-newer
			var pg *pgconn.PgError
			if level != pgx.ReadCommitted && errors.As(err, &pg) && pg.Code == "40001" {
				err = d.in(b, 42, `INSERT INTO orders VALUES (42)`) // as every writer at this level, it tries again
			}
			if err != nil {
				t.Fatalf("the newer transaction: %v", err)
			}
			if err := d.in(a, 41, `INSERT INTO orders VALUES (41)`); !errors.Is(sqlfence.Error(err), fence.ErrStale) {
				t.Errorf("41 after 42: %v", err)
			}
			// An old snapshot does not help: it was taken before 42 was recorded.
			snapshot, err := a.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := snapshot.Exec(t.Context(), `SELECT count(*) FROM orders`); err != nil {
				t.Fatal(err)
			}
			if err := d.in(b, 43, `INSERT INTO orders VALUES (43)`); err != nil {
				t.Fatal(err)
			}
			_, err = snapshot.Exec(t.Context(), sqlfence.PresentSQL, lease, 42)
			if err == nil {
				t.Error("42 was presented in an old snapshot after 43 was recorded")
			}
			_ = snapshot.Rollback(t.Context())
		})
	}
}

// awaitBlocked waits until a backend of the database waits for a lock.
func awaitBlocked(t *testing.T, d *database) {
	t.Helper()
	root := d.connect("postgres")
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	limit := time.After(10 * time.Second)
	for {
		var n int
		if err := root.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`).Scan(&n); err != nil {
			t.Fatal(err)
		}
		if n > 0 {
			return
		}
		select {
		case <-tick.C:
		case <-limit:
			t.Fatal("nobody waits for a lock")
		}
	}
}

// TestAdvancersQueue: a newer token that waits does not make the one before it
// look stale, neither while that one presents nor while it writes.
func TestAdvancersQueue(t *testing.T) {
	d := newDatabase(t, `CREATE TABLE orders (n int)`)
	first := d.connect("app")
	d.exec(first, `SELECT fence.guard('orders', lease => 'shop/orders')`)
	d.exec(first, `SELECT fence.present('shop/orders', 40)`)
	d.exec(first, `BEGIN`)
	d.exec(first, `SELECT fence.present('shop/orders', 40)`)
	admin := d.connect("postgres")
	waiting := func(want int) {
		t.Helper()
		for n := -1; n != want; {
			if err := admin.QueryRow(t.Context(), `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted`).Scan(&n); err != nil {
				t.Fatal(err)
			}
		}
	}
	present := func(token int) (*pgx.Conn, chan error) {
		c, done := d.connect("app"), make(chan error, 1)
		d.exec(c, `BEGIN`)
		go func() {
			_, err := c.Exec(t.Context(), fmt.Sprintf(`SELECT fence.present('shop/orders', %d)`, token))
			done <- err
		}()
		return c, done
	}
	second, presented := present(41)
	waiting(1)
	// Two that share the lock and both want it alone would wait for each other.
	var share int
	if err := admin.QueryRow(t.Context(), `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted`).Scan(&share); err != nil || share != 1 {
		t.Errorf("%d share the lock, %v: who wants to advance lets go of it first", share, err)
	}
	third, thereafter := present(42)
	waiting(2)
	d.exec(first, `COMMIT`)
	if err := <-presented; err != nil {
		t.Fatalf("41, with 42 behind it: %v", err)
	}
	d.exec(second, `INSERT INTO orders VALUES (41)`)
	d.exec(second, `COMMIT`)
	if err := <-thereafter; err != nil {
		t.Fatalf("42, once 41 is done: %v", err)
	}
	d.exec(third, `INSERT INTO orders VALUES (42)`)
	d.exec(third, `COMMIT`)
}

// TestStoppedHolder: a process that is stopped inside its transaction holds
// its successor up to the limit, and not longer where the successor may end it.
func TestStoppedHolder(t *testing.T) {
	if os.Getenv("SQLFENCE_HOLD") != "" {
		conn, err := pgx.Connect(t.Context(), os.Getenv("SQLFENCE_HOLD"))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := sqlfence.BeginPgx(t.Context(), conn, pgx.TxOptions{}, holder(41)); err != nil {
			t.Fatal(err)
		}
		fmt.Println("HOLDING")
		select {}
	}
	d := newDatabase(t, `CREATE TABLE orders (n int)`)
	app := d.connect("app")
	d.exec(app, `SELECT fence.guard('orders', lease => 'shop/orders')`)
	old := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestStoppedHolder$")
	old.Env = append(os.Environ(), "SQLFENCE_HOLD="+server.URL("app", d.name))
	out, err := old.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := old.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = old.Process.Kill(); _ = old.Wait() })
	buffer := make([]byte, 7)
	if _, err := out.Read(buffer); err != nil || string(buffer) != "HOLDING" {
		t.Fatalf("%q, %v", buffer, err)
	}
	if err := old.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	_, err = app.Exec(t.Context(), `SELECT fence.present('shop/orders', 42, '200 milliseconds')`)
	if !errors.Is(sqlfence.Error(err), sqlfence.ErrWait) {
		t.Errorf("got %v, want that the limit is over", err)
	}
	if _, err = app.Exec(t.Context(), `SELECT fence.present('shop/orders', 42, '200 milliseconds', true)`); code(err) != "42501" {
		t.Errorf("an account without the right ends a backend: %v", err)
	}
	root := d.connect("postgres")
	d.exec(root, `GRANT fence_operator TO app`)
	t.Cleanup(func() { _, _ = root.Exec(context.Background(), `REVOKE fence_operator FROM app`) })
	begin := time.Now()
	if err := d.in(d.connect("app"), 0, `SELECT fence.present('shop/orders', 42, '200 milliseconds', true)`, `INSERT INTO orders VALUES (42)`); err != nil {
		t.Errorf("with the right: %v", err)
	}
	if took := time.Since(begin); took > 5*time.Second {
		t.Errorf("it took %v", took)
	}
}

// TestCommitOrder: random transactions with old and new tokens, with aborts
// and savepoints, at every isolation level. Each takes a position in the log
// under the lock that it holds until it commits: the log is in the order of
// commits.
func TestCommitOrder(t *testing.T) {
	d := newDatabase(t, logged...)
	app := d.connect("app")
	var newest sync.Map
	newest.Store("token", int64(1))
	var wg sync.WaitGroup
	for worker := range 8 {
		conn := d.connect("app")
		wg.Go(func() {
			for round := range 60 {
				at, _ := newest.Load("token")
				token := at.(int64)
				switch (worker*7 + round) % 5 {
				case 0:
					token++
					newest.Store("token", token)
				case 1:
					token = max(1, token-1)
				}
				tx, err := conn.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: levels[(worker+round)%3]})
				if err != nil {
					t.Error(err)
					return
				}
				write := func() error {
					if _, err := tx.Exec(t.Context(), sqlfence.PresentSQL, lease, token); err != nil {
						return err
					}
					if round%3 == 0 { // what a savepoint takes back was not presented
						if _, err := tx.Exec(t.Context(), `SAVEPOINT s; INSERT INTO log (token) VALUES (0); ROLLBACK TO s`); err != nil {
							return err
						}
					}
					// The position is taken while the lease's row is locked.
					if _, err := tx.Exec(t.Context(), changes[(worker+round)%len(changes)], token); err != nil {
						return err
					}
					if round%4 == 0 {
						return errors.New("aborted")
					}
					return tx.Commit(t.Context())
				}
				if write() != nil {
					_ = tx.Rollback(context.Background())
				}
			}
		})
	}
	wg.Wait()
	tokens := d.log(app)
	if len(tokens) < 20 || tokens[0] == tokens[len(tokens)-1] {
		t.Fatalf("%d transactions committed, from %v: too few to tell", len(tokens), tokens)
	}
	t.Logf("%d transactions committed, tokens %d to %d", len(tokens), tokens[0], tokens[len(tokens)-1])
}

// logged are a guarded table to insert into and one to update, each of whose
// changes takes a position in the log. A position is taken under the lease's
// lock.
var logged = []string{
	`CREATE TABLE log (at bigint GENERATED ALWAYS AS IDENTITY, token bigint)`,
	`CREATE TABLE turn (n bigint)`, `INSERT INTO turn VALUES (0)`,
	`CREATE FUNCTION log_turn() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO log (token) VALUES (new.n); RETURN NULL; END $$`,
	`CREATE TRIGGER log_turn AFTER UPDATE ON turn FOR EACH ROW EXECUTE FUNCTION log_turn()`,
	`SELECT fence.guard('log', lease => 'shop/orders')`, `SELECT fence.guard('turn', lease => 'shop/orders')`,
}

var changes = []string{`INSERT INTO log (token) VALUES ($1)`, `UPDATE turn SET n = $1`}

// log gives the tokens of the committed changes in their order, in which none
// may be lower than one before it.
func (d *database) log(conn *pgx.Conn) []int64 {
	d.Helper()
	rows, err := conn.Query(d.Context(), `SELECT token FROM log ORDER BY at`)
	if err != nil {
		d.Fatal(err)
	}
	tokens, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil {
		d.Fatal(err)
	}
	for i := 1; i < len(tokens); i++ {
		if tokens[i] < tokens[i-1] {
			d.Fatalf("the token went from %d to %d", tokens[i-1], tokens[i])
		}
	}
	return tokens
}

// session is a transaction whose statements are let go one by one.
type session struct {
	conn  *pgx.Conn
	pid   uint32
	steps []string
	done  chan error
	// waits is set while a statement waits for the other session.
	waits bool
}

// step lets the next statement go, or looks after the one that waits, and
// returns once it has ended or waits for a lock.
func (s *session) step(d *database, watch *pgx.Conn) {
	if !s.waits {
		statement := s.steps[0]
		s.steps, s.waits = s.steps[1:], true
		go func() {
			_, err := s.conn.Exec(d.Context(), statement)
			s.done <- err
		}()
	}
	for {
		select {
		case err := <-s.done:
			s.waits = false
			if err != nil && len(s.steps) > 0 {
				s.steps = []string{"ROLLBACK"}
			}
			return
		default:
		}
		var blocked bool
		if err := watch.QueryRow(d.Context(), `SELECT cardinality(pg_blocking_pids($1)) > 0`, s.pid).Scan(&blocked); err != nil {
			d.Fatal(err)
		}
		if blocked {
			return
		}
	}
}

// TestInterleavings runs the statements of a holder's transaction and of its
// successor's in a thousand random orders, one statement after the other.
func TestInterleavings(t *testing.T) {
	d := newDatabase(t, logged...)
	app, watch := d.connect("app"), d.connect("app")
	seed := time.Now().UnixNano()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(uint64(seed), 0)) //nolint:gosec // any will do
	connections := []*pgx.Conn{d.connect("app"), d.connect("app")}
	var outcomes [3]int // of the older one alone, of the newer one alone, of both
	for round := range int64(1000) {
		sessions := make([]*session, 2)
		tokens := []int64{2*round + 1, 2*round + 2}
		level, change := levels[random.IntN(len(levels))], changes[random.IntN(len(changes))]
		for i, conn := range connections {
			write := strings.Replace(change, "$1", strconv.FormatInt(tokens[i], 10), 1)
			sessions[i] = &session{conn: conn, pid: conn.PgConn().PID(), done: make(chan error, 1), steps: []string{
				"BEGIN ISOLATION LEVEL " + string(level), "SELECT count(*) FROM log",
				fmt.Sprintf("SELECT fence.present('%s', %d)", lease, tokens[i]), write, write, "COMMIT",
			}}
			if random.IntN(2) == 0 { // the snapshot comes with present, not before
				sessions[i].steps = slices.Delete(sessions[i].steps, 1, 2)
			}
		}
		for {
			open := slices.DeleteFunc(slices.Clone(sessions), func(s *session) bool { return len(s.steps) == 0 && !s.waits })
			if len(open) == 0 {
				break
			}
			open[random.IntN(len(open))].step(d, watch)
		}
		committed := d.log(app)
		older, newer := slices.Contains(committed, tokens[0]), slices.Contains(committed, tokens[1])
		switch {
		case older && newer:
			outcomes[2]++
		case newer:
			outcomes[1]++
		case older:
			outcomes[0]++
		}
		d.exec(app, `BEGIN; SELECT fence.present('shop/orders', `+strconv.FormatInt(tokens[1], 10)+`); TRUNCATE log; COMMIT`)
	}
	t.Logf("the older one alone committed %d times, the newer one alone %d times, both %d times", outcomes[0], outcomes[1], outcomes[2])
	if outcomes[1] < 50 || outcomes[2] < 50 {
		t.Error("too few of a kind to tell")
	}
}

// TestPooling: behind a proxy that pools by transaction, with one server
// connection, nothing of one client's transaction reaches another's.
func TestPooling(t *testing.T) {
	d := newDatabase(t, `CREATE TABLE orders (n int)`)
	app := d.connect("app")
	d.exec(app, `SELECT fence.guard('orders', lease => 'shop/orders')`)
	pool := startPgbouncer(t, d)
	connect := func() *pgx.Conn {
		cfg, err := pgx.ParseConfig(pool)
		if err != nil {
			t.Fatal(err)
		}
		cfg.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
		conn, err := pgx.ConnectConfig(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close(context.Background()) })
		return conn
	}
	a, b := connect(), connect()
	if err := d.in(a, 42, `INSERT INTO orders VALUES (1)`); err != nil {
		t.Fatal(err)
	}
	for name, before := range map[string]func(){
		"after a commit":             func() { _ = d.in(a, 42) },
		"after an abort":             func() { _ = d.in(a, 42, `SELECT 1/0`) },
		"after a present of its own": func() { _, _ = a.Exec(t.Context(), "SELECT fence.present('shop/orders', 42)") },
		"after a rolled back one":    func() { _ = d.in(a, 42, `SAVEPOINT s`, `ROLLBACK TO s`, `SELECT 1/0`) },
		"after a setting by hand":    func() { _ = d.in(a, 0, `SET LOCAL fence.bypassed = 'on'`) },
		"after a connection was killed": func() {
			c := connect()
			_, _ = c.Exec(t.Context(), "BEGIN")
			_, _ = c.Exec(t.Context(), "SELECT fence.present('shop/orders', 42)")
			_ = c.PgConn().Conn().Close()
		},
	} {
		before()
		if _, err := b.Exec(t.Context(), `INSERT INTO orders VALUES (2)`); code(err) != sqlfence.CodeUnstamped {
			t.Errorf("%s another client writes: %v", name, err)
		}
		if err := d.in(b, 41, `INSERT INTO orders VALUES (2)`); code(err) != sqlfence.CodeStale {
			t.Errorf("%s an old token writes: %v", name, err)
		}
	}
	var locks int
	if err := d.connect("postgres").QueryRow(t.Context(), `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'`).Scan(&locks); err != nil || locks != 0 {
		t.Errorf("%d locks stay behind, %v", locks, err)
	}
}

func startPgbouncer(t *testing.T, d *database) string {
	t.Helper()
	program := pgtest.Need(t, "pgbouncer")
	dir, err := os.MkdirTemp("/tmp", "fence-pool-") //nolint:usetesting // another account has to enter it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	config := filepath.Join(dir, "pgbouncer.ini")
	text := fmt.Sprintf("[databases]\n* = host=%s\n[pgbouncer]\nlisten_port = 6432\nunix_socket_dir = %s\nauth_type = any\npool_mode = transaction\ndefault_pool_size = 1\nignore_startup_parameters = extra_float_digits\n", server.Dir(), dir)
	text = strings.Replace(text, "* = host="+server.Dir(), "* = host="+server.Dir()+" user=app", 1)
	if err := os.WriteFile(config, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), program, "-q", config)
	if os.Geteuid() == 0 {
		account, err := user.Lookup("postgres")
		if err != nil {
			t.Fatal(err)
		}
		var uid, gid int
		_, _ = fmt.Sscan(account.Uid, &uid)
		_, _ = fmt.Sscan(account.Gid, &gid)
		if err := os.Chown(dir, uid, gid); err != nil {
			t.Fatal(err)
		}
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}
	}
	var log strings.Builder
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	url := "postgres://app@/" + d.name + "?host=" + dir + "&port=6432"
	limit := time.After(10 * time.Second)
	for {
		conn, err := pgx.Connect(t.Context(), url)
		if err == nil {
			_ = conn.Close(t.Context())
			return url
		}
		select {
		case <-limit:
			t.Fatalf("pgbouncer does not answer: %v\n%s", err, log.String())
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// TestSavepoint: what a savepoint takes back was not presented.
func TestSavepoint(t *testing.T) {
	d := newDatabase(t, `CREATE TABLE orders (n int)`)
	app := d.connect("app")
	d.exec(app, `SELECT fence.guard('orders', lease => 'shop/orders')`)
	err := d.in(app, 0, `SAVEPOINT s`, `SELECT fence.present('shop/orders', 42)`, `ROLLBACK TO s`, `INSERT INTO orders VALUES (1)`)
	if code(err) != sqlfence.CodeUnstamped {
		t.Errorf("after the savepoint: %v", err)
	}
	d.exec(app, `SELECT fence.present('shop/orders', 42)`) // a transaction of its own
	_, err = app.Exec(t.Context(), `INSERT INTO orders VALUES (1)`)
	var refused *pgconn.PgError
	if !errors.As(err, &refused) || refused.Code != sqlfence.CodeUnstamped || !strings.Contains(refused.Hint, "in this very transaction") {
		t.Errorf("presented outside of the transaction: %v, hint %q", err, refused.Hint)
	}
	if err := d.in(app, 42, `SAVEPOINT s`, `INSERT INTO orders VALUES (1)`, `ROLLBACK TO s`, `INSERT INTO orders VALUES (2)`); err != nil {
		t.Errorf("what was presented before it stands: %v", err)
	}
}

// TestPreparedTransaction: a transaction that is prepared for two-phase commit
// still holds its successor, until it is decided.
func TestPreparedTransaction(t *testing.T) {
	d := newDatabase(t, `CREATE TABLE orders (n int)`)
	app := d.connect("app")
	d.exec(app, `SELECT fence.guard('orders', lease => 'shop/orders')`)
	for _, statement := range []string{`BEGIN`, `SELECT fence.present('shop/orders', 41)`, `INSERT INTO orders VALUES (41)`, `PREPARE TRANSACTION 'old'`} {
		d.exec(app, statement)
	}
	if _, err := app.Exec(t.Context(), `SELECT fence.present('shop/orders', 42, '100 milliseconds')`); code(err) != sqlfence.CodeWait {
		t.Errorf("while it is prepared: %v", err)
	}
	d.exec(app, `COMMIT PREPARED 'old'`)
	if err := d.in(app, 42, `INSERT INTO orders VALUES (42)`); err != nil {
		t.Errorf("once it is decided: %v", err)
	}
}

// TestSubscription: the triggers fire for logical replication too, whose
// worker presents nothing.
func TestSubscription(t *testing.T) {
	from := newDatabase(t, `CREATE TABLE orders (n int PRIMARY KEY)`)
	root := from.connect("postgres")
	from.exec(root, `CREATE PUBLICATION p FOR TABLE orders`)
	from.exec(root, `SELECT pg_create_logical_replication_slot('fence_slot', 'pgoutput')`)
	t.Run("to", func(t *testing.T) {
		to := newDatabase(t, `CREATE TABLE orders (n int PRIMARY KEY)`, `SELECT fence.guard('orders', lease => 'shop/orders')`)
		subscriber := to.connect("postgres")
		if to.version(subscriber) < 15 {
			t.Skip("before PostgreSQL 15 nothing counts a subscription's errors")
		}
		to.exec(subscriber, fmt.Sprintf(`CREATE SUBSCRIPTION s CONNECTION 'host=%s user=postgres dbname=%s' PUBLICATION p WITH (create_slot = false, slot_name = 'fence_slot', copy_data = false)`, server.Dir(), from.name))
		t.Cleanup(func() {
			for _, statement := range []string{`ALTER SUBSCRIPTION s DISABLE`, `ALTER SUBSCRIPTION s SET (slot_name = NONE)`, `DROP SUBSCRIPTION s`} {
				_, _ = subscriber.Exec(context.Background(), statement)
			}
		})
		from.exec(root, `INSERT INTO orders VALUES (1)`)
		limit := time.After(20 * time.Second)
		for {
			var refused, arrived int
			if err := subscriber.QueryRow(t.Context(), `SELECT (SELECT apply_error_count FROM pg_stat_subscription_stats), (SELECT count(*) FROM orders)`).Scan(&refused, &arrived); err != nil {
				t.Fatal(err)
			}
			if arrived > 0 {
				t.Fatal("an unjudged row arrived")
			}
			if refused > 0 {
				return
			}
			select {
			case <-limit:
				t.Fatal("the worker neither wrote nor was refused")
			case <-time.After(50 * time.Millisecond):
			}
		}
	})
}

// TestRoles: what an application may not do, and what is done past the fence
// and by whom.
func TestRoles(t *testing.T) {
	d := newDatabase(t)
	root, app := d.connect("postgres"), d.connect("app")
	d.exec(root, `CREATE TABLE orders (n int); GRANT ALL ON orders TO app; SELECT fence.guard('orders', lease => 'shop/orders'); SELECT fence.present('shop/orders', 42)`)
	for _, statement := range []string{
		`UPDATE fence.lease SET token = 1`, `DELETE FROM fence.lease`, `INSERT INTO fence.lease VALUES ('a/b', 1)`,
		`SELECT fence.bypass('please')`, `SELECT fence.reset('shop/orders', 1, 'please')`, `UPDATE fence.setting SET strict = false`,
		`INSERT INTO fence.audit (transaction, account, action, reason) VALUES (txid_current()::text, 'x', 'bypass', 'x')`,
		`ALTER TABLE orders DISABLE TRIGGER ALL`, `DROP TRIGGER fence_write ON orders`, `SELECT fence.unguard('orders')`,
		`SET session_replication_role = replica`,
	} {
		if _, err := app.Exec(t.Context(), statement); code(err) != "42501" {
			t.Errorf("%s: %v, want that it is not permitted", statement, err)
		}
	}
	// A setting by hand is no bypass.
	if err := d.in(app, 0, `SET LOCAL fence.bypassed = 'on'`, `INSERT INTO orders VALUES (1)`); code(err) != sqlfence.CodeUnstamped {
		t.Errorf("a forged bypass: %v", err)
	}
	d.exec(root, `GRANT fence_bypass TO app`)
	t.Cleanup(func() { _, _ = root.Exec(context.Background(), `REVOKE fence_bypass FROM app`) })
	if err := d.in(app, 0, `SELECT fence.bypass('incident 7')`, `INSERT INTO orders VALUES (1)`, `TRUNCATE orders`); err != nil {
		t.Errorf("a bypass: %v", err)
	}
	if err := d.in(app, 0, `INSERT INTO orders VALUES (1)`); code(err) != sqlfence.CodeUnstamped {
		t.Errorf("after the bypass's transaction: %v", err)
	}
	var account, reason string
	if err := root.QueryRow(t.Context(), `SELECT account, reason FROM fence.audit WHERE action = 'bypass'`).Scan(&account, &reason); err != nil || account != "app" || reason != "incident 7" {
		t.Errorf("the audit says %q, %q, %v", account, reason, err)
	}
	// Strict: the operator advances, the application presents.
	d.exec(root, `UPDATE fence.setting SET strict = true`)
	if err := d.in(app, 43); code(err) != sqlfence.CodeUnissued {
		t.Errorf("an application advances in strict mode: %v", err)
	}
	if err := d.in(root, 43); err != nil {
		t.Errorf("the operator advances: %v", err)
	}
	if err := d.in(app, 43, `INSERT INTO orders VALUES (1)`); err != nil {
		t.Errorf("the application presents what the operator advanced to: %v", err)
	}
}

// TestVerify: what is not fenced although one would think so is named.
func TestVerify(t *testing.T) {
	d := newDatabase(t, ddl...)
	app := d.connect("app")
	d.exec(app, `SELECT fence.guard('parent', lease => 'shop/orders')`)
	d.exec(app, `SELECT fence.guard('base', lease => 'shop/orders')`)
	d.exec(app, `CREATE TABLE heir_later () INHERITS (base)`)
	d.exec(app, `SELECT fence.guard('source', lease_column => 'n')`)
	d.exec(app, `ALTER TABLE source DISABLE TRIGGER fence_write`)
	d.exec(app, `CREATE TABLE emptied (n int)`)
	d.exec(app, `SELECT fence.guard('emptied', lease => 'shop/orders')`)
	d.exec(app, `ALTER TABLE emptied DISABLE TRIGGER fence_truncate`)
	d.exec(app, `SELECT fence.present('shop/orders', 42)`)
	report, err := sqlfence.Verify(t.Context(), app)
	if err != nil {
		t.Fatal(err)
	}
	guarded, findings := report.Guarded, report.Findings
	if report.Recorded[lease] != 42 {
		t.Errorf("recorded: %v", report.Recorded)
	}
	if guarded["parent"] != "lease shop/orders" || guarded["source"] != "column n" {
		t.Errorf("guarded: %v", guarded)
	}
	for table, problem := range map[string]string{"orders": "refers to the guarded table parent", "heir_later": "child of a guarded table", "source": "is disabled", "emptied": "TRUNCATE is not guarded"} {
		found := false
		for _, f := range findings {
			found = found || f.Table == table && strings.Contains(f.Problem, problem)
		}
		if !found {
			t.Errorf("%s: %q is not among %v", table, problem, findings)
		}
	}
	d.exec(d.connect("postgres"), sqlfence.Uninstall)
	if err := d.in(app, 0, `INSERT INTO parent VALUES (99)`); err != nil {
		t.Errorf("after the fence is gone: %v", err)
	}
}

// TestDump: a dump that is restored is fenced as before. Data that is restored
// with the triggers disabled gets past them, and they do not come back whole:
// verify says so, and guard mends it.
func TestDump(t *testing.T) {
	d := newDatabase(t, `CREATE TABLE orders (n int)`)
	app := d.connect("app")
	d.exec(app, `SELECT fence.guard('orders', lease => 'shop/orders')`)
	if err := d.in(app, 42, `INSERT INTO orders VALUES (1)`); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "dump")
	run := func(program string, args ...string) {
		t.Helper()
		out, err := exec.CommandContext(t.Context(), pgtest.Need(t, program), args...).CombinedOutput()
		if strings.Contains(string(out), "server version mismatch") {
			t.Skipf("%s", out) // another version's server with this machine's programs
		}
		if err != nil {
			t.Fatalf("%s %v: %v\n%s", program, args, err, out)
		}
	}
	run("pg_dump", "--format=custom", "--file="+file, server.URL("postgres", d.name))
	d.exec(d.connect("postgres"), "CREATE DATABASE restored")
	run("pg_restore", "--dbname="+server.URL("postgres", "restored"), file)

	restored := &database{T: t, name: "restored"}
	app = restored.connect("app")
	findings := func() []sqlfence.Finding {
		t.Helper()
		report, err := sqlfence.Verify(t.Context(), app)
		if err != nil {
			t.Fatal(err)
		}
		if report.Recorded[lease] != 42 || report.Guarded["orders"] != "lease shop/orders" {
			t.Errorf("%+v", report)
		}
		return report.Findings
	}
	if f := findings(); len(f) > 0 {
		t.Errorf("after a restore: %v", f)
	}
	if err := restored.in(app, 41, `INSERT INTO orders VALUES (41)`); code(err) != sqlfence.CodeStale {
		t.Errorf("after a restore 41 writes: %v", err)
	}
	run("pg_restore", "--data-only", "--disable-triggers", "--table=orders", "--dbname="+server.URL("postgres", "restored"), file)
	if f := findings(); len(f) != 2 || f[0].Table != "orders" || f[1].Table != "orders" {
		t.Errorf("after a restore with the triggers disabled: %v", f)
	}
	d.exec(app, `SELECT fence.guard('orders', lease => 'shop/orders')`)
	if f := findings(); len(f) > 0 {
		t.Errorf("guarded again: %v", f)
	}
}

func TestDatabaseSQL(t *testing.T) {
	d := newDatabase(t, `CREATE TABLE orders (n int)`)
	d.exec(d.connect("app"), `SELECT fence.guard('orders', lease => 'shop/orders')`)
	db, err := sql.Open("pgx", server.URL("app", d.name))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	tx, err := sqlfence.Begin(t.Context(), db, nil, holder(42))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.ExecContext(t.Context(), `INSERT INTO orders VALUES (1)`); err != nil {
		t.Error(err)
	}
	if err := sqlfence.CommitError(tx.Commit()); err != nil {
		t.Error(err)
	}
	if _, err := sqlfence.Begin(t.Context(), db, nil, holder(41)); !errors.Is(err, fence.ErrStale) {
		t.Errorf("a stale token: %v", err)
	}
	if err := sqlfence.CommitError(errors.New("connection reset")); !errors.Is(err, fence.ErrOutcomeUnknown) {
		t.Errorf("a commit without an answer: %v", err)
	}
}

func TestGuardSQL(t *testing.T) {
	for name, c := range map[string]struct{ table, lease, column, want string }{
		"by lease":         {"shop.orders", "shop/orders", "", "SELECT fence.guard('shop.orders'::regclass, lease => 'shop/orders');\n"},
		"by column":        {"orders", "", "lease", "SELECT fence.guard('orders'::regclass, lease_column => 'lease');\n"},
		"quotes stay data": {"o'; DROP TABLE x; --", "a/b", "", "SELECT fence.guard('o''; DROP TABLE x; --'::regclass, lease => 'a/b');\n"},
		"neither":          {"orders", "", "", ""},
		"both":             {"orders", "a/b", "c", ""},
		"no table":         {"", "a/b", "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := sqlfence.GuardSQL(c.table, c.lease, c.column)
			if got != c.want || (err != nil) != (c.want == "") {
				t.Errorf("got %q, %v", got, err)
			}
		})
	}
}
