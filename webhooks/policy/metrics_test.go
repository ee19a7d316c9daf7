package policy_test

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
)

// TestMetrics: the API server counts what the policies decide, by the names
// that docs/guarantees.md gives.
func TestMetrics(t *testing.T) {
	s := newStage(t, withPolicies(t))
	lease := &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: "main"}}
	s.must(s.Admin.Create(t.Context(), lease))
	lease.Status.Token = 42
	s.must(s.Admin.Status().Update(t.Context(), lease))
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: "guarded", Labels: map[string]string{fence.LabelLease: "main"},
		Annotations: map[string]string{fence.AnnotationToken: "42"}}}
	s.must(s.as(collector, nil).Create(t.Context(), cm))

	clients, err := kubernetes.NewForConfig(s.Config)
	s.must(err)
	metrics := func() string {
		t.Helper()
		text, err := clients.RESTClient().Get().AbsPath("/metrics").DoRaw(t.Context())
		s.must(err)
		return string(text)
	}
	counted := func(policy, action string) int {
		t.Helper()
		line := regexp.MustCompile(fmt.Sprintf(`(?m)^apiserver_validating_admission_policy_check_total\{enforcement_action=%q,error_type="[^"]*",policy=%q,policy_binding=%q\} (\d+)$`,
			action, policy, policy)).FindStringSubmatch(metrics())
		if line == nil {
			return 0
		}
		n, err := strconv.Atoi(line[1])
		s.must(err)
		return n
	}
	presents := func(token string) client.Client {
		return client.NewDryRunClient(s.as(sender{"writer", masters, map[string][]string{fence.ExtraToken: {token}}}, nil))
	}
	bypass := client.NewDryRunClient(s.as(rootBypasses, nil))
	for name, c := range map[string]struct {
		policy, action string
		write          func() error
		passes         bool
	}{
		"a stale write":     {"fencedlease", "deny", func() error { return patch(cm, `{"data":{"a":"b"}}`)(t.Context(), presents("41"), "") }, false},
		"an unstamped one":  {"fencedlease-strict", "deny", func() error { return patch(cm, `{"data":{"a":"b"}}`)(t.Context(), client.NewDryRunClient(s.Admin), "") }, false},
		"a bypass, warned":  {"fencedlease-bypasses", "warn", func() error { return patch(cm, `{"data":{"a":"b"}}`)(t.Context(), bypass, "") }, true},
		"a bypass, audited": {"fencedlease-bypasses", "audit", func() error { return patch(cm, `{"data":{"a":"b"}}`)(t.Context(), bypass, "") }, true},
	} {
		// The policies take a moment to be in force.
		await(t, name+" is counted", func() bool {
			before := counted(c.policy, c.action)
			err := c.write()
			return (err == nil) == c.passes && counted(c.policy, c.action) == before+1
		})
	}
	if !strings.Contains(metrics(), "apiserver_validating_admission_policy_check_duration_seconds_count{") {
		t.Error("the API server does not time its policies")
	}
}
