package main

import (
	"fmt"

	"github.com/spf13/cobra"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/internal/operator"
)

func newUninstallCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "uninstall",
		Short: "Take the webhook and the policies away, so that nothing is fenced any more",
		Long: `Delete the webhook's configuration, the admission policies and their bindings.
Run it before the operator is deleted: no write then waits for a webhook that is
gone, and no policy keeps what is to be deleted. Leases, claims and guarded
objects stay as they are. The Helm chart runs it on helm uninstall.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := ctrl.GetConfig()
			if err != nil {
				return err
			}
			c, err := client.New(cfg, client.Options{Scheme: operator.Scheme()})
			if err != nil {
				return err
			}
			for _, o := range operator.AdmissionObjects() {
				switch err := c.Delete(cmd.Context(), o); {
				case err == nil:
					_, _ = fmt.Fprintf(cmd.OutOrStdout(), "deleted %T %s\n", o, o.GetName())
				case client.IgnoreNotFound(err) != nil:
					return fmt.Errorf("delete %T %s: %w", o, o.GetName(), err)
				}
			}
			return nil
		},
	}
}
