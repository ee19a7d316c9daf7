// Package fencecli is the kubectl plugin: commands to watch over leases, to
// hold one for a shell script or a pipeline, and to stamp what it writes.
//
// Whatever a command reports of a lease was true when it asked. That an older
// write cannot follow a newer one is the fence's guarantee; the plugin only
// carries the token to it.
package fencecli

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/cli-runtime/pkg/printers"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	crclient "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

// Execute runs one command line and gives the exit code.
func Execute(args []string, streams genericiooptions.IOStreams, clock clock.WithTicker) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	root := newCommand(streams, clock)
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err != nil && err.Error() != "" {
		fmt.Fprintln(streams.ErrOut, "error:", err)
	}
	return exitCode(err)
}

// cli is what every command has.
type cli struct {
	genericiooptions.IOStreams
	config *genericclioptions.ConfigFlags
	clock  clock.WithTicker
}

// options are one command's: Complete reads arguments and the environment,
// Validate finds mistakes without asking the API server, Run does the work.
type options interface {
	Complete(cmd *cobra.Command, args []string) error
	Validate() error
	Run(ctx context.Context) error
}

// run is a command's RunE.
func run(o options) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		if err := o.Complete(cmd, args); err != nil {
			return err
		}
		if err := o.Validate(); err != nil {
			return usageError{err}
		}
		return o.Run(cmd.Context())
	}
}

func newCommand(streams genericiooptions.IOStreams, clock clock.WithTicker) *cobra.Command {
	// One command's requests are bounded by the server's own fairness; the
	// client's default of 5 a second is for controllers.
	const qps, burst = 50, 300
	config := genericclioptions.NewConfigFlags(true).WithDiscoveryQPS(qps).WithDiscoveryBurst(burst).
		WithWrapConfigFn(func(cfg *rest.Config) *rest.Config {
			cfg.QPS, cfg.Burst = qps, burst
			// As kubectl prints what the server warns of: a bypass, say.
			cfg.WarningHandler = rest.NewWarningWriter(streams.ErrOut, rest.WarningWriterOptions{Deduplicate: true})
			return cfg
		})
	c := &cli{IOStreams: streams, config: config, clock: clock}
	root := &cobra.Command{
		Use:           "kubectl-fence",
		Short:         "Hold fenced leases and stamp writes with their tokens",
		Annotations:   map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl fence"},
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          cobra.NoArgs,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetIn(streams.In)
	root.SetOut(streams.Out)
	root.SetErr(streams.ErrOut)
	c.config.AddFlags(root.PersistentFlags())
	root.AddCommand(newList(c), newDescribe(c), newAcquire(c), newRelease(c), newRun(c), newHold(c), newWatch(c),
		newApply(c), newStamp(c), newDelete(c), newScale(c),
		newGuard(c), newUnguard(c), newExplain(c), newVerify(c), newRevoke(c), newRBAC(c))
	for _, cmd := range append(root.Commands(), root) {
		markUsage(cmd)
	}
	return root
}

// markUsage turns cobra's complaints into usage errors.
func markUsage(cmd *cobra.Command) {
	cmd.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return usagef("%w; see %s --help", err, cmd.CommandPath())
	})
	check := cmd.Args
	if check == nil {
		return
	}
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		if err := check(cmd, args); err != nil {
			return usagef("%w; see %s --help", err, cmd.CommandPath())
		}
		return nil
	}
}

// scheme knows the built-in kinds and ours.
func scheme() *runtime.Scheme {
	s := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, v1alpha1.AddToScheme} {
		if err := add(s); err != nil {
			panic(err) // two kinds under one name: a mistake of the build
		}
	}
	return s
}

// connect gives the configuration of the API server and a client of it.
func (c *cli) connect() (*rest.Config, crclient.WithWatch, error) {
	cfg, err := c.config.ToRESTConfig()
	if err != nil {
		return nil, nil, err
	}
	api, err := crclient.NewWithWatch(cfg, crclient.Options{Scheme: scheme()})
	if err != nil {
		return nil, nil, fmt.Errorf("reach the API server: %w", err)
	}
	return cfg, api, nil
}

// namespace is the one that -n, or else the kubeconfig's context, names.
func (c *cli) namespace() (string, error) {
	namespace, _, err := c.config.ToRawKubeConfigLoader().Namespace()
	return namespace, err
}

// leaseKey reads "[namespace/]name".
func (c *cli) leaseKey(arg string) (types.NamespacedName, error) {
	namespace, name, found := strings.Cut(arg, "/")
	if !found {
		name = arg
		var err error
		if namespace, err = c.namespace(); err != nil {
			return types.NamespacedName{}, err
		}
	}
	for _, part := range []string{namespace, name} {
		if problems := validation.IsDNS1123Subdomain(part); len(problems) > 0 {
			return types.NamespacedName{}, usagef("lease %q: must be [namespace/]name: %s", arg, problems[0])
		}
	}
	return types.NamespacedName{Namespace: namespace, Name: name}, nil
}

// lease reads a lease.
func lease(ctx context.Context, api crclient.Client, key types.NamespacedName) (*v1alpha1.FencedLease, error) {
	out := &v1alpha1.FencedLease{}
	if err := api.Get(ctx, key, out); err != nil {
		return nil, fmt.Errorf("read lease [%s]: %w", key, err)
	}
	return out, nil
}

// completeLease offers the leases of the namespace as the first argument.
func (c *cli) completeLease(cmd *cobra.Command, args []string, toComplete string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	namespace, name, qualified := strings.Cut(toComplete, "/")
	if !qualified {
		name = toComplete
		var err error
		if namespace, err = c.namespace(); err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
	}
	_, api, err := c.connect()
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	leases := &v1alpha1.FencedLeaseList{}
	if err := api.List(cmd.Context(), leases, crclient.InNamespace(namespace)); err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	var found []string
	for _, l := range leases.Items {
		if !strings.HasPrefix(l.Name, name) {
			continue
		}
		if qualified {
			found = append(found, l.Namespace+"/"+l.Name)
		} else {
			found = append(found, l.Name)
		}
	}
	return found, cobra.ShellCompDirectiveNoFileComp
}

// printFlags are -o and its kin.
func printFlags() *genericclioptions.PrintFlags {
	return genericclioptions.NewPrintFlags("").WithTypeSetter(scheme())
}

// print writes objects as -o says, one after the other.
func (c *cli) print(flags *genericclioptions.PrintFlags, objects ...runtime.Object) error {
	printer, err := flags.ToPrinter()
	if err != nil {
		return usageError{err}
	}
	for _, obj := range objects {
		if *flags.OutputFormat == "name" && meta.IsListType(obj) {
			err = meta.EachListItem(obj, func(item runtime.Object) error { return printer.PrintObj(item, c.Out) })
		} else {
			err = printer.PrintObj(obj, c.Out)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// table is a metav1.Table of columns, to which row adds.
type table struct{ metav1.Table }

func newTable(columns ...string) *table {
	t := &table{}
	for _, name := range columns {
		t.ColumnDefinitions = append(t.ColumnDefinitions, metav1.TableColumnDefinition{Name: name, Type: "string"})
	}
	return t
}

func (t *table) row(cells ...any) {
	t.Rows = append(t.Rows, metav1.TableRow{Cells: cells})
}

func (c *cli) printTable(t *table, options printers.PrintOptions) error {
	return printers.NewTablePrinter(options).PrintObj(&t.Table, c.Out)
}

// conditionStatus is the status of a condition, Unknown where there is none.
func conditionStatus(conditions []metav1.Condition, kind string) metav1.ConditionStatus {
	if c := meta.FindStatusCondition(conditions, kind); c != nil {
		return c.Status
	}
	return metav1.ConditionUnknown
}

// since is how long ago t was, in short; "<none>" where it never was.
func (c *cli) since(t *metav1.MicroTime) string {
	if t == nil || t.IsZero() {
		return none
	}
	return duration(c.clock.Since(t.Time))
}
