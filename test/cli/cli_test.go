// Package cli runs the built plugin against the real API server.
package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/controlplane"
	"github.com/fencedlease/fencedlease/test/env"
)

// plugin is the folder of the built plugin, and of the fencedlease program.
var plugin string

func TestMain(m *testing.M) { os.Exit(main(m)) }

func main(m *testing.M) int {
	dir, err := os.MkdirTemp("", "kubectl-fence-")
	if err == nil {
		plugin = dir
		defer func() { _ = os.RemoveAll(dir) }()
		var out []byte
		if out, err = exec.Command("go", "build", "-o", dir, "../../cmd/...").CombinedOutput(); err != nil {
			err = fmt.Errorf("build the programs: %w\n%s", err, out)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return env.Main(m)
}

var cluster = env.Shared(env.Options{Operator: true, Webhook: true, Policy: true})

// fixture is a namespace with an account's kubeconfig.
type fixture struct {
	*env.Environment
	namespace, kubeconfig string
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	e := cluster(t)
	return (&fixture{Environment: e, namespace: e.Namespace(t)}).as(t, e.Config)
}

// as is the same namespace for another account.
func (f *fixture) as(t *testing.T, cfg *rest.Config) *fixture {
	t.Helper()
	data, err := controlplane.KubeConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	out := &fixture{Environment: f.Environment, namespace: f.namespace, kubeconfig: filepath.Join(t.TempDir(), "kubeconfig")}
	if err := os.WriteFile(out.kubeconfig, data, 0o600); err != nil {
		t.Fatal(err)
	}
	return out
}

// lease declares a lease. A change may be given.
func (f *fixture) lease(t *testing.T, name string, change ...func(*v1alpha1.FencedLeaseSpec)) {
	t.Helper()
	l := &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: f.namespace, Name: name}}
	for _, c := range change {
		c(&l.Spec)
	}
	if err := f.Admin.Create(t.Context(), l); err != nil {
		t.Fatal(err)
	}
}

func duration(seconds int32) func(*v1alpha1.FencedLeaseSpec) {
	return func(s *v1alpha1.FencedLeaseSpec) { s.LeaseDurationSeconds = seconds }
}

func (f *fixture) status(t *testing.T, name string) v1alpha1.FencedLeaseStatus {
	t.Helper()
	l := &v1alpha1.FencedLease{}
	if err := f.Admin.Get(t.Context(), types.NamespacedName{Namespace: f.namespace, Name: name}, l); err != nil {
		t.Fatal(err)
	}
	return l.Status
}

// claims are those of the namespace.
func (f *fixture) claims(t *testing.T) []v1alpha1.LeaseClaim {
	t.Helper()
	claims := &v1alpha1.LeaseClaimList{}
	if err := f.Admin.List(t.Context(), claims, client.InNamespace(f.namespace)); err != nil {
		t.Fatal(err)
	}
	return claims.Items
}

// path is where a user's shell finds the plugin and kubectl.
func (f *fixture) path() string { return plugin + ":" + f.Assets + ":" + os.Getenv("PATH") }

// environ is what a user's shell would have.
func (f *fixture) environ(extra ...string) []string {
	return append(append(os.Environ(),
		"KUBECONFIG="+f.kubeconfig, "PATH="+f.path(), "HOME="+filepath.Dir(f.kubeconfig)), extra...)
}

// program prepares a program with that environment.
func (f *fixture) program(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = f.environ()
	return cmd
}

type result struct {
	stdout, stderr string
	code           int
}

func (r result) String() string {
	return fmt.Sprintf("exit code %d\nstdout: %s\nstderr: %s", r.code, r.stdout, r.stderr)
}

// fence runs the plugin to its end.
func (f *fixture) fence(t *testing.T, args ...string) result {
	t.Helper()
	return f.fenceWith(t, nil, args...)
}

// fenceWith runs the plugin with a standard input.
func (f *fixture) fenceWith(t *testing.T, stdin io.Reader, args ...string) result {
	t.Helper()
	return f.end(t, stdin, filepath.Join(plugin, "kubectl-fence"), args...)
}

// kubectl runs the real kubectl to its end.
func (f *fixture) kubectl(t *testing.T, args ...string) result {
	t.Helper()
	return f.end(t, nil, filepath.Join(f.Assets, "kubectl"), args...)
}

func (f *fixture) end(t *testing.T, stdin io.Reader, program string, args ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var stdout, stderr bytes.Buffer
	cmd := f.program(ctx, program, append([]string{"--namespace=" + f.namespace}, args...)...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, &stdout, &stderr
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return result{stdout.String(), stderr.String(), cmd.ProcessState.ExitCode()}
}

// must is fence, which has to succeed.
func (f *fixture) must(t *testing.T, args ...string) string {
	t.Helper()
	r := f.fence(t, args...)
	if r.code != 0 {
		t.Fatalf("kubectl fence %s: %v", strings.Join(args, " "), r)
	}
	return r.stdout
}

// background starts the plugin and leaves it running.
func (f *fixture) background(t *testing.T, args ...string) *background {
	t.Helper()
	cmd := f.program(t.Context(), filepath.Join(plugin, "kubectl-fence"), append([]string{"--namespace=" + f.namespace}, args...)...)
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout = w
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = w.Close()
	t.Cleanup(func() {
		if cmd.ProcessState == nil {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
		_ = r.Close()
	})
	return &background{Cmd: cmd, stdin: stdin, out: newLines(r)}
}

// background is a running plugin; out is what it and its command print.
type background struct {
	*exec.Cmd
	stdin io.WriteCloser
	out   *lines
}

// ends awaits the end, for a minute, which has to have the exit code.
func (b *background) ends(t *testing.T, want int) {
	t.Helper()
	limit := time.AfterFunc(time.Minute, func() { _ = b.Process.Kill() })
	defer limit.Stop()
	if err := b.Wait(); b.ProcessState.ExitCode() != want {
		t.Fatalf("ended with %v, want exit code %d", err, want)
	}
}

// send sends a signal.
func (b *background) send(t *testing.T, sig os.Signal) {
	t.Helper()
	if err := b.Process.Signal(sig); err != nil {
		t.Fatal(err)
	}
}

// eventually awaits a condition.
func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	deadline := time.NewTimer(30 * time.Second)
	defer deadline.Stop()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !holds() {
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatalf("did not come true: %s", what)
		}
	}
}
