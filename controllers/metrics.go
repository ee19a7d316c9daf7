package controllers

import (
	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
)

var (
	tokensIssued = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "fencedlease_tokens_issued_total", Help: "Tokens issued.",
	})
	queueAge = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "fencedlease_claim_wait_seconds", Help: "Time from when a claim was first seen until it was granted.",
		Buckets: prometheus.ExponentialBuckets(0.005, 4, 10),
	})
	issueTime = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "fencedlease_token_issue_seconds", Help: "Time from the decision to grant until the token is published: reserve, seal, publish.",
		Buckets: prometheus.ExponentialBuckets(0.002, 3, 10),
	})
	handoverTime = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "fencedlease_handover_seconds", Help: "Time from when a lease was first seen to have a claim in its queue and no holder any more, until the next token is published.",
		Buckets: prometheus.ExponentialBuckets(0.005, 4, 10),
	})
	tableBytes = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "fencedlease_lease_table_bytes", Help: "Size of the lease table, which holds 1000000 bytes at the most.",
	})
	tableLeftOut = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "fencedlease_lease_table_left_out", Help: "Leases that did not fit into the lease table.",
	})
	// waiting follows the manager that was set up last.
	waiting = &waitingCollector{}
)

func init() {
	metrics.Registry.MustRegister(tokensIssued, queueAge, issueTime, handoverTime, tableBytes, tableLeftOut, waiting)
}
