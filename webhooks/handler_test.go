package webhooks

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/go-logr/logr/funcr"
	admissionv1 "k8s.io/api/admission/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	logf "sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

// newTestHandler is a handler over the leases main, and lenient, which warns,
// of a shop.
func newTestHandler(t *testing.T) *handler {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{v1alpha1.AddToScheme, corev1.AddToScheme, authorizationv1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	lease := &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "main"}}
	lease.Status.Token = 42
	lenient := lease.DeepCopy()
	lenient.Name, lenient.Spec.UnstampedWrites = "lenient", &v1alpha1.UnstampedWrites{Default: v1alpha1.UnstampedWarn}
	c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(lease, lenient).WithInterceptorFuncs(interceptor.Funcs{
		Create: func(_ context.Context, _ client.WithWatch, o client.Object, _ ...client.CreateOption) error {
			o.(*authorizationv1.SubjectAccessReview).Status.Allowed = true
			return nil
		},
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
			if key.Name == "unreachable" {
				return errors.New("no answer")
			}
			return c.Get(ctx, key, o, opts...)
		},
	}).Build()
	recorder := events.NewFakeRecorder(10)
	mapper := meta.NewDefaultRESTMapper(nil)
	mapper.Add(corev1.SchemeGroupVersion.WithKind("Pod"), meta.RESTScopeNamespace)
	return &handler{client: c, live: c, mapper: mapper, events: recorder, clock: clock.RealClock{}, rejections: newRejections(recorder, clock.RealClock{})}
}

// TestRequestsWithoutObjects: a collection delete names nothing, and some
// requests carry no object. Each is answered.
func TestRequestsWithoutObjects(t *testing.T) {
	h := newTestHandler(t)
	for _, operation := range []admissionv1.Operation{admissionv1.Create, admissionv1.Update, admissionv1.Delete} {
		for _, sub := range []string{"", "status", "scale", "eviction", "binding", "ephemeralcontainers"} {
			for name, raw := range map[string][]byte{"none": nil, "null": []byte("null"), "empty": []byte("{}"), "metadata null": []byte(`{"metadata":null}`)} {
				r := admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{
					UID: "u", Operation: operation, Namespace: "shop", SubResource: sub,
					Resource: metav1.GroupVersionResource{Version: "v1", Resource: "pods"},
					Object:   runtime.RawExtension{Raw: raw}, OldObject: runtime.RawExtension{Raw: raw},
				}}
				if got := h.Handle(t.Context(), r); !got.Allowed && (got.Result == nil || got.Result.Code == 0) {
					t.Errorf("%s %s %s: %+v", operation, sub, name, got)
				}
			}
		}
	}
}

// TestLog: whatever does not simply pass is logged once, with the lease, the
// token and the reason as keys, and nothing of what is written.
func TestLog(t *testing.T) {
	h := newTestHandler(t)
	for name, test := range map[string]struct {
		before, after *object
		want          map[string]any // nil wants no line
	}{
		"the holder's write": {
			before: &object{lease: "main", token: "42", writeID: "a"}, after: &object{lease: "main", token: "42", writeID: "b", data: "hidden"},
		},
		"a stale write": {
			before: &object{lease: "main", token: "42", writeID: "a"}, after: &object{lease: "main", token: "41", writeID: "b", data: "hidden"},
			want: map[string]any{"msg": "Rejected a write", "lease": "shop/main", "token": 41.0, "reason": "StaleToken", "path": "update"},
		},
		"an unstamped write": {
			before: &object{lease: "main", token: "42"}, after: &object{lease: "main", token: "42", data: "hidden"},
			want: map[string]any{"msg": "Rejected a write", "lease": "shop/main", "token": 0.0, "reason": "Unstamped", "path": "update"},
		},
		"an unstamped write under Warn": {
			before: &object{lease: "lenient", token: "42"}, after: &object{lease: "lenient", token: "42", data: "hidden"},
			want: map[string]any{"msg": "Let a write pass that Deny would refuse", "lease": "shop/lenient", "token": 0.0, "reason": "Unstamped", "path": "update"},
		},
		"a bypass": {
			before: &object{lease: "main", token: "42"}, after: &object{lease: "main", token: "42", bypass: "ticket 7", data: "hidden"},
			want: map[string]any{"msg": "A write bypassed the fence", "lease": "shop/main", "token": 0.0, "reason": "Bypassed", "path": "update",
				"warning": "[shop/main] bypassed: ticket 7"},
		},
		"a failure": {
			before: &object{lease: "unreachable", token: "42", writeID: "a"}, after: &object{lease: "unreachable", token: "42", writeID: "b", data: "hidden"},
			want: map[string]any{"msg": "Failed to judge a write", "lease": "shop/unreachable", "token": 42.0, "reason": "InternalError", "path": "update",
				"error": "read lease [shop/unreachable]: no answer"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var lines []string
			log := funcr.NewJSON(func(line string) { lines = append(lines, line) }, funcr.Options{})
			h.Handle(logf.IntoContext(t.Context(), log), admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{
				Operation: admissionv1.Update, Namespace: "shop", Name: "o",
				Resource: metav1.GroupVersionResource{Version: "v1", Resource: "configmaps"},
				UserInfo: authenticationv1.UserInfo{Username: "person"},
				Object:   test.after.raw(), OldObject: test.before.raw(),
			}})
			if test.want == nil {
				if len(lines) > 0 {
					t.Errorf("logged %s", lines)
				}
				return
			}
			got := map[string]any{}
			if len(lines) != 1 || json.Unmarshal([]byte(lines[0]), &got) != nil {
				t.Fatalf("logged %q, want one line", lines)
			}
			for key, want := range test.want {
				if value, ok := got[key]; !ok || value != want {
					t.Errorf("%s is %v, want %v: %s", key, value, want, lines[0])
				}
			}
			if strings.Contains(lines[0], "hidden") {
				t.Errorf("the object's content is logged: %s", lines[0])
			}
		})
	}
}
