// Package observability tests what people watch a cluster by: alerts,
// dashboard, metrics, events, logs and the pages about them.
package observability

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

const (
	files = "../../charts/fencedlease/files/"
	docs  = "../../docs/"
)

// promtool runs Prometheus' own checker.
func promtool(t *testing.T, args ...string) {
	t.Helper()
	if _, err := exec.LookPath("promtool"); err != nil {
		t.Fatal("promtool is missing; install it, on Debian with: apt-get install prometheus")
	}
	if out, err := exec.CommandContext(t.Context(), "promtool", args...).CombinedOutput(); err != nil {
		t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

type rule struct {
	Alert       string            `json:"alert,omitempty"`
	Record      string            `json:"record,omitempty"`
	Expr        string            `json:"expr"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

type group struct {
	Name  string `json:"name"`
	Rules []rule `json:"rules"`
}

type ruleFile struct {
	Groups []group `json:"groups"`
}

func alerts(t *testing.T) (all []rule) {
	t.Helper()
	data, err := os.ReadFile(files + "alerts.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var file ruleFile
	if err := yaml.Unmarshal(data, &file); err != nil {
		t.Fatal(err)
	}
	for _, g := range file.Groups {
		all = append(all, g.Rules...)
	}
	return all
}

type panel struct {
	ID      int    `json:"id"`
	Title   string `json:"title"`
	Type    string `json:"type"`
	GridPos struct{ H, W, X, Y int }
	Targets []struct {
		Expr string `json:"expr"`
	} `json:"targets"`
}

func dashboard(t *testing.T) (panels []panel) {
	t.Helper()
	data, err := os.ReadFile(files + "dashboard.json")
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Panels []panel `json:"panels"`
	}
	if err := json.Unmarshal(data, &file); err != nil {
		t.Fatal(err)
	}
	return file.Panels
}

// TestAlerts: the rules are valid, each fires for its reason and not without
// it, and each has one section of the runbooks that tells the four things.
func TestAlerts(t *testing.T) {
	promtool(t, "check", "rules", files+"alerts.yaml")
	promtool(t, "test", "rules", files+"alerts_test.yaml")

	unit, err := os.ReadFile(files + "alerts_test.yaml")
	if err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile(docs + "runbooks.md")
	if err != nil {
		t.Fatal(err)
	}
	sections := map[string]string{}
	for _, section := range strings.Split(string(page), "\n## ")[1:] {
		title, body, _ := strings.Cut(section, "\n")
		sections[title] = body
	}
	for _, r := range alerts(t) {
		for _, part := range []string{"\n**Meanwhile**: ", "\n**Look**: ", "\n**Mend**: "} {
			if !strings.Contains(sections[r.Alert], part) {
				t.Errorf("the runbook of %s has no %s", r.Alert, strings.TrimSpace(part))
			}
		}
		delete(sections, r.Alert)
		if url := "https://github.com/fencedlease/fencedlease/blob/main/docs/runbooks.md#" + strings.ToLower(r.Alert); r.Annotations["runbook_url"] != url {
			t.Errorf("%s points to %q, want %s", r.Alert, r.Annotations["runbook_url"], url)
		}
		for _, text := range []string{"summary", "description"} {
			if r.Annotations[text] == "" {
				t.Errorf("%s has no %s", r.Alert, text)
			}
		}
		if !regexp.MustCompile(`alertname: `+r.Alert+`\n +eval_time: \S+\n +exp_alerts:`).Match(unit) ||
			!regexp.MustCompile(`alertname: `+r.Alert+`, eval_time`).Match(unit) {
			t.Errorf("%s is not tested both ways", r.Alert)
		}
	}
	for title := range sections {
		t.Errorf("the runbooks have a section %q, and no alert of that name", title)
	}
}

// TestDashboard: every query is valid, and panels do not overlap.
func TestDashboard(t *testing.T) {
	g := group{Name: "dashboard"}
	taken, ids := map[string]string{}, map[int]bool{}
	for _, p := range dashboard(t) {
		if ids[p.ID] {
			t.Errorf("two panels have id %d", p.ID)
		}
		ids[p.ID] = true
		for x := p.GridPos.X; x < p.GridPos.X+p.GridPos.W; x++ {
			for y := p.GridPos.Y; y < p.GridPos.Y+p.GridPos.H; y++ {
				at := fmt.Sprintf("%d,%d", x, y)
				if other, ok := taken[at]; ok || x >= 24 {
					t.Fatalf("%q overlaps %q or ends outside", p.Title, other)
				}
				taken[at] = p.Title
			}
		}
		if p.Type != "row" && len(p.Targets) == 0 {
			t.Errorf("%q shows nothing", p.Title)
		}
		for _, target := range p.Targets {
			g.Rules = append(g.Rules, rule{Record: fmt.Sprintf("q%d", len(g.Rules)), Expr: concrete(target.Expr)})
		}
	}
	data, err := yaml.Marshal(ruleFile{Groups: []group{g}})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "queries.yaml")
	if err := os.WriteFile(file, data, 0o600); err != nil {
		t.Fatal(err)
	}
	promtool(t, "check", "rules", file)
}

// concrete puts in what Grafana would.
func concrete(expr string) string {
	return strings.NewReplacer("$__rate_interval", "5m", "$__range", "6h").Replace(expr)
}
