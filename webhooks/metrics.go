package webhooks

import (
	"context"
	"crypto/tls"
	"net"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/controller-runtime/pkg/webhook"
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
	unstampedWarned = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "fencedlease_unstamped_warned_total", Help: "Requests without a token that passed with a warning and that Deny would have refused, by resource and kind of sender.",
	}, []string{"resource", "sender"})
	latency = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "fencedlease_admission_seconds", Help: "Time that the webhook took to judge a request.",
		Buckets: prometheus.ExponentialBuckets(0.0001, 3, 10),
	})
	// certificate follows the webhook that was set up last.
	certificate = &certificateCollector{}
)

func init() { metrics.Registry.MustRegister(decisions, unstampedWarned, latency, certificate) }

// senderOf tells people from programs: names would be too many for a label.
func senderOf(username string) string {
	if strings.HasPrefix(username, "system:serviceaccount:") {
		return "serviceaccount"
	}
	return "user"
}

var certificateExpiry = prometheus.NewDesc("fencedlease_certificate_expiry_timestamp_seconds",
	"When the certificate that the webhook serves ends, in seconds since 1970; absent where it serves none.", nil, nil)

// certificateCollector asks the webhook's own port for its certificate
// whenever metrics are read: a file may hold another one than what is served.
type certificateCollector struct{ address atomic.Value }

func (c *certificateCollector) follow(server webhook.Server) {
	if s, ok := server.(*webhook.DefaultServer); ok {
		c.address.Store(net.JoinHostPort(s.Options.Host, strconv.Itoa(s.Options.Port)))
	}
}

// Describe implements prometheus.Collector.
func (*certificateCollector) Describe(ch chan<- *prometheus.Desc) { ch <- certificateExpiry }

// Collect implements prometheus.Collector.
func (c *certificateCollector) Collect(ch chan<- prometheus.Metric) {
	address, ok := c.address.Load().(string)
	if !ok {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	// Whom the certificate is for, and whether it is still good, is not asked.
	dialer := tls.Dialer{Config: &tls.Config{InsecureSkipVerify: true}}
	conn, err := dialer.DialContext(ctx, "tcp", address)
	if err != nil {
		return
	}
	defer func() { _ = conn.Close() }()
	served := conn.(*tls.Conn).ConnectionState().PeerCertificates[0]
	ch <- prometheus.MustNewConstMetric(certificateExpiry, prometheus.GaugeValue, float64(served.NotAfter.Unix()))
}
