package webhooks

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	admissionv1 "k8s.io/api/admission/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
)

func TestRejectionsAreToldOf(t *testing.T) {
	const stale = `StaleToken: [shop/main] token 41 is stale`
	lease := &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "main", UID: "u"}}
	request := func(change func(*write)) *write {
		w := &write{
			request: &admissionv1.AdmissionRequest{
				Kind: metav1.GroupVersionKind{Version: "v1", Kind: "ConfigMap"}, Resource: metav1.GroupVersionResource{Version: "v1", Resource: "configmaps"},
				Namespace: "shop", Name: "web", UserInfo: authenticationv1.UserInfo{Username: "jane"},
			},
			presented: fence.Presented{Stamped: true, Text: "41"},
		}
		if change != nil {
			change(w)
		}
		return w
	}
	refused := verdict{reason: fence.StaleToken, message: stale}
	for name, test := range map[string]struct {
		verdict verdict
		lease   *v1alpha1.FencedLease
		change  func(*write)
		want    string
	}{
		"a stale write": {refused, lease, nil, `Warning StaleToken configmaps shop/web by "jane": ` + stale},
		"a subresource": {refused, lease, func(w *write) { w.request.SubResource = "scale" }, `Warning StaleToken configmaps/scale shop/web by "jane": ` + stale},
		"a malformed token is not repeated": {verdict{reason: fence.MalformedToken, message: `MalformedToken: "hunter2"`}, lease, nil,
			`Warning MalformedToken configmaps shop/web by "jane": MalformedToken`},
		"a long message": {verdict{reason: fence.StaleToken, message: strings.Repeat("é", 2000)}, lease, nil,
			`Warning StaleToken configmaps shop/web by "jane": ` + strings.Repeat("é", (mostNote-len(`configmaps shop/web by "jane": `))/2)},
		"an allowed write":                 {allow(), lease, nil, ""},
		"an unstamped write":               {refused, lease, func(w *write) { w.presented.Stamped = false }, ""},
		"a write that asks for the record": {verdict{reason: fence.NotRecorded}, lease, nil, ""},
		"a dry run":                        {refused, lease, func(w *write) { w.request.DryRun = new(true) }, ""},
		"no lease":                         {refused, nil, nil, ""},
		"from a namespace that the lease does not allow": {refused, lease, func(w *write) { w.request.Namespace = "elsewhere" }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			recorder := events.NewFakeRecorder(1)
			newRejections(recorder, clocktesting.NewFakePassiveClock(time.Unix(0, 0))).tell(test.verdict, test.lease, request(test.change))
			got := ""
			select {
			case got = <-recorder.Events:
			default:
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
	t.Run("one of a cause and lease in ten seconds", func(t *testing.T) {
		clock := clocktesting.NewFakePassiveClock(time.Unix(0, 0))
		recorder := events.NewFakeRecorder(10)
		told := newRejections(recorder, clock)
		other := lease.DeepCopy()
		other.UID = "other"
		var counts []int
		for _, wait := range []time.Duration{0, rejectedEvery - 1, 1} {
			clock.SetTime(clock.Now().Add(wait))
			for range 3 {
				told.tell(refused, lease, request(nil))
				told.tell(verdict{reason: fence.NotHolder}, lease, request(nil))
				told.tell(refused, other, request(nil))
			}
			counts = append(counts, len(recorder.Events))
		}
		if diff := cmp.Diff([]int{3, 3, 6}, counts); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	})
}
