// Package test checks the scripts of hack.
package test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// fakeGo stands in for the compiler: it writes a program that runs, counts
// the build, and dies where the test says.
const fakeGo = `#!/bin/bash
[ "$1" = build ] || exit 1
while [ $# -gt 1 ]; do [ "$1" = -o ] && out=$2; shift; done
echo "$(basename "$out")" >>"$BUILDS"
[ "$(basename "$out")" = "$DIE_AT" ] && { echo half >"$out"; kill -9 $PPID; exit 1; }
printf '#!/bin/bash\necho v1\n' >"$out"
chmod +x "$out"
`

// repository lays out as much of a checkout as the script reads.
func repository(t *testing.T) (root string, run func(env ...string) (stdout, stderr string, err error), builds func() []string) {
	t.Helper()
	root = t.TempDir()
	write := func(name, text string, mode os.FileMode) {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
	}
	script, err := os.ReadFile("../control-plane.sh")
	if err != nil {
		t.Fatal(err)
	}
	write("hack/control-plane.sh", string(script), 0o755)
	write("hack/controlplane/go.mod", "module x\n\nrequire (\n\tk8s.io/kubernetes v1.2.3\n)\n", 0o644)
	write("tools/go", fakeGo, 0o755)
	log := filepath.Join(root, "builds")
	run = func(env ...string) (string, string, error) {
		var stdout, stderr strings.Builder
		cmd := exec.CommandContext(t.Context(), filepath.Join(root, "hack/control-plane.sh"))
		cmd.Env = append([]string{"PATH=" + filepath.Join(root, "tools") + ":" + os.Getenv("PATH"), "BUILDS=" + log, "CONTROL_PLANE_BUILD=1"}, env...)
		cmd.Stdout, cmd.Stderr = &stdout, &stderr
		err := cmd.Run()
		return strings.TrimSpace(stdout.String()), stderr.String(), err
	}
	builds = func() []string {
		data, _ := os.ReadFile(log)
		_ = os.Remove(log)
		return strings.Fields(string(data))
	}
	return root, run, builds
}

const all = "etcd kube-apiserver kube-controller-manager kubectl"

func TestControlPlaneIsBuiltOnce(t *testing.T) {
	root, run, builds := repository(t)
	dir := filepath.Join(root, "bin/k8s/1.2.3")
	for _, want := range []string{all, ""} {
		stdout, stderr, err := run()
		if err != nil || stdout != dir {
			t.Fatalf("printed %q, want %q: %v\n%s", stdout, dir, err, stderr)
		}
		if got := strings.Join(builds(), " "); got != want {
			t.Errorf("built %q, want %q", got, want)
		}
	}
}

func TestDamagedControlPlaneIsRedone(t *testing.T) {
	for name, damage := range map[string]func(dir string) error{
		"a program is cut off": func(dir string) error { return os.Truncate(filepath.Join(dir, "kubectl"), 3) },
		"a program is gone":    func(dir string) error { return os.Remove(filepath.Join(dir, "etcd")) },
		"the sums are gone":    func(dir string) error { return os.Remove(filepath.Join(dir, "SHA256SUMS")) },
		"the sums are cut off": func(dir string) error { return os.Truncate(filepath.Join(dir, "SHA256SUMS"), 80) },
	} {
		t.Run(name, func(t *testing.T) {
			root, run, builds := repository(t)
			if _, stderr, err := run(); err != nil {
				t.Fatalf("%v\n%s", err, stderr)
			}
			builds()
			if err := damage(filepath.Join(root, "bin/k8s/1.2.3")); err != nil {
				t.Fatal(err)
			}
			if _, stderr, err := run(); err != nil {
				t.Fatalf("%v\n%s", err, stderr)
			}
			if got := strings.Join(builds(), " "); got != all {
				t.Errorf("built %q, want %q", got, all)
			}
		})
	}
}

func TestBuildThatWasKilledIsRedone(t *testing.T) {
	root, run, builds := repository(t)
	if _, _, err := run("DIE_AT=kube-controller-manager"); err == nil {
		t.Fatal("the build was to be killed")
	}
	if _, err := os.Stat(filepath.Join(root, "bin/k8s/1.2.3")); err == nil {
		t.Fatal("a half-done build stands where a whole one belongs")
	}
	builds()
	if _, stderr, err := run(); err != nil {
		t.Fatalf("%v\n%s", err, stderr)
	}
	if got := strings.Join(builds(), " "); got != all {
		t.Errorf("built %q, want %q", got, all)
	}
	left, err := filepath.Glob(filepath.Join(root, "bin/k8s/*.partial"))
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func TestAssetsThatAreGivenWin(t *testing.T) {
	root, run, builds := repository(t)
	given := filepath.Join(root, "given")
	if err := os.Mkdir(given, 0o755); err != nil {
		t.Fatal(err)
	}
	if _, stderr, err := run("KUBEBUILDER_ASSETS=" + given); err == nil || !strings.Contains(stderr, "has no executable etcd") {
		t.Errorf("an empty folder: %v, %q", err, stderr)
	}
	for _, p := range []string{"etcd", "kube-apiserver", "kubectl"} {
		if err := os.WriteFile(filepath.Join(given, p), nil, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	stdout, stderr, err := run("KUBEBUILDER_ASSETS=" + given)
	if err != nil || stdout != given {
		t.Errorf("printed %q, want %q: %v\n%s", stdout, given, err, stderr)
	}
	if got := builds(); len(got) > 0 {
		t.Errorf("built %q all the same", got)
	}
}
