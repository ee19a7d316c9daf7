// Package helm installs the chart with the real helm on the real API server
// and kube-controller-manager, with the operator's processes started as the
// rendered Deployment says.
package helm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	fenceclient "github.com/fencedlease/fencedlease/client"
	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/internal/controlplane"
	"github.com/fencedlease/fencedlease/test/env"
	"github.com/fencedlease/fencedlease/webhooks"
	"github.com/fencedlease/fencedlease/webhooks/policy"
)

const (
	chart       = "../../charts/fencedlease"
	certificate = "fencedlease-webhook-certificate"
	namespace   = "fencedlease-system"
)

// cluster is a control plane with nothing of ours, a node, and helm.
type cluster struct {
	*env.Environment
	t       *testing.T
	kubelet *kubelet
	helm    string
	config  string // a kubeconfig of the administrator
	tenant  string // a namespace with a lease "main"
	worker  *rest.Config
}

func newCluster(t *testing.T) *cluster {
	t.Helper()
	dir := t.TempDir()
	program := env.Program(t)
	e := env.Start(t, env.Options{Bare: true, ControllerManager: true, APIServerArgs: map[string]string{
		// The API server calls webhooks at the addresses of EndpointSlices.
		"enable-aggregator-routing": "true",
		// As OpenShift has it: an owner is changed by who may delete.
		"enable-admission-plugins": "OwnerReferencesPermissionEnforcement",
	}})
	c := &cluster{Environment: e, t: t, kubelet: startKubelet(t, e, program), helm: helm(t), config: filepath.Join(dir, "kubeconfig")}
	data, err := controlplane.KubeConfig(e.Config)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(c.config, data, 0o600); err != nil {
		t.Fatal(err)
	}
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace, Labels: map[string]string{"pod-security.kubernetes.io/enforce": "restricted"}}}
	if err := e.Admin.Create(t.Context(), ns); err != nil {
		t.Fatal(err)
	}
	return c
}

// helm gives the pinned helm.
func helm(t *testing.T) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "go", "tool", "-modfile=../../hack/tools/go.mod", "-n", "helm").Output()
	if err != nil {
		t.Fatalf("build helm: %v", err)
	}
	return strings.TrimSpace(string(out))
}

func (c *cluster) run(args ...string) string {
	c.t.Helper()
	var out bytes.Buffer
	cmd := exec.CommandContext(c.t.Context(), c.helm, append(args, "--namespace", namespace)...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+c.config, "HELM_CACHE_HOME="+filepath.Dir(c.config))
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		c.t.Fatalf("helm %s: %v\n%s", strings.Join(args, " "), err, &out)
	}
	return out.String()
}

// makeTenant makes a namespace with a lease, and the account of its workers.
func (c *cluster) makeTenant() {
	c.t.Helper()
	c.tenant = c.Namespace(c.t)
	lease := &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: c.tenant, Name: "main"}}
	c.must(c.Admin.Create(c.t.Context(), lease))
	c.Grant(c.t, c.tenant, "worker",
		rbacv1.PolicyRule{APIGroups: []string{fence.Group}, Resources: []string{"fencedleases"}, Verbs: []string{"get", "guard"}},
		rbacv1.PolicyRule{APIGroups: []string{fence.Group}, Resources: []string{"leaseclaims"}, Verbs: []string{"*"}},
		rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"configmaps"}, Verbs: []string{"*"}})
	c.worker = c.UserConfig(c.t, "worker")
}

func (c *cluster) must(err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}

func (c *cluster) await(what string, limit time.Duration, done func() bool) {
	c.t.Helper()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	expired := time.After(limit)
	for !done() {
		select {
		case <-tick.C:
		case <-expired:
			c.t.Fatalf("waited %s until %s", limit, what)
		}
	}
}

func (c *cluster) acquire(identity string) *fenceclient.Held {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), time.Minute)
	defer cancel()
	held, err := fenceclient.Acquire(ctx, c.worker, c.tenant, "main", fenceclient.WithIdentity(identity))
	c.must(err)
	return held
}

// with gives a client whose writes present a token by header.
func (c *cluster) with(token fence.Token) client.Client {
	c.t.Helper()
	cfg := rest.CopyConfig(c.Config)
	cfg.QPS = -1
	cfg.Impersonate = rest.ImpersonationConfig{UserName: "worker", Extra: map[string][]string{fence.ExtraToken: {token.String()}}}
	cl, err := client.New(cfg, client.Options{Scheme: c.Scheme})
	c.must(err)
	return cl
}

func (c *cluster) object(name string, token fence.Token) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{
		Namespace: c.tenant, Name: name, Labels: map[string]string{fence.LabelLease: "main"}, Annotations: map[string]string{fence.AnnotationToken: token.String()},
	}}
}

func (c *cluster) patch(ctx context.Context, cl client.Client, name, value string) error {
	o := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: c.tenant, Name: name}}
	return cl.Patch(ctx, o, client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"data":{"value":%q}}`, value)))
}

// TestLife installs, upgrades with a changed CRD, rolls back, uninstalls and
// installs again.
func TestLife(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	started := time.Now()
	c.run("install", "fencedlease", chart, "--wait", "--timeout=2m")
	c.makeTenant()
	first := c.acquire("first")
	stale := first.Token()
	c.must(c.with(stale).Create(t.Context(), c.object("guarded", stale)))
	c.must(c.with(stale).Create(t.Context(), c.object("left", stale)))
	c.must(first.Release(t.Context()))
	second := c.acquire("second")
	current := second.Token()
	c.must(c.with(current).Patch(t.Context(), c.object("guarded", current), client.Merge))
	if err := c.patch(t.Context(), c.with(stale), "guarded", "stale"); !fenceclient.IsStale(err) {
		t.Fatalf("a superseded holder's write: %v", err)
	}
	c.await("the webhook is active", time.Minute, func() bool { return len(c.hooks()) > 0 })
	if err := c.patch(t.Context(), c.Admin, "guarded", "unstamped"); !unstamped(err) {
		t.Fatalf("an unstamped write: %v", err)
	}
	if took := time.Since(started); took > 30*time.Second {
		t.Errorf("install to a rejected stale write took %s, want less than 30s", took)
	} else {
		t.Logf("install to a rejected stale write: %s", took.Round(time.Second))
	}

	endWriters := c.writeThroughout()

	// A new version with another CRD.
	newer := filepath.Join(t.TempDir(), "fencedlease")
	c.must(os.CopyFS(newer, os.DirFS(chart)))
	edit(t, filepath.Join(newer, "Chart.yaml"), `(?m)^version: .*`, "version: 99.0.0")
	edit(t, filepath.Join(newer, "templates/crds.yaml"), `(?m)^    - jsonPath: .metadata.creationTimestamp\n`, "    - jsonPath: .metadata.uid\n      name: Upgraded\n      type: string\n$0")
	c.run("upgrade", "fencedlease", newer, "--wait", "--timeout=2m", "--set", "podAnnotations.upgraded=yes")
	if !c.upgraded() {
		t.Error("the upgrade left the CRDs as they were")
	}
	c.fenced("after the upgrade", stale, current)
	c.run("rollback", "fencedlease", "1", "--wait", "--timeout=2m")
	if c.upgraded() {
		t.Error("the rollback left the CRDs as they were")
	}
	c.fenced("after the rollback", stale, current)

	// The webhook alone, and both again, beside a superseded holder that tries
	// all the while to write where only its own token is recorded.
	endAttempts := c.attemptThroughout(c.with(stale), "left")
	c.run("upgrade", "fencedlease", chart, "--wait", "--timeout=2m", "--set", "layers.overlap=true")
	c.await("the webhook judges everything", time.Minute, func() bool { return !c.spared() })
	c.run("upgrade", "fencedlease", chart, "--wait", "--timeout=2m", "--set", "layers.policies=false")
	c.fenced("with the webhook alone", stale, current)
	both := func() {
		t.Helper()
		c.run("upgrade", "fencedlease", chart, "--wait", "--timeout=2m", "--reset-values")
		// The API server takes up new policies once a second.
		c.await("both layers are active", time.Minute, func() bool {
			err := c.patch(t.Context(), c.with(stale), "guarded", "stale")
			return c.spared() && err != nil && strings.Contains(err.Error(), "ValidatingAdmissionPolicy")
		})
	}
	both() // from one layer to the other by way of both
	c.run("upgrade", "fencedlease", chart, "--wait", "--timeout=2m", "--set", "layers.strict=true")
	c.await("the strict policy is active", time.Minute, func() bool {
		err := c.patch(t.Context(), c.Admin, "guarded", "unstamped")
		return err != nil && strings.Contains(err.Error(), "fencedlease-strict")
	})
	c.run("upgrade", "fencedlease", chart, "--wait", "--timeout=2m", "--set", "layers.webhook=false")
	c.fenced("with the policies alone", stale, current)
	if err := c.Admin.Get(t.Context(), client.ObjectKey{Name: webhooks.ConfigurationName}, &admissionv1.ValidatingWebhookConfiguration{}); !apierrors.IsNotFound(err) {
		t.Errorf("with the policies alone the webhook's configuration: %v", err)
	}
	both()
	c.fenced("with both again", stale, current)
	endAttempts()

	c.run("uninstall", "fencedlease", "--wait", "--timeout=2m")
	endWriters()
	c.leftNothing()
	c.must(c.patch(t.Context(), c.Admin, "guarded", "unfenced"))
	leases := &v1alpha1.FencedLeaseList{}
	c.must(c.Admin.List(t.Context(), leases))
	if len(leases.Items) != 1 {
		t.Fatalf("%d leases are left, want the one", len(leases.Items))
	}
	c.nothingTerminates()

	c.run("install", "fencedlease", chart, "--wait", "--timeout=2m")
	c.await("the webhook is active", time.Minute, func() bool { return len(c.hooks()) > 0 })
	c.fenced("after installing again", stale, current)
	c.must(second.Release(t.Context()))
	third := c.acquire("third")
	if third.Token() <= current {
		t.Errorf("token %s after %s", third.Token(), current)
	}
	c.must(third.Release(t.Context()))
}

// leftNothing asserts that nothing of the installation is there but the CRDs.
func (c *cluster) leftNothing() {
	c.t.Helper()
	for _, list := range c.left() {
		c.t.Errorf("left behind: %v", list)
	}
}

// left gives what is there of the installation.
func (c *cluster) left() (lists []client.ObjectList) {
	c.t.Helper()
	for _, list := range []client.ObjectList{&admissionv1.ValidatingWebhookConfigurationList{}, &admissionv1.ValidatingAdmissionPolicyList{}, &admissionv1.ValidatingAdmissionPolicyBindingList{}, &appsv1.DeploymentList{}} {
		c.must(c.Admin.List(c.t.Context(), list))
		if n := strings.Count(fmt.Sprintf("%T %v", list, list), "fencedlease"); n > 0 {
			lists = append(lists, list)
		}
	}
	return lists
}

// writeThroughout writes what is guarded, and judged by the webhook, and what
// is not, ten times a second. Whatever else is going on, the API server trusts
// the webhook, and what is not guarded is written.
func (c *cluster) writeThroughout() (end func()) {
	c.t.Helper()
	plain := c.object("plain", 0)
	plain.Labels, plain.Annotations = nil, nil
	c.must(c.Admin.Create(c.t.Context(), plain))
	return c.throughout("guarded writes, and as many of what is not", 100*time.Millisecond, func(ctx context.Context, n int) {
		if err := c.patch(ctx, c.Admin, "guarded", fmt.Sprint(n)); err != nil && strings.Contains(err.Error(), "x509") {
			c.t.Errorf("a guarded write: %v", err)
		}
		if err := c.patch(ctx, c.Admin, "plain", fmt.Sprint(n)); err != nil && ctx.Err() == nil {
			c.t.Errorf("a write of what is not guarded: %v", err)
		}
	})
}

// attemptThroughout writes an object again and again, and fails where a write
// commits.
func (c *cluster) attemptThroughout(as client.Client, name string) (end func()) {
	return c.throughout("attempts of a superseded holder", time.Nanosecond, func(ctx context.Context, n int) {
		if err := c.patch(ctx, as, name, fmt.Sprint(n)); err == nil {
			c.t.Errorf("attempt %d of a superseded holder committed at %s", n, time.Now().Format(time.TimeOnly))
		}
	})
}

// throughout does something again and again, at most once a period, until end.
func (c *cluster) throughout(what string, period time.Duration, do func(ctx context.Context, n int)) (end func()) {
	ctx, cancel := context.WithCancel(c.t.Context())
	var doing sync.WaitGroup
	n := 0
	doing.Go(func() {
		tick := time.NewTicker(period)
		defer tick.Stop()
		for ; ctx.Err() == nil; n++ {
			do(ctx, n)
			select {
			case <-tick.C:
			case <-ctx.Done():
			}
		}
	})
	c.t.Cleanup(func() { cancel(); doing.Wait() })
	return func() {
		cancel()
		doing.Wait()
		c.t.Logf("%d %s, throughout", n, what)
	}
}

// TestUninstallWithCRDs takes everything away, the leases too.
func TestUninstallWithCRDs(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.run("install", "fencedlease", chart, "--wait", "--timeout=2m", "--set", "crds.keep=false")
	c.makeTenant()
	held := c.acquire("holder")
	c.must(c.with(held.Token()).Create(t.Context(), c.object("guarded", held.Token())))
	c.must(c.Admin.Create(t.Context(), &v1alpha1.LeaseClaim{ObjectMeta: metav1.ObjectMeta{Namespace: c.tenant, Name: "waiting"}, Spec: v1alpha1.LeaseClaimSpec{LeaseName: "main"}}))
	c.run("uninstall", "fencedlease", "--wait", "--timeout=2m")
	c.await("the CRDs are gone", time.Minute, func() bool {
		crds := &apiextensionsv1.CustomResourceDefinitionList{}
		c.must(c.Admin.List(t.Context(), crds))
		return len(crds.Items) == 0
	})
	c.must(c.patch(t.Context(), c.Admin, "guarded", "unfenced"))
	c.must(c.Admin.Delete(t.Context(), c.object("guarded", 0)))
	c.nothingTerminates()
}

// TestLeaving takes the installation away as nobody should: past the chart's
// hooks, and with its namespace. What is guarded can be written afterwards, and
// namespaces with claims and leases go.
func TestLeaving(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	fill := func() {
		t.Helper()
		c.run("install", "fencedlease", chart, "--create-namespace", "--wait", "--timeout=2m")
		c.makeTenant()
		held := c.acquire("holder")
		c.must(c.with(held.Token()).Create(t.Context(), c.object("guarded", held.Token())))
		c.must(c.Admin.Create(t.Context(), &v1alpha1.LeaseClaim{ObjectMeta: metav1.ObjectMeta{Namespace: c.tenant, Name: "waiting"}, Spec: v1alpha1.LeaseClaimSpec{LeaseName: "main"}}))
		c.await("the webhook is active", time.Minute, func() bool { return len(c.hooks()) > 0 })
		c.await("an unstamped write is refused", time.Minute, func() bool { return unstamped(c.patch(t.Context(), c.Admin, "guarded", "unstamped")) })
	}
	fill()
	c.run("uninstall", "fencedlease", "--no-hooks", "--wait", "--timeout=2m")
	c.leftNothing()
	writable := func() bool { return c.patch(t.Context(), c.Admin, "guarded", "unfenced") == nil }
	c.await("what is guarded can be written", time.Minute, writable) // the API server lags
	c.deleteNamespace(c.tenant)

	// The names that a release without its hooks left are in the way of nothing.
	fill()
	c.deleteNamespace(namespace)
	c.await("what is guarded can be written", time.Minute, writable)
	c.await("webhook and policies went with the namespace", time.Minute, func() bool { return len(c.left()) == 0 })
	c.deleteNamespace(c.tenant)
}

// deleteNamespace asserts that a namespace goes within a minute.
func (c *cluster) deleteNamespace(name string) {
	c.t.Helper()
	c.must(c.Admin.Delete(c.t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}))
	c.await("namespace "+name+" is gone", time.Minute, func() bool {
		return apierrors.IsNotFound(c.Admin.Get(c.t.Context(), client.ObjectKey{Name: name}, &corev1.Namespace{}))
	})
}

func unstamped(err error) bool {
	reason, ok := fenceclient.Reason(err)
	return ok && reason == fence.Unstamped
}

// fenced asserts that the fence stands: the holder writes, the superseded one
// does not.
func (c *cluster) fenced(when string, stale, current fence.Token) {
	c.t.Helper()
	if err := c.patch(c.t.Context(), c.with(stale), "guarded", when); !fenceclient.IsStale(err) {
		c.t.Errorf("%s a superseded holder's write: %v", when, err)
	}
	if err := c.patch(c.t.Context(), c.with(current), "guarded", when); err != nil {
		c.t.Errorf("%s the holder's write: %v", when, err)
	}
	if err := c.patch(c.t.Context(), c.Admin, "guarded", "unstamped"); !unstamped(err) {
		c.t.Errorf("%s an unstamped write: %v", when, err)
	}
}

func (c *cluster) hooks() []admissionv1.ValidatingWebhook {
	c.t.Helper()
	configuration := &admissionv1.ValidatingWebhookConfiguration{}
	c.must(c.Admin.Get(c.t.Context(), client.ObjectKey{Name: webhooks.ConfigurationName}, configuration))
	return configuration.Webhooks
}

// spared tells whether the webhook leaves to the policies what they decide.
func (c *cluster) spared() bool {
	c.t.Helper()
	hooks := c.hooks()
	return len(hooks) > 0 && slices.ContainsFunc(hooks[0].MatchConditions, func(m admissionv1.MatchCondition) bool { return m.Name == policy.Spare().Name })
}

func (c *cluster) upgraded() bool {
	c.t.Helper()
	crd := &apiextensionsv1.CustomResourceDefinition{}
	c.must(c.Admin.Get(c.t.Context(), client.ObjectKey{Name: "fencedleases.fencedlease.io"}, crd))
	for _, column := range crd.Spec.Versions[0].AdditionalPrinterColumns {
		if column.Name == "Upgraded" {
			return true
		}
	}
	return false
}

func (c *cluster) nothingTerminates() {
	c.t.Helper()
	c.await("nothing is terminating", time.Minute, func() bool {
		for _, list := range []client.ObjectList{&corev1.NamespaceList{}, &corev1.PodList{}, &corev1.ConfigMapList{}, &apiextensionsv1.CustomResourceDefinitionList{}} {
			c.must(c.Admin.List(c.t.Context(), list))
			if strings.Contains(fmt.Sprint(list), "Terminating") {
				return false
			}
		}
		pods := &corev1.PodList{}
		c.must(c.Admin.List(c.t.Context(), pods, client.InNamespace(namespace)))
		return len(pods.Items) == 0
	})
}

func edit(t *testing.T, file, pattern, with string) {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	changed := regexp.MustCompile(pattern).ReplaceAll(data, []byte(with))
	if bytes.Equal(changed, data) {
		t.Fatalf("%s: nothing matches %s", file, pattern)
	}
	if err := os.WriteFile(file, changed, 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestUnderLoad writes guarded objects without a pause while the certificates
// rotate and while each replica is deleted, and killed. No write of the holder
// fails, and no superseded one gets through.
func TestUnderLoad(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.run("install", "fencedlease", chart, "--wait", "--timeout=2m", "--set", "drainSeconds=2")
	c.makeTenant()
	first := c.acquire("first")
	superseded := first.Token()
	c.must(first.Release(t.Context()))
	holder := c.acquire("second")
	defer func() { _ = holder.Release(context.Background()) }()
	c.must(c.with(holder.Token()).Create(t.Context(), c.object("guarded", holder.Token())))
	c.await("the webhook is active", time.Minute, func() bool { return len(c.hooks()) > 0 })

	var writes, created, stale atomic.Int64
	var creating sync.RWMutex // no create is in flight once it is locked
	ctx, stop := context.WithCancel(t.Context())
	var writers sync.WaitGroup
	const perSecond = 240 // a tick that comes late is one write less
	repeat := func(rate int, write func(n int64) error) {
		writers.Go(func() {
			tick := time.NewTicker(time.Second / time.Duration(rate))
			defer tick.Stop()
			for n := int64(0); ; n++ {
				select {
				case <-tick.C:
				case <-ctx.Done():
					return
				}
				if err := write(n); err != nil && ctx.Err() == nil {
					t.Error(err)
				}
			}
		})
	}
	current, former := c.with(holder.Token()), c.with(superseded)
	const writersOfHolder = 8 // each on an object of its own: none waits for another
	began := time.Now()
	for i := range writersOfHolder {
		object := fmt.Sprintf("guarded-%d", i)
		c.must(current.Create(t.Context(), c.object(object, holder.Token())))
		repeat(perSecond/writersOfHolder, func(n int64) error {
			writes.Add(1)
			if err := c.patch(ctx, current, object, fmt.Sprint(n)); err != nil {
				return fmt.Errorf("the holder's write: %w", err)
			}
			return nil
		})
	}
	repeat(20, func(n int64) error { // what only the webhook judges
		if !creating.TryRLock() {
			return nil
		}
		defer creating.RUnlock()
		created.Add(1)
		if err := current.Create(ctx, c.object(fmt.Sprintf("new-%d", n), holder.Token())); err != nil {
			return fmt.Errorf("the holder's create: %w", err)
		}
		return nil
	})
	repeat(20, func(n int64) error {
		stale.Add(1)
		if err := c.patch(ctx, former, "guarded", "stale"); err == nil {
			return errors.New("a superseded holder's write committed")
		}
		if err := former.Create(ctx, c.object(fmt.Sprintf("stale-%d", n), superseded)); err == nil {
			return errors.New("a superseded holder's create committed")
		}
		return nil
	})
	repeat(20, func(int64) error { return c.trusts(ctx) })
	more := func(what string) { // a second of load
		t.Helper()
		until := writes.Load() + perSecond/2
		c.await(what, time.Minute, func() bool { return writes.Load() >= until })
	}
	more("writes pass")

	// Everything anew, the authority too.
	before := c.hooks()[0].ClientConfig.CABundle
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: certificate}}
	c.must(c.Admin.Patch(t.Context(), secret, client.RawPatch(types.MergePatchType, []byte(`{"data":null}`))))
	c.await("a new authority is trusted", time.Minute, func() bool { return !bytes.Equal(before, c.hooks()[0].ClientConfig.CABundle) })
	c.must(c.Admin.Get(t.Context(), client.ObjectKeyFromObject(secret), secret))
	c.await("every replica serves a new certificate", time.Minute, func() bool { return c.servesAll(secret.Data["tls.crt"]) })
	more("writes pass after the rotation")

	for _, p := range c.kubelet.running("fencedlease-") {
		c.must(c.Admin.Delete(t.Context(), p.Pod))
		c.await("the Pod is replaced", time.Minute, func() bool { return c.replaced(p) })
		more("writes pass after a replica was deleted")
	}
	creating.Lock() // a call in flight to a process that is killed fails
	for _, p := range c.kubelet.running("fencedlease-") {
		p.signal(syscall.SIGKILL)
		more("writes pass while a replica is dead")
		c.await("the replica is back", time.Minute, func() bool { return c.available() == 2 })
	}
	stop()
	writers.Wait()
	elapsed := time.Since(began)

	// All nodes at once: the holder goes on, what is not guarded too, and the
	// installation comes back by itself.
	for _, p := range c.kubelet.running("fencedlease-") {
		p.signal(syscall.SIGKILL)
	}
	c.must(c.patch(t.Context(), current, "guarded", "while nothing runs"))
	c.must(c.Admin.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: c.tenant, Name: "unguarded"}}))
	if err := c.patch(t.Context(), former, "guarded", "stale"); err == nil {
		t.Error("a superseded holder's write committed while nothing runs")
	}
	c.await("both replicas are back", time.Minute, func() bool { return c.available() == 2 })
	c.await("creates are judged again", time.Minute, func() bool {
		return current.Create(t.Context(), c.object("afterwards", holder.Token())) == nil
	})

	// None at all, and back: nothing of ours keeps a Pod from starting.
	scale := func(replicas int32) {
		t.Helper()
		d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "fencedlease"}}
		c.must(c.Admin.Patch(t.Context(), d, client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, replicas))))
		c.await(fmt.Sprintf("%d replicas run", replicas), time.Minute, func() bool {
			return c.available() == replicas && len(c.kubelet.running("fencedlease-")) == int(replicas)
		})
	}
	scale(0)
	c.must(c.patch(t.Context(), current, "guarded", "with no replica"))
	c.must(c.Admin.Delete(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: c.tenant, Name: "unguarded"}}))
	if err := current.Create(t.Context(), c.object("unjudged", holder.Token())); err == nil {
		t.Error("what only the webhook judges was made with no replica")
	}
	scale(2)
	c.await("creates are judged again", time.Minute, func() bool {
		return current.Create(t.Context(), c.object("after-none", holder.Token())) == nil
	})
	t.Logf("%d writes (%.0f a second) and %d creates of the holder, %d stale attempts",
		writes.Load(), float64(writes.Load())/elapsed.Seconds(), created.Load(), stale.Load())
}

func (c *cluster) available() int32 {
	c.t.Helper()
	d := &appsv1.Deployment{}
	c.must(c.Admin.Get(c.t.Context(), client.ObjectKey{Namespace: namespace, Name: "fencedlease"}, d))
	return d.Status.AvailableReplicas
}

func (c *cluster) replaced(gone *pod) bool {
	for _, p := range c.kubelet.running("fencedlease-") {
		if p.UID == gone.UID {
			return false
		}
	}
	return c.available() == 2
}
