package operator

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/fencedlease/fencedlease/webhooks"
)

// Names of the parts of a certificate, in its Secret and in its folder.
const (
	authorityFile   = "ca.crt"
	certificateFile = "tls.crt"
	keyFile         = "tls.key"
)

// trustDelay is how long the API servers get to learn that they are to trust a
// new authority, before what it signed is served.
const trustDelay = 5 * time.Second

// certificateFiles writes the certificate of a Secret into files, on every
// replica: a mounted Secret would follow a minute later. What a new authority
// signed is served only once the API servers trust that authority, so that a
// rotation loses no request.
type certificateFiles struct {
	client client.Client
	secret types.NamespacedName
	dir    string
	clock  clock.PassiveClock

	// trusted is the authority of the Secret since the configuration has named
	// it, and since when.
	trusted []byte
	since   time.Time
}

func (c *certificateFiles) setup(mgr ctrl.Manager) error {
	if err := os.MkdirAll(c.dir, 0o700); err != nil {
		return fmt.Errorf("make the certificate folder: %w", err)
	}
	ours := predicate.NewPredicateFuncs(func(o client.Object) bool { return client.ObjectKeyFromObject(o) == c.secret })
	always := func(context.Context, client.Object) []reconcile.Request {
		return []reconcile.Request{{NamespacedName: c.secret}}
	}
	return ctrl.NewControllerManagedBy(mgr).Named("certificates").
		Watches(&admissionv1.ValidatingWebhookConfiguration{}, handler.EnqueueRequestsFromMapFunc(always)).
		Watches(&corev1.Secret{}, handler.EnqueueRequestsFromMapFunc(always), builder.WithPredicates(ours)).
		WithOptions(controller.Options{NeedLeaderElection: new(false)}). // every replica serves
		Complete(c)
}

// authority gives what signed the certificate of the Secret.
func (c *certificateFiles) authority(ctx context.Context) ([]byte, error) {
	secret := &corev1.Secret{}
	if err := c.client.Get(ctx, c.secret, secret); err != nil {
		return nil, fmt.Errorf("read the certificate's Secret: %w", err)
	}
	return secret.Data[authorityFile], nil
}

// Reconcile implements reconcile.Reconciler.
func (c *certificateFiles) Reconcile(ctx context.Context, _ ctrl.Request) (ctrl.Result, error) {
	secret := &corev1.Secret{}
	if err := c.client.Get(ctx, c.secret, secret); err != nil {
		return ctrl.Result{}, fmt.Errorf("read the certificate's Secret: %w", err)
	}
	for _, name := range []string{authorityFile, keyFile, certificateFile} {
		if len(secret.Data[name]) == 0 {
			return ctrl.Result{}, nil // not made yet
		}
	}
	wait, err := c.untilTrusted(ctx, secret.Data[authorityFile])
	if err != nil || wait > 0 {
		return ctrl.Result{RequeueAfter: wait}, err
	}
	return ctrl.Result{}, c.write(secret.Data)
}

// untilTrusted gives how long to go on serving the former certificate.
func (c *certificateFiles) untilTrusted(ctx context.Context, authority []byte) (time.Duration, error) {
	served, err := os.ReadFile(filepath.Join(c.dir, authorityFile))
	if os.IsNotExist(err) || bytes.Equal(served, authority) {
		return 0, nil // the first one, or a new one by the same authority
	} else if err != nil {
		return 0, err
	}
	configuration := &admissionv1.ValidatingWebhookConfiguration{}
	if err := c.client.Get(ctx, client.ObjectKey{Name: webhooks.ConfigurationName}, configuration); client.IgnoreNotFound(err) != nil {
		return 0, fmt.Errorf("read the webhook's configuration: %w", err)
	}
	for i := range configuration.Webhooks {
		if !bytes.Contains(configuration.Webhooks[i].ClientConfig.CABundle, bytes.TrimSpace(authority)) {
			return trustDelay, nil // its change is seen at once
		}
	}
	if !bytes.Equal(c.trusted, authority) {
		c.trusted, c.since = authority, c.clock.Now()
	}
	return max(0, trustDelay-c.clock.Since(c.since)), nil
}

// write puts each file into place whole. Between two of them a reader sees a
// pair that does not fit, and keeps the one that it has.
func (c *certificateFiles) write(data map[string][]byte) error {
	for _, name := range []string{keyFile, certificateFile, authorityFile} {
		file := filepath.Join(c.dir, name)
		if now, err := os.ReadFile(file); err == nil && bytes.Equal(now, data[name]) {
			continue
		}
		if err := os.WriteFile(file+".new", data[name], 0o600); err != nil {
			return err
		}
		if err := os.Rename(file+".new", file); err != nil {
			return err
		}
	}
	return nil
}
