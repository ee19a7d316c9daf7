// Package env starts the real control plane for tests, with the shipped
// manifests installed and, if wanted, the operator running in-process under
// its own account and with just the permissions that the manifests grant.
package env

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlconfig "sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/webhook"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/controllers"
	"github.com/fencedlease/fencedlease/internal/controlplane"
	"github.com/fencedlease/fencedlease/webhooks"
)

// Options says what runs.
type Options struct {
	// Webhook installs the webhook's configuration and serves it.
	Webhook bool
	// Policy installs the admission policies and keeps the lease table; without
	// Webhook the strict policy stands in for it.
	Policy bool
	// Bare installs nothing of ours, and runs no operator.
	Bare bool
	// Operator runs the controllers.
	Operator bool
	// ControllerManager runs the real kube-controller-manager.
	ControllerManager bool
	// Controllers and Webhooks are passed on to the in-process operator; the
	// operator's namespace is filled in.
	Controllers controllers.Options
	Webhooks    webhooks.Options
	// Manager may change the options of the in-process manager.
	Manager func(*ctrl.Options)
	// APIServerArgs are further flags of kube-apiserver, without dashes.
	APIServerArgs map[string]string
}

// Environment is a running control plane with what Options asked for.
type Environment struct {
	*controlplane.ControlPlane
	// Admin is a client of group system:masters.
	Admin client.WithWatch
	// Scheme knows the built-in kinds and ours.
	Scheme *runtime.Scheme

	opts       Options
	mu         sync.Mutex
	managers   []*Manager
	users      map[string]*rest.Config
	namespaces atomic.Int64
}

// Scheme knows the built-in kinds and ours.
func Scheme() *runtime.Scheme {
	scheme := runtime.NewScheme()
	utilruntime.Must(clientgoscheme.AddToScheme(scheme))
	utilruntime.Must(apiextensionsv1.AddToScheme(scheme))
	utilruntime.Must(v1alpha1.AddToScheme(scheme))
	return scheme
}

// Start starts an environment that ends with the test.
func Start(tb testing.TB, opts Options) *Environment {
	tb.Helper()
	e, err := New(opts)
	if err != nil {
		tb.Fatalf("start the test environment: %v", err)
	}
	tb.Cleanup(func() {
		if err := e.Close(); err != nil {
			tb.Errorf("stop the test environment: %v", err)
		}
	})
	return e
}

// Main runs a package's tests; shared environments that Shared handed out end
// with it. Use it as os.Exit(env.Main(m)) in TestMain.
func Main(m *testing.M) int {
	code := m.Run()
	shared.Lock()
	defer shared.Unlock()
	for _, e := range shared.all {
		if err := e.Close(); err != nil {
			fmt.Fprintln(os.Stderr, "stop the test environment:", err)
			code = max(code, 1)
		}
	}
	return code
}

var shared struct {
	sync.Mutex
	all []*Environment
}

// Shared gives a function that starts one environment at its first call and
// hands out the same one from then on. The package needs Main in TestMain.
func Shared(opts Options) func(testing.TB) *Environment {
	start := sync.OnceValues(func() (*Environment, error) {
		e, err := New(opts)
		if err == nil {
			shared.Lock()
			defer shared.Unlock()
			shared.all = append(shared.all, e)
		}
		return e, err
	})
	return func(tb testing.TB) *Environment {
		tb.Helper()
		e, err := start()
		if err != nil {
			tb.Fatalf("start the test environment: %v", err)
		}
		return e
	}
}

// setLogger shows what the operator logs where TEST_LOG is set. A test that
// looks at the log itself sets its own: the first one stays.
var setLogger = sync.OnceFunc(func() {
	out := io.Discard
	if os.Getenv("TEST_LOG") != "" {
		out = os.Stderr
	}
	logger := zap.New(zap.UseDevMode(true), zap.WriteTo(out))
	ctrl.SetLogger(logger)
	klog.SetLogger(logger)
})

// New starts an environment that the caller closes.
func New(opts Options) (_ *Environment, err error) {
	setLogger()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	cp, err := controlplane.Start(ctx, controlplane.Options{
		Bare: opts.Bare, Webhook: opts.Webhook, Policy: opts.Policy, ControllerManager: opts.ControllerManager, APIServerArgs: opts.APIServerArgs,
	})
	if err != nil {
		return nil, err
	}
	e := &Environment{ControlPlane: cp, Scheme: Scheme(), opts: opts, users: map[string]*rest.Config{}}
	defer func() {
		if err != nil {
			_ = e.Close()
		}
	}()
	if e.Admin, err = client.NewWithWatch(cp.Config, client.Options{Scheme: e.Scheme}); err != nil {
		return nil, err
	}
	return e, e.startFirst(ctx)
}

// Install installs what opts names into an environment that was started bare,
// whose CRDs are there, and runs the operator.
func (e *Environment) Install(ctx context.Context, opts Options) error {
	e.opts = opts
	if err := e.ControlPlane.Install(ctx, controlplane.Options{Webhook: opts.Webhook, Policy: opts.Policy}); err != nil {
		return err
	}
	return e.startFirst(ctx)
}

// startFirst starts the first manager, if any.
func (e *Environment) startFirst(ctx context.Context) error {
	if !e.opts.Operator && !e.opts.Webhook && !e.opts.Policy {
		return nil
	}
	m, err := e.StartManager() //nolint:contextcheck // it outlives ctx
	if err != nil {
		return err
	}
	return m.WaitReady(ctx)
}

// Close stops everything.
func (e *Environment) Close() error {
	e.StopManagers()
	return e.Stop()
}

// StopManagers ends every replica of the operator; the API server stays.
func (e *Environment) StopManagers() {
	e.mu.Lock()
	managers := e.managers
	e.managers = nil
	e.mu.Unlock()
	for _, m := range managers {
		m.Stop()
	}
}

// Manager is one in-process replica of the operator.
type Manager struct {
	ctrl.Manager
	cancel context.CancelFunc
	done   chan struct{}
	err    error
	serves bool
}

// Stop ends the replica and waits for it.
func (m *Manager) Stop() { m.cancel(); <-m.done }

// Err is what the replica ended with, after Stop.
func (m *Manager) Err() error { return m.err }

// WaitReady waits until caches are synced and, where it serves, the webhook
// answers.
func (m *Manager) WaitReady(ctx context.Context) error {
	if !m.GetCache().WaitForCacheSync(ctx) {
		return fmt.Errorf("caches did not sync: %w", ctx.Err())
	}
	if !m.serves {
		return nil
	}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for m.GetWebhookServer().StartedChecker()(nil) != nil {
		select {
		case <-ctx.Done():
			return fmt.Errorf("the webhook does not serve: %w", ctx.Err())
		case <-m.done:
			return fmt.Errorf("the operator ended: %w", m.err)
		case <-tick.C:
		}
	}
	return nil
}

// StartManager starts a replica of the operator as the environment's options,
// with the given changes, say, without leader election. The environment stops
// it at the end.
func (e *Environment) StartManager(changes ...func(*Options)) (*Manager, error) {
	opts := e.opts
	for _, change := range changes {
		change(&opts)
	}
	cfg, err := e.Operator()
	if err != nil {
		return nil, err
	}
	options := ctrl.Options{
		Scheme:  e.Scheme,
		Metrics: metricsserver.Options{BindAddress: "0"},
		// Several replicas in one process would trip over unique names.
		Controller: ctrlconfig.Controller{SkipNameValidation: new(true)},
	}
	if opts.Webhook {
		options.WebhookServer = webhook.NewServer(webhook.Options{
			Host: e.Webhook.LocalServingHost, Port: e.Webhook.LocalServingPort, CertDir: e.Webhook.LocalServingCertDir,
		})
	}
	if opts.Manager != nil {
		opts.Manager(&options)
	}
	mgr, err := ctrl.NewManager(cfg, options)
	if err != nil {
		return nil, err
	}
	if opts.Operator {
		o := opts.Controllers
		o.OperatorNamespace = controlplane.OperatorNamespace
		if err := controllers.SetupWithManager(mgr, o); err != nil {
			return nil, err
		}
	}
	if opts.Policy && !opts.Operator {
		if err := controllers.SetupLeaseTable(mgr, controlplane.OperatorNamespace); err != nil {
			return nil, err
		}
	}
	if opts.Webhook {
		o := opts.Webhooks
		o.OperatorNamespace = controlplane.OperatorNamespace
		if err := webhooks.SetupWithManager(mgr, o); err != nil {
			return nil, err
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	m := &Manager{Manager: mgr, cancel: cancel, done: make(chan struct{}), serves: opts.Webhook}
	go func() {
		defer close(m.done)
		m.err = mgr.Start(ctx)
	}()
	e.mu.Lock()
	defer e.mu.Unlock()
	e.managers = append(e.managers, m)
	return m, nil
}

// user gives the configuration of an account by certificate; the
// same name gives the same account.
func (e *Environment) user(name string, groups []string) (*rest.Config, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	key := name + "\x00" + strings.Join(groups, "\x00")
	if cfg, ok := e.users[key]; ok {
		return rest.CopyConfig(cfg), nil
	}
	cfg, err := e.ControlPlane.User(name, groups...)
	if err != nil {
		return nil, err
	}
	e.users[key] = cfg
	return rest.CopyConfig(cfg), nil
}

// UserConfig gives the configuration of an account with no permissions but
// those its groups have.
func (e *Environment) UserConfig(tb testing.TB, name string, groups ...string) *rest.Config {
	tb.Helper()
	cfg, err := e.user(name, groups)
	if err != nil {
		tb.Fatal(err)
	}
	return cfg
}

// User gives a client of an account with no permissions but those its groups
// have.
func (e *Environment) User(tb testing.TB, name string, groups ...string) client.WithWatch {
	tb.Helper()
	c, err := client.NewWithWatch(e.UserConfig(tb, name, groups...), client.Options{Scheme: e.Scheme})
	if err != nil {
		tb.Fatal(err)
	}
	return c
}

// Impersonating gives a client of an administrator of another name, whose
// requests carry extras, as one that presents a token by header does.
func (e *Environment) Impersonating(tb testing.TB, name string, extra map[string][]string) client.Client {
	tb.Helper()
	cfg := rest.CopyConfig(e.Config)
	cfg.Impersonate = rest.ImpersonationConfig{UserName: name, Groups: []string{"system:masters"}, Extra: extra}
	c, err := client.New(cfg, client.Options{Scheme: e.Scheme})
	if err != nil {
		tb.Fatal(err)
	}
	return c
}

// Program builds the operator's and the gateway's program for one test.
func Program(tb testing.TB) string {
	tb.Helper()
	program := filepath.Join(tb.TempDir(), "fencedlease")
	if out, err := exec.CommandContext(tb.Context(), "go", "build", "-o", program, "github.com/fencedlease/fencedlease/cmd/fencedlease").CombinedOutput(); err != nil {
		tb.Fatalf("build the program: %v\n%s", err, out)
	}
	return program
}

// Grant gives an account the rules in a namespace, or in the whole cluster
// where the namespace is empty.
func (e *Environment) Grant(tb testing.TB, namespace, user string, rules ...rbacv1.PolicyRule) {
	tb.Helper()
	name := fmt.Sprintf("grant-%d", e.namespaces.Add(1))
	subject := []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: user}}
	objects := []client.Object{
		&rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: name}, Rules: rules},
		&rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: name}, Subjects: subject,
			RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name}},
	}
	if namespace != "" {
		objects = []client.Object{
			&rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Rules: rules},
			&rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Subjects: subject,
				RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: name}},
		}
	}
	for _, o := range objects {
		if err := e.Admin.Create(context.Background(), o); err != nil && !apierrors.IsAlreadyExists(err) {
			tb.Fatalf("grant to %s: %v", user, err)
		}
	}
	e.awaitGrant(tb, namespace, user, rules[0])
}

// awaitGrant waits until the API server's authorizer has seen a rule.
func (e *Environment) awaitGrant(tb testing.TB, namespace, user string, rule rbacv1.PolicyRule) {
	tb.Helper()
	resource, subresource, _ := strings.Cut(rule.Resources[0], "/")
	ask := &authorizationv1.ResourceAttributes{
		Namespace: namespace, Group: rule.APIGroups[0], Resource: resource, Subresource: subresource, Verb: rule.Verbs[0],
	}
	if len(rule.ResourceNames) > 0 {
		ask.Name = rule.ResourceNames[0]
	}
	granted := func(ctx context.Context) (bool, error) {
		review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{User: user, ResourceAttributes: ask}}
		err := e.Admin.Create(ctx, review)
		return review.Status.Allowed, err
	}
	if err := wait.PollUntilContextTimeout(context.Background(), 10*time.Millisecond, time.Minute, true, granted); err != nil {
		tb.Fatalf("the grant to %s is not seen: %v", user, err)
	}
}

// Namespace makes a namespace that no other test uses.
func (e *Environment) Namespace(tb testing.TB) string {
	tb.Helper()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("test-%d", e.namespaces.Add(1))}}
	if err := e.Admin.Create(tb.Context(), ns); err != nil {
		tb.Fatalf("create namespace: %v", err)
	}
	return ns.Name
}

// Kubectl runs the real kubectl as an account and gives what it printed.
func (e *Environment) Kubectl(tb testing.TB, cfg *rest.Config, stdin string, args ...string) (stdout, stderr string, err error) {
	tb.Helper()
	kubeconfig := filepath.Join(tb.TempDir(), "kubeconfig")
	data, err := controlplane.KubeConfig(cfg)
	if err != nil {
		tb.Fatal(err)
	}
	if err := os.WriteFile(kubeconfig, data, 0o600); err != nil {
		tb.Fatal(err)
	}
	var out, errOut bytes.Buffer
	cmd := exec.CommandContext(tb.Context(), filepath.Join(e.Assets, "kubectl"), args...)
	// kubectl edit changes what it is given.
	cmd.Env = append(os.Environ(), "KUBECONFIG="+kubeconfig, "KUBE_EDITOR=sed -i s/registry.example.com/elsewhere.example.com/")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &out, &errOut
	err = cmd.Run()
	return out.String(), errOut.String(), err
}
