package fencecli

import (
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

func TestQueueIsInTheOrderOfGrants(t *testing.T) {
	claim := func(name, reason string, priority int32, ticket int64) v1alpha1.LeaseClaim {
		return v1alpha1.LeaseClaim{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec:       v1alpha1.LeaseClaimSpec{Priority: &priority},
			Status: v1alpha1.LeaseClaimStatus{Ticket: ticket, Conditions: []metav1.Condition{
				{Type: v1alpha1.LeaseClaimHeld, Reason: reason},
			}},
		}
	}
	got := queue([]v1alpha1.LeaseClaim{
		claim("late", v1alpha1.ReasonWaiting, 0, 9),
		claim("holder", v1alpha1.ReasonGranted, 0, 1),
		claim("early", v1alpha1.ReasonWaiting, 0, 2),
		claim("lapsed", v1alpha1.ReasonLapsed, 9, 3),
		claim("urgent", v1alpha1.ReasonWaiting, 5, 8),
		{ObjectMeta: metav1.ObjectMeta{Name: "unseen"}},
	})
	names := slices.Collect(func(yield func(string) bool) {
		for i := range got {
			if !yield(got[i].Name) {
				return
			}
		}
	})
	if diff := cmp.Diff([]string{"urgent", "early", "late"}, names); diff != "" {
		t.Fatalf("(-want +got):\n%s", diff)
	}
}

// Writers of events fill different fields in.
func TestTheTimeAndCountOfAnEvent(t *testing.T) {
	created, later := time.Unix(1000, 0), time.Unix(2000, 0)
	for name, test := range map[string]struct {
		event corev1.Event
		at    time.Time
		count int32
	}{
		"only created":   {corev1.Event{}, created, 1},
		"the older kind": {corev1.Event{LastTimestamp: metav1.NewTime(later), Count: 3}, later, 3},
		"the newer kind": {corev1.Event{EventTime: metav1.NewMicroTime(later)}, later, 1},
		"a series": {corev1.Event{
			EventTime: metav1.NewMicroTime(created), Series: &corev1.EventSeries{Count: 4, LastObservedTime: metav1.NewMicroTime(later)},
		}, later, 4},
	} {
		t.Run(name, func(t *testing.T) {
			test.event.CreationTimestamp = metav1.NewTime(created)
			if at, count := eventTime(&test.event), eventCount(&test.event); !at.Equal(test.at) || count != test.count {
				t.Fatalf("got %s and %d, want %s and %d", at, count, test.at, test.count)
			}
		})
	}
}
