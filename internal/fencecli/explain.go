package fencecli

import (
	"context"
	"fmt"
	"io"
	"os"
	"slices"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/cli-runtime/pkg/printers"
	"k8s.io/cli-runtime/pkg/resource"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
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
		Long: "Shows the object's lease with its holder, the token recorded on the object, what the fence says now to a write\n" +
			"with the given token (without one, to a write that presents none, by whom the lease makes no exception for), and\n" +
			"the newest rejections of writes to the object that the webhook left events of.",
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
	known := newLeases(api)
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
		l, err := known.get(ctx, key)
		if err != nil {
			return err
		}
		events, err := eventsOf(ctx, api, key)
		if err != nil && !apierrors.IsForbidden(err) {
			return err
		}
		w := printers.GetNewTabWriter(o.Out)
		o.explain(w, info, key, l, fence.Recorded(obj.GetAnnotations()))
		rejections := newest(rejectionsOf(events, info), mostRejections)
		o.printEvents(w, "Rejected:", rejections)
		if err := w.Flush(); err != nil {
			return err
		}
		if len(rejections) == 0 {
			fmt.Fprintln(o.Out, "What the webhook rejected is listed; what a policy did stands in the API server's audit log alone.")
		}
	}
	return nil
}

// mostRejections is how many rejections explain shows.
const mostRejections = 5

// rejectionsOf picks the events that tell of rejected writes to an object.
func rejectionsOf(events []corev1.Event, info *resource.Info) []corev1.Event {
	return slices.DeleteFunc(events, func(e corev1.Event) bool {
		r := e.Related
		return e.Action != v1alpha1.ActionReject || r == nil || r.Namespace != info.Namespace || r.Name != info.Name || r.Kind != info.Mapping.GroupVersionKind.Kind
	})
}

func (o *explainOptions) explain(w io.Writer, info *resource.Info, key types.NamespacedName, l *v1alpha1.FencedLease, recorded fence.Token) {
	policy := fence.Policy{Live: true}
	fmt.Fprintf(w, "Object:\t%s\n", named(info))
	fmt.Fprintf(w, "Lease:\t%s\n", key)
	fmt.Fprintf(w, "Recorded:\t%s\n", recorded)
	if l != nil {
		fmt.Fprintf(w, "Current:\t%s\n", fence.Token(l.Status.Token))
		if h := l.Status.Holder; h != nil {
			fmt.Fprintf(w, "Holder:\t%s, for %s\n", h.Identity, o.since(h.AcquireTime))
			if h.User != nil && l.Spec.HolderBinding == v1alpha1.HolderBindingUser {
				fmt.Fprintf(w, "Account:\t%s, and no other\n", h.User.Username)
			}
		} else {
			fmt.Fprintf(w, "Holder:\t%s\n", none)
		}
		if u := l.Spec.UnstampedWrites; u != nil {
			policy.Unstamped = fence.Action(u.Default)
		}
	}
	presented := fence.Presented{Stamped: o.text != "", Text: o.text, ByHeader: true}
	v := fence.Judge(presented, recorded, factsOf(key, l, info.Namespace), policy)
	switch {
	case v.Outcome == fence.Allowed && presented.Stamped:
		fmt.Fprintf(w, "Verdict:\tAllowed: token %s is current\n", v.Token)
	case v.Outcome == fence.Allowed:
		fmt.Fprintf(w, "Verdict:\tAllowed: the lease lets writes without a token pass\n")
	case v.Outcome == fence.Warned:
		fmt.Fprintf(w, "Verdict:\tAllowed, with a warning: %s\n", v.Message)
	default:
		fmt.Fprintf(w, "Verdict:\t%s\n", v.Message)
	}
}
