package webhooks

import (
	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
)

// Decisions, as the metric's label has them.
const (
	decisionAllowed  = "allowed"
	decisionWarned   = "warned"
	decisionBypassed = "bypassed"
	decisionDenied   = "denied"
	decisionFailed   = "failed"
)

var (
	decisions = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "fencedlease_admission_decisions_total", Help: "Requests judged by the webhook, by decision, reason and path.",
	}, []string{"decision", "reason", "path"})
	latency = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "fencedlease_admission_seconds", Help: "Time that the webhook took to judge a request.",
		Buckets: prometheus.ExponentialBuckets(0.0001, 3, 10),
	})
)

func init() { metrics.Registry.MustRegister(decisions, latency) }
