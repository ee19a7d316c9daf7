package webhooks_test

import (
	"crypto/x509"
	"encoding/pem"
	"os"
	"path/filepath"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/test/env"
)

// scraped sums a metric over the series with the given labels.
func scraped(t *testing.T, name string, labels map[string]string) (sum float64) {
	t.Helper()
	families, err := metrics.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range families {
		if family.GetName() != name {
			continue
		}
	series:
		for _, m := range family.GetMetric() {
			for _, l := range m.GetLabel() {
				if want, ok := labels[l.GetName()]; ok && want != l.GetValue() {
					continue series
				}
			}
			sum += m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}
	return sum
}

// TestUnstampedWarned: what Warn lets pass is counted by resource and kind of
// sender, and nothing else is.
func TestUnstampedWarned(t *testing.T) {
	s := newScene(t)
	s.must(s.Admin.Get(t.Context(), client.ObjectKeyFromObject(s.lease), s.lease))
	s.lease.Spec.UnstampedWrites = &v1alpha1.UnstampedWrites{Default: v1alpha1.UnstampedWarn}
	s.must(s.Admin.Update(t.Context(), s.lease))

	count := func() float64 {
		return scraped(t, "fencedlease_unstamped_warned_total", map[string]string{"resource": "configmaps", "sender": "user"})
	}
	before := count()
	s.must(s.patch("guarded", "42", "stamped", nil))
	if count() != before {
		t.Error("a stamped write counts")
	}
	s.expect(s.patch("guarded", "41", "stale", nil), "StaleToken")
	if count() != before {
		t.Error("a rejected write counts")
	}
	// The webhook's cache may lag behind the lease's new spec, which it then
	// reads live.
	s.must(s.patch("guarded", "", "", nil))
	if got := count(); got != before+1 {
		t.Errorf("an unstamped write under Warn counts %v times", got-before)
	}
}

// TestCertificateExpiry: the metric is when the served certificate ends.
func TestCertificateExpiry(t *testing.T) {
	// The metric is of the process's last webhook, and another test may have
	// started and stopped one.
	e := env.Start(t, env.Options{Webhook: true})
	data, err := os.ReadFile(filepath.Join(e.Webhook.LocalServingCertDir, "tls.crt"))
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(data)
	certificate, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := scraped(t, "fencedlease_certificate_expiry_timestamp_seconds", nil), float64(certificate.NotAfter.Unix()); got != want {
		t.Errorf("got %v, want %v", got, want)
	}
}
