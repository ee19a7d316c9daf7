package client

import (
	"os/exec"
	"strings"
	"testing"
)

// Whoever imports the client gets neither a manager nor a command line.
func TestDependencies(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	for pkg := range strings.FieldsSeq(string(out)) {
		for _, unwanted := range []string{
			"sigs.k8s.io/controller-runtime/pkg/manager", "sigs.k8s.io/controller-runtime/pkg/cache/internal", "sigs.k8s.io/controller-runtime/pkg/webhook",
			"github.com/spf13/cobra", "k8s.io/cli-runtime",
			"github.com/fencedlease/fencedlease/controllers", "github.com/fencedlease/fencedlease/webhooks", "github.com/fencedlease/fencedlease/internal",
		} {
			if strings.HasPrefix(pkg, unwanted) {
				t.Errorf("depends on %s", pkg)
			}
		}
	}
}
