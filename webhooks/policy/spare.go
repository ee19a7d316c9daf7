package policy

import (
	"fmt"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fencedlease/fencedlease/fence"
)

// guardOf names in CEL the lease that guards the stored object.
func guardOf() (namespace, name string) {
	return label("oldObject", fence.LabelLeaseNamespace) + ".orValue(oldObject.metadata.?namespace.orValue(''))",
		label("oldObject", fence.LabelLease) + ".orValue('')"
}

// bypassed tells that an unstamped update or delete of a guarded object is a
// deliberate bypass that the policies can judge: it leaves the fence's
// annotations alone, or takes the guard off.
func bypassed() string {
	namespace, name := guardOf()
	id := annotation("object", fence.AnnotationWriteID)
	return all(extra(fence.ExtraToken)+".size() == 0",
		anyOf(reasonByHeader(), reasonByAnnotation()),
		"request.operation in ['UPDATE', 'DELETE']",
		label("oldObject", fence.LabelLease)+".hasValue()",
		anyOf("request.operation == 'DELETE'",
			"!"+label("object", fence.LabelLease)+".hasValue()",
			all(same(label, fence.LabelLease, fence.LabelLeaseNamespace), same(annotation, fence.AnnotationsOfFence...))),
		anyOf("request.operation == 'DELETE'", "!"+id+".hasValue()", id+" == "+annotation("oldObject", fence.AnnotationWriteID)),
		bypass(anyOf(reasonByHeader(), reasonByAnnotation()), namespace, name))
}

// Spare is the match condition that keeps from the webhook what the fence
// policy has decided: the label unchanged, and presented = old record = new
// record; or a bypass that leaves the record alone.
func Spare() admissionv1.MatchCondition {
	stored := annotation("oldObject", fence.AnnotationToken) + ".orValue('')"
	header := extra(fence.ExtraToken)
	id := annotation("object", fence.AnnotationWriteID)
	decided := anyOf(
		all("request.operation == 'UPDATE'", stored+" != ''",
			same(label, fence.LabelLease, fence.LabelLeaseNamespace), same(annotation, fence.AnnotationToken),
			anyOf(header+" == ["+stored+"]",
				all(header+".size() == 0", id+".hasValue()", id+" != "+annotation("oldObject", fence.AnnotationWriteID)))),
		all("request.operation == 'DELETE'", stored+" != ''", header+" == ["+stored+"]"),
		bypassed(),
	)
	return admissionv1.MatchCondition{Name: "not-decided-by-the-policy", Expression: "!" + decided}
}

// Bypasses warns of a bypass that the webhook does not see, and leaves it in
// the audit log.
func Bypasses(o Options) (*admissionv1.ValidatingAdmissionPolicy, *admissionv1.ValidatingAdmissionPolicyBinding) {
	p := newPolicy("fencedlease-bypasses")
	p.Spec.MatchConstraints = guardedObjects(admissionv1.Update, admissionv1.Delete)
	// In one condition, since the API server evaluates each of them.
	p.Spec.MatchConditions = []admissionv1.MatchCondition{{Name: "bypassed", Expression: all(bypassed(), "!"+exempt(o))}}
	namespace, name := guardOf()
	reason := fmt.Sprintf("(%s ? %s[0] : %s.orValue(''))", reasonByHeader(), extra(fence.ExtraBypass), annotation("object", fence.AnnotationBypass))
	p.Spec.Validations = []admissionv1.Validation{{
		Expression:        "false",
		MessageExpression: fmt.Sprintf("'[' + %s + '/' + %s + '] bypassed: ' + %s", namespace, name, reason),
		Reason:            new(metav1.StatusReasonForbidden),
	}}
	binding := Bind(p)
	binding.Spec.ValidationActions = []admissionv1.ValidationAction{admissionv1.Warn, admissionv1.Audit}
	return p, binding
}
