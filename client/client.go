package client

import (
	"context"

	"k8s.io/client-go/rest"
	crclient "sigs.k8s.io/controller-runtime/pkg/client"
)

// Client is a controller-runtime client whose writes to objects guarded by
// its holder's lease present the token and record it first where needed.
type Client struct{ crclient.Client }

// New makes a stamping client. Reads go where options.Cache says.
func New(ctx context.Context, cfg *rest.Config, options crclient.Options, holder Holder) (*Client, error) {
	return nil, nil
}

// Presentation tells how tokens are presented: by header, or by annotations
// and why.
func (c *Client) Presentation() Identity { return Identity{} }
