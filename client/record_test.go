package client

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
)

func TestLocate(t *testing.T) {
	for path, want := range map[string]location{
		"/api/v1/configmaps":                                {object: "/api/v1/configmaps"},
		"/api/v1/namespaces/shop/configmaps":                {object: "/api/v1/namespaces/shop/configmaps"},
		"/api/v1/namespaces/shop/configmaps/web":            {object: "/api/v1/namespaces/shop/configmaps/web", name: "web"},
		"/api/v1/namespaces/shop/pods/web/eviction":         {object: "/api/v1/namespaces/shop/pods/web", name: "web", subresource: "eviction"},
		"/api/v1/namespaces/shop/pods/web/proxy/a/b":        {object: "/api/v1/namespaces/shop/pods/web", name: "web", subresource: "proxy/a/b"},
		"/api/v1/nodes/one/status":                          {object: "/api/v1/nodes/one", name: "one", subresource: "status"},
		"/api/v1/namespaces":                                {object: "/api/v1/namespaces"},
		"/api/v1/namespaces/shop":                           {object: "/api/v1/namespaces/shop", name: "shop"},
		"/api/v1/namespaces/shop/finalize":                  {object: "/api/v1/namespaces/shop", name: "shop", subresource: "finalize"},
		"/api/v1/namespaces/shop/status":                    {object: "/api/v1/namespaces/shop", name: "shop", subresource: "status"},
		"/apis/apps/v1/namespaces/shop/deployments/w/scale": {object: "/apis/apps/v1/namespaces/shop/deployments/w", name: "w", subresource: "scale"},
		"/apis/example.com/v1/widgets/w/":                   {object: "/apis/example.com/v1/widgets/w", name: "w"},
	} {
		if got, ok := locate(path); !ok || got != want {
			t.Errorf("%s: got %+v, %t, want %+v", path, got, ok, want)
		}
	}
	for _, path := range []string{"", "/", "/version", "/api", "/api/v1", "/apis/apps", "/apis/apps/v1", "/openapi/v3/apis/apps/v1"} {
		if got, ok := locate(path); ok {
			t.Errorf("%q: got %+v, want nothing", path, got)
		}
	}
}

func FuzzLocate(f *testing.F) {
	f.Add("/api/v1/namespaces/shop/configmaps/web")
	f.Add("/apis//v1/namespaces//")
	f.Fuzz(func(t *testing.T, path string) {
		if at, ok := locate(path); !ok && at != (location{}) {
			t.Fatalf("%q: %+v", path, at)
		}
	})
}

func TestWithRecordKeepsTheRestOfTheBody(t *testing.T) {
	for name, test := range map[string]struct{ body, want string }{
		"a large number stays exact": {
			`{"metadata":{"name":"web"},"spec":{"n":123456789012345678901.10}}`,
			`{"metadata":{"annotations":{"fencedlease.io/token":"42"},"name":"web"},"spec":{"n":123456789012345678901.10}}`,
		},
		"other annotations stay": {
			`{"metadata":{"annotations":{"a":"b","fencedlease.io/token":"41"}}}`,
			`{"metadata":{"annotations":{"a":"b","fencedlease.io/token":"42"}}}`,
		},
		"a patch without metadata": {
			`{"data":{"a":null}}`,
			`{"data":{"a":null},"metadata":{"annotations":{"fencedlease.io/token":"42"}}}`,
		},
		"annotations that are null": {
			`{"metadata":{"annotations":null}}`,
			`{"metadata":{"annotations":{"fencedlease.io/token":"42"}}}`,
		},
		"yaml": {
			"apiVersion: v1\nmetadata:\n  name: web\n",
			`{"apiVersion":"v1","metadata":{"annotations":{"fencedlease.io/token":"42"},"name":"web"}}`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := withRecord([]byte(test.body), 42)
			if diff := cmp.Diff(test.want, string(got)); err != nil || diff != "" {
				t.Fatalf("%v (-want +got):\n%s", err, diff)
			}
		})
	}
	for name, body := range map[string]string{
		"nothing": "", "a list": `[]`, "metadata of another kind": `{"metadata":"x"}`,
		"annotations of another kind": `{"metadata":{"annotations":[]}}`, "protobuf": "k8s\x00\n\x0c\x00",
	} {
		if got, err := withRecord([]byte(body), 42); err == nil {
			t.Errorf("%s: got %s, want an error", name, got)
		}
	}
}

type transportFunc func(*http.Request) (*http.Response, error)

func (f transportFunc) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }

// Credentials are added by transports around the recorder: what it sends by
// itself has to carry them too.
func TestTheRecordIsSentWithTheCredentialsOfTheWrite(t *testing.T) {
	var sent []string
	r := &recorder{holder: Static("shop/deploy", 42), next: transportFunc(func(req *http.Request) (*http.Response, error) {
		sent = append(sent, req.Method+" "+req.URL.Path+" "+req.Header.Get("Authorization"))
		answer := httptest.NewRecorder()
		if len(sent) == 1 {
			answer.WriteHeader(http.StatusForbidden)
			_, _ = answer.WriteString(`{"message":"denied the request: NotRecorded: [shop/deploy] token 42"}`)
		}
		return answer.Result(), nil
	})}
	req := httptest.NewRequest(http.MethodDelete, "/api/v1/namespaces/shop/configmaps/web", nil)
	req.Header.Set("Authorization", "Bearer x")
	resp, err := r.RoundTrip(req)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("%v, %v", resp, err)
	}
	const path = " /api/v1/namespaces/shop/configmaps/web Bearer x"
	if diff := cmp.Diff([]string{"DELETE" + path, "PATCH" + path, "DELETE" + path}, sent); diff != "" {
		t.Fatalf("(-want +got):\n%s", diff)
	}
}

// A fence that calls the token stale may know more than the watch: nothing else
// is sent where the claim is lost, and all goes on where it is not.
func TestARefusedTokenIsDoubted(t *testing.T) {
	for name, c := range map[string]struct {
		message string
		lost    bool // by then
		sends   bool // the next write
	}{
		"lost and called stale":             {"denied the request: StaleToken: [shop/main] token 41 is stale", true, false},
		"lost and called lapsed":            {"denied request: Lapsed: [shop/main] token 41 is current", true, false},
		"held and called stale":             {"denied the request: StaleToken: [shop/main] token 41 is stale", false, true},
		"lost and refused by another lease": {"denied the request: StaleToken: [shop/other] token 41 is stale", true, true},
		"lost and refused by a quota":       {"exceeded quota", true, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				api := newFake()
				h := acquired(t, api)
				if c.lost {
					api.mu.Lock()
					api.watches = nil // none of them tells
					api.mu.Unlock()
					api.set(metav1.ConditionFalse, v1alpha1.ReasonPreempted, 41)
				}
				sent := 0
				p := &presenter{holder: h, next: transportFunc(func(*http.Request) (*http.Response, error) {
					sent++
					answer := httptest.NewRecorder()
					answer.WriteHeader(http.StatusForbidden)
					_, _ = fmt.Fprintf(answer, `{"message":%q}`, c.message)
					return answer.Result(), nil
				})}
				write := func() error {
					resp, err := p.RoundTrip(httptest.NewRequest(http.MethodDelete, "/api/v1/namespaces/shop/configmaps/web", nil))
					if err != nil {
						return err
					}
					body, err := readAll(resp)
					if err != nil || !bytes.Contains(body, []byte(c.message)) {
						t.Errorf("the answer is %q, %v", body, err)
					}
					return nil
				}
				if err := write(); err != nil {
					t.Fatal(err)
				}
				if err := write(); c.sends == errors.Is(err, fence.ErrLost) || c.sends != (sent == 2) {
					t.Errorf("the next write: %v, %d sent", err, sent)
				}
			})
		})
	}
}

func FuzzWithRecord(f *testing.F) {
	f.Add([]byte(`{"metadata":{"annotations":{"a":"b"}}}`))
	f.Add([]byte("metadata:\n  annotations: null\n"))
	f.Fuzz(func(t *testing.T, body []byte) {
		got, err := withRecord(body, 42)
		if err != nil {
			return
		}
		var object map[string]any // a struct would match names of any case
		if err := json.Unmarshal(got, &object); err != nil {
			t.Fatalf("%q became %q: %v", body, got, err)
		}
		if token, _, err := unstructured.NestedString(object, "metadata", "annotations", fence.AnnotationToken); token != "42" || err != nil {
			t.Fatalf("%q became %q: %v", body, got, err)
		}
	})
}
