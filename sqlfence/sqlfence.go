// Package sqlfence is the fence as a database constraint: PostgreSQL itself
// rejects a stale writer, whatever program, driver or session it comes from.
//
// Tokens of committed transactions on a guarded table never go down, at every
// isolation level and behind a pooling proxy, as long as the triggers are in
// place. It does not guard against a superuser or a table's owner, who can take
// them off (Verify finds that), nor does it make a holder stop.
package sqlfence

import (
	"context"
	"database/sql"
	_ "embed" // the schema
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/fencedlease/fencedlease/fence"
)

// Schema is the DDL that installs the fence, or upgrades it. It is run as one
// script by a role that may create schemas and roles.
//
//go:embed schema.sql
var Schema string

// Uninstall is the DDL that takes the fence out of a database, its triggers
// first. The roles fence_operator and fence_bypass are the cluster's and stay.
const Uninstall = `DO $$
DECLARE target regclass;
BEGIN
  FOR target IN SELECT relation FROM fence.guarded LOOP
    PERFORM fence.unguard(target);
  END LOOP;
END $$;
DROP SCHEMA fence CASCADE;
`

// SQLSTATEs of the fence.
const (
	CodeStale     = "FL001"
	CodeUnstamped = "FL002"
	CodeMalformed = "FL003"
	CodeWait      = "FL004"
	CodeUnissued  = "FL005"
)

// ErrWait is wrapped where older transactions did not end within the limit.
// Nothing was written; trying again is safe.
var ErrWait = errors.New("older transactions did not end in time")

// Holder is where the token comes from: client.Held, client.Lock,
// client.Static.
type Holder interface {
	// Lease is the lease as "namespace/name".
	Lease() string
	// Present gives the token, or an error that wraps fence.ErrLost.
	Present() (fence.Token, error)
}

// PresentSQL is the statement that presents; its parameters are the lease and
// the token. Send it in the same round trip as the first statement of the
// transaction to save one.
const PresentSQL = "SELECT fence.present($1, $2::bigint)"

// Begin begins a transaction that has presented the holder's token. Errors are
// mapped as by Error; the transaction is rolled back on every one.
func Begin(ctx context.Context, db *sql.DB, opts *sql.TxOptions, holder Holder) (*sql.Tx, error) {
	token, err := holder.Present()
	if err != nil {
		return nil, err
	}
	tx, err := db.BeginTx(ctx, opts)
	if err != nil {
		return nil, err
	}
	if _, err := tx.ExecContext(ctx, PresentSQL, holder.Lease(), int64(token)); err != nil {
		return nil, errors.Join(Error(err), ignoreDone(tx.Rollback()))
	}
	return tx, nil
}

func ignoreDone(err error) error {
	if errors.Is(err, sql.ErrTxDone) {
		return nil
	}
	return err
}

// Beginner is what begins a pgx transaction: a connection or a pool.
type Beginner interface {
	BeginTx(ctx context.Context, opts pgx.TxOptions) (pgx.Tx, error)
}

// BeginPgx is Begin for pgx.
func BeginPgx(ctx context.Context, db Beginner, opts pgx.TxOptions, holder Holder) (pgx.Tx, error) {
	token, err := holder.Present()
	if err != nil {
		return nil, err
	}
	tx, err := db.BeginTx(ctx, opts)
	if err != nil {
		return nil, err
	}
	if _, err := tx.Exec(ctx, PresentSQL, holder.Lease(), int64(token)); err != nil {
		return nil, errors.Join(Error(err), tx.Rollback(ctx))
	}
	return tx, nil
}

// Reason gives the fence's reason of an error, and false for every other.
func Reason(err error) (fence.Reason, bool) {
	var pg *pgconn.PgError
	if !errors.As(err, &pg) {
		return "", false
	}
	switch pg.Code {
	case CodeStale:
		return fence.StaleToken, true
	case CodeUnstamped:
		if strings.HasPrefix(pg.Message, string(fence.FenceRemoved)) {
			return fence.FenceRemoved, true
		}
		return fence.Unstamped, true
	case CodeMalformed:
		return fence.MalformedToken, true
	case CodeUnissued:
		return fence.UnissuedToken, true
	}
	return "", false
}

// Error makes errors.Is work on what the database answers: fence.ErrStale for
// a stale token, ErrWait for a limit that was over, fence.ErrOutcomeUnknown
// for a commit whose answer never came. The original stays in the chain.
func Error(err error) error {
	var pg *pgconn.PgError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &pg) && pg.Code == CodeStale:
		return fmt.Errorf("%w: %w", fence.ErrStale, err)
	case errors.As(err, &pg) && pg.Code == CodeWait:
		return fmt.Errorf("%w: %w", ErrWait, err)
	}
	return err
}

// CommitError is Error for what Commit gives: without an answer of the
// database the transaction may have been committed.
func CommitError(err error) error {
	var pg *pgconn.PgError
	if err == nil || errors.As(err, &pg) || errors.Is(err, pgx.ErrTxCommitRollback) || errors.Is(err, sql.ErrTxDone) || errors.Is(err, pgx.ErrTxClosed) {
		return Error(err)
	}
	return fmt.Errorf("%w: %w", fence.ErrOutcomeUnknown, err)
}

// GuardSQL is the statement that puts a table under the fence: of one lease
// ("namespace/name"), or of the lease that a column names in each row. The
// table may be qualified; it is quoted as it is given.
func GuardSQL(table, lease, leaseColumn string) (string, error) {
	switch {
	case table == "":
		return "", errors.New("guard: no table given")
	case (lease == "") == (leaseColumn == ""):
		return "", fmt.Errorf("guard %s: give either a lease or a column that names one", table)
	case lease != "":
		return fmt.Sprintf("SELECT fence.guard(%s::regclass, lease => %s);\n", literal(table), literal(lease)), nil
	}
	return fmt.Sprintf("SELECT fence.guard(%s::regclass, lease_column => %s);\n", literal(table), literal(leaseColumn)), nil
}

// literal quotes a string for SQL.
func literal(s string) string { return "'" + strings.ReplaceAll(s, "'", "''") + "'" }

// Report is what Verify found.
type Report struct {
	// Guarded tells by table what guards it: "lease NAMESPACE/NAME", or
	// "column NAME".
	Guarded map[string]string
	// Recorded is the recorded token of each lease.
	Recorded map[string]fence.Token
	// Findings are tables that are not fenced although one would think so.
	Findings []Finding
}

// Finding is a table that is not fenced although one would think so, and why.
type Finding struct{ Table, Problem string }

// Verify reads what the fence of a database guards and has recorded, and looks
// for what it does not guard.
func Verify(ctx context.Context, db *pgx.Conn) (*Report, error) {
	r := &Report{Guarded: map[string]string{}, Recorded: map[string]fence.Token{}}
	var name, value string
	var token int64
	for _, part := range []struct {
		query string
		scan  []any
		take  func()
	}{
		{"SELECT relation::text, by || ' ' || value FROM fence.guarded", []any{&name, &value}, func() { r.Guarded[name] = value }},
		{"SELECT lease, token FROM fence.lease", []any{&name, &token}, func() { r.Recorded[name] = fence.Token(token) }},
		{"SELECT relation::text, problem FROM fence.finding ORDER BY 1, 2", []any{&name, &value}, func() { r.Findings = append(r.Findings, Finding{name, value}) }},
	} {
		rows, err := db.Query(ctx, part.query)
		if err == nil {
			_, err = pgx.ForEachRow(rows, part.scan, func() error { part.take(); return nil })
		}
		if err != nil {
			return nil, fmt.Errorf("verify the fence: %w", err)
		}
	}
	return r, nil
}
