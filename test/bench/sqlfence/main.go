// Command sqlfence measures, in one run on one PostgreSQL, what the fence costs
// a transaction that updates one row: as a ratio to the same without.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/fencedlease/fencedlease/sqlfence"
	"github.com/fencedlease/fencedlease/sqlfence/pgtest"
)

func main() { os.Exit(run()) }

func run() int {
	if err := bench(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		return 1
	}
	return 0
}

const (
	rounds       = 30
	warmup       = 20 // transactions of a turn that do not count: the kind before left its own state behind
	counted      = 100
	transactions = rounds * counted
)

func bench(ctx context.Context) (err error) {
	server, err := pgtest.New(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Stop()) }()
	db, err := pgx.Connect(ctx, server.URL("postgres", "postgres"))
	if err != nil {
		return err
	}
	for _, statement := range []string{
		sqlfence.Schema, `CREATE TABLE plain (id int PRIMARY KEY, n int); CREATE TABLE guarded (LIKE plain INCLUDING ALL)`,
		`INSERT INTO plain SELECT i, 0 FROM generate_series(1, 1000) i; INSERT INTO guarded SELECT * FROM plain`,
		`SELECT fence.guard('guarded', lease => 'shop/orders'); SELECT fence.present('shop/orders', 42)`,
		`VACUUM ANALYZE`, // as autovacuum does within a minute
	} {
		if _, err := db.Exec(ctx, statement); err != nil {
			return fmt.Errorf("%w in %s", err, statement)
		}
	}
	type statement struct {
		sql  string
		args []any
	}
	plain, guarded := statement{sql: "UPDATE plain SET n = n + 1 WHERE id = 7"}, statement{sql: "UPDATE guarded SET n = n + 1 WHERE id = 7"}
	present, empty := statement{sqlfence.PresentSQL, []any{"shop/orders", 42}}, statement{sql: "SELECT 1"}
	batch := func(statements ...statement) func() error {
		return func() error {
			b := &pgx.Batch{}
			b.Queue("BEGIN")
			for _, s := range statements {
				b.Queue(s.sql, s.args...)
			}
			b.Queue("COMMIT")
			return db.SendBatch(ctx, b).Close()
		}
	}
	trips := func(statements ...statement) func() error {
		return func() error {
			tx, err := db.Begin(ctx)
			if err != nil {
				return err
			}
			for _, s := range statements {
				if _, err := tx.Exec(ctx, s.sql, s.args...); err != nil {
					return err
				}
			}
			return tx.Commit(ctx)
		}
	}
	kinds := []struct {
		name string
		base int
		do   func() error
	}{
		{"one round trip, unguarded", 0, batch(plain)},
		{"the same with an empty statement", 0, batch(empty, plain)},
		{"one round trip, guarded", 0, batch(present, guarded)},
		{"a round trip a statement, unguarded", 3, trips(plain)},
		{"the same with an empty statement", 3, trips(empty, plain)},
		{"a round trip a statement, guarded", 3, trips(present, guarded)},
	}
	times := make([][]float64, len(kinds)) // of single transactions, in microseconds
	for range rounds {
		for k, kind := range kinds { // interleaved, so that a slow moment hits all
			for i := range warmup + counted {
				start := time.Now()
				if err := kind.do(); err != nil {
					return fmt.Errorf("%s: %w", kind.name, err)
				}
				if i >= warmup {
					times[k] = append(times[k], float64(time.Since(start).Nanoseconds())/1e3)
				}
			}
		}
	}
	fmt.Printf("%d transactions of each kind, %d of each in turn\n", transactions, counted)
	for _, t := range times {
		slices.Sort(t)
	}
	for k, kind := range kinds {
		at := func(percent int) (took, ratio float64) {
			i := transactions * percent / 100
			return times[k][i], times[kind.base][i] / times[k][i]
		}
		median, ratio := at(50)
		_, quick := at(10)
		fmt.Printf("%-38s median %8.1f us: %.2f of the unguarded throughput (%.2f among the quickest tenth)\n", kind.name, median, ratio, quick)
	}
	return nil
}
