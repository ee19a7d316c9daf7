package operator

import (
	"bytes"
	"context"
	"encoding/pem"
	"fmt"
	"path"
	"slices"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/yaml"

	"github.com/fencedlease/fencedlease/config"
	"github.com/fencedlease/fencedlease/internal/controlplane"
	"github.com/fencedlease/fencedlease/webhooks"
	"github.com/fencedlease/fencedlease/webhooks/policy"
)

// +kubebuilder:rbac:groups=discovery.k8s.io,namespace=fencedlease-system,resources=endpointslices,verbs=list

// activation writes the webhook's configuration, which is installed without a
// webhook in it: until a replica serves, nothing waits for one. It also
// restores what somebody changed, and keeps the authorities that the API
// server trusts.
type activation struct {
	client  client.Client
	live    client.Reader
	service types.NamespacedName // the webhook's
	// hooks are what the configuration is to hold, and spared what it is to
	// hold while the fence policy decides the more frequent writes.
	hooks, spared []admissionv1.ValidatingWebhook
	clock         clock.PassiveClock
	// since is when the fence policy's binding was first seen, zero while there
	// is none.
	since time.Time
	// authority gives what signed the certificate that is served, or is to be.
	authority func(context.Context) ([]byte, error)
}

const (
	// servedCheck is how often to look whether the webhook is served.
	servedCheck = time.Second
	// authorityCheck is how often to look at a mounted authority, of which no
	// watch tells.
	authorityCheck = 10 * time.Second
	// policyDelay is how long the API servers have to take up a policy, which
	// they look for once a second, before the webhook leaves anything to it.
	policyDelay = 5 * time.Second
)

func (a *activation) setup(mgr ctrl.Manager) error {
	always := func(context.Context, client.Object) []reconcile.Request {
		return []reconcile.Request{{NamespacedName: types.NamespacedName{Name: webhooks.ConfigurationName}}}
	}
	return ctrl.NewControllerManagedBy(mgr).Named("activation").
		For(&admissionv1.ValidatingWebhookConfiguration{}).
		Watches(&admissionv1.ValidatingAdmissionPolicyBinding{}, handler.EnqueueRequestsFromMapFunc(always)).
		Watches(&corev1.Secret{}, handler.EnqueueRequestsFromMapFunc(always)).
		Complete(a)
}

// Reconcile implements reconcile.Reconciler.
func (a *activation) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	configuration := &admissionv1.ValidatingWebhookConfiguration{}
	if err := a.client.Get(ctx, req.NamespacedName, configuration); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err) // the layer is not installed, or is being taken away
	}
	authority, err := a.authority(ctx)
	if err != nil {
		return ctrl.Result{}, err
	}
	first := len(configuration.Webhooks) == 0
	if len(authority) == 0 {
		// Not made yet, or whoever mounts the certificate keeps the configuration.
		return ctrl.Result{RequeueAfter: servedCheck}, nil
	}
	if first {
		served, err := a.served(ctx)
		if err != nil {
			return ctrl.Result{}, err
		}
		if !served {
			return ctrl.Result{RequeueAfter: servedCheck}, nil
		}
	}
	policies, err := a.policies(ctx)
	if err != nil {
		return ctrl.Result{}, err
	}
	again := authorityCheck
	want := trusting(a.hooks, configuration.Webhooks, authority)
	if policies {
		// Where it is spared already the policies have been there before, under
		// another leader or version.
		if wait := policyDelay - a.clock.Since(a.since); wait <= 0 || spares(configuration) {
			want = trusting(a.spared, configuration.Webhooks, authority)
		} else {
			again = wait
		}
	}
	if equality.Semantic.DeepEqual(want, configuration.Webhooks) {
		return ctrl.Result{RequeueAfter: again}, nil
	}
	configuration.Webhooks = want
	if err := a.client.Update(ctx, configuration); err != nil {
		return ctrl.Result{}, fmt.Errorf("write the webhook's configuration: %w", err)
	}
	if first {
		ctrl.LoggerFrom(ctx).Info("Activated the webhook")
	}
	return ctrl.Result{RequeueAfter: again}, nil
}

// spares tells whether a configuration leaves to the policies what they decide.
func spares(configuration *admissionv1.ValidatingWebhookConfiguration) bool {
	spare := policy.Spare().Name
	return slices.ContainsFunc(configuration.Webhooks, func(w admissionv1.ValidatingWebhook) bool {
		return slices.ContainsFunc(w.MatchConditions, func(m admissionv1.MatchCondition) bool { return m.Name == spare })
	})
}

// policies tells whether the fence policy is installed, and keeps since when.
func (a *activation) policies(ctx context.Context) (bool, error) {
	binding := &admissionv1.ValidatingAdmissionPolicyBinding{}
	err := a.client.Get(ctx, client.ObjectKey{Name: policy.FenceName}, binding)
	if client.IgnoreNotFound(err) != nil {
		return false, fmt.Errorf("look whether the fence policy is installed: %w", err)
	}
	installed := err == nil && binding.DeletionTimestamp.IsZero() && slices.Contains(binding.Spec.ValidationActions, admissionv1.Deny)
	if !installed {
		a.since = time.Time{}
	} else if a.since.IsZero() {
		a.since = a.clock.Now()
	}
	return installed, nil
}

// trusting gives the webhooks with the authorities that the API server is to
// trust.
func trusting(hooks, now []admissionv1.ValidatingWebhook, authority []byte) []admissionv1.ValidatingWebhook {
	var trusted []byte
	if len(now) > 0 {
		trusted = now[0].ClientConfig.CABundle
	}
	want := make([]admissionv1.ValidatingWebhook, len(hooks))
	for i := range hooks {
		hooks[i].DeepCopyInto(&want[i])
		want[i].ClientConfig.CABundle = withAuthority(trusted, authority)
	}
	return want
}

// withAuthority gives the bundle that trusts an authority besides the one that
// it trusted last: while an authority is replaced, some replicas serve what the
// former one signed.
func withAuthority(bundle, authority []byte) []byte {
	authority = bytes.TrimSpace(authority)
	if len(authority) == 0 {
		return bundle
	}
	former, rest := pem.Decode(bundle)
	for former != nil {
		if text := bytes.TrimSpace(pem.EncodeToMemory(former)); !bytes.Equal(text, authority) {
			return append(append(append([]byte(nil), authority...), '\n'), append(text, '\n')...)
		}
		former, rest = pem.Decode(rest)
	}
	return append(append([]byte(nil), authority...), '\n')
}

// served tells whether the API server would find a replica behind the Service.
func (a *activation) served(ctx context.Context) (bool, error) {
	behind := &discoveryv1.EndpointSliceList{}
	if err := a.live.List(ctx, behind, client.InNamespace(a.service.Namespace), client.MatchingLabels{discoveryv1.LabelServiceName: a.service.Name}); err != nil {
		return false, fmt.Errorf("look whether the webhook is served: %w", err)
	}
	for _, slice := range behind.Items {
		for _, endpoint := range slice.Endpoints {
			if endpoint.Conditions.Ready == nil || *endpoint.Conditions.Ready {
				return true, nil
			}
		}
	}
	return false, nil
}

// shippedHooks gives the webhooks of a shipped configuration as this
// installation needs them.
func (o *Options) shippedHooks(folder string) ([]admissionv1.ValidatingWebhook, error) {
	data, err := config.FS.ReadFile(path.Join(folder, "manifests.yaml"))
	if err != nil {
		return nil, err
	}
	data = bytes.ReplaceAll(data, []byte(controlplane.OperatorNamespace), []byte(o.Namespace))
	configuration := &admissionv1.ValidatingWebhookConfiguration{}
	if err := yaml.UnmarshalStrict(data, configuration); err != nil {
		return nil, fmt.Errorf("config/%s/manifests.yaml: %w", folder, err)
	}
	notExempt := policy.NotExempt(policy.Options{OperatorNamespace: o.Namespace, ExemptUsers: webhooks.Exempt(o.Namespace, o.ExemptUsers, o.JudgedUsers), ExemptGroups: webhooks.ExemptGroups})
	for i := range configuration.Webhooks {
		hook := &configuration.Webhooks[i]
		hook.ClientConfig.Service.Name = o.ServiceName
		// What the API server would default, so that the two can be compared.
		hook.ClientConfig.Service.Port = new(int32(443))
		if hook.ObjectSelector == nil {
			hook.ObjectSelector = &metav1.LabelSelector{}
		}
		for j := range hook.Rules {
			hook.Rules[j].Scope = new(admissionv1.AllScopes)
		}
		for j := range hook.MatchConditions {
			if hook.MatchConditions[j].Name == notExempt.Name {
				hook.MatchConditions[j] = notExempt
			}
		}
	}
	return configuration.Webhooks, nil
}

// AdmissionObjects names the cluster's objects by which the fence is asked, in
// the order in which they are taken away.
func AdmissionObjects() []client.Object {
	objects := []client.Object{&admissionv1.ValidatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: webhooks.ConfigurationName}}}
	var policies []client.Object
	o := policy.Options{OperatorNamespace: controlplane.OperatorNamespace}
	for _, object := range slices.Concat(policy.Layer(o), policy.Alone(o), policy.Own(o)) {
		switch object := object.(type) {
		case *admissionv1.ValidatingAdmissionPolicyBinding:
			objects = append(objects, &admissionv1.ValidatingAdmissionPolicyBinding{ObjectMeta: metav1.ObjectMeta{Name: object.Name}})
		case *admissionv1.ValidatingAdmissionPolicy:
			policies = append(policies, &admissionv1.ValidatingAdmissionPolicy{ObjectMeta: metav1.ObjectMeta{Name: object.Name}})
		}
	}
	return append(objects, policies...)
}
