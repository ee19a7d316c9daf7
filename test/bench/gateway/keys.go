package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/gateway/ledger"
	"github.com/fencedlease/fencedlease/gateway/ledger/bolt"
)

// fillLedger advances as many keys of one lease as are recorded each for
// itself, and one more: then the lease's record stands for all of them.
func fillLedger(ctx context.Context, file string) (err error) {
	l, err := bolt.Open(file, bolt.Options{Keep: time.Hour})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	const step, writers = ledger.MaxKeys / 10, 1000
	id := func(i int) ledger.ID {
		return ledger.ID{Lease: "shop/orders", Key: fmt.Sprintf("order-%09d", i*7919%ledger.MaxKeys)}
	}
	for from := 0; from < ledger.MaxKeys; from += step {
		var g errgroup.Group
		for w := range writers {
			g.Go(func() error {
				for i := from + w; i < from+step; i += writers {
					if _, err := l.Advance(ctx, id(i), fence.Token(1+i), false); err != nil {
						return err
					}
				}
				return nil
			})
		}
		if err := g.Wait(); err != nil {
			return err
		}
		if n := from + step; n == step || n == ledger.MaxKeys {
			if err := report(fmt.Sprintf("%d keys", n), file); err != nil {
				return err
			}
		}
	}
	began := time.Now()
	if _, err := l.Advance(ctx, ledger.ID{Lease: "shop/orders", Key: "one more"}, 1, false); err != nil {
		return err
	}
	if got, err := l.Recorded(ctx, id(0)); err != nil || got != ledger.MaxKeys {
		return fmt.Errorf("one more: token %s is recorded for the first key, want %d: %w", got, ledger.MaxKeys, err)
	}
	return report(fmt.Sprintf("one more, which took %v: one record", time.Since(began).Round(time.Millisecond)), file)
}

// report prints what the process holds in memory of its own, the file's pages
// not counted: the kernel takes those back when it needs to.
func report(when, file string) error {
	runtime.GC()
	var heap runtime.MemStats
	runtime.ReadMemStats(&heap)
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return err
	}
	_, anonymous, _ := strings.Cut(string(status), "RssAnon:")
	anonymous, _, _ = strings.Cut(anonymous, "\n")
	info, err := os.Stat(file)
	if err != nil {
		return err
	}
	fmt.Printf("%-50s heap %5.1f MB, anonymous memory %s, file %d MB\n", when, float64(heap.HeapAlloc)/(1<<20), strings.TrimSpace(anonymous), info.Size()>>20)
	return nil
}
