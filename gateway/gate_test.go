package gateway

import (
	"context"
	"crypto/x509"
	"errors"
	"net/http"
	"net/http/httptest"
	"net/url"
	"sync"
	"testing"
	"time"

	authv3 "github.com/envoyproxy/go-control-plane/envoy/service/auth/v3"
	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	testclock "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/gateway/ledger"
)

var errDown = errors.New("it is down")

// broken is a ledger that fails in one of its operations.
type broken struct {
	ledger.Ledger

	recorded, advance, enter, begin error
}

func (b broken) Recorded(context.Context, ledger.ID) (fence.Token, error) { return 41, b.recorded }

func (b broken) Advance(_ context.Context, _ ledger.ID, token fence.Token, _ bool) (fence.Token, error) {
	return token, b.advance
}

func (b broken) Enter(_ context.Context, _ ledger.ID, token fence.Token, _ func()) (fence.Token, func(), error) {
	return token, func() {}, b.enter
}

func (b broken) Finish(context.Context, ledger.CallID, ledger.Answer) error { return nil }

func (b broken) Begin(context.Context, ledger.CallID, ledger.Attempt) (*ledger.Outcome, error) {
	return nil, b.begin
}

// failing is an Authority that cannot ask.
type failing struct{}

func (failing) Lease(context.Context, types.NamespacedName, bool) (fence.Lease, bool, error) {
	return fence.Lease{}, false, errDown
}

// TestUndecidedIsNeverOpen: whatever fails, the answer is 503 on every surface
// and nothing leaves; over gRPC it is an answer, since Envoy may be told to let
// errors pass.
func TestUndecidedIsNeverOpen(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		gate Gate
		// proxyAlone tells that a decision needs less, passes that nothing fails.
		proxyAlone, passes bool
	}{
		"the record cannot be read":       {Gate{Ledger: broken{recorded: errDown}}, false, false},
		"the token cannot be recorded":    {Gate{Ledger: broken{advance: errDown}}, false, false},
		"the call cannot enter":           {Gate{Ledger: broken{enter: errDown}}, true, false},
		"the call cannot be noted":        {Gate{Ledger: broken{begin: errDown}}, true, false},
		"the lease cannot be read":        {Gate{Ledger: broken{}, Authority: failing{}}, false, false},
		"the caller cannot be reviewed":   {Gate{Ledger: broken{}, Callers: unreviewed{identify: errDown}}, false, false},
		"its access cannot be reviewed":   {Gate{Ledger: broken{}, Callers: unreviewed{may: errDown}}, false, false},
		"nothing fails, and the call may": {Gate{Ledger: broken{}}, true, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newPartner(t, nil)
			target, err := url.Parse(p.URL)
			if err != nil {
				t.Fatal(err)
			}
			transport := &http.Transport{}
			defer transport.CloseIdleConnections()
			o := newObserver(prometheus.NewRegistry(), nil)
			proxy := newProxy(&c.gate, o, clock.RealClock{}, target, transport, time.Second, time.Minute, 0)
			decider := &Decider{gate: &c.gate, observer: o, clock: clock.RealClock{}}
			want := http.StatusServiceUnavailable
			if c.passes {
				want = http.StatusOK
			}
			r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/capture", nil)
			r.Header = stamped("42", HeaderIdempotencyKey, "k")
			w := httptest.NewRecorder()
			proxy.ServeHTTP(w, r)
			if w.Code != want || !c.passes && w.Header().Get(HeaderReason) != string(Undecided) {
				t.Errorf("proxy: %d %s", w.Code, w.Body)
			}
			if arrived := len(p.calls()) > 0; arrived != c.passes {
				t.Errorf("arrived: %t", arrived)
			}
			if c.proxyAlone {
				return
			}
			w = httptest.NewRecorder()
			decider.ServeHTTP(w, r)
			if w.Code != http.StatusServiceUnavailable || w.Header().Get(HeaderReason) != string(Undecided) {
				t.Errorf("decision service: %d %s", w.Code, w.Body)
			}
			response, err := (&extAuthz{decider: decider}).Check(t.Context(), &authv3.CheckRequest{Attributes: &authv3.AttributeContext{
				Request: &authv3.AttributeContext_Request{Http: &authv3.AttributeContext_HttpRequest{Headers: map[string]string{
					"fencing-lease": lease, "fencing-token": "42",
				}}},
			}})
			if err != nil || response.GetStatus().GetCode() == 0 || response.GetDeniedResponse().GetStatus().GetCode() != http.StatusServiceUnavailable {
				t.Errorf("ext_authz: %v, %v", response, err)
			}
		})
	}
}

// unreviewed is Callers that cannot ask.
type unreviewed struct{ identify, may error }

func (u unreviewed) Identify(context.Context, string, *x509.Certificate) (caller, error) {
	return caller{}, u.identify
}

func (u unreviewed) May(context.Context, caller, types.NamespacedName) (bool, error) {
	return true, u.may
}

// leases is a reader of one lease that counts reads.
type leases struct {
	client.Reader

	mu    sync.Mutex
	lease *v1alpha1.FencedLease
	err   error
	reads int
}

func (l *leases) Get(_ context.Context, _ client.ObjectKey, o client.Object, _ ...client.GetOption) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.reads++
	if l.err != nil {
		return l.err
	}
	if l.lease == nil {
		return apierrors.NewNotFound(schema.GroupResource{}, "orders")
	}
	l.lease.DeepCopyInto(o.(*v1alpha1.FencedLease))
	return nil
}

func (l *leases) set(lease *v1alpha1.FencedLease, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lease, l.err = lease, err
}

// version is the lease with a current token at a resourceVersion.
func version(token int64, resourceVersion string) *v1alpha1.FencedLease {
	return &v1alpha1.FencedLease{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "orders", ResourceVersion: resourceVersion},
		Status:     v1alpha1.FencedLeaseStatus{Token: token},
	}
}

// TestCluster: what the watch and reads say of a lease never goes back in time,
// counts for as long as a read confirms it, and is read live on doubt.
func TestCluster(t *testing.T) {
	t.Parallel()
	const maxAge = 5 * time.Second
	key := types.NamespacedName{Namespace: "shop", Name: "orders"}
	clock := testclock.NewFakePassiveClock(time.Unix(1_700_000_000, 0))
	api := &leases{}
	c := newCluster(api, clock, maxAge)
	expect := func(what string, live bool, token fence.Token, reads int) {
		t.Helper()
		before := api.reads
		got, wasLive, err := c.Lease(t.Context(), key, live)
		if err != nil || got.Current != token || got.Found != (token > 0) || wasLive != live || api.reads-before != reads {
			t.Errorf("%s: %+v, live %t, %d reads, %v; want token %s and %d reads", what, got, wasLive, api.reads-before, err, token, reads)
		}
	}
	expect("a lease that does not exist", false, 0, 1)
	expect("nor now: that is not kept", false, 0, 1)
	api.set(version(42, "100"), nil)
	expect("the first look", false, 42, 1)
	expect("the next is from memory", false, 42, 0)
	expect("on doubt", true, 42, 1)
	clock.SetTime(clock.Now().Add(maxAge))
	expect("when it is old", false, 42, 1)
	c.learn(version(43, "101"), time.Time{})
	expect("the watch tells of a newer one", false, 43, 0)
	c.learn(version(42, "100"), time.Time{})
	expect("an event that comes late", false, 43, 0)
	expect("a read that the server answers from the past", true, 43, 1)
	clock.SetTime(clock.Now().Add(maxAge))
	c.learn(version(44, "102"), time.Time{})
	api.set(version(44, "102"), nil)
	expect("the watch alone confirms nothing for ever", false, 44, 1)

	api.set(nil, errDown)
	expect("while it is young the API is not needed", false, 44, 0)
	if _, _, err := c.Lease(t.Context(), key, true); !errors.Is(err, errDown) {
		t.Errorf("on doubt without the API: %v", err)
	}
	clock.SetTime(clock.Now().Add(maxAge))
	if _, _, err := c.Lease(t.Context(), key, false); !errors.Is(err, errDown) {
		t.Errorf("when it is old without the API: %v", err)
	}
	api.set(nil, nil)
	expect("a lease that was deleted", true, 0, 1)
	expect("is known no more", false, 0, 1)
}
