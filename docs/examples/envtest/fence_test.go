// Package envtest shows how a program that writes guarded objects is tested
// with envtest: the real fence judges what it writes.
package envtest

import (
	"context"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	crclient "sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/webhook"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/client"
	"github.com/fencedlease/fencedlease/controllers"
	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/webhooks"
)

// startFence starts an API server with FencedLease's kinds, its operator and
// its webhook, and gives the administrator's configuration.
func startFence(t *testing.T, scheme *runtime.Scheme) *rest.Config {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}", "github.com/fencedlease/fencedlease").Output()
	if err != nil {
		t.Fatal(err)
	}
	manifests := filepath.Join(strings.TrimSpace(string(out)), "config")
	env := &envtest.Environment{
		CRDDirectoryPaths:     []string{filepath.Join(manifests, "crd", "bases")},
		ErrorIfCRDPathMissing: true,
		WebhookInstallOptions: envtest.WebhookInstallOptions{Paths: []string{filepath.Join(manifests, "webhook")}},
	}
	cfg, err := env.Start()
	if err != nil {
		t.Fatal(err)
	}
	// The operator under its own name: the fence lets it write its records.
	operator, err := env.AddUser(envtest.User{Name: "system:serviceaccount:fencedlease-system:fencedlease", Groups: []string{"system:masters"}}, cfg)
	if err != nil {
		t.Fatal(err)
	}
	hook := env.WebhookInstallOptions
	mgr, err := ctrl.NewManager(operator.Config(), ctrl.Options{
		Scheme:        scheme,
		Metrics:       metricsserver.Options{BindAddress: "0"},
		WebhookServer: webhook.NewServer(webhook.Options{Host: hook.LocalServingHost, Port: hook.LocalServingPort, CertDir: hook.LocalServingCertDir}),
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := controllers.SetupWithManager(mgr, controllers.Options{OperatorNamespace: "fencedlease-system"}); err != nil {
		t.Fatal(err)
	}
	if err := webhooks.SetupWithManager(mgr, webhooks.Options{OperatorNamespace: "fencedlease-system"}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- mgr.Start(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		if err := env.Stop(); err != nil {
			t.Error(err)
		}
	})
	serves := func(context.Context) (bool, error) { return mgr.GetWebhookServer().StartedChecker()(nil) == nil, nil }
	if err := wait.PollUntilContextTimeout(t.Context(), 50*time.Millisecond, time.Minute, true, serves); err != nil {
		t.Fatal(err)
	}
	return cfg
}

func TestAFormerLeaderIsRejected(t *testing.T) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, v1alpha1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	cfg := startFence(t, scheme)
	admin, err := crclient.New(cfg, crclient.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range []crclient.Object{
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "fencedlease-system"}},
		&v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "main"}, Spec: v1alpha1.FencedLeaseSpec{LeaseDurationSeconds: 15}},
	} {
		if err := admin.Create(t.Context(), o); err != nil {
			t.Fatal(err)
		}
	}
	lead := func() (fence.Token, crclient.Client, *client.Held) {
		held, err := client.Acquire(t.Context(), cfg, "default", "main")
		if err != nil {
			t.Fatal(err)
		}
		return held.Token(), stamped(t, cfg, client.Static(held.Lease(), held.Token())), held
	}
	first, former, held := lead()
	settings := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "settings"}}
	if err := client.Guard(settings, held.Lease()); err != nil {
		t.Fatal(err)
	}
	if err := former.Create(t.Context(), settings); err != nil {
		t.Fatal(err)
	}
	if err := held.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	second, current, _ := lead()
	if second <= first {
		t.Fatalf("token %s after %s", second, first)
	}
	settings.Data = map[string]string{"by": "the former leader"}
	if err := former.Update(t.Context(), settings); !client.IsStale(err) {
		t.Fatalf("the former leader: %v", err)
	}
	settings.Data = map[string]string{"by": "the leader"}
	if err := current.Update(t.Context(), settings); err != nil {
		t.Fatal(err)
	}
}

func stamped(t *testing.T, cfg *rest.Config, holder client.Holder) crclient.Client {
	t.Helper()
	cfg, err := client.Config(t.Context(), cfg, holder)
	if err != nil {
		t.Fatal(err)
	}
	c, err := crclient.New(cfg, crclient.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return c
}
