package policy

import (
	admissionv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fencedlease/fencedlease/fence"
)

// Strict gives the policy that stands in for the webhook where there is none.
// It denies what the fence policy sees and leaves to the webhook: unstamped
// writes, changes of the label, creates, and tokens that the lease table does
// not know. What the table allows as a whole passes; exceptions by principal
// do not, since the table does not hold them.
func Strict(o Options) (*admissionv1.ValidatingAdmissionPolicy, *admissionv1.ValidatingAdmissionPolicyBinding) {
	p := newPolicy("fencedlease-strict")
	p.Spec.ParamKind = &admissionv1.ParamKind{APIVersion: "v1", Kind: "ConfigMap"}
	p.Spec.MatchConstraints = guardedObjects(admissionv1.Create, admissionv1.Update, admissionv1.Delete)
	p.Spec.MatchConditions = []admissionv1.MatchCondition{notUsualNorExempt(o)}
	leaseNames := []string{fence.LabelLease, fence.LabelLeaseNamespace}
	verb := func(verb string) string {
		return "authorizer.group(" + quote(fence.Group) + ").resource('fencedleases').namespace(variables.leaseNamespace).name(variables.lease).check(" + quote(verb) + ").allowed()"
	}
	p.Spec.Variables = []admissionv1.Variable{
		{Name: "guarded", Expression: "request.operation != 'CREATE' && " + label("oldObject", fence.LabelLease) + ".hasValue()"},
		{Name: "at", Expression: "variables.guarded ? oldObject : object"},
		{Name: "lease", Expression: label("variables.at", fence.LabelLease) + ".orValue('')"},
		{Name: "leaseNamespace", Expression: label("variables.at", fence.LabelLeaseNamespace) + ".orValue(variables.at.metadata.?namespace.orValue(''))"},
		{Name: "header", Expression: extra(fence.ExtraToken)},
		{Name: "sent", Expression: "request.operation == 'DELETE' ? '' : " + annotation("object", fence.AnnotationToken) + ".orValue('')"},
		{Name: "stamped", Expression: anyOf("variables.header.size() > 0",
			all("request.operation == 'CREATE'", annotation("object", fence.AnnotationToken)+".hasValue()"),
			all("request.operation == 'UPDATE'",
				annotation("object", fence.AnnotationWriteID)+".hasValue()",
				annotation("object", fence.AnnotationWriteID)+" != "+annotation("oldObject", fence.AnnotationWriteID)))},
		{Name: "presented", Expression: "variables.header.size() > 0 ? variables.header[0] : variables.sent"},
		{Name: "found", Expression: "params.?data[?variables.leaseNamespace].orValue('').split('\\n' + variables.lease + '\\t', 2)"},
		{Name: "entry", Expression: "variables.found.size() < 2 ? [] : variables.found[1].split('\\n', 2)[0].split('\\t')"},
		{Name: "known", Expression: "variables.entry.size() > 0"},
		{Name: "current", Expression: "variables.known ? " + field(fence.TableFieldCurrent) + " : '0'"},
		{Name: "allowed", Expression: "variables.known && (variables.at.metadata.?namespace.orValue('') == variables.leaseNamespace || " + field(fence.TableFieldAllowed) + ".contains(' * ') || " +
			"(has(variables.at.metadata.namespace) && " + field(fence.TableFieldAllowed) + ".contains(' ' + variables.at.metadata.namespace + ' ')))"},
		{Name: "bypassed", Expression: all("!variables.stamped", anyOf(reasonByHeader(), reasonByAnnotation(), all("request.operation == 'CREATE'",
			annotation("object", fence.AnnotationBypass)+".orValue('') != ''")), verb(fence.VerbBypass))},
		{Name: "untouched", Expression: "request.operation != 'UPDATE' || " + all(same(label, leaseNames...), same(annotation, fence.AnnotationsOfFence...))},
		{Name: "recorded", Expression: "variables.guarded ? [" + tokenOr0(annotation("oldObject", fence.AnnotationToken)+".orValue('')") + ", " +
			tokenOr0(annotation("oldObject", fence.AnnotationFloor)+".orValue('')") + "].max() : 0"},
		// What the object will hold as its record once the write commits.
		{Name: "recording", Expression: "request.operation == 'DELETE' ? variables.recorded : [" + tokenOr0("variables.sent") + ", " +
			tokenOr0(annotation("object", fence.AnnotationFloor)+".orValue('')") + "].max()"},
		{Name: "decided", Expression: all("request.operation == 'DELETE'", "variables.recorded > 0",
			annotation("oldObject", fence.AnnotationDeleteToken)+".orValue('') == string(variables.recorded)")},
		// Rules 1 and 2, as the fence policy has them.
		{Name: "nothing", Expression: "request.operation == 'UPDATE' && " + anyOf("object == oldObject", finishes())},
		{Name: "verdict", Expression: cases(
			// Active once the operator has written the table: an installation
			// beside guarded objects that are there already blocks none of them.
			is{"!params.?data[?" + quote(fence.TableSeen) + "].hasValue()", "''"},
			is{"variables.nothing || variables.decided", "''"},
			// A bypass leaves the record alone, unless it puts the guard on, takes
			// it off or points it elsewhere.
			is{"variables.bypassed", "((variables.untouched || !" + same(label, leaseNames...) + ") ? '' : 'touched')"},
			is{"!variables.guarded && !variables.known", "'unknown'"},
			is{"!variables.guarded && !variables.allowed", "'unknown'"},
			is{"!variables.guarded && " + brings(annotation, fence.AnnotationFloor, fence.AnnotationDeleteToken), "'brings'"},
			is{"!variables.guarded && variables.stamped && !" + isToken("variables.presented"), "'malformed'"},
			is{"!variables.guarded && variables.stamped && int(variables.presented) < int(variables.current)", "'stale'"},
			is{"!variables.guarded && variables.stamped && int(variables.presented) < int(" + field(fence.TableFieldFloor) + ")", "'stale'"},
			is{"!variables.guarded && variables.stamped && variables.sent == variables.presented && variables.presented == variables.current && request.operation == 'CREATE'" +
				" && !(" + anyOf(bound(), all(flag(fence.TableHeaderOnly), "variables.header.size() == 0"), all(flag(fence.TableDenyLapsed), "!"+flag(fence.TableHeld))) + ")", "''"},
			is{"!variables.guarded && variables.stamped", "'unjudged'"},
			is{"!variables.guarded", "((" + verb(fence.VerbGuard) + " && !" + brings(annotation, fence.AnnotationToken) + ") ? '' : 'unstamped')"},
			is{"request.operation == 'UPDATE' && !" + same(label, leaseNames...), "'touched'"},
			is{"!variables.stamped && variables.known && " + flag(fence.TableUnstampedAllowed), "(variables.untouched ? '' : 'touched')"},
			is{"!variables.stamped", "'unstamped'"},
			// The fence policy judges the rest: what is at most current, what the
			// path does not record, and leases that are gone.
			is{isToken("variables.presented") + " && variables.recording == int(variables.presented)" +
				" && variables.recording > (variables.known ? int(variables.current) : " + seen() + ")", "'unjudged'"},
			is{"", "''"},
		)},
	}
	where := "'[' + variables.leaseNamespace + '/' + variables.lease + '] '"
	say := func(reason fence.Reason, text string) string {
		return quote(string(reason)+": ") + " + " + where + " + " + quote(text)
	}
	touched := "variables.verdict in ['touched', 'brings']"
	leave := "the write changes the fence's label or annotations; leave them, or take the label off by a bypass with a reason"
	// The API server words messages without the authorizer. Where the verdict
	// asked it, the fixed message stands.
	p.Spec.Validations = []admissionv1.Validation{{
		Expression:        "!(" + touched + ")",
		Message:           string(fence.FenceRemoved) + ": " + leave,
		MessageExpression: say(fence.FenceRemoved, leave),
		Reason:            new(metav1.StatusReasonForbidden),
	}, {
		Expression: "variables.verdict == '' || " + touched,
		Message: string(fence.Unstamped) + ": the write presents no token, and its sender has neither the verb " + fence.VerbGuard +
			", to put an object under guard, nor a reason and the verb " + fence.VerbBypass + "; present the token",
		MessageExpression: cases(
			is{"variables.verdict == 'unknown'", say(fence.UnknownLease, "no lease that the table knows allows this object; create the FencedLease, or wait until the operator has seen it")},
			is{"variables.verdict == 'malformed'", say(fence.MalformedToken, "the token is not in its canonical form; present it exactly as the lease's status shows it")},
			is{"variables.verdict == 'stale'", say(fence.StaleToken, "a newer token was issued; stop")},
			is{"variables.verdict == 'unjudged'", say(fence.UnissuedToken, "the lease table does not hold this token as current; present the token of your own claim's status, or try again once the operator has written the table")},
			is{"", say(fence.Unstamped, "the write presents no token; present it, or bypass with a reason")},
		),
		Reason: new(metav1.StatusReasonForbidden),
	}}
	return p, tableBinding(p, o)
}

// Bindings refuses to carry the fence's label or annotations onto a Pod, where
// nothing would see them come. The webhook does so where it is installed.
func Bindings(o Options) *admissionv1.ValidatingAdmissionPolicy {
	p := newPolicy("fencedlease-bindings")
	p.Spec.MatchConstraints = &admissionv1.MatchResources{ResourceRules: []admissionv1.NamedRuleWithOperations{
		rule("", []string{"bindings", "pods/binding"}, admissionv1.Create),
	}}
	p.Spec.MatchConditions = []admissionv1.MatchCondition{NotExempt(o)}
	p.Spec.Validations = []admissionv1.Validation{forbid("!"+anyOf(brings(label, fence.LabelLease, fence.LabelLeaseNamespace), brings(annotation, fence.AnnotationsOfFence...)),
		string(fence.FenceRemoved)+": a Binding must not carry the fence's label or annotations onto its Pod; take them off")}
	return p
}
