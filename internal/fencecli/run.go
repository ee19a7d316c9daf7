package fencecli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/client"
)

type runOptions struct {
	*cli
	claimFlags
	grace   time.Duration
	proxy   bool
	lease   types.NamespacedName
	command []string
}

func newRun(c *cli) *cobra.Command {
	o := &runOptions{cli: c}
	cmd := &cobra.Command{
		Use:   "run [NAMESPACE/]LEASE -- COMMAND [ARGUMENT...]",
		Short: "Run a command while holding a lease",
		Long: "Acquires the lease, runs the command with " + envLease + " and " + envToken + " set, renews meanwhile, releases when the\n" +
			"command has ended, and ends with its exit code. The command runs in a process group of its own and is given the\n" +
			"signals that this command gets. When the lease is lost, and for whatever the command leaves running behind it,\n" +
			"the group is sent SIGTERM and, after the grace period, SIGKILL: nothing in the group outlives the lease.",
		Example: "  kubectl fence run deploy -- ./deploy.sh\n" +
			"  kubectl fence run deploy --wait=10m --identity=\"$CI_JOB_URL\" -- kubectl fence apply -f app.yaml\n" +
			"  kubectl fence run deploy --proxy -- helm upgrade --install app ./chart",
		Args: func(cmd *cobra.Command, args []string) error {
			if cmd.ArgsLenAtDash() != 1 || len(args) < 2 {
				return errors.New("must be LEASE -- COMMAND [ARGUMENT...]")
			}
			return nil
		},
		ValidArgsFunction: c.completeLease,
		RunE:              run(o),
	}
	o.addClaim(cmd.Flags())
	cmd.Flags().BoolVar(&o.proxy, "proxy", false, "give the command a KUBECONFIG whose API server presents the token on all that is\nwritten there: the command needs to know nothing of tokens")
	cmd.Flags().DurationVar(&o.grace, "grace", 0, "time from SIGTERM to SIGKILL (default: a fifth of the lease duration, so that\nthe command is gone before the lease can lapse)")
	return cmd
}

func (o *runOptions) Complete(_ *cobra.Command, args []string) (err error) {
	o.command = args[1:]
	o.lease, err = o.leaseKey(args[0])
	return err
}

func (o *runOptions) Validate() error {
	if o.grace < 0 {
		return fmt.Errorf("--grace=%s: must not be negative", o.grace)
	}
	return o.validClaim()
}

func (o *runOptions) Run(ctx context.Context) error {
	// A command that cannot run is no reason to hold the lease.
	if _, err := exec.LookPath(o.command[0]); err != nil {
		return startError(err)
	}
	cfg, api, err := o.connect()
	if err != nil {
		return err
	}
	l, err := lease(ctx, api, o.lease)
	if err != nil {
		return err
	}
	if o.grace == 0 {
		o.grace = graceOf(l)
	}
	held, err := o.acquire(ctx, o.cli, cfg, o.lease)
	if err != nil {
		return err
	}
	err = o.supervise(ctx, cfg, held)
	o.release(ctx, held)
	return err
}

// release gives the lease up. Where that fails it lapses by itself, so that
// the command's own exit code still counts.
func (c *cli) release(ctx context.Context, held *client.Held) {
	const limit = 10 * time.Second
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), limit)
	defer cancel()
	if err := held.Release(ctx); err != nil {
		fmt.Fprintf(c.ErrOut, "warning: %v; the lease lapses by itself\n", err)
	}
}

// graceOf is how long a lost lease is still safe from being granted again: a
// Held stops a fifth of the duration before it can lapse.
func graceOf(l *v1alpha1.FencedLease) time.Duration {
	seconds := l.Spec.LeaseDurationSeconds
	if seconds <= 0 {
		seconds = v1alpha1.DefaultLeaseDurationSeconds
	}
	return time.Duration(seconds) * time.Second / 5
}

// supervise runs the command until it ends or the lease is lost. When it
// returns, the command's process group is gone.
func (o *runOptions) supervise(ctx context.Context, cfg *rest.Config, held *client.Held) error {
	// A signal before this line has ended ctx; later ones are the command's.
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, forwarded...)
	defer signal.Stop(signals)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	token, err := held.Present()
	if err != nil {
		return err
	}
	cmd := exec.Command(o.command[0], o.command[1:]...) //nolint:noctx // ended by signals to its group, not killed alone
	cmd.Stdin, cmd.Stdout, cmd.Stderr = o.In, o.Out, o.ErrOut
	cmd.Env = append(os.Environ(), envLease+"="+held.Lease(), envToken+"="+token.String())
	if o.proxy {
		namespace, err := o.namespace()
		if err != nil {
			return err
		}
		// It outlives ctx: the command may have to write to wind up.
		proxy, err := startProxy(context.WithoutCancel(ctx), cfg, held, namespace)
		if err != nil {
			return err
		}
		defer proxy.stop()
		// Terraform's provider has a name of its own for the same.
		cmd.Env = append(cmd.Env, "KUBECONFIG="+proxy.kubeconfig, "KUBE_CONFIG_PATH="+proxy.kubeconfig)
	}
	group, err := startGroup(cmd, o.clock)
	if err != nil {
		return startError(err)
	}
	defer group.end(o.grace)
	for {
		select {
		case sig := <-signals:
			group.signal(sig.(syscall.Signal))
		case <-held.Done():
			fmt.Fprintf(o.ErrOut, "%v; stopping the command\n", held.Err())
			return codeError{errors.New(""), exitLost}
		case err := <-group.exited:
			return commandError(err)
		}
	}
}

// commandError turns how a command ended into the exit code of a shell.
func commandError(err error) error {
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		return err
	}
	code := exit.ExitCode()
	if status, ok := exit.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		code = exitSignal + int(status.Signal())
	}
	return codeError{errors.New(""), code}
}

// startError gives a command that did not start the shell's exit codes.
func startError(err error) error {
	code := exitNotExecutable
	if errors.Is(err, exec.ErrNotFound) || errors.Is(err, fs.ErrNotExist) {
		code = exitNotFound
	}
	return codeError{err, code}
}
