package client

import (
	"context"
	"encoding/json"
	"maps"
	"net/http"
	"slices"
	"sync"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

var leaseclaims = schema.GroupResource{Group: v1alpha1.GroupVersion.Group, Resource: "leaseclaims"}

func gone404() error { return apierrors.NewNotFound(leaseclaims, "main") }

// fakeClaims is an API server with one lease of 15 s. It grants nothing by
// itself.
type fakeClaims struct {
	mu      sync.Mutex
	claims  map[string]*v1alpha1.LeaseClaim
	watches []*watch.RaceFreeFakeWatcher
	uids    int
	// sent are the verbs of all writes, in order.
	sent []string
	// answer is asked before every call and may fail or delay it.
	answer func(ctx context.Context, verb string) error
}

func newFake() *fakeClaims { return &fakeClaims{claims: map[string]*v1alpha1.LeaseClaim{}} }

// fail replaces what is asked before every call.
func (f *fakeClaims) fail(answer func(ctx context.Context, verb string) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.answer = answer
}

func (f *fakeClaims) before(ctx context.Context, verb string) error {
	f.mu.Lock()
	answer := f.answer
	if verb != "get" && verb != "watch" && verb != "lease" {
		f.sent = append(f.sent, verb)
	}
	f.mu.Unlock()
	if answer == nil {
		return nil
	}
	return answer(ctx, verb)
}

func (f *fakeClaims) writes() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.sent)
}

func (f *fakeClaims) all() []*v1alpha1.LeaseClaim {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Collect(maps.Values(f.claims))
}

// set changes the status of every claim and tells the watches.
func (f *fakeClaims) set(status metav1.ConditionStatus, reason string, token int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range f.claims {
		c.Status.Ticket, c.Status.Token = 1, token
		c.Status.Conditions = []metav1.Condition{{Type: v1alpha1.LeaseClaimHeld, Status: status, Reason: reason, Message: "as the test says"}}
		for _, w := range f.watches {
			w.Modify(c.DeepCopy())
		}
	}
}

func (f *fakeClaims) lease(ctx context.Context, name string) (*v1alpha1.FencedLease, error) {
	return &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name},
		Spec: v1alpha1.FencedLeaseSpec{LeaseDurationSeconds: 15}}, f.before(ctx, "lease")
}

func (f *fakeClaims) self(ctx context.Context) (*authenticationv1.UserInfo, error) {
	return &authenticationv1.UserInfo{Username: "jane"}, f.before(ctx, "self")
}

func (f *fakeClaims) create(ctx context.Context, claim *v1alpha1.LeaseClaim) (*v1alpha1.LeaseClaim, error) {
	if err := f.before(ctx, "create"); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	claim = claim.DeepCopy()
	f.uids++
	claim.UID, claim.ResourceVersion = types.UID(string(rune('a'+f.uids))), "1"
	f.claims[claim.Name] = claim
	return claim.DeepCopy(), nil
}

func (f *fakeClaims) get(ctx context.Context, name string) (*v1alpha1.LeaseClaim, error) {
	if err := f.before(ctx, "get"); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if c := f.claims[name]; c != nil {
		return c.DeepCopy(), nil
	}
	return nil, gone404()
}

func (f *fakeClaims) patch(ctx context.Context, name string, body []byte) (*v1alpha1.LeaseClaim, error) {
	if err := f.before(ctx, "patch"); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	c := f.claims[name]
	if c == nil {
		return nil, gone404()
	}
	return c.DeepCopy(), json.Unmarshal(body, c)
}

func (f *fakeClaims) delete(ctx context.Context, name string, uid types.UID) error {
	if err := f.before(ctx, "delete "+string(uid)); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	c := f.claims[name]
	switch {
	case c == nil:
		return gone404()
	case c.UID != uid:
		return apierrors.NewConflict(leaseclaims, name, nil)
	}
	delete(f.claims, name)
	for _, w := range f.watches {
		w.Delete(c)
	}
	return nil
}

func (f *fakeClaims) watch(ctx context.Context, _, _ string) (watch.Interface, error) {
	if err := f.before(ctx, "watch"); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	w := watch.NewRaceFreeFake()
	f.watches = append(f.watches, w)
	return w, nil
}

func (f *fakeClaims) reset() {}

func quota(t *testing.T) error {
	t.Helper()
	return &apierrors.StatusError{ErrStatus: metav1.Status{Status: metav1.StatusFailure, Code: http.StatusForbidden,
		Reason: metav1.StatusReasonForbidden, Message: "exceeded quota"}}
}
