// Package webhooks is the admission fence: it rejects a write to a guarded
// object that presents no token, or one that does not count.
//
// Tokens of committed writes to one object never go down: the API server runs
// admission again inside its own compare-and-swap, and the recorded token is
// part of what it compares. Not guaranteed: that a write which was judged just
// before a newer token was issued does not commit on an object that the new
// holder has not written yet (a sealed hand-over guarantees that too), nor
// anything about requests that admission does not see, such as exec.
package webhooks

import (
	"net/http"

	"go.opentelemetry.io/otel/trace"
	"k8s.io/component-base/tracing"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"
)

// +kubebuilder:rbac:groups=authorization.k8s.io,resources=subjectaccessreviews,verbs=create
// Events on leases, of bypasses and rejections.
// +kubebuilder:rbac:groups=events.k8s.io,resources=events,verbs=create;patch
// The objects that /scale and /eviction change; another kind with a scale
// subresource needs get on it, granted by whoever installs the kind.
// +kubebuilder:rbac:groups=apps,resources=deployments;replicasets;statefulsets,verbs=get
// +kubebuilder:rbac:groups="",resources=pods;replicationcontrollers,verbs=get

// Options are what the webhook needs besides the manager.
type Options struct {
	// OperatorNamespace is the operator's own.
	OperatorNamespace string
	// ExemptUsers are principals that the installation exempts besides
	// ExemptUsers of this package, and JudgedUsers those of them that it does
	// not.
	ExemptUsers, JudgedUsers []string
	// Tracing traces requests to the webhook. Nil means that nothing does.
	Tracing trace.TracerProvider
	// Clock is what latencies are measured by. Nil means the real one.
	Clock clock.PassiveClock
}

// SetupWithManager adds the webhook to a manager.
func SetupWithManager(mgr ctrl.Manager, o Options) error {
	if o.Clock == nil {
		o.Clock = clock.RealClock{}
	}
	certificate.follow(mgr.GetWebhookServer())
	recorder := mgr.GetEventRecorder("fencedlease-webhook")
	var hook http.Handler = &admission.Webhook{Handler: &handler{
		client: mgr.GetClient(), live: mgr.GetAPIReader(), mapper: mgr.GetRESTMapper(),
		events: recorder, clock: o.Clock, exempt: Exempt(o.OperatorNamespace, o.ExemptUsers, o.JudgedUsers), rejections: newRejections(recorder, o.Clock),
	}}
	if o.Tracing != nil {
		hook = tracing.WithTracing(hook, o.Tracing, path)
	}
	mgr.GetWebhookServer().Register(path, hook)
	return nil
}
