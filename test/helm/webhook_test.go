package helm

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	admissionv1 "k8s.io/api/admission/v1"
	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
)

// TestWebhookAlone: what the webhook alone has to bear, and a control plane's
// account that it judges.
func TestWebhookAlone(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	const autoscaler = "system:serviceaccount:kube-system:horizontal-pod-autoscaler"
	c.run("install", "fencedlease", chart, "--wait", "--timeout=2m", "--set", "layers.policies=false", "--set", "judgedUsers={"+autoscaler+"}")
	c.makeTenant()
	c.await("the webhook is active", time.Minute, func() bool { return len(c.hooks()) > 0 })
	// Long enough to renew on a machine that these tests keep busy.
	lease := &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: c.tenant, Name: "main"}}
	c.must(c.Admin.Patch(t.Context(), lease, client.RawPatch(types.MergePatchType, []byte(`{"spec":{"leaseDurationSeconds":600}}`))))
	held := c.acquire("holder")
	defer func() { _ = held.Release(context.Background()) }()
	token := held.Token()
	t.Run("roll-outs", func(t *testing.T) { c.rollOuts(t, token) })
	t.Run("large objects", func(t *testing.T) { c.largeObjects(t, token) })
	t.Run("judged autoscaler", func(t *testing.T) { c.judgedAutoscaler(t, token) })
}

// patiently tries for about a minute.
var patiently = wait.Backoff{Duration: 100 * time.Millisecond, Factor: 2, Jitter: 0.5, Steps: 9}

// largeObjects updates guarded objects of nearly 1 MiB, so that each review
// holds two of them, fifty at a time, and sends the webhook far more than an
// API server ever does. The replicas stay below the chart's memory limit.
func (c *cluster) largeObjects(t *testing.T, token fence.Token) {
	const objects = 50
	holder := c.with(token)
	each := func(do func(o *corev1.ConfigMap) error) {
		t.Helper()
		var all errgroup.Group
		for i := range objects {
			all.Go(func() error {
				// Fifty at once are more than a busy machine sends in the
				// webhook's three seconds; nothing else may fail.
				return retry.OnError(patiently, apierrors.IsInternalError, func() error {
					return do(c.object(fmt.Sprintf("large-%d", i), token))
				})
			})
		}
		if err := all.Wait(); err != nil {
			t.Fatal(err)
		}
	}
	each(func(o *corev1.ConfigMap) error {
		o.Data = map[string]string{"data": strings.Repeat("x", 1<<20-4096)}
		return client.IgnoreAlreadyExists(holder.Create(t.Context(), o))
	})
	each(func(o *corev1.ConfigMap) error {
		return holder.Patch(t.Context(), o, client.RawPatch(types.MergePatchType, []byte(`{"data":{"changed":"yes"}}`)))
	})

	body := []byte(`{"kind":"AdmissionReview","apiVersion":"admission.k8s.io/v1","request":{"uid":"1","object":"` + strings.Repeat("x", 20<<20) + `"}}`)
	slices := &discoveryv1.EndpointSliceList{}
	c.must(c.Admin.List(t.Context(), slices, client.InNamespace(namespace), client.MatchingLabels{discoveryv1.LabelManagedBy: "test"}))
	straight := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}} //nolint:gosec // whom it is sent to does not matter
	for _, s := range slices.Items {
		url := fmt.Sprintf("https://%s:%d%s", s.Endpoints[0].Addresses[0], *s.Ports[0].Port, *c.hooks()[0].ClientConfig.Service.Path)
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, bytes.NewReader(body))
		c.must(err)
		req.Header.Set("Content-Type", "application/json")
		resp, err := straight.Do(req)
		c.must(err)
		answer, err := io.ReadAll(resp.Body)
		c.must(err)
		_ = resp.Body.Close()
		review := &admissionv1.AdmissionReview{}
		if err := json.Unmarshal(answer, review); err != nil || review.Response == nil || review.Response.Allowed || review.Response.Result.Code != http.StatusRequestEntityTooLarge {
			t.Errorf("20 MiB straight to the port: %d %.300s (%v)", resp.StatusCode, answer, err)
		}
	}

	d := &appsv1.Deployment{}
	c.must(c.Admin.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: "fencedlease"}, d))
	limit := d.Spec.Template.Spec.Containers[0].Resources.Limits.Memory().Value()
	for _, p := range c.kubelet.running("fencedlease-") {
		if peak := p.peakMemory(t); peak > limit {
			t.Errorf("%s used %d MiB, and is killed above %d MiB", p.Name, peak>>20, limit>>20)
		} else {
			t.Logf("%s used %d MiB at most", p.Name, peak>>20)
		}
	}
}

// peakMemory is the most that the process ever had in memory, in bytes.
func (p *pod) peakMemory(t *testing.T) int64 {
	t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		if fields := strings.Fields(line); fields[0] == "VmHWM:" {
			kib, err := strconv.ParseInt(fields[1], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			return kib << 10
		}
	}
	t.Fatal("no VmHWM")
	return 0
}

// judgedAutoscaler: an autoscaler that the installation judges says why it
// cannot scale, and does not spin.
func (c *cluster) judgedAutoscaler(t *testing.T, token fence.Token) {
	labels := map[string]string{"app": "web"}
	d := &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: c.tenant, Name: "web", Labels: map[string]string{fence.LabelLease: "main"}, Annotations: map[string]string{fence.AnnotationToken: token.String()}},
		Spec: appsv1.DeploymentSpec{
			Replicas: new(int32(1)), Paused: true, // no Pod is needed
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "registry.example.com/c:1"}}}},
		},
	}
	c.must(c.Admin.Create(t.Context(), d))
	scaler := &autoscalingv1.HorizontalPodAutoscaler{
		ObjectMeta: metav1.ObjectMeta{Namespace: c.tenant, Name: "web"},
		Spec: autoscalingv1.HorizontalPodAutoscalerSpec{
			ScaleTargetRef: autoscalingv1.CrossVersionObjectReference{APIVersion: "apps/v1", Kind: "Deployment", Name: "web"},
			MinReplicas:    new(int32(3)), MaxReplicas: 5, // below the minimum it scales without metrics
		},
	}
	c.must(c.Admin.Create(t.Context(), scaler))
	refused := func() (times int32, message string) {
		events := &corev1.EventList{}
		c.must(c.Admin.List(t.Context(), events, client.InNamespace(c.tenant)))
		for _, e := range events.Items {
			if e.Reason == "FailedRescale" && e.InvolvedObject.Name == scaler.Name {
				times, message = times+max(1, e.Count), e.Message
			}
		}
		return times, message
	}
	began := time.Now()
	c.await("the autoscaler has tried again and again", time.Minute, func() bool {
		times, _ := refused()
		return times >= 6
	})
	times, message := refused()
	if !strings.Contains(message, string(fence.Unstamped)+": ["+c.tenant+"/main]") {
		t.Errorf("the event does not say why: %s", message)
	}
	// It looks once a second here, and once more at the start.
	if most := int32(time.Since(began)/time.Second) + 2; times > most {
		t.Errorf("%d attempts in %s", times, time.Since(began))
	}
	c.must(c.Admin.Get(t.Context(), client.ObjectKeyFromObject(d), d))
	if *d.Spec.Replicas != 1 {
		t.Errorf("it scaled to %d", *d.Spec.Replicas)
	}
}

// rollOuts restarts the replicas under 200 writes a second that each need the
// webhook, and tears the files of its certificate meanwhile. No write fails.
func (c *cluster) rollOuts(t *testing.T, token fence.Token) {
	const writers, perSecond = 10, 200
	holder := c.with(token)
	ctx, stop := context.WithCancel(t.Context())
	var all sync.WaitGroup
	var writes, failed atomic.Int64
	for i := range writers {
		name := fmt.Sprintf("busy-%d", i)
		c.must(holder.Create(t.Context(), c.object(name, token)))
		all.Go(func() {
			tick := time.NewTicker(writers * time.Second / perSecond)
			defer tick.Stop()
			for {
				select {
				case <-tick.C:
				case <-ctx.Done():
					return
				}
				if err := c.patch(ctx, holder, name, fmt.Sprint(writes.Add(1))); err != nil && ctx.Err() == nil {
					failed.Add(1)
					t.Logf("a write: %v", err)
				}
				if i > 0 {
					continue
				}
				if err := c.trusts(ctx); err != nil && ctx.Err() == nil { // as an API server that starts now
					failed.Add(1)
					t.Logf("a new connection: %v", err)
				}
			}
		})
	}
	defer func() { stop(); all.Wait() }()
	more := func(what string) { // a second of load
		t.Helper()
		until := writes.Load() + perSecond/2
		c.await(what, time.Minute, func() bool { return writes.Load() >= until })
		if n := failed.Swap(0); n > 0 {
			t.Errorf("%s: %d failures", what, n)
		}
	}
	more("writes pass")

	for _, p := range c.kubelet.running("fencedlease-") {
		p.tearCertificate(t)
	}
	for range 3 { // the files are looked at whenever they change, and now and then
		more("writes pass with torn files")
	}
	secret := &corev1.Secret{}
	c.must(c.Admin.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: certificate}, secret))
	if !c.servesAll(secret.Data["tls.crt"]) {
		t.Error("with torn files another certificate is served than the last good one")
	}

	restart := func(replicas int32) {
		t.Helper()
		d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "fencedlease"}}
		c.must(c.Admin.Patch(t.Context(), d, client.RawPatch(types.MergePatchType,
			fmt.Appendf(nil, `{"spec":{"replicas":%d,"template":{"metadata":{"annotations":{"restartedAt":"%d"}}}}}`, replicas, writes.Load()))))
		c.await("it is rolled out", time.Minute, func() bool {
			c.must(c.Admin.Get(t.Context(), client.ObjectKeyFromObject(d), d))
			s := d.Status
			return s.ObservedGeneration == d.Generation && s.UpdatedReplicas == replicas && s.AvailableReplicas == replicas && s.Replicas == replicas &&
				len(c.kubelet.running("fencedlease-")) == int(replicas)
		})
		more(fmt.Sprintf("writes pass after a roll-out of %d replicas", replicas))
	}
	restart(2)
	// A roll-out surges: one replica takes over from one, without a gap.
	restart(1)
	restart(1)
	restart(2)
}

// tearCertificate leaves half a certificate and no key where the process looks
// for them.
func (p *pod) tearCertificate(t *testing.T) {
	t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, arg := range p.cmd.Args {
		dir, ok := strings.CutPrefix(arg, "--webhook-cert-dir=")
		if !ok {
			continue
		}
		good, err := os.ReadFile(filepath.Join(dir, "tls.crt"))
		if err != nil {
			t.Fatal(err)
		}
		for name, torn := range map[string][]byte{"tls.crt": good[:len(good)/2], "tls.key": nil} {
			if err := os.WriteFile(filepath.Join(dir, name), torn, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		return
	}
	t.Fatalf("%s: no folder of certificates in %q", p.Name, p.cmd.Args)
}
