package webhooks_test

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/test/env"
)

func TestMain(m *testing.M) { os.Exit(env.Main(m)) }

var served = env.Shared(env.Options{Webhook: true})

// scene is a namespace with a lease whose current token is 42, held by pod-b,
// and a guarded ConfigMap with the record 41.
type scene struct {
	*testing.T
	*env.Environment
	namespace string
	lease     *v1alpha1.FencedLease
}

func newScene(t *testing.T) *scene {
	t.Helper()
	e := served(t)
	s := &scene{T: t, Environment: e, namespace: e.Namespace(t)}
	s.lease = s.makeLease("main", v1alpha1.FencedLeaseSpec{LeaseDurationSeconds: 15})
	s.issue(s.lease, 41, "pod-a")
	s.configMap("guarded")
	s.must(s.patch("guarded", "41", "first", nil))
	s.issue(s.lease, 42, "pod-b")
	return s
}

func (s *scene) makeLease(name string, spec v1alpha1.FencedLeaseSpec) *v1alpha1.FencedLease {
	s.Helper()
	lease := &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: name}, Spec: spec}
	s.must(s.Admin.Create(s.Context(), lease))
	return lease
}

// issue writes what the operator would have written.
func (s *scene) issue(lease *v1alpha1.FencedLease, token int64, identity string) {
	s.Helper()
	lease.Status.Token = token
	lease.Status.Holder = &v1alpha1.Holder{ClaimName: identity, ClaimUID: fmt.Sprintf("uid-%d", token), Identity: identity}
	if identity == "" {
		lease.Status.Holder = nil
	}
	s.must(s.Admin.Status().Update(s.Context(), lease))
}

func (s *scene) configMap(name string) {
	s.Helper()
	s.must(s.Admin.Create(s.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{
		Namespace: s.namespace, Name: name, Labels: map[string]string{fence.LabelLease: "main"},
	}}))
}

func (s *scene) await(what string, done func() bool) {
	s.Helper()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	limit := time.After(30 * time.Second)
	for !done() {
		select {
		case <-tick.C:
		case <-limit:
			s.Fatalf("waited half a minute until %s", what)
		}
	}
}

func (s *scene) must(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

// patch writes data["by"] and the given annotations; token and id are left out
// where they are empty.
func (s *scene) patch(name, token, id string, more map[string]any, opts ...client.PatchOption) error {
	annotations := map[string]any{}
	if token != "" {
		annotations[fence.AnnotationToken] = token
	}
	if id != "" {
		annotations[fence.AnnotationWriteID] = id
	}
	for k, v := range more {
		annotations[k] = v
	}
	body, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": annotations}, "data": map[string]string{"by": token + id}})
	if err != nil {
		return err
	}
	return s.Admin.Patch(s.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: name}},
		client.RawPatch(types.MergePatchType, body), opts...)
}

// expect fails unless err is the fence's rejection for the reason; an empty
// reason wants success.
func (s *scene) expect(err error, reason fence.Reason) {
	s.Helper()
	if reason == "" {
		if err != nil {
			s.Errorf("rejected: %v", err)
		}
		return
	}
	var status apierrors.APIStatus
	if !errors.As(err, &status) || status.Status().Details == nil || len(status.Status().Details.Causes) != 1 ||
		status.Status().Details.Causes[0].Type != metav1.CauseType(reason) {
		s.Errorf("got %v, want a rejection with cause %s", err, reason)
		return
	}
	code := int32(http.StatusForbidden)
	if reason == fence.MalformedToken {
		code = http.StatusUnprocessableEntity
	}
	if status.Status().Code != code {
		s.Errorf("%s with status %d, want %d", reason, status.Status().Code, code)
	}
}

func TestTokens(t *testing.T) {
	s := newScene(t)
	s.expect(s.patch("guarded", "42", "current", nil), "")
	err := s.patch("guarded", "41", "stale", nil)
	s.expect(err, fence.StaleToken)
	for _, part := range []string{"41", "42", `"pod-b"`, s.namespace + "/main"} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("the message %v does not name %s", err, part)
		}
	}
	s.expect(s.patch("guarded", "43", "forged", nil), fence.UnissuedToken)
	for _, text := range []string{"", " 42", "42 ", "+42", "-1", "0", "042", "0x2a", "4_2", "42.0", "4e1", "٤٢", "４２", "4\x002", "42\n",
		"1234567890123456789", "12345678901234567890", strings.Repeat("9", 10_000)} {
		s.expect(s.patch("guarded", "", "malformed"+text, map[string]any{fence.AnnotationToken: text}), fence.MalformedToken)
	}
	s.expect(s.patch("guarded", "", "", nil), fence.Unstamped)
	// By header; HTTP itself takes blanks off its ends, and no line ends.
	byHeader := func(text string) error {
		return s.Impersonating(s, "amy", map[string][]string{fence.ExtraToken: {text}}).Patch(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: "guarded"}},
			client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"data":{"by":%q}}`, "header "+text)))
	}
	s.expect(byHeader("42"), "")
	for _, text := range []string{"", "+42", "-1", "0", "042", "0x2a", "4_2", "42.0", "4e1", "4 2", "٤٢", "４２", "1234567890123456789", "12345678901234567890", strings.Repeat("9", 10_000)} {
		s.expect(byHeader(text), fence.MalformedToken)
	}
}

// TestLargeObjects: what is as large as the API server stores is judged, and a
// body that no API server sends is refused before it is read.
func TestLargeObjects(t *testing.T) {
	s := newScene(t)
	large := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: "large", Labels: map[string]string{fence.LabelLease: "main"}},
		Data: map[string]string{"value": strings.Repeat("0123456789abcde\n", 60_000)}} // 960 kB
	s.must(s.Admin.Create(t.Context(), large))
	s.expect(s.patch("large", "42", "current", nil), "")
	s.expect(s.patch("large", "41", "late", nil), fence.StaleToken)

	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(s.Webhook.LocalServingCAData)
	c := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}}}
	url := "https://" + net.JoinHostPort(s.Webhook.LocalServingHost, strconv.Itoa(s.Webhook.LocalServingPort)) + "/fence"
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader(`{"request":{"uid":"`+strings.Repeat("x", 20<<20)+`"}}`))
	s.must(err)
	request.Header.Set("Content-Type", "application/json")
	answer, err := c.Do(request)
	s.must(err)
	defer func() { _ = answer.Body.Close() }()
	text, err := io.ReadAll(answer.Body)
	s.must(err)
	if !strings.Contains(string(text), `"code":413`) {
		t.Errorf("20 MiB are answered with %s: %.300s", answer.Status, text)
	}
}

// TestGeneratedNames: an object whose name is made by the API server is judged
// like any other, and told of by a name.
func TestGeneratedNames(t *testing.T) {
	s := newScene(t)
	s.markNamespace()
	worker := s.User(t, "worker-of-generated")
	s.Grant(t, s.namespace, "worker-of-generated", rbacv1.PolicyRule{APIGroups: []string{"", "batch"}, Resources: []string{"configmaps", "jobs"}, Verbs: []string{"create"}})
	meta := func(token string) metav1.ObjectMeta {
		m := metav1.ObjectMeta{Namespace: s.namespace, GenerateName: "made-", Labels: map[string]string{fence.LabelLease: "main"}}
		if token != "" {
			m.Annotations = map[string]string{fence.AnnotationToken: token}
		}
		return m
	}
	for token, want := range map[string]fence.Reason{"": fence.Unstamped, "41": fence.StaleToken, "43": fence.UnissuedToken, "42": ""} {
		s.expect(worker.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: meta(token)}), want)
		s.expect(worker.Create(t.Context(), &batchv1.Job{ObjectMeta: meta(token), Spec: batchv1.JobSpec{Template: corev1.PodTemplateSpec{Spec: corev1.PodSpec{
			RestartPolicy: corev1.RestartPolicyNever, Containers: []corev1.Container{{Name: "c", Image: "registry.example.com/c:1"}}}}}}), want)
	}
	named := func() bool {
		found := &eventsv1.EventList{}
		s.must(s.Admin.List(t.Context(), found, client.InNamespace(s.namespace)))
		return slices.ContainsFunc(found.Items, func(e eventsv1.Event) bool {
			return e.Reason == string(fence.StaleToken) && strings.Contains(e.Note, s.namespace+"/made-")
		})
	}
	s.await("an event names what was rejected", named)
}

func oneLease() v1alpha1.FencedLeaseSpec { return v1alpha1.FencedLeaseSpec{LeaseDurationSeconds: 15} }

// markNamespace does what the operator does before it issues a first token.
func (s *scene) markNamespace() {
	s.Helper()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: s.namespace}}
	s.must(s.Admin.Patch(s.Context(), ns, client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"metadata":{"labels":{%q:"true"}}}`, fence.LabelNamespaceMark))))
}

// TestBypassLeavesAnEvent: a bypass can be seen on its lease. One that did not
// happen cannot.
func TestBypassLeavesAnEvent(t *testing.T) {
	s := newScene(t)
	s.configMap("tried")
	amy := s.Impersonating(s, "amy", map[string][]string{fence.ExtraBypass: {"incident 7"}})
	remove := func(c client.Client, name string) error {
		return c.Delete(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: name}})
	}
	s.must(remove(client.NewDryRunClient(amy), "tried"))
	s.must(remove(amy, "guarded"))
	notes := func() (all []string) {
		found := &eventsv1.EventList{}
		s.must(s.Admin.List(t.Context(), found, client.InNamespace(s.namespace)))
		for _, event := range found.Items {
			if event.Reason == "Bypassed" {
				all = append(all, event.Regarding.Name+": "+event.Note)
			}
		}
		return all
	}
	s.await("an event tells of the bypass", func() bool { return len(notes()) > 0 })
	want := []string{fmt.Sprintf("main: \"amy\" bypassed the fence on configmaps %s/guarded: incident 7", s.namespace)}
	if diff := cmp.Diff(want, notes()); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}
