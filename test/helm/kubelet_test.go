package helm

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/internal/controlplane"
	"github.com/fencedlease/fencedlease/test/env"
	"github.com/fencedlease/fencedlease/webhooks"
)

const nodeName = "node"

// kubelet plays the scheduler, the only node and its network: each Pod's
// container runs as a process with its own command, arguments, environment and
// service account, gets the probes, the preStop hook and the signals that a
// kubelet gives, and stands behind the Service while it is ready. Ports are
// moved, since all Pods share this machine's address.
type kubelet struct {
	t       *testing.T
	e       *env.Environment
	program string
	address string

	mu   sync.Mutex
	pods map[types.UID]*pod
	done sync.WaitGroup
}

// pod is a running Pod.
type pod struct {
	*corev1.Pod
	mu  sync.Mutex
	cmd *exec.Cmd
	// stopping is closed when the Pod is deleted.
	stopping chan struct{}
	stop     sync.Once
	log      *os.File
}

// startKubelet runs until the test ends.
func startKubelet(t *testing.T, e *env.Environment, program string) *kubelet {
	t.Helper()
	k := &kubelet{t: t, e: e, program: program, address: ownAddress(t), pods: map[types.UID]*pod{}}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName, Labels: map[string]string{"kubernetes.io/hostname": nodeName}}}
	if err := e.Admin.Create(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	k.done.Go(func() { k.heartbeat(ctx) })
	k.done.Go(func() {
		tick := time.NewTicker(50 * time.Millisecond)
		defer tick.Stop()
		for {
			if err := k.sync(ctx); err != nil && ctx.Err() == nil {
				k.t.Logf("kubelet: %v", err)
			}
			select {
			case <-tick.C:
			case <-ctx.Done():
				return
			}
		}
	})
	t.Cleanup(func() {
		cancel()
		k.mu.Lock()
		for _, p := range k.pods {
			p.signal(syscall.SIGKILL)
		}
		k.mu.Unlock()
		k.done.Wait()
	})
	return k
}

// ownAddress is an address of this machine that an EndpointSlice may hold: not
// loopback.
func ownAddress(t *testing.T) string {
	t.Helper()
	addresses, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addresses {
		if ip, ok := a.(*net.IPNet); ok && ip.IP.To4() != nil && ip.IP.IsGlobalUnicast() {
			return ip.IP.String()
		}
	}
	t.Fatal("this machine has no IPv4 address but loopback; the API server calls webhooks at addresses of EndpointSlices, which may not be loopback")
	return ""
}

func freePort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	return l.Addr().(*net.TCPAddr).Port
}

// heartbeat keeps the node ready.
func (k *kubelet) heartbeat(ctx context.Context) {
	tick := time.NewTicker(5 * time.Second)
	defer tick.Stop()
	for {
		node := &corev1.Node{}
		if err := k.e.Admin.Get(ctx, client.ObjectKey{Name: nodeName}, node); err == nil {
			now := metav1.Now()
			node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "KubeletReady", LastHeartbeatTime: now, LastTransitionTime: now}}
			_ = k.e.Admin.Status().Update(ctx, node)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

func (k *kubelet) sync(ctx context.Context) error {
	pods := &corev1.PodList{}
	if err := k.e.Admin.List(ctx, pods); err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	there := map[types.UID]bool{}
	for i := range pods.Items {
		there[pods.Items[i].UID] = pods.Items[i].DeletionTimestamp == nil
	}
	for uid, running := range k.pods {
		if !there[uid] {
			running.stop.Do(func() { close(running.stopping) })
		}
	}
	for i := range pods.Items {
		p := &pods.Items[i]
		running := k.pods[p.UID]
		switch {
		case running != nil, p.DeletionTimestamp != nil:
		case p.Spec.NodeName == "":
			binding := &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Namespace: p.Namespace, Name: p.Name}, Target: corev1.ObjectReference{Kind: "Node", Name: nodeName}}
			if err := k.e.Admin.SubResource("binding").Create(ctx, p, binding); err != nil {
				return fmt.Errorf("bind %s: %w", p.Name, err)
			}
		case p.Status.Phase == corev1.PodPending:
			running = &pod{Pod: p, stopping: make(chan struct{})}
			k.pods[p.UID] = running
			k.done.Go(func() { k.run(ctx, running) })
		}
	}
	return nil
}

// run is the life of a Pod.
func (k *kubelet) run(ctx context.Context, p *pod) {
	defer func() {
		k.unready(ctx, p)
		k.mu.Lock()
		delete(k.pods, p.UID)
		k.mu.Unlock()
	}()
	var err error
	if p.log, err = os.CreateTemp("", p.Name+"-*.log"); err != nil {
		k.t.Errorf("kubelet: %v", err)
		return
	}
	defer func() {
		if k.t.Failed() {
			text, _ := os.ReadFile(p.log.Name())
			k.t.Logf("--- %s\n%s", p.Name, text)
		}
		_ = p.log.Close()
		_ = os.Remove(p.log.Name())
	}()
	for {
		probe, port, exited, err := k.start(ctx, p)
		if err != nil {
			if ctx.Err() == nil {
				k.t.Errorf("kubelet: start %s: %v", p.Name, err)
			}
			return
		}
		phase := corev1.PodRunning
		k.status(ctx, p, phase, false)
		ready := make(chan struct{})
		watching, cancel := context.WithCancel(ctx)
		go k.probe(watching, probe, ready)
		for stopped := false; !stopped; {
			select {
			case <-ready:
				ready = nil
				k.status(ctx, p, phase, true)
				k.serve(ctx, p, port)
			case err := <-exited:
				stopped = true
				k.unready(ctx, p)
				if p.Spec.RestartPolicy != corev1.RestartPolicyAlways && err == nil {
					cancel()
					k.status(ctx, p, corev1.PodSucceeded, false)
					select {
					case <-p.stopping:
						k.remove(ctx, p)
					case <-ctx.Done():
					}
					return
				}
				_, _ = fmt.Fprintf(p.log, "--- ended: %v\n", err)
				k.status(ctx, p, phase, false)
			case <-p.stopping:
				cancel()
				k.terminate(ctx, p, exited)
				k.remove(ctx, p)
				return
			case <-ctx.Done():
				cancel()
				p.signal(syscall.SIGKILL)
				<-exited
				return
			}
		}
		cancel() // and start it again
	}
}

// start starts a Pod's only container.
func (k *kubelet) start(ctx context.Context, p *pod) (probe string, port int, exited <-chan error, err error) {
	c := p.Spec.Containers[0]
	cfg, err := k.account(ctx, p)
	if err != nil {
		return "", 0, nil, err
	}
	dir, err := os.MkdirTemp("", p.Name+"-")
	if err != nil {
		return "", 0, nil, err
	}
	kubeconfig, err := controlplane.KubeConfig(cfg)
	if err != nil {
		return "", 0, nil, err
	}
	file := filepath.Join(dir, "kubeconfig")
	if err := os.WriteFile(file, kubeconfig, 0o600); err != nil {
		return "", 0, nil, err
	}
	args := append(append([]string(nil), c.Command...), c.Args...)
	if c.ReadinessProbe != nil { // a server: its ports are its own on a node, and shared here
		port = freePort(k.t)
		probes := freePort(k.t)
		probe = fmt.Sprintf("http://127.0.0.1:%d%s", probes, c.ReadinessProbe.HTTPGet.Path)
		args = append(args, fmt.Sprintf("--webhook-port=%d", port), fmt.Sprintf("--health-probe-bind-address=127.0.0.1:%d", probes),
			fmt.Sprintf("--metrics-bind-address=127.0.0.1:%d", freePort(k.t)), "--webhook-cert-dir="+filepath.Join(dir, "certificate"))
	}
	cmd := exec.Command(k.program, args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+file)
	for _, v := range c.Env {
		value := v.Value
		if v.ValueFrom != nil && v.ValueFrom.FieldRef != nil && v.ValueFrom.FieldRef.FieldPath == "metadata.namespace" {
			value = p.Namespace
		}
		cmd.Env = append(cmd.Env, v.Name+"="+value)
	}
	cmd.Stdout, cmd.Stderr = p.log, p.log
	if err := cmd.Start(); err != nil {
		return "", 0, nil, err
	}
	p.mu.Lock()
	p.cmd = cmd
	p.mu.Unlock()
	ended := make(chan error, 1)
	go func() {
		ended <- cmd.Wait()
		_ = os.RemoveAll(dir)
	}()
	return probe, port, ended, nil
}

// account gives the configuration of a Pod's service account, with a token
// that is bound to the Pod.
func (k *kubelet) account(ctx context.Context, p *pod) (*rest.Config, error) {
	token := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
		BoundObjectRef: &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: p.Name, UID: p.UID},
	}}
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: p.Namespace, Name: p.Spec.ServiceAccountName}}
	if err := k.e.Admin.SubResource("token").Create(ctx, account, token); err != nil {
		return nil, fmt.Errorf("a token of %s: %w", account.Name, err)
	}
	cfg := rest.AnonymousClientConfig(k.e.Config)
	cfg.BearerToken = token.Status.Token
	return cfg, nil
}

// probe closes ready once the readiness probe succeeds. Who stops being ready
// is not modelled.
func (k *kubelet) probe(ctx context.Context, url string, ready chan<- struct{}) {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for url != "" {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return
		}
		if resp, err := http.DefaultClient.Do(req); err == nil {
			_ = resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				close(ready)
				return
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// terminate does what a kubelet does to a Pod that is being deleted.
func (k *kubelet) terminate(ctx context.Context, p *pod, exited <-chan error) {
	k.unready(ctx, p)
	if hook := p.Spec.Containers[0].Lifecycle; hook != nil && hook.PreStop != nil && hook.PreStop.Sleep != nil {
		select {
		case <-time.After(time.Duration(hook.PreStop.Sleep.Seconds) * time.Second):
		case <-exited:
			return
		}
	}
	p.signal(syscall.SIGTERM)
	select {
	case err := <-exited:
		if err != nil {
			k.t.Errorf("%s ended with %v", p.Name, err)
		}
	case <-time.After(time.Duration(*p.Spec.TerminationGracePeriodSeconds) * time.Second):
		k.t.Errorf("%s did not end in time", p.Name)
		p.signal(syscall.SIGKILL)
		<-exited
	}
}

func (p *pod) signal(s syscall.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cmd != nil {
		_ = p.cmd.Process.Signal(s)
	}
}

func (k *kubelet) status(ctx context.Context, p *pod, phase corev1.PodPhase, ready bool) {
	status := corev1.ConditionFalse
	if ready {
		status = corev1.ConditionTrue
	}
	now := &corev1.Pod{}
	if err := k.e.Admin.Get(ctx, client.ObjectKeyFromObject(p.Pod), now); err != nil {
		return // gone
	}
	before := client.MergeFrom(now.DeepCopy())
	now.Status.Phase = phase
	now.Status.Conditions = []corev1.PodCondition{
		{Type: corev1.PodReady, Status: status, LastTransitionTime: metav1.Now()},
		{Type: corev1.ContainersReady, Status: status, LastTransitionTime: metav1.Now()},
	}
	container := corev1.ContainerStatus{Name: p.Spec.Containers[0].Name, Ready: ready, Started: &ready, State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: metav1.Now()}}}
	if phase == corev1.PodSucceeded {
		container.State = corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 0, FinishedAt: metav1.Now()}}
	}
	now.Status.ContainerStatuses = []corev1.ContainerStatus{container}
	if err := k.e.Admin.Status().Patch(ctx, now, before); err != nil && ctx.Err() == nil && !apierrors.IsNotFound(err) {
		k.t.Errorf("kubelet: status of %s: %v", p.Name, err)
	}
}

func (k *kubelet) remove(ctx context.Context, p *pod) {
	_ = k.e.Admin.Delete(ctx, p.Pod, client.GracePeriodSeconds(0), client.Preconditions{UID: &p.UID})
}

// serve puts a Pod behind the Services that select it.
func (k *kubelet) serve(ctx context.Context, p *pod, port int) {
	services := &corev1.ServiceList{}
	if err := k.e.Admin.List(ctx, services, client.InNamespace(p.Namespace)); err != nil {
		return
	}
	for _, s := range services.Items {
		if len(s.Spec.Selector) == 0 || !labels.SelectorFromSet(s.Spec.Selector).Matches(labels.Set(p.Labels)) || !strings.HasSuffix(s.Name, "-webhook") {
			continue
		}
		slice := &discoveryv1.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Namespace: p.Namespace, Name: s.Name + "-" + p.Name, Labels: map[string]string{discoveryv1.LabelServiceName: s.Name, discoveryv1.LabelManagedBy: "test"}},
			AddressType: discoveryv1.AddressTypeIPv4,
			Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{k.address}, Conditions: discoveryv1.EndpointConditions{Ready: new(true)}}},
			Ports:       []discoveryv1.EndpointPort{{Name: new(""), Port: new(int32(port)), Protocol: new(corev1.ProtocolTCP)}}, //nolint:gosec // a port
		}
		if err := k.e.Admin.Create(ctx, slice); err != nil && ctx.Err() == nil {
			k.t.Errorf("kubelet: %v", err)
		}
	}
}

// unready takes a Pod from behind the Services.
func (k *kubelet) unready(ctx context.Context, p *pod) {
	slices := &discoveryv1.EndpointSliceList{}
	ctx = context.WithoutCancel(ctx) // at the end, too
	if err := k.e.Admin.List(ctx, slices, client.InNamespace(p.Namespace), client.MatchingLabels{discoveryv1.LabelManagedBy: "test"}); err != nil {
		return
	}
	for i := range slices.Items {
		if strings.HasSuffix(slices.Items[i].Name, "-"+p.Name) {
			_ = k.e.Admin.Delete(ctx, &slices.Items[i])
		}
	}
}

// running gives the Pods that run, by name.
func (k *kubelet) running(prefix string) (pods []*pod) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, p := range k.pods {
		if strings.HasPrefix(p.Name, prefix) {
			pods = append(pods, p)
		}
	}
	return pods
}

// trusts dials every replica anew, as an API server does that knows the
// configuration as it is now, and fails where it does not trust what is served.
func (c *cluster) trusts(ctx context.Context) error {
	configuration := &admissionv1.ValidatingWebhookConfiguration{}
	slices := &discoveryv1.EndpointSliceList{}
	if err := errors.Join(
		c.Admin.Get(ctx, client.ObjectKey{Name: webhooks.ConfigurationName}, configuration),
		c.Admin.List(ctx, slices, client.InNamespace(namespace), client.MatchingLabels{discoveryv1.LabelManagedBy: "test"}),
	); err != nil {
		return err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(configuration.Webhooks[0].ClientConfig.CABundle)
	dialer := &tls.Dialer{Config: &tls.Config{RootCAs: roots, ServerName: "fencedlease-webhook." + namespace + ".svc", MinVersion: tls.VersionTLS12}}
	for _, s := range slices.Items {
		conn, err := dialer.DialContext(ctx, "tcp", fmt.Sprintf("%s:%d", s.Endpoints[0].Addresses[0], *s.Ports[0].Port))
		var untrusted *tls.CertificateVerificationError
		if errors.As(err, &untrusted) {
			return fmt.Errorf("an API server that connects to %s now: %w", s.Name, err)
		} else if err == nil {
			_ = conn.Close()
		}
	}
	return nil
}

// servesAll tells whether every endpoint of the webhook shows a certificate.
func (c *cluster) servesAll(want []byte) bool {
	c.t.Helper()
	slices := &discoveryv1.EndpointSliceList{}
	c.must(c.Admin.List(c.t.Context(), slices, client.InNamespace(namespace), client.MatchingLabels{discoveryv1.LabelManagedBy: "test"}))
	block, _ := pem.Decode(want)
	if block == nil {
		c.t.Fatalf("no certificate: %q", want)
	}
	for _, s := range slices.Items {
		dialer := &tls.Dialer{Config: &tls.Config{InsecureSkipVerify: true}} //nolint:gosec // to look at it
		conn, err := dialer.DialContext(c.t.Context(), "tcp", fmt.Sprintf("%s:%d", s.Endpoints[0].Addresses[0], *s.Ports[0].Port))
		if err != nil {
			return false
		}
		shown := conn.(*tls.Conn).ConnectionState().PeerCertificates[0].Raw
		_ = conn.Close()
		if !bytes.Equal(shown, block.Bytes) {
			return false
		}
	}
	return len(slices.Items) > 0
}
