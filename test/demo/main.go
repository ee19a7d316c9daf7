// Command demo plays the story that fencing is about, on a real API server
// and with workers that are processes of their own: a worker is stopped
// beyond its lease, another takes over, the first one resumes and writes.
// First on a guarded object, then on one that is not.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

func main() { os.Exit(run()) }

func run() int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	do := func() error { return play(ctx, os.Stdout) }
	if len(os.Args) == 3 && os.Args[1] == "worker" {
		do = func() error { return work(ctx, os.Args[2], os.Stdin, os.Stdout) }
	}
	if err := do(); err != nil && !errors.Is(err, context.Canceled) {
		fmt.Fprintln(os.Stderr, "demo:", err)
		return 1
	}
	return 0
}
