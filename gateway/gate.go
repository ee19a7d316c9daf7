package gateway

import (
	"context"
	"net/http"

	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/gateway/ledger"
)

// Gate judges calls: by the ledger, and by the authority where there is one.
type Gate struct {
	// Ledger remembers what was accepted.
	Ledger ledger.Ledger
	// Authority knows the leases. Nil judges by the ledger alone.
	Authority Authority
	// Callers knows who may use which lease. Nil lets everybody.
	Callers Callers
}

// admit authenticates the caller, judges the call and records its token. Nil
// means that the call may leave, as far as one look can tell.
func (g *Gate) admit(ctx context.Context, c call, r request) (fence.Token, caller, *Problem) {
	who, problem := g.identify(ctx, c, r)
	if problem != nil {
		return 0, who, problem
	}
	verdict, err := g.judge(ctx, c, who)
	switch {
	case err != nil:
		return 0, who, undecided(err)
	case verdict.Outcome != fence.Allowed:
		return 0, who, denied(verdict)
	}
	return verdict.Token, who, nil
}

// undecided never opens the door.
func undecided(err error) *Problem {
	return problemf(http.StatusServiceUnavailable, Undecided, "the call was not judged, and not sent: %v; try again", err)
}

// stale is the verdict on a token that a higher one has overtaken meanwhile.
func (g *Gate) stale(c call, recorded fence.Token) *Problem {
	return denied(fence.Judge(fence.Presented{Stamped: true, Text: c.token, ByHeader: true}, recorded,
		fence.Lease{Name: c.id.Lease}, fence.Policy{NoAuthority: true}))
}

// judge gives the verdict on a call. A token that is above the record is judged
// on a live read: nothing in the ledger stands against it yet.
func (g *Gate) judge(ctx context.Context, c call, who caller) (fence.Verdict, error) {
	recorded, err := g.Ledger.Recorded(ctx, c.id)
	if err != nil {
		return fence.Verdict{}, err
	}
	presented := fence.Presented{Stamped: true, Text: c.token, ByHeader: true, User: who.user, PodUID: who.podUID}
	lease, policy := fence.Lease{Name: c.id.Lease}, fence.Policy{NoAuthority: g.Authority == nil}
	for read := g.Authority != nil; ; {
		if read {
			if lease, policy.Live, err = g.Authority.Lease(ctx, c.lease, policy.Live); err != nil {
				return fence.Verdict{}, err
			}
		}
		verdict := fence.Judge(presented, recorded, lease, policy)
		advances := verdict.Outcome == fence.Allowed && verdict.Token > recorded
		switch {
		case (advances || verdict.Outcome == fence.Confirm) && !policy.Live && !policy.NoAuthority:
			read, policy.Live = true, true
		case advances:
			read = false
			if recorded, err = g.Ledger.Advance(ctx, c.id, verdict.Token, g.Authority != nil); err != nil {
				return fence.Verdict{}, err
			}
		default:
			return verdict, nil
		}
	}
}
