package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
)

// execute runs the command line and gives the exit code: 0 done, 1 failed.
func execute() int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := newRootCommand().ExecuteContext(ctx); err != nil && !errors.Is(err, context.Canceled) {
		fmt.Fprintln(os.Stderr, "fencedlease:", err)
		return 1
	}
	return 0
}

func newRootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:           "fencedlease",
		Short:         "Fencing tokens for Kubernetes leases, and the fences that check them",
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.AddCommand(newManagerCommand(), newDevCommand(), newControlPlaneCommand(), newSQLCommand(), newGatewayCommand(), newUninstallCommand())
	return root
}

// setLogger binds the flags of the one logger to a command and sets it up
// before the command runs.
func setLogger(cmd *cobra.Command) {
	var options zap.Options
	flags := flag.NewFlagSet("", flag.ContinueOnError)
	options.BindFlags(flags)
	cmd.Flags().AddGoFlagSet(flags)
	cmd.PreRun = func(*cobra.Command, []string) {
		logger := zap.New(zap.UseFlagOptions(&options))
		ctrl.SetLogger(logger)
		klog.SetLogger(logger)
	}
}
