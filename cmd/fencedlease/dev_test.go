package main

import (
	"bufio"
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fencedlease/fencedlease/internal/controlplane"
)

// dev starts the dev command as a process of its own, waits until it is ready
// and gives its temporary folder and kubeconfig.
func dev(t *testing.T, binary, assets string) (cmd *exec.Cmd, dir string, kubeconfig string) {
	t.Helper()
	cmd = exec.CommandContext(t.Context(), binary, "dev", "--assets="+assets)
	tmp := t.TempDir()
	cmd.Env = append(os.Environ(), "TMPDIR="+tmp)
	var errOut bytes.Buffer
	cmd.Stderr = &errOut
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		if line := regexp.MustCompile(`export KUBECONFIG=(\S+)`).FindStringSubmatch(lines.Text()); line != nil {
			go func() {
				for lines.Scan() { //nolint:revive // drained so that it never blocks
				}
			}()
			return cmd, tmp, line[1]
		}
	}
	t.Fatalf("dev ended before it was ready: %s", errOut.String())
	return nil, "", ""
}

// processes lists those that name the folder on their command line.
func processes(dir string) string {
	out, _ := exec.Command("pgrep", "-af", dir).Output()
	return string(out)
}

// await polls until done, for a minute.
func await(t *testing.T, what string, done func() bool) {
	t.Helper()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	limit := time.After(time.Minute)
	for !done() {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatalf("waited a minute until %s", what)
		}
	}
}

func TestDevLeavesNothingBehind(t *testing.T) {
	assets, err := controlplane.Assets()
	if err != nil {
		t.Fatal(err)
	}
	binary := filepath.Join(t.TempDir(), "fencedlease")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", binary, ".").CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	for name, c := range map[string]struct {
		signal syscall.Signal
		clean  bool
	}{
		"interrupted":  {syscall.SIGINT, true},
		"terminated":   {syscall.SIGTERM, true},
		"killed by -9": {syscall.SIGKILL, false},
	} {
		t.Run(name, func(t *testing.T) {
			cmd, dir, kubeconfig := dev(t, binary, assets)
			if processes(dir) == "" {
				t.Fatal("no process names the folder: this test would see nothing")
			}
			if c.clean {
				kubectl := func(stdin string, args ...string) string {
					k := exec.CommandContext(t.Context(), filepath.Join(assets, "kubectl"), append([]string{"--kubeconfig=" + kubeconfig}, args...)...)
					k.Stdin = strings.NewReader(stdin)
					out, err := k.CombinedOutput()
					if err != nil {
						t.Fatalf("kubectl %q: %v\n%s", args, err, out)
					}
					return string(out)
				}
				kubectl(leaseAndClaim, "apply", "-f", "-")
				await(t, "the lease shows holder and token", func() bool {
					return regexp.MustCompile(`(?m)^scheduler\s+worker-a\s+[0-9]+\s`).MatchString(kubectl("", "get", "fencedleases"))
				})
			}
			if err := cmd.Process.Signal(c.signal); err != nil {
				t.Fatal(err)
			}
			if err := cmd.Wait(); c.clean && err != nil {
				t.Errorf("ended with %v", err)
			}
			await(t, "no process is left", func() bool { return processes(dir) == "" })
			await(t, "no file is left", func() bool {
				left, err := os.ReadDir(dir)
				return err == nil && len(left) == 0
			})
		})
	}
}

const leaseAndClaim = `
apiVersion: fencedlease.io/v1alpha1
kind: FencedLease
metadata: {name: scheduler, namespace: default}
---
apiVersion: fencedlease.io/v1alpha1
kind: LeaseClaim
metadata: {name: a, namespace: default}
spec: {leaseName: scheduler, holderIdentity: worker-a}
`
