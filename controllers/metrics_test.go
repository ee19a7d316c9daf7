package controllers

import (
	"fmt"
	"strings"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
)

// gauge reads a metric without labels, as it is scraped.
func gauge(t *testing.T, name string) float64 {
	t.Helper()
	families, err := metrics.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range families {
		if family.GetName() == name {
			return family.GetMetric()[0].GetGauge().GetValue()
		}
	}
	t.Fatalf("no metric %s", name)
	return 0
}

// TestFullTableTellsWhatItLeavesOut: how full the table is, and what it leaves
// out, shows in the metrics.
func TestFullTableTellsWhatItLeavesOut(t *testing.T) {
	const long = 64 * 64 // bytes of a lease's list of namespaces
	var leases []v1alpha1.FencedLease
	for i := range 260 {
		lease := at(fmt.Sprintf("lease-%03d", i), 41, int64(i+1))
		lease.Spec.AllowedNamespaces = strings.Fields(strings.Repeat(strings.Repeat("n", 63)+" ", 64))
		leases = append(leases, lease)
	}
	table, cache := tabled(leases[:1], leases)
	reconcileTable(t, table)
	if bytes, out := gauge(t, "fencedlease_lease_table_bytes"), gauge(t, "fencedlease_lease_table_left_out"); bytes < long || bytes > long+200 || out != 0 {
		t.Errorf("one lease: %v bytes, %v left out", bytes, out)
	}
	cache.leases = leases
	reconcileTable(t, table)
	if bytes, out := gauge(t, "fencedlease_lease_table_bytes"), gauge(t, "fencedlease_lease_table_left_out"); bytes < fence.TableMaxBytes-2*long ||
		bytes > fence.TableMaxBytes || out < 1 || out > 30 {
		t.Errorf("260 leases: %v bytes, %v left out", bytes, out)
	}
}
