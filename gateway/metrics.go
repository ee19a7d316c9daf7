package gateway

import (
	"log/slog"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fencedlease/fencedlease/fence"
)

// Surfaces: how a call came.
const (
	surfaceProxy   = "proxy"
	surfaceHTTP    = "http"
	surfaceExtAuth = "ext_authz"
)

// decisionAllowed is the decision of a call that was let through.
const decisionAllowed = "allowed"

// observer counts and logs calls.
type observer struct {
	decisions *prometheus.CounterVec
	seconds   *prometheus.HistogramVec
	inFlight  prometheus.Gauge
	// access is the access log; nil writes none.
	access *slog.Logger

	// surfaces are what most calls are counted by: to look it up is most of what
	// it takes to count.
	surfaces map[string]counted
}

// counted is what decisions of one surface are counted by.
type counted struct {
	// allowed counts the calls that were let through, seconds times all.
	allowed prometheus.Counter
	seconds prometheus.Observer
}

func newObserver(registry prometheus.Registerer, access *slog.Logger) *observer {
	o := &observer{
		decisions: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "fencedlease_gateway_decisions_total", Help: "Calls by how they came, decision and reason.",
		}, []string{"surface", "decision", "reason"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "fencedlease_gateway_decision_seconds", Help: "Time until a call was let through or refused, waiting for older calls included.",
			Buckets: prometheus.ExponentialBuckets(0.0001, 3, 12),
		}, []string{"surface"}),
		inFlight: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "fencedlease_gateway_calls_in_flight", Help: "Calls that were let through and have not ended.",
		}),
		access:   access,
		surfaces: map[string]counted{},
	}
	for _, surface := range []string{surfaceProxy, surfaceHTTP, surfaceExtAuth} {
		o.surfaces[surface] = counted{o.decisions.WithLabelValues(surface, decisionAllowed, ""), o.seconds.WithLabelValues(surface)}
	}
	registry.MustRegister(o.decisions, o.seconds, o.inFlight)
	return o
}

// decided counts a decision; problem is nil where the call was let through.
func (o *observer) decided(surface string, problem *Problem, took time.Duration) {
	of := o.surfaces[surface]
	of.seconds.Observe(took.Seconds())
	if problem == nil {
		of.allowed.Inc()
		return
	}
	decision := "denied"
	if problem.Status >= http.StatusInternalServerError {
		decision = "failed"
	}
	o.decisions.WithLabelValues(surface, decision, string(problem.Reason)).Inc()
}

// log writes a line on a call that has ended. Credentials, bodies and targets
// are not in it, since the address of a webhook is a secret too; a fencing token
// is an order, not a secret.
func (o *observer) log(surface string, c call, who caller, method string, status int, reason fence.Reason, took time.Duration) {
	if o.access == nil {
		return
	}
	o.access.Info("Call", "surface", surface, "lease", c.id.Lease, "key", c.id.Key, "token", c.token, "user", who.user,
		"method", method, "status", status, "reason", string(reason), "seconds", took.Seconds())
}
