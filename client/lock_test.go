package client

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
)

func lockOn(api *fakeClaims) *Lock {
	l := NewLock(nil, "shop", "main", WithIdentity("a"))
	l.connect = func() (claims, error) { return api, nil }
	return l
}

// An elector that gets the lease back between two polls would let its old work
// go on with the new token, so the lock does not give it back.
func TestALockLeadsOnce(t *testing.T) {
	for name, lose := range map[string]func(*fakeClaims, *Lock) error{
		"lost": func(api *fakeClaims, _ *Lock) error {
			api.set(metav1.ConditionFalse, v1alpha1.ReasonLapsed, 41)
			return nil
		},
		"released": func(_ *fakeClaims, l *Lock) error {
			return l.Update(context.Background(), resourcelock.LeaderElectionRecord{})
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				api := newFake()
				l := lockOn(api)
				ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
				defer cancel()
				var led atomic.Int64
				stopped := make(chan struct{})
				elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
					Lock: l, LeaseDuration: 15 * time.Second, RenewDeadline: 10 * time.Second, RetryPeriod: 2 * time.Second,
					Callbacks: leaderelection.LeaderCallbacks{
						OnStartedLeading: func(context.Context) { led.Add(1) }, OnStoppedLeading: func() { close(stopped) },
					},
				})
				if err != nil {
					t.Fatal(err)
				}
				go elector.Run(ctx)
				synctest.Wait()
				api.set(metav1.ConditionTrue, v1alpha1.ReasonGranted, 41)
				<-time.After(time.Minute)
				if token, err := l.Present(); token != 41 || err != nil || led.Load() != 1 {
					t.Fatalf("presents %s, %v, led %d times", token, err, led.Load())
				}
				if err := lose(api, l); err != nil {
					t.Fatal(err)
				}
				synctest.Wait()
				// Whatever it asks for now would be granted at once.
				api.fail(func(_ context.Context, verb string) error {
					if verb == "get" || verb == "watch" {
						api.set(metav1.ConditionTrue, v1alpha1.ReasonGranted, 42)
					}
					return nil
				})
				<-stopped
				if ctx.Err() != nil {
					t.Error("the elector went on leading")
				}
				if token, err := l.Present(); token != 0 || !errors.Is(err, fence.ErrLost) {
					t.Errorf("presents %s, %v", token, err)
				}
			})
		})
	}
}

// An elector that ends leaves no claim in the queue that would be granted to
// nobody.
func TestACandidateThatNobodyAsksForGoes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := newFake()
		ctx, cancel := context.WithCancel(t.Context())
		go func() { <-time.After(time.Second); cancel() }()
		if _, _, err := lockOn(api).Get(ctx); err == nil || len(api.all()) != 0 {
			t.Errorf("%v, left %d claims", err, len(api.all()))
		}

		l := lockOn(api)
		record, _, err := l.Get(t.Context())
		if err != nil || record.HolderIdentity == "a" || len(api.all()) != 1 {
			t.Fatalf("%v, %v, left %d claims", record, err, len(api.all()))
		}
		<-time.After(2 * time.Minute)
		renewals := len(api.writes())
		<-time.After(10 * time.Minute)
		if more := api.writes()[renewals:]; len(more) != 0 {
			t.Errorf("still sends %v", more)
		}
		_ = l.Update(t.Context(), resourcelock.LeaderElectionRecord{})
	})
}
