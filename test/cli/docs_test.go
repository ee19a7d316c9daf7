package cli

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// A block of sh after the comment <!-- run --> has to succeed, one after
// <!-- run: TEXT --> has to fail and print TEXT. All blocks of a page run in
// one shell.
var blocks = regexp.MustCompile("(?s)<!-- run(?:: ([^>]*?))? -->\n```sh\n(.*?)```")

// script puts a page's blocks into one script of bash.
func script(t *testing.T, page string) string {
	t.Helper()
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	found := blocks.FindAllStringSubmatch(string(text), -1)
	if all := strings.Count(string(text), "```sh"); all != len(found) {
		t.Fatalf("%s has %d blocks of sh, and %d of them run", page, all, len(found))
	}
	var b strings.Builder
	// What a page leaves running ends with it.
	fmt.Fprintln(&b, "set -euo pipefail\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT")
	for i, m := range found {
		fails, commands := m[1], m[2]
		fmt.Fprintf(&b, "echo \"--- block %d\" >&2\n", i+1)
		if fails == "" {
			b.WriteString(commands)
			continue
		}
		fmt.Fprintf(&b, "if (\nset -euo pipefail\n%s) >rejected 2>&1; then echo 'succeeded, and should not'; exit 1; fi\n"+
			"cat rejected\ngrep -qF -- '%s' rejected\n", commands, strings.ReplaceAll(fails, "'", `'\''`))
	}
	return freePorts(t, b.String())
}

var localAddress = regexp.MustCompile(`127\.0\.0\.1", [0-9]+|127\.0\.0\.1:[0-9]+`)

// freePorts puts free ports of this machine in the place of those that a page
// shows.
func freePorts(t *testing.T, script string) string {
	t.Helper()
	free, open := map[string]string{}, []net.Listener{}
	// All are open until each is found, so that no two are the same.
	defer func() {
		for _, l := range open {
			_ = l.Close()
		}
	}()
	return localAddress.ReplaceAllStringFunc(script, func(shown string) string {
		port := shown[strings.LastIndexAny(shown, ": ")+1:]
		if free[port] == "" {
			l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			open = append(open, l)
			_, free[port], _ = net.SplitHostPort(l.Addr().String())
		}
		return strings.TrimSuffix(shown, port) + free[port]
	})
}

// pinned gives the folder of a tool that is pinned in hack/tools.
func pinned(t *testing.T, tool string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "go", "tool", "-modfile=../../hack/tools/go.mod", "-n", tool).Output()
	if err != nil {
		t.Fatalf("build %s: %v", tool, err)
	}
	return filepath.Dir(strings.TrimSpace(string(out)))
}

func TestPages(t *testing.T) {
	helm := pinned(t, "helm")
	for _, page := range []string{"cli.md", "operators.md", "workers.md", "pipelines.md", "gitops.md", "gateway.md"} {
		t.Run(page, func(t *testing.T) {
			f := newFixture(t)
			if r := f.kubectl(t, "config", "set-context", "--current", "--namespace="+f.namespace); r.code != 0 {
				t.Fatal(r)
			}
			var out bytes.Buffer
			cmd := f.program(t.Context(), "bash", "-c", script(t, "../../docs/"+page))
			cmd.Dir = t.TempDir()
			cmd.Env = append(cmd.Env, "PATH="+f.path()+":"+helm)
			cmd.Stdout, cmd.Stderr = &out, &out
			if err := cmd.Run(); err != nil {
				t.Fatalf("%v\n%s", err, &out)
			}
		})
	}
}
