package policy

import (
	"context"
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/admission"
	plugincel "k8s.io/apiserver/pkg/admission/plugin/cel"
	"k8s.io/apiserver/pkg/admission/plugin/policy/validating"
	"k8s.io/apiserver/pkg/admission/plugin/webhook/matchconditions"
	celconfig "k8s.io/apiserver/pkg/apis/cel"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/cel/environment"

	"github.com/fencedlease/fencedlease/fence"
)

// BenchmarkUsual measures what the API server spends on a write of a holder
// who goes on: in each policy, and in the conditions that spare the webhook.
func BenchmarkUsual(b *testing.B) {
	var leases []fence.TableLease
	for i := range 1000 {
		leases = append(leases, fence.TableLease{Namespace: "shop", Name: fmt.Sprintf("lease-%04d", i), Lease: fence.Lease{Current: 42, Held: true, Holder: "pod-b"}})
	}
	data, _ := fence.PackTable(leases, 7, 0)
	params := &corev1.ConfigMap{Data: data}
	object := func(n string) *corev1.ConfigMap {
		return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{
			Namespace: "shop", Name: "web", Labels: map[string]string{fence.LabelLease: "lease-0999"}, Annotations: map[string]string{fence.AnnotationToken: "42"},
		}, Data: map[string]string{"n": n}}
	}
	write := request{
		operation: admission.Update, old: object("1"), object: object("2"),
		user: user.DefaultInfo{Name: "admin", Groups: []string{"system:masters", "system:authenticated"}, Extra: map[string][]string{fence.ExtraToken: {"42"}}},
	}
	fencing, _ := Fence(testOptions)
	bypasses, _ := Bypasses(testOptions)
	for name, v := range map[string]validating.Validator{"fence": compile(b, fencing), "bypasses": compile(b, bypasses)} {
		b.Run(name, func(b *testing.B) {
			attributes := write.attributes(b)
			for b.Loop() {
				if r := v.Validate(context.Background(), attributes.GetResource(), attributes, params, nil, celconfig.RuntimeCELCostBudget, write); len(r.Decisions) > 0 && r.Decisions[0].Action != validating.ActionAdmit {
					b.Fatal(r)
				}
			}
		})
	}
	b.Run("webhook", func(b *testing.B) {
		var conditions []plugincel.ExpressionAccessor
		exempt, spare := NotExempt(testOptions), Spare()
		conditions = append(conditions, (*matchconditions.MatchCondition)(&exempt), (*matchconditions.MatchCondition)(&spare))
		compiler := plugincel.NewConditionCompiler(environment.MustBaseEnvSet(environment.DefaultCompatibilityVersion()))
		matcher := matchconditions.NewMatcher(compiler.CompileCondition(conditions, plugincel.OptionalVariableDeclarations{HasAuthorizer: true}, environment.StoredExpressions),
			fencing.Spec.FailurePolicy, "webhook", "validate", "objects")
		attributes := write.attributes(b)
		for b.Loop() {
			if r := matcher.Match(context.Background(), attributes, nil, write); r.Matches || r.Error != nil {
				b.Fatal(r)
			}
		}
	})
}
