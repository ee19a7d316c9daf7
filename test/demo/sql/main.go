// Command sql plays the paused worker's story on a real PostgreSQL: a worker
// is stopped between two transactions, another takes over with a newer token,
// and the first one resumes. First on a guarded table, then on one that is not.
package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"

	"github.com/jackc/pgx/v5"

	"github.com/fencedlease/fencedlease/client"
	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/sqlfence"
	"github.com/fencedlease/fencedlease/sqlfence/pgtest"
)

const lease = "shop/orders"

func main() { os.Exit(run()) }

func run() int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	do := func() error { return play(ctx, os.Stdout) }
	if len(os.Args) == 3 && os.Args[1] == "worker" {
		do = func() error { return work(ctx, os.Args[2], os.Stdin, os.Stdout) }
	}
	if err := do(); err != nil {
		fmt.Fprintln(os.Stderr, "demo-sql:", err)
		return 1
	}
	return 0
}

func play(ctx context.Context, out io.Writer) (err error) {
	fmt.Fprintln(out, "Starting a real PostgreSQL ...")
	server, err := pgtest.New(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Stop()) }()
	url := server.URL("postgres", "postgres")
	db, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close(context.WithoutCancel(ctx))) }()
	guard, err := sqlfence.GuardSQL("guarded", lease, "")
	if err != nil {
		return err
	}
	for _, statement := range []string{sqlfence.Schema, `CREATE TABLE guarded (batch text)`, `CREATE TABLE unguarded (batch text)`, guard} {
		if _, err := db.Exec(ctx, statement); err != nil {
			return err
		}
	}
	for i, table := range []string{"guarded", "unguarded"} {
		fmt.Fprintf(out, "\n%d. Table %q\n\n", i+1, table)
		if err := story(ctx, out, url, table); err != nil {
			return err
		}
		var batch string
		if err := db.QueryRow(ctx, "SELECT batch FROM "+table).Scan(&batch); err != nil {
			return err
		}
		want, said := "b-1", "B's state stands"
		if table == "unguarded" {
			want, said = "a-2", "B's state is LOST, and nobody was told"
		}
		if batch != want {
			return fmt.Errorf("the table holds %q, and the story says %q", batch, want)
		}
		fmt.Fprintf(out, "            the table holds %s: %s\n", batch, said)
	}
	return nil
}

func story(ctx context.Context, out io.Writer, url, table string) error {
	a, err := start(ctx, url)
	if err != nil {
		return err
	}
	defer a.kill()
	b, err := start(ctx, url)
	if err != nil {
		return err
	}
	defer b.kill()
	write := func(name string, w *worker, token fence.Token, batch, want string) error {
		answer, err := w.write(token, table, batch)
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "  worker %s  writes batch %s with token %s: %s\n", name, batch, token, answer)
		if !strings.Contains(answer, want) {
			return fmt.Errorf("worker %s: got %q, want %q", name, answer, want)
		}
		return nil
	}
	if err := write("A", a, 41, "a-1", "committed"); err != nil {
		return err
	}
	fmt.Fprintln(out, "  worker A  is stopped (SIGSTOP)")
	if err := a.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	if err := write("B", b, 42, "b-1", "committed"); err != nil {
		return err
	}
	fmt.Fprintln(out, "  worker A  resumes (SIGCONT), sure that it holds")
	if err := a.cmd.Process.Signal(syscall.SIGCONT); err != nil {
		return err
	}
	want := "StaleToken"
	if table == "unguarded" {
		want = "committed"
	}
	return write("A", a, 41, "a-2", want)
}

// worker is a worker's process.
type worker struct {
	cmd     *exec.Cmd
	in      io.Writer
	answers *bufio.Reader
}

func start(ctx context.Context, url string) (*worker, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, self, "worker", url)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	return &worker{cmd: cmd, in: in, answers: bufio.NewReader(out)}, cmd.Start()
}

func (w *worker) write(token fence.Token, table, batch string) (string, error) {
	if _, err := fmt.Fprintln(w.in, int64(token), table, batch); err != nil {
		return "", err
	}
	answer, err := w.answers.ReadString('\n')
	return strings.TrimSpace(answer), err
}

func (w *worker) kill() {
	_ = w.cmd.Process.Kill()
	_ = w.cmd.Wait()
}

// work obeys lines of "TOKEN TABLE BATCH": one transaction each.
func work(ctx context.Context, url string, in io.Reader, out io.Writer) error {
	db, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		var token int64
		var table, batch string
		if _, err := fmt.Sscan(lines.Text(), &token, &table, &batch); err != nil {
			return err
		}
		answer := "committed"
		if err := transaction(ctx, db, fence.Token(token), table, batch); err != nil {
			answer = "REJECTED by the database: " + strings.ReplaceAll(err.Error(), "\n", " ")
		}
		fmt.Fprintln(out, answer)
	}
	return lines.Err()
}

func transaction(ctx context.Context, db *pgx.Conn, token fence.Token, table, batch string) error {
	begin := func() (pgx.Tx, error) { return db.Begin(ctx) }
	if table == "guarded" {
		begin = func() (pgx.Tx, error) {
			return sqlfence.BeginPgx(ctx, db, pgx.TxOptions{}, client.Static(lease, token))
		}
	}
	tx, err := begin()
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	if _, err := tx.Exec(ctx, "DELETE FROM "+table); err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, "INSERT INTO "+table+" VALUES ($1)", batch); err != nil {
		return err
	}
	return sqlfence.CommitError(tx.Commit(ctx))
}
