package fence

import "errors"

// What a writer can learn about a write, as errors.Is targets. The three are
// exclusive: a write is either known not to have happened, not attempted any
// more, or possibly done.
var (
	// ErrStale: a fence rejected the write because a newer token exists. The
	// write did not happen; earlier ones of the same token may have.
	ErrStale = errors.New("rejected as stale")
	// ErrLost: the lease is not held any more, so nothing was sent. It says
	// nothing of writes sent before.
	ErrLost = errors.New("lease lost")
	// ErrOutcomeUnknown: the write was sent and no answer came, so it may have
	// happened. Reaffirm settles it: a write with the old token cannot happen
	// any more once the newer one is recorded.
	ErrOutcomeUnknown = errors.New("outcome unknown")
)
