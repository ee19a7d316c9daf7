// Command admission measures, in one run on one API server, what the fence
// adds to a patch of a ConfigMap: nothing installed, a webhook that does
// nothing, and the fence in its layerings; medians and ratios.
package main

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/test/env"
)

func main() { os.Exit(run()) }

func run() int {
	if err := bench(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		return 1
	}
	return 0
}

const (
	rounds  = 15
	patches = 60
)

// subject is one API server and what is patched there.
type subject struct {
	name   string
	client client.Client
	object string
	times  []time.Duration
}

func (s *subject) round(ctx context.Context) error {
	for i := range patches {
		start := time.Now()
		cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: s.object}}
		body := fmt.Appendf(nil, `{"data":{"n":"%d-%d"}}`, len(s.times), i)
		if err := s.client.Patch(ctx, cm, client.RawPatch(types.MergePatchType, body)); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
		s.times = append(s.times, time.Since(start))
	}
	return nil
}

func (s *subject) median() time.Duration {
	slices.Sort(s.times)
	return s.times[len(s.times)/2]
}

func bench(ctx context.Context) error {
	var subjects []*subject
	for _, leases := range []int{1, 1000} {
		for _, layers := range []env.Options{{}, {Webhook: true}, {Policy: true}, {Webhook: true, Policy: true}} {
			none := !layers.Webhook && !layers.Policy
			if none && leases > 1 {
				continue
			}
			e, err := env.New(layers) //nolint:contextcheck // it lives until the end
			if err != nil {
				return err
			}
			defer func() { _ = e.Close() }()
			name := strings.Join(slices.DeleteFunc([]string{map[bool]string{true: "nothing installed"}[none], map[bool]string{true: "webhook"}[layers.Webhook],
				map[bool]string{true: "policy"}[layers.Policy]}, func(s string) bool { return s == "" }), " and ")
			found, err := prepare(ctx, e, name, leases, none)
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			subjects = append(subjects, found...)
		}
	}
	for range rounds {
		for _, s := range subjects { // interleaved, so that a slow moment hits all
			if err := s.round(ctx); err != nil {
				return err
			}
		}
	}
	base := subjects[0].median()
	same := subjects[1].median()
	fmt.Printf("%d patches each, medians; beside a patch with nothing installed, and beside one of the very object that is guarded elsewhere\n", rounds*patches)
	for _, s := range subjects {
		fmt.Printf("%-54s %6d us  %.2fx  %.2fx\n", s.name, s.median().Microseconds(), float64(s.median())/float64(base), float64(s.median())/float64(same))
	}
	return nil
}

// prepare makes the leases and objects, and gives what is to be measured.
func prepare(ctx context.Context, e *env.Environment, name string, leases int, none bool) ([]*subject, error) {
	var last string
	for i := range leases {
		lease := &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("lease-%04d", i)}}
		if err := e.Admin.Create(ctx, lease); err != nil {
			return nil, err
		}
		lease.Status.Token = 42
		lease.Status.Holder = &v1alpha1.Holder{ClaimName: "b", ClaimUID: "uid-b", Identity: "pod-b"}
		if err := e.Admin.Status().Update(ctx, lease); err != nil {
			return nil, err
		}
		last = lease.Name
	}
	for object, labels := range map[string]map[string]string{"unguarded": nil, "guarded": {fence.LabelLease: last}, "hooked": {"hooked": "true"}} {
		cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: object, Labels: labels}}
		if err := wait(ctx, func() error { return e.Admin.Create(ctx, cm) }); err != nil {
			return nil, err
		}
	}
	plain := &subject{name: fmt.Sprintf("%s, %d leases: unguarded", name, leases), client: e.Admin, object: "unguarded"}
	cfg := rest.CopyConfig(e.Config)
	cfg.Impersonate = rest.ImpersonationConfig{UserName: "admin", Groups: []string{"system:masters"}, Extra: map[string][]string{fence.ExtraToken: {"42"}}}
	holder, err := client.New(cfg, client.Options{Scheme: e.Scheme})
	if err != nil {
		return nil, err
	}
	record := client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"metadata":{"annotations":{%q:"42"}}}`, fence.AnnotationToken))
	if err := wait(ctx, func() error {
		return holder.Patch(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "guarded"}}, record)
	}); err != nil {
		return nil, err
	}
	guarded := &subject{name: fmt.Sprintf("%s, %d leases: guarded, by the holder", name, leases), client: holder, object: "guarded"}
	if !none {
		return []*subject{plain, guarded}, nil
	}
	plain.name, guarded.name = name, "the same with label, record and header"
	nothing, err := doNothing(ctx, e)
	if err != nil {
		return nil, err
	}
	return []*subject{plain, guarded, nothing}, nil
}

// doNothing is what any webhook costs: one that lets everything pass.
func doNothing(ctx context.Context, e *env.Environment) (*subject, error) {
	dir, err := os.MkdirTemp("", "bench-")
	if err != nil {
		return nil, err
	}
	other, err := env.New(env.Options{Webhook: true}) //nolint:contextcheck // for its certificate
	if err != nil {
		return nil, err
	}
	defer func() { _ = other.Close(); _ = os.RemoveAll(dir) }()
	certificate, err := tls.LoadX509KeyPair(filepath.Join(other.Webhook.LocalServingCertDir, "tls.crt"), filepath.Join(other.Webhook.LocalServingCertDir, "tls.key"))
	if err != nil {
		return nil, err
	}
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		review := &admissionv1.AdmissionReview{}
		if json.NewDecoder(r.Body).Decode(review) == nil {
			review.Response = &admissionv1.AdmissionResponse{UID: review.Request.UID, Allowed: true}
			_ = json.NewEncoder(w).Encode(review)
		}
	}))
	server.TLS = &tls.Config{Certificates: []tls.Certificate{certificate}, MinVersion: tls.VersionTLS12}
	server.StartTLS()
	url := server.URL
	err = e.Admin.Create(ctx, &admissionregistrationv1.ValidatingWebhookConfiguration{
		ObjectMeta: metav1.ObjectMeta{Name: "nothing"},
		Webhooks: []admissionregistrationv1.ValidatingWebhook{{
			Name: "nothing.example.com", ClientConfig: admissionregistrationv1.WebhookClientConfig{URL: &url, CABundle: other.Webhook.LocalServingCAData},
			SideEffects: new(admissionregistrationv1.SideEffectClassNone), AdmissionReviewVersions: []string{"v1"},
			ObjectSelector: &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "hooked", Operator: metav1.LabelSelectorOpExists}}},
			Rules: []admissionregistrationv1.RuleWithOperations{{
				Operations: []admissionregistrationv1.OperationType{admissionregistrationv1.Update},
				Rule:       admissionregistrationv1.Rule{APIGroups: []string{""}, APIVersions: []string{"*"}, Resources: []string{"configmaps"}},
			}},
		}},
	})
	return &subject{name: "a webhook that does nothing", client: e.Admin, object: "hooked"}, err
}

// wait tries until it works, for half a minute: what was just installed takes
// a moment to be seen.
func wait(ctx context.Context, do func() error) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		err := do()
		if err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return err
		}
	}
}
