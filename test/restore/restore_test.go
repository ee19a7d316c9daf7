// Package restore plays docs/backup.md: everything is lost, objects come back
// without status and with older metadata into an empty etcd.
package restore

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	crclient "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/client"
	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/internal/controlplane"
	"github.com/fencedlease/fencedlease/test/env"
)

var blocks = regexp.MustCompile("(?s)<!-- run -->\n```sh\n(.*?)```")

// commands gives the commands of a part of the page, block by block.
func commands(t *testing.T, from, to string) (scripts []string) {
	t.Helper()
	text, err := os.ReadFile("../../docs/backup.md")
	if err != nil {
		t.Fatal(err)
	}
	_, part, found := strings.Cut(string(text), "\n"+from+"\n")
	part, _, end := strings.Cut(part, "\n"+to+"\n")
	if !found || !end {
		t.Fatalf("the page has no %q and %q", from, to)
	}
	for _, m := range blocks.FindAllStringSubmatch(part, -1) {
		scripts = append(scripts, m[1])
	}
	if len(scripts) == 0 {
		t.Fatalf("%s shows no commands", from)
	}
	return scripts
}

func run(t *testing.T, e *env.Environment, dir, script string) {
	t.Helper()
	if out, err := try(t, e, dir, script); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

func try(t *testing.T, e *env.Environment, dir, script string) (string, error) {
	t.Helper()
	data, err := controlplane.KubeConfig(e.Config)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(file, data, 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "bash", "-euo", "pipefail", "-c", script)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "KUBECONFIG="+file, "PATH="+e.Assets+":"+os.Getenv("PATH"))
	out, err := cmd.CombinedOutput()
	return string(out), err
}

const namespace = "shop"

func acquire(t *testing.T, e *env.Environment, identity string) *client.Held {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	held, err := client.Acquire(ctx, e.Config, namespace, "main", client.WithIdentity(identity))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = held.Release(context.Background()) })
	return held
}

// write writes the guarded object with a token by header.
func write(t *testing.T, e *env.Environment, token fence.Token, patch string) error {
	t.Helper()
	c := e.Impersonating(t, "admin", map[string][]string{fence.ExtraToken: {token.String()}})
	o := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "plan"}}
	return c.Patch(t.Context(), o, crclient.RawPatch(types.MergePatchType, []byte(patch)))
}

func record(token fence.Token) string {
	return `{"metadata":{"annotations":{"fencedlease.io/token":"` + token.String() + `"}}}`
}

func TestRestore(t *testing.T) {
	dir := t.TempDir()
	if err := os.Symlink(mustAbs(t, "../../config/crd/bases"), filepath.Join(dir, "crd")); err != nil {
		t.Fatal(err)
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	everything := env.Options{Operator: true, Webhook: true, Policy: true}
	before := env.Start(t, everything)
	must(before.Admin.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}))
	must(before.Admin.Create(t.Context(), &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "main"}}))
	plan := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "plan", Labels: map[string]string{fence.LabelLease: "main"}}}
	must(before.Admin.Create(t.Context(), plan))
	held := acquire(t, before, "first")
	must(write(t, before, held.Token(), record(held.Token())))
	run(t, before, dir, strings.Join(commands(t, "## Backup", "## Restore into another cluster, or a new etcd"), ""))

	// The world goes on: more hand-overs, that the backup knows nothing of.
	must(held.Release(t.Context()))
	survivor := acquire(t, before, "survivor")
	newest := survivor.Token()
	must(write(t, before, newest, record(newest)))

	// A new cluster, where nothing of ours runs while objects come back.
	after := env.Start(t, env.Options{Bare: true})
	must(after.Admin.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}))
	steps := commands(t, "## Restore into another cluster, or a new etcd", "## Restore etcd in place")
	if len(steps) != 2 {
		t.Fatalf("%d steps, want two", len(steps))
	}
	// Where the annotations were stripped, and no object tells either, the
	// second step does not guess.
	run(t, after, dir, steps[0]+`mv guarded.yaml kept.yaml; kubectl annotate fencedlease main --namespace=shop fencedlease.io/last-token-`)
	if out, err := try(t, after, dir, steps[1]); err == nil || !strings.Contains(out, "the backup holds no token") {
		t.Errorf("without any token: %v\n%s", err, out)
	}
	run(t, after, dir, `mv kept.yaml guarded.yaml; kubectl delete --namespace=shop fencedlease/main configmap/plan`)
	run(t, after, dir, steps[0]+steps[1])
	must(after.Install(t.Context(), everything))

	again := acquire(t, after, "again")
	if again.Token() <= newest {
		t.Fatalf("token %s, and %s was used", again.Token(), newest)
	}
	if err := write(t, after, newest, `{"data":{"by":"survivor"}}`); !client.IsStale(err) {
		t.Errorf("the survivor's write: %v", err)
	}
	must(write(t, after, again.Token(), record(again.Token())))
	must(write(t, after, again.Token(), `{"data":{"by":"again"}}`))

	// A lease that is made later starts above, too: it could be one that the
	// backup did not have.
	must(after.Admin.Create(t.Context(), &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "other"}}))
	other, err := client.Acquire(t.Context(), after.Config, namespace, "other")
	must(err)
	if other.Token() <= newest {
		t.Errorf("another lease issued %s, and %s was used", other.Token(), newest)
	}
	must(other.Release(t.Context()))
}

func mustAbs(t *testing.T, path string) string {
	t.Helper()
	abs, err := filepath.Abs(path)
	if err != nil {
		t.Fatal(err)
	}
	return abs
}
