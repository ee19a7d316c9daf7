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
	rounds       = 9
	transactions = 1500
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
	} {
		if _, err := db.Exec(ctx, statement); err != nil {
			return fmt.Errorf("%w in %s", err, statement)
		}
	}
	batch := func(statements ...string) func(int) error {
		return func(i int) error {
			b := &pgx.Batch{}
			b.Queue("BEGIN")
			for _, s := range statements {
				b.Queue(s)
			}
			b.Queue("COMMIT")
			return db.SendBatch(ctx, b).Close()
		}
	}
	trips := func(table, first string) func(int) error {
		return func(i int) error {
			tx, err := db.Begin(ctx)
			if err != nil {
				return err
			}
			if first != "" {
				if _, err := tx.Exec(ctx, first); err != nil {
					return err
				}
			}
			if _, err := tx.Exec(ctx, "UPDATE "+table+" SET n = n + 1 WHERE id = 7"); err != nil {
				return err
			}
			return tx.Commit(ctx)
		}
	}
	const present = `SELECT fence.present('shop/orders', 42::bigint)`
	kinds := []struct {
		name string
		do   func(int) error
	}{
		{"one round trip, unguarded", batch("UPDATE plain SET n = n + 1 WHERE id = 7")},
		{"one round trip, guarded", batch(present, "UPDATE guarded SET n = n + 1 WHERE id = 7")},
		{"a round trip a statement, unguarded", trips("plain", "")},
		{"the same with an empty statement", trips("plain", "SELECT 1")},
		{"a round trip a statement, guarded", trips("guarded", present)},
	}
	times := make([][]time.Duration, len(kinds))
	for range rounds {
		for k, kind := range kinds { // interleaved, so that a slow moment hits all
			start := time.Now()
			for i := range transactions {
				if err := kind.do(i); err != nil {
					return fmt.Errorf("%s: %w", kind.name, err)
				}
			}
			times[k] = append(times[k], time.Since(start))
		}
	}
	median := func(k int) time.Duration {
		slices.Sort(times[k])
		return times[k][len(times[k])/2]
	}
	base := []int{0, 0, 2, 2, 2}
	fmt.Printf("%d rounds of %d transactions, medians\n", rounds, transactions)
	for k, kind := range kinds {
		fmt.Printf("%-38s %8.1f us a transaction, %.2f of the unguarded throughput\n", kind.name,
			float64(median(k).Microseconds())/transactions, float64(median(base[k]))/float64(median(k)))
	}
	return nil
}
