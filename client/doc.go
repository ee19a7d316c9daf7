// Package client acquires leases and stamps writes.
//
// It guarantees that a Held stops by itself before the operator can consider
// its claim lapsed, on this process's monotonic clock, and that a stamping
// client sends nothing once the lease is lost. It does not guarantee that a
// write already sent is not committed afterwards, nor that this process knows
// at every moment whether it still holds: that no older write commits after a
// newer one is what the fence guarantees, not the holder's belief.
//
// Acquire waits in the lease's queue and returns a Held, which renews in the
// background; Run does so around a function. Config copies a rest.Config so
// that whatever client is made of it presents the token on every write. Lock
// plugs into client-go's elector and controller-runtime's manager.
package client
