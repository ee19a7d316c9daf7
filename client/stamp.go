package client

import (
	"context"
	"net/http"

	"k8s.io/client-go/rest"
)

// Identity is the account that a client authenticates as, and how it may
// impersonate itself to present a token by header.
type Identity struct {
	// Impersonate is what the API server takes this client for.
	Impersonate rest.ImpersonationConfig
	// ByHeader tells that impersonating oneself with the token's extra is
	// granted. Without it only annotations can present a token.
	ByHeader bool
	// Why says what is not granted, where ByHeader is false.
	Why string
}

// Identify asks the API server who cfg is and proves, by one harmless request,
// whether it may present tokens by header.
func Identify(ctx context.Context, cfg *rest.Config) (Identity, error) { return Identity{}, nil }

// Transport presents holder's token by header on every write that goes
// through it, and refuses to send a write once the lease is lost. It is made
// for rest.Config.Wrap.
func Transport(holder Holder, who Identity) func(http.RoundTripper) http.RoundTripper { return nil }

// Config copies cfg so that every write presents holder's token by header. It
// fails where that is not granted. It does not record: writes on paths that
// cannot record need New.
func Config(ctx context.Context, cfg *rest.Config, holder Holder) (*rest.Config, error) {
	return nil, nil
}
