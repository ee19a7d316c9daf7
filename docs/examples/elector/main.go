// Elector is an operator on client-go alone: an elector on a FencedLease, and a
// clientset whose writes present the token of this very leadership. As leader
// it keeps, for the ConfigMap "settings", a second one up to date.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/leaderelection"

	"github.com/fencedlease/fencedlease/client"
	"github.com/fencedlease/fencedlease/fence"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	cfg, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(clientcmd.NewDefaultClientConfigLoadingRules(), nil).ClientConfig()
	if err == nil {
		err = run(ctx, cfg, os.Getenv("POD_NAMESPACE"), os.Getenv("POD_NAME"))
	}
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "elector:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, cfg *rest.Config, namespace, name string) error {
	lock := client.NewLock(cfg, namespace, "settings", client.WithIdentity(name))
	cfg, err := client.Config(ctx, cfg, lock)
	if err != nil {
		return err
	}
	kube, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock:          lock,
		LeaseDuration: 15 * time.Second, RenewDeadline: 10 * time.Second, RetryPeriod: 2 * time.Second,
		ReleaseOnCancel: true,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(ctx context.Context) { cancel(lead(ctx, kube, lock, namespace)) },
			OnStoppedLeading: func() {},
		},
	})
	if err != nil {
		return err
	}
	elector.Run(ctx)
	if err := context.Cause(ctx); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// lead works until ctx ends or another leads.
func lead(ctx context.Context, kube kubernetes.Interface, lock *client.Lock, namespace string) error {
	for {
		err := client.Outcome(copySettings(ctx, kube, lock, namespace))
		switch {
		case errors.Is(err, fence.ErrStale):
			return err // a newer leader writes here: this work is over
		case errors.Is(err, fence.ErrLost):
			return err // nothing was sent: this process knows that it does not lead
		case errors.Is(err, fence.ErrOutcomeUnknown):
			// It may be committed, or not. This one can simply be sent again.
		case err != nil:
			fmt.Fprintln(os.Stderr, "elector: tries again:", err)
		}
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
			return nil
		}
	}
}

func copySettings(ctx context.Context, kube kubernetes.Interface, lock *client.Lock, namespace string) error {
	maps := kube.CoreV1().ConfigMaps(namespace)
	settings, err := maps.Get(ctx, "settings", metav1.GetOptions{})
	if err != nil {
		return err
	}
	child := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "settings-copy", Namespace: namespace}, Data: settings.Data}
	if err := client.Guard(child, lock.Lease()); err != nil {
		return err
	}
	_, err = maps.Update(ctx, child, metav1.UpdateOptions{})
	if apierrors.IsNotFound(err) {
		_, err = maps.Create(ctx, child, metav1.CreateOptions{})
	}
	return err
}
