package controllers

import (
	"context"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

var (
	claimsWaiting = prometheus.NewDesc("fencedlease_claims_waiting",
		"Claims in the queues of all leases.", nil, nil)
	oldestClaim = prometheus.NewDesc("fencedlease_oldest_waiting_claim_seconds",
		"Age of the oldest claim in a queue, 0 where none waits.", nil, nil)
	withoutHolder = prometheus.NewDesc("fencedlease_leases_without_holder",
		"Leases that nobody holds while claims wait for them; one that does not exist counts.", nil, nil)
	longestWithout = prometheus.NewDesc("fencedlease_longest_without_holder_seconds",
		"Longest time for which claims have waited for a lease that nobody holds, its hand-over delay aside; 0 where none do.", nil, nil)
)

// waitingCollector looks at who waits whenever metrics are read. It rests on
// the claims and not on what the operator wrote, so every replica tells it,
// also while none issues tokens. Its ages are for people: they rest on the
// API server's timestamps and this machine's clock.
type waitingCollector struct {
	mu     sync.Mutex
	reader client.Reader
	clock  clock.PassiveClock
}

func (w *waitingCollector) follow(reader client.Reader, c clock.PassiveClock) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.reader, w.clock = reader, c
}

// Describe implements prometheus.Collector.
func (*waitingCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{claimsWaiting, oldestClaim, withoutHolder, longestWithout} {
		ch <- d
	}
}

// Collect implements prometheus.Collector. Where the cache does not answer it
// tells nothing, rather than that nobody waits.
func (w *waitingCollector) Collect(ch chan<- prometheus.Metric) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.reader == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	claims, leases := &v1alpha1.LeaseClaimList{}, &v1alpha1.FencedLeaseList{}
	if w.reader.List(ctx, claims, client.UnsafeDisableDeepCopy) != nil || w.reader.List(ctx, leases, client.UnsafeDisableDeepCopy) != nil {
		return
	}
	s := standing(claims.Items, leases.Items, w.clock.Now())
	for d, value := range map[*prometheus.Desc]float64{
		claimsWaiting: float64(s.waiting), oldestClaim: s.oldest.Seconds(),
		withoutHolder: float64(s.without), longestWithout: s.longest.Seconds(),
	} {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value)
	}
}

// stand is who waits: claims in queues and the age of the oldest, leases
// without a holder among theirs and the longest time of one.
type stand struct {
	waiting, without int
	oldest, longest  time.Duration
}

func standing(claims []v1alpha1.LeaseClaim, leases []v1alpha1.FencedLease, now time.Time) stand {
	byName := make(map[types.NamespacedName]*v1alpha1.FencedLease, len(leases))
	for i := range leases {
		byName[client.ObjectKeyFromObject(&leases[i])] = &leases[i]
	}
	var s stand
	without := map[types.NamespacedName]time.Duration{}
	for i := range claims {
		c := &claims[i]
		key := types.NamespacedName{Namespace: c.Namespace, Name: c.Spec.LeaseName}
		lease := byName[key]
		if finished(c) || !c.DeletionTimestamp.IsZero() || lease != nil && holdsClaim(lease, c) {
			continue
		}
		age := max(0, now.Sub(c.CreationTimestamp.Time))
		s.waiting++
		s.oldest = max(s.oldest, age)
		if lease == nil || lease.Status.Holder == nil {
			without[key] = max(without[key], min(age, vacantFor(lease, now)))
		}
	}
	s.without = len(without)
	for _, since := range without {
		s.longest = max(s.longest, since)
	}
	return s
}

// vacantFor tells how long nobody has held a lease against its will, for ever
// where it does not exist.
func vacantFor(lease *v1alpha1.FencedLease, now time.Time) time.Duration {
	if lease == nil {
		return 1<<63 - 1
	}
	since := lease.CreationTimestamp.Time
	if held := meta.FindStatusCondition(lease.Status.Conditions, v1alpha1.FencedLeaseHeld); held != nil {
		since = held.LastTransitionTime.Time
		if held.Reason == v1alpha1.ReasonHandoverDelay && lease.Spec.HandoverDelaySeconds != nil {
			since = since.Add(time.Duration(*lease.Spec.HandoverDelaySeconds) * time.Second)
		}
	}
	return max(0, now.Sub(since))
}
