package operator

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"
	ctrl "sigs.k8s.io/controller-runtime"
	logf "sigs.k8s.io/controller-runtime/pkg/log"
)

// certificateFiles writes the certificate of a Secret into files as soon as it
// changes, on every replica: a mounted Secret would follow a minute later.
type certificateFiles struct {
	mgr    ctrl.Manager
	secret types.NamespacedName
	dir    string
}

// NeedLeaderElection tells that every replica serves.
func (certificateFiles) NeedLeaderElection() bool { return false }

// Start follows the Secret until ctx ends.
func (c certificateFiles) Start(ctx context.Context) error {
	if err := os.MkdirAll(c.dir, 0o700); err != nil {
		return fmt.Errorf("make the certificate folder: %w", err)
	}
	informer, err := c.mgr.GetCache().GetInformer(ctx, &corev1.Secret{})
	if err != nil {
		return fmt.Errorf("watch the certificate's Secret: %w", err)
	}
	write := func(o any) {
		secret, ok := o.(*corev1.Secret)
		if !ok || secret.Namespace != c.secret.Namespace || secret.Name != c.secret.Name {
			return
		}
		if err := c.write(secret.Data); err != nil {
			logf.FromContext(ctx).Error(err, "Failed to write the webhook's certificate")
		}
	}
	registration, err := informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
		AddFunc: write, UpdateFunc: func(_, o any) { write(o) },
	})
	if err != nil {
		return fmt.Errorf("watch the certificate's Secret: %w", err)
	}
	<-ctx.Done()
	return informer.RemoveEventHandler(registration)
}

// write puts each file into place whole. Between the two a reader sees a pair
// that does not fit, and keeps the one it has.
func (c certificateFiles) write(data map[string][]byte) error {
	for _, name := range []string{"ca.crt", "tls.key", "tls.crt"} {
		content, ok := data[name]
		if !ok {
			return nil // not made yet
		}
		file := filepath.Join(c.dir, name)
		if err := os.WriteFile(file+".new", content, 0o600); err != nil {
			return err
		}
		if err := os.Rename(file+".new", file); err != nil {
			return err
		}
	}
	return nil
}
