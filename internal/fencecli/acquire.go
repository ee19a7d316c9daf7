package fencecli

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/client-go/rest"
	crclient "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/client"
	"github.com/fencedlease/fencedlease/fence"
)

// The environment that run gives its command, that acquire --export prints,
// and that the stamping commands read.
const (
	envLease = "FENCING_LEASE"
	envToken = "FENCING_TOKEN"
)

// claimFlags say how to claim a lease.
type claimFlags struct {
	identity string
	try      bool
	wait     time.Duration
	priority int32
	pod      string
	podUID   string
}

func (f *claimFlags) addClaim(flags *pflag.FlagSet) {
	flags.StringVar(&f.identity, "identity", "", "who holds, for people (default: the host's name)")
	flags.BoolVar(&f.try, "try", false, "do not wait where another claim holds the lease")
	flags.DurationVar(&f.wait, "wait", 0, "wait in the queue for at most this long (default: without limit)")
	flags.Int32Var(&f.priority, "priority", 0, "go before waiting claims of a lower priority, up to the lease's maxPriority")
	flags.StringVar(&f.pod, "pod-name", "", "Pod, in the lease's namespace, whose end releases the lease")
	flags.StringVar(&f.podUID, "pod-uid", "", "that Pod's UID")
}

func (f *claimFlags) validClaim() error {
	switch {
	case f.wait < 0:
		return fmt.Errorf("--wait=%s: must not be negative", f.wait)
	case f.try && f.wait > 0:
		return errors.New("--try and --wait exclude each other")
	case (f.pod == "") != (f.podUID == ""):
		return errors.New("--pod-name and --pod-uid need each other")
	case f.priority < 0:
		return fmt.Errorf("--priority=%d: must not be negative", f.priority)
	}
	return nil
}

func (f *claimFlags) options(c *cli) []client.Option {
	opts := []client.Option{client.WithClock(c.clock), client.WithPriority(f.priority)}
	if f.identity != "" {
		opts = append(opts, client.WithIdentity(f.identity))
	}
	if f.try {
		opts = append(opts, client.WithTry())
	}
	if f.pod != "" {
		opts = append(opts, client.WithOwnerPod(f.pod, types.UID(f.podUID)))
	}
	if f.wait > 0 {
		opts = append(opts, client.WithWait(f.wait))
	}
	return opts
}

// acquire waits for the lease.
func (f *claimFlags) acquire(ctx context.Context, c *cli, cfg *rest.Config, key types.NamespacedName) (*client.Held, error) {
	return client.Acquire(ctx, cfg, key.Namespace, key.Name, f.options(c)...)
}

type acquireOptions struct {
	*cli
	claimFlags
	output *genericclioptions.PrintFlags
	export bool
	lease  types.NamespacedName
}

func newAcquire(c *cli) *cobra.Command {
	o := &acquireOptions{cli: c, output: printFlags()}
	cmd := &cobra.Command{
		Use:   "acquire [NAMESPACE/]LEASE",
		Short: "Acquire a lease and leave it held, for a pipeline of several steps",
		Long: "Waits in the queue until the lease is granted, prints the token and ends. Nobody renews the claim from then\n" +
			"on: it lapses one lease duration after, unless it is released before. Use run where one command does the work.",
		Example:           "  eval \"$(kubectl fence acquire deploy --wait=10m --export)\"\n  kubectl fence acquire deploy -o jsonpath='{.status.token}'",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: c.completeLease,
		RunE:              run(o),
	}
	o.addClaim(cmd.Flags())
	o.output.AddFlags(cmd)
	cmd.Flags().BoolVar(&o.export, "export", false, "print "+envLease+" and "+envToken+" as shell exports")
	return cmd
}

func (o *acquireOptions) Complete(_ *cobra.Command, args []string) (err error) {
	o.lease, err = o.leaseKey(args[0])
	return err
}

func (o *acquireOptions) Validate() error {
	if o.export && *o.output.OutputFormat != "" {
		return errors.New("--export and --output exclude each other")
	}
	return errors.Join(o.validClaim(), validOutput(o.output))
}

func (o *acquireOptions) Run(ctx context.Context) error {
	cfg, api, err := o.connect()
	if err != nil {
		return err
	}
	held, err := o.acquire(ctx, o.cli, cfg, o.lease)
	if err != nil {
		return err
	}
	if err := o.tell(ctx, api, held); err != nil {
		return errors.Join(err, held.Release(context.WithoutCancel(ctx)))
	}
	return nil
}

func (o *acquireOptions) tell(ctx context.Context, api crclient.Client, held *client.Held) error {
	token, err := held.Present()
	switch {
	case err != nil:
		return err
	case o.export:
		_, err = fmt.Fprintf(o.Out, "export %s=%s %s=%s\n", envLease, held.Lease(), envToken, token)
		return err
	case *o.output.OutputFormat == "":
		_, err = fmt.Fprintf(o.Out, "[%s] acquired with token %s, by claim %s\n", held.Lease(), token, held.Claim())
		return err
	}
	claim := &v1alpha1.LeaseClaim{}
	if err := api.Get(ctx, types.NamespacedName{Namespace: o.lease.Namespace, Name: held.Claim()}, claim); err != nil {
		return fmt.Errorf("read the claim %s: %w", held.Claim(), err)
	}
	return o.print(o.output, claim)
}

type releaseOptions struct {
	*cli
	stampFlags
}

func newRelease(c *cli) *cobra.Command {
	o := &releaseOptions{cli: c}
	cmd := &cobra.Command{
		Use:   "release [NAMESPACE/]LEASE",
		Short: "Release a lease that is held with a given token",
		Long: "Deletes the claim that holds the lease with the token, and nothing else: where a newer token was issued the\n" +
			"lease stays with its holder, and the command ends with code 3. A lease released before is no error.",
		Example:           "  kubectl fence release deploy --fencing-token=42",
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: c.completeLease,
		RunE:              run(o),
	}
	o.addToken(cmd.Flags())
	return cmd
}

func (o *releaseOptions) Complete(_ *cobra.Command, args []string) (err error) {
	if len(args) == 1 {
		o.lease = args[0]
	}
	return o.complete(o.cli)
}

func (o *releaseOptions) Validate() error { return nil }

func (o *releaseOptions) Run(ctx context.Context) error {
	_, api, err := o.connect()
	if err != nil {
		return err
	}
	l, err := lease(ctx, api, o.key)
	if err != nil {
		return err
	}
	switch holder, current := l.Status.Holder, fence.Token(l.Status.Token); {
	case o.token < current:
		by := "nobody"
		if holder != nil {
			by = holder.Identity
		}
		return fmt.Errorf("%w: [%s] token %s: current %s, held by %q; nothing was released", fence.ErrStale, o.key, o.token, current, by)
	case o.token > current:
		return usagef("[%s] token %s was never issued; current %s", o.key, o.token, current)
	case holder == nil:
		fmt.Fprintf(o.Out, "[%s] token %s was released before\n", o.key, o.token)
		return nil
	case holder.ClaimName == "":
		return usagef("[%s] adopts a Lease of its holder's: stop that program, or revoke the token", o.key)
	default:
		claim := &v1alpha1.LeaseClaim{}
		claim.Namespace, claim.Name = l.Namespace, holder.ClaimName
		uid := types.UID(holder.ClaimUID)
		if err := api.Delete(ctx, claim, crclient.Preconditions{UID: &uid}); crclient.IgnoreNotFound(err) != nil {
			return fmt.Errorf("release [%s]: %w", o.key, err)
		}
		fmt.Fprintf(o.Out, "[%s] token %s released\n", o.key, o.token)
		return nil
	}
}
