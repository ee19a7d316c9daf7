package client

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"

	authenticationv1 "k8s.io/api/authentication/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	authenticationclient "k8s.io/client-go/kubernetes/typed/authentication/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/transport"

	"github.com/fencedlease/fencedlease/fence"
)

// Identity is the account that a client authenticates as, and whether it may
// impersonate itself to present a token by header.
type Identity struct {
	// Impersonate is what the API server takes this client for.
	Impersonate transport.ImpersonationConfig
	// ByHeader tells that impersonating oneself with the token's extra is
	// granted. Without it only annotations can present a token.
	ByHeader bool
}

// Identify asks the API server who cfg is and proves, by one review that
// changes nothing, whether it may present tokens by header.
func Identify(ctx context.Context, cfg *rest.Config) (Identity, error) {
	if cfg.Impersonate.UserName != "" {
		return Identity{}, errors.New("find out the own account: the configuration impersonates another account already")
	}
	review := func(cfg *rest.Config) (*authenticationv1.SelfSubjectReview, error) {
		api, err := authenticationclient.NewForConfig(cfg)
		if err != nil {
			return nil, err
		}
		return api.SelfSubjectReviews().Create(ctx, &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
	}
	answer, err := review(cfg)
	if err != nil {
		return Identity{}, fmt.Errorf("find out the own account: %w", err)
	}
	self := answer.Status.UserInfo
	id := Identity{Impersonate: transport.ImpersonationConfig{UserName: self.Username}}
	if !strings.HasPrefix(self.Username, "system:serviceaccount:") {
		// The API server adds the groups of a service account by itself.
		for _, group := range self.Groups {
			if group != "system:authenticated" {
				id.Impersonate.Groups = append(id.Impersonate.Groups, group)
			}
		}
	}
	probe := rest.CopyConfig(cfg)
	probe.Impersonate = rest.ImpersonationConfig{
		UserName: id.Impersonate.UserName, Groups: id.Impersonate.Groups, Extra: map[string][]string{fence.ExtraToken: {"1"}},
	}
	_, err = review(probe)
	switch {
	case err == nil:
		id.ByHeader = true
	case !apierrors.IsForbidden(err):
		return Identity{}, fmt.Errorf("prove that tokens can be presented by header: %w", err)
	}
	return id, nil
}

// Config copies cfg so that every write presents holder's token and finds it
// recorded, and so that nothing is sent once the lease is lost: the error then
// wraps fence.ErrLost. Reads are sent as they are.
//
// The token is presented by header. Where that is not granted it is presented
// by annotations in the body, and cfg's warning handler is told once what that
// way cannot do; kubectl fence rbac prints the grant.
func Config(ctx context.Context, cfg *rest.Config, holder Holder) (*rest.Config, error) {
	id, err := Identify(ctx, cfg)
	if err != nil {
		return nil, err
	}
	server, _, err := rest.DefaultServerUrlFor(cfg)
	if err != nil {
		return nil, err
	}
	if !id.ByHeader {
		warn(ctx, cfg, fmt.Sprintf("%q may not impersonate itself, so it presents tokens by annotations: "+
			"patches read the object first, deletes mark it first; scale, the status of custom resources and other paths that keep no annotations are rejected. "+
			"kubectl fence rbac %s prints the rule that it needs", id.Impersonate.UserName, id.Impersonate.UserName))
	}
	cfg = rest.CopyConfig(cfg)
	// The record has to go into bodies, which another encoding would hide.
	cfg.ContentType = runtime.ContentTypeJSON
	cfg.Wrap(func(next http.RoundTripper) http.RoundTripper {
		r := recorder{next: &presenter{next: next, holder: holder, id: id}, holder: holder, prefix: strings.TrimSuffix(server.Path, "/")}
		if !id.ByHeader {
			return &annotator{recorder: r, account: id.Impersonate.UserName}
		}
		return &r
	})
	return cfg, nil
}

// warn tells cfg's warning handler, as a warning of the server's.
func warn(ctx context.Context, cfg *rest.Config, text string) {
	const code = 299 // the only one that handlers look at
	switch {
	case cfg.WarningHandlerWithContext != nil:
		cfg.WarningHandlerWithContext.HandleWarningHeaderWithContext(ctx, code, "", text)
	case cfg.WarningHandler != nil:
		cfg.WarningHandler.HandleWarningHeader(code, "", text)
	default:
		rest.WarningLogger{}.HandleWarningHeaderWithContext(ctx, code, "", text)
	}
}

// presenter sends no write once the lease is lost, looks whether it is where the
// fence says so, and presents the token by header on every write where that is
// granted.
type presenter struct {
	next   http.RoundTripper
	holder Holder
	id     Identity
}

func (p *presenter) RoundTrip(req *http.Request) (*http.Response, error) {
	if !writes(req) {
		return p.next.RoundTrip(req)
	}
	token, err := p.holder.Present()
	if err != nil {
		if req.Body != nil {
			_ = req.Body.Close()
		}
		return nil, notSent(req, err)
	}
	next := p.next
	if p.id.ByHeader {
		as := p.id.Impersonate
		as.Extra = map[string][]string{fence.ExtraToken: {token.String()}}
		next = transport.NewImpersonatingRoundTripper(as, next)
	}
	resp, err := next.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	if d, ok := p.holder.(doubter); ok {
		lease := ": [" + p.holder.Lease() + "]"
		refused, err := says(resp, string(fence.StaleToken)+lease, string(fence.Lapsed)+lease)
		if err != nil {
			return nil, err
		}
		if refused {
			d.doubt(req.Context()) // before whoever reads the answer sends more
		}
	}
	return resp, nil
}

func notSent(req *http.Request, err error) error {
	return fmt.Errorf("%s %s was not sent: %w", req.Method, req.URL.Path, err)
}

// writes tells whether a request can change something.
func writes(req *http.Request) bool {
	switch req.Method {
	case http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete:
		return true
	}
	return false
}
