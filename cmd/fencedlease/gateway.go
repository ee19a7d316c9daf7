package main

import (
	"io"

	"github.com/spf13/cobra"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/fencedlease/fencedlease/gateway"
	"github.com/fencedlease/fencedlease/gateway/ledger/postgres"
	"github.com/fencedlease/fencedlease/sqlfence"
)

func newGatewayCommand() *cobra.Command {
	options := gateway.Defaults()
	cmd := &cobra.Command{
		Use:   "gateway",
		Short: "Run the side-effect gateway: stale calls never reach the partner",
		Long: `Run the fence for calls that cannot be rolled back: a reverse proxy in front of
one partner, a decision service for NGINX, Traefik and Envoy, or all of them.

  # outside a cluster, in front of a partner, for callers of this machine
  fencedlease gateway --authority=none --authentication=none --ledger-file=./ledger \
    --proxy-bind-address=127.0.0.1:8443 --upstream=https://partner.example.com`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := options.Validate(); err != nil {
				return err
			}
			var cfg *rest.Config
			if options.Authority == gateway.AuthorityKubernetes {
				var err error
				if cfg, err = ctrl.GetConfig(); err != nil {
					return err
				}
			}
			gateway.CollectLess()
			return gateway.Run(cmd.Context(), cfg, options, cmd.OutOrStdout(), nil)
		},
	}
	options.AddFlags(cmd.Flags())
	setLogger(cmd)
	cmd.AddCommand(newGatewaySchemaCommand())
	return cmd
}

func newGatewaySchemaCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "schema",
		Short: "Print the DDL of the ledger that replicas share in PostgreSQL",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := io.WriteString(cmd.OutOrStdout(), sqlfence.Schema+"\n"+postgres.Schema)
			return err
		},
	}
}
