package client

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	authenticationclient "k8s.io/client-go/kubernetes/typed/authentication/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/connrotation"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

// claims is what a claimant needs of the API server, in one namespace.
type claims interface {
	lease(ctx context.Context, name string) (*v1alpha1.FencedLease, error)
	self(ctx context.Context) (*authenticationv1.UserInfo, error)
	create(ctx context.Context, claim *v1alpha1.LeaseClaim) (*v1alpha1.LeaseClaim, error)
	get(ctx context.Context, name string) (*v1alpha1.LeaseClaim, error)
	patch(ctx context.Context, name string, body []byte) (*v1alpha1.LeaseClaim, error)
	delete(ctx context.Context, name string, uid types.UID) error
	watch(ctx context.Context, name, resourceVersion string) (watch.Interface, error)
	// reset drops every connection: a dead one would otherwise swallow one
	// renewal after the other until its keep-alive noticed.
	reset()
}

// fieldManager owns the fields of claims and the recorded token of objects.
const fieldManager = "fencedlease"

type restClaims struct {
	namespace string
	rest      *rest.RESTClient
	auth      *authenticationclient.AuthenticationV1Client
	http      *http.Client
	dialer    *connrotation.Dialer
}

func newClaims(cfg *rest.Config, namespace string) (*restClaims, error) {
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return nil, err
	}
	cfg = rest.CopyConfig(cfg)
	cfg.APIPath = "/apis"
	cfg.GroupVersion = &v1alpha1.GroupVersion
	cfg.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	cfg.ContentType, cfg.AcceptContentTypes = runtime.ContentTypeJSON, runtime.ContentTypeJSON
	// Renewals neither wait behind anything nor end by anybody else's limit.
	cfg.QPS, cfg.RateLimiter, cfg.Timeout = -1, nil, 0
	dial := cfg.Dial
	if dial == nil {
		dial = (&net.Dialer{Timeout: 10 * time.Second, KeepAlive: 10 * time.Second}).DialContext
	}
	dialer := connrotation.NewDialer(connrotation.DialFunc(dial))
	cfg.Dial = dialer.DialContext

	httpClient, err := rest.HTTPClientFor(cfg)
	if err != nil {
		return nil, fmt.Errorf("make a client for leases: %w", err)
	}
	c, err := rest.RESTClientForConfigAndClient(cfg, httpClient)
	if err != nil {
		return nil, fmt.Errorf("make a client for leases: %w", err)
	}
	auth, err := authenticationclient.NewForConfigAndClient(cfg, httpClient)
	if err != nil {
		return nil, fmt.Errorf("make a client for self reviews: %w", err)
	}
	return &restClaims{namespace: namespace, rest: c, auth: auth, http: httpClient, dialer: dialer}, nil
}

// callLimit bounds every call but the watch: whoever repeats a call does so on
// a new connection.
const callLimit = 10 * time.Second

// call sends one request under callLimit.
func (c *restClaims) call(ctx context.Context, do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	err := do(ctx)
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		c.reset()
	}
	return err
}

func (c *restClaims) do(ctx context.Context, request *rest.Request, out runtime.Object) error {
	return c.call(ctx, func(ctx context.Context) error { return request.Do(ctx).Into(out) })
}

func (c *restClaims) lease(ctx context.Context, name string) (*v1alpha1.FencedLease, error) {
	out := &v1alpha1.FencedLease{}
	return out, c.do(ctx, c.rest.Get().Namespace(c.namespace).Resource("fencedleases").Name(name), out)
}

func (c *restClaims) self(ctx context.Context) (*authenticationv1.UserInfo, error) {
	var who *authenticationv1.UserInfo
	err := c.call(ctx, func(ctx context.Context) error {
		review, err := c.auth.SelfSubjectReviews().Create(ctx, &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
		if err == nil {
			who = &review.Status.UserInfo
		}
		return err
	})
	return who, err
}

func (c *restClaims) create(ctx context.Context, claim *v1alpha1.LeaseClaim) (*v1alpha1.LeaseClaim, error) {
	out := &v1alpha1.LeaseClaim{}
	return out, c.do(ctx, c.rest.Post().Namespace(c.namespace).Resource("leaseclaims").
		Param("fieldManager", fieldManager).Body(claim), out)
}

func (c *restClaims) get(ctx context.Context, name string) (*v1alpha1.LeaseClaim, error) {
	out := &v1alpha1.LeaseClaim{}
	return out, c.do(ctx, c.rest.Get().Namespace(c.namespace).Resource("leaseclaims").Name(name), out)
}

func (c *restClaims) patch(ctx context.Context, name string, body []byte) (*v1alpha1.LeaseClaim, error) {
	out := &v1alpha1.LeaseClaim{}
	return out, c.do(ctx, c.rest.Patch(types.MergePatchType).Namespace(c.namespace).Resource("leaseclaims").Name(name).
		Param("fieldManager", fieldManager).Body(body), out)
}

func (c *restClaims) delete(ctx context.Context, name string, uid types.UID) error {
	return c.call(ctx, func(ctx context.Context) error {
		return c.rest.Delete().Namespace(c.namespace).Resource("leaseclaims").Name(name).
			Body(&metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid}}).Do(ctx).Error()
	})
}

func (c *restClaims) watch(ctx context.Context, name, resourceVersion string) (watch.Interface, error) {
	return c.rest.Get().Namespace(c.namespace).Resource("leaseclaims").
		Param("watch", "true").
		Param("fieldSelector", fields.OneTermEqualSelector("metadata.name", name).String()).
		Param("resourceVersion", resourceVersion).
		Watch(ctx)
}

func (c *restClaims) reset() {
	c.dialer.CloseAll()
	c.http.CloseIdleConnections()
}
