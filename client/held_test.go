package client

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
)

// acquired gives a Held with token 41 of a lease of 15 s: renewed at least
// every 5 s, over 12 s after the last renewal.
func acquired(t *testing.T, api *fakeClaims) *Held {
	t.Helper()
	go func() {
		synctest.Wait()
		api.set(metav1.ConditionTrue, v1alpha1.ReasonGranted, 41)
	}()
	h, err := acquire(t.Context(), api, "shop", "main", newOptions(nil))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		api.fail(nil)
		_ = h.Release(context.Background())
	})
	return h
}

func lostBy(t *testing.T, h *Held, want Loss) {
	t.Helper()
	var lost *LostError
	if !errors.As(h.Err(), &lost) || lost.Reason != want {
		t.Fatalf("got %v, want a loss because %s", h.Err(), want)
	}
	if token, err := h.Present(); token != 0 || !errors.Is(err, fence.ErrLost) || errors.Is(err, fence.ErrStale) {
		t.Errorf("presents %s, %v", token, err)
	}
}

// Whatever answers renewals get, the holder stops 12 s after the last one that
// succeeded, and takes no error for a sign of holding or of being fenced.
func TestHolderStopsByItsOwnClock(t *testing.T) {
	for name, answer := range map[string]func(ctx context.Context, n int) error{
		"quota exceeded, then conflicts": func(_ context.Context, n int) error {
			if n < 3 {
				return quota(t)
			}
			return apierrors.NewConflict(leaseclaims, "main", errors.New("changed"))
		},
		"calls that hang": func(ctx context.Context, _ int) error { <-ctx.Done(); return ctx.Err() },
		"calls that ignore their end and succeed late": func(context.Context, int) error {
			<-time.After(time.Minute)
			return nil
		},
		"a server that is going down": func(context.Context, int) error { return apierrors.NewServiceUnavailable("") },
		"no access any more":          func(context.Context, int) error { return apierrors.NewUnauthorized("") },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				api := newFake()
				h := acquired(t, api)
				<-time.After(time.Minute)
				if h.Token() != 41 {
					t.Fatalf("lost while renewing: %v", h.Err())
				}
				h.mu.Lock()
				last := h.sent
				h.mu.Unlock()
				var calls atomic.Int32
				api.fail(func(ctx context.Context, verb string) error {
					if verb == "patch" {
						return answer(ctx, int(calls.Add(1)))
					}
					return apierrors.NewServiceUnavailable("")
				})
				<-h.Done()
				if n := calls.Load(); name == "calls that hang" && n < 2 {
					t.Errorf("%d calls: one that hangs leaves no time for another", n)
				}
				if after := time.Since(last); after != 12*time.Second {
					t.Errorf("stopped %s after the last renewal", after)
				}
				lostBy(t, h, LossExpired)
				api.fail(nil)
				<-time.After(2 * time.Minute)
				lostBy(t, h, LossExpired)
			})
		})
	}
}

func TestTheFirstCallAfterAPauseKnowsOfTheLoss(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := newFake()
		h := acquired(t, api)
		h.mu.Lock() // no timer of h gets anywhere
		h.sent = h.sent.Add(-12 * time.Second)
		h.mu.Unlock()
		if token, err := h.Present(); token != 0 || !errors.Is(err, fence.ErrLost) {
			t.Fatalf("presents %s, %v", token, err)
		}
		lostBy(t, h, LossExpired)
	})
}

func TestHolderLearnsFromItsClaim(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*fakeClaims)
		want   Loss
	}{
		"lapsed":    {func(f *fakeClaims) { f.set(metav1.ConditionFalse, v1alpha1.ReasonLapsed, 41) }, LossLapsed},
		"preempted": {func(f *fakeClaims) { f.set(metav1.ConditionFalse, v1alpha1.ReasonPreempted, 41) }, LossPreempted},
		"revoked":   {func(f *fakeClaims) { f.set(metav1.ConditionFalse, v1alpha1.ReasonRevoked, 41) }, LossRevoked},
		"deleted": {func(f *fakeClaims) {
			for _, c := range f.all() {
				_ = f.delete(t.Context(), c.Name, c.UID)
			}
		}, LossDeleted},
		"replaced by another of the same name": {func(f *fakeClaims) {
			for _, c := range f.all() {
				f.mu.Lock()
				c.UID = "another"
				f.mu.Unlock()
			}
			f.set(metav1.ConditionTrue, v1alpha1.ReasonGranted, 43)
		}, LossDeleted},
		"a gap in the watch hides it": {func(f *fakeClaims) {
			f.mu.Lock()
			watches := f.watches
			f.watches = nil
			f.mu.Unlock()
			f.set(metav1.ConditionFalse, v1alpha1.ReasonPreempted, 41)
			for _, w := range watches {
				w.Stop()
			}
		}, LossPreempted},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				api := newFake()
				h := acquired(t, api)
				test.change(api)
				start := time.Now()
				<-h.Done()
				if took := time.Since(start); took > time.Second {
					t.Errorf("it took %s", took)
				}
				lostBy(t, h, test.want)
				// What comes late revives nothing.
				api.set(metav1.ConditionTrue, v1alpha1.ReasonGranted, 44)
				<-time.After(time.Minute)
				lostBy(t, h, test.want)
			})
		})
	}
}

// A claim that is gone is not made again, whatever was in flight, and no
// release is built from anything but the claim's own UID.
func TestReleaseComparesAndNothingIsMadeAgain(t *testing.T) {
	for name, during := range map[string]func(ctx context.Context, verb string) error{
		"all goes well": nil,
		"reads fail for 20 s": func() func(context.Context, string) error {
			start := time.Time{}
			return func(_ context.Context, verb string) error {
				if start.IsZero() {
					start = time.Now()
				}
				if strings.HasPrefix(verb, "delete") && time.Since(start) < 3*time.Second || verb == "get" || verb == "lease" {
					return errors.New("read: connection reset by peer")
				}
				return nil
			}
		}(),
		"a renewal is in flight": func(ctx context.Context, verb string) error {
			if verb == "patch" {
				<-time.After(time.Second)
			}
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				api := newFake()
				h := acquired(t, api)
				api.fail(during)
				<-time.After(6 * time.Second)
				if err := h.Release(t.Context()); err != nil {
					t.Fatal(err)
				}
				if !errors.Is(h.Err(), ErrReleased) {
					t.Errorf("got %v", h.Err())
				}
				<-time.After(time.Minute)
				var creates, others int
				for _, verb := range api.writes() {
					switch verb {
					case "create":
						creates++
					case "patch", "delete b":
					default:
						others++
					}
				}
				if creates != 1 || others != 0 || len(api.all()) != 0 {
					t.Errorf("sent %v, left %d", api.writes(), len(api.all()))
				}
				if last := api.writes(); last[len(last)-1] != "delete b" {
					t.Errorf("sent %s after the release", last[len(last)-1])
				}
			})
		})
	}
}

func TestReleaseWithoutAnAnswerIsOfUnknownOutcome(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := newFake()
		h := acquired(t, api)
		api.fail(func(context.Context, string) error { return apierrors.NewServiceUnavailable("") })
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		if err := h.Release(ctx); !errors.Is(err, fence.ErrOutcomeUnknown) {
			t.Errorf("got %v", err)
		}
	})
}

// The work is told, and the lease is not given away under it.
func TestTheContextEndsWithTheLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := newFake()
		h := acquired(t, api)
		work, cancel := h.Context(t.Context())
		defer cancel()
		go func() {
			<-time.After(time.Second)
			api.set(metav1.ConditionFalse, v1alpha1.ReasonPreempted, 41)
		}()
		<-work.Done()
		if !errors.Is(context.Cause(work), fence.ErrLost) {
			t.Errorf("the work ended because of %v", context.Cause(work))
		}
		if slices.ContainsFunc(api.writes(), func(v string) bool { return strings.HasPrefix(v, "delete") }) {
			t.Error("released under the work")
		}
	})
}

// A grant that arrives when the claim may have lapsed is not handed out: the
// claimant goes back to the queue.
func TestALateGrantIsNotHandedOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := newFake()
		api.fail(func(_ context.Context, verb string) error {
			if verb == "patch" || verb == "watch" || verb == "get" {
				return apierrors.NewServiceUnavailable("")
			}
			return nil
		})
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		go func() {
			<-time.After(14 * time.Second)
			api.fail(func(_ context.Context, verb string) error {
				if verb == "patch" {
					return apierrors.NewServiceUnavailable("")
				}
				return nil
			})
			api.set(metav1.ConditionTrue, v1alpha1.ReasonGranted, 41)
		}()
		if h, err := acquire(ctx, api, "shop", "main", newOptions(nil)); err == nil {
			t.Fatalf("handed out token %s", h.Token())
		}
	})
}

func TestReaffirmGivesAHigherToken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := newFake()
		h := acquired(t, api)
		go func() {
			<-time.After(time.Second)
			api.set(metav1.ConditionTrue, v1alpha1.ReasonGranted, 44)
		}()
		if token, err := h.Reaffirm(t.Context()); err != nil || token != 44 || h.Token() != 44 {
			t.Errorf("got %s, %v", token, err)
		}
		// An older status, as from a lagging watch, takes nothing back.
		api.set(metav1.ConditionTrue, v1alpha1.ReasonGranted, 41)
		synctest.Wait()
		if h.Token() != 44 {
			t.Errorf("went back to %s", h.Token())
		}
	})
}

// TestACrowdIsSpread: 500 claimants that start in one moment renew all over the
// period from the first one on, and stay spread.
func TestACrowdIsSpread(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const crowd = 500
		start := time.Now()
		var seconds [20]atomic.Int64
		count := func(_ context.Context, verb string) error {
			if at := int(time.Since(start) / time.Second); verb == "patch" && at < len(seconds) {
				seconds[at].Add(1)
			}
			return nil
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		for range crowd {
			api := newFake()
			api.fail(count)
			go func() { _, _ = acquire(ctx, api, "shop", "main", newOptions(nil)) }()
		}
		<-time.After(time.Duration(len(seconds)) * time.Second)
		cancel()
		synctest.Wait()
		for at := range seconds {
			// A period of 5 s, the waits up to a fifth shorter: 100 to 125.
			if n := seconds[at].Load(); n < 50 || n > 190 {
				t.Errorf("%d renewals in second %d", n, at)
			}
		}
	})
}
