package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// DefaultTTLSecondsAfterFinished is how long a finished claim is kept, as the
// CRD sets it.
const DefaultTTLSecondsAfterFinished = 600

// LeaseClaimHeld is the condition type of a LeaseClaim: True while the claim
// holds its lease.
const LeaseClaimHeld = "Held"

// Reasons of a LeaseClaim's Held condition.
const (
	// ReasonWaiting: the claim is in the queue.
	ReasonWaiting = "Waiting"
	// ReasonGranted: the claim holds the lease.
	ReasonGranted = "Granted"
	// ReasonLapsed: the claim was not renewed in time. Final.
	ReasonLapsed = "Lapsed"
	// ReasonPreempted: a newer claim took over. Final.
	ReasonPreempted = "Preempted"
	// ReasonRevoked: minToken was raised above the claim's token. Final.
	ReasonRevoked = "Revoked"
	// ReasonRefused: the claim can never be granted as it stands. Final.
	ReasonRefused = "Refused"
)

// LeaseClaimSpec is one candidate's request.
// +kubebuilder:validation:XValidation:rule="has(self.holderIdentity) == has(oldSelf.holderIdentity)",message="holderIdentity cannot be added or removed: make a new claim",fieldPath=".holderIdentity",reason=FieldValueForbidden
// +kubebuilder:validation:XValidation:rule="has(self.user) == has(oldSelf.user)",message="user cannot be added or removed: make a new claim",fieldPath=".user",reason=FieldValueForbidden
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.reaffirm) || has(self.reaffirm)",message="reaffirm must not be removed",fieldPath=".reaffirm",reason=FieldValueRequired
type LeaseClaimSpec struct {
	// leaseName is the FencedLease, in the claim's namespace, that is claimed.
	// It cannot be changed.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="leaseName cannot be changed: make a new claim",reason=FieldValueForbidden
	LeaseName string `json:"leaseName,omitempty"`

	// holderIdentity is who claims, for people. It cannot be changed. Omitted
	// means the claim's name.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="holderIdentity cannot be changed: make a new claim",reason=FieldValueForbidden
	HolderIdentity string `json:"holderIdentity,omitempty"`

	// user is the account that makes the claim. It has to be the authenticated
	// creator, is required where the lease binds holders, and cannot be
	// changed. Omitted means that the claim is bound to no account.
	// +optional
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="user cannot be changed: make a new claim",reason=FieldValueForbidden
	User *ClaimUser `json:"user,omitzero"`

	// priority puts the claim before waiting ones of a lower priority. It is
	// at most the lease's maxPriority. Omitted means 0.
	// +optional
	// +default=0
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000000
	Priority *int32 `json:"priority,omitempty"`

	// renewTime is changed by the claimant to renew. Any change counts; the
	// value is for people. Omitted means that the claim was never renewed.
	// +optional
	RenewTime *metav1.MicroTime `json:"renewTime,omitempty"`

	// reaffirm is raised by a holder to be issued a higher token. It must not
	// decrease. Omitted means 0.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=9007199254740991
	// +kubebuilder:validation:XValidation:rule="self >= oldSelf",message="reaffirm must not decrease",reason=FieldValueInvalid
	Reaffirm *int64 `json:"reaffirm,omitempty"`

	// ttlSecondsAfterFinished is how long, in seconds, a claim that lapsed or
	// was refused is kept. Omitted means 600.
	// +optional
	// +default=600
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=604800
	TTLSecondsAfterFinished *int32 `json:"ttlSecondsAfterFinished,omitempty"`
}

// ClaimUser is an authenticated account.
type ClaimUser struct {
	// username is the name of the user as the API server authenticates it.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	Username string `json:"username,omitempty"`

	// podUID is the UID of the Pod that the service account's token is bound
	// to. Omitted where the token names none.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	PodUID string `json:"podUID,omitempty"`
}

// LeaseClaimStatus is what the operator says of a claim. It follows from the
// lease's status and can be rebuilt from it.
// +kubebuilder:validation:MinProperties=1
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.ticket) || has(self.ticket)",message="ticket must not be removed",fieldPath=".ticket",reason=FieldValueRequired
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.token) || has(self.token)",message="token must not be removed",fieldPath=".token",reason=FieldValueRequired
type LeaseClaimStatus struct {
	// conditions tell the state of the claim: Held.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +patchStrategy=merge
	// +patchMergeKey=type
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=8
	Conditions []metav1.Condition `json:"conditions,omitempty" patchStrategy:"merge" patchMergeKey:"type"`

	// ticket is the claim's place in the order of arrival, given once. Absent
	// means that the operator has not seen the claim yet.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=9007199254740991
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="ticket cannot be changed",reason=FieldValueForbidden
	Ticket int64 `json:"ticket,omitempty"`

	// token is the newest token issued to this claim. It stays after a lapse.
	// Absent means that none was issued.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=9007199254740991
	// +kubebuilder:validation:XValidation:rule="self >= oldSelf",message="token must be greater than or equal to the current one",reason=FieldValueInvalid
	Token int64 `json:"token,omitempty"`

	// acquireTime is when the operator issued the token, by its own clock.
	// Absent means never.
	// +optional
	AcquireTime *metav1.MicroTime `json:"acquireTime,omitempty"`
}

// LeaseClaim is one candidate's request to hold one FencedLease; one
// acquisition per claim. It is released by deleting it.
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=flc,categories=fencing
// +kubebuilder:selectablefield:JSONPath=`.spec.leaseName`
// +kubebuilder:printcolumn:name="Lease",type=string,JSONPath=`.spec.leaseName`
// +kubebuilder:printcolumn:name="Held",type=string,JSONPath=`.status.conditions[?(@.type=="Held")].reason`
// +kubebuilder:printcolumn:name="Token",type=integer,JSONPath=`.status.token`
// +kubebuilder:printcolumn:name="Ticket",type=integer,JSONPath=`.status.ticket`,priority=1
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.status) || !has(oldSelf.status.conditions) || !oldSelf.status.conditions.exists(c, c.type == 'Held' && c.reason in ['Lapsed', 'Preempted', 'Revoked', 'Refused']) || (has(self.spec.renewTime) == has(oldSelf.spec.renewTime) && (!has(self.spec.renewTime) || self.spec.renewTime == oldSelf.spec.renewTime) && has(self.spec.reaffirm) == has(oldSelf.spec.reaffirm) && (!has(self.spec.reaffirm) || self.spec.reaffirm == oldSelf.spec.reaffirm))",message="a finished claim cannot be renewed or reaffirmed: make a new claim",fieldPath=".spec.renewTime",reason=FieldValueForbidden
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.status) || !has(oldSelf.status.ticket) || (has(self.status) && has(self.status.ticket))",message="ticket must not be removed",fieldPath=".status",reason=FieldValueRequired
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.status) || !has(oldSelf.status.conditions) || !oldSelf.status.conditions.exists(c, c.type == 'Held' && c.reason in ['Lapsed', 'Preempted', 'Revoked', 'Refused']) || (has(self.status) && has(self.status.conditions) && self.status.conditions.exists(c, c.type == 'Held' && c.reason in ['Lapsed', 'Preempted', 'Revoked', 'Refused']))",message="a finished claim stays finished: make a new claim",fieldPath=".status.conditions",reason=FieldValueForbidden
type LeaseClaim struct {
	metav1.TypeMeta `json:",inline"`

	// metadata is the standard object metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is the request.
	// +required
	Spec LeaseClaimSpec `json:"spec,omitzero"`

	// status is the answer.
	// +optional
	// +default={"conditions":[{"type":"Held","status":"Unknown","reason":"Pending","message":"Waiting for the operator","lastTransitionTime":"1970-01-01T00:00:00Z"}]}
	Status LeaseClaimStatus `json:"status,omitzero"`
}

// LeaseClaimList is a list of LeaseClaims.
// +kubebuilder:object:root=true
type LeaseClaimList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []LeaseClaim `json:"items"`
}

// Identity is the claim's holder identity: the one given, else its name.
func (c *LeaseClaim) Identity() string {
	if c.Spec.HolderIdentity != "" {
		return c.Spec.HolderIdentity
	}
	return c.Name
}
