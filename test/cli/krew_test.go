package cli

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"text/template"

	"sigs.k8s.io/yaml"
)

// The manifest is filled in by krew-release-bot; here its function stands in.
func TestKrewManifestNamesAnArchiveForEachPlatform(t *testing.T) {
	data, err := os.ReadFile("../../hack/krew/fence.yaml")
	if err != nil {
		t.Fatal(err)
	}
	addURIAndSha := func(uri, tag string) string {
		return fmt.Sprintf("uri: %s\n    sha256: %s", strings.ReplaceAll(uri, "{{ .TagName }}", tag), strings.Repeat("f", 64))
	}
	parsed, err := template.New("").Funcs(template.FuncMap{"addURIAndSha": addURIAndSha}).Parse(string(data))
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	if err := parsed.Execute(&text, map[string]string{"TagName": "v1.2.3"}); err != nil {
		t.Fatal(err)
	}
	var manifest struct {
		Kind     string
		Metadata struct{ Name string }
		Spec     struct {
			Version   string
			Platforms []struct {
				Selector         struct{ MatchLabels map[string]string }
				URI, SHA256, Bin string
			}
		}
	}
	if err := yaml.Unmarshal([]byte(text.String()), &manifest); err != nil {
		t.Fatal(err)
	}
	if manifest.Kind != "Plugin" || manifest.Metadata.Name != "fence" || manifest.Spec.Version != "v1.2.3" {
		t.Fatalf("got %+v", manifest)
	}
	var platforms []string
	for _, p := range manifest.Spec.Platforms {
		platform := p.Selector.MatchLabels["os"] + "_" + p.Selector.MatchLabels["arch"]
		platforms = append(platforms, platform)
		if p.Bin != "kubectl-fence" || len(p.SHA256) != 64 || !strings.HasSuffix(p.URI, "/v1.2.3/kubectl-fence_"+platform+".tar.gz") {
			t.Errorf("%s: %+v", platform, p)
		}
	}
	if want := []string{"darwin_amd64", "darwin_arm64", "linux_amd64", "linux_arm64"}; !slices.Equal(slices.Sorted(slices.Values(platforms)), want) {
		t.Errorf("platforms %q, want %q", platforms, want)
	}
}
