package fencecli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fencedlease/fencedlease/client"
	"github.com/fencedlease/fencedlease/fence"
)

type holdOptions struct {
	*cli
	claimFlags
	file  string
	lease types.NamespacedName
}

func newHold(c *cli) *cobra.Command {
	o := &holdOptions{cli: c}
	cmd := &cobra.Command{
		Use:   "hold [NAMESPACE/]LEASE --file=FILE",
		Short: "Hold a lease and keep its token in a file, as a sidecar",
		Long: "Acquires the lease, writes the token to the file and renews until it is interrupted. The file is there, whole,\n" +
			"only while the lease is held: it is removed when the lease is lost, and the command then ends with code 4. Who\n" +
			"reads it does so once for each piece of work, and starts anew when a write is rejected or the file is gone.",
		Example:           "  kubectl fence hold worker --file=/run/fence/token --pod-name=\"$POD_NAME\" --pod-uid=\"$POD_UID\"",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: c.completeLease,
		RunE:              run(o),
	}
	o.addClaim(cmd.Flags())
	cmd.Flags().StringVarP(&o.file, "file", "f", "", "the file to keep the token in (required)")
	return cmd
}

func (o *holdOptions) Complete(_ *cobra.Command, args []string) (err error) {
	o.lease, err = o.leaseKey(args[0])
	return err
}

func (o *holdOptions) Validate() error {
	if o.file == "" {
		return errors.New("--file: must name the file to keep the token in")
	}
	return o.validClaim()
}

func (o *holdOptions) Run(ctx context.Context) error {
	cfg, _, err := o.connect()
	if err != nil {
		return err
	}
	// A predecessor that was killed could not remove its own.
	if err := removeFile(o.file); err != nil {
		return err
	}
	held, err := o.acquire(ctx, o.cli, cfg, o.lease)
	if err != nil {
		return err
	}
	defer o.release(ctx, held)
	return o.keep(ctx, held)
}

// keep holds until ctx or the lease ends. No file is left when it returns.
func (o *holdOptions) keep(ctx context.Context, held *client.Held) error {
	token, err := held.Present()
	if err != nil {
		return err
	}
	if err := writeToken(o.file, token); err != nil {
		return err
	}
	fmt.Fprintf(o.ErrOut, "[%s] acquired with token %s\n", held.Lease(), token)
	select {
	case <-ctx.Done():
	case <-held.Done():
		err = held.Err()
	}
	return errors.Join(err, removeFile(o.file))
}

// writeToken replaces the file at once: a reader sees the whole token or no
// file. Everybody may read it, since a token is an order and no secret.
func writeToken(file string, token fence.Token) (err error) {
	temp, err := os.CreateTemp(filepath.Dir(file), "."+filepath.Base(file)+"-")
	if err != nil {
		return fmt.Errorf("write the token: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("write the token: %w", err), removeFile(temp.Name()))
		}
	}()
	if _, err = fmt.Fprintln(temp, token); err == nil {
		err = temp.Chmod(0o644)
	}
	if err = errors.Join(err, temp.Close()); err != nil {
		return err
	}
	return os.Rename(temp.Name(), file)
}

func removeFile(name string) error {
	if err := os.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the token's file: %w", err)
	}
	return nil
}
