package helm

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/test/env"
)

// render gives the objects that helm template prints.
func render(t *testing.T, args ...string) ([]*unstructured.Unstructured, error) {
	t.Helper()
	var out, errOut bytes.Buffer
	cmd := exec.CommandContext(t.Context(), helm(t), append([]string{"template", "fencedlease", chart, "--namespace", namespace, "--kube-version", "1.37"}, args...)...)
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Run(); err != nil {
		return nil, errors.New(errOut.String())
	}
	return decode(t, &out), nil
}

func decode(t *testing.T, r io.Reader) (objects []*unstructured.Unstructured) {
	t.Helper()
	decoder := yaml.NewYAMLOrJSONDecoder(r, 4096)
	for {
		o := &unstructured.Unstructured{}
		switch err := decoder.Decode(&o.Object); {
		case errors.Is(err, io.EOF):
			return objects
		case err != nil:
			t.Fatal(err)
		case len(o.Object) > 0:
			objects = append(objects, o)
		}
	}
}

// TestChartSaysWhatConfigSays: what kubectl apply -k installs and what the
// chart installs by default are the same, Helm's own labels aside.
func TestChartSaysWhatConfigSays(t *testing.T) {
	rendered, err := render(t)
	if err != nil {
		t.Fatal(err)
	}
	inChart := map[string]*unstructured.Unstructured{}
	for _, o := range rendered {
		inChart[o.GetKind()+" "+o.GetName()] = o
	}
	out, err := exec.CommandContext(t.Context(), "go", "tool", "-modfile=../../hack/tools/go.mod", "kustomize", "build", "../../config/default").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range decode(t, bytes.NewReader(out)) {
		name := want.GetKind() + " " + want.GetName()
		got := inChart[name]
		switch {
		case want.GetKind() == "Namespace": // helm install --create-namespace makes it
		case got == nil:
			t.Errorf("the chart lacks %s", name)
		default:
			if diff := cmp.Diff(plain(want), plain(got)); diff != "" {
				t.Errorf("%s (-config +chart):\n%s", name, diff)
			}
		}
	}
}

// plain drops what is Helm's own, or where the image comes from.
func plain(o *unstructured.Unstructured) map[string]any {
	o = o.DeepCopy()
	labels := o.GetLabels()
	for _, l := range []string{"helm.sh/chart", "app.kubernetes.io/instance", "app.kubernetes.io/version", "app.kubernetes.io/managed-by", "app.kubernetes.io/part-of", "app.kubernetes.io/name"} {
		delete(labels, l)
	}
	if o.SetLabels(labels); len(labels) == 0 {
		unstructured.RemoveNestedField(o.Object, "metadata", "labels")
	}
	annotations := o.GetAnnotations()
	delete(annotations, "helm.sh/resource-policy")
	o.SetAnnotations(annotations)
	// One form for what YAML writes in several.
	data, err := json.Marshal(o.Object)
	if err != nil {
		panic(err)
	}
	var out map[string]any
	if err := json.Unmarshal(data, &out); err != nil {
		panic(err)
	}
	return out
}

// TestValues renders what people choose, and the real API server takes it: Pods
// under the restricted Pod Security Standard.
func TestValues(t *testing.T) {
	e := env.Start(t, env.Options{Bare: true})
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace, Labels: map[string]string{"pod-security.kubernetes.io/enforce": "restricted"}}}
	if err := e.Admin.Create(t.Context(), ns); err != nil {
		t.Fatal(err)
	}
	all := []string{
		"--set", "networkPolicy.enabled=true", "--set", "networkPolicy.metricsFrom[0].namespaceSelector.matchLabels.a=b",
		"--set", "metrics.serviceMonitor.enabled=true,metrics.prometheusRule.enabled=true,metrics.dashboard.enabled=true",
		"--set", "rbac.seal[0].apiGroups={apps},rbac.seal[0].resources={deployments},rbac.scale[0].apiGroups={example.com},rbac.scale[0].resources={things}",
		"--set", "gateway.enabled=true,gateway.upstream=https://partner.example.com,gateway.tlsSecret=certificate,gateway.authentication=certificate",
		"--set", "tracing.endpoint=collector.tracing.svc:4317", "--set", "judgedUsers={system:serviceaccount:kube-system:horizontal-pod-autoscaler}", "--set", "exemptUsers={system:serviceaccount:flux-system:kustomize-controller}", "--set", "imagePullSecrets[0].name=pull",
		"--set", "nodeSelector.a=b,tolerations[0].operator=Exists,podLabels.a=b,podAnnotations.a=b,image.digest=sha256:" + strings.Repeat("0", 64),
	}
	tests := map[string]struct {
		args []string
		// kinds are looked for, or with a dash in front looked for in vain.
		kinds []string
	}{
		"defaults":       {kinds: []string{"ValidatingWebhookConfiguration", "ValidatingAdmissionPolicy", "CustomResourceDefinition", "Job", "-StatefulSet", "-NetworkPolicy", "-ServiceMonitor"}},
		"everything":     {args: all, kinds: []string{"NetworkPolicy", "ServiceMonitor", "PrometheusRule", "StatefulSet"}},
		"cert-manager":   {args: []string{"--set", "certificates.source=cert-manager"}, kinds: []string{"Certificate", "Issuer", "-Secret"}},
		"an issuer":      {args: []string{"--set", "certificates.source=cert-manager,certificates.issuerRef.name=ours,certificates.issuerRef.kind=ClusterIssuer"}, kinds: []string{"Certificate", "-Issuer"}},
		"webhook alone":  {args: []string{"--set", "layers.policies=false"}, kinds: []string{"ValidatingWebhookConfiguration"}},
		"policies alone": {args: []string{"--set", "layers.webhook=false"}, kinds: []string{"-ValidatingWebhookConfiguration", "-Secret"}},
		"gateways on PostgreSQL": {
			args:  []string{"--set", "gateway.enabled=true,gateway.replicas=3,gateway.ledger.urlSecret=ledger"},
			kinds: []string{"-StatefulSet"},
		},
		"no CRDs": {args: []string{"--set", "crds.enabled=false"}, kinds: []string{"-CustomResourceDefinition"}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			objects, err := render(t, tt.args...)
			if err != nil {
				t.Fatal(err)
			}
			found := map[string]bool{}
			for _, o := range objects {
				found[o.GetKind()] = true
				if err := e.Admin.Create(t.Context(), o.DeepCopy(), client.DryRunAll); err != nil && !apimeta.IsNoMatchError(err) {
					t.Errorf("%s %s: %v", o.GetKind(), o.GetName(), err)
				}
				template, ok, err := unstructured.NestedMap(o.Object, "spec", "template")
				if err != nil || !ok {
					continue
				}
				claims, _, _ := unstructured.NestedSlice(o.Object, "spec", "volumeClaimTemplates")
				volumes, _, _ := unstructured.NestedSlice(template, "spec", "volumes")
				for _, claim := range claims { // as the StatefulSet's controller does
					name, _, _ := unstructured.NestedString(claim.(map[string]any), "metadata", "name")
					volumes = append(volumes, map[string]any{"name": name, "emptyDir": map[string]any{}})
				}
				if err := unstructured.SetNestedSlice(template, volumes, "spec", "volumes"); err != nil {
					t.Fatal(err)
				}
				pod := &unstructured.Unstructured{Object: template}
				pod.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Pod"))
				pod.SetNamespace(namespace)
				pod.SetName("of-" + o.GetName())
				if err := e.Admin.Create(t.Context(), pod, client.DryRunAll); err != nil {
					t.Errorf("a Pod of %s %s: %v", o.GetKind(), o.GetName(), err)
				}
			}
			for _, kind := range tt.kinds {
				if unwanted, ok := strings.CutPrefix(kind, "-"); ok && found[unwanted] || !ok && !found[kind] {
					t.Errorf("%s: found %v", kind, found)
				}
			}
		})
	}
}

func TestBadValues(t *testing.T) {
	for set, want := range map[string]string{
		"replicas=0":                  "/replicas",
		"gateway.replicas=2":          "/gateway/ledger/urlSecret",
		"nosuch=1":                    "nosuch",
		"exemptUsers={a b}":           "/exemptUsers/0",
		"exemptUsers={a\"b}":          "/exemptUsers/0",
		"judgedUsers={system:nobody}": "system:nobody is no principal",
		"judgedUsers={system:serviceaccount:fencedlease-system:fencedlease}": "is no principal",
		"tracing.endpoint=http://a:4317":                                     "/tracing/endpoint",
		"layers.policies=false,layers.strict=true":                           "/layers/policies",
		"certificates.source=x":                                              "/certificates/source",
		"gateway.upstream=ftp://a":                                           "/gateway/upstream",
		"gateway.authentication=certificate":                                 "/gateway/tlsSecret",
		"layers.webhook=false,layers.policies=false":                         "/layers",
		"rbac.seal[0].apiGroups={apps}":                                      "/rbac/seal/0",
	} {
		t.Run(set, func(t *testing.T) {
			if _, err := render(t, "--set", set); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("got %v, want %q", err, want)
			}
		})
	}
}
