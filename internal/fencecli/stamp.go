package fencecli

import (
	"context"
	"errors"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/cli-runtime/pkg/resource"

	"github.com/fencedlease/fencedlease/client"
)

type stampOptions struct {
	*cli
	manifestFlags
	stampFlags
	output    *genericclioptions.PrintFlags
	salt      string
	namespace string
}

func newStamp(c *cli) *cobra.Command {
	o := &stampOptions{cli: c, output: printFlags().WithDefaultOutput("yaml")}
	cmd := &cobra.Command{
		Use:   "stamp -f FILE",
		Short: "Print manifests stamped with the token, for kubectl or another tool to apply",
		Long: "Puts the annotations that present the token on each object that carries the lease's label, and prints all\n" +
			"objects. Nothing is sent. The same manifest stamped again with the same token is the same, so that an unchanged\n" +
			"apply changes nothing; where someone else changed the object in between, the fence asks for another --salt.",
		Example: "  kubectl fence run deploy -- sh -c 'kubectl fence stamp -f app.yaml | kubectl apply -f -'",
		Args:    cobra.NoArgs,
		RunE:    run(o),
	}
	o.addManifests(cmd)
	o.addStamp(cmd.Flags())
	o.output.AddFlags(cmd)
	cmd.Flags().StringVar(&o.salt, "salt", "", "makes the stamp differ from an earlier one of the same manifest")
	return cmd
}

func (o *stampOptions) Complete(*cobra.Command, []string) (err error) {
	if o.namespace, err = o.cli.namespace(); err != nil {
		return err
	}
	return o.complete(o.cli)
}

func (o *stampOptions) Validate() error {
	return errors.Join(o.validManifests(), validOutput(o.output))
}

func (o *stampOptions) Run(context.Context) error {
	printer, err := o.output.ToPrinter()
	if err != nil {
		return usageError{err}
	}
	return resource.NewLocalBuilder().Unstructured().Local().
		FilenameParam(false, &o.FilenameOptions).Flatten().Do().
		Visit(func(info *resource.Info, err error) error {
			if err != nil {
				return err
			}
			obj, err := manifest(info)
			if err != nil {
				return err
			}
			ours, err := o.guarded(obj, o.key, o.namespace)
			if err == nil && ours {
				err = client.StampObject(obj, o.token, o.salt)
			}
			if err != nil {
				return err
			}
			return printer.PrintObj(obj, o.Out)
		})
}
