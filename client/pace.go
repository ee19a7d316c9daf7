package client

import (
	"time"
)

// pace is how a claim is kept alive; all of it follows from the duration of
// the lease.
type pace struct {
	// interval is the longest time from one renewal to the next.
	interval time.Duration
	// retry is the time from a failed renewal to the next.
	retry time.Duration
	// call bounds one renewal, so that several fit before the end.
	call time.Duration
	// end is how long after the sending of the last successful renewal the
	// holder stops. The operator counts a whole duration from when it saw that
	// renewal, which is later; the fifth between is for a clock that runs fast
	// over there, a pause over here, and for winding up.
	end time.Duration
}

func paceOf(duration time.Duration) pace {
	return pace{interval: duration / 3, retry: duration / 12, call: duration / 4, end: duration * 4 / 5}
}

// spread shortens a wait by up to a fifth, so that many claimants that started
// or failed together do not stay in step. random is from 0 to 1.
func spread(wait time.Duration, random float64) time.Duration {
	return wait - time.Duration(random*float64(wait)/5)
}

// backoff doubles a wait up to a limit.
func backoff(wait, most time.Duration) time.Duration { return min(2*wait, most) }
