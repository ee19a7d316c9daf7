package fencecli

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/cli-runtime/pkg/printers"
	crclient "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

type describeOptions struct {
	*cli
	lease  types.NamespacedName
	events int
}

func newDescribe(c *cli) *cobra.Command {
	o := &describeOptions{cli: c}
	cmd := &cobra.Command{
		Use:               "describe [NAMESPACE/]LEASE",
		Short:             "Show a lease's holder, queue, recent hand-overs and rejections",
		Example:           "  kubectl fence describe deploy",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: c.completeLease,
		RunE:              run(o),
	}
	cmd.Flags().IntVar(&o.events, "events", 10, "how many of the newest events to show")
	return cmd
}

func (o *describeOptions) Complete(_ *cobra.Command, args []string) (err error) {
	o.lease, err = o.leaseKey(args[0])
	return err
}

func (o *describeOptions) Validate() error {
	if o.events < 0 {
		return fmt.Errorf("--events=%d: must be 0 or more", o.events)
	}
	return nil
}

func (o *describeOptions) Run(ctx context.Context) error {
	_, api, err := o.connect()
	if err != nil {
		return err
	}
	l, err := lease(ctx, api, o.lease)
	if err != nil {
		return err
	}
	claims := &v1alpha1.LeaseClaimList{}
	if err := api.List(ctx, claims, crclient.InNamespace(l.Namespace), crclient.MatchingFields{"spec.leaseName": l.Name}); err != nil {
		return fmt.Errorf("list the claims of [%s]: %w", o.lease, err)
	}
	events, err := eventsOf(ctx, api, o.lease)
	if err != nil {
		return err
	}
	w := printers.GetNewTabWriter(o.Out)
	o.describe(w, l, queue(claims.Items), newest(events, o.events))
	return w.Flush()
}

// eventsOf gives the events on a lease.
func eventsOf(ctx context.Context, api crclient.Client, key types.NamespacedName) ([]corev1.Event, error) {
	events := &corev1.EventList{}
	err := api.List(ctx, events, crclient.InNamespace(key.Namespace), crclient.MatchingFieldsSelector{
		Selector: fields.Set{"involvedObject.kind": "FencedLease", "involvedObject.name": key.Name}.AsSelector(),
	})
	if err != nil {
		return nil, fmt.Errorf("list the events of [%s]: %w", key, err)
	}
	return events.Items, nil
}

func (o *describeOptions) describe(w io.Writer, l *v1alpha1.FencedLease, waiting []v1alpha1.LeaseClaim, events []corev1.Event) {
	fmt.Fprintf(w, "Lease:\t%s\n", o.lease)
	fmt.Fprintf(w, "Token:\t%s\n", tokenCell(l.Status.Token))
	if h := l.Status.Holder; h == nil {
		fmt.Fprintf(w, "Holder:\t%s\n", none)
	} else {
		fmt.Fprintf(w, "Holder:\t%s\n", h.Identity)
		fmt.Fprintf(w, "Since:\t%s\n", o.since(h.AcquireTime))
		if h.ClaimName != "" {
			fmt.Fprintf(w, "Claim:\t%s\n", h.ClaimName)
		}
		if h.User != nil {
			fmt.Fprintf(w, "Account:\t%s\n", h.User.Username)
		}
	}
	fmt.Fprintf(w, "Duration:\t%ds\n", l.Spec.LeaseDurationSeconds)
	if l.Spec.MinToken > 0 {
		fmt.Fprintf(w, "Minimum:\t%d\n", l.Spec.MinToken)
	}
	if ready := meta.FindStatusCondition(l.Status.Conditions, v1alpha1.FencedLeaseReady); ready != nil {
		fmt.Fprintf(w, "Ready:\t%s (%s: %s)\n", ready.Status, ready.Reason, ready.Message)
	}

	fmt.Fprint(w, "\nQueue:")
	if len(waiting) == 0 {
		fmt.Fprintf(w, "\t%s", none)
	} else {
		fmt.Fprint(w, "\n  CLAIM\tIDENTITY\tPRIORITY\tAGE")
	}
	fmt.Fprintln(w)
	for i := range waiting {
		c := &waiting[i]
		fmt.Fprintf(w, "  %s\t%s\t%d\t%s\n", c.Name, c.Identity(), priority(c), duration(o.clock.Since(c.CreationTimestamp.Time)))
	}

	o.printEvents(w, "Events:", events)
}

// printEvents writes a section of events.
func (c *cli) printEvents(w io.Writer, title string, events []corev1.Event) {
	fmt.Fprintf(w, "\n%s", title)
	if len(events) == 0 {
		fmt.Fprintf(w, "\t%s", none)
	} else {
		fmt.Fprint(w, "\n  REASON\tAGE\tCOUNT\tMESSAGE")
	}
	fmt.Fprintln(w)
	for i := range events {
		e := &events[i]
		fmt.Fprintf(w, "  %s\t%s\t%d\t%s\n", e.Reason, duration(c.clock.Since(eventTime(e))), eventCount(e), strings.TrimSpace(e.Message))
	}
}

func priority(c *v1alpha1.LeaseClaim) int32 {
	if c.Spec.Priority == nil {
		return 0
	}
	return *c.Spec.Priority
}

// queue gives the waiting claims in the order in which they will be granted.
func queue(claims []v1alpha1.LeaseClaim) []v1alpha1.LeaseClaim {
	waiting := slices.DeleteFunc(claims, func(c v1alpha1.LeaseClaim) bool {
		held := meta.FindStatusCondition(c.Status.Conditions, v1alpha1.LeaseClaimHeld)
		return held == nil || held.Reason != v1alpha1.ReasonWaiting
	})
	slices.SortFunc(waiting, func(a, b v1alpha1.LeaseClaim) int {
		return cmp.Or(cmp.Compare(priority(&b), priority(&a)), cmp.Compare(a.Status.Ticket, b.Status.Ticket))
	})
	return waiting
}

// newest gives the newest events, the oldest of them first.
func newest(events []corev1.Event, most int) []corev1.Event {
	slices.SortStableFunc(events, func(a, b corev1.Event) int { return eventTime(&a).Compare(eventTime(&b)) })
	return events[max(0, len(events)-most):]
}

// eventTime is when an event happened last; its writer chooses the field.
func eventTime(e *corev1.Event) time.Time {
	last := e.CreationTimestamp.Time
	if e.Series != nil && e.Series.LastObservedTime.After(last) {
		last = e.Series.LastObservedTime.Time
	}
	for _, t := range []time.Time{e.EventTime.Time, e.LastTimestamp.Time} {
		if t.After(last) {
			last = t
		}
	}
	return last
}

func eventCount(e *corev1.Event) int32 {
	if e.Series != nil {
		return e.Series.Count
	}
	return max(e.Count, 1)
}
