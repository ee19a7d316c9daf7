package fence

import (
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// A lease whose current token is 42, held by pod-b.
func held() Lease {
	return Lease{Name: "prod/scheduler", Found: true, Current: 42, Held: true, Holder: "pod-b", HolderUser: "bob", HolderPodUID: "pod-1"}
}

func with(l Lease, change func(*Lease)) Lease { change(&l); return l }

func TestJudgeMessages(t *testing.T) {
	stamp := func(s string) Presented { return Presented{Stamped: true, Text: s} }
	live := Policy{Live: true}
	cases := map[string]struct {
		presented Presented
		recorded  Token
		lease     Lease
		policy    Policy
		want      string
	}{
		"stale by the record": {stamp("41"), 42, held(), live,
			`StaleToken: [prod/scheduler] token 41 is stale; recorded 42, current 42, held by "pod-b"; stop: a newer holder has written here`},
		"stale by the lease": {stamp("41"), 41, held(), live,
			`StaleToken: [prod/scheduler] token 41 is stale; recorded 41, current 42, held by "pod-b"; stop: a newer token was issued`},
		"revoked": {stamp("42"), 42, with(held(), func(l *Lease) { l.Min = 50; l.Held = false }), live,
			`StaleToken: [prod/scheduler] token 42 is revoked; recorded 42, current 50, held by nobody; stop, and acquire the lease anew`},
		"never issued": {stamp("43"), 41, held(), live,
			`UnissuedToken: [prod/scheduler] token 43 was never issued; recorded 41, current 42, held by "pod-b"; present the token of your own claim's status`},
		"malformed": {stamp("042"), 41, held(), live,
			`MalformedToken: [prod/scheduler] malformed token "042": it must not start with 0; present the token exactly as the lease's status shows it`},
		"unstamped": {Presented{}, 41, held(), live,
			`Unstamped: [prod/scheduler] the write presents no token; recorded 41, current 42, held by "pod-b"; present the token (kubectl fence apply, run or scale; docs/protocol.md), or bypass with a reason`},
		"no lease": {stamp("42"), 41, Lease{Name: "prod/gone"}, live,
			`UnknownLease: [prod/gone] token 42 belongs to a lease that does not exist; recorded 41, no such lease; create the FencedLease, or take the label off with the right to bypass`},
		"a lease that does not allow the namespace": {stamp("42"), 41, Lease{Name: "prod/other", NotAllowed: true}, live,
			`UnknownLease: [prod/other] token 42 belongs to a lease that does not allow this namespace; recorded 41, lease not for this namespace; add the namespace to the lease's allowedNamespaces`},
		"nothing, under a lease that does not allow the namespace": {Presented{}, 41, Lease{Name: "prod/other", NotAllowed: true}, live,
			`Unstamped: [prod/other] the write presents no token; recorded 41, lease not for this namespace; present the token (kubectl fence apply, run or scale; docs/protocol.md), or bypass with a reason`},
		"another account": {Presented{Stamped: true, Text: "42", User: "eve"}, 41, with(held(), func(l *Lease) { l.BindUser = true }), live,
			`NotHolder: [prod/scheduler] token 42 belongs to another account than "eve"; recorded 41, current 42, held by "pod-b"; write as the account that made the claim`},
		"nobody holds": {stamp("42"), 42, with(held(), func(l *Lease) { l.DenyLapsed = true; l.Held = false }), live,
			`Lapsed: [prod/scheduler] token 42 is current but its holder is gone; recorded 42, current 42, held by nobody; acquire the lease anew`},
		"a record that no authority issued": {stamp("42"), 99, held(), live,
			`StaleToken: [prod/scheduler] token 42 is stale; recorded 99, current 42, held by "pod-b"; the record is above every token issued: an administrator lowers it with kubectl fence verify --fix`},
		"a path that cannot record": {stamp("42"), 41, held(), Policy{Live: true, MustEqual: true},
			`NotRecorded: [prod/scheduler] token 42 is not recorded yet; recorded 41, current 42, held by "pod-b"; this path cannot record: first set fencedlease.io/token on the object with this token`},
		"annotations where the header is asked for": {stamp("42"), 42, with(held(), func(l *Lease) { l.HeaderOnly = true }), live,
			`Unstamped: [prod/scheduler] token 42 was presented by annotations, and the lease accepts it by header alone; impersonate yourself with the extra fencedlease.io/token`},
		"no authority to ask": {stamp("41"), 42, Lease{Name: "prod/scheduler"}, Policy{NoAuthority: true},
			`StaleToken: [prod/scheduler] token 41 is stale; recorded 42; stop: a newer holder has written here`},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			got := Judge(c.presented, c.recorded, c.lease, c.policy)
			if got.Outcome != Denied {
				t.Fatalf("outcome %v, want Denied", got.Outcome)
			}
			if got.Message != c.want {
				t.Errorf("message:\n got %s\nwant %s", got.Message, c.want)
			}
			if !strings.HasPrefix(got.Message, string(got.Reason)+": ") {
				t.Errorf("the message does not start with the reason %s", got.Reason)
			}
		})
	}
}

func TestJudgeOutcomes(t *testing.T) {
	stamp := func(s string) Presented { return Presented{Stamped: true, Text: s, ByHeader: true} }
	cases := map[string]struct {
		presented Presented
		recorded  Token
		lease     Lease
		policy    Policy
		want      Outcome
	}{
		"the current token where it is recorded":     {stamp("42"), 42, held(), Policy{}, Allowed},
		"the current token where an older one is":    {stamp("42"), 41, held(), Policy{}, Allowed},
		"the current token where none is":            {stamp("42"), 0, held(), Policy{}, Allowed},
		"the current token after a lapse":            {stamp("42"), 42, with(held(), func(l *Lease) { l.Held = false }), Policy{}, Allowed},
		"more than the cache knows":                  {stamp("43"), 42, held(), Policy{}, Confirm},
		"a lease that the cache does not know":       {stamp("42"), 42, Lease{}, Policy{}, Confirm},
		"a path that cannot record, recorded":        {stamp("42"), 42, held(), Policy{MustEqual: true}, Allowed},
		"unstamped where that is allowed":            {Presented{}, 42, held(), Policy{Unstamped: Allow}, Allowed},
		"unstamped where that is warned of":          {Presented{}, 42, held(), Policy{Unstamped: Warn}, Warned},
		"unstamped where nothing is said":            {Presented{}, 42, held(), Policy{}, Denied},
		"the holder's own account":                   {Presented{Stamped: true, Text: "42", User: "bob", PodUID: "pod-1"}, 42, with(held(), func(l *Lease) { l.BindUser = true }), Policy{}, Allowed},
		"the holder's account from another pod":      {Presented{Stamped: true, Text: "42", User: "bob", PodUID: "pod-2"}, 42, with(held(), func(l *Lease) { l.BindUser = true }), Policy{}, Denied},
		"the holder's account, the pod is not named": {Presented{Stamped: true, Text: "42", User: "bob"}, 42, with(held(), func(l *Lease) { l.BindUser = true }), Policy{}, Allowed},
		"by header where the header is asked for":    {stamp("42"), 42, with(held(), func(l *Lease) { l.HeaderOnly = true }), Policy{}, Allowed},
		"a ledger without an authority":              {stamp("43"), 42, Lease{}, Policy{NoAuthority: true}, Allowed},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			if got := Judge(c.presented, c.recorded, c.lease, c.policy); got.Outcome != c.want {
				t.Errorf("outcome %v, want %v (%s)", got.Outcome, c.want, got.Message)
			}
		})
	}
}

func drawState(t *rapid.T) (Token, Lease, Policy) {
	token := rapid.Int64Range(0, 12)
	lease := Lease{
		Name:       "ns/l",
		Found:      rapid.Bool().Draw(t, "found"),
		Current:    Token(token.Draw(t, "current")),
		Min:        Token(token.Draw(t, "min")),
		Held:       rapid.Bool().Draw(t, "held"),
		BindUser:   rapid.Bool().Draw(t, "bind"),
		HolderUser: "bob",
		DenyLapsed: rapid.Bool().Draw(t, "denyLapsed"),
		HeaderOnly: rapid.Bool().Draw(t, "headerOnly"),
	}
	policy := Policy{
		MustEqual:   rapid.Bool().Draw(t, "mustEqual"),
		Live:        rapid.Bool().Draw(t, "live"),
		NoAuthority: rapid.Bool().Draw(t, "noAuthority"),
	}
	return Token(token.Draw(t, "recorded")), lease, policy
}

// Where a token is rejected as stale, every lower one is rejected on the same
// state. (UnissuedToken and NotRecorded are about tokens that are too high.)
func TestJudgeIsMonotone(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		recorded, lease, policy := drawState(t)
		p := Presented{Stamped: true, User: "bob", ByHeader: rapid.Bool().Draw(t, "byHeader")}
		high := rapid.Int64Range(2, 14).Draw(t, "token")
		low := rapid.Int64Range(1, high-1).Draw(t, "lower")
		p.Text = Token(high).String()
		verdict := Judge(p, recorded, lease, policy)
		if verdict.Reason != StaleToken {
			return
		}
		p.Text = Token(low).String()
		if lower := Judge(p, recorded, lease, policy); lower.Outcome == Allowed {
			t.Fatalf("%d is rejected (%s) and %d is allowed", high, verdict.Message, low)
		}
	})
}

// What P1 rests on, whatever is known of the lease: no accepted token is
// below the recorded one.
func TestJudgeNeverAcceptsLessThanTheRecord(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		recorded, lease, policy := drawState(t)
		token := Token(rapid.Int64Range(1, 14).Draw(t, "token"))
		v := Judge(Presented{Stamped: true, Text: token.String(), User: "bob", ByHeader: true}, recorded, lease, policy)
		if v.Outcome == Allowed && token < recorded {
			t.Fatalf("%v is allowed over %v", token, recorded)
		}
		if v.Outcome == Allowed && !policy.NoAuthority && (token != lease.Current || token < lease.Min) {
			t.Fatalf("%v is allowed, current is %v and the floor %v", token, lease.Current, lease.Min)
		}
	})
}

func FuzzJudge(f *testing.F) {
	f.Add("41", int64(42), int64(42), "pod-b", true)
	f.Add("", int64(-1), int64(0), "\xff", false)
	f.Fuzz(func(t *testing.T, text string, recorded, current int64, holder string, live bool) {
		v := Judge(Presented{Stamped: true, Text: text}, Token(recorded),
			Lease{Name: "ns/l", Found: true, Current: Token(current), Held: true, Holder: holder}, Policy{Live: live})
		if v.Outcome == Denied && (v.Reason == "" || !strings.HasPrefix(v.Message, string(v.Reason)+": ")) {
			t.Fatalf("a rejection without a reason: %+v", v)
		}
		if len(v.Message) > 1024 {
			t.Fatalf("a message of %d bytes", len(v.Message))
		}
	})
}
