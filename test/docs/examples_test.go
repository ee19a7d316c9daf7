package docs

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/internal/controlplane"
	"github.com/fencedlease/fencedlease/sqlfence"
	"github.com/fencedlease/fencedlease/sqlfence/pgtest"
	"github.com/fencedlease/fencedlease/test/env"
)

// example is an example program, with a namespace of its own.
type example struct {
	*env.Environment
	namespace string
	cmd       *exec.Cmd
	log       bytes.Buffer
}

// newExample builds an example and declares its lease and guarded object.
func newExample(t *testing.T, program string, spec v1alpha1.FencedLeaseSpec, lease, guarded string) *example {
	t.Helper()
	x := &example{Environment: everything(t)}
	x.namespace = x.Namespace(t)
	dir := t.TempDir()
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", dir, "../../docs/examples/"+program).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if err := x.Admin.Create(t.Context(), &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: x.namespace, Name: lease}, Spec: spec}); err != nil {
		t.Fatal(err)
	}
	object := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: x.namespace, Name: guarded, Labels: map[string]string{fence.LabelLease: lease}},
		Data:       map[string]string{"a": "b"},
	}
	if err := x.Admin.Create(t.Context(), object); err != nil {
		t.Fatal(err)
	}
	kubeconfig := filepath.Join(dir, "kubeconfig")
	data, err := controlplane.KubeConfig(x.Config)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(kubeconfig, data, 0o600); err != nil {
		t.Fatal(err)
	}
	x.cmd = exec.CommandContext(t.Context(), filepath.Join(dir, program))
	x.cmd.Env = append(os.Environ(), "KUBECONFIG="+kubeconfig, "POD_NAMESPACE="+x.namespace, "POD_NAME=one")
	x.cmd.Stdout, x.cmd.Stderr = &x.log, &x.log
	return x
}

// run starts the example, awaits what it is to do, ends it by SIGTERM and
// demands that it succeeds.
func (x *example) run(t *testing.T, did func(context.Context) (bool, error)) {
	t.Helper()
	if err := x.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	waited := wait.PollUntilContextTimeout(t.Context(), 50*time.Millisecond, time.Minute, true, did)
	if err := x.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Error(err)
	}
	if err := x.cmd.Wait(); err != nil || waited != nil {
		t.Fatalf("waiting: %v, its end: %v\n%s", waited, err, &x.log)
	}
}

// records tells whether a ConfigMap is guarded and records the lease's token.
func (x *example) records(ctx context.Context, lease, name string) (bool, error) {
	l, c := &v1alpha1.FencedLease{}, &corev1.ConfigMap{}
	if err := x.Admin.Get(ctx, types.NamespacedName{Namespace: x.namespace, Name: lease}, l); err != nil {
		return false, err
	}
	if err := x.Admin.Get(ctx, types.NamespacedName{Namespace: x.namespace, Name: name}, c); err != nil {
		return false, nil //nolint:nilerr // not made yet
	}
	return c.Labels[fence.LabelLease] == lease && l.Status.Token > 0 && fence.Recorded(c.Annotations) == fence.Token(l.Status.Token), nil
}

func TestTheElectorGuardsWhatItCreates(t *testing.T) {
	x := newExample(t, "elector", v1alpha1.FencedLeaseSpec{LeaseDurationSeconds: 15}, "settings", "settings")
	x.run(t, func(ctx context.Context) (bool, error) { return x.records(ctx, "settings", "settings-copy") })
}

func TestAnElectionThatStaysIsAdopted(t *testing.T) {
	x := newExample(t, "adopted", v1alpha1.FencedLeaseSpec{LeaseRef: &v1alpha1.LeaseReference{Name: "legacy"}}, "legacy", "state")
	x.run(t, func(ctx context.Context) (bool, error) { return x.records(ctx, "legacy", "state") })
}

// The partner's first answer is lost: the worker is issued another token and
// calls again.
func TestTheWorkerSettlesACallWithoutAnAnswer(t *testing.T) {
	server := pgtest.Start(t)
	x := newExample(t, "worker", v1alpha1.FencedLeaseSpec{LeaseDurationSeconds: 15}, "books", "orders")
	lease := x.namespace + "/books"
	db, err := pgx.Connect(t.Context(), server.URL("postgres", "postgres"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close(context.Background()) })
	guard, err := sqlfence.GuardSQL("orders", lease, "")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := db.Exec(t.Context(), sqlfence.Schema+"CREATE TABLE orders (id int PRIMARY KEY);"+guard); err != nil {
		t.Fatal(err)
	}
	var calls []string
	gateway := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		calls = append(calls, r.Header.Get(fence.HeaderLease)+" "+r.Header.Get(fence.HeaderToken))
		if len(calls) == 1 {
			panic(http.ErrAbortHandler)
		}
	}))
	t.Cleanup(gateway.Close)
	x.cmd.Env = append(x.cmd.Env, "GATEWAY="+gateway.URL, "DATABASE="+server.URL("postgres", "postgres"))
	if err := x.cmd.Run(); err != nil {
		t.Fatalf("%v\n%s", err, &x.log)
	}
	gateway.Close() // its calls are over
	var tokens []int
	for _, call := range calls {
		of, text, _ := strings.Cut(call, " ")
		token, err := strconv.Atoi(text)
		if of != lease || err != nil {
			t.Errorf("a call presents %q", call)
		}
		tokens = append(tokens, token)
	}
	if len(tokens) != 2 || !slices.IsSorted(tokens) || tokens[0] == tokens[1] {
		t.Errorf("calls with the tokens %v, want a second one with a higher token", tokens)
	}
	var booked int
	if err := db.QueryRow(t.Context(), "SELECT count(*) FROM orders").Scan(&booked); err != nil || booked != 1 {
		t.Errorf("%v, %d orders", err, booked)
	}
	orders := &corev1.ConfigMap{}
	if err := x.Admin.Get(t.Context(), types.NamespacedName{Namespace: x.namespace, Name: "orders"}, orders); err != nil || orders.Data["7"] != "charged" ||
		fmt.Sprint(fence.Recorded(orders.Annotations)) != strconv.Itoa(tokens[len(tokens)-1]) {
		t.Errorf("%v, %v records %v", err, orders.Data, orders.Annotations)
	}
}
