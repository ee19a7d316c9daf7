package observability

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/gateway"
	"github.com/fencedlease/fencedlease/internal/controlplane"
	"github.com/fencedlease/fencedlease/internal/operator"
	"github.com/fencedlease/fencedlease/webhooks"
)

// secret is the content that a guarded object holds. No log may have it.
const secret = "kept-to-itself"

// output is what the operator prints.
type output struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// inProcess is what the operator in this process prints.
var inProcess output

// TestMain sets the logger before any test: controller-runtime takes one once,
// and none where nobody has set one after half a minute.
func TestMain(m *testing.M) {
	// As the manager command has it: JSON, at the level of production.
	ctrl.SetLogger(zap.New(zap.WriteTo(&inProcess)))
	os.Exit(m.Run())
}

// world is a control plane with the operator as it ships and the gateway.
type world struct {
	*testing.T
	*controlplane.ControlPlane
	admin client.Client
	http  *http.Client
	log   *output
	// metrics, decide and webhook are where the operator's metrics, the
	// gateway's decisions and its metrics, and the webhook are served.
	metrics, decide, gatewayMetrics, webhook string
	stopOperator                             func()
	// cut keeps the gateway from the API server.
	cut       atomic.Bool
	namespace string
}

func (w *world) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

func (w *world) await(what string, done func() bool) {
	w.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	limit := time.After(time.Minute)
	for !done() {
		select {
		case <-tick.C:
		case <-limit:
			w.Fatalf("waited a minute until %s; the operator's log:\n%s", what, w.log.String())
		}
	}
}

func start(t *testing.T) *world {
	t.Helper()
	w := &world{T: t, namespace: "watched-namespace", log: &inProcess}
	cp, err := controlplane.Start(t.Context(), controlplane.Options{Webhook: true, Policy: true})
	w.must(err)
	w.ControlPlane = cp
	t.Cleanup(func() { w.must(cp.Stop()) })
	w.admin, err = client.New(cp.Config, client.Options{Scheme: operator.Scheme()})
	w.must(err)
	w.http, err = rest.HTTPClientFor(cp.Config)
	w.must(err)
	w.must(w.admin.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.namespace}}))
	w.startOperator()
	w.startGateway()
	return w
}

func (w *world) startOperator() {
	w.Helper()
	free, err := net.Listen("tcp", "127.0.0.1:0")
	w.must(err)
	o := operator.Defaults()
	o.Namespace, o.LeaderElect = controlplane.OperatorNamespace, true
	o.MetricsAddress, o.ProbeAddress = free.Addr().String(), "0"
	o.WebhookHost, o.WebhookPort = w.Webhook.LocalServingHost, w.Webhook.LocalServingPort
	o.Certificates, o.CertDir = operator.CertificatesFiles, w.Webhook.LocalServingCertDir
	w.metrics = "http://" + o.MetricsAddress + "/metrics"
	w.webhook = fmt.Sprintf("https://%s:%d/fence", o.WebhookHost, o.WebhookPort)
	w.must(free.Close())
	cfg, err := w.Operator()
	w.must(err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- operator.Run(ctx, cfg, o) }()
	w.stopOperator = sync.OnceFunc(func() { cancel(); w.must(<-done) })
	w.Cleanup(w.stopOperator)
	w.await("the webhook serves", func() bool {
		page, err := w.get(w.metrics)
		return err == nil && strings.Contains(page, "fencedlease_certificate_expiry_timestamp_seconds ")
	})
}

func (w *world) startGateway() {
	w.Helper()
	o := gateway.Defaults()
	o.Authentication, o.LedgerFile = gateway.AuthenticationNone, filepath.Join(w.TempDir(), "ledger")
	o.ProxyAddress, o.ProbeAddress, o.MetricsAddress, o.DecisionAddress = "", "", "127.0.0.1:0", "127.0.0.1:0"
	cfg := rest.CopyConfig(w.Config)
	cfg.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			if w.cut.Load() {
				return nil, errors.New("cut off")
			}
			return next.RoundTrip(r)
		})
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	listening := make(chan [2]string, 4)
	go func() {
		done <- gateway.Run(ctx, cfg, o, io.Discard, func(flag string, a net.Addr) { listening <- [2]string{flag, "http://" + a.String()} })
	}()
	w.Cleanup(func() { cancel(); w.must(<-done) })
	for w.decide == "" || w.gatewayMetrics == "" {
		select {
		case l := <-listening:
			switch l[0] {
			case "decision-bind-address":
				w.decide = l[1]
			case "metrics-bind-address":
				w.gatewayMetrics = l[1] + "/metrics"
			}
		case err := <-done:
			w.Fatalf("the gateway ended: %v", err)
		}
	}
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// get reads a page as the administrator.
func (w *world) get(url string) (string, error) {
	req, err := http.NewRequestWithContext(w.Context(), http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	c := w.http
	if !strings.HasPrefix(url, w.Config.Host) {
		c = http.DefaultClient
	}
	resp, err := c.Do(req)
	if err != nil {
		return "", err
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", resp.Status, body)
	}
	return string(body), err
}

// scrape adds what a page tells to what is known.
func (w *world) scrape(s series, url string) string {
	w.Helper()
	page, err := w.get(url)
	w.must(err)
	s.read(page)
	return page
}

func (w *world) lease(name string, change func(*v1alpha1.FencedLeaseSpec)) client.ObjectKey {
	w.Helper()
	l := &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name}, Spec: v1alpha1.FencedLeaseSpec{LeaseDurationSeconds: 600}}
	if change != nil {
		change(&l.Spec)
	}
	w.must(w.admin.Create(w.Context(), l))
	return client.ObjectKeyFromObject(l)
}

func (w *world) claim(lease client.ObjectKey, name string) *v1alpha1.LeaseClaim {
	w.Helper()
	c := &v1alpha1.LeaseClaim{ObjectMeta: metav1.ObjectMeta{Namespace: lease.Namespace, Name: name}, Spec: v1alpha1.LeaseClaimSpec{LeaseName: lease.Name}}
	w.must(w.admin.Create(w.Context(), c))
	return c
}

// token waits until a claim holds and gives its token.
func (w *world) token(c *v1alpha1.LeaseClaim) int64 {
	w.Helper()
	w.await("claim "+c.Name+" holds", func() bool {
		w.must(w.admin.Get(w.Context(), client.ObjectKeyFromObject(c), c))
		return c.Status.Token > 0
	})
	return c.Status.Token
}

// reports waits until an event of a lease is there.
func (w *world) reports(lease client.ObjectKey, reason string) {
	w.Helper()
	w.await("an event says "+reason, func() bool {
		list := &eventsv1.EventList{}
		w.must(w.admin.List(w.Context(), list, client.InNamespace(lease.Namespace)))
		return slices.ContainsFunc(list.Items, func(e eventsv1.Event) bool { return e.Regarding.Name == lease.Name && e.Reason == reason })
	})
}

// write changes a guarded ConfigMap; without a token it presents none.
func (w *world) write(name string, token int64, more string) error {
	annotations := `"example.com/changed":"` + more + `"`
	if token > 0 {
		annotations = fmt.Sprintf("%q:%q,%q:%q", fence.AnnotationToken, fmt.Sprint(token), fence.AnnotationWriteID, more)
	}
	return w.admin.Patch(w.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name}},
		client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"metadata":{"annotations":{%s}},"data":{"a":%q}}`, annotations, secret+more)))
}

func (w *world) guarded(name string, lease client.ObjectKey, token int64) {
	w.Helper()
	w.must(w.admin.Create(w.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{
		Namespace: w.namespace, Name: name, Labels: map[string]string{fence.LabelLease: lease.Name},
		Annotations: map[string]string{fence.AnnotationToken: fmt.Sprint(token)},
	}}))
}

func (w *world) refused(err error, what string) {
	w.Helper()
	if !apierrors.IsForbidden(err) {
		w.Errorf("%s: %v, want it forbidden", what, err)
	}
}

// call asks the gateway, and wants a status.
func (w *world) call(lease client.ObjectKey, token int64, want int) {
	w.Helper()
	req, err := http.NewRequestWithContext(w.Context(), http.MethodGet, w.decide, nil)
	w.must(err)
	req.Header.Set("Fencing-Lease", lease.String())
	req.Header.Set("Fencing-Token", fmt.Sprint(token))
	resp, err := http.DefaultClient.Do(req)
	w.must(err)
	_ = resp.Body.Close()
	if resp.StatusCode != want {
		w.Errorf("the gateway answers token %d with %d, want %d", token, resp.StatusCode, want)
	}
}

// TestEverythingWatchedExists plays what people watch for on the operator and
// the gateway as they ship. Then every series that an alert or a panel selects
// is there, and the pages say what there is: metrics, events, logs, commands.
func TestEverythingWatchedExists(t *testing.T) {
	w := start(t)
	s := series{}

	// A hand-over, with a queue before it.
	lease := w.lease("watched-lease", nil)
	first := w.claim(lease, "first-claim")
	old := w.token(first)
	w.guarded("guarded-object", lease, old)
	w.call(lease, old, http.StatusOK)
	second := w.claim(lease, "second-claim")
	w.await("the queue shows", func() bool {
		page, err := w.get(w.metrics)
		return err == nil && strings.Contains(page, "\nfencedlease_claims_waiting 1\n")
	})
	w.must(w.admin.Delete(t.Context(), first))
	current := w.token(second)
	w.reports(lease, "Free")
	w.reports(lease, "Granted")
	missing := w.claim(client.ObjectKey{Namespace: w.namespace, Name: "no-such-lease"}, "third-claim")
	w.await("a lease without a holder shows", func() bool {
		page, err := w.get(w.metrics)
		return err == nil && strings.Contains(page, "\nfencedlease_leases_without_holder 1\n")
	})
	w.must(w.admin.Delete(t.Context(), missing))

	// What is rejected, by both layers and by the gateway.
	w.must(w.write("guarded-object", current, "current"))
	w.refused(w.write("guarded-object", old, "stale"), "a stale write")
	w.refused(w.write("guarded-object", 0, "unstamped"), "an unstamped write")
	w.call(lease, current, http.StatusOK)
	w.call(lease, old, http.StatusForbidden)

	// What passes unstamped.
	lenient := w.lease("lenient-lease", func(l *v1alpha1.FencedLeaseSpec) {
		l.UnstampedWrites = &v1alpha1.UnstampedWrites{Default: v1alpha1.UnstampedWarn}
	})
	w.guarded("lenient-object", lenient, w.token(w.claim(lenient, "lenient-claim")))
	w.must(w.write("lenient-object", 0, "warned"))

	// Bypasses: the policy judges one of a guarded object, the webhook one
	// that puts the label on.
	w.must(w.admin.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "plain-object"}}))
	for name, label := range map[string]string{"guarded-object": "", "plain-object": fmt.Sprintf(`"labels":{%q:%q},`, fence.LabelLease, lease.Name)} {
		w.must(w.admin.Patch(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name}},
			client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"metadata":{%s"annotations":{%q:"ticket 7"}},"data":{"a":%q}}`, label, fence.AnnotationBypass, secret))))
	}
	w.reports(lease, "Bypassed")

	// How else a holder can end, and what keeps a token from being issued.
	short := w.lease("short-lease", func(l *v1alpha1.FencedLeaseSpec) { l.LeaseDurationSeconds = 1 })
	w.claim(short, "short-claim")
	w.reports(short, "Lapsed")
	newest := w.lease("newest-lease", func(l *v1alpha1.FencedLeaseSpec) { l.Preemption = v1alpha1.PreemptionNewestClaim })
	w.token(w.claim(newest, "older-claim"))
	w.token(w.claim(newest, "newer-claim"))
	w.reports(newest, "Preempted")
	w.must(w.admin.Patch(t.Context(), &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: newest.Namespace, Name: newest.Name}},
		client.RawPatch(types.MergePatchType, []byte(`{"spec":{"minToken":100000}}`))))
	w.reports(newest, "Revoked")
	w.lease("adopting-lease", func(l *v1alpha1.FencedLeaseSpec) { l.LeaseRef = &v1alpha1.LeaseReference{Name: "no-native-lease"} })
	w.await("the log says what cannot be issued", func() bool { return strings.Contains(w.log.String(), `"reason":"LeaseNotFound"`) })

	// A write that the webhook cannot judge.
	w.unjudgeable()

	operatorPage := w.scrape(s, w.metrics)
	gatewayPage := w.scrape(s, w.gatewayMetrics)
	w.comparePage(s, operatorPage+gatewayPage)
	w.compareEvents()
	w.checkLog()
	w.runCommands(lease)

	// With the webhook down, what only it judges fails; fails open, passes.
	w.stopOperator()
	if err := w.write("lenient-object", 0, "down"); err == nil {
		t.Error("an unstamped write passes with the webhook down")
	}
	hooks := &admissionregistrationv1.ValidatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: webhooks.ConfigurationName}}
	w.must(w.admin.Get(t.Context(), client.ObjectKeyFromObject(hooks), hooks))
	for i := range hooks.Webhooks {
		hooks.Webhooks[i].FailurePolicy = new(admissionregistrationv1.Ignore)
	}
	w.must(w.admin.Update(t.Context(), hooks))
	w.await("the webhook fails open", func() bool { return w.write("lenient-object", 0, "open") == nil })
	w.scrape(s, strings.TrimSuffix(w.Config.Host, "/")+"/metrics")

	// Where it does not reach the API server, the gateway judges no token that
	// it does not know.
	w.cut.Store(true)
	w.call(lease, current+1, http.StatusServiceUnavailable)
	w.scrape(s, w.gatewayMetrics)

	var queries []string
	for _, r := range alerts(t) {
		queries = append(queries, r.Expr)
	}
	for _, p := range dashboard(t) {
		for _, target := range p.Targets {
			queries = append(queries, concrete(target.Expr))
		}
	}
	for _, query := range queries {
		found := selectors(query)
		if len(found) == 0 {
			t.Errorf("no metric in %s", query)
		}
		for _, sel := range found {
			if !s.finds(sel) {
				t.Errorf("nothing is %s%s, of %v", sel.name, sel.matchers, s[sel.name])
			}
		}
	}
}

// unjudgeable sends the webhook an object that is none.
func (w *world) unjudgeable() {
	w.Helper()
	body := `{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"1","operation":"UPDATE","namespace":"` + w.namespace + `",
		"name":"o","resource":{"version":"v1","resource":"configmaps"},"object":"` + secret + `"}}`
	req, err := http.NewRequestWithContext(w.Context(), http.MethodPost, w.webhook, strings.NewReader(body))
	w.must(err)
	req.Header.Set("Content-Type", "application/json")
	c := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true}}
	resp, err := c.Do(req)
	w.must(err)
	answer, err := io.ReadAll(resp.Body)
	w.must(err)
	w.must(resp.Body.Close())
	if !bytes.Contains(answer, []byte(`"code":500`)) {
		w.Fatalf("the webhook judged what is no object: %s", answer)
	}
}

// rows gives a table of a page that starts with the given head: the cells of
// each row, without back quotes.
func (w *world) rows(page, head string) (rows [][]string) {
	w.Helper()
	text, err := os.ReadFile(docs + page)
	w.must(err)
	_, table, ok := strings.Cut(string(text), "\n"+head+"\n")
	if !ok {
		w.Fatalf("%s has no table %s", page, head)
	}
	for _, line := range strings.Split(table, "\n")[1:] {
		if !strings.HasPrefix(line, "|") {
			break
		}
		cells := strings.Split(strings.Trim(line, "|"), "|")
		for i := range cells {
			cells[i] = strings.Trim(strings.TrimSpace(cells[i]), "`")
		}
		rows = append(rows, cells)
	}
	return rows
}

// comparePage: the page has each metric of ours, with its labels and its help
// text, and no other; and no label tells the name of an object.
func (w *world) comparePage(s series, scraped string) {
	w.Helper()
	got := map[string]string{}
	for _, m := range regexp.MustCompile(`(?m)^# HELP (fencedlease_\w+) (.*)$`).FindAllStringSubmatch(scraped, -1) {
		got[m[1]] = strings.Join(s.labels(m[1]), ", ") + " | " + m[2]
	}
	for _, row := range w.rows("observability.md", "| metric | labels | meaning |") {
		if want := row[1] + " | " + row[2]; got[row[0]] != want {
			w.Errorf("the page says of %s: %s; it is: %s", row[0], want, got[row[0]])
		}
		delete(got, row[0])
	}
	for name := range got {
		w.Errorf("the page lacks %s", name)
	}
	for name, all := range s {
		for _, labels := range all {
			for label, value := range labels {
				if strings.HasPrefix(name, "fencedlease_") && regexp.MustCompile(`-(namespace|lease|claim|object)`).MatchString(value) {
					w.Errorf("%s names an object: %s=%q", name, label, value)
				}
			}
		}
	}
}

// compareEvents: the page lists the events that were there.
func (w *world) compareEvents() {
	w.Helper()
	list := &eventsv1.EventList{}
	w.must(w.admin.List(w.Context(), list, client.InNamespace(w.namespace)))
	got := map[string]string{}
	for _, e := range list.Items {
		got[e.Reason] = e.Type
	}
	want := map[string]string{}
	for _, row := range w.rows("observability.md", "| reason | type | when |") {
		want[row[0]] = row[1]
	}
	if !maps.Equal(got, want) {
		w.Errorf("events are %v, and the page says %v", got, want)
	}
}

// checkLog: each message of the page is there, with the keys, and no line has
// an object's content.
func (w *world) checkLog() {
	w.Helper()
	lines := map[string][]map[string]any{}
	for line := range strings.Lines(w.log.String()) {
		if strings.Contains(line, secret) {
			w.Errorf("the log tells a secret: %s", line)
		}
		fields := map[string]any{}
		if err := json.Unmarshal([]byte(line), &fields); err != nil {
			w.Errorf("no JSON: %s", line)
			continue
		}
		message, _ := fields["msg"].(string)
		lines[message] = append(lines[message], fields)
	}
	for _, row := range w.rows("observability.md", "| message | what it says further |") {
		if len(lines[row[0]]) == 0 {
			w.Errorf("nothing was logged as %q", row[0])
		}
		keys := []string{"lease", "token", "reason"}
		for _, m := range regexp.MustCompile("(\\w+)`").FindAllStringSubmatch(row[1]+"`", -1) {
			keys = append(keys, m[1])
		}
		if strings.HasPrefix(row[1], "the same") {
			keys = append(keys, "user", "resource", "namespace", "name", "path")
		}
		for _, fields := range lines[row[0]] {
			for _, key := range keys {
				if _, ok := fields[key]; !ok && key != "same" && key != "given" && key != "cause" {
					w.Errorf("no %s in %v", key, fields)
				}
			}
		}
	}
}

// runCommands runs the blocks of the pages. Nothing runs Pods here, so kubectl
// logs prints what this operator has logged.
func (w *world) runCommands(lease client.ObjectKey) {
	w.Helper()
	dir := w.TempDir()
	kubectl := filepath.Join(w.Assets, "kubectl")
	for name, data := range map[string]string{
		"kubeconfig": string(w.KubeConfig),
		"log":        w.log.String(),
		"kubectl":    fmt.Sprintf("#!/bin/sh\ncase \" $* \" in *' logs '*) exec cat %s/log;; esac\nexec %s \"$@\"\n", dir, kubectl),
	} {
		w.must(os.WriteFile(filepath.Join(dir, name), []byte(data), 0o700))
	}
	run := func(script string) {
		w.Helper()
		cmd := exec.CommandContext(w.Context(), "bash", "-euo", "pipefail", "-c", script)
		cmd.Env = append(os.Environ(), "KUBECONFIG="+dir+"/kubeconfig", "PATH="+dir+":"+os.Getenv("PATH"), "NAMESPACE="+lease.Namespace, "LEASE="+lease.Name)
		var out, errOut bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &errOut
		if err := cmd.Run(); err != nil {
			w.Errorf("%v\n%s%s%s", err, script, out.String(), errOut.String())
		}
		w.Logf("%s%s%s", script, out.String(), errOut.String())
	}
	run("kubectl apply --server-side -f ../../config/manager/manager.yaml\n" +
		"kubectl -n fencedlease-system create secret tls fencedlease-webhook-certificate --cert=" + w.Webhook.LocalServingCertDir + "/tls.crt --key=" + w.Webhook.LocalServingCertDir + "/tls.key\n")
	for _, page := range []string{"observability.md", "runbooks.md"} {
		text, err := os.ReadFile(docs + page)
		w.must(err)
		blocks := regexp.MustCompile("(?s)<!-- run -->\n```sh\n(.*?)```").FindAllStringSubmatch(string(text), -1)
		if all := strings.Count(string(text), "```") / 2; len(blocks) == 0 || all != len(blocks) {
			w.Errorf("%s has %d blocks, and %d of them run", page, all, len(blocks))
		}
		for _, b := range blocks {
			run(b[1])
		}
	}
}
