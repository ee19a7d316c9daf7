package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/fencedlease/fencedlease/sqlfence/pgtest"
)

func run(t *testing.T, args ...string) (string, error) {
	t.Helper()
	cmd := newRootCommand()
	var out bytes.Buffer
	cmd.SetOut(&out)
	cmd.SetErr(&out)
	cmd.SetArgs(args)
	err := cmd.ExecuteContext(t.Context())
	return out.String(), err
}

func TestSQLCommand(t *testing.T) {
	url := pgtest.Start(t).URL("postgres", "postgres")
	db, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close(t.Context()) })
	if _, err := db.Exec(t.Context(), `CREATE TABLE orders (id int PRIMARY KEY); CREATE TABLE lines ("order" int REFERENCES orders)`); err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct {
		args  string
		fails bool
		says  string
	}{
		{"sql postgres", false, "CREATE SCHEMA IF NOT EXISTS fence"},
		{"sql postgres --guard-only --table orders --lease shop/orders", false, "SELECT fence.guard('orders'::regclass, lease => 'shop/orders');"},
		{"sql postgres --table orders", true, "either a lease or a column"},
		{"sql postgres --lease shop/orders", true, "--table"},
		{"sql postgres --uninstall --table orders", true, "--uninstall"},
		{"sql verify", true, "--url"},
		{"sql postgres --table missing --lease shop/orders --apply " + url, true, "missing"},
		{"sql verify --url " + url, true, "fence.guarded"}, // all or nothing
		{"sql postgres --table orders --lease shop/orders --apply " + url, false, "applied"},
		{"sql verify --url " + url, true, "table lines: NOT FENCED: it refers to the guarded table orders"},
		{"sql postgres --guard-only --table lines --lease shop/orders --apply " + url, false, "applied"},
		{"sql verify --url " + url, false, "table orders: guarded by lease shop/orders"},
		{"sql postgres --uninstall --apply " + url, false, "applied"},
	} {
		out, err := run(t, strings.Fields(step.args)...)
		if err != nil {
			out += err.Error()
		}
		if (err != nil) != step.fails || !strings.Contains(out, step.says) {
			t.Errorf("%s: %v\n%.500s\nwant %q", step.args, err, out, step.says)
		}
	}
	if _, err := db.Exec(t.Context(), `INSERT INTO orders VALUES (1)`); err != nil {
		t.Errorf("after the uninstall: %v", err)
	}
}
