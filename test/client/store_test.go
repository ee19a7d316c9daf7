package client

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	crclient "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/client"
	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/test/env"
)

// TestStoreStalls stops etcd for longer than the lease of one holder, and
// shorter than those of others. The one stops in time and its writes are stale
// afterwards; the others hold on with their tokens: nothing lapses that need not.
func TestStoreStalls(t *testing.T) {
	t.Parallel()
	e := env.Start(t, env.Options{Operator: true, Webhook: true, Policy: true})
	const stall = 15 * time.Second
	type holding struct {
		namespace string
		held      *client.Held
		token     fence.Token
		write     func(replicas int) error
	}
	hold := func(seconds int32) (h holding) {
		h.namespace = e.Namespace(t)
		makeLease(t, e, h.namespace, seconds)
		if err := e.Admin.Create(t.Context(), guardedDeployment(h.namespace, "app")); err != nil {
			t.Fatal(err)
		}
		cfg := worker(t, e, h.namespace, "worker")
		h.held = acquire(t, cfg, h.namespace, "a")
		h.token = h.held.Token()
		c := stamped(t, e, cfg, h.held)
		h.write = func(replicas int) error {
			d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: h.namespace, Name: "app"}}
			return c.Patch(t.Context(), d, crclient.RawPatch("application/merge-patch+json", fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, replicas)))
		}
		if err := h.write(2); err != nil {
			t.Fatal(err)
		}
		return h
	}
	short := hold(6)
	var long []holding
	for range 5 {
		long = append(long, hold(60))
	}
	etcd := processOf(t, e.EtcdURL())
	if err := etcd.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	over := time.After(stall)
	select {
	case <-short.held.Done():
	case <-over:
		t.Error("the short lease's holder went on")
	}
	if !errors.Is(short.held.Err(), fence.ErrLost) {
		t.Errorf("it ended with %v", short.held.Err())
	}
	<-over
	if err := etcd.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}

	cfg := worker(t, e, short.namespace, "next")
	next := acquire(t, cfg, short.namespace, "b", client.WithWait(time.Minute))
	if next.Token() <= short.token {
		t.Errorf("token %s after %s", next.Token(), short.token)
	}
	resumed := stamped(t, e, cfg, client.Static(short.namespace+"/main", short.token))
	d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: short.namespace, Name: "app"}}
	if err := resumed.Patch(t.Context(), d, crclient.RawPatch("application/merge-patch+json", []byte(`{"spec":{"replicas":9}}`))); !client.IsStale(err) {
		t.Errorf("the holder that lost writes: %v", err)
	}
	for _, h := range long {
		await(t, "the holder writes again", func() bool { return h.write(3) == nil })
		if err := h.held.Err(); err != nil || h.held.Token() != h.token {
			t.Errorf("a holder of a minute's lease has token %s after %s: %v", h.held.Token(), h.token, err)
		}
		if err := h.held.Release(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if err := next.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// processOf finds the child of this process that was started with an argument.
func processOf(t *testing.T, argument string) *os.Process {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	parent := fmt.Appendf(nil, "\nPPid:\t%d\n", os.Getpid())
	for _, file := range files {
		line, _ := os.ReadFile(file) // it may have ended
		status, _ := os.ReadFile(filepath.Join(filepath.Dir(file), "status"))
		if !bytes.Contains(line, []byte(argument)) || !bytes.Contains(status, parent) || !bytes.Contains(programOf(line), []byte("etcd")) {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err != nil {
			t.Fatal(err)
		}
		process, err := os.FindProcess(pid)
		if err != nil {
			t.Fatal(err)
		}
		return process
	}
	t.Fatalf("no process of ours has %s in its arguments", argument)
	return nil
}

// programOf is the program of a command line.
func programOf(line []byte) []byte {
	program, _, _ := bytes.Cut(line, []byte{0})
	return []byte(filepath.Base(string(program)))
}
