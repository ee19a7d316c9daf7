// Command memory measures what the operator takes as a process of its own with
// 500 leases held and 10,000 ConfigMaps guarded: its resident memory at its
// highest, and its share of a core while nothing happens. It fails where the
// operator takes more than 200 MiB, or 2 % of a core, or more than the chart's
// limit while fifty large objects are changed at once.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/prometheus/procfs"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/internal/controlplane"
	"github.com/fencedlease/fencedlease/test/env"
)

const (
	leases  = 500
	objects = 10_000
	// watched is how long the operator's share of a core is measured.
	watched = 30 * time.Second
	// renewEvery is how often each claim renews while renewals are measured.
	renewEvery = 5 * time.Second

	// largeOnes are objects of nearly the size that the API server stores.
	largeOnes = 50

	maxResident = 200 << 20
	maxLarge    = 256 << 20
	maxIdle     = 0.02 // of a core
)

func main() { os.Exit(run()) }

func run() int {
	if err := bench(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		return 1
	}
	return 0
}

func bench(ctx context.Context) (err error) {
	dir, err := os.MkdirTemp("", "bench-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	cp, err := controlplane.Start(ctx, controlplane.Options{Webhook: true, Policy: true})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, cp.Stop()) }()
	admin, err := client.New(cp.Config, client.Options{Scheme: env.Scheme()})
	if err != nil {
		return err
	}
	operator, err := start(ctx, cp, dir)
	if err != nil {
		return err
	}
	defer func() {
		err = errors.Join(err, operator.Process.Signal(syscall.SIGTERM))
		_ = operator.Wait()
	}()
	process, err := procfs.NewProc(operator.Process.Pid)
	if err != nil {
		return err
	}

	claims, err := hold(ctx, admin)
	if err != nil {
		return err
	}
	if err := guard(ctx, admin, claims); err != nil {
		return err
	}
	idle, err := share(ctx, process)
	if err != nil {
		return err
	}
	renewing, err := shareRenewing(ctx, process, admin, claims)
	if err != nil {
		return err
	}
	status, err := process.NewStatus()
	if err != nil {
		return err
	}
	if err := changeLarge(ctx, admin, claims[0]); err != nil {
		return err
	}
	large, err := process.NewStatus()
	if err != nil {
		return err
	}
	const mib = 1 << 20
	fmt.Printf("%d leases held, %d ConfigMaps guarded, the operator as a process of its own\n", leases, objects)
	fmt.Printf("resident now                    %5.0f MiB\n", float64(status.VmRSS)/mib)
	fmt.Printf("resident at its highest         %5.0f MiB  (at most %d)\n", float64(status.VmHWM)/mib, maxResident/mib)
	fmt.Printf("idle                            %5.2f %% of a core  (at most %.0f)\n", idle*100, maxIdle*100)
	fmt.Printf("each claim renewed every %-5v  %5.2f %% of a core\n", renewEvery, renewing*100)
	fmt.Printf("%d updates of 1 MB at once      %5.0f MiB at its highest  (at most %d, the chart's limit)\n", largeOnes, float64(large.VmHWM)/mib, maxLarge/mib)
	if large.VmHWM > maxLarge {
		return errors.New("large objects take too much memory")
	}
	if status.VmHWM > maxResident {
		return errors.New("the operator takes too much memory")
	}
	if idle > maxIdle {
		return errors.New("the operator is not idle")
	}
	return nil
}

// start builds the operator and runs it as its own account.
func start(ctx context.Context, cp *controlplane.ControlPlane, dir string) (*exec.Cmd, error) {
	program := filepath.Join(dir, "fencedlease")
	if out, err := exec.CommandContext(ctx, "go", "build", "-o", program, "./cmd/fencedlease").CombinedOutput(); err != nil {
		return nil, fmt.Errorf("build the operator: %w\n%s", err, out)
	}
	cfg, err := cp.Operator()
	if err != nil {
		return nil, err
	}
	data, err := controlplane.KubeConfig(cfg)
	if err != nil {
		return nil, err
	}
	kubeconfig := filepath.Join(dir, "kubeconfig")
	if err := os.WriteFile(kubeconfig, data, 0o600); err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, program, "manager", "--leader-elect", "--metrics-bind-address=0", "--health-probe-bind-address=0",
		"--certificates=files", "--webhook-cert-dir="+cp.Webhook.LocalServingCertDir,
		"--webhook-host="+cp.Webhook.LocalServingHost, "--webhook-port="+strconv.Itoa(cp.Webhook.LocalServingPort))
	cmd.Env = append(os.Environ(), "KUBECONFIG="+kubeconfig)
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		return nil, err
	}
	cmd.Stdout, cmd.Stderr = log, log
	return cmd, cmd.Start()
}

// hold makes the leases, each with a claim that holds it for a day.
func hold(ctx context.Context, c client.Client) ([]*v1alpha1.LeaseClaim, error) {
	claims := make([]*v1alpha1.LeaseClaim, leases)
	for i := range claims {
		m := metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: fmt.Sprintf("lease-%03d", i)}
		if err := c.Create(ctx, &v1alpha1.FencedLease{ObjectMeta: m, Spec: v1alpha1.FencedLeaseSpec{LeaseDurationSeconds: 86400}}); err != nil {
			return nil, err
		}
		claims[i] = &v1alpha1.LeaseClaim{ObjectMeta: m, Spec: v1alpha1.LeaseClaimSpec{LeaseName: m.Name}}
		if err := c.Create(ctx, claims[i]); err != nil {
			return nil, err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for _, claim := range claims {
		for !meta.IsStatusConditionTrue(claim.Status.Conditions, v1alpha1.LeaseClaimHeld) {
			select {
			case <-tick.C:
			case <-ctx.Done():
				return nil, fmt.Errorf("claim %s is not granted: %w", claim.Name, ctx.Err())
			}
			if err := c.Get(ctx, client.ObjectKeyFromObject(claim), claim); err != nil {
				return nil, err
			}
		}
	}
	return claims, nil
}

// guard makes the objects, each with the token of its lease: the webhook
// judges every one.
func guard(ctx context.Context, c client.Client, claims []*v1alpha1.LeaseClaim) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(8)
	for i := range objects {
		group.Go(func() error {
			claim := claims[i%len(claims)]
			return c.Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{
				Namespace: claim.Namespace, Name: fmt.Sprintf("guarded-%05d", i),
				Labels:      map[string]string{fence.LabelLease: claim.Name},
				Annotations: map[string]string{fence.AnnotationToken: fmt.Sprint(claim.Status.Token)},
			}, Data: map[string]string{"total": "1"}})
		})
	}
	return group.Wait()
}

// changeLarge changes large objects at once. Each change presents nothing, so
// the webhook reads both states of the object to see whether it changes
// anything, and refuses it. On few cores some take longer than the API server
// waits, and are refused for that.
func changeLarge(ctx context.Context, c client.Client, claim *v1alpha1.LeaseClaim) error {
	object := func(i int) *corev1.ConfigMap {
		return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{
			Namespace: claim.Namespace, Name: fmt.Sprintf("large-%02d", i), Labels: map[string]string{fence.LabelLease: claim.Name},
			Annotations: map[string]string{fence.AnnotationToken: fmt.Sprint(claim.Status.Token)},
		}, Data: map[string]string{"value": strings.Repeat("0123456789abcde\n", 60_000)}}
	}
	for i := range largeOnes {
		if err := c.Create(ctx, object(i)); err != nil {
			return err
		}
	}
	group, ctx := errgroup.WithContext(ctx)
	for i := range largeOnes {
		group.Go(func() error {
			err := c.Patch(ctx, object(i), client.RawPatch(types.MergePatchType, []byte(`{"data":{"more":"1"}}`)))
			if err == nil {
				return errors.New("a change that presents nothing passed")
			}
			return nil
		})
	}
	return group.Wait()
}

// share gives the process's share of a core from now on.
func share(ctx context.Context, process procfs.Proc) (float64, error) {
	begin, err := process.Stat()
	if err != nil {
		return 0, err
	}
	start := time.Now()
	select {
	case <-time.After(watched):
	case <-ctx.Done():
		return 0, ctx.Err()
	}
	end, err := process.Stat()
	if err != nil {
		return 0, err
	}
	return (end.CPUTime() - begin.CPUTime()) / time.Since(start).Seconds(), nil
}

// shareRenewing is share while every claim renews.
func shareRenewing(ctx context.Context, process procfs.Proc, c client.Client, claims []*v1alpha1.LeaseClaim) (float64, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	failed := make(chan error, 1)
	go func() {
		tick := time.NewTicker(renewEvery / leases)
		defer tick.Stop()
		for i := 0; ; i++ {
			body := fmt.Appendf(nil, `{"spec":{"renewTime":%q}}`, time.Now().UTC().Format(metav1.RFC3339Micro))
			claim := &v1alpha1.LeaseClaim{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: claims[i%leases].Name}}
			if err := c.Patch(ctx, claim, client.RawPatch(types.MergePatchType, body)); err != nil && ctx.Err() == nil {
				failed <- err
				return
			}
			select {
			case <-tick.C:
			case <-ctx.Done():
				return
			}
		}
	}()
	got, err := share(ctx, process)
	select {
	case e := <-failed:
		return 0, e
	default:
		return got, err
	}
}
