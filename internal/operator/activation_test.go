package operator

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	testclock "k8s.io/utils/clock/testing"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"github.com/fencedlease/fencedlease/webhooks"
	"github.com/fencedlease/fencedlease/webhooks/policy"
)

// authorityOf is a PEM block that stands for an authority.
func authorityOf(letter string) []byte {
	return []byte("-----BEGIN CERTIFICATE-----\n" + letter + letter + letter + letter + "\n-----END CERTIFICATE-----\n")
}

func TestWithAuthority(t *testing.T) {
	a, b, c := authorityOf("A"), authorityOf("B"), authorityOf("C")
	tests := map[string]struct{ bundle, authority, want []byte }{
		"the first":                       {authority: a, want: a},
		"the same":                        {bundle: a, authority: a, want: a},
		"a new one beside the former":     {bundle: a, authority: b, want: append(append([]byte(nil), b...), a...)},
		"the same beside the former":      {bundle: append(append([]byte(nil), b...), a...), authority: b, want: append(append([]byte(nil), b...), a...)},
		"the one before the former goes":  {bundle: append(append([]byte(nil), b...), a...), authority: c, want: append(append([]byte(nil), c...), b...)},
		"none yet leaves what is trusted": {bundle: a, want: a},
		"a bundle that is no PEM":         {bundle: []byte("x"), authority: a, want: a},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			if got := withAuthority(tt.bundle, tt.authority); !bytes.Equal(got, tt.want) {
				t.Errorf("got\n%s\nwant\n%s", got, tt.want)
			}
		})
	}
}

func TestActivation(t *testing.T) {
	configuration := &admissionv1.ValidatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: webhooks.ConfigurationName}}
	c := fake.NewClientBuilder().WithScheme(Scheme()).WithObjects(configuration).Build()
	o := Defaults()
	o.Namespace, o.ExemptUsers = "elsewhere", []string{"system:serviceaccount:flux-system:flux"}
	hooks, err := o.shippedHooks("webhook")
	if err != nil {
		t.Fatal(err)
	}
	spared, err := o.shippedHooks("webhook-with-policy")
	if err != nil {
		t.Fatal(err)
	}
	var authority []byte
	clock := testclock.NewFakePassiveClock(time.Unix(0, 0))
	a := &activation{
		client: c, live: c, hooks: hooks, spared: spared, clock: clock, service: types.NamespacedName{Namespace: o.Namespace, Name: o.ServiceName},
		authority: func(context.Context) ([]byte, error) { return authority, nil },
	}
	reconcile := func() *admissionv1.ValidatingWebhookConfiguration {
		t.Helper()
		result, err := a.Reconcile(t.Context(), ctrl.Request{NamespacedName: types.NamespacedName{Name: webhooks.ConfigurationName}})
		if err != nil || result.RequeueAfter == 0 {
			t.Fatalf("%v, %v", result, err)
		}
		now := &admissionv1.ValidatingWebhookConfiguration{}
		if err := c.Get(t.Context(), client.ObjectKeyFromObject(configuration), now); err != nil {
			t.Fatal(err)
		}
		return now
	}
	if now := reconcile(); len(now.Webhooks) != 0 {
		t.Fatal("active without a certificate and a replica")
	}
	authority = authorityOf("A")
	if now := reconcile(); len(now.Webhooks) != 0 {
		t.Fatal("active without a replica")
	}
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: o.Namespace, Name: "s", Labels: map[string]string{discoveryv1.LabelServiceName: o.ServiceName}},
		Endpoints:  []discoveryv1.Endpoint{{Conditions: discoveryv1.EndpointConditions{Ready: new(false)}}},
	}
	if err := c.Create(t.Context(), slice); err != nil {
		t.Fatal(err)
	}
	if now := reconcile(); len(now.Webhooks) != 0 {
		t.Fatal("active without a ready replica")
	}
	slice.Endpoints[0].Conditions.Ready = new(true)
	if err := c.Update(t.Context(), slice); err != nil {
		t.Fatal(err)
	}
	now := reconcile()
	if len(now.Webhooks) != 3 {
		t.Fatalf("%d webhooks, want 3", len(now.Webhooks))
	}
	for _, hook := range now.Webhooks {
		if !bytes.Equal(hook.ClientConfig.CABundle, authority) || hook.ClientConfig.Service.Namespace != o.Namespace {
			t.Errorf("%s: %+v", hook.Name, hook.ClientConfig)
		}
		exempt := hook.MatchConditions[0]
		for _, condition := range hook.MatchConditions {
			if condition.Name == "not-exempt" {
				exempt = condition
			}
		}
		for _, user := range []string{"system:serviceaccount:elsewhere:fencedlease", "system:serviceaccount:flux-system:flux"} {
			if !bytes.Contains([]byte(exempt.Expression), []byte(`"`+user+`"`)) {
				t.Errorf("%s does not exempt %s: %s", hook.Name, user, exempt.Expression)
			}
		}
	}
	version := now.ResourceVersion
	if now := reconcile(); now.ResourceVersion != version {
		t.Error("an unchanged configuration was written again")
	}
	// Somebody weakens it, and all replicas go away.
	now.Webhooks[0].FailurePolicy = new(admissionv1.Ignore)
	if err := c.Update(t.Context(), now); err != nil {
		t.Fatal(err)
	}
	if err := c.Delete(t.Context(), slice); err != nil {
		t.Fatal(err)
	}
	if now := reconcile(); *now.Webhooks[0].FailurePolicy != admissionv1.Fail {
		t.Error("a weakened configuration was left so")
	}
	// Without an authority the configuration is another's to keep.
	authority = nil
	now = reconcile()
	now.Webhooks = now.Webhooks[:1]
	if err := c.Update(t.Context(), now); err != nil {
		t.Fatal(err)
	}
	if now := reconcile(); len(now.Webhooks) != 1 {
		t.Error("a configuration was written without an authority")
	}
	authority = authorityOf("A")
	// The policies come, and go.
	spares := func() bool { return spares(reconcile()) }
	binding := &admissionv1.ValidatingAdmissionPolicyBinding{
		ObjectMeta: metav1.ObjectMeta{Name: policy.FenceName},
		Spec:       admissionv1.ValidatingAdmissionPolicyBindingSpec{ValidationActions: []admissionv1.ValidationAction{admissionv1.Deny}},
	}
	if spares() {
		t.Error("the webhook is spared what no policy decides")
	}
	if err := c.Create(t.Context(), binding); err != nil {
		t.Fatal(err)
	}
	if spares() {
		t.Error("the webhook is spared what no API server had time to take up")
	}
	clock.SetTime(time.Unix(0, 0).Add(policyDelay - 1))
	if spares() {
		t.Error("the webhook is spared early")
	}
	clock.SetTime(time.Unix(0, 0).Add(policyDelay))
	if !spares() {
		t.Error("the webhook is asked what the policy decides")
	}
	// Another replica, of another version, takes the lead.
	a.since = clock.Now()
	for i := range a.spared {
		a.spared[i].TimeoutSeconds = new(int32(2))
	}
	if !spares() {
		t.Error("the webhook is asked again what the policy decides")
	}
	binding.Spec.ValidationActions = []admissionv1.ValidationAction{admissionv1.Warn}
	if err := c.Update(t.Context(), binding); err != nil {
		t.Fatal(err)
	}
	if spares() {
		t.Error("the webhook is spared what the policy only warns of")
	}
	binding.Spec.ValidationActions = []admissionv1.ValidationAction{admissionv1.Deny}
	if err := c.Update(t.Context(), binding); err != nil {
		t.Fatal(err)
	}
	if spares() {
		t.Error("the webhook is spared at once by a policy that came back")
	}
	if err := c.Delete(t.Context(), reconcile()); err != nil {
		t.Fatal(err)
	}
	if result, err := a.Reconcile(t.Context(), ctrl.Request{NamespacedName: types.NamespacedName{Name: webhooks.ConfigurationName}}); err != nil || result.RequeueAfter != 0 {
		t.Errorf("without a configuration: %v, %v", result, err)
	}
}

// TestNewAuthorityIsTrustedFirst: what a new authority signed is served only
// once the API servers had time to learn that they trust it.
func TestNewAuthorityIsTrustedFirst(t *testing.T) {
	pair := func(letter string) map[string][]byte {
		return map[string][]byte{authorityFile: authorityOf(letter), certificateFile: []byte("certificate " + letter), keyFile: []byte("key " + letter)}
	}
	key := types.NamespacedName{Namespace: "fencedlease-system", Name: "certificate"}
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Name: key.Name}}
	configuration := &admissionv1.ValidatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: webhooks.ConfigurationName}}
	c := fake.NewClientBuilder().WithScheme(Scheme()).WithObjects(secret, configuration).Build()
	clock := testclock.NewFakePassiveClock(time.Unix(0, 0))
	files := &certificateFiles{client: c, secret: key, dir: t.TempDir(), clock: clock}
	set := func(o client.Object) {
		t.Helper()
		if err := c.Update(t.Context(), o); err != nil {
			t.Fatal(err)
		}
	}
	serves := func(want string) time.Duration {
		t.Helper()
		result, err := files.Reconcile(t.Context(), ctrl.Request{})
		if err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(filepath.Join(files.dir, certificateFile))
		if err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		if string(got) != want {
			t.Fatalf("serves %q, want %q", got, want)
		}
		return result.RequeueAfter
	}
	serves("")
	secret.Data = pair("A")
	set(secret)
	serves("certificate A")

	configuration.Webhooks = []admissionv1.ValidatingWebhook{{Name: "w", ClientConfig: admissionv1.WebhookClientConfig{CABundle: authorityOf("A")}}}
	set(configuration)
	secret.Data[certificateFile] = []byte("certificate A2")
	set(secret)
	serves("certificate A2") // by the same authority

	secret.Data = pair("B")
	set(secret)
	serves("certificate A2") // nobody trusts it yet
	configuration.Webhooks[0].ClientConfig.CABundle = withAuthority(authorityOf("A"), authorityOf("B"))
	set(configuration)
	if wait := serves("certificate A2"); wait != trustDelay {
		t.Errorf("looks again after %s", wait)
	}
	clock.SetTime(time.Unix(0, 0).Add(trustDelay - 1))
	serves("certificate A2")
	clock.SetTime(time.Unix(0, 0).Add(trustDelay))
	serves("certificate B")
}
