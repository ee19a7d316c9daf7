package v1alpha1

import (
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Defaults of FencedLeaseSpec, as the CRD sets them.
const (
	DefaultLeaseDurationSeconds = 15
	DefaultSealTimeoutSeconds   = 30
)

// Condition types of a FencedLease.
const (
	// FencedLeaseHeld is True while a claim, or an adopted Lease's holder,
	// holds the lease.
	FencedLeaseHeld = "Held"
	// FencedLeaseReady is True while the operator can issue tokens.
	FencedLeaseReady = "Ready"
)

// Reasons of the conditions of a FencedLease.
const (
	// ReasonPending: the operator has not seen the lease yet.
	ReasonPending = "Pending"
	// ReasonHeld: a holder has the current token.
	ReasonHeld = "Held"
	// ReasonFree: nobody holds the lease.
	ReasonFree = "Free"
	// ReasonReady: tokens can be issued.
	ReasonReady = "Ready"
	// ReasonSealing: a hand-over waits for guarded objects to be sealed.
	ReasonSealing = "Sealing"
	// ReasonSealIncomplete: the last hand-over went on without sealing all.
	ReasonSealIncomplete = "SealIncomplete"
	// ReasonHandoverDelay: the lease lapsed and the delay before the next
	// grant runs.
	ReasonHandoverDelay = "HandoverDelay"
	// ReasonInvalidLastToken: the last-token annotation is malformed or out
	// of range, so the operator does not guess.
	ReasonInvalidLastToken = "InvalidLastToken"
	// ReasonInvalidResourceVersion: the store's resourceVersion is not an
	// integer, so a first token cannot be derived from it.
	ReasonInvalidResourceVersion = "InvalidResourceVersion"
	// ReasonTokensExhausted: the next token would exceed 2^53-1.
	ReasonTokensExhausted = "TokensExhausted"
	// ReasonLeaseNotFound: the adopted Lease does not exist.
	ReasonLeaseNotFound = "LeaseNotFound"
	// ReasonFloorUnavailable: the cluster-wide floor could not be read or raised.
	ReasonFloorUnavailable = "FloorUnavailable"
)

// ActionReject is the action of an event on a FencedLease that tells of a
// rejected write; its reason is the cause.
const ActionReject = "Reject"

// HolderBinding says from whom a stamped write is accepted.
// +kubebuilder:validation:Enum=None;User
type HolderBinding string

// Values of HolderBinding.
const (
	// HolderBindingNone accepts a stamped write from any account.
	HolderBindingNone HolderBinding = "None"
	// HolderBindingUser accepts it only from the account that made the claim.
	HolderBindingUser HolderBinding = "User"
)

// UnstampedAction says what happens to a write that presents no token.
// +kubebuilder:validation:Enum=Deny;Warn;Allow
type UnstampedAction string

// Values of UnstampedAction.
const (
	// UnstampedDeny rejects the write.
	UnstampedDeny UnstampedAction = "Deny"
	// UnstampedWarn lets it pass, warns and counts.
	UnstampedWarn UnstampedAction = "Warn"
	// UnstampedAllow lets it pass.
	UnstampedAllow UnstampedAction = "Allow"
)

// Preemption says whether a new claim takes over from the holder.
// +kubebuilder:validation:Enum=Never;NewestClaim
type Preemption string

// Values of Preemption.
const (
	// PreemptionNever lets claims queue.
	PreemptionNever Preemption = "Never"
	// PreemptionNewestClaim lets the newest claim take over at once.
	PreemptionNewestClaim Preemption = "NewestClaim"
)

// Presentation says how a token may be presented.
// +kubebuilder:validation:Enum=Any;Header
type Presentation string

// Values of Presentation.
const (
	// PresentationAny accepts the header and annotations.
	PresentationAny Presentation = "Any"
	// PresentationHeader accepts the header alone.
	PresentationHeader Presentation = "Header"
)

// LapsedWrites says what happens to the current token while nobody holds.
// +kubebuilder:validation:Enum=Allow;Deny
type LapsedWrites string

// Values of LapsedWrites.
const (
	// LapsedWritesAllow accepts the current token until a newer one is issued.
	LapsedWritesAllow LapsedWrites = "Allow"
	// LapsedWritesDeny rejects it once its holder lapsed or released.
	LapsedWritesDeny LapsedWrites = "Deny"
)

// SealTimeoutAction says what a hand-over does when its seal takes too long.
// +kubebuilder:validation:Enum=Wait;Proceed
type SealTimeoutAction string

// Values of SealTimeoutAction.
const (
	// SealWait keeps the next claim waiting until all objects are sealed.
	SealWait SealTimeoutAction = "Wait"
	// SealProceed goes on and names what is not sealed.
	SealProceed SealTimeoutAction = "Proceed"
)

// FencedLeaseSpec is what a platform team declares of a lease. A holder never
// writes it.
// +kubebuilder:validation:MinProperties=1
// +kubebuilder:validation:XValidation:rule="has(self.leaseRef) == has(oldSelf.leaseRef)",message="leaseRef cannot be added or removed: create another FencedLease",fieldPath=".leaseRef",reason=FieldValueForbidden
type FencedLeaseSpec struct {
	// leaseDurationSeconds is how long, in seconds, a claim lives without
	// being renewed. Omitted means 15.
	// +optional
	// +default=15
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=86400
	LeaseDurationSeconds int32 `json:"leaseDurationSeconds,omitempty"`

	// handoverDelaySeconds is how long, in seconds, the lease stays free after
	// a lapse before it is granted again. A release is not delayed. Omitted
	// means 0.
	// +optional
	// +default=0
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=86400
	HandoverDelaySeconds *int32 `json:"handoverDelaySeconds,omitempty"`

	// seal names the kinds of guarded objects whose recorded token is raised
	// at every hand-over, before the new holder is told. Omitted means none.
	// +optional
	Seal *Seal `json:"seal,omitzero"`

	// holderBinding says from whom a stamped write is accepted: None accepts
	// any account, User only the one that made the claim. Omitted means None.
	// +optional
	// +default="None"
	HolderBinding HolderBinding `json:"holderBinding,omitempty"`

	// unstampedWrites says what the admission fence does with a write that
	// presents no token. Omitted means that it is denied.
	// +optional
	UnstampedWrites *UnstampedWrites `json:"unstampedWrites,omitzero"`

	// allowedNamespaces lists the namespaces, besides the lease's own, whose
	// objects may name this lease as their guard. The entry "*" means every
	// namespace, and cluster-scoped objects too. Omitted means the lease's own
	// namespace alone.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=256
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=63
	// +kubebuilder:validation:items:Pattern=`^(\*|[a-z0-9]([-a-z0-9]*[a-z0-9])?)$`
	AllowedNamespaces []string `json:"allowedNamespaces,omitempty"`

	// preemption says whether a new claim takes over from the holder: Never
	// lets claims queue, NewestClaim hands over at once. Omitted means Never.
	// +optional
	// +default="Never"
	Preemption Preemption `json:"preemption,omitempty"`

	// presentation says how a token may be presented: Any accepts the header
	// and annotations, Header the header alone. Omitted means Any.
	// +optional
	// +default="Any"
	Presentation Presentation `json:"presentation,omitempty"`

	// maxPriority is the highest priority that a claim may ask for. Omitted
	// means 0.
	// +optional
	// +default=0
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000000
	MaxPriority *int32 `json:"maxPriority,omitempty"`

	// lapsedWrites says what happens to the current token after its holder
	// lapsed or released and before a newer one is issued: Allow accepts it,
	// Deny rejects it. Omitted means Allow.
	// +optional
	// +default="Allow"
	LapsedWrites LapsedWrites `json:"lapsedWrites,omitempty"`

	// leaseRef adopts a coordination.k8s.io/v1 Lease of the same namespace:
	// its holder is the holder, and claims are refused. Omitted means that
	// claims decide.
	// +optional
	LeaseRef *LeaseReference `json:"leaseRef,omitzero"`

	// minToken is the floor of the current token. Raising it above the current
	// token revokes that one at once, holder or not. It may be above what a backup may bring back (2^52), so that
	// every token can be revoked, and leaves a quarter of the range. Omitted means
	// no floor.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=6755399441055744
	MinToken int64 `json:"minToken,omitempty"`
}

// Seal names the kinds that a hand-over seals.
type Seal struct {
	// resources lists the kinds whose guarded objects are sealed.
	// +required
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=16
	Resources []SealedResource `json:"resources,omitempty"`

	// timeoutSeconds is how long, in seconds, a hand-over tries to seal before
	// onTimeout applies. Omitted means 30.
	// +optional
	// +default=30
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=3600
	TimeoutSeconds int32 `json:"timeoutSeconds,omitempty"`

	// onTimeout says what happens when sealing takes longer: Wait keeps the
	// next claim waiting, Proceed goes on and names what is not sealed.
	// Omitted means Wait.
	// +optional
	// +default="Wait"
	OnTimeout SealTimeoutAction `json:"onTimeout,omitempty"`
}

// SealedResource names a kind by its group and resource.
type SealedResource struct {
	// group is the API group of the kind. Omitted means the core group.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Group string `json:"group,omitempty"`

	// resource is the plural, lower-case name of the kind, as in "deployments".
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z]([-a-z0-9]*[a-z0-9])?$`
	Resource string `json:"resource,omitempty"`
}

// UnstampedWrites says what happens to writes that present no token.
// +kubebuilder:validation:MinProperties=1
type UnstampedWrites struct {
	// default is the action for every principal that except does not name.
	// Omitted means Deny.
	// +optional
	// +default="Deny"
	Default UnstampedAction `json:"default,omitempty"`

	// except lists principals for whom the action differs. The first entry
	// that matches decides. Omitted means none.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	Except []UnstampedException `json:"except,omitempty"`
}

// UnstampedException names one principal and its action.
// +kubebuilder:validation:ExactlyOneOf=user;group;serviceAccount
type UnstampedException struct {
	// user is the name of a user as the API server authenticates it.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	User string `json:"user,omitempty"`

	// group is the name of a group as the API server authenticates it.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	Group string `json:"group,omitempty"`

	// serviceAccount is a service account.
	// +optional
	ServiceAccount *ServiceAccountReference `json:"serviceAccount,omitzero"`

	// action is what happens to this principal's unstamped writes.
	// +required
	Action UnstampedAction `json:"action,omitempty"`
}

// ServiceAccountReference names a service account.
type ServiceAccountReference struct {
	// namespace is the service account's namespace.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Namespace string `json:"namespace,omitempty"`

	// name is the service account's name.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name,omitempty"`
}

// LeaseReference names a coordination.k8s.io/v1 Lease of the same namespace.
type LeaseReference struct {
	// name is the name of the Lease. It cannot be changed.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="leaseRef.name cannot be changed: create another FencedLease",reason=FieldValueForbidden
	Name string `json:"name,omitempty"`
}

// FencedLeaseStatus is what the operator has issued.
// +kubebuilder:validation:MinProperties=1
// +kubebuilder:validation:XValidation:rule="!has(self.holder) || has(self.token)",message="a holder must have a token",fieldPath=".token",reason=FieldValueRequired
// +kubebuilder:validation:XValidation:rule="!has(self.holder) || (has(oldSelf.holder) && oldSelf.holder == self.holder) || !has(oldSelf.token) || self.token > oldSelf.token",message="another holder, acquisition or reaffirmation must have a higher token",fieldPath=".token",reason=FieldValueInvalid
type FencedLeaseStatus struct {
	// conditions tell the state of the lease: Held and Ready.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +patchStrategy=merge
	// +patchMergeKey=type
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=8
	Conditions []metav1.Condition `json:"conditions,omitempty" patchStrategy:"merge" patchMergeKey:"type"`

	// observedGeneration is the generation of the spec that the operator has
	// acted on.
	// +optional
	// +kubebuilder:validation:Minimum=0
	ObservedGeneration *int64 `json:"observedGeneration,omitempty"`

	// token is the current token: the newest one issued. It never decreases
	// and never vanishes. Absent means that none was issued yet.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=9007199254740991
	// +kubebuilder:validation:XValidation:rule="self >= oldSelf",message="token must be greater than or equal to the current one",reason=FieldValueInvalid
	Token int64 `json:"token,omitempty"`

	// holder is who holds the lease. Absent means nobody.
	// +optional
	Holder *Holder `json:"holder,omitzero"`

	// waiting is how many claims wait. Absent means that the operator has not
	// counted yet.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=2147483647
	Waiting *int32 `json:"waiting,omitempty"`
}

// Holder is the claim, or the adopted Lease's holder, that a lease is granted to.
// +kubebuilder:validation:ExactlyOneOf=claimUID;lease
type Holder struct {
	// claimName is the name of the claim. Absent for an adopted Lease.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	ClaimName string `json:"claimName,omitempty"`

	// claimUID is the UID of the claim. Absent for an adopted Lease.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	ClaimUID string `json:"claimUID,omitempty"`

	// identity is who holds, for people.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Identity string `json:"identity,omitempty"`

	// user is the account that made the claim. Absent where the claim names
	// none.
	// +optional
	User *ClaimUser `json:"user,omitzero"`

	// acquireTime is when the operator issued the token, by its own clock. It
	// is for people; nothing is decided by it.
	// +optional
	AcquireTime *metav1.MicroTime `json:"acquireTime,omitempty"`

	// reaffirm is the claim's reaffirm counter that the token was issued for.
	// Absent means 0.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=9007199254740991
	Reaffirm *int64 `json:"reaffirm,omitempty"`

	// lease is the acquisition of the adopted Lease that the token was issued
	// for. Absent where a claim holds.
	// +optional
	Lease *AdoptedLease `json:"lease,omitzero"`
}

// AdoptedLease identifies one acquisition of a coordination.k8s.io/v1 Lease.
type AdoptedLease struct {
	// uid is the UID of the Lease.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	UID string `json:"uid,omitempty"`

	// transitions is the Lease's leaseTransitions. Absent where the Lease has
	// none.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=2147483647
	Transitions *int32 `json:"transitions,omitempty"`

	// acquireTime is the Lease's acquireTime. Absent where the Lease has none.
	// +optional
	AcquireTime *metav1.MicroTime `json:"acquireTime,omitempty"`
}

// FencedLease is a coordination key whose every acquisition gets a strictly
// increasing fencing token.
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=fl,categories=fencing
// +kubebuilder:printcolumn:name="Holder",type=string,JSONPath=`.status.holder.identity`,description="Who holds the lease"
// +kubebuilder:printcolumn:name="Token",type=integer,JSONPath=`.status.token`,description="The current token"
// +kubebuilder:printcolumn:name="Waiting",type=integer,JSONPath=`.status.waiting`,description="Claims in the queue"
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`,priority=1,description="Whether tokens can be issued"
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:validation:XValidation:rule="size(self.metadata.name) <= 63",message="name must be at most 63 characters, since it becomes a label value",fieldPath=".metadata",reason=FieldValueInvalid
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.status) || !has(oldSelf.status.token) || (has(self.status) && has(self.status.token))",message="token must not be removed",fieldPath=".status",reason=FieldValueRequired
type FencedLease struct {
	metav1.TypeMeta `json:",inline"`

	// metadata is the standard object metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is what the platform team declares.
	// +optional
	// +default={"leaseDurationSeconds":15}
	Spec FencedLeaseSpec `json:"spec,omitzero"`

	// status is what the operator has issued.
	// +optional
	// +default={"conditions":[{"type":"Ready","status":"Unknown","reason":"Pending","message":"Waiting for the operator","lastTransitionTime":"1970-01-01T00:00:00Z"}]}
	Status FencedLeaseStatus `json:"status,omitzero"`
}

// FencedLeaseList is a list of FencedLeases.
// +kubebuilder:object:root=true
type FencedLeaseList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []FencedLease `json:"items"`
}

// Allows tells whether objects of a namespace, or cluster-scoped ones where it
// is empty, may name the lease as their guard.
func (l *FencedLease) Allows(namespace string) bool {
	return namespace == l.Namespace || slices.Contains(l.Spec.AllowedNamespaces, "*") ||
		namespace != "" && slices.Contains(l.Spec.AllowedNamespaces, namespace)
}
