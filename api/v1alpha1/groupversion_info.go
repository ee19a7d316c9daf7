// Package v1alpha1 holds the fencedlease.io/v1alpha1 API: FencedLease, the
// coordination key that a platform team declares, and LeaseClaim, one
// candidate's request to hold it.
//
// +kubebuilder:object:generate=true
// +kubebuilder:ac:generate=true
// +kubebuilder:ac:output:package="applyconfiguration"
// +groupName=fencedlease.io
package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// GroupVersion is the group and version of this package's kinds.
var GroupVersion = schema.GroupVersion{Group: "fencedlease.io", Version: "v1alpha1"}

// SchemeGroupVersion is GroupVersion under the name that generated code uses.
var SchemeGroupVersion = GroupVersion

var schemeBuilder = runtime.NewSchemeBuilder(func(scheme *runtime.Scheme) error {
	scheme.AddKnownTypes(GroupVersion, &FencedLease{}, &FencedLeaseList{}, &LeaseClaim{}, &LeaseClaimList{})
	metav1.AddToGroupVersion(scheme, GroupVersion)
	return nil
})

// AddToScheme adds this package's kinds to a scheme.
var AddToScheme = schemeBuilder.AddToScheme
