package fencecli

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/retry"
	crclient "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/fence"
)

// fieldManager owns what the plugin changes.
const fieldManager = "kubectl-fence"

type revokeOptions struct {
	*cli
	lease  types.NamespacedName
	reason string
}

func newRevoke(c *cli) *cobra.Command {
	o := &revokeOptions{cli: c}
	cmd := &cobra.Command{
		Use:   "revoke [NAMESPACE/]LEASE --reason=REASON",
		Short: "Revoke the current token at once, holder or not",
		Long: "Raises the lease's minToken above the current token. From then on every fence rejects the token, the holder's\n" +
			"claim is finished, and the next claim is granted a higher one. The reason stands on the lease, in the annotation\n" +
			fence.AnnotationRevokeReason + ", written with the change itself; who sent it is in the audit log.",
		Example:           "  kubectl fence revoke deploy --reason='node lost its disk'",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: c.completeLease,
		RunE:              run(o),
	}
	cmd.Flags().StringVar(&o.reason, "reason", "", "why, for those who read it later (required)")
	return cmd
}

func (o *revokeOptions) Complete(_ *cobra.Command, args []string) (err error) {
	o.lease, err = o.leaseKey(args[0])
	return err
}

func (o *revokeOptions) Validate() error { return validReason(o.reason) }

// validReason bounds what --reason puts into an annotation.
func validReason(reason string) error {
	const most = 1024
	if reason == "" {
		return errors.New("--reason: must say why")
	}
	if len(reason) > most {
		return fmt.Errorf("--reason: must be at most %d bytes", most)
	}
	return nil
}

func (o *revokeOptions) Run(ctx context.Context) error {
	_, api, err := o.connect()
	if err != nil {
		return err
	}
	return retry.RetryOnConflict(retry.DefaultRetry, func() error {
		l, err := lease(ctx, api, o.lease)
		if err != nil {
			return err
		}
		current := fence.Token(l.Status.Token)
		switch {
		case current == 0:
			return usagef("[%s] has issued no token yet: nothing to revoke", o.lease)
		case l.Spec.MinToken > l.Status.Token:
			fmt.Fprintf(o.Out, "[%s] the newest token is revoked already\n", o.lease)
			return nil
		}
		before := l.DeepCopy()
		l.Spec.MinToken = l.Status.Token + 1
		if l.Annotations == nil {
			l.Annotations = map[string]string{}
		}
		l.Annotations[fence.AnnotationRevokeReason] = o.reason
		patch := crclient.MergeFromWithOptions(before, crclient.MergeFromWithOptimisticLock{})
		if err := api.Patch(ctx, l, patch, crclient.FieldOwner(fieldManager)); err != nil {
			return fmt.Errorf("revoke token %s of [%s]: %w", current, o.lease, err)
		}
		fmt.Fprintf(o.Out, "[%s] token %s revoked\n", o.lease, current)
		return nil
	})
}
