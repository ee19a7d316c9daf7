// Command handover measures, in one run on one API server with everything
// installed and the operator as its own process, how fast a lease changes
// hands and what holding it costs, beside client-go's leader election on a
// plain Lease with the same durations. Then it lets thousands of leases be held
// at once and changes all hands together.
package main

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	crclient "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/controlplane"
	"github.com/fencedlease/fencedlease/test/env"
)

func main() { os.Exit(run()) }

func run() int {
	ctrl.SetLogger(logr.Discard())
	klog.SetLogger(logr.Discard())
	b := &bench{}
	flag.IntVar(&b.releases, "releases", 100, "hand-overs after a release; fewer where a candidate polls")
	flag.IntVar(&b.crashes, "crashes", 10, "hand-overs after a crash")
	flag.IntVar(&b.acquires, "acquires", 100, "acquisitions of a free lease")
	flag.IntVar(&b.holders, "holders", 20, "holders whose requests are counted, and as many candidates")
	flag.DurationVar(&b.window, "window", time.Minute, "how long requests are counted")
	flag.IntVar(&b.leases, "leases", 2000, "leases that are held at once")
	flag.IntVar(&b.claims, "claims", 1, "claims of each of these leases that renew")
	flag.Parse()
	if err := b.run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		return 1
	}
	return 0
}

type bench struct {
	// A part whose number is 0 is left out.
	releases, crashes, acquires, holders, leases, claims int
	window                                               time.Duration

	*controlplane.ControlPlane
	admin    crclient.Client
	operator *operator
}

const namespace = "default"

func (b *bench) run(ctx context.Context) (err error) {
	if b.ControlPlane, err = controlplane.Start(ctx, controlplane.Options{Webhook: true, Policy: true}); err != nil {
		return err
	}
	defer func() { _ = b.Stop() }()
	if b.admin, err = crclient.New(b.Config, crclient.Options{Scheme: env.Scheme()}); err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "bench-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if b.operator, err = startOperator(ctx, b.ControlPlane, dir); err != nil {
		return err
	}
	defer b.operator.stop()
	fmt.Printf("lease duration %s; client-go: renew deadline %s, retry period %s, ReleaseOnCancel\n", leaseDuration, renewDeadline, retryPeriod)
	for _, part := range []struct {
		n   int
		run func(context.Context) error
	}{{b.acquires, b.acquireFree}, {b.releases, b.handOver}, {b.crashes, b.outlive}, {b.holders, b.hold}, {b.leases, b.crowd}} {
		if part.n == 0 {
			continue
		}
		if err := part.run(ctx); err != nil {
			return err
		}
	}
	return nil
}

// write is the time of one write to the API server.
func (b *bench) write(ctx context.Context) (time.Duration, error) {
	start := time.Now()
	err := b.admin.Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, GenerateName: "write-"}})
	return time.Since(start), err
}

// declare makes the leases of a way; client-go's makes its own.
func (b *bench) declare(ctx context.Context, name string, n int) ([]string, error) {
	names := make([]string, n)
	var making errgroup.Group
	making.SetLimit(16)
	for i := range names {
		names[i] = fmt.Sprintf("%s-%d", name, i)
		making.Go(func() error {
			return b.admin.Create(ctx, &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: names[i]}})
		})
	}
	return names, making.Wait()
}

// enter starts a candidate, with a clean configuration of its own.
func (b *bench) enter(ctx context.Context, w way, lease string) (*candidate, error) {
	return w.enter(ctx, rest.CopyConfig(b.Config), namespace, lease)
}

// lead starts a candidate and waits until it holds.
func (b *bench) lead(ctx context.Context, w way, lease string) (*candidate, error) {
	c, err := b.enter(ctx, w, lease)
	if err != nil {
		return nil, err
	}
	select {
	case at := <-c.leads:
		c.leads <- at
		return c, nil
	case <-time.After(time.Minute):
		return nil, fmt.Errorf("%s: nobody holds %s after a minute", w.name, lease)
	}
}

// next waits until a candidate of the queue holds.
func (b *bench) next(c *candidate, since time.Time) (time.Duration, error) {
	select {
	case at := <-c.leads:
		c.leads <- at
		return at.Sub(since), nil
	case <-time.After(2 * time.Minute):
		return 0, fmt.Errorf("nobody took over within two minutes")
	}
}

// acquireFree measures how long it takes to hold a lease that is free, beside
// one write, each after the other.
func (b *bench) acquireFree(ctx context.Context) error {
	var writes, ours, theirs []time.Duration
	names, err := b.declare(ctx, "free", 1)
	if err != nil {
		return err
	}
	for i := range b.acquires + 1 {
		wrote, err := b.write(ctx)
		if err != nil {
			return err
		}
		took := map[string]time.Duration{}
		for _, w := range []way{acquired, onLease} {
			start := time.Now()
			c, err := b.lead(ctx, w, names[0])
			if err != nil {
				return err
			}
			took[w.name] = (<-c.leads).Sub(start)
			if err := c.release(); err != nil {
				return err
			}
		}
		if i > 0 { // the first one makes connections
			writes, ours, theirs = append(writes, wrote), append(ours, took[acquired.name]), append(theirs, took[onLease.name])
		}
	}
	base := quantile(writes, 0.5)
	fmt.Printf("\nacquire a free lease, medians of %d\n", b.acquires)
	fmt.Printf("  %-36s %8.1f ms\n", "one write: a ConfigMap", ms(base))
	fmt.Printf("  %-36s %8.1f ms  %.1fx\n", onLease.name, ms(quantile(theirs, 0.5)), ratio(quantile(theirs, 0.5), base))
	fmt.Printf("  %-36s %8.1f ms  %.1fx\n", acquired.name, ms(quantile(ours, 0.5)), ratio(quantile(ours, 0.5), base))
	goal("at most 4x one write", ratio(quantile(ours, 0.5), base) <= 4)
	return nil
}

// handOver measures from a release until the next one knows that it holds.
func (b *bench) handOver(ctx context.Context) error {
	fmt.Printf("\nrelease until the next holder knows\n")
	var base time.Duration
	for i, w := range []way{onLease, onLock, acquired} {
		chains, rounds := 10, max(b.releases/30, 1)
		if w.name == acquired.name {
			chains, rounds = 1, b.releases
		}
		names, err := b.declare(ctx, fmt.Sprintf("release-%d", i), chains)
		if err != nil {
			return err
		}
		took, writes := make([]time.Duration, chains*rounds), make([]time.Duration, chains*rounds)
		before, err := b.operator.sample(ctx)
		if err != nil {
			return err
		}
		var running errgroup.Group
		for chain, lease := range names {
			running.Go(func() error {
				first, err := b.lead(ctx, w, lease)
				if err != nil {
					return err
				}
				for round := range rounds {
					second, err := b.enter(ctx, w, lease)
					if err != nil {
						return err
					}
					pass(w.polls + rand.N(w.polls))
					n := chain*rounds + round
					if writes[n], err = b.write(ctx); err != nil {
						return err
					}
					released := make(chan error, 1)
					start := time.Now()
					go func() { released <- first.release() }()
					if took[n], err = b.next(second, start); err != nil {
						return err
					}
					if err := <-released; err != nil {
						return err
					}
					first = second
				}
				return first.release()
			})
		}
		if err := running.Wait(); err != nil {
			return fmt.Errorf("%s: %w", w.name, err)
		}
		base = b.show(w, took, base)
		if w.name == acquired.name {
			after, err := b.operator.sample(ctx)
			if err != nil {
				return err
			}
			write := quantile(writes, 0.5)
			fmt.Printf("  one write meanwhile %.1f ms: a hand-over takes %.1fx; %.1f requests of the operator for each\n",
				ms(write), ratio(quantile(took, 0.5), write), (after.requests-before.requests)/float64(rounds))
			goal("median at most 25 ms", quantile(took, 0.5) <= 25*time.Millisecond)
		}
	}
	return nil
}

// outlive measures from a crash right after a renewal until the next one
// knows that it holds.
func (b *bench) outlive(ctx context.Context) error {
	fmt.Printf("\ncrash right after a renewal until the next holder knows\n")
	ways := []way{onLease, onLock, acquired}
	took := make([][]time.Duration, len(ways))
	var running errgroup.Group
	for i, w := range ways {
		names, err := b.declare(ctx, fmt.Sprintf("crash-%d", i), b.crashes)
		if err != nil {
			return err
		}
		took[i] = make([]time.Duration, b.crashes)
		for j, lease := range names {
			running.Go(func() error {
				first, err := b.lead(ctx, w, lease)
				if err != nil {
					return err
				}
				second, err := b.enter(ctx, w, lease)
				if err != nil {
					return err
				}
				pass(w.polls + rand.N(retryPeriod))
				if took[i][j], err = b.next(second, first.crash()); err != nil {
					return fmt.Errorf("%s: %w", w.name, err)
				}
				return second.release()
			})
		}
	}
	if err := running.Wait(); err != nil {
		return err
	}
	var base time.Duration
	for i, w := range ways {
		base = b.show(w, took[i], base)
	}
	goal("at most the lease duration and 0.5 s", quantile(took[2], 1) <= leaseDuration+500*time.Millisecond)
	return nil
}

// hold counts the requests of holders and of candidates in the queue.
func (b *bench) hold(ctx context.Context) error {
	each := float64(b.holders)
	fmt.Printf("\nrequests to the API server for each holder, and each candidate in its queue, and minute, watches included (%.0f of each)\n", each)
	var base float64
	for i, w := range []way{onLease, onLock, acquired} {
		names, err := b.declare(ctx, fmt.Sprintf("hold-%d", i), b.holders)
		if err != nil {
			return err
		}
		all := map[string][]*candidate{}
		for _, lease := range names {
			holder, err := b.lead(ctx, w, lease)
			if err != nil {
				return err
			}
			waits, err := b.enter(ctx, w, lease)
			if err != nil {
				return err
			}
			all["holder"], all["candidate"] = append(all["holder"], holder), append(all["candidate"], waits)
		}
		pass(2 * retryPeriod)
		count := func() (holders, candidates, operator float64, err error) {
			sum := func(of []*candidate) (n float64) {
				for _, c := range of {
					n += float64(c.requests.Load())
				}
				return n
			}
			s, err := b.operator.sample(ctx)
			return sum(all["holder"]), sum(all["candidate"]), s.requests, err
		}
		h0, c0, o0, err := count()
		if err != nil {
			return err
		}
		pass(b.window)
		h1, c1, o1, err := count()
		if err != nil {
			return err
		}
		minute := func(n float64) float64 { return n / each / b.window.Minutes() }
		holders := minute(h1 - h0)
		if base == 0 {
			base = holders
		}
		fmt.Printf("  %-36s %5.1f a holder, %.2fx; %5.1f a candidate; %4.1f of the operator\n", w.name, holders, holders/base, minute(c1-c0), minute(o1-o0))
		for _, of := range all {
			for _, c := range of {
				go func() { _ = c.release() }()
			}
		}
	}
	return nil
}

// show prints times and their ratio to the first ones.
func (b *bench) show(w way, took []time.Duration, base time.Duration) time.Duration {
	median := quantile(took, 0.5)
	if base == 0 {
		base = median
	}
	fmt.Printf("  %-36s median %8.1f ms, p99 %8.1f ms, longest %8.1f ms; %.4fx (%d)\n", w.name, ms(median), ms(quantile(took, 0.99)), ms(quantile(took, 1)), ratio(median, base), len(took))
	return base
}

func goal(text string, reached bool) {
	word := map[bool]string{true: "reached", false: "MISSED"}[reached]
	fmt.Printf("  goal: %s: %s\n", text, word)
}

// pass lets time pass: releases are to come at any time of a poll.
func pass(d time.Duration) { <-time.After(d) }

func quantile(of []time.Duration, q float64) time.Duration {
	of = slices.Sorted(slices.Values(of))
	return of[min(int(q*float64(len(of))), len(of)-1)]
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func ratio(a, b time.Duration) float64 { return float64(a) / float64(b) }
