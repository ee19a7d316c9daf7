//go:build tools

// Package controlplane pins the programs of a Kubernetes control plane that
// hack/control-plane.sh builds. Nothing imports it.
package controlplane

import (
	_ "k8s.io/kubectl/pkg/cmd"
	_ "k8s.io/kubernetes/cmd/kube-apiserver"
	_ "k8s.io/kubernetes/cmd/kube-controller-manager"
	_ "k8s.io/kubernetes/cmd/kubectl"
)
