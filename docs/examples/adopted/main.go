// Adopted is an operator whose election on a Lease stays as it is. A
// FencedLease adopts that Lease, and only the writes change: they present the
// token that was issued for this leadership.
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
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/apimachinery/pkg/util/wait"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	coordinationclient "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	ctrl "sigs.k8s.io/controller-runtime"
	crclient "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/client"
	"github.com/fencedlease/fencedlease/fence"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, ctrl.GetConfigOrDie(), os.Getenv("POD_NAMESPACE"), os.Getenv("POD_NAME"))
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "adopted:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, cfg *rest.Config, namespace, name string) error {
	leases, err := coordinationclient.NewForConfig(cfg)
	if err != nil {
		return err
	}
	// Another process, or this one started again, never has the same identity.
	identity := name + "_" + string(uuid.NewUUID())
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: &resourcelock.LeaseLock{
			Client: leases, LeaseMeta: metav1.ObjectMeta{Namespace: namespace, Name: "legacy"},
			LockConfig: resourcelock.ResourceLockConfig{Identity: identity},
		},
		LeaseDuration: 15 * time.Second, RenewDeadline: 10 * time.Second, RetryPeriod: 2 * time.Second,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(ctx context.Context) { cancel(lead(ctx, cfg, namespace, identity)) },
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

func lead(ctx context.Context, cfg *rest.Config, namespace, identity string) error {
	holder, err := issued(ctx, cfg, namespace, "legacy", identity)
	if err != nil {
		return err
	}
	if cfg, err = client.Config(ctx, cfg, holder); err != nil {
		return err
	}
	c, err := crclient.New(cfg, crclient.Options{})
	if err != nil {
		return err
	}
	state := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "state"}}
	mine := fmt.Appendf(nil, `{"data":{"leader":%q}}`, identity)
	if err := c.Patch(ctx, state, crclient.RawPatch(types.MergePatchType, mine)); err != nil {
		return client.Outcome(err)
	}
	<-ctx.Done()
	return nil
}

// issued waits until the lease names identity as its holder, and gives the
// token of that acquisition. It is asked for once: a later token would belong
// to a later leadership.
func issued(ctx context.Context, cfg *rest.Config, namespace, name, identity string) (client.Holder, error) {
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		return nil, err
	}
	c, err := crclient.New(cfg, crclient.Options{Scheme: scheme})
	if err != nil {
		return nil, err
	}
	lease := &v1alpha1.FencedLease{}
	err = wait.PollUntilContextCancel(ctx, 100*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		err := c.Get(ctx, types.NamespacedName{Namespace: namespace, Name: name}, lease)
		return err == nil && lease.Status.Holder != nil && lease.Status.Holder.Identity == identity, err
	})
	return client.Static(namespace+"/"+name, fence.Token(lease.Status.Token)), err
}
