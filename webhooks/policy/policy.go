// Package policy generates the layer of the admission fence that runs inside
// the API server: ValidatingAdmissionPolicies that judge stamped updates,
// status writes and deletes of guarded objects by the recorded token and by
// the lease table, and that keep what only the operator or a claim's owner may
// write. They need no process of ours to be up.
//
// They do not judge creates, evictions, /scale and other requests that carry
// no label, nor what the lease table does not know yet: that is the webhook's,
// and without the webhook the strict policy denies as much of it as it sees.
package policy

import (
	admissionv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fencedlease/fencedlease/fence"
)

// Options say for which installation policies are generated.
type Options struct {
	// OperatorNamespace is where the operator runs and keeps the lease table.
	OperatorNamespace string
	// ExemptUsers and ExemptGroups are the principals that the fence never
	// judges, the operator among them.
	ExemptUsers, ExemptGroups []string
}

func newPolicy(name string) *admissionv1.ValidatingAdmissionPolicy {
	return &admissionv1.ValidatingAdmissionPolicy{
		TypeMeta:   metav1.TypeMeta{APIVersion: admissionv1.SchemeGroupVersion.String(), Kind: "ValidatingAdmissionPolicy"},
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app.kubernetes.io/name": "fencedlease"}},
		Spec:       admissionv1.ValidatingAdmissionPolicySpec{FailurePolicy: new(admissionv1.Fail)},
	}
}

// Bind gives the binding of a policy that needs no parameter.
func Bind(policy *admissionv1.ValidatingAdmissionPolicy) *admissionv1.ValidatingAdmissionPolicyBinding {
	return &admissionv1.ValidatingAdmissionPolicyBinding{
		TypeMeta:   metav1.TypeMeta{APIVersion: admissionv1.SchemeGroupVersion.String(), Kind: "ValidatingAdmissionPolicyBinding"},
		ObjectMeta: metav1.ObjectMeta{Name: policy.Name, Labels: policy.Labels},
		Spec: admissionv1.ValidatingAdmissionPolicyBindingSpec{
			PolicyName:        policy.Name,
			ValidationActions: []admissionv1.ValidationAction{admissionv1.Deny, admissionv1.Audit},
		},
	}
}

// rule matches operations on resources of one group.
func rule(group string, resources []string, operations ...admissionv1.OperationType) admissionv1.NamedRuleWithOperations {
	return admissionv1.NamedRuleWithOperations{RuleWithOperations: admissionv1.RuleWithOperations{
		Operations: operations,
		Rule: admissionv1.Rule{
			APIGroups: []string{group}, APIVersions: []string{"*"}, Resources: resources,
			Scope: new(admissionv1.AllScopes),
		},
	}}
}

// guardedObjects matches operations on every object that carries, or carried,
// the label; but for those that cannot be guarded.
func guardedObjects(operations ...admissionv1.OperationType) *admissionv1.MatchResources {
	return &admissionv1.MatchResources{
		MatchPolicy:   new(admissionv1.Equivalent),
		ResourceRules: []admissionv1.NamedRuleWithOperations{rule("*", []string{"*/*"}, operations...)},
		ExcludeResourceRules: []admissionv1.NamedRuleWithOperations{
			rule(fence.Group, []string{"*/*"}, admissionv1.OperationAll),
			rule("coordination.k8s.io", []string{"leases"}, admissionv1.OperationAll),
		},
		ObjectSelector: &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{
			{Key: fence.LabelLease, Operator: metav1.LabelSelectorOpExists},
		}},
		NamespaceSelector: &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{
			{Key: "kubernetes.io/metadata.name", Operator: metav1.LabelSelectorOpNotIn, Values: []string{metav1.NamespaceSystem}},
		}},
	}
}

// Own gives what protects the project's own objects and marks, in every
// installation: the empty lease table, policies and their bindings.
func Own(o Options) []any {
	marks, marksBinding := Marks(o)
	objects := []any{Table(o), marks, marksBinding}
	for _, p := range []*admissionv1.ValidatingAdmissionPolicy{Claims(o), LastToken(o), Tables(o)} {
		objects = append(objects, p, Bind(p))
	}
	return objects
}

// Layer gives the policies that judge writes to guarded objects.
func Layer(o Options) []any {
	fencing, fencingBinding := Fence(o)
	bypasses, bypassesBinding := Bypasses(o)
	return []any{fencing, fencingBinding, bypasses, bypassesBinding}
}

// Alone gives what goes with Layer where no webhook is installed.
func Alone(o Options) []any {
	strict, strictBinding := Strict(o)
	bindings := Bindings(o)
	return []any{strict, strictBinding, bindings, Bind(bindings)}
}
