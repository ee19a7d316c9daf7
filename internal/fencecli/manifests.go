package fencecli

import (
	"fmt"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/cli-runtime/pkg/resource"

	"github.com/fencedlease/fencedlease/client"
)

// manifestFlags say which manifests a command reads.
type manifestFlags struct {
	resource.FilenameOptions
	guard bool
}

func (f *manifestFlags) addManifests(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringSliceVarP(&f.Filenames, "filename", "f", nil, `file, folder or URL of manifests, "-" for standard input`)
	flags.BoolVarP(&f.Recursive, "recursive", "R", false, "go into the folders of a folder")
	flags.StringVarP(&f.Kustomize, "kustomize", "k", "", "folder of a kustomization")
	flags.BoolVar(&f.guard, "guard", false, "put objects that no lease guards under the guard of the lease")
}

func (f *manifestFlags) validManifests() error { return f.RequireFilenameOrKustomize() }

// guarded tells whether the lease guards obj, and sees to that under --guard.
// An object without a namespace counts as one of the default namespace.
func (f *manifestFlags) guarded(obj metav1.Object, key types.NamespacedName, namespace string) (bool, error) {
	by, guarded := guardOf(obj)
	switch {
	case guarded:
		if by.Namespace == "" {
			by.Namespace = namespace
		}
		return by == key, nil
	case f.guard:
		return true, client.Guard(obj, key.String())
	}
	return false, nil
}

// manifest gives what was read of an object.
func manifest(info *resource.Info) (*unstructured.Unstructured, error) {
	obj, ok := info.Object.(*unstructured.Unstructured)
	if !ok {
		return nil, fmt.Errorf("%s: cannot read a %T", info.Source, info.Object)
	}
	return obj, nil
}
