package policy

import (
	"fmt"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fencedlease/fencedlease/fence"
)

// FloorName is the ConfigMap of the cluster-wide floor of first tokens.
const FloorName = "fencedlease-floor"

// bypass tells that the request gives a reason for a bypass and has the right
// to it on a lease; namespace and name are CEL.
func bypass(reason, namespace, name string) string {
	return all(reason, fmt.Sprintf("authorizer.group(%s).resource('fencedleases').namespace(%s).name(%s).check(%s).allowed()",
		quote(fence.Group), namespace, name, quote(fence.VerbBypass)))
}

// reasonByHeader and reasonByAnnotation tell that a request gives a reason.
func reasonByHeader() string { return fmt.Sprintf("%s.exists(r, r != '')", extra(fence.ExtraBypass)) }

func reasonByAnnotation() string {
	a := annotation("object", fence.AnnotationBypass)
	return all("request.operation == 'UPDATE'", a+".orValue('') != ''", a+" != "+annotation("oldObject", fence.AnnotationBypass))
}

// NotExempt is the match condition that keeps the exempt principals from a fence.
func NotExempt(o Options) admissionv1.MatchCondition {
	return admissionv1.MatchCondition{Name: "not-exempt", Expression: "!" + exempt(o)}
}

func forbid(expression, message string) admissionv1.Validation {
	return admissionv1.Validation{Expression: expression, Message: message, Reason: new(metav1.StatusReasonForbidden)}
}

// Claims lets only the account that a claim names as its user make, renew,
// reaffirm or delete it.
func Claims(o Options) *admissionv1.ValidatingAdmissionPolicy {
	p := newPolicy("fencedlease-claims")
	p.Spec.MatchConstraints = &admissionv1.MatchResources{ResourceRules: []admissionv1.NamedRuleWithOperations{
		rule(fence.Group, []string{"leaseclaims"}, admissionv1.Create, admissionv1.Update, admissionv1.Delete),
	}}
	p.Spec.MatchConditions = []admissionv1.MatchCondition{NotExempt(o)}
	pod := extra(extraPodUID)
	p.Spec.Variables = []admissionv1.Variable{
		{Name: "claim", Expression: "request.operation == 'CREATE' ? object : oldObject"},
		{Name: "bound", Expression: "has(variables.claim.spec.user)"},
		{Name: "own", Expression: all("request.userInfo.username == variables.claim.spec.user.username",
			anyOf("!has(variables.claim.spec.user.podUID)", pod+".exists(p, p == variables.claim.spec.user.podUID)"))},
	}
	p.Spec.Validations = []admissionv1.Validation{
		forbid("request.operation != 'CREATE' || !variables.bound || variables.own",
			"NotHolder: spec.user has to be the account, and podUID the pod, that creates the claim; set it to your own, or leave it out"),
		forbid(anyOf("request.operation == 'CREATE'", "!variables.bound", "variables.own",
			// An owner that is gone would have the garbage collector delete it.
			"request.operation == 'UPDATE' && object.spec == oldObject.spec && object.metadata.?ownerReferences == oldObject.metadata.?ownerReferences",
			bypass(reasonByHeader(), "variables.claim.metadata.namespace", "variables.claim.spec.leaseName")),
			"NotHolder: only the account that made the claim renews, reaffirms or deletes it; bypass with a reason, or let it lapse"),
	}
	return p
}

// LastToken lets only the operator change the newest reserved token. A restore
// creates with it.
func LastToken(o Options) *admissionv1.ValidatingAdmissionPolicy {
	p := newPolicy("fencedlease-last-token")
	p.Spec.MatchConstraints = &admissionv1.MatchResources{ResourceRules: []admissionv1.NamedRuleWithOperations{
		rule(fence.Group, []string{"fencedleases", "fencedleases/status"}, admissionv1.Update),
	}}
	p.Spec.MatchConditions = []admissionv1.MatchCondition{NotExempt(o)}
	p.Spec.Validations = []admissionv1.Validation{forbid(anyOf(same(annotation, fence.AnnotationLastToken), mendsLastToken()),
		"FenceRemoved: only the operator writes the annotation "+fence.AnnotationLastToken+", save that a malformed one may be taken off; leave it")}
	return p
}

// mendsLastToken tells that a last-token that no operator wrote is taken off,
// as the lease's Ready condition asks for.
func mendsLastToken() string {
	old := annotation("oldObject", fence.AnnotationLastToken) + ".orValue('1')"
	return all("!"+annotation("object", fence.AnnotationLastToken)+".hasValue()",
		anyOf("!"+isToken(old), "int("+old+") > "+fmt.Sprint(int64(1)<<52)))
}

// Tables lets only the operator write what it keeps: the lease table and the
// floor of first tokens.
func Tables(o Options) *admissionv1.ValidatingAdmissionPolicy {
	p := newPolicy("fencedlease-tables")
	p.Spec.MatchConstraints = &admissionv1.MatchResources{
		ResourceRules: []admissionv1.NamedRuleWithOperations{rule("", []string{"configmaps"}, admissionv1.Create, admissionv1.Update, admissionv1.Delete)},
		NamespaceSelector: &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{
			{Key: "kubernetes.io/metadata.name", Operator: metav1.LabelSelectorOpIn, Values: []string{o.OperatorNamespace}},
		}},
	}
	p.Spec.MatchConditions = []admissionv1.MatchCondition{
		// Not by the rule's resourceNames: the requests of a deletecollection
		// name no object.
		{Name: "kept", Expression: "(request.operation == 'DELETE' ? oldObject : object).metadata.?name.orValue('') in " + list([]string{fence.TableName, FloorName})},
		NotExempt(o),
	}
	p.Spec.Validations = []admissionv1.Validation{forbid(anyOf(
		// Installing and upgrading touch metadata alone. An owner that is gone
		// would have the garbage collector delete it.
		"request.operation == 'CREATE' && object.metadata.?name.orValue('') == "+quote(fence.TableName)+
			" && !has(object.data) && !has(object.immutable) && !has(object.metadata.ownerReferences)",
		"request.operation == 'UPDATE' && object.?data == oldObject.?data && object.?immutable == oldObject.?immutable"+
			" && object.metadata.?ownerReferences == oldObject.metadata.?ownerReferences",
		// Who may take this policy away takes the installation away: Helm
		// deletes the table before its bindings. Without it the fence refuses,
		// and the marks alone are unguarded until the operator writes it again.
		"request.operation == 'DELETE' && oldObject.metadata.?name.orValue('') == "+quote(fence.TableName)+
			" && authorizer.group('admissionregistration.k8s.io').resource('validatingadmissionpolicybindings').name("+quote(p.Name)+").check('delete').allowed()",
		bypass(reasonByHeader(), quote(o.OperatorNamespace), "''")),
		"FenceRemoved: only the operator writes the lease table and the floor of first tokens; bypass with a reason")}
	return p
}

// Marks keeps a namespace's mark while leases of it, or that allow it, are used
// there.
func Marks(o Options) (*admissionv1.ValidatingAdmissionPolicy, *admissionv1.ValidatingAdmissionPolicyBinding) {
	p := newPolicy("fencedlease-marks")
	p.Spec.ParamKind = &admissionv1.ParamKind{APIVersion: "v1", Kind: "ConfigMap"}
	p.Spec.MatchConstraints = &admissionv1.MatchResources{ResourceRules: []admissionv1.NamedRuleWithOperations{
		rule("", []string{"namespaces", "namespaces/status", "namespaces/finalize"}, admissionv1.Update),
	}}
	p.Spec.MatchConditions = []admissionv1.MatchCondition{
		{Name: "takes-the-mark-off", Expression: fmt.Sprintf("%s.orValue('') == 'true' && %s.orValue('') != 'true'",
			label("oldObject", fence.LabelNamespaceMark), label("object", fence.LabelNamespaceMark))},
		NotExempt(o),
	}
	// Between blanks as the allowed namespaces stand there; an identity that reads
	// so keeps a mark for nothing.
	allowed := "params.?data.orValue({}).exists(ns, params.data[ns].contains(' * ') || params.data[ns].contains(' ' + oldObject.metadata.name + ' '))"
	p.Spec.Validations = []admissionv1.Validation{forbid(
		// The bypass first: it holds, too, where the table is too large to look through.
		anyOf(bypass(anyOf(reasonByHeader(), reasonByAnnotation()), "oldObject.metadata.name", "''"),
			"!(params.?data[?oldObject.metadata.name].hasValue() || "+allowed+")"),
		"FenceRemoved: leases are used in this namespace, and without the label "+fence.LabelNamespaceMark+" the fence would not see its /scale and evictions; leave it")}
	binding := tableBinding(p, o)
	// The API server looks for the parameter before it looks at match
	// conditions: denying would stop every write to a namespace.
	binding.Spec.ParamRef.ParameterNotFoundAction = new(admissionv1.AllowAction)
	return p, binding
}

// Table is the empty lease table that is installed with the policies, so that
// they have their parameter before the operator first runs.
func Table(o Options) *corev1.ConfigMap {
	return &corev1.ConfigMap{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"},
		ObjectMeta: metav1.ObjectMeta{Namespace: o.OperatorNamespace, Name: fence.TableName, Labels: map[string]string{"app.kubernetes.io/name": "fencedlease"}},
	}
}

// tableBinding binds a policy that reads the lease table. Where somebody took
// the table away, what the policy matches stays as it is until the operator
// has written it again.
func tableBinding(p *admissionv1.ValidatingAdmissionPolicy, o Options) *admissionv1.ValidatingAdmissionPolicyBinding {
	binding := Bind(p)
	binding.Spec.ParamRef = &admissionv1.ParamRef{
		Name: fence.TableName, Namespace: o.OperatorNamespace, ParameterNotFoundAction: new(admissionv1.DenyAction),
	}
	return binding
}
