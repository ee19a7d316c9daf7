package policy

import (
	"context"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission"
	plugincel "k8s.io/apiserver/pkg/admission/plugin/cel"
	"k8s.io/apiserver/pkg/admission/plugin/policy/validating"
	"k8s.io/apiserver/pkg/admission/plugin/webhook/matchconditions"
	celconfig "k8s.io/apiserver/pkg/apis/cel"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/cel/environment"
)

var testOptions = Options{
	OperatorNamespace: "fencedlease-system",
	ExemptUsers:       []string{"system:apiserver", "system:serviceaccount:kube-system:generic-garbage-collector"},
	ExemptGroups:      []string{"system:nodes"},
}

// compile compiles a policy as the API server does (compilePolicy of its
// ValidatingAdmissionPolicy plugin, which is not exported).
func compile(tb testing.TB, policy *admissionv1.ValidatingAdmissionPolicy) validating.Validator {
	tb.Helper()
	compiler, err := plugincel.NewCompositedCompiler(environment.MustBaseEnvSet(environment.DefaultCompatibilityVersion()))
	if err != nil {
		tb.Fatal(err)
	}
	hasParams := policy.Spec.ParamKind != nil
	declared := plugincel.OptionalVariableDeclarations{HasParams: hasParams, HasAuthorizer: true}
	for _, v := range policy.Spec.Variables {
		result := compiler.CompileAndStoreVariable(&validating.Variable{Name: v.Name, Expression: v.Expression}, declared, environment.StoredExpressions)
		if result.Error != nil {
			tb.Fatalf("variable %s: %v\n%s", v.Name, result.Error, v.Expression)
		}
	}
	var conditions, validations, messages, audits []plugincel.ExpressionAccessor
	for i := range policy.Spec.MatchConditions {
		conditions = append(conditions, (*matchconditions.MatchCondition)(&policy.Spec.MatchConditions[i]))
	}
	for _, v := range policy.Spec.Validations {
		validations = append(validations, &validating.ValidationCondition{Expression: v.Expression, Message: v.Message, Reason: v.Reason})
		var message plugincel.ExpressionAccessor
		if v.MessageExpression != "" {
			message = &validating.MessageExpressionCondition{MessageExpression: v.MessageExpression}
		}
		messages = append(messages, message)
	}
	for _, a := range policy.Spec.AuditAnnotations {
		audits = append(audits, &validating.AuditAnnotationCondition{Key: a.Key, ValueExpression: a.ValueExpression})
	}
	evaluator := func(expressions []plugincel.ExpressionAccessor, declared plugincel.OptionalVariableDeclarations) plugincel.ConditionEvaluator {
		for _, e := range expressions {
			if e == nil {
				continue
			}
			if result := compiler.CompileCELExpression(e, declared, environment.StoredExpressions); result.Error != nil {
				tb.Fatalf("policy %s: %v\n%s", policy.Name, result.Error, e.GetExpression())
			}
		}
		return compiler.CompileCondition(expressions, declared, environment.StoredExpressions)
	}
	var matcher matchconditions.Matcher
	if len(conditions) > 0 {
		matcher = matchconditions.NewMatcher(evaluator(conditions, declared), policy.Spec.FailurePolicy, "policy", "validate", policy.Name)
	}
	return validating.NewValidator(evaluator(validations, declared), matcher, evaluator(audits, declared),
		evaluator(messages, plugincel.OptionalVariableDeclarations{HasParams: hasParams}), policy.Spec.FailurePolicy, nil)
}

// request is one request to judge.
type request struct {
	operation admission.Operation
	resource  schema.GroupVersionResource // ConfigMaps by default
	kind      schema.GroupVersionKind
	sub       string
	// name and namespace are those of the object by default.
	namespace   string
	old, object runtime.Object
	user        user.DefaultInfo
	// may says which verbs on which fencedlease the user has, as
	// "verb namespace/name"; "*" stands for any.
	may map[string]bool
}

// attributes gives the request as the API server's plugins see it.
func (r request) attributes(tb failer) *admission.VersionedAttributes {
	tb.Helper()
	if r.kind.Empty() {
		r.kind = corev1.SchemeGroupVersion.WithKind("ConfigMap")
		r.resource = corev1.SchemeGroupVersion.WithResource("configmaps")
	}
	var options runtime.Object
	name, namespace := "", r.namespace
	for _, o := range []runtime.Object{r.old, r.object} {
		if o == nil {
			continue
		}
		o.GetObjectKind().SetGroupVersionKind(r.kind)
		if m, ok := o.(metav1.Object); ok {
			name, namespace = m.GetName(), m.GetNamespace()
		}
	}
	attributes := admission.NewAttributesRecord(r.object, r.old, r.kind, namespace, name, r.resource, r.sub, r.operation, options, false, &r.user)
	versioned, err := admission.NewVersionedAttributes(attributes, r.kind, nil)
	if err != nil {
		tb.Fatal(err)
	}
	return versioned
}

// Authorize makes the request its own authorizer.
func (r request) Authorize(_ context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
	for _, k := range []string{"* *", a.GetVerb() + " " + a.GetNamespace() + "/" + a.GetName(), a.GetVerb() + " *"} {
		if r.may[k] {
			return authorizer.DecisionAllow, "", nil
		}
	}
	return authorizer.DecisionNoOpinion, "", nil
}

// failer is what testing.TB and rapid.T share.
type failer interface {
	Helper()
	Fatal(...any)
	Fatalf(string, ...any)
}

// denial is a policy's refusal; the zero value is none.
type denial struct {
	Reason  metav1.StatusReason
	Message string
}

// judge evaluates a policy on a request and gives the first denial, as the API
// server answers with. An error of evaluation fails the test.
func judge(tb failer, v validating.Validator, r request, table *corev1.ConfigMap) denial {
	tb.Helper()
	var params runtime.Object
	if table != nil {
		params = table
	}
	attributes := r.attributes(tb)
	result := v.Validate(context.Background(), attributes.GetResource(), attributes, params, nil, celconfig.RuntimeCELCostBudget, r)
	for _, d := range result.Decisions {
		if d.Evaluation == validating.EvalError {
			tb.Fatalf("evaluate: %s", d.Message)
		}
		if d.Action == validating.ActionDeny {
			return denial{d.Reason, d.Message}
		}
	}
	return denial{}
}
