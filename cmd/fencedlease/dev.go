package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"

	"github.com/spf13/cobra"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/fencedlease/fencedlease/internal/controlplane"
	"github.com/fencedlease/fencedlease/internal/operator"
)

// devReady is what the control plane's keeper tells the dev command.
type devReady struct {
	KubeConfig, OperatorKubeConfig string
	WebhookHost                    string
	WebhookPort                    int
	CertDir                        string
}

func newDevCommand() *cobra.Command {
	var assets string
	var verbose bool
	cmd := &cobra.Command{
		Use:   "dev",
		Short: "Run an embedded control plane with the operator until interrupted",
		Long: "Starts a real etcd, kube-apiserver and kube-controller-manager on this machine, installs FencedLease and runs\n" +
			"the operator. Everything lives in one temporary folder and goes when the command ends, whatever way it ends.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runDev(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr(), assets, verbose)
		},
	}
	cmd.Flags().StringVar(&assets, "assets", "", "folder of etcd, kube-apiserver, kube-controller-manager and kubectl (default: KUBEBUILDER_ASSETS, else bin/k8s/<version>)")
	cmd.Flags().BoolVar(&verbose, "control-plane-logs", false, "print what the control plane's programs log")
	setLogger(cmd)
	return cmd
}

// runDev keeps the control plane in a child that ends, and removes the folder,
// when its standard input closes: that happens even if this process is killed.
func runDev(ctx context.Context, out, errOut io.Writer, assets string, verbose bool) (err error) {
	if assets == "" {
		if assets, err = controlplane.Assets(); err != nil {
			return err
		}
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "fencedlease-dev-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()

	keeper := exec.Command(self, "dev-control-plane", "--assets="+assets, "--dir="+dir, fmt.Sprintf("--control-plane-logs=%t", verbose)) //nolint:noctx // ends with its standard input
	keeper.Env = append(os.Environ(), "TMPDIR="+dir)
	keeper.Stderr = errOut
	// An interrupt of the terminal must reach the operator first.
	keeper.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	lifeline, err := keeper.StdinPipe()
	if err != nil {
		return err
	}
	answers, err := keeper.StdoutPipe()
	if err != nil {
		return err
	}
	fmt.Fprintln(errOut, "Starting etcd, kube-apiserver and kube-controller-manager ...")
	if err := keeper.Start(); err != nil {
		return err
	}
	gone := make(chan error, 1)
	ready := make(chan devReady, 1)
	go func() {
		line, _ := bufio.NewReader(answers).ReadBytes('\n')
		var r devReady
		if json.Unmarshal(line, &r) == nil {
			ready <- r
		}
		_, _ = io.Copy(io.Discard, answers)
		gone <- keeper.Wait()
	}()
	ended := false
	defer func() {
		if ended {
			// It did not clean up itself: its children carry the folder's name
			// on their command lines.
			_ = exec.Command("pkill", "-KILL", "-f", dir).Run() //nolint:noctx // last resort at the end
			return
		}
		err = errors.Join(err, lifeline.Close(), <-gone)
	}()

	var r devReady
	select {
	case r = <-ready:
	case e := <-gone:
		ended = true
		return fmt.Errorf("the control plane did not start: %w", e)
	case <-ctx.Done():
		return nil
	}
	cfg, err := clientcmd.BuildConfigFromFlags("", r.OperatorKubeConfig)
	if err != nil {
		return err
	}
	options := operator.Defaults()
	options.Namespace = controlplane.OperatorNamespace
	options.MetricsAddress, options.ProbeAddress = "0", "0"
	options.WebhookHost, options.WebhookPort = r.WebhookHost, r.WebhookPort
	options.Certificates, options.CertDir = operator.CertificatesFiles, r.CertDir

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- operator.Run(ctx, cfg, options) }()
	fmt.Fprintf(out, "Ready. In another terminal:\n\n  export KUBECONFIG=%s\n  export PATH=%s:$PATH\n\nInterrupt (Ctrl-C) to stop; nothing stays behind.\n", r.KubeConfig, assets)
	select {
	case err := <-done:
		return err
	case e := <-gone:
		ended = true
		cancel()
		<-done
		return fmt.Errorf("the control plane ended by itself: %w", errors.Join(e, errors.New("see --control-plane-logs")))
	}
}

// newControlPlaneCommand is the child of dev that keeps the control plane.
func newControlPlaneCommand() *cobra.Command {
	var assets, dir string
	var verbose bool
	cmd := &cobra.Command{
		Use:    "dev-control-plane",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			// The context ends with an interrupt; only the lifeline counts here.
			return keepControlPlane(context.WithoutCancel(cmd.Context()), cmd.InOrStdin(), cmd.OutOrStdout(), assets, dir, verbose)
		},
	}
	cmd.Flags().StringVar(&assets, "assets", "", "folder of the programs")
	cmd.Flags().StringVar(&dir, "dir", "", "folder for everything")
	cmd.Flags().BoolVar(&verbose, "control-plane-logs", false, "print logs")
	setLogger(cmd)
	return cmd
}

func keepControlPlane(ctx context.Context, lifeline io.Reader, out io.Writer, assets, dir string, verbose bool) (err error) {
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	opts := controlplane.Options{Assets: assets, Webhook: true, Policy: true}
	if _, err := os.Stat(filepath.Join(assets, "kube-controller-manager")); err == nil {
		opts.ControllerManager = true
	}
	if verbose {
		opts.Log = os.Stderr
	}
	cp, err := controlplane.Start(ctx, opts)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, cp.Stop()) }()
	r := devReady{
		KubeConfig: filepath.Join(dir, "kubeconfig"), OperatorKubeConfig: filepath.Join(dir, "operator.kubeconfig"),
		WebhookHost: cp.Webhook.LocalServingHost, WebhookPort: cp.Webhook.LocalServingPort, CertDir: cp.Webhook.LocalServingCertDir,
	}
	operatorConfig, err := cp.Operator()
	if err != nil {
		return err
	}
	operatorKubeConfig, err := controlplane.KubeConfig(operatorConfig)
	if err != nil {
		return err
	}
	for file, data := range map[string][]byte{r.KubeConfig: cp.KubeConfig, r.OperatorKubeConfig: operatorKubeConfig} {
		if err := os.WriteFile(file, data, 0o600); err != nil {
			return err
		}
	}
	if err := json.NewEncoder(out).Encode(r); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, lifeline)
	return err
}
