package client

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	crclient "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/internal/controlplane"
	"github.com/fencedlease/fencedlease/test/env"
)

const operator = "../../docs/examples/operator/"

// TestTheShownDiffIsTheDifference: what the page shows is what makes the one
// operator the other.
func TestTheShownDiffIsTheDifference(t *testing.T) {
	page, err := os.ReadFile("../../docs/operators.md")
	if err != nil {
		t.Fatal(err)
	}
	// It differs, so it ends with 1.
	diff, _ := exec.CommandContext(t.Context(), "diff", "-U1", operator+"before/main.go", operator+"after/main.go").Output()
	_, hunks, _ := bytes.Cut(diff, []byte("\n@@"))
	if len(hunks) == 0 || !bytes.Contains(page, append([]byte("@@"), hunks...)) {
		t.Errorf("operators.md does not show\n@@%s", hunks)
	}
}

// replica is a running process of the example operator.
type replica struct {
	*exec.Cmd
	name   string
	log    bytes.Buffer
	exited chan struct{}
}

func startReplica(t *testing.T, program, kubeconfig, namespace, name string) *replica {
	t.Helper()
	r := &replica{Cmd: exec.CommandContext(t.Context(), program), name: name, exited: make(chan struct{})}
	r.Env = append(os.Environ(), "KUBECONFIG="+kubeconfig, "POD_NAMESPACE="+namespace, "POD_NAME="+name)
	r.Stdout, r.Stderr = &r.log, &r.log
	if err := r.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { defer close(r.exited); _ = r.Wait() }()
	t.Cleanup(func() {
		_ = r.Process.Kill()
		<-r.exited
		if t.Failed() {
			t.Logf("%s:\n%s", r.name, r.log.String())
		}
	})
	return r
}

func (r *replica) signal(t *testing.T, s os.Signal) {
	t.Helper()
	if err := r.Process.Signal(s); err != nil {
		t.Fatalf("%v to %s: %v\n%s", s, r.name, err, r.log.String())
	}
}

// TestOperatorThatIsStopped stops the leader of two replicas of the example
// operator beyond its lease, lets the other take over and the first go on. Of
// the first nothing commits after the revision at which the newer token was
// issued. FENCE_ROUNDS says how often; each round takes about 5 s.
func TestOperatorThatIsStopped(t *testing.T) {
	rounds := 2
	if s := os.Getenv("FENCE_ROUNDS"); s != "" {
		var err error
		if rounds, err = strconv.Atoi(s); err != nil {
			t.Fatal(err)
		}
	}
	e := everything(t)
	namespace := e.Namespace(t)
	program := filepath.Join(t.TempDir(), "after")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", program, operator+"after").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	lease := &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "clocks"}, Spec: v1alpha1.FencedLeaseSpec{LeaseDurationSeconds: 3}}
	if err := e.Admin.Create(t.Context(), lease); err != nil {
		t.Fatal(err)
	}
	const clocks = 5
	for i := range clocks {
		clock := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: fmt.Sprintf("clock-%d", i),
			Labels: map[string]string{"clock": "", fence.LabelLease: "clocks"}}}
		if err := e.Admin.Create(t.Context(), clock); err != nil {
			t.Fatal(err)
		}
	}
	user := "clocks-of-" + namespace
	cfg := worker(t, e, namespace, user)
	e.Grant(t, "", user, rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"configmaps"}, Verbs: []string{"list", "watch"}})
	kubeconfig := writeKubeconfig(t, cfg)
	h := follow(t, e, namespace)

	count := 0
	start := func() *replica {
		count++
		return startReplica(t, program, kubeconfig, namespace, fmt.Sprintf("clocks-%d", count))
	}
	replicas := map[string]*replica{}
	for range 2 {
		r := start()
		replicas[r.name] = r
	}
	var former string
	for round := range rounds {
		leader := h.leader(t, former, clocks)
		first := replicas[leader]
		first.signal(t, syscall.SIGSTOP)
		next := h.leader(t, leader, clocks)
		first.signal(t, syscall.SIGCONT)
		// It learns of its loss, and ends, as a manager does.
		select {
		case <-first.exited:
		case <-time.After(30 * time.Second):
			t.Fatalf("round %d: %s goes on after %s took over", round, leader, next)
		}
		delete(replicas, leader)
		r := start()
		replicas[r.name], former = r, leader
	}
	h.leader(t, former, 3*clocks)
	h.check(t)
}

// history is what a watch on the clocks and the lease saw.
type history struct {
	lease, clocks watch.Interface
	// issued is the revision at which each identity was granted the lease.
	issued map[string]int64
	order  []string
	shown  map[string]string
	writes []write
}

// write is a change of what a clock shows; a change of annotations alone says
// nothing of who made it.
type write struct {
	revision   int64
	object, by string
}

func follow(t *testing.T, e *env.Environment, namespace string) *history {
	t.Helper()
	h := &history{issued: map[string]int64{}, shown: map[string]string{}}
	for list, to := range map[crclient.ObjectList]*watch.Interface{&v1alpha1.FencedLeaseList{}: &h.lease, &corev1.ConfigMapList{}: &h.clocks} {
		w, err := e.Admin.Watch(t.Context(), list, crclient.InNamespace(namespace))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(w.Stop)
		*to = w
	}
	return h
}

func revisionOf(t *testing.T, o metav1.Object) int64 {
	t.Helper()
	revision, err := strconv.ParseInt(o.GetResourceVersion(), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return revision
}

// leader reads on until another than former holds the lease and has written
// each of the clocks, and gives its identity.
func (h *history) leader(t *testing.T, former string, clocks int) string {
	t.Helper()
	limit := time.After(time.Minute)
	written := 0
	for written < clocks {
		select {
		case event := <-h.lease.ResultChan():
			lease, ok := event.Object.(*v1alpha1.FencedLease)
			if !ok {
				t.Fatalf("the watch on the lease: %v", event)
			}
			if holder := lease.Status.Holder; holder != nil && h.issued[holder.Identity] == 0 {
				h.issued[holder.Identity] = revisionOf(t, lease)
				h.order = append(h.order, holder.Identity)
			}
		case event := <-h.clocks.ResultChan():
			clock, ok := event.Object.(*corev1.ConfigMap)
			if !ok {
				t.Fatalf("the watch on the clocks: %v", event)
			}
			by := clock.Data["by"]
			shows := by + " " + clock.Data["time"]
			if h.shown[clock.Name] == shows {
				continue
			}
			h.shown[clock.Name] = shows
			h.writes = append(h.writes, write{revision: revisionOf(t, clock), object: clock.Name, by: by})
			if len(h.order) > 0 && by == h.order[len(h.order)-1] && by != former {
				written++
			}
		case <-limit:
			t.Fatalf("waited a minute for another leader than %q; granted so far: %s", former, strings.Join(h.order, ", "))
		}
	}
	return h.order[len(h.order)-1]
}

// check looks for writes of a former leader after the next one's token was
// issued, telling them by the data and not by the annotations.
func (h *history) check(t *testing.T) {
	t.Helper()
	end := map[string]int64{}
	for i, name := range h.order[1:] {
		end[h.order[i]] = h.issued[name]
	}
	for _, w := range h.writes {
		if until, ok := end[w.by]; ok && w.revision > until {
			t.Errorf("%s wrote %s at revision %d, superseded at %d", w.by, w.object, w.revision, until)
		}
	}
	t.Logf("%d writes, leaders %s", len(h.writes), strings.Join(h.order, ", "))
}

func writeKubeconfig(t *testing.T, cfg *rest.Config) string {
	t.Helper()
	data, err := controlplane.KubeConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}
