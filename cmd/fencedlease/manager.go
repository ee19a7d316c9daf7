package main

import (
	"github.com/spf13/cobra"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/fencedlease/fencedlease/internal/operator"
)

func newManagerCommand() *cobra.Command {
	options := operator.Defaults()
	cmd := &cobra.Command{
		Use:   "manager",
		Short: "Run the operator: issue tokens and serve the admission webhook",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := options.Validate(); err != nil {
				return err
			}
			cfg, err := ctrl.GetConfig()
			if err != nil {
				return err
			}
			return operator.Run(cmd.Context(), cfg, options)
		},
	}
	options.AddFlags(cmd.Flags())
	setLogger(cmd)
	return cmd
}
