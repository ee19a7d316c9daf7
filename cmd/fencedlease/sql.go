package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/fencedlease/fencedlease/sqlfence"
)

func newSQLCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "sql",
		Short: "Print, apply and verify the SQL fence",
		Args:  cobra.NoArgs,
	}
	cmd.AddCommand(newPostgresCommand(), newSQLVerifyCommand())
	return cmd
}

// sqlOptions are what the fence's DDL is printed for.
type sqlOptions struct {
	tables             []string
	lease, leaseColumn string
	uninstall          bool
	apply              string
	guardOnly          bool
}

func newPostgresCommand() *cobra.Command {
	var o sqlOptions
	cmd := &cobra.Command{
		Use:   "postgres",
		Short: "Print the DDL of the fence for PostgreSQL, or run it",
		Example: "  fencedlease sql postgres                                            # the fence alone\n" +
			"  fencedlease sql postgres --table orders --lease shop/orders         # and a table of one lease\n" +
			"  fencedlease sql postgres --table jobs --key-column lease          # and one whose rows name theirs\n" +
			"  fencedlease sql postgres --table orders --lease shop/orders --apply postgres://admin@db/shop",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ddl, err := o.ddl()
			if err != nil {
				return err
			}
			if o.apply == "" {
				_, err := io.WriteString(cmd.OutOrStdout(), ddl)
				return err
			}
			return onDatabase(cmd.Context(), o.apply, func(ctx context.Context, db *pgx.Conn) error {
				// One script is one transaction: all of it, or nothing.
				if _, err := db.Exec(ctx, ddl); err != nil {
					return fmt.Errorf("apply the fence: %w", err)
				}
				fmt.Fprintln(cmd.ErrOrStderr(), "applied")
				return nil
			})
		},
	}
	flags := cmd.Flags()
	flags.StringSliceVar(&o.tables, "table", nil, "table to guard, as SQL names it (repeatable)")
	flags.StringVar(&o.lease, "lease", "", "the lease that guards the tables, namespace/name")
	flags.StringVar(&o.leaseColumn, "key-column", "", "the column that names the lease in each row, instead of --lease")
	flags.BoolVar(&o.guardOnly, "guard-only", false, "leave out the fence itself: it is installed already")
	flags.BoolVar(&o.uninstall, "uninstall", false, "the DDL that takes the fence out of the database")
	flags.StringVar(&o.apply, "apply", "", "connection string of the database to run it on, instead of printing")
	return cmd
}

func (o *sqlOptions) ddl() (string, error) {
	switch {
	case o.uninstall && (len(o.tables) > 0 || o.lease != "" || o.leaseColumn != "" || o.guardOnly):
		return "", errors.New("--uninstall takes everything out: it goes with no table, lease or --guard-only")
	case o.uninstall:
		return sqlfence.Uninstall, nil
	case len(o.tables) == 0 && (o.lease != "" || o.leaseColumn != "" || o.guardOnly):
		return "", errors.New("--table: name the tables to guard")
	}
	var b strings.Builder
	if !o.guardOnly {
		b.WriteString(sqlfence.Schema)
	}
	for _, table := range o.tables {
		statement, err := sqlfence.GuardSQL(table, o.lease, o.leaseColumn)
		if err != nil {
			return "", err
		}
		b.WriteString(statement)
	}
	return b.String(), nil
}

func newSQLVerifyCommand() *cobra.Command {
	var url string
	cmd := &cobra.Command{
		Use:   "verify",
		Short: "List what the fence guards and has recorded, and what it does not guard although one would think so",
		Long: "Lists the guarded tables and the recorded tokens, to compare with kubectl get fencedleases, and fails where a table that refers to a guarded one, a child or a partition is not guarded,\n" +
			"or a trigger is disabled. What a superuser or a table's owner may do is not fenced: see docs/sql.md.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if url == "" {
				return errors.New("--url: give the database's connection string")
			}
			return onDatabase(cmd.Context(), url, func(ctx context.Context, db *pgx.Conn) error {
				report, err := sqlfence.Verify(ctx, db)
				if err != nil {
					return err
				}
				for _, table := range slices.Sorted(maps.Keys(report.Guarded)) {
					fmt.Fprintf(cmd.OutOrStdout(), "table %s: guarded by %s\n", table, report.Guarded[table])
				}
				for _, lease := range slices.Sorted(maps.Keys(report.Recorded)) {
					fmt.Fprintf(cmd.OutOrStdout(), "lease %s: recorded %s\n", lease, report.Recorded[lease])
				}
				for _, f := range report.Findings {
					fmt.Fprintf(cmd.OutOrStdout(), "table %s: NOT FENCED: %s\n", f.Table, f.Problem)
				}
				if n := len(report.Findings); n > 0 {
					return fmt.Errorf("%d tables are not fenced as they seem to be", n)
				}
				return nil
			})
		},
	}
	cmd.Flags().StringVar(&url, "url", "", "connection string of the database")
	return cmd
}

func onDatabase(ctx context.Context, url string, do func(context.Context, *pgx.Conn) error) (err error) {
	db, err := pgx.Connect(ctx, url)
	if err != nil {
		return fmt.Errorf("connect to the database: %w", err)
	}
	defer func() { err = errors.Join(err, db.Close(context.WithoutCancel(ctx))) }()
	return do(ctx, db)
}
