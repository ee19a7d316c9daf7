// Package docs runs the commands that the pages show, in their order, on a
// real API server with everything installed.
//
// A block of sh that follows the comment <!-- run --> has to succeed. One that
// follows <!-- run: TEXT --> has to fail and print TEXT.
package docs

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/fencedlease/fencedlease/internal/controlplane"
	"github.com/fencedlease/fencedlease/test/env"
)

func TestMain(m *testing.M) { os.Exit(env.Main(m)) }

var everything = env.Shared(env.Options{Operator: true, Webhook: true, Policy: true})

type block struct{ script, fails string }

var blocks = regexp.MustCompile("(?s)<!-- run(?:: ([^>]*?))? -->\n```sh\n(.*?)```")

func read(t *testing.T, page string) []block {
	t.Helper()
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	var out []block
	for _, m := range blocks.FindAllStringSubmatch(string(text), -1) {
		out = append(out, block{fails: m[1], script: m[2]})
	}
	if marks := strings.Count(string(text), "<!-- run"); marks != len(out) {
		t.Fatalf("%s marks %d blocks, and %d of them are blocks of sh", page, marks, len(out))
	}
	return out
}

var goBlocks = regexp.MustCompile("(?s)<!-- from (\\S+) -->\n```go\n(.*?)```")

// TestGoBlocks: a block of Go stands, at some depth, in the file that the
// comment before it names, which the build compiles and a test runs.
func TestGoBlocks(t *testing.T) {
	const root = "../.."
	pages, err := filepath.Glob(root + "/docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, page := range append(pages, root+"/README.md") {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		found := goBlocks.FindAllStringSubmatch(string(text), -1)
		if all := strings.Count(string(text), "```go\n"); all != len(found) {
			t.Errorf("%s has %d blocks of Go, and %d of them name their file", page, all, len(found))
		}
		for _, m := range found {
			source, err := os.ReadFile(filepath.Join(root, "docs", m[1]))
			if err != nil {
				t.Errorf("%s: %v", page, err)
				continue
			}
			if !contains(string(source), m[2]) {
				t.Errorf("%s shows what does not stand in %s:\n%s", page, m[1], m[2])
			}
		}
	}
}

// contains tells whether source has the lines of block, each of them indented
// by the same number of tabs.
func contains(source, block string) bool {
	for range 4 {
		if strings.Contains("\n"+source, "\n"+block) {
			return true
		}
		lines := strings.SplitAfter(block, "\n")
		for i, line := range lines {
			if strings.TrimSpace(line) != "" {
				lines[i] = "\t" + line
			}
		}
		block = strings.Join(lines, "")
	}
	return false
}

func TestPages(t *testing.T) {
	const root = "../.."
	for _, page := range []string{"README.md"} {
		t.Run(page, func(t *testing.T) {
			e := everything(t)
			kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
			data, err := controlplane.KubeConfig(e.Config)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(kubeconfig, data, 0o600); err != nil {
				t.Fatal(err)
			}
			vars := filepath.Join(t.TempDir(), "vars")
			for _, b := range read(t, filepath.Join(root, page)) {
				// The next block sees the variables of this one.
				cmd := exec.CommandContext(t.Context(), "bash", "-euo", "pipefail", "-c",
					"[ ! -e "+vars+" ] || . "+vars+"\n"+b.script+"\ndeclare -p TOKEN >"+vars+" 2>/dev/null || true")
				cmd.Dir = root
				cmd.Env = append(os.Environ(), "KUBECONFIG="+kubeconfig, "PATH="+e.Assets+":"+os.Getenv("PATH"))
				out, err := cmd.CombinedOutput()
				switch {
				case b.fails == "" && err != nil:
					t.Fatalf("%v\n%s\n%s", err, b.script, out)
				case b.fails != "" && err == nil:
					t.Fatalf("succeeded, and the page says that it is rejected:\n%s\n%s", b.script, out)
				case !strings.Contains(string(out), b.fails):
					t.Fatalf("printed\n%s\nwithout %q, for\n%s", out, b.fails, b.script)
				}
			}
		})
	}
}
