package fencecli

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/cli-runtime/pkg/printers"
	crclient "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

type watchOptions struct {
	*cli
	output        *genericclioptions.PrintFlags
	allNamespaces bool
	namespace     string
	name          string

	table printers.ResourcePrinter
	// shown is what was printed last of each lease.
	shown map[types.UID]shown
}

// shown tells one line of a lease from the next.
type shown struct {
	token, minToken int64
	holder          string
}

func newWatch(c *cli) *cobra.Command {
	o := &watchOptions{cli: c, output: printFlags(), shown: map[types.UID]shown{}}
	cmd := &cobra.Command{
		Use:   "watch [[NAMESPACE/]LEASE]",
		Short: "Print hand-overs as they happen",
		Long: "Prints who holds the leases now, and then a line whenever one is acquired, released, lost or revoked. Renewals\n" +
			"are not hand-overs. A gap in the connection may hide hand-overs, never the newest one.",
		Example:           "  kubectl fence watch deploy",
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: c.completeLease,
		RunE:              run(o),
	}
	o.output.AddFlags(cmd)
	cmd.Flags().BoolVarP(&o.allNamespaces, "all-namespaces", "A", false, "watch the leases of every namespace")
	return cmd
}

func (o *watchOptions) Complete(_ *cobra.Command, args []string) (err error) {
	o.table = printers.NewTablePrinter(printers.PrintOptions{WithNamespace: o.allNamespaces})
	switch {
	case o.allNamespaces && len(args) > 0:
		return usagef("a lease and --all-namespaces exclude each other")
	case o.allNamespaces:
		return nil
	case len(args) == 0:
		o.namespace, err = o.cli.namespace()
		return err
	}
	key, err := o.leaseKey(args[0])
	o.namespace, o.name = key.Namespace, key.Name
	return err
}

func (o *watchOptions) Validate() error { return validOutput(o.output) }

func (o *watchOptions) Run(ctx context.Context) error {
	_, api, err := o.connect()
	if err != nil {
		return err
	}
	selection := []crclient.ListOption{crclient.InNamespace(o.namespace)}
	if o.name != "" {
		selection = append(selection, crclient.MatchingFieldsSelector{Selector: fields.OneTermEqualSelector("metadata.name", o.name)})
	}
	// What cannot be read at the start is a mistake, and later a gap.
	if err := o.once(ctx, api, selection); err != nil {
		return err
	}
	for {
		timer := o.clock.NewTimer(time.Second)
		select {
		case <-timer.C():
		case <-ctx.Done():
			timer.Stop()
			return nil
		}
		if err := o.once(ctx, api, selection); err != nil && ctx.Err() == nil {
			fmt.Fprintln(o.ErrOut, "warning:", err)
		}
	}
}

// once lists and watches until the watch ends. A gap between two turns hides
// nothing that still holds.
func (o *watchOptions) once(ctx context.Context, api crclient.WithWatch, selection []crclient.ListOption) error {
	leases := &v1alpha1.FencedLeaseList{}
	if err := api.List(ctx, leases, selection...); err != nil {
		return fmt.Errorf("list leases: %w", err)
	}
	for i := range leases.Items {
		if err := o.show(&leases.Items[i]); err != nil {
			return err
		}
	}
	w, err := api.Watch(ctx, &v1alpha1.FencedLeaseList{}, append(selection,
		&crclient.ListOptions{Raw: &metav1.ListOptions{ResourceVersion: leases.ResourceVersion}})...)
	if err != nil {
		return fmt.Errorf("watch leases: %w", err)
	}
	defer w.Stop()
	for event := range w.ResultChan() {
		l, ok := event.Object.(*v1alpha1.FencedLease)
		if !ok {
			return nil // an error, as of a version too old: list again
		}
		if event.Type == watch.Deleted {
			delete(o.shown, l.UID)
			continue
		}
		if err := o.show(l); err != nil {
			return err
		}
	}
	return nil
}

// show prints a lease whose holder, token or floor has changed.
func (o *watchOptions) show(l *v1alpha1.FencedLease) error {
	now := shown{token: l.Status.Token, minToken: l.Spec.MinToken}
	holder := none
	if h := l.Status.Holder; h != nil {
		now.holder, holder = h.ClaimUID, h.Identity
		if h.Lease != nil {
			now.holder = h.Lease.UID + h.Identity
		}
	}
	if before, known := o.shown[l.UID]; known && before == now {
		return nil
	}
	o.shown[l.UID] = now
	if *o.output.OutputFormat != "" {
		return o.print(o.output, l)
	}
	token := tokenCell(l.Status.Token)
	if l.Status.Token > 0 && l.Status.Token < l.Spec.MinToken {
		token += " (revoked)"
	}
	t := newTable("Time", "Name", "Holder", "Token")
	t.row(o.clock.Now().Format(time.RFC3339), l.Name, holder, token)
	t.Rows[0].Object.Object = &metav1.PartialObjectMetadata{ObjectMeta: l.ObjectMeta}
	return o.table.PrintObj(&t.Table, o.Out)
}
