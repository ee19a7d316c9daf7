package fencecli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/cli-runtime/pkg/resource"

	"github.com/fencedlease/fencedlease/fence"
)

// selection is which objects a command works on.
type selection struct {
	args     []string
	selector string
}

func (s *selection) addFlags(cmd *cobra.Command) {
	cmd.Flags().StringVarP(&s.selector, "selector", "l", "", "label selector, where only a type is named")
}

type guardOptions struct {
	*cli
	selection
	lease types.NamespacedName
}

func newGuard(c *cli) *cobra.Command {
	o := &guardOptions{cli: c}
	cmd := &cobra.Command{
		Use:   "guard [NAMESPACE/]LEASE (TYPE/NAME... | TYPE -l SELECTOR)",
		Short: "Put objects under the guard of a lease",
		Long: "Labels the objects, so that from then on the fence judges every write to them. It needs the verb \"" + fence.VerbGuard + "\" on\n" +
			"the lease. An object that another lease guards is left alone: unguard it first.",
		Example:           "  kubectl fence guard deploy deployment/web configmap/web",
		Args:              cobra.MinimumNArgs(2),
		ValidArgsFunction: c.completeLease,
		RunE:              run(o),
	}
	o.addFlags(cmd)
	return cmd
}

func (o *guardOptions) Complete(_ *cobra.Command, args []string) (err error) {
	o.args = args[1:]
	o.lease, err = o.leaseKey(args[0])
	return err
}

func (o *guardOptions) Validate() error { return nil }

func (o *guardOptions) Run(ctx context.Context) error {
	return o.each(ctx, o.config, o.selection, func(info *resource.Info, obj metav1.Object) (string, error) {
		switch key, guarded := guardOf(obj); {
		case guarded && key == o.lease:
			return "is guarded already", nil
		case guarded:
			return "", fmt.Errorf("[%s] guards it: unguard it first", key)
		}
		labels := map[string]any{fence.LabelLease: o.lease.Name, fence.LabelLeaseNamespace: nil}
		if o.lease.Namespace != info.Namespace {
			labels[fence.LabelLeaseNamespace] = o.lease.Namespace
		}
		// What an earlier guard left there would count as this lease's.
		return fmt.Sprintf("is guarded by [%s]", o.lease), patch(info, obj, labels, withoutFence())
	})
}

type unguardOptions struct {
	*cli
	selection
	reason string
}

func newUnguard(c *cli) *cobra.Command {
	o := &unguardOptions{cli: c}
	cmd := &cobra.Command{
		Use:   "unguard (TYPE/NAME... | TYPE -l SELECTOR) --reason=REASON",
		Short: "Take the guard off objects",
		Long: "Takes the labels and the recorded tokens off, so that every write passes again. This is a bypass: it needs the\n" +
			"verb \"" + fence.VerbBypass + "\" on the lease and a reason, which stays on the object in the annotation " + fence.AnnotationBypass + ".",
		Example: "  kubectl fence unguard deployment/web --reason='moved to another team'",
		Args:    cobra.MinimumNArgs(1),
		RunE:    run(o),
	}
	o.addFlags(cmd)
	cmd.Flags().StringVar(&o.reason, "reason", "", "why, for those who read it later (required)")
	return cmd
}

func (o *unguardOptions) Complete(_ *cobra.Command, args []string) error {
	o.args = args
	return nil
}

func (o *unguardOptions) Validate() error { return validReason(o.reason) }

func (o *unguardOptions) Run(ctx context.Context) error {
	return o.each(ctx, o.config, o.selection, func(info *resource.Info, obj metav1.Object) (string, error) {
		if _, guarded := guardOf(obj); !guarded {
			return "is not guarded", nil
		}
		annotations := withoutFence()
		annotations[fence.AnnotationBypass] = o.bypass(o.reason)
		return "is not guarded any more", patch(info, obj, map[string]any{fence.LabelLease: nil, fence.LabelLeaseNamespace: nil}, annotations)
	})
}

// bypass is a reason that differs from every one that an object may carry.
func (c *cli) bypass(reason string) string {
	return fmt.Sprintf("%s: %s", c.clock.Now().UTC().Format("2006-01-02T15:04:05.000Z"), reason)
}

// withoutFence takes every annotation of the fence off.
func withoutFence() map[string]any {
	out := map[string]any{}
	for _, name := range fence.AnnotationsOfFence {
		out[name] = nil
	}
	return out
}

// each works on every selected object, on none where one cannot be read, and
// tells what became of it. It goes on after a failure and reports all of them.
func (c *cli) each(ctx context.Context, from resource.RESTClientGetter, s selection, work func(*resource.Info, metav1.Object) (string, error)) error {
	infos, err := c.objects(from, s)
	if err != nil {
		return fmt.Errorf("nothing was changed: %w", err)
	}
	var errs []error
	for _, info := range infos {
		if ctx.Err() != nil {
			return errors.Join(append(errs, context.Cause(ctx))...)
		}
		obj, err := accessor(info)
		if err == nil {
			var done string
			if done, err = work(info, obj); err == nil {
				fmt.Fprintf(c.Out, "%s %s\n", named(info), done)
				continue
			}
		}
		errs = append(errs, fmt.Errorf("%s: %w", named(info), err))
	}
	return errors.Join(errs...)
}

// patch changes labels and annotations of the very object that was read; nil
// takes one off.
func patch(info *resource.Info, obj metav1.Object, labels, annotations map[string]any) error {
	metadata := map[string]any{"resourceVersion": obj.GetResourceVersion(), "annotations": annotations}
	if labels != nil {
		metadata["labels"] = labels
	}
	body, err := json.Marshal(map[string]any{"metadata": metadata})
	if err != nil {
		return err
	}
	_, err = resource.NewHelper(info.Client, info.Mapping).WithFieldManager(fieldManager).
		Patch(info.Namespace, info.Name, types.MergePatchType, body, nil)
	return err
}
