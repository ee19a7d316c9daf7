package fence

// Names of the wire contract (docs/protocol.md). Every component and client
// takes them from here.
const (
	// Group is the API group and the prefix of every label, annotation and
	// userInfo extra key of the contract.
	Group = "fencedlease.io"

	// LabelLease on an object names the lease that guards it.
	LabelLease = Group + "/lease"
	// LabelLeaseNamespace names the lease's namespace where it is not the
	// object's own, or the object has none.
	LabelLeaseNamespace = Group + "/lease-namespace"
	// LabelNamespaceMark on a Namespace, with the value "true", says that
	// leases are used there. The operator puts it on before the first token.
	LabelNamespaceMark = Group + "/leases"

	// AnnotationToken holds the recorded token of a stored object; together
	// with a changed AnnotationWriteID it presents one in a request.
	AnnotationToken = Group + "/token"
	// AnnotationWriteID tells a presented token from an inherited one: it has
	// to differ from the stored value.
	AnnotationWriteID = Group + "/write-id"
	// AnnotationFloor is the recorded token as raised by a sealed hand-over.
	// Only the operator writes it.
	AnnotationFloor = Group + "/floor"
	// AnnotationDeleteToken is the holder's decision that this very object
	// goes: a delete passes while the value equals the recorded token.
	AnnotationDeleteToken = Group + "/delete-token"
	// AnnotationBypass carries the reason of a deliberate bypass; it has to
	// differ from the stored value.
	AnnotationBypass = Group + "/bypass"
	// AnnotationLastToken on a FencedLease copies the newest reserved token
	// into metadata, which backup tools keep. Only the operator writes it.
	AnnotationLastToken = Group + "/last-token"
	// AnnotationRevokeReason on a FencedLease says why its minToken was raised
	// last. It is for people.
	AnnotationRevokeReason = Group + "/revoke-reason"

	// ExtraToken is the userInfo extra key by which a program presents its
	// token (Impersonate-Extra-Fencedlease.io%2FToken).
	ExtraToken = Group + "/token"
	// ExtraBypass is the userInfo extra key of a bypass's reason.
	ExtraBypass = Group + "/bypass"

	// VerbGuard is the RBAC verb on a fencedlease that putting its label on
	// an object needs.
	VerbGuard = "guard"
	// VerbBypass is the RBAC verb on a fencedlease that a bypass needs.
	VerbBypass = "bypass"
	// VerbUse is the RBAC verb on a fencedlease that presenting its token to
	// the side-effect gateway needs.
	VerbUse = "use"

	// HeaderLease, HeaderToken and HeaderKey are the request headers of the
	// side-effect gateway.
	HeaderLease = "Fencing-Lease"
	HeaderToken = "Fencing-Token"
	HeaderKey   = "Fencing-Key"
	// HeaderAuthorization authenticates a caller to the gateway ("Bearer ..."):
	// Authorization itself is for whom the call goes to.
	HeaderAuthorization = "Fencing-Authorization"
)

// AnnotationsOfFence lists the annotations on guarded objects that belong to
// the fence: an unstamped write leaves all of them as they are.
var AnnotationsOfFence = []string{
	AnnotationToken, AnnotationWriteID, AnnotationFloor, AnnotationDeleteToken,
}
