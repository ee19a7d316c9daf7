package controlplane

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/fencedlease/fencedlease/config"
)

type manifests struct {
	crds     []*apiextensionsv1.CustomResourceDefinition
	webhooks []*admissionv1.ValidatingWebhookConfiguration
	others   []*unstructured.Unstructured
}

// load reads the shipped manifests that opts asks for.
func load(opts Options) (*manifests, error) {
	m := &manifests{}
	if opts.Bare {
		return m, nil
	}
	folders := []string{"crd/bases", "rbac", "own"}
	switch {
	case opts.Webhook && opts.Policy:
		folders = append(folders, "policy", "webhook-with-policy")
	case opts.Policy:
		folders = append(folders, "policy", "policy-only")
	case opts.Webhook:
		folders = append(folders, "webhook")
	}
	for _, folder := range folders {
		objects, err := read(folder)
		if err != nil {
			return nil, err
		}
		for _, o := range objects {
			switch o.GetKind() {
			case "CustomResourceDefinition":
				crd := &apiextensionsv1.CustomResourceDefinition{}
				if err := convert(o, crd); err != nil {
					return nil, err
				}
				m.crds = append(m.crds, crd)
			case "ValidatingWebhookConfiguration":
				hook := &admissionv1.ValidatingWebhookConfiguration{}
				if err := convert(o, hook); err != nil {
					return nil, err
				}
				m.webhooks = append(m.webhooks, hook)
			case "Kustomization":
			default:
				m.others = append(m.others, o)
			}
		}
	}
	return m, nil
}

// read decodes every object of a folder's YAML files.
func read(folder string) ([]*unstructured.Unstructured, error) {
	files, err := fs.Glob(config.FS, path.Join(folder, "*.yaml"))
	if err != nil {
		return nil, err
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("config/%s holds no manifest", folder)
	}
	var objects []*unstructured.Unstructured
	for _, file := range files {
		data, err := config.FS.ReadFile(file)
		if err != nil {
			return nil, err
		}
		decoder := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(data), 4096)
		for {
			o := &unstructured.Unstructured{}
			if err := decoder.Decode(&o.Object); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				return nil, fmt.Errorf("config/%s: %w", file, err)
			}
			if len(o.Object) > 0 && o.GetKind() != "" {
				objects = append(objects, o)
			}
		}
	}
	return objects, nil
}

func convert(from *unstructured.Unstructured, to any) error {
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(from.Object, to); err != nil {
		return fmt.Errorf("%s %s: %w", from.GetKind(), from.GetName(), err)
	}
	return nil
}

// Install installs what opts names into a control plane that was started bare.
// The CRDs have to be there.
func (cp *ControlPlane) Install(ctx context.Context, opts Options) error {
	m, err := load(opts)
	if err != nil {
		return err
	}
	admin, err := client.New(cp.Config, client.Options{})
	if err != nil {
		return err
	}
	return cp.install(ctx, admin, m, opts)
}

// install brings the cluster to where kubectl apply -k would: the operator's
// namespace and permissions, then the layers of the fence.
func (cp *ControlPlane) install(ctx context.Context, admin client.Client, m *manifests, opts Options) error {
	if opts.Bare {
		return nil
	}
	objects := []client.Object{
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: OperatorNamespace}},
		&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: OperatorNamespace, Name: "fencedlease"}},
	}
	for _, o := range m.others {
		if o.GetNamespace() == "" && o.GetKind() == "Role" || o.GetKind() == "RoleBinding" && o.GetNamespace() == "" {
			o.SetNamespace(OperatorNamespace)
		}
		objects = append(objects, o)
	}
	for _, o := range objects {
		if err := admin.Create(ctx, o); err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("install %T %s: %w", o, o.GetName(), err)
		}
	}
	if opts.Webhook {
		hooks := &envtest.WebhookInstallOptions{ValidatingWebhooks: m.webhooks, LocalServingHost: "127.0.0.1"}
		if opts.PrepareWebhooks != nil {
			opts.PrepareWebhooks(hooks)
		}
		if err := hooks.Install(cp.Config); err != nil {
			return fmt.Errorf("install the webhook configuration: %w", err)
		}
		cp.Webhook = *hooks
		cp.env.WebhookInstallOptions = *hooks // Stop removes the certificates
	}
	return nil
}
