package integration

import (
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"sigs.k8s.io/yaml"

	"github.com/fencedlease/fencedlease/config"
)

// TestShippedCRDs: no conversion webhook, whose loss would stop the garbage
// collector, and bounds on every number: since Kubernetes 1.36 formats are
// enforced.
func TestShippedCRDs(t *testing.T) {
	for _, crd := range shippedCRDs(t) {
		if c := crd.Spec.Conversion; c != nil && c.Strategy != apiextensionsv1.NoneConverter {
			t.Errorf("%s is converted by %s", crd.Name, c.Strategy)
		}
		for _, version := range crd.Spec.Versions {
			checkNumbers(t, crd.Name+" "+version.Name, *version.Schema.OpenAPIV3Schema)
		}
	}
}

func shippedCRDs(t *testing.T) (crds []*apiextensionsv1.CustomResourceDefinition) {
	t.Helper()
	const folder = "crd/bases"
	files, err := config.FS.ReadDir(folder)
	if err != nil || len(files) != 2 {
		t.Fatalf("%d CRDs, %v", len(files), err)
	}
	for _, file := range files {
		text, err := config.FS.ReadFile(path.Join(folder, file.Name()))
		if err != nil {
			t.Fatal(err)
		}
		crd := &apiextensionsv1.CustomResourceDefinition{}
		if err := yaml.UnmarshalStrict(text, crd); err != nil {
			t.Fatal(err)
		}
		crds = append(crds, crd)
	}
	return crds
}

// required are the fields that an object must have, beyond conditions'. A new
// one would make stored objects impossible to edit: let it be optional.
var required = []string{
	"FencedLease.spec.leaseRef.name",
	"FencedLease.spec.seal.resources",
	"FencedLease.spec.seal.resources[].resource",
	"FencedLease.spec.unstampedWrites.except[].action",
	"FencedLease.spec.unstampedWrites.except[].serviceAccount.name",
	"FencedLease.spec.unstampedWrites.except[].serviceAccount.namespace",
	"FencedLease.status.holder.identity",
	"FencedLease.status.holder.lease.uid",
	"FencedLease.status.holder.user.username",
	"LeaseClaim.spec",
	"LeaseClaim.spec.leaseName",
	"LeaseClaim.spec.user.username",
}

func TestNothingNewIsRequired(t *testing.T) {
	var found []string
	var walk func(at string, s apiextensionsv1.JSONSchemaProps)
	walk = func(at string, s apiextensionsv1.JSONSchemaProps) {
		for _, field := range s.Required {
			if !strings.HasSuffix(at, ".conditions[]") {
				found = append(found, at+"."+field)
			}
		}
		for name, property := range s.Properties {
			walk(at+"."+name, property)
		}
		if s.Items != nil && s.Items.Schema != nil {
			walk(at+"[]", *s.Items.Schema)
		}
	}
	for _, crd := range shippedCRDs(t) {
		for _, version := range crd.Spec.Versions {
			walk(crd.Spec.Names.Kind, *version.Schema.OpenAPIV3Schema)
		}
	}
	slices.Sort(found)
	if diff := cmp.Diff(required, found); diff != "" {
		t.Errorf("required fields (-want +got):\n%s", diff)
	}
}

func checkNumbers(t *testing.T, at string, s apiextensionsv1.JSONSchemaProps) {
	t.Helper()
	// The API server itself counts generations.
	if s.Type == "number" || s.Type == "integer" && path.Ext(at) != ".observedGeneration" &&
		(s.Format != "int32" && s.Format != "int64" || s.Minimum == nil || s.Maximum == nil) {
		t.Errorf("%s: %s of format %q, from %v to %v", at, s.Type, s.Format, s.Minimum, s.Maximum)
	}
	for name, property := range s.Properties {
		checkNumbers(t, at+"."+name, property)
	}
	if s.Items != nil && s.Items.Schema != nil {
		checkNumbers(t, at+"[]", *s.Items.Schema)
	}
}
