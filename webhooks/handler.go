package webhooks

import (
	"cmp"
	"context"
	"fmt"
	"net/http"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
	admissionv1 "k8s.io/api/admission/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	logf "sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
)

// eventBypassed is the reason of the event of a bypass.
const eventBypassed = "Bypassed"

// handler answers the API server. It gathers the facts that decide asks for:
// from the cache first, live where the cache cannot be trusted. A lagging
// cache can let a token pass that was superseded a moment ago, never one below
// the object's record: the API server judges again whenever the object moved.
type handler struct {
	// client reads from the cache and reviews access; live reads past it.
	client client.Client
	live   client.Reader
	mapper meta.RESTMapper
	events events.EventRecorder
	clock  clock.PassiveClock
	exempt []string
	// rejections are told of by events too.
	rejections *rejections
}

// Handle implements admission.Handler.
func (h *handler) Handle(ctx context.Context, req admission.Request) admission.Response {
	start := h.clock.Now()
	r := &req.AdmissionRequest
	v, err := h.judge(ctx, r)
	latency.Observe(h.clock.Since(start).Seconds())
	log := logf.FromContext(ctx).WithValues("lease", v.lease, "token", int64(v.token), "path", pathOf(r))
	if err != nil {
		decisions.WithLabelValues(decisionFailed, "", pathOf(r)).Inc()
		log.Error(err, "Failed to judge a write", "reason", cmp.Or(apierrors.ReasonForError(err), metav1.StatusReasonInternalError))
		// What cannot be judged does not pass.
		return admission.Errored(http.StatusInternalServerError, fmt.Errorf("the fence could not judge the write and rejects it: %w; try again", err))
	}
	decision := decisionOf(v)
	if span := trace.SpanFromContext(ctx); span.IsRecording() {
		span.SetAttributes(
			attribute.String("fencedlease.lease", v.lease), attribute.Int64("fencedlease.token", int64(v.token)),
			attribute.String("fencedlease.decision", decision), attribute.String("fencedlease.reason", string(v.reason)))
	}
	decisions.WithLabelValues(decision, string(v.reason), pathOf(r)).Inc()
	switch decision {
	case decisionDenied:
		log.Info("Rejected a write", "reason", v.reason)
	case decisionBypassed:
		log.Info("A write bypassed the fence", "reason", eventBypassed, "warning", v.warning)
	case decisionWarned:
		log.Info("Let a write pass that Deny would refuse", "reason", v.reason)
		resource := schema.GroupResource{Group: r.Resource.Group, Resource: r.Resource.Resource}
		unstampedWarned.WithLabelValues(resource.String(), senderOf(r.UserInfo.Username)).Inc()
	}
	return response(v, r)
}

func decisionOf(v verdict) string {
	switch {
	case !v.allowed:
		return decisionDenied
	case v.bypassed:
		return decisionBypassed
	case v.reason != "":
		return decisionWarned
	}
	return decisionAllowed
}

// response is a verdict as the API server and its audit log get it.
func response(v verdict, r *admissionv1.AdmissionRequest) admission.Response {
	resp := admission.Response{AdmissionResponse: admissionv1.AdmissionResponse{
		UID: r.UID, Allowed: v.allowed, AuditAnnotations: map[string]string{"decision": decisionOf(v)},
	}}
	if v.warning != "" {
		resp.Warnings = []string{v.warning}
	}
	if v.token > 0 {
		resp.AuditAnnotations["token"] = v.token.String()
	}
	if v.allowed {
		resp.Result = &metav1.Status{Code: http.StatusOK}
		return resp
	}
	field := "metadata.annotations[" + fence.AnnotationToken + "]"
	switch v.reason {
	case fence.FenceRemoved, fence.UnknownLease:
		field = "metadata.labels[" + fence.LabelLease + "]"
	}
	status := metav1.StatusReasonForbidden
	if v.code() == http.StatusUnprocessableEntity {
		status = metav1.StatusReasonInvalid
	}
	resp.Result = &metav1.Status{
		Status: metav1.StatusFailure, Code: v.code(), Reason: status, Message: v.message,
		Details: &metav1.StatusDetails{
			Name: r.Name, Group: r.Kind.Group, Kind: r.Kind.Kind,
			Causes: []metav1.StatusCause{{Type: metav1.CauseType(v.reason), Message: v.message, Field: field}},
		},
	}
	return resp
}

// judge asks decide, and answers its questions until it has a verdict. On an
// error the verdict tells no more than the lease and the token.
func (h *handler) judge(ctx context.Context, r *admissionv1.AdmissionRequest) (verdict, error) {
	if exempt(r.UserInfo, h.exempt) {
		return allow(), nil
	}
	w, err := readRequest(r)
	if err != nil {
		return verdict{}, err
	}
	if labelless(pathOf(r)) {
		if w.old, err = h.parent(ctx, r); err != nil {
			return verdict{}, err
		}
	}
	key, guarded := leaseOf(w.old, r.Namespace)
	if !guarded {
		key, guarded = leaseOf(w.new, r.Namespace)
	}
	token, _ := fence.ParseToken(w.presented.Text) // 0 where there is none
	known := verdict{token: token}
	f := facts{may: map[string]bool{}}
	if guarded {
		known.lease = key.String()
		if f.lease, err = h.lease(ctx, h.client, key); err != nil {
			return known, err
		}
	}
	for {
		v, q := decide(w, f)
		switch q {
		case nothing:
			if v.bypassed {
				h.tell(w, f.lease, r)
			}
			v.lease, v.token = known.lease, known.token
			h.rejections.tell(v, f.lease, w)
			return v, nil
		case readLive:
			f.lease, err = h.lease(ctx, h.live, key)
			f.live = true
		case readMark:
			f.marked, err = h.marked(ctx, r.Namespace)
		case mayGuard:
			f.may[fence.VerbGuard], err = h.may(ctx, r.UserInfo, fence.VerbGuard, key)
		case mayBypass:
			f.may[fence.VerbBypass], err = h.may(ctx, r.UserInfo, fence.VerbBypass, key)
		}
		if err != nil {
			return known, err
		}
	}
}

func (h *handler) lease(ctx context.Context, from client.Reader, key types.NamespacedName) (*v1alpha1.FencedLease, error) {
	if key.Name == "" || key.Namespace == "" {
		return nil, nil //nolint:nilnil // no lease can be there
	}
	lease := &v1alpha1.FencedLease{}
	if err := from.Get(ctx, key, lease); apierrors.IsNotFound(err) {
		return nil, nil //nolint:nilnil // no lease is an answer
	} else if err != nil {
		return nil, fmt.Errorf("read lease [%s]: %w", key, err)
	}
	return lease, nil
}

func (h *handler) marked(ctx context.Context, namespace string) (*bool, error) {
	ns := &corev1.Namespace{}
	if err := h.live.Get(ctx, client.ObjectKey{Name: namespace}, ns); err != nil {
		return nil, fmt.Errorf("read namespace %s: %w", namespace, err)
	}
	return new(ns.Labels[fence.LabelNamespaceMark] == "true"), nil
}

// parent reads the object that a label-less subresource changes. The read is
// never older than what the API server judges on: had the object moved since,
// the write would not commit without another verdict.
func (h *handler) parent(ctx context.Context, r *admissionv1.AdmissionRequest) (*metav1.PartialObjectMetadata, error) {
	kind, err := h.mapper.KindFor(schema.GroupVersionResource{Group: r.Resource.Group, Version: r.Resource.Version, Resource: r.Resource.Resource})
	if err != nil {
		return nil, fmt.Errorf("find the kind of %s: %w", r.Resource.String(), err)
	}
	o := &metav1.PartialObjectMetadata{}
	o.SetGroupVersionKind(kind)
	switch err := h.live.Get(ctx, types.NamespacedName{Namespace: r.Namespace, Name: r.Name}, o); {
	case apierrors.IsNotFound(err):
		return nil, nil //nolint:nilnil // there is nothing that the write could change
	case apierrors.IsForbidden(err) && r.Namespace == "" && len(r.UserInfo.Extra[fence.ExtraToken]) == 0:
		// No mark keeps those of the cluster that nothing guards out of reach: a
		// kind that is to be guarded is granted. Who presents a token takes it for
		// guarded.
		return nil, nil //nolint:nilnil // as good as nothing
	case err != nil:
		return nil, fmt.Errorf("read %s %s/%s: %w", r.Resource.Resource, r.Namespace, r.Name, err)
	}
	return o, nil
}

// may asks the API server whether the sender has a verb on a lease.
func (h *handler) may(ctx context.Context, user authenticationv1.UserInfo, verb string, key types.NamespacedName) (bool, error) {
	extra := make(map[string]authorizationv1.ExtraValue, len(user.Extra))
	for k, v := range user.Extra {
		extra[k] = authorizationv1.ExtraValue(v)
	}
	review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User: user.Username, UID: user.UID, Groups: user.Groups, Extra: extra,
		ResourceAttributes: &authorizationv1.ResourceAttributes{
			Group: fence.Group, Resource: "fencedleases", Namespace: key.Namespace, Name: key.Name, Verb: verb,
		},
	}}
	if err := h.client.Create(ctx, review); err != nil {
		return false, fmt.Errorf("review access of %q: %w", user.Username, err)
	}
	return review.Status.Allowed, nil
}

// tell leaves a trace of a bypass where people look; a dry run leaves none.
func (h *handler) tell(w *write, lease *v1alpha1.FencedLease, r *admissionv1.AdmissionRequest) {
	if lease == nil || r.DryRun != nil && *r.DryRun {
		return
	}
	h.events.Eventf(lease, nil, corev1.EventTypeWarning, eventBypassed, "Bypass", "%q bypassed the fence on %s %s/%s: %s",
		r.UserInfo.Username, r.Resource.Resource, r.Namespace, r.Name, w.bypass)
}
