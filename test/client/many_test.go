package client

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/client"
	"github.com/fencedlease/fencedlease/fence"
)

// TestManyLeases lets 200 leases be held at once for longer than they last
// without a renewal, and then changes all hands together: nobody who renews
// lapses, and each successor has a newer token. make bench-handover does so
// with 2,000.
func TestManyLeases(t *testing.T) {
	const leases = 200
	e := everything(t)
	namespace := e.Namespace(t)
	name := func(i int) string { return fmt.Sprintf("lease-%d", i) }
	all := func(do func(i int) error) {
		t.Helper()
		var doing errgroup.Group
		doing.SetLimit(leases)
		for i := range leases {
			doing.Go(func() error { return do(i) })
		}
		if err := doing.Wait(); err != nil {
			t.Fatal(err)
		}
	}
	holders, tokens := make([]*client.Held, leases), make([]fence.Token, leases)
	all(func(i int) (err error) {
		lease := &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name(i)}}
		if err := e.Admin.Create(t.Context(), lease); err != nil {
			return err
		}
		holders[i], err = client.Acquire(t.Context(), e.Config, namespace, name(i))
		return err
	})
	for i, held := range holders {
		tokens[i] = held.Token()
	}
	lasts, stop := context.WithTimeout(t.Context(), (v1alpha1.DefaultLeaseDurationSeconds+5)*time.Second)
	defer stop()
	all(func(i int) error {
		select {
		case <-holders[i].Done():
			return fmt.Errorf("lease %d: %w", i, holders[i].Err())
		case <-lasts.Done():
		}
		return nil
	})

	var waiting sync.WaitGroup
	next := make([]*client.Held, leases)
	for i := range leases {
		waiting.Go(func() {
			var err error
			if next[i], err = client.Acquire(t.Context(), e.Config, namespace, name(i)); err != nil {
				t.Errorf("lease %d: %v", i, err)
			}
		})
	}
	all(func(i int) error { return holders[i].Release(t.Context()) })
	waiting.Wait()
	if t.Failed() {
		return
	}
	for i, held := range next {
		if held.Token() <= tokens[i] {
			t.Errorf("lease %d: token %s after %s: %v", i, held.Token(), tokens[i], held.Err())
		}
	}
	all(func(i int) error { return next[i].Release(t.Context()) })
}
