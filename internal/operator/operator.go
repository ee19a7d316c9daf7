// Package operator wires the manager: controllers, webhook, certificates,
// probes and metrics.
package operator

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/open-policy-agent/cert-controller/pkg/rotator"
	"github.com/spf13/pflag"
	"go.opentelemetry.io/otel/sdk/resource"
	semconv "go.opentelemetry.io/otel/semconv/v1.41.0"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apimachinery/pkg/util/validation"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/component-base/tracing"
	tracingv1 "k8s.io/component-base/tracing/api/v1"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/webhook"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/controllers"
	"github.com/fencedlease/fencedlease/webhooks"
	"github.com/fencedlease/fencedlease/webhooks/policy"
)

// Leader election and certificates.
// +kubebuilder:rbac:groups=coordination.k8s.io,namespace=fencedlease-system,resources=leases,verbs=create
// +kubebuilder:rbac:groups=coordination.k8s.io,namespace=fencedlease-system,resources=leases,resourceNames=fencedlease,verbs=get;update
// +kubebuilder:rbac:groups="",namespace=fencedlease-system,resources=events,verbs=create;patch
// +kubebuilder:rbac:groups="",namespace=fencedlease-system,resources=secrets,verbs=get;list;watch
// +kubebuilder:rbac:groups="",namespace=fencedlease-system,resources=secrets,resourceNames=fencedlease-webhook-certificate,verbs=update
// +kubebuilder:rbac:groups=admissionregistration.k8s.io,resources=validatingwebhookconfigurations,resourceNames=fencedlease,verbs=get;list;watch;update
// +kubebuilder:rbac:groups=admissionregistration.k8s.io,resources=validatingadmissionpolicybindings,resourceNames=fencedlease,verbs=get;list;watch

// Where the webhook's certificates come from.
const (
	// CertificatesSelfManaged makes and rotates them, in a Secret.
	CertificatesSelfManaged = "self-managed"
	// CertificatesFiles reads what is mounted, as from cert-manager.
	CertificatesFiles = "files"
)

// Options are the settings of one replica.
type Options struct {
	// Namespace is the operator's own.
	Namespace string
	// MetricsAddress and ProbeAddress are host:port; "0" turns them off.
	MetricsAddress, ProbeAddress string
	// LeaderElect lets one replica of several issue tokens.
	LeaderElect bool
	// Webhook serves the admission webhook.
	Webhook bool
	// WebhookHost and WebhookPort are where the webhook listens.
	WebhookHost string
	WebhookPort int
	// CertDir is the folder of tls.crt and tls.key.
	CertDir string
	// Certificates is CertificatesSelfManaged or CertificatesFiles.
	Certificates string
	// ServiceName and SecretName are the webhook's Service and the Secret of
	// self-managed certificates.
	ServiceName, SecretName string
	// ExemptUsers are further principals whose unstamped writes pass, and
	// JudgedUsers those of the control plane whose do not.
	ExemptUsers, JudgedUsers []string
	// Overlap has the webhook judge also what the policies decide: so nothing
	// passes while they are taken away.
	Overlap bool
	// TracingEndpoint is the host:port of an OpenTelemetry collector that takes
	// OTLP by gRPC without TLS; empty means no traces. TracingRate is how many
	// of a million requests that nobody else began to trace are traced.
	TracingEndpoint string
	TracingRate     int32
	// QPS bounds the requests per second to the API server.
	QPS float32
	// ShutdownTimeout bounds the drain at the end.
	ShutdownTimeout time.Duration
}

// Defaults are the settings that a flag not given leaves.
func Defaults() Options {
	namespace := os.Getenv("POD_NAMESPACE")
	if namespace == "" {
		namespace = "fencedlease-system"
	}
	return Options{
		Namespace:       namespace,
		MetricsAddress:  ":8080",
		ProbeAddress:    ":8081",
		Webhook:         true,
		WebhookPort:     9443,
		CertDir:         "/tmp/fencedlease-certs",
		Certificates:    CertificatesSelfManaged,
		ServiceName:     "fencedlease-webhook",
		SecretName:      "fencedlease-webhook-certificate",
		QPS:             200,
		ShutdownTimeout: 30 * time.Second,
	}
}

// AddFlags binds the settings to flags.
func (o *Options) AddFlags(flags *pflag.FlagSet) {
	flags.StringVar(&o.Namespace, "namespace", o.Namespace, "the operator's own namespace (default: POD_NAMESPACE)")
	flags.StringVar(&o.MetricsAddress, "metrics-bind-address", o.MetricsAddress, `host:port of the metrics endpoint, "0" for none`)
	flags.StringVar(&o.ProbeAddress, "health-probe-bind-address", o.ProbeAddress, `host:port of /healthz and /readyz, "0" for none`)
	flags.BoolVar(&o.LeaderElect, "leader-elect", o.LeaderElect, "let one replica of several issue tokens (liveness only: tokens are safe without)")
	flags.BoolVar(&o.Webhook, "webhook", o.Webhook, "serve the admission webhook")
	flags.StringVar(&o.WebhookHost, "webhook-host", o.WebhookHost, "address that the webhook listens on (default: all)")
	flags.IntVar(&o.WebhookPort, "webhook-port", o.WebhookPort, "port that the webhook listens on")
	flags.StringVar(&o.CertDir, "webhook-cert-dir", o.CertDir, "folder of tls.crt and tls.key")
	flags.StringVar(&o.Certificates, "certificates", o.Certificates, "self-managed (made and rotated here) or files (mounted, as from cert-manager)")
	flags.StringVar(&o.ServiceName, "webhook-service", o.ServiceName, "the webhook's Service, for the certificate's name")
	flags.StringVar(&o.SecretName, "webhook-secret", o.SecretName, "the Secret of self-managed certificates")
	flags.StringSliceVar(&o.ExemptUsers, "exempt-user", o.ExemptUsers, "further user whose unstamped writes pass (repeatable)")
	flags.StringSliceVar(&o.JudgedUsers, "judged-user", o.JudgedUsers, "user of the control plane that is judged all the same (repeatable)")
	flags.BoolVar(&o.Overlap, "overlap", o.Overlap, "judge also what the policies decide, as the step before they are taken away")
	flags.StringVar(&o.TracingEndpoint, "tracing-endpoint", o.TracingEndpoint, "host:port of an OpenTelemetry collector (OTLP by gRPC, without TLS; default: no traces)")
	flags.Int32Var(&o.TracingRate, "tracing-sampling-rate-per-million", o.TracingRate, "how many of a million requests are traced besides those that the API server traces")
	flags.Float32Var(&o.QPS, "kube-api-qps", o.QPS, "requests per second to the API server")
	flags.DurationVar(&o.ShutdownTimeout, "shutdown-timeout", o.ShutdownTimeout, "bound of the drain at the end")
}

// Validate names the first setting that is out of range.
func (o *Options) Validate() error {
	switch {
	case len(validation.IsDNS1123Label(o.Namespace)) > 0:
		return fmt.Errorf("--namespace=%q: must be a namespace's name", o.Namespace)
	case o.Webhook && (o.WebhookPort < 1 || o.WebhookPort > 65535):
		return fmt.Errorf("--webhook-port=%d: must be from 1 to 65535", o.WebhookPort)
	case o.Certificates != CertificatesSelfManaged && o.Certificates != CertificatesFiles:
		return fmt.Errorf("--certificates=%q: must be %s or %s", o.Certificates, CertificatesSelfManaged, CertificatesFiles)
	case o.Webhook && o.CertDir == "":
		return errors.New("--webhook-cert-dir: must name a folder")
	case o.TracingRate < 0 || o.TracingRate > 1_000_000:
		return fmt.Errorf("--tracing-sampling-rate-per-million=%d: must be from 0 to 1000000", o.TracingRate)
	case o.QPS < 1 || o.QPS > 10000:
		return fmt.Errorf("--kube-api-qps=%v: must be from 1 to 10000", o.QPS)
	case o.ShutdownTimeout < 0 || o.ShutdownTimeout > 10*time.Minute:
		return fmt.Errorf("--shutdown-timeout=%v: must be from 0s to 10m", o.ShutdownTimeout)
	}
	for _, user := range o.JudgedUsers {
		if !webhooks.MayJudge(user) {
			return fmt.Errorf("--judged-user=%q: is no principal of the control plane that is exempt", user)
		}
	}
	return nil
}

// Scheme knows the kinds that the operator handles.
func Scheme() *runtime.Scheme {
	scheme := runtime.NewScheme()
	utilruntime.Must(clientgoscheme.AddToScheme(scheme))
	utilruntime.Must(v1alpha1.AddToScheme(scheme))
	return scheme
}

// Run runs one replica until ctx ends.
func Run(ctx context.Context, cfg *rest.Config, o Options) error {
	if err := o.Validate(); err != nil {
		return err
	}
	cfg = rest.CopyConfig(cfg)
	cfg.QPS, cfg.Burst = o.QPS, int(2*o.QPS)
	// Leader election must not queue behind the operator's own requests.
	elections := rest.CopyConfig(cfg)
	elections.QPS, elections.Burst = 10, 20
	traces, err := o.traces(ctx)
	if err != nil {
		return err
	}
	if traces != nil {
		defer func() {
			// What is still queued; a collector that is gone holds nobody up.
			flush, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
			defer cancel()
			_ = traces.Shutdown(flush)
		}()
		cfg.Wrap(tracing.WrapperFor(traces))
	}
	mgr, err := ctrl.NewManager(cfg, ctrl.Options{
		Scheme: Scheme(),
		// Secrets are read in the operator's own namespace alone.
		Cache: cache.Options{ByObject: map[client.Object]cache.ByObject{
			&corev1.Secret{}: {Namespaces: map[string]cache.Config{o.Namespace: {}}},
			&admissionv1.ValidatingWebhookConfiguration{}:   {Field: fields.OneTermEqualSelector("metadata.name", webhooks.ConfigurationName)},
			&admissionv1.ValidatingAdmissionPolicyBinding{}: {Field: fields.OneTermEqualSelector("metadata.name", policy.FenceName)},
		}},
		Metrics:                       metricsserver.Options{BindAddress: o.MetricsAddress},
		HealthProbeBindAddress:        o.ProbeAddress,
		LeaderElection:                o.LeaderElect,
		LeaderElectionConfig:          elections,
		LeaderElectionID:              "fencedlease",
		LeaderElectionNamespace:       o.Namespace,
		LeaderElectionReleaseOnCancel: true,
		GracefulShutdownTimeout:       new(o.ShutdownTimeout),
		WebhookServer:                 webhook.NewServer(webhook.Options{Host: o.WebhookHost, Port: o.WebhookPort, CertDir: o.CertDir}),
	})
	if err != nil {
		return fmt.Errorf("set up the manager: %w", err)
	}
	if err := controllers.SetupWithManager(mgr, controllers.Options{OperatorNamespace: o.Namespace}); err != nil { //nolint:contextcheck // its indexes outlive ctx
		return fmt.Errorf("set up the controllers: %w", err)
	}
	if err := mgr.Add(&ownership{client: mgr.GetClient(), live: mgr.GetAPIReader(), namespace: o.Namespace}); err != nil {
		return err
	}
	certificates := make(chan struct{})
	failed := make(chan error, 1)
	serving := healthz.Ping
	if o.Webhook {
		if serving, err = o.setupWebhook(mgr, traces, certificates, failed); err != nil {
			return err
		}
	}
	if err := mgr.AddHealthzCheck("ping", healthz.Ping); err != nil {
		return err
	}
	if err := mgr.AddReadyzCheck("webhook", serving); err != nil {
		return err
	}
	if err := mgr.AddReadyzCheck("caches", cachesSynced(mgr)); err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case err := <-failed:
			cancel(err)
		case <-ctx.Done():
		}
	}()
	if err := mgr.Start(ctx); err != nil {
		return err
	}
	if err := context.Cause(ctx); !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// setupWebhook registers the webhook once certificates are there, on every
// replica, leader or not, and gives its readiness.
func (o *Options) setupWebhook(mgr ctrl.Manager, traces tracing.TracerProvider, certificates chan struct{}, failed chan<- error) (healthz.Checker, error) {
	hooks, err := o.shippedHooks("webhook")
	if err != nil {
		return nil, err
	}
	spared := hooks
	if !o.Overlap {
		if spared, err = o.shippedHooks("webhook-with-policy"); err != nil {
			return nil, err
		}
	}
	secret := types.NamespacedName{Namespace: o.Namespace, Name: o.SecretName}
	active := &activation{
		client: mgr.GetClient(), live: mgr.GetAPIReader(), hooks: hooks, spared: spared, clock: clock.RealClock{},
		service: types.NamespacedName{Namespace: o.Namespace, Name: o.ServiceName},
	}
	if o.Certificates == CertificatesFiles {
		close(certificates)
		active.authority = func(context.Context) ([]byte, error) {
			authority, err := os.ReadFile(filepath.Join(o.CertDir, authorityFile))
			if os.IsNotExist(err) {
				return nil, nil
			}
			return authority, err
		}
	} else {
		if err := rotator.AddRotator(mgr, &rotator.CertRotator{
			SecretKey:      secret,
			CertDir:        o.CertDir,
			CAName:         "fencedlease-ca",
			CAOrganization: "fencedlease",
			DNSName:        fmt.Sprintf("%s.%s.svc", o.ServiceName, o.Namespace),
			IsReady:        certificates,
		}); err != nil {
			return nil, fmt.Errorf("set up the certificates: %w", err)
		}
		files := &certificateFiles{client: mgr.GetClient(), secret: secret, dir: o.CertDir, clock: clock.RealClock{}}
		if err := files.setup(mgr); err != nil {
			return nil, fmt.Errorf("set up the certificates: %w", err)
		}
		active.authority = files.authority
	}
	if err := active.setup(mgr); err != nil {
		return nil, fmt.Errorf("set up the webhook's configuration: %w", err)
	}
	go func() {
		<-certificates
		if err := webhooks.SetupWithManager(mgr, webhooks.Options{OperatorNamespace: o.Namespace, ExemptUsers: o.ExemptUsers, JudgedUsers: o.JudgedUsers, Tracing: traces}); err != nil {
			failed <- fmt.Errorf("set up the webhook: %w", err)
		}
	}()
	return func(r *http.Request) error {
		select {
		case <-certificates:
			return mgr.GetWebhookServer().StartedChecker()(r)
		default:
			return errors.New("no certificates yet")
		}
	}, nil
}

// traces gives where traces go, nil where none are wanted.
func (o *Options) traces(ctx context.Context) (tracing.TracerProvider, error) {
	if o.TracingEndpoint == "" {
		return nil, nil //nolint:nilnil // none is wanted
	}
	name := resource.WithAttributes(semconv.ServiceName("fencedlease"))
	provider, err := tracing.NewProvider(ctx, &tracingv1.TracingConfiguration{Endpoint: &o.TracingEndpoint, SamplingRatePerMillion: &o.TracingRate}, nil, []resource.Option{name})
	if err != nil {
		return nil, fmt.Errorf("--tracing-endpoint=%q: %w", o.TracingEndpoint, err)
	}
	return provider, nil
}

func cachesSynced(mgr ctrl.Manager) healthz.Checker {
	return func(r *http.Request) error {
		ctx, cancel := context.WithTimeout(r.Context(), 100*time.Millisecond)
		defer cancel()
		if !mgr.GetCache().WaitForCacheSync(ctx) {
			return errors.New("caches are not synced yet")
		}
		return nil
	}
}
