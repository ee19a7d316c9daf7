package fence

import (
	"fmt"
	"strings"
)

// Reason is why a write was rejected: the cause type of an admission
// response, the type of a problem body, the word that a message starts with.
type Reason string

const (
	// StaleToken: the token is lower than the recorded one, not the current
	// one any more, or revoked.
	StaleToken Reason = "StaleToken"
	// UnissuedToken: the token is higher than the newest one issued.
	UnissuedToken Reason = "UnissuedToken"
	// MalformedToken: it is not the canonical decimal form of a token.
	MalformedToken Reason = "MalformedToken"
	// Unstamped: the write presents no token.
	Unstamped Reason = "Unstamped"
	// UnknownLease: the lease does not exist, or does not allow the namespace.
	UnknownLease Reason = "UnknownLease"
	// NotRecorded: the path cannot record, and the token is higher than the
	// recorded one. Not stale: the holder records first and tries again.
	NotRecorded Reason = "NotRecorded"
	// Lapsed: the token is current, but nobody holds the lease and the lease
	// refuses such writes.
	Lapsed Reason = "Lapsed"
	// FenceRemoved: the write takes the guard off, points it elsewhere, or
	// changes the fence's own annotations without presenting a token.
	FenceRemoved Reason = "FenceRemoved"
	// NotHolder: the lease binds its token to an account, and this is another.
	NotHolder Reason = "NotHolder"
)

// Action is what a fence does with an unstamped write.
type Action string

const (
	// Deny rejects. The zero value means the same.
	Deny Action = "Deny"
	// Warn lets pass, warns and counts.
	Warn Action = "Warn"
	// Allow lets pass.
	Allow Action = "Allow"
)

// Presented is what a request says of itself.
type Presented struct {
	// Stamped tells whether the request presents a token at all.
	Stamped bool
	// Text is the token as sent. It is parsed by Judge and nowhere else.
	Text string
	// ByHeader tells that the token came as a header, not by annotations.
	ByHeader bool
	// User and PodUID are the authenticated sender; needed only where the
	// lease binds its holder.
	User, PodUID string
}

// Lease is what a fence knows of a lease.
type Lease struct {
	// Name is "namespace/name", for messages.
	Name string
	// Found is false where no such lease exists, as far as the fence knows.
	Found bool
	// NotAllowed tells that it exists and does not allow the namespace of the
	// guarded object, which makes it as good as not found.
	NotAllowed bool
	// Current is the newest token issued, 0 if none was.
	Current Token
	// Min is spec.minToken: a current token below it is revoked.
	Min Token
	// Held tells whether a claim holds the lease now.
	Held bool
	// Holder is the holder's identity, for messages.
	Holder string
	// BindUser makes a stamped write count only from HolderUser (and from
	// HolderPodUID, where both sides name a pod).
	BindUser                 bool
	HolderUser, HolderPodUID string
	// DenyLapsed rejects the current token while nobody holds the lease.
	DenyLapsed bool
	// HeaderOnly refuses a token presented by annotations.
	HeaderOnly bool
}

// Policy is what the boundary brings: how it reads the lease and whether the
// path can record.
type Policy struct {
	// Unstamped is what happens to a write that presents no token.
	Unstamped Action
	// MustEqual is set on a path that cannot record: the presented token has
	// to equal the recorded one.
	MustEqual bool
	// Live tells that the lease was read from the authority for this very
	// verdict. Without it, what the fence does not know yet gives Confirm.
	Live bool
	// NoAuthority judges by the recorded token alone: there is no lease to
	// ask, as in a database or in a gateway outside a cluster.
	NoAuthority bool
}

// Outcome is what a fence does with the request.
type Outcome int

const (
	// Denied is the zero value, so that a verdict nobody made rejects.
	Denied Outcome = iota
	// Allowed lets the write pass.
	Allowed
	// Warned lets an unstamped write pass with a warning.
	Warned
	// Confirm: the request knows more of the lease than this fence does.
	// Read the lease live and judge again.
	Confirm
)

// Verdict is the result of Judge.
type Verdict struct {
	Outcome Outcome
	// Reason is empty where the write is allowed.
	Reason Reason
	// Message says what was presented, what is recorded and current, who
	// holds the lease and what to do next. It starts with the reason.
	Message string
	// Token is the parsed presented token, 0 where there is none.
	Token Token
}

// Judge applies rules 3 to 8 of the admission fence, in their order, to one
// write. It is monotone: where a token is rejected as stale, every lower one
// is rejected on the same state.
func Judge(p Presented, recorded Token, lease Lease, policy Policy) Verdict {
	if !p.Stamped {
		return judgeUnstamped(recorded, lease, policy)
	}
	token, err := ParseToken(p.Text)
	if err != nil {
		return Verdict{Reason: MalformedToken, Message: fmt.Sprintf(
			"%s: [%s] %v; present the token exactly as the lease's status shows it", MalformedToken, lease.Name, err)}
	}
	deny := func(reason Reason, what, todo string) Verdict {
		return Verdict{Reason: reason, Token: token, Message: message(reason, token, recorded, lease, policy, what, todo)}
	}

	if token < recorded {
		todo := "stop: a newer holder has written here"
		if !policy.NoAuthority && lease.Found && recorded > lease.Current && token == lease.Current && policy.Live {
			todo = "the record is above every token issued: an administrator lowers it with kubectl fence verify --fix"
		}
		return deny(StaleToken, "is stale", todo)
	}
	if policy.MustEqual && token > recorded {
		// Not stale by the record, but letting it pass would leave a record
		// that an older write still satisfies.
		if !policy.NoAuthority && lease.Found && token < lease.Current {
			return deny(StaleToken, "is stale", "stop: a newer token was issued")
		}
		return deny(NotRecorded, "is not recorded yet", "this path cannot record: first set "+AnnotationToken+" on the object with this token")
	}
	if policy.NoAuthority {
		return Verdict{Outcome: Allowed, Token: token}
	}
	if !lease.Found {
		if !policy.Live {
			return Verdict{Outcome: Confirm, Reason: UnknownLease, Token: token}
		}
		if lease.NotAllowed {
			return deny(UnknownLease, "belongs to a lease that does not allow this namespace", "add the namespace to the lease's allowedNamespaces")
		}
		return deny(UnknownLease, "belongs to a lease that does not exist", "create the FencedLease, or take the label off with the right to bypass")
	}
	current := max(lease.Current, lease.Min)
	switch {
	case token < lease.Current:
		return deny(StaleToken, "is stale", "stop: a newer token was issued")
	case token < current:
		return deny(StaleToken, "is revoked", "stop, and acquire the lease anew")
	case token > lease.Current:
		if !policy.Live {
			return Verdict{Outcome: Confirm, Reason: UnissuedToken, Token: token}
		}
		return deny(UnissuedToken, "was never issued", "present the token of your own claim's status")
	}
	if lease.HeaderOnly && !p.ByHeader {
		return Verdict{Reason: Unstamped, Token: token, Message: fmt.Sprintf(
			"%s: [%s] token %s was presented by annotations, and the lease accepts it by header alone; impersonate yourself with the extra %s",
			Unstamped, lease.Name, token, ExtraToken)}
	}
	if lease.BindUser && lease.Held &&
		(p.User != lease.HolderUser || (p.PodUID != "" && lease.HolderPodUID != "" && p.PodUID != lease.HolderPodUID)) {
		return deny(NotHolder, "belongs to another account than "+quoteName(p.User), "write as the account that made the claim")
	}
	if lease.DenyLapsed && !lease.Held {
		return deny(Lapsed, "is current but its holder is gone", "acquire the lease anew")
	}
	return Verdict{Outcome: Allowed, Token: token}
}

func judgeUnstamped(recorded Token, lease Lease, policy Policy) Verdict {
	v := Verdict{Reason: Unstamped, Message: message(Unstamped, 0, recorded, lease, policy, "",
		"present the token (kubectl fence apply, run or scale; docs/protocol.md), or bypass with a reason")}
	switch policy.Unstamped {
	case Allow:
		return Verdict{Outcome: Allowed}
	case Warn:
		v.Outcome = Warned
	case Deny:
	}
	return v
}

// message is the one text of every boundary: reason, lease, both numbers, the
// holder, what to do.
func message(reason Reason, presented, recorded Token, lease Lease, policy Policy, what, todo string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: [%s] ", reason, lease.Name)
	if reason == Unstamped {
		b.WriteString("the write presents no token")
	} else {
		fmt.Fprintf(&b, "token %s %s", presented, what)
	}
	fmt.Fprintf(&b, "; recorded %s", recorded)
	if !policy.NoAuthority {
		switch {
		case lease.Found:
			fmt.Fprintf(&b, ", current %s, %s", max(lease.Current, lease.Min), heldBy(lease))
		case lease.NotAllowed:
			b.WriteString(", lease not for this namespace")
		default:
			b.WriteString(", no such lease")
		}
	}
	b.WriteString("; ")
	b.WriteString(todo)
	return b.String()
}

// heldBy says who holds the lease, as messages do.
func heldBy(lease Lease) string {
	if !lease.Held {
		return "held by nobody"
	}
	return "held by " + quoteName(lease.Holder)
}

// quoteName bounds an identity in a message.
func quoteName(s string) string {
	const most = 64
	if len(s) > most {
		s = s[:most] + "..."
	}
	return fmt.Sprintf("%+q", s)
}
