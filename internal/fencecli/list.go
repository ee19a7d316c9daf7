package fencecli

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilduration "k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/cli-runtime/pkg/printers"
	crclient "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

// none stands in a table for what does not exist, as in kubectl.
const none = "<none>"

func duration(d time.Duration) string { return utilduration.HumanDuration(d) }

type listOptions struct {
	*cli
	output        *genericclioptions.PrintFlags
	allNamespaces bool
	namespace     string
}

func newList(c *cli) *cobra.Command {
	o := &listOptions{cli: c, output: printFlags()}
	cmd := &cobra.Command{
		Use:     "list",
		Aliases: []string{"ls"},
		Short:   "List leases with their holders",
		Example: "  kubectl fence list\n  kubectl fence list -A -o json",
		Args:    cobra.NoArgs,
		RunE:    run(o),
	}
	o.output.AddFlags(cmd)
	cmd.Flags().BoolVarP(&o.allNamespaces, "all-namespaces", "A", false, "list the leases of every namespace")
	return cmd
}

func (o *listOptions) Complete(*cobra.Command, []string) (err error) {
	if !o.allNamespaces {
		o.namespace, err = o.cli.namespace()
	}
	return err
}

func (o *listOptions) Validate() error { return validOutput(o.output) }

func (o *listOptions) Run(ctx context.Context) error {
	_, api, err := o.connect()
	if err != nil {
		return err
	}
	leases := &v1alpha1.FencedLeaseList{}
	if err := api.List(ctx, leases, crclient.InNamespace(o.namespace)); err != nil {
		return fmt.Errorf("list leases: %w", err)
	}
	if *o.output.OutputFormat != "" {
		return o.print(o.output, leases)
	}
	if len(leases.Items) == 0 {
		fmt.Fprintln(o.ErrOut, "No leases found.")
		return nil
	}
	t := newTable("Name", "Holder", "Token", "Since", "Waiting", "Ready", "Age")
	for i := range leases.Items {
		l := &leases.Items[i]
		t.row(o.leaseCells(l)...)
		t.Rows[i].Object.Object = &metav1.PartialObjectMetadata{ObjectMeta: l.ObjectMeta}
	}
	return o.printTable(t, printers.PrintOptions{WithNamespace: o.allNamespaces})
}

func (c *cli) leaseCells(l *v1alpha1.FencedLease) []any {
	holder, since, waiting := none, none, none
	if h := l.Status.Holder; h != nil {
		holder, since = h.Identity, c.since(h.AcquireTime)
	}
	if l.Status.Waiting != nil {
		waiting = fmt.Sprint(*l.Status.Waiting)
	}
	return []any{
		l.Name, holder, tokenCell(l.Status.Token), since, waiting,
		string(conditionStatus(l.Status.Conditions, v1alpha1.FencedLeaseReady)), duration(c.clock.Since(l.CreationTimestamp.Time)),
	}
}

// tokenCell is a token in a table.
func tokenCell(token int64) string {
	if token == 0 {
		return none
	}
	return fmt.Sprint(token)
}

// validOutput finds an unknown -o before anything is asked.
func validOutput(flags *genericclioptions.PrintFlags) error {
	if *flags.OutputFormat == "" {
		return nil
	}
	_, err := flags.ToPrinter()
	return err
}
