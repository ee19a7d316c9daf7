package fencecli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/cli-runtime/pkg/resource"
	"k8s.io/client-go/rest"

	"github.com/fencedlease/fencedlease/client"
	"github.com/fencedlease/fencedlease/fence"
)

// stampFlags say which token of which lease a command presents. The flags win
// over the environment that run and acquire --export make.
type stampFlags struct {
	lease, text, file string

	key   types.NamespacedName
	token fence.Token
}

// addStamp binds the flags of a command that has no lease as an argument.
func (f *stampFlags) addStamp(flags *pflag.FlagSet) {
	flags.StringVar(&f.lease, "lease", "", "the lease, [namespace/]name (default: "+envLease+")")
	f.addToken(flags)
}

func (f *stampFlags) addToken(flags *pflag.FlagSet) {
	flags.StringVar(&f.text, "fencing-token", "", "the token (default: "+envToken+")")
	flags.StringVar(&f.file, "token-file", "", "read the token from this file, as hold keeps it")
}

// complete finds lease and token.
func (f *stampFlags) complete(c *cli) (err error) {
	if f.lease == "" {
		f.lease = os.Getenv(envLease)
	}
	if f.lease == "" {
		return usagef("no lease: name it, or set %s", envLease)
	}
	if f.key, err = c.leaseKey(f.lease); err != nil {
		return err
	}
	if f.text != "" && f.file != "" {
		return usageError{errors.New("--fencing-token and --token-file exclude each other")}
	}
	text := f.text
	switch {
	case f.file != "":
		data, err := os.ReadFile(f.file)
		if errors.Is(err, os.ErrNotExist) {
			// hold removes the file with the lease.
			return fmt.Errorf("%w: [%s] %w", fence.ErrLost, f.key, err)
		}
		if err != nil {
			return fmt.Errorf("read the token: %w", err)
		}
		text = strings.TrimSuffix(string(data), "\n")
	case text == "":
		text = os.Getenv(envToken)
	}
	if text == "" {
		return usagef("no token: set %s (run does) or give --fencing-token or --token-file", envToken)
	}
	if f.token, err = fence.ParseToken(text); err != nil {
		return usageError{err}
	}
	return nil
}

// stampedGetter is the plugin's configuration, with the token on every write.
type stampedGetter struct {
	*genericclioptions.ConfigFlags
	cfg *rest.Config
}

func (g stampedGetter) ToRESTConfig() (*rest.Config, error) { return rest.CopyConfig(g.cfg), nil }

// stamped gives the configuration whose writes present the token.
func (f *stampFlags) stamped(ctx context.Context, c *cli) (resource.RESTClientGetter, error) {
	cfg, err := c.config.ToRESTConfig()
	if err != nil {
		return nil, err
	}
	cfg, err = client.Config(ctx, cfg, client.Static(f.key.String(), f.token))
	return stampedGetter{c.config, cfg}, err
}
