package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/fencedlease/fencedlease/fence"
)

// guardedManifest is a ConfigMap under the guard of a lease.
func guardedManifest(t *testing.T, name, value string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "manifest.yaml")
	text := "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: " + name + ", labels: {fencedlease.io/lease: deploy}}\ndata: {value: " + value + "}\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// What plain kubectl does counts as the holder's behind the proxy, on every
// path, for the first and for a later token, and leaves unguarded objects as
// they are.
func TestRunProxyStampsWhatTheCommandWrites(t *testing.T) {
	f := newFixture(t)
	f.lease(t, "deploy")
	for token, value := range []string{"one", "two"} {
		for _, command := range [][]string{
			{"apply", "-f", guardedManifest(t, "client-side", value)},
			{"apply", "--server-side", "-f", guardedManifest(t, "server-side", value)},
			{"apply", "--server-side", "-f", guardedManifest(t, "server-side", value+"-again")},
			{"create", "-f", guardedManifest(t, "created-"+value, value)},
			{"replace", "-f", guardedManifest(t, "created-"+value, value+"-replaced")},
			{"replace", "-f", guardedManifest(t, "client-side", value+"-replaced")},
			{"patch", "configmap/server-side", "--type=json", `--patch=[{"op":"add","path":"/data/json","value":"` + value + `"}]`},
			{"patch", "configmap/server-side", "--type=merge", `--patch={"data":{"merge":"` + value + `"}}`},
			{"label", "configmap/server-side", "--overwrite", "step=" + value},
			{"apply", "-f", guardedManifest(t, "dry", value), "--dry-run=server"},
			{"delete", "configmap/client-side"},
			{"create", "configmap", "plain-" + value},
		} {
			r := f.fence(t, append([]string{"run", "deploy", "--proxy", "--", "kubectl"}, command...)...)
			if r.code != 0 {
				t.Fatalf("token %d: kubectl %s: %v", token, strings.Join(command, " "), r)
			}
		}
		if c := f.readConfigMap(t, "server-side"); c.Data["value"] != value+"-again" {
			t.Fatalf("holds %q", c.Data)
		}
		if c := f.readConfigMap(t, "plain-"+value); len(c.Annotations) > 0 {
			t.Fatalf("an unguarded object was given %v", c.Annotations)
		}
	}
	if r := f.kubectl(t, "label", "configmap/server-side", "--overwrite", "step=three"); r.code == 0 || !strings.Contains(r.stderr, string(fence.Unstamped)) {
		t.Fatalf("without the proxy: %v", r)
	}
}

func TestRunProxyLetsInOnlyWhoHasItsSecret(t *testing.T) {
	f := newFixture(t)
	f.lease(t, "deploy")
	got := f.must(t, "run", "deploy", "--proxy", "--", "sh", "-c", `
		kubectl get --raw=/version >/dev/null && echo let in
		kubectl --token=guess get --raw=/version 2>&1 | grep -o "the proxy's kubeconfig holds the secret"
		ls -ld "$(dirname "$KUBECONFIG")" | cut -c1-10
		ls -l "$KUBECONFIG" | cut -c1-10
		echo "$KUBECONFIG"`)
	lines := strings.Split(strings.TrimSpace(got), "\n")
	want := []string{"let in", "the proxy's kubeconfig holds the secret", "drwx------", "-rw-------"}
	if len(lines) != len(want)+1 || strings.Join(lines[:len(want)], "\n") != strings.Join(want, "\n") {
		t.Fatalf("got %q, want %q", lines, want)
	}
	if _, err := os.Stat(filepath.Dir(lines[len(want)])); err == nil {
		t.Fatal("the kubeconfig outlives the command")
	}
}

// A script may use the plugin itself behind the proxy.
func TestRunProxyLetsThroughWhatIsStampedAlready(t *testing.T) {
	f := newFixture(t)
	f.lease(t, "deploy")
	f.must(t, "run", "deploy", "--proxy", "--", "kubectl-fence", "--namespace="+f.namespace, "apply", "-f", guardedManifest(t, "web", "one"))
	if c := f.readConfigMap(t, "web"); fence.Recorded(c.Annotations) == 0 {
		t.Fatalf("nothing is recorded: %v", c.Annotations)
	}
	if r := f.fence(t, "run", "deploy", "--proxy", "--", "kubectl", "--namespace="+f.namespace, "--as=somebody", "--as-group=system:masters",
		"label", "configmap/web", "a=b"); r.code == 0 || !strings.Contains(r.stderr, string(fence.Unstamped)) {
		t.Fatalf("as another account, without a token: %v", r)
	}
}

// After a loss the proxy sends no write, whatever the command goes on to do.
func TestRunProxyRefusesWritesOnceTheLeaseIsLost(t *testing.T) {
	f := newFixture(t)
	f.lease(t, "deploy", duration(2))
	cmd := f.background(t, "run", "deploy", "--proxy", "--grace=20s", "--", "sh", "-c",
		`trap 'kubectl create configmap late 2>&1; kubectl get configmaps >/dev/null && echo read; exit 0' TERM; echo ready; for i in $(seq 1200); do sleep 0.05; done`)
	cmd.out.next(t, "ready")
	f.deleteClaims(t)
	cmd.out.next(t, "read")
	cmd.ends(t, 4)
	list := &corev1.ConfigMapList{}
	if err := f.Admin.List(t.Context(), list); err != nil {
		t.Fatal(err)
	}
	for _, c := range list.Items {
		if c.Namespace == f.namespace && c.Name == "late" {
			t.Fatal("a write was sent after the loss")
		}
	}
}
