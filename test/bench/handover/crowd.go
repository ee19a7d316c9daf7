package main

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/api/meta"
	crclient "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

// crowd lets many leases be held at once, and then changes all hands.
func (b *bench) crowd(ctx context.Context) error {
	names, err := b.declare(ctx, "crowd", b.leases)
	if err != nil {
		return err
	}
	fmt.Printf("\n%d leases at once, %d claims of each, renewing every %s at the latest\n", b.leases, b.claims, leaseDuration/3)
	var rows [][]*candidate
	// row puts one more claim into each queue.
	row := func() error {
		some := make([]*candidate, b.leases)
		var entering errgroup.Group
		entering.SetLimit(64)
		for i, lease := range names {
			entering.Go(func() (err error) {
				if len(rows) == 0 {
					some[i], err = b.lead(ctx, acquired, lease)
				} else {
					some[i], err = b.enter(ctx, acquired, lease)
				}
				return err
			})
		}
		if err := entering.Wait(); err != nil {
			return err
		}
		rows = append(rows, some)
		return b.queued(ctx, len(rows)-1)
	}
	start := time.Now()
	for range b.claims {
		if err := row(); err != nil {
			return err
		}
	}
	fmt.Printf("  all are there after %.1f s\n", time.Since(start).Seconds())
	idle, err := b.observe(ctx, func() error { pass(b.window); return nil })
	if err != nil {
		return err
	}
	goal("operator under 1 core and 300 MiB", idle.cores < 1 && idle.memory < 300<<20)
	if len(rows) == 1 {
		if err := row(); err != nil {
			return err
		}
	}

	fmt.Printf("\n%d hand-overs at once\n", b.leases)
	took := make([]time.Duration, b.leases)
	if _, err = b.observe(ctx, func() error {
		var handing errgroup.Group
		for i := range names {
			handing.Go(func() (err error) {
				start := time.Now()
				handing.Go(rows[0][i].release)
				took[i], err = b.next(rows[1][i], start)
				return err
			})
		}
		return handing.Wait()
	}); err != nil {
		return err
	}
	b.show(acquired, took, 0)
	lapsed, err := b.lapsed(ctx)
	if err != nil {
		return err
	}
	goal(fmt.Sprintf("nobody lapses who renews: %d did", lapsed), lapsed == 0)
	return nil
}

// queued waits until each lease of the crowd has so many claims in its queue.
func (b *bench) queued(ctx context.Context, n int) error {
	for start := time.Now(); ; pass(500 * time.Millisecond) {
		leases := &v1alpha1.FencedLeaseList{}
		if err := b.admin.List(ctx, leases, crclient.InNamespace(namespace)); err != nil {
			return err
		}
		ready := 0
		for _, l := range leases.Items {
			if l.Status.Waiting != nil && int(*l.Status.Waiting) == n && l.Status.Holder != nil {
				ready++
			}
		}
		if ready >= b.leases {
			return nil
		}
		if time.Since(start) > 5*time.Minute {
			return fmt.Errorf("%d of %d leases have %d claims in their queue", ready, b.leases, n)
		}
	}
}

// lapsed counts claims that lapsed, besides those of the crashed.
func (b *bench) lapsed(ctx context.Context) (n int, err error) {
	claims := &v1alpha1.LeaseClaimList{}
	if err := b.admin.List(ctx, claims, crclient.InNamespace(namespace)); err != nil {
		return 0, err
	}
	for _, c := range claims.Items {
		held := meta.FindStatusCondition(c.Status.Conditions, v1alpha1.LeaseClaimHeld)
		if held != nil && held.Reason == v1alpha1.ReasonLapsed && len(c.Spec.LeaseName) > 6 && c.Spec.LeaseName[:6] == "crowd-" {
			n++
		}
	}
	return n, nil
}
