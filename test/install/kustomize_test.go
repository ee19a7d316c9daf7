// Package install tests what people install, on a bare real API server.
package install

import (
	"crypto/tls"
	"crypto/x509"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/fencedlease/fencedlease/internal/controlplane"
	"github.com/fencedlease/fencedlease/internal/operator"
	"github.com/fencedlease/fencedlease/test/env"
	"github.com/fencedlease/fencedlease/webhooks"
)

// cluster is an API server with nothing of ours in it.
func cluster(t *testing.T) (*rest.Config, *env.Environment) {
	t.Helper()
	e := &env.Environment{Scheme: env.Scheme()}
	assets, err := controlplane.Assets()
	if err != nil {
		t.Fatal(err)
	}
	bare := &envtest.Environment{BinaryAssetsDirectory: assets}
	cfg, err := bare.Start()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = bare.Stop() })
	e.ControlPlane = &controlplane.ControlPlane{Config: cfg, Assets: assets}
	if e.Admin, err = client.NewWithWatch(cfg, client.Options{Scheme: e.Scheme}); err != nil {
		t.Fatal(err)
	}
	return cfg, e
}

// TestApplyDefault installs config/default with the real kubectl, starts the
// operator with the arguments of its Deployment, as its own account with just
// the permissions that were installed, and waits until it is ready: with
// certificates that it made itself, served, and known to the API server.
func TestApplyDefault(t *testing.T) {
	cfg, e := cluster(t)
	// The CRDs have to be there before objects of their kinds, so once more.
	for _, again := range []bool{false, true} {
		out, errOut, err := e.Kubectl(t, cfg, "", "apply", "--server-side", "--force-conflicts", "-k", "../../config/default")
		if err != nil {
			t.Fatalf("kubectl apply -k config/default (again: %t): %v\n%s%s", again, err, out, errOut)
		}
	}
	deployment := &appsv1.Deployment{}
	if err := e.Admin.Get(t.Context(), client.ObjectKey{Namespace: controlplane.OperatorNamespace, Name: "fencedlease"}, deployment); err != nil {
		t.Fatal(err)
	}
	args := deployment.Spec.Template.Spec.Containers[0].Args
	if len(args) == 0 || args[0] != "manager" || !strings.Contains(strings.Join(args, " "), "--leader-elect") {
		t.Fatalf("the operator's arguments are %q", args)
	}
	// The namespace enforces the restricted Pod Security Standard.
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: controlplane.OperatorNamespace, Name: "as-deployed", Labels: deployment.Spec.Template.Labels},
		Spec:       deployment.Spec.Template.Spec,
	}
	if err := e.Admin.Create(t.Context(), pod, client.DryRunAll); err != nil {
		t.Errorf("the operator's Pod is refused: %v", err)
	}

	account := impersonate(cfg, controlplane.OperatorUser)
	o := operator.Defaults()
	o.Namespace, o.LeaderElect = controlplane.OperatorNamespace, true
	o.MetricsAddress, o.ProbeAddress = "127.0.0.1:18080", "127.0.0.1:18081"
	o.WebhookHost, o.WebhookPort = "127.0.0.1", 19443
	o.CertDir = t.TempDir()
	done := make(chan error, 1)
	go func() { done <- operator.Run(t.Context(), account, o) }()
	t.Cleanup(func() {
		if err := <-done; err != nil {
			t.Errorf("the operator ended with %v", err)
		}
	})
	ready := func() bool {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://127.0.0.1:18081/readyz", nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return false
		}
		_ = resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return false
		}
		if _, err := os.Stat(filepath.Join(o.CertDir, "tls.crt")); err != nil {
			t.Errorf("ready without a certificate: %v", err)
		}
		return true
	}
	await(t, done, "the operator is ready", ready)

	hooks := &admissionv1.ValidatingWebhookConfiguration{}
	if err := e.Admin.Get(t.Context(), client.ObjectKey{Name: webhooks.ConfigurationName}, hooks); err != nil || len(hooks.Webhooks) > 0 {
		t.Fatalf("before the Service has an endpoint: %d webhooks, %v", len(hooks.Webhooks), err)
	}
	endpoints := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: controlplane.OperatorNamespace, Name: "webhook", Labels: map[string]string{discoveryv1.LabelServiceName: "fencedlease-webhook"},
		},
		AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"192.0.2.1"}}},
		Ports: []discoveryv1.EndpointPort{{Port: new(int32(9443))}},
	}
	if err := e.Admin.Create(t.Context(), endpoints); err != nil {
		t.Fatal(err)
	}
	await(t, done, "the API server knows the webhooks and the certificate's authority", func() bool {
		if err := e.Admin.Get(t.Context(), client.ObjectKey{Name: webhooks.ConfigurationName}, hooks); err != nil {
			t.Fatal(err)
		}
		if len(hooks.Webhooks) == 0 {
			return false
		}
		for _, hook := range hooks.Webhooks {
			if len(hook.ClientConfig.CABundle) == 0 {
				return false
			}
		}
		return true
	})
	if err := e.Admin.Delete(t.Context(), endpoints); err != nil { // makes no difference any more
		t.Fatal(err)
	}
	if generation := hooks.Generation; generation != 2 {
		t.Errorf("the configuration was written %d times, want once", generation-1)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(hooks.Webhooks[0].ClientConfig.CABundle)
	dialer := &tls.Dialer{Config: &tls.Config{RootCAs: roots, ServerName: "fencedlease-webhook.fencedlease-system.svc", MinVersion: tls.VersionTLS12}}
	conn, err := dialer.DialContext(t.Context(), "tcp", "127.0.0.1:19443")
	if err != nil {
		t.Fatalf("the webhook does not serve what the API server trusts: %v", err)
	}
	_ = conn.Close()
}

func impersonate(cfg *rest.Config, user string) *rest.Config {
	cfg = rest.CopyConfig(cfg)
	cfg.Impersonate = rest.ImpersonationConfig{UserName: user}
	return cfg
}

func await(t *testing.T, ended <-chan error, what string, done func() bool) {
	t.Helper()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	limit := time.After(time.Minute)
	for !done() {
		select {
		case <-tick.C:
		case err := <-ended:
			t.Fatalf("the operator ended before %s: %v", what, err)
		case <-limit:
			t.Fatalf("waited a minute until %s", what)
		}
	}
}

// TestOtherLayers: the webhook alone and the policies alone install too.
func TestOtherLayers(t *testing.T) {
	for _, layers := range []string{"webhook-only", "policy-only"} {
		t.Run(layers, func(t *testing.T) {
			cfg, e := cluster(t)
			out, errOut, err := e.Kubectl(t, cfg, "", "apply", "--server-side", "-k", "../../config/"+layers)
			if err != nil {
				t.Fatalf("%v\n%s%s", err, out, errOut)
			}
			hooks := &admissionv1.ValidatingWebhookConfigurationList{}
			if err := e.Admin.List(t.Context(), hooks); err != nil {
				t.Fatal(err)
			}
			if want := map[string]int{"webhook-only": 1, "policy-only": 0}[layers]; len(hooks.Items) != want {
				t.Errorf("%d webhook configurations, want %d", len(hooks.Items), want)
			}
		})
	}
}

// TestDeleteDefault: what docs/install.md says to delete, in its order, goes
// without a refusal.
func TestDeleteDefault(t *testing.T) {
	cfg, e := cluster(t)
	for _, args := range [][]string{
		{"apply", "--server-side", "-k", "../../config/default"},
		{"delete", "validatingwebhookconfigurations,validatingadmissionpolicybindings,validatingadmissionpolicies", "--selector=app.kubernetes.io/name=fencedlease"},
		{"delete", "-k", "../../config/default", "--wait=false", "--ignore-not-found"},
	} {
		if out, errOut, err := e.Kubectl(t, cfg, "", args...); err != nil {
			t.Fatalf("kubectl %s: %v\n%s%s", strings.Join(args, " "), err, out, errOut)
		}
	}
	policies := &admissionv1.ValidatingAdmissionPolicyList{}
	if err := e.Admin.List(t.Context(), policies); err != nil || len(policies.Items) > 0 {
		t.Errorf("%d policies are left, %v", len(policies.Items), err)
	}
}
