package webhooks

import (
	"fmt"
	"net/http"
	"slices"

	admissionv1 "k8s.io/api/admission/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
)

// facts are what a verdict rests on besides the request. They are gathered
// one after the other, as decide asks for them.
type facts struct {
	// lease is nil where there is none. live tells that it was read from the
	// API server for this very verdict.
	lease *v1alpha1.FencedLease
	live  bool
	// marked tells that leases are used in the object's namespace; nil where
	// it was not asked for yet.
	marked *bool
	// may answers whether the sender has a verb on the lease; a verb that was
	// not asked for yet is absent.
	may map[string]bool
}

// question is a fact that decide needs and does not have.
type question int

const (
	nothing question = iota
	readLive
	readMark
	mayGuard
	mayBypass
)

// verdict is the answer to a request.
type verdict struct {
	allowed bool
	// reason is empty where the write is allowed and nothing is to be said.
	reason  fence.Reason
	message string
	warning string
	// bypassed tells that the write passes by the right to bypass.
	bypassed bool
	// lease and token are what the write is about, for logs and the audit;
	// empty where there is none.
	lease string
	token fence.Token
}

func allow() verdict { return verdict{allowed: true} }

func deny(reason fence.Reason, format string, a ...any) verdict {
	return verdict{reason: reason, message: string(reason) + ": " + fmt.Sprintf(format, a...)}
}

// code is the HTTP status of a rejection.
func (v verdict) code() int32 {
	if v.reason == fence.MalformedToken {
		return http.StatusUnprocessableEntity
	}
	return http.StatusForbidden
}

// decide applies the rules of the admission fence in their order. Where it
// needs another fact it says which; with that fact it is asked again.
func decide(w *write, f facts) (verdict, question) {
	guardBefore, guarded := leaseOf(w.old, w.request.Namespace)
	guardAfter, guards := leaseOf(w.new, w.request.Namespace)
	path := pathOf(w.request)
	if labelless(path) || w.request.Operation == admissionv1.Delete {
		guardAfter, guards = guardBefore, guarded
	}
	if path == pathBinding {
		return decideBinding(w), nothing
	}
	if !guarded && !guards {
		return allow(), nothing
	}
	key := guardBefore
	if !guarded {
		key = guardAfter
	}
	lease := leaseFacts(key, f, w.request.Namespace)
	recorded := fence.Token(0)
	if w.old != nil {
		recorded = fence.Recorded(w.old.Annotations)
	}

	// 1. Finishing a deletion is no write; a stale token is refused all the same.
	if w.finishesDeletion() {
		switch {
		case !w.presented.Stamped:
			return allow(), nothing
		case !f.live:
			return verdict{}, readLive // it leaves no record
		}
		if v := fence.Judge(w.presented, recorded, lease, fence.Policy{Live: true}); v.Reason == fence.StaleToken || v.Reason == fence.MalformedToken {
			return verdict{reason: v.Reason, message: v.Message}, nothing
		}
		return allow(), nothing
	}
	// 2. A write that changes nothing commits nothing.
	if w.changesNothing() {
		return allow(), nothing
	}
	// 3 and 9, for who presents nothing.
	if !w.presented.Stamped {
		return decideUnstamped(w, f, lease, key, guarded, guards && guardAfter == guardBefore)
	}
	if guarded && (!guards || guardAfter != guardBefore) {
		return deny(fence.FenceRemoved, "[%s] the write takes the label off or points it elsewhere; leave it, or bypass with a reason and no token", lease.Name), nothing
	}
	// 4 to 8.
	policy := fence.Policy{Live: f.live}
	after := recorded
	if w.new != nil && !labelless(path) {
		after = fence.Recorded(w.new.Annotations)
	}
	token, err := fence.ParseToken(w.presented.Text)
	policy.MustEqual = err == nil && after != token
	if !guarded {
		if !f.live {
			return verdict{}, readLive // a create has no record that would tell
		}
		if w.old != nil {
			if v, q := mayPutOn(w, f, lease, key); q != nothing || !v.allowed {
				return v, q
			}
		}
		recorded = max(recorded, reserved(f.lease, w.request))
	}
	v := fence.Judge(w.presented, recorded, lease, policy)
	if v.Outcome == fence.Confirm || v.Outcome == fence.Denied && !f.live && token >= recorded && err == nil {
		return verdict{}, readLive // the cache may lag
	}
	if v.Outcome != fence.Allowed {
		return verdict{reason: v.Reason, message: v.Message}, nothing
	}
	if !f.live && (labelless(path) || w.request.Operation == admissionv1.Delete) {
		return verdict{}, readLive // it leaves no record that would stop the next one
	}
	if !guarded {
		if v, q := inMarked(w, f, lease, key); q != nothing || !v.allowed {
			return v, q
		}
	}
	switch {
	case after < recorded:
		return deny(fence.FenceRemoved, "[%s] the write lowers the recorded token from %s to %s; leave the fence's annotations", lease.Name, recorded, after), nothing
	case after != token:
		return deny(fence.NotRecorded, "[%s] the request presents token %s and its object holds %s; both have to agree", lease.Name, token, after), nothing
	case !labelless(path) && w.old != nil && w.new != nil && w.old.Annotations[fence.AnnotationFloor] != w.new.Annotations[fence.AnnotationFloor]:
		return deny(fence.FenceRemoved, "[%s] only the operator writes the annotation %s; leave it", lease.Name, fence.AnnotationFloor), nothing
	case !guarded && w.new != nil && (w.new.Annotations[fence.AnnotationFloor] != "" || w.new.Annotations[fence.AnnotationDeleteToken] != ""):
		return deny(fence.FenceRemoved, "[%s] an object that comes under guard must not bring %s or %s along; take them off",
			lease.Name, fence.AnnotationFloor, fence.AnnotationDeleteToken), nothing
	case w.marksForAnother(token):
		// Else it would let anybody delete under a token that decided nothing.
		return deny(fence.FenceRemoved, "[%s] the write sets %s to %.24q and presents token %s; set it to the token that is presented, or take it off",
			lease.Name, fence.AnnotationDeleteToken, w.new.Annotations[fence.AnnotationDeleteToken], token), nothing
	}
	return allow(), nothing
}

// decideUnstamped judges a write that presents no token. same tells that the
// object stays under the guard of the same lease.
func decideUnstamped(w *write, f facts, lease fence.Lease, key types.NamespacedName, guarded, same bool) (verdict, question) {
	if w.request.Operation == admissionv1.Delete || pathOf(w.request) == pathEviction {
		// The holder has decided that this very object goes.
		if mark, err := fence.ParseToken(w.old.Annotations[fence.AnnotationDeleteToken]); err == nil && mark == fence.Recorded(w.old.Annotations) {
			return allow(), nothing
		}
	}
	if w.bypass != "" {
		may, asked := f.may[fence.VerbBypass]
		switch {
		case !asked:
			return verdict{}, mayBypass
		case may && !f.live:
			return verdict{}, readLive
		case may:
			return decideBypass(w, lease, same), nothing
		}
	}
	if !guarded {
		return decideGuarding(w, f, lease, key)
	}
	if !same {
		return deny(fence.FenceRemoved, "[%s] the write takes the label off or points it elsewhere; that needs the verb %q on the lease and a reason in the annotation %s",
			lease.Name, fence.VerbBypass, fence.AnnotationBypass), nothing
	}
	policy := fence.Policy{Live: f.live}
	if f.lease != nil {
		policy.Unstamped = unstampedAction(f.lease.Spec.UnstampedWrites, w.request)
	}
	v := fence.Judge(w.presented, fence.Recorded(w.old.Annotations), lease, policy)
	switch {
	case v.Outcome == fence.Denied && !f.live:
		return verdict{}, readLive
	case v.Outcome == fence.Denied:
		return verdict{reason: v.Reason, message: v.Message + unstampedHint(w, key, f.may)}, nothing
	case !w.fenceUntouched():
		return deny(fence.FenceRemoved, "[%s] a write that presents no token must leave the fence's annotations as they are", lease.Name), nothing
	case v.Outcome == fence.Warned:
		return verdict{allowed: true, reason: v.Reason, warning: v.Message}, nothing
	}
	return allow(), nothing
}

// unstampedHint says what is special about a path, a body or a reason.
func unstampedHint(w *write, key types.NamespacedName, may map[string]bool) string {
	var stored, sent map[string]string
	if w.old != nil && w.new != nil && w.request.SubResource == "" {
		stored, sent = w.old.Annotations, w.new.Annotations
	}
	reason := sent[fence.AnnotationBypass]
	switch allowed, asked := may[fence.VerbBypass]; {
	case w.bypass != "" && asked && !allowed:
		return fmt.Sprintf("; a reason was given, but its sender lacks the verb %q on fencedleases/%s in namespace %s", fence.VerbBypass, key.Name, key.Namespace)
	case w.request.SubResource != "":
		return "; this path keeps no annotation: impersonate yourself with the extra " + fence.ExtraToken
	case sent[fence.AnnotationToken] != stored[fence.AnnotationToken]:
		return "; the body sets " + fence.AnnotationToken + " and presents nothing: change " + fence.AnnotationWriteID + " too, or present the token by header"
	case reason != "":
		return "; the reason in " + fence.AnnotationBypass + " stood there before: a bypass gives another one"
	case sent[fence.AnnotationWriteID] != "":
		return "; a write-id that stands there already presents nothing: if this write sent it again, it may be committed already"
	}
	return ""
}

// mayPutOn judges whether the sender may put the lease's label on.
func mayPutOn(w *write, f facts, lease fence.Lease, key types.NamespacedName) (verdict, question) {
	may, asked := f.may[fence.VerbGuard]
	switch {
	case !f.live:
		return verdict{}, readLive
	case key.Namespace == "kube-system" || w.request.Namespace == "kube-system":
		return deny(fence.FenceRemoved, "[%s] nothing in kube-system can be guarded; take the label off", lease.Name), nothing
	case !lease.Found:
		return deny(fence.UnknownLease, "[%s] the lease does not exist, or does not allow namespace %q; create the FencedLease, add the namespace to its allowedNamespaces, or name the lease's own by the label %s",
			lease.Name, w.request.Namespace, fence.LabelLeaseNamespace), nothing
	case !asked:
		return verdict{}, mayGuard
	case !may:
		return deny(fence.Unstamped, "[%s] putting the label on needs the verb %q on fencedleases/%s in namespace %s, or, on a new object, the lease's current token",
			lease.Name, fence.VerbGuard, key.Name, key.Namespace), nothing
	}
	return inMarked(w, f, lease, key)
}

// inMarked judges whether what comes under guard is where the fence sees its
// /scale and evictions. The operator marks the lease's own namespace itself.
func inMarked(w *write, f facts, lease fence.Lease, key types.NamespacedName) (verdict, question) {
	switch {
	case w.request.Namespace == "" || w.request.Namespace == key.Namespace:
	case f.marked == nil:
		return verdict{}, readMark
	case !*f.marked:
		return deny(fence.UnknownLease, "[%s] namespace %s is not marked as one where leases are used; label it %s=true",
			lease.Name, w.request.Namespace, fence.LabelNamespaceMark), nothing
	}
	return allow(), nothing
}

// decideGuarding judges the write that presents no token and puts the label on.
func decideGuarding(w *write, f facts, lease fence.Lease, key types.NamespacedName) (verdict, question) {
	if v, q := mayPutOn(w, f, lease, key); q != nothing || !v.allowed {
		return v, q
	}
	for _, name := range fence.AnnotationsOfFence {
		if _, ok := w.new.Annotations[name]; !ok {
			continue
		}
		token, err := fence.ParseToken(w.new.Annotations[name])
		if name == fence.AnnotationWriteID || name == fence.AnnotationToken && err == nil && token == lease.Current {
			continue
		}
		return deny(fence.FenceRemoved, "[%s] an object that comes under guard must not bring %s along, save a current token; take it off", lease.Name, name), nothing
	}
	return allow(), nothing
}

// decideBypass judges a deliberate write past the fence. It still leaves the
// record alone, save where no authority issued what is recorded.
func decideBypass(w *write, lease fence.Lease, same bool) verdict {
	v := verdict{allowed: true, bypassed: true, warning: fmt.Sprintf("[%s] bypassed: %s", lease.Name, w.bypass)}
	if w.old == nil || w.new == nil || !same || w.fenceUntouched() {
		return v
	}
	before, after := fence.Recorded(w.old.Annotations), fence.Recorded(w.new.Annotations)
	if before > lease.Current && after <= lease.Current {
		return v
	}
	return deny(fence.FenceRemoved, "[%s] a bypass must leave the fence's annotations as they are: recorded %s, current %s, sent %s; only a record above the current token may be lowered",
		lease.Name, before, lease.Current, after)
}

// decideBinding refuses to carry our label or annotations onto a Pod, where
// the fence would never see them come.
func decideBinding(w *write) verdict {
	if w.new == nil {
		return allow()
	}
	for _, name := range append([]string{fence.LabelLease, fence.LabelLeaseNamespace}, fence.AnnotationsOfFence...) {
		_, label := w.new.Labels[name]
		_, annotation := w.new.Annotations[name]
		if label || annotation {
			return deny(fence.FenceRemoved, "[%s] a Binding must not carry %s onto its Pod; take it off", w.request.Namespace, name)
		}
	}
	return allow()
}

// leaseFacts gives the lease as the rule sees it. One that does not allow the
// object's namespace is as good as none.
func leaseFacts(key types.NamespacedName, f facts, namespace string) fence.Lease {
	l := fence.Lease{Name: key.String()}
	if f.lease == nil || !f.lease.Allows(namespace) {
		l.NotAllowed = f.lease != nil
		return l
	}
	spec, status := f.lease.Spec, f.lease.Status
	l.Found = true
	l.Current, l.Min = fence.Token(status.Token), fence.Token(spec.MinToken)
	l.BindUser = spec.HolderBinding == v1alpha1.HolderBindingUser
	l.DenyLapsed = spec.LapsedWrites == v1alpha1.LapsedWritesDeny
	l.HeaderOnly = spec.Presentation == v1alpha1.PresentationHeader
	if h := status.Holder; h != nil {
		l.Held, l.Holder = true, h.Identity
		if h.User != nil {
			l.HolderUser, l.HolderPodUID = h.User.Username, h.User.PodUID
		}
	}
	return l
}

// reserved is the token below which an object of a sealed kind may not come
// under guard while a hand-over seals, 0 where none is.
func reserved(lease *v1alpha1.FencedLease, r *admissionv1.AdmissionRequest) fence.Token {
	if lease == nil || lease.Spec.Seal == nil {
		return 0
	}
	for _, sealed := range lease.Spec.Seal.Resources {
		if sealed.Group == r.Resource.Group && sealed.Resource == r.Resource.Resource {
			token, err := fence.ParseToken(lease.Annotations[fence.AnnotationLastToken])
			if err == nil && token > fence.Token(lease.Status.Token) {
				return token
			}
		}
	}
	return 0
}

// unstampedAction is what the lease says of this sender's unstamped writes.
func unstampedAction(u *v1alpha1.UnstampedWrites, r *admissionv1.AdmissionRequest) fence.Action {
	if u == nil {
		return fence.Deny
	}
	for _, e := range u.Except {
		account := e.ServiceAccount
		if e.User != "" && e.User == r.UserInfo.Username ||
			e.Group != "" && slices.Contains(r.UserInfo.Groups, e.Group) ||
			account != nil && r.UserInfo.Username == "system:serviceaccount:"+account.Namespace+":"+account.Name {
			return fence.Action(e.Action)
		}
	}
	return fence.Action(u.Default)
}
