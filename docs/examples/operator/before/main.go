// Clocks is an operator that writes the time into each ConfigMap with the
// label clock. Of its replicas only the leader should.
package main

import (
	"context"
	"fmt"
	"os"
	"time"

	corev1 "k8s.io/api/core/v1"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
)

func main() {
	ctrl.SetLogger(zap.New())
	if err := run(ctrl.SetupSignalHandler(), os.Getenv("POD_NAMESPACE"), os.Getenv("POD_NAME")); err != nil {
		fmt.Fprintln(os.Stderr, "clocks:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, namespace, name string) error {
	cfg := ctrl.GetConfigOrDie()
	mgr, err := ctrl.NewManager(cfg, ctrl.Options{
		LeaderElection:                true,
		LeaderElectionReleaseOnCancel: true,
		LeaseDuration:                 new(3 * time.Second),
		RenewDeadline:                 new(2 * time.Second),
		RetryPeriod:                   new(500 * time.Millisecond),
		Metrics:                       metricsserver.Options{BindAddress: "0"},

		LeaderElectionID:        "clocks",
		LeaderElectionNamespace: namespace,
	})
	if err != nil {
		return err
	}
	c := &clocks{client: mgr.GetClient(), name: name}
	if err := ctrl.NewControllerManagedBy(mgr).For(&corev1.ConfigMap{}).Complete(c); err != nil {
		return err
	}
	return mgr.Start(ctx)
}

type clocks struct {
	client client.Client
	name   string
}

func (c *clocks) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	var clock corev1.ConfigMap
	if err := c.client.Get(ctx, request.NamespacedName, &clock); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if _, ok := clock.Labels["clock"]; !ok {
		return ctrl.Result{}, nil
	}
	show := corev1ac.ConfigMap(clock.Name, clock.Namespace).
		WithData(map[string]string{"time": time.Now().Format(time.StampMilli), "by": c.name})
	err := c.client.Apply(ctx, show, client.FieldOwner("clocks"), client.ForceOwnership)
	return ctrl.Result{RequeueAfter: 20 * time.Millisecond}, err
}
