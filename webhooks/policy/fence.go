package policy

import (
	"fmt"
	"strings"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fencedlease/fencedlease/fence"
)

// FenceName is the name of the policy that judges stamped writes.
const FenceName = "fencedlease"

// variables of the fence policy, each of which may use those before it. The
// API server evaluates them only when they are needed, once for the verdict
// and once more for the message.
func fenceVariables() []admissionv1.Variable {
	return []admissionv1.Variable{
		{Name: "header", Expression: extra(fence.ExtraToken)},
		{Name: "stored", Expression: annotation("oldObject", fence.AnnotationToken) + ".orValue('')"},
		{Name: "sent", Expression: "request.operation == 'DELETE' ? '' : " + annotation("object", fence.AnnotationToken) + ".orValue('')"},
		// A token is presented, not inherited, by the header or by a changed
		// write-id.
		{Name: "stamped", Expression: "variables.header.size() > 0 || " + all(
			"request.operation == 'UPDATE'",
			annotation("object", fence.AnnotationWriteID)+".hasValue()",
			annotation("object", fence.AnnotationWriteID)+" != "+annotation("oldObject", fence.AnnotationWriteID))},
		{Name: "text", Expression: "variables.header.size() > 0 ? variables.header[0] : variables.sent"},
		{Name: "wellFormed", Expression: "variables.header.size() <= 1 && " + isToken("variables.text")},
		{Name: "presented", Expression: "int(variables.text)"},
		{Name: "floor", Expression: tokenOr0(annotation("oldObject", fence.AnnotationFloor) + ".orValue('')")},
		{Name: "storedToken", Expression: tokenOr0("variables.stored")},
		{Name: "recorded", Expression: "variables.floor > variables.storedToken ? variables.floor : variables.storedToken"},
		// What the object will hold as its record once the write commits.
		{Name: "recording", Expression: fmt.Sprintf("request.operation == 'DELETE' || variables.sent == variables.stored ? variables.recorded : [variables.floor, %s].max()",
			tokenOr0("variables.sent"))},
		{Name: "lease", Expression: label("oldObject", fence.LabelLease) + ".orValue('')"},
		{Name: "leaseNamespace", Expression: label("oldObject", fence.LabelLeaseNamespace) + ".orValue(oldObject.metadata.?namespace.orValue(''))"},
		// The lease's line in the table, without its name; see fence.TableName.
		{Name: "found", Expression: "params.?data[?variables.leaseNamespace].orValue('').split('\\n' + variables.lease + '\\t', 2)"},
		{Name: "entry", Expression: "variables.found.size() < 2 ? [] : variables.found[1].split('\\n', 2)[0].split('\\t')"},
		{Name: "known", Expression: "variables.entry.size() > 0"},
		{Name: "current", Expression: fmt.Sprintf("int(%s)", field(fence.TableFieldCurrent))},
		{Name: "revokedBelow", Expression: fmt.Sprintf("int(%s)", field(fence.TableFieldFloor))},
		{Name: "allowed", Expression: fmt.Sprintf("oldObject.metadata.?namespace.orValue('') == variables.leaseNamespace || %s.contains(' * ') || (has(oldObject.metadata.namespace) && %s.contains(' ' + oldObject.metadata.namespace + ' '))",
			field(fence.TableFieldAllowed), field(fence.TableFieldAllowed))},
		{Name: "bound", Expression: bound()},
		{Name: "judged", Expression: cases(
			is{"!variables.stamped || variables.lease == ''", "''"},
			is{"!variables.wellFormed", quote(malformed)},
			is{"request.operation == 'UPDATE' && !" + same(label, fence.LabelLease, fence.LabelLeaseNamespace), quote(removed)},
			is{"variables.presented < variables.recorded", quote(stale)},
			is{"variables.recording < variables.recorded || (request.operation == 'UPDATE' && !" + same(annotation, fence.AnnotationFloor) + ")", quote(stripped)},
			is{"variables.recording != variables.presented && variables.known && variables.presented < variables.current", quote(superseded)},
			is{"variables.recording != variables.presented", quote(unrecorded)},
			is{"!variables.known", "(variables.presented <= " + seen() + " ? " + quote(unknown) + " : '')"},
			is{"!variables.allowed", quote(notAllowed)},
			is{"variables.presented < variables.current", quote(superseded)},
			is{"variables.presented < variables.revokedBelow", quote(revoked)},
			is{"variables.presented > variables.current", "''"},
			is{flag(fence.TableHeaderOnly) + " && variables.header.size() == 0", quote(byHeader)},
			is{"variables.bound", quote(otherUser)},
			is{flag(fence.TableDenyLapsed) + " && !" + flag(fence.TableHeld), quote(lapsed)},
			is{"", "''"},
		)},
		// A mark for a deletion in the name of another token would let anybody
		// delete under a token that decided nothing.
		{Name: "verdict", Expression: "variables.judged == '' && variables.stamped && variables.lease != '' && request.operation == 'UPDATE' && " +
			"!(" + annotation("object", fence.AnnotationDeleteToken) + " in [optional.none(), " + annotation("oldObject", fence.AnnotationDeleteToken) +
			", optional.of(variables.text)]) ? " + quote(marked) + " : variables.judged"},
		// Rules 1 and 2: finishing a deletion is no write, and a write that
		// changes nothing commits nothing. Looked at only where the verdict is
		// not clean.
		{Name: "excused", Expression: "request.operation == 'UPDATE' && " + anyOf(
			"object == oldObject",
			all(fmt.Sprintf("!(variables.verdict in %s)", list([]string{malformed, stale, superseded, revoked})), finishes()))},
	}
}

// seen is the highest token that a lease can have had which the table lacks: up
// to there the lease is gone.
func seen() string {
	number := func(key string) string { return "int(params.?data[?" + quote(key) + "].orValue('0'))" }
	return "[" + number(fence.TableSeen) + ", " + number(fence.TableAhead) + "].max()"
}

// field and flag look into the lease's line of the table.
func field(i int) string { return fmt.Sprintf("variables.entry[%d]", i) }

func flag(letter string) string {
	return fmt.Sprintf("%s.contains(%s)", field(fence.TableFieldFlags), quote(letter))
}

// bound tells that the lease binds its token to another account than the
// sender's.
func bound() string {
	return all(flag(fence.TableBound), flag(fence.TableHeld), anyOf(
		"request.userInfo.username != "+field(fence.TableFieldUser),
		all(field(fence.TableFieldPod)+" != ''",
			extra(extraPodUID)+".size() > 0",
			extra(extraPodUID)+"[0] != "+field(fence.TableFieldPod))))
}

// finishes tells that an update only takes finalizers off an object that is
// being deleted.
func finishes() string {
	return all("has(oldObject.metadata.deletionTimestamp)",
		"object.all(k, k == 'metadata' || (k in oldObject && object[k] == oldObject[k]))",
		"oldObject.all(k, k == 'metadata' || k in object)",
		"object.metadata.all(k, k in ['finalizers', 'managedFields', 'resourceVersion'] || (k in oldObject.metadata && object.metadata[k] == oldObject.metadata[k]))",
		"oldObject.metadata.all(k, k in ['finalizers', 'managedFields'] || k in object.metadata)",
		"object.metadata.?finalizers.orValue([]).all(f, f in oldObject.metadata.?finalizers.orValue([]))")
}

// usual tells that the holder of a plain lease of the object's own namespace
// goes on writing with the token that is recorded: by far the most frequent
// case, decided without a look at anything else.
func usual() string {
	stored := annotation("oldObject", fence.AnnotationToken) + ".orValue('')"
	header := extra(fence.ExtraToken)
	id := annotation("object", fence.AnnotationWriteID)
	line := strings.Join([]string{"", "0", fence.TableHeld, ""}, "\\t")
	return all("request.operation == 'UPDATE'",
		anyOf(header+" == ["+stored+"]", all(header+".size() == 0", id+".hasValue()", id+" != "+annotation("oldObject", fence.AnnotationWriteID))),
		// Within one field of the line: the token becomes part of what is
		// searched for.
		"!"+stored+".contains('\\t')",
		"has(oldObject.metadata.namespace)",
		"!"+label("oldObject", fence.LabelLeaseNamespace)+".hasValue()",
		same(label, fence.LabelLease, fence.LabelLeaseNamespace),
		same(annotation, fence.AnnotationToken, fence.AnnotationFloor, fence.AnnotationDeleteToken),
		"!"+annotation("oldObject", fence.AnnotationFloor)+".hasValue()",
		"params.?data[?oldObject.metadata.namespace].orValue('').contains('\\n' + "+label("oldObject", fence.LabelLease)+".orValue(' ') + '\\t' + "+stored+" + '"+line+"')")
}

// notUsualNorExempt keeps the usual write and the exempt principals from a
// policy. As a match condition it is all that the API server evaluates for
// them: no verdict, and no message.
func notUsualNorExempt(o Options) admissionv1.MatchCondition {
	return admissionv1.MatchCondition{Name: "not-usual-nor-exempt", Expression: "!" + anyOf(usual(), exempt(o))}
}

// Verdicts of the fence policy. Their words stand in no message.
const (
	malformed  = "malformed"
	removed    = "removed"
	stale      = "stale"
	stripped   = "stripped"
	unrecorded = "unrecorded"
	unknown    = "unknown"
	notAllowed = "not allowed"
	superseded = "superseded"
	revoked    = "revoked"
	byHeader   = "by header"
	otherUser  = "other user"
	lapsed     = "lapsed"
	marked     = "marked"
)

// extraPodUID is where the API server names the Pod of a service account's token.
const extraPodUID = "authentication.kubernetes.io/pod-uid"

// is is one case of cases; the last one has no condition.
type is struct{ when, then string }

// cases gives the value of the first case whose condition holds.
func cases(list ...is) string {
	expression := ""
	for _, c := range list {
		if c.when == "" {
			return expression + c.then
		}
		expression += "(" + c.when + ") ? " + c.then + " :\n"
	}
	return expression
}

// fenceMessage words a verdict as fence.Judge does.
func fenceMessage() string {
	lease := "'[' + variables.leaseNamespace + '/' + variables.lease + '] '"
	state := "'; recorded ' + " + tokenText("variables.recorded") +
		" + (variables.known ? ', current ' + (variables.current >= variables.revokedBelow ? " + tokenText("variables.current") + " : string(variables.revokedBelow))" +
		" + ', ' + variables.entry[" + fmt.Sprint(fence.TableFieldHolder) + "] : ', no such lease') + '; '"
	deny := func(reason fence.Reason, what, todo string) string {
		return quote(string(reason)+": ") + " + " + lease + " + 'token ' + string(variables.presented) + ' ' + " + what + " + " + state + " + " + quote(todo)
	}
	said := func(reason fence.Reason, what, todo string) string { return deny(reason, quote(what), todo) }
	return cases(
		// The API server evaluates messages for what passes, too.
		is{"variables.verdict == ''", "''"},
		is{"variables.verdict == " + quote(malformed), quote(string(fence.MalformedToken)+": ") + " + " + lease +
			" + (variables.header.size() > 1 ? 'the header presents more than one token' : 'malformed token ' + strings.quote(variables.text.size() > 24 ? variables.text.substring(0, 24) + '...' : variables.text))" +
			" + '; present the token exactly as the lease\\'s status shows it'"},
		is{"variables.verdict == " + quote(removed), said(fence.FenceRemoved, "takes the guard off or points it elsewhere", "a stamped write leaves the fence's label in place: take it off by a bypass with a reason")},
		is{"variables.verdict == " + quote(stripped), said(fence.FenceRemoved, "comes with a lower record, or another floor", "keep the annotation "+fence.AnnotationToken+" in the object, equal to this token, and leave "+fence.AnnotationFloor)},
		is{"variables.verdict == " + quote(marked), said(fence.FenceRemoved, "sets "+fence.AnnotationDeleteToken+" to another one", "set it to the token that is presented, or take it off")},
		is{"variables.verdict == " + quote(stale), said(fence.StaleToken, "is stale", "stop: a newer holder has written here")},
		is{"variables.verdict == " + quote(superseded), said(fence.StaleToken, "is stale", "stop: a newer token was issued")},
		is{"variables.verdict == " + quote(unrecorded), said(fence.NotRecorded, "is not recorded yet", "this path cannot record: first set "+fence.AnnotationToken+" on the object with this token")},
		is{"variables.verdict == " + quote(unknown), said(fence.UnknownLease, "belongs to a lease that does not exist", "create the FencedLease, or take the label off with the right to bypass")},
		is{"variables.verdict == " + quote(notAllowed), said(fence.UnknownLease, "belongs to a lease that does not allow this namespace", "add the namespace to the lease's allowedNamespaces")},
		is{"variables.verdict == " + quote(revoked), said(fence.StaleToken, "is revoked", "stop, and acquire the lease anew")},
		is{"variables.verdict == " + quote(byHeader), quote(string(fence.Unstamped)+": ") + " + " + lease + " + 'token ' + string(variables.presented) + " +
			quote(" was presented by annotations, and the lease accepts it by header alone; impersonate yourself with the extra "+fence.ExtraToken)},
		is{"variables.verdict == " + quote(otherUser), deny(fence.NotHolder,
			"'belongs to another account than ' + strings.quote(request.userInfo.username.size() > 64 ? request.userInfo.username.substring(0, 64) + '...' : request.userInfo.username)",
			"write as the account that made the claim")},
		is{"", said(fence.Lapsed, "is current but its holder is gone", "acquire the lease anew")},
	)
}

// Fence gives the policy that judges stamped updates, status writes and
// deletes of guarded objects, and its binding to the lease table.
func Fence(o Options) (*admissionv1.ValidatingAdmissionPolicy, *admissionv1.ValidatingAdmissionPolicyBinding) {
	policy := newPolicy(FenceName)
	policy.Spec.ParamKind = &admissionv1.ParamKind{APIVersion: "v1", Kind: "ConfigMap"}
	policy.Spec.MatchConstraints = guardedObjects(admissionv1.Update, admissionv1.Delete)
	policy.Spec.MatchConditions = []admissionv1.MatchCondition{notUsualNorExempt(o)}
	policy.Spec.Variables = fenceVariables()
	message := fenceMessage()
	policy.Spec.Validations = []admissionv1.Validation{
		{
			Expression:        fmt.Sprintf("variables.verdict != %s || variables.excused", quote(malformed)),
			MessageExpression: message,
			Reason:            new(metav1.StatusReasonInvalid),
		},
		{
			Expression:        fmt.Sprintf("variables.verdict in ['', %s] || variables.excused", quote(malformed)),
			MessageExpression: message,
			Reason:            new(metav1.StatusReasonForbidden),
		},
	}
	return policy, tableBinding(policy, o)
}
