package gateway

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/apimachinery/pkg/types"
	lru "k8s.io/apimachinery/pkg/util/cache"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/fence"
)

// Callers knows who may use which lease.
type Callers interface {
	// Identify says who a caller is, by the bearer token it presents or, where
	// that is empty, by the certificate of its connection.
	Identify(ctx context.Context, bearer string, certificate *x509.Certificate) (caller, error)
	// May tells whether a caller may use a lease.
	May(ctx context.Context, who caller, lease types.NamespacedName) (bool, error)
}

// caller is an authenticated account.
type caller struct {
	user, uid, podUID string
	groups            []string
}

// request is what a request proves of its sender.
type request struct {
	header      http.Header
	certificate *x509.Certificate
}

// unauthenticatedError says why a caller was not believed.
type unauthenticatedError string

func (e unauthenticatedError) Error() string { return string(e) }

// identify authenticates a caller, and lets it use the lease or not.
func (g *Gate) identify(ctx context.Context, c call, r request) (caller, *Problem) {
	if g.Callers == nil {
		return caller{}, nil
	}
	var bearer string
	if values := r.header[fence.HeaderAuthorization]; len(values) > 0 {
		scheme, token, _ := strings.Cut(values[0], " ")
		if !strings.EqualFold(scheme, "Bearer") || token == "" {
			return caller{}, problemf(http.StatusUnauthorized, Unauthenticated, `header %s must be "Bearer <token>"`, fence.HeaderAuthorization)
		}
		bearer = token
	}
	who, err := g.Callers.Identify(ctx, bearer, r.certificate)
	if problem, ok := err.(unauthenticatedError); ok { //nolint:errorlint // it is never wrapped
		return caller{}, problemf(http.StatusUnauthorized, Unauthenticated, "%s", problem)
	} else if err != nil {
		return caller{}, undecided(err)
	}
	if allowed, err := g.Callers.May(ctx, who, c.lease); err != nil {
		return who, undecided(err)
	} else if !allowed {
		return who, problemf(http.StatusForbidden, NotAllowed, "[%s] %.64q may not use the lease; grant it the verb %s on the FencedLease, or name it in --allow where that is used", c.lease, who.user, fence.VerbUse)
	}
	return who, nil
}

// How long an answer of the API server on an account is believed.
const (
	reviewAge   = 10 * time.Second
	mostReviews = 4096
)

// accounts is Callers by certificates, by TokenReview and SubjectAccessReview,
// or by a list.
type accounts struct {
	// api reviews; nil where nothing does.
	api client.Writer
	// tokens accepts bearer tokens, meant for audience where it is not empty.
	tokens   bool
	audience string
	// allowed lists the leases of each user, "*" for all. Nil asks api.
	allowed map[string][]string

	identities, access *lru.LRUExpireCache
}

var _ Callers = (*accounts)(nil)

func newAccounts(api client.Writer, tokens bool, audience string, allowed map[string][]string, c clock.Clock) *accounts {
	return &accounts{
		api: api, tokens: tokens, audience: audience, allowed: allowed,
		identities: lru.NewLRUExpireCacheWithClock(mostReviews, c), access: lru.NewLRUExpireCacheWithClock(mostReviews, c),
	}
}

// Identify says who a caller is.
func (a *accounts) Identify(ctx context.Context, bearer string, certificate *x509.Certificate) (caller, error) {
	switch {
	case bearer != "" && a.tokens:
		return a.review(ctx, bearer)
	case bearer != "":
		return caller{}, unauthenticatedError("this gateway takes no bearer tokens; use a client certificate")
	case certificate != nil && certificate.Subject.CommonName == "":
		return caller{}, unauthenticatedError("the client certificate has no common name")
	case certificate != nil:
		return caller{user: certificate.Subject.CommonName, groups: certificate.Subject.Organization}, nil
	case a.tokens:
		return caller{}, unauthenticatedError("send " + fence.HeaderAuthorization + ": Bearer <service account token>")
	}
	return caller{}, unauthenticatedError("present a client certificate")
}

func (a *accounts) review(ctx context.Context, bearer string) (caller, error) {
	key := sha256.Sum256([]byte(bearer)) // the cache holds no secrets
	if known, ok := a.identities.Get(key); ok {
		if who, ok := known.(caller); ok {
			return who, nil
		}
	}
	review := &authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: bearer}}
	if a.audience != "" {
		review.Spec.Audiences = []string{a.audience}
	}
	ctx, cancel := context.WithTimeout(ctx, readLimit)
	defer cancel()
	if err := a.api.Create(ctx, review); err != nil {
		return caller{}, fmt.Errorf("review a bearer token: %w", err)
	}
	if !review.Status.Authenticated {
		return caller{}, unauthenticatedError("the bearer token is not valid here")
	}
	if a.audience != "" && !slices.Contains(review.Status.Audiences, a.audience) {
		return caller{}, unauthenticatedError("the bearer token is not meant for " + a.audience)
	}
	user := review.Status.User
	who := caller{user: user.Username, uid: user.UID, groups: user.Groups}
	if pods := user.Extra["authentication.kubernetes.io/pod-uid"]; len(pods) == 1 {
		who.podUID = pods[0]
	}
	a.identities.Add(key, who, reviewAge)
	return who, nil
}

// May tells whether a caller may use a lease.
func (a *accounts) May(ctx context.Context, who caller, lease types.NamespacedName) (bool, error) {
	if a.allowed != nil {
		leases := a.allowed[who.user]
		return slices.Contains(leases, "*") || slices.Contains(leases, lease.String()), nil
	}
	key := strings.Join(append([]string{lease.String(), who.user, who.uid}, who.groups...), "\x00")
	if known, ok := a.access.Get(key); ok {
		return known == true, nil
	}
	review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User: who.user, UID: who.uid, Groups: who.groups,
		ResourceAttributes: &authorizationv1.ResourceAttributes{
			Group: fence.Group, Resource: "fencedleases", Namespace: lease.Namespace, Name: lease.Name, Verb: fence.VerbUse,
		},
	}}
	ctx, cancel := context.WithTimeout(ctx, readLimit)
	defer cancel()
	if err := a.api.Create(ctx, review); err != nil {
		return false, fmt.Errorf("review access of %.64q: %w", who.user, err)
	}
	a.access.Add(key, review.Status.Allowed, reviewAge)
	return review.Status.Allowed, nil
}
