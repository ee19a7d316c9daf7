// Package pgtest starts a real PostgreSQL in a temporary folder, for tests and
// demos.
package pgtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"sort"
	"strconv"
	"syscall"
	"testing"
	"time"
)

// Server is a running PostgreSQL that listens on a socket alone.
type Server struct {
	dir string
	cmd *exec.Cmd
	log bytes.Buffer
}

// ForTests are settings that make a server quick and forgetful.
var ForTests = []string{"fsync=off", "max_connections=200", "wal_level=logical", "deadlock_timeout=200ms", "max_prepared_transactions=10"}

// Start starts a server that ends with the test.
func Start(tb testing.TB) *Server {
	tb.Helper()
	Need(tb, "initdb")
	s, err := New(tb.Context(), ForTests...)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := s.Stop(); err != nil {
			tb.Errorf("stop PostgreSQL: %v", err)
		}
	})
	return s
}

// Need skips the test where a program is not installed. Where CI is set it
// fails instead: there nothing may be left out unnoticed.
func Need(tb testing.TB, name string) string {
	tb.Helper()
	path, err := Program(name)
	if err != nil {
		if os.Getenv("CI") != "" {
			tb.Fatal(err)
		}
		tb.Skip(err)
	}
	return path
}

// Program finds one of PostgreSQL's server programs: in the folder that the
// variable POSTGRES_BIN names, or else the newest version that is installed.
func Program(name string) (string, error) {
	if dir := os.Getenv("POSTGRES_BIN"); dir != "" {
		path, err := exec.LookPath(filepath.Join(dir, name))
		// The server itself must be the one that was asked for.
		if err == nil || name == "initdb" || name == "postgres" {
			return path, err
		}
	}
	all, _ := filepath.Glob("/usr/lib/postgresql/*/bin/" + name)
	sort.Slice(all, func(i, j int) bool { return major(all[i]) > major(all[j]) })
	if len(all) > 0 {
		return all[0], nil
	}
	for _, path := range []string{name, "/usr/sbin/" + name} {
		if path, err := exec.LookPath(path); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("no %s found: install PostgreSQL's server and pgbouncer (on Debian: apt-get install postgresql pgbouncer)", name)
}

func major(path string) int {
	n, _ := strconv.Atoi(filepath.Base(filepath.Dir(filepath.Dir(path))))
	return n
}

// New starts a server that the caller stops. PostgreSQL refuses to run as
// root: there it runs as the user postgres, or else nobody.
// Settings are "name=value".
func New(ctx context.Context, settings ...string) (_ *Server, err error) {
	initdb, err := Program("initdb")
	if err != nil {
		return nil, err
	}
	postgres, err := Program("postgres")
	if err != nil {
		return nil, err
	}
	s := &Server{}
	// Not below a folder that only root may enter.
	if s.dir, err = os.MkdirTemp("/tmp", "fence-pg-"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("start PostgreSQL: %w\n%s", err, s.log.String()), s.Stop())
		}
	}()
	attr := &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if os.Geteuid() == 0 {
		account, err := user.Lookup("postgres")
		if err != nil {
			if account, err = user.Lookup("nobody"); err != nil {
				return nil, err
			}
		}
		uid, _ := strconv.Atoi(account.Uid)
		gid, _ := strconv.Atoi(account.Gid)
		if err := os.Chown(s.dir, uid, gid); err != nil {
			return nil, err
		}
		attr.Credential = &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
	}
	data := filepath.Join(s.dir, "data")
	init := exec.CommandContext(ctx, initdb, "-D", data, "-U", "postgres", "--auth=trust", "--no-sync", "--encoding=UTF8", "--locale=C")
	init.SysProcAttr, init.Dir, init.Stdout, init.Stderr = attr, s.dir, &s.log, &s.log
	if err := init.Run(); err != nil {
		return nil, err
	}
	args := []string{"-D", data, "-k", s.dir, "-c", "listen_addresses="}
	for _, setting := range settings {
		args = append(args, "-c", setting)
	}
	s.cmd = exec.Command(postgres, args...) //nolint:noctx // it ends with Stop
	s.cmd.SysProcAttr, s.cmd.Dir, s.cmd.Stdout, s.cmd.Stderr = attr, s.dir, &s.log, &s.log
	if err := s.cmd.Start(); err != nil {
		return nil, err
	}
	ready, err := Program("pg_isready")
	if err != nil {
		return nil, err
	}
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	for exec.CommandContext(ctx, ready, "-q", "-h", s.dir).Run() != nil {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, errors.New("it does not answer")
		}
	}
	return s, nil
}

// Dir is the folder of the server's socket.
func (s *Server) Dir() string { return s.dir }

// URL is the connection string of an account to a database; the account
// postgres and the database postgres exist from the start.
func (s *Server) URL(account, database string) string {
	return "postgres://" + url.PathEscape(account) + "@/" + url.PathEscape(database) + "?host=" + url.QueryEscape(s.dir)
}

// Stop ends the server and removes its folder.
func (s *Server) Stop() error {
	var err error
	if s.cmd != nil && s.cmd.Process != nil {
		// Fast shutdown: it does not wait for clients.
		err = s.cmd.Process.Signal(syscall.SIGINT)
		done := make(chan struct{})
		go func() { _ = s.cmd.Wait(); close(done) }()
		select {
		case <-done:
		case <-time.After(10 * time.Second):
			err = errors.Join(err, s.cmd.Process.Kill())
			<-done
		}
	}
	return errors.Join(err, os.RemoveAll(s.dir))
}
