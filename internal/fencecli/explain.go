package fencecli

import (
	"context"
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/printers"

	"github.com/fencedlease/fencedlease/fence"
)

type explainOptions struct {
	*cli
	text   string
	object string
}

func newExplain(c *cli) *cobra.Command {
	o := &explainOptions{cli: c}
	cmd := &cobra.Command{
		Use:   "explain TYPE/NAME",
		Short: "Explain what the fence says to a write to an object: who holds its lease, and since when",
		Long: "Shows the object's lease with its holder, the token recorded on the object, and what the fence says now to a\n" +
			"write with the given token; without one, to a write that presents none.",
		Example: "  kubectl fence explain deploy/web --fencing-token=41",
		Args:    cobra.ExactArgs(1),
		RunE:    run(o),
	}
	cmd.Flags().StringVar(&o.text, "fencing-token", "", "the token of the write (default: "+envToken+")")
	return cmd
}

func (o *explainOptions) Complete(_ *cobra.Command, args []string) error {
	o.object = args[0]
	if o.text == "" {
		o.text = os.Getenv(envToken)
	}
	return nil
}

func (o *explainOptions) Validate() error { return nil }

func (o *explainOptions) Run(ctx context.Context) error {
	_, api, err := o.connect()
	if err != nil {
		return err
	}
	infos, err := o.objects(o.config, selection{args: []string{o.object}})
	if err != nil {
		return err
	}
	for _, info := range infos {
		obj, err := accessor(info)
		if err != nil {
			return err
		}
		key, guarded := guardOf(obj)
		if !guarded {
			fmt.Fprintf(o.Out, "%s is not guarded: it has no label %s, and every write passes the fence\n", named(info), fence.LabelLease)
			continue
		}
		l, err := newLeases(api).get(ctx, key)
		if err != nil {
			return err
		}
		recorded := fence.Recorded(obj.GetAnnotations())
		presented := fence.Presented{Stamped: o.text != "", Text: o.text, ByHeader: true}
		verdict := fence.Judge(presented, recorded, factsOf(key, l, info.Namespace), fence.Policy{Live: true})

		w := printers.GetNewTabWriter(o.Out)
		fmt.Fprintf(w, "Object:\t%s\n", named(info))
		fmt.Fprintf(w, "Lease:\t%s\n", key)
		fmt.Fprintf(w, "Recorded:\t%s\n", recorded)
		if l != nil {
			fmt.Fprintf(w, "Current:\t%s\n", fence.Token(l.Status.Token))
			if h := l.Status.Holder; h != nil {
				fmt.Fprintf(w, "Holder:\t%s, for %s\n", h.Identity, o.since(h.AcquireTime))
			} else {
				fmt.Fprintf(w, "Holder:\t%s\n", none)
			}
		}
		if verdict.Outcome == fence.Allowed {
			fmt.Fprintf(w, "Verdict:\tAllowed: token %s is current\n", verdict.Token)
		} else {
			fmt.Fprintf(w, "Verdict:\t%s\n", verdict.Message)
		}
		if err := w.Flush(); err != nil {
			return err
		}
	}
	return nil
}
