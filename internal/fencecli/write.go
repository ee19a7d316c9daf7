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
)

type applyOptions struct {
	*cli
	manifestFlags
	stampFlags
	dryRun string
	force  bool
}

func newApply(c *cli) *cobra.Command {
	o := &applyOptions{cli: c}
	cmd := &cobra.Command{
		Use:   "apply -f FILE",
		Short: "Apply manifests by server-side apply, stamped with the token",
		Long: "Applies each object under the field manager " + fieldManager + "; where a lease guards it, the token is presented and\n" +
			"recorded. It goes on after an object that fails, and ends with code 3 where a fence rejected one.",
		Example: "  kubectl fence run deploy -- kubectl fence apply -f app.yaml",
		Args:    cobra.NoArgs,
		RunE:    run(o),
	}
	o.addManifests(cmd)
	o.addStamp(cmd.Flags())
	cmd.Flags().StringVar(&o.dryRun, "dry-run", "none", `"server" has everything judged and changes nothing`)
	cmd.Flags().BoolVar(&o.force, "force-conflicts", false, "take over fields that other managers own")
	return cmd
}

func (o *applyOptions) Complete(*cobra.Command, []string) error { return o.complete(o.cli) }

func (o *applyOptions) Validate() error {
	if o.dryRun != "none" && o.dryRun != "server" {
		return fmt.Errorf("--dry-run=%q: must be none or server", o.dryRun)
	}
	return o.validManifests()
}

func (o *applyOptions) Run(ctx context.Context) error {
	namespace, enforce, err := o.config.ToRawKubeConfigLoader().Namespace()
	if err != nil {
		return err
	}
	stamped, err := o.stamped(ctx, o.cli)
	if err != nil {
		return err
	}
	done := "applied"
	if o.dryRun == "server" {
		done = "applied (dry run)"
	}
	var errs []error
	err = resource.NewBuilder(stamped).Unstructured().ContinueOnError().
		NamespaceParam(namespace).DefaultNamespace().
		FilenameParam(enforce, &o.FilenameOptions).Flatten().Do().
		Visit(func(info *resource.Info, err error) error {
			if err == nil && ctx.Err() != nil {
				err = context.Cause(ctx)
			}
			if err != nil {
				return err
			}
			if err := o.apply(info, namespace); err != nil {
				errs = append(errs, fmt.Errorf("apply %s: %w", named(info), err))
				return nil
			}
			fmt.Fprintf(o.Out, "%s %s\n", named(info), done)
			return nil
		})
	return errors.Join(append(errs, err)...)
}

func (o *applyOptions) apply(info *resource.Info, namespace string) error {
	obj, err := manifest(info)
	if err != nil {
		return err
	}
	if _, err := o.guarded(obj, o.key, namespace); err != nil {
		return err
	}
	body, err := json.Marshal(obj)
	if err != nil {
		return err
	}
	_, err = resource.NewHelper(info.Client, info.Mapping).WithFieldManager(fieldManager).DryRun(o.dryRun == "server").
		Patch(info.Namespace, info.Name, types.ApplyPatchType, body, &metav1.PatchOptions{Force: &o.force})
	return err
}

type deleteOptions struct {
	*cli
	selection
	stampFlags
}

func newDelete(c *cli) *cobra.Command {
	o := &deleteOptions{cli: c}
	cmd := &cobra.Command{
		Use:     "delete (TYPE/NAME... | TYPE -l SELECTOR)",
		Short:   "Delete objects, stamped with the token",
		Long:    "Asks for the deletion of the very objects that it read, and does not wait for finalizers.",
		Example: "  kubectl fence run deploy -- kubectl fence delete configmap/web",
		Args:    cobra.MinimumNArgs(1),
		RunE:    run(o),
	}
	o.addFlags(cmd)
	o.addStamp(cmd.Flags())
	return cmd
}

func (o *deleteOptions) Complete(_ *cobra.Command, args []string) error {
	o.args = args
	return o.complete(o.cli)
}

func (o *deleteOptions) Validate() error { return nil }

func (o *deleteOptions) Run(ctx context.Context) error {
	stamped, err := o.stamped(ctx, o.cli)
	if err != nil {
		return err
	}
	return o.each(ctx, stamped, o.selection, func(info *resource.Info, obj metav1.Object) (string, error) {
		if err := o.judgedBy(o.key, info, obj); err != nil {
			return "", err
		}
		uid, background := obj.GetUID(), metav1.DeletePropagationBackground
		_, err := resource.NewHelper(info.Client, info.Mapping).DeleteWithOptions(info.Namespace, info.Name, &metav1.DeleteOptions{
			Preconditions: &metav1.Preconditions{UID: &uid}, PropagationPolicy: &background,
		})
		return "deleted", err
	})
}

type scaleOptions struct {
	*cli
	selection
	stampFlags
	replicas int32
}

func newScale(c *cli) *cobra.Command {
	o := &scaleOptions{cli: c}
	cmd := &cobra.Command{
		Use:     "scale (TYPE/NAME... | TYPE -l SELECTOR) --replicas=N",
		Short:   "Set a number of replicas, stamped with the token",
		Example: "  kubectl fence run deploy -- kubectl fence scale deployment/web --replicas=3",
		Args:    cobra.MinimumNArgs(1),
		RunE:    run(o),
	}
	o.addFlags(cmd)
	o.addStamp(cmd.Flags())
	cmd.Flags().Int32Var(&o.replicas, "replicas", -1, "how many (required)")
	return cmd
}

func (o *scaleOptions) Complete(_ *cobra.Command, args []string) error {
	o.args = args
	return o.complete(o.cli)
}

func (o *scaleOptions) Validate() error {
	if o.replicas < 0 {
		return errors.New("--replicas: must be 0 or more")
	}
	return nil
}

func (o *scaleOptions) Run(ctx context.Context) error {
	stamped, err := o.stamped(ctx, o.cli)
	if err != nil {
		return err
	}
	body := fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, o.replicas)
	return o.each(ctx, stamped, o.selection, func(info *resource.Info, obj metav1.Object) (string, error) {
		if err := o.judgedBy(o.key, info, obj); err != nil {
			return "", err
		}
		_, err := resource.NewHelper(info.Client, info.Mapping).WithFieldManager(fieldManager).WithSubresource("scale").
			Patch(info.Namespace, info.Name, types.MergePatchType, body, nil)
		return fmt.Sprintf("scaled to %d", o.replicas), err
	})
}

// judgedBy refuses to write under one lease what another one guards, and says
// where nothing guards it.
func (c *cli) judgedBy(key types.NamespacedName, info *resource.Info, obj metav1.Object) error {
	switch by, guarded := guardOf(obj); {
	case !guarded:
		fmt.Fprintf(c.ErrOut, "note: %s is not guarded, so no fence judges this write\n", named(info))
	case by != key:
		return usagef("[%s] guards it, and the token is one of [%s]: acquire the lease that guards it", by, key)
	}
	return nil
}
