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
	// Why says what is not granted, where ByHeader is false.
	Why string
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
	case apierrors.IsForbidden(err):
		id.Why = err.Error()
	default:
		return Identity{}, fmt.Errorf("prove that tokens can be presented by header: %w", err)
	}
	return id, nil
}

// Config copies cfg so that every write presents holder's token by header and
// finds it recorded, and so that nothing is sent once the lease is lost: the
// error then wraps fence.ErrLost. Reads are sent as they are. It fails where
// presenting by header is not granted; kubectl fence rbac prints the grant.
func Config(ctx context.Context, cfg *rest.Config, holder Holder) (*rest.Config, error) {
	id, err := Identify(ctx, cfg)
	if err != nil {
		return nil, err
	}
	if !id.ByHeader {
		return nil, fmt.Errorf("present tokens by header as %q: not granted: %s; kubectl fence rbac prints the rule",
			id.Impersonate.UserName, id.Why)
	}
	server, _, err := rest.DefaultServerUrlFor(cfg)
	if err != nil {
		return nil, err
	}
	cfg = rest.CopyConfig(cfg)
	// The record has to go into bodies, which another encoding would hide.
	cfg.ContentType = runtime.ContentTypeJSON
	cfg.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return &recorder{
			next:   &presenter{next: next, holder: holder, as: id.Impersonate},
			holder: holder,
			prefix: strings.TrimSuffix(server.Path, "/"),
		}
	})
	return cfg, nil
}

// presenter presents the token by header on every write.
type presenter struct {
	next   http.RoundTripper
	holder Holder
	as     transport.ImpersonationConfig
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
		return nil, fmt.Errorf("%s %s was not sent: %w", req.Method, req.URL.Path, err)
	}
	as := p.as
	as.Extra = map[string][]string{fence.ExtraToken: {token.String()}}
	return transport.NewImpersonatingRoundTripper(as, p.next).RoundTrip(req)
}

// writes tells whether a request can change something.
func writes(req *http.Request) bool {
	switch req.Method {
	case http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete:
		return true
	}
	return false
}
