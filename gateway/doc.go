// Package gateway is the fence for calls that cannot be rolled back: e-mail,
// payment capture, partner webhooks.
//
// It guarantees that no call leaves under a token that is lower than one it has
// accepted for the same key, whatever is killed and restarted, and, as a
// reverse proxy, that a call leaves only after every older call of its key has
// ended. It does not take back what a partner has already received: an older
// call that was cut off, or a decision that another proxy acts on late, may
// still take effect there. The partner gets the fencing headers, and can check
// for itself.
//
// The verdict is fence.Judge's; the reverse proxy and the decision services are
// adapters around one Gate.
package gateway
