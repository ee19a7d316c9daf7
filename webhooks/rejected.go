package webhooks

import (
	"fmt"
	"strings"
	"sync"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/clock"
	"k8s.io/utils/lru"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
)

const (
	// rejectedEvery is how often one cause of one lease is told of: a writer
	// in a loop must not fill the API server with events.
	rejectedEvery = 10 * time.Second
	// rejectedLeases bounds the memory for that.
	rejectedLeases = 4096
	// mostNote is what the API accepts of an event's note, in bytes.
	mostNote = 1024
)

// rejections leaves events on leases whose fence refused a stamped write.
type rejections struct {
	events events.EventRecorder
	clock  clock.PassiveClock

	mu   sync.Mutex
	told *lru.Cache
}

type rejection struct {
	lease  types.UID
	reason fence.Reason
}

func newRejections(recorder events.EventRecorder, c clock.PassiveClock) *rejections {
	return &rejections{events: recorder, clock: c, told: lru.New(rejectedLeases)}
}

// tell leaves an event where people look for the lease; a dry run leaves none.
// It waits for nobody: the recorder sends in the background, and adds what it
// has told before to a series.
func (t *rejections) tell(v verdict, lease *v1alpha1.FencedLease, w *write) {
	r := w.request
	switch {
	case v.allowed, !w.presented.Stamped, r.DryRun != nil && *r.DryRun:
		return
	case v.reason == fence.NotRecorded, v.reason == fence.FenceRemoved: // a client records, and sends it again
		return
	case lease == nil, !lease.Allows(r.Namespace): // or everybody could leave events anywhere
		return
	case !t.due(rejection{lease.UID, v.reason}):
		return
	}
	object := &metav1.PartialObjectMetadata{
		TypeMeta:   metav1.TypeMeta{Kind: r.Kind.Kind, APIVersion: metav1.GroupVersion{Group: r.Kind.Group, Version: r.Kind.Version}.String()},
		ObjectMeta: metav1.ObjectMeta{Namespace: r.Namespace, Name: r.Name},
	}
	note := fmt.Sprintf("%s %s/%s by %q: %s", resourceOf(r), r.Namespace, r.Name, r.UserInfo.Username, v.message)
	if v.reason == fence.MalformedToken {
		// What stands in for the token may be anything, a secret too.
		note = fmt.Sprintf("%s %s/%s by %q: %s", resourceOf(r), r.Namespace, r.Name, r.UserInfo.Username, v.reason)
	}
	t.events.Eventf(lease, object, corev1.EventTypeWarning, string(v.reason), v1alpha1.ActionReject, "%s", strings.ToValidUTF8(note[:min(len(note), mostNote)], ""))
}

// due tells whether it is time to tell of a rejection again.
func (t *rejections) due(key rejection) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.clock.Now()
	if last, ok := t.told.Get(key); ok && now.Sub(last.(time.Time)) < rejectedEvery {
		return false
	}
	t.told.Add(key, now)
	return true
}

func resourceOf(r *admissionv1.AdmissionRequest) string {
	if r.SubResource == "" {
		return r.Resource.Resource
	}
	return r.Resource.Resource + "/" + r.SubResource
}
