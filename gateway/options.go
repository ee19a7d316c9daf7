package gateway

import (
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
)

// Values of Options.Authority.
const (
	// AuthorityKubernetes checks tokens against the FencedLease in the API.
	AuthorityKubernetes = "kubernetes"
	// AuthorityNone judges by the ledger alone.
	AuthorityNone = "none"
)

// Values of Options.Authentication.
const (
	// AuthenticationToken takes bearer tokens, reviewed by the API.
	AuthenticationToken = "token"
	// AuthenticationCertificate takes client certificates.
	AuthenticationCertificate = "certificate"
	// AuthenticationNone lets everybody use every lease.
	AuthenticationNone = "none"
)

// Options are the settings of one gateway process.
type Options struct {
	// ProxyAddress, DecisionAddress and ExtAuthzAddress are where the reverse
	// proxy, the decision service over HTTP and Envoy's over gRPC listen,
	// MetricsAddress and ProbeAddress where /metrics, /healthz and /readyz are.
	// Each is host:port, or empty for none.
	ProxyAddress, DecisionAddress, ExtAuthzAddress, MetricsAddress, ProbeAddress string

	// Upstream is the partner's URL; UpstreamCAFile, UpstreamCertFile and
	// UpstreamKeyFile are what its TLS is checked by and what it is shown.
	Upstream                                          string
	UpstreamCAFile, UpstreamCertFile, UpstreamKeyFile string

	// CertFile and KeyFile are the gateway's own certificate; without them it
	// speaks plain text. ClientCAFile signs its clients' certificates.
	CertFile, KeyFile, ClientCAFile string

	// Authority is AuthorityKubernetes or AuthorityNone, AuthorityMaxAge how
	// long what a read told of a lease counts.
	Authority       string
	AuthorityMaxAge time.Duration
	// Authentication is how callers say who they are, TokenAudience for whom
	// their bearer tokens have to be meant. Allow lists who may use which lease
	// ("USER=NAMESPACE/NAME" or "USER=*"); without it the API is asked.
	Authentication, TokenAudience string
	Allow                         []string

	// LedgerFile or LedgerURL is the ledger.
	LedgerFile, LedgerURL string
	// KeepOutcomes is how long outcomes of idempotent calls are remembered.
	KeepOutcomes time.Duration

	// Wait bounds how long a newer token waits for older calls in flight
	// before they are cancelled.
	Wait time.Duration
	// CallTimeout bounds a call, DrainTimeout the end of the process; MaxBody
	// is in bytes.
	CallTimeout, DrainTimeout time.Duration
	MaxBody                   int64
	// AccessLog writes a line on every call to the standard output.
	AccessLog bool
}

// Defaults are the settings that a flag not given leaves.
func Defaults() Options {
	return Options{
		ProxyAddress:    ":8443",
		MetricsAddress:  ":8080",
		ProbeAddress:    ":8081",
		Authority:       AuthorityKubernetes,
		AuthorityMaxAge: 5 * time.Second,
		Authentication:  AuthenticationToken,
		LedgerFile:      "/var/lib/fencedlease/ledger",
		KeepOutcomes:    7 * 24 * time.Hour,
		Wait:            10 * time.Second,
		CallTimeout:     time.Minute,
		DrainTimeout:    30 * time.Second,
		MaxBody:         64 << 20,
		AccessLog:       true,
	}
}

// AddFlags binds the settings to flags.
func (o *Options) AddFlags(flags *pflag.FlagSet) {
	flags.StringVar(&o.ProxyAddress, "proxy-bind-address", o.ProxyAddress, `host:port of the reverse proxy, "" for none`)
	flags.StringVar(&o.DecisionAddress, "decision-bind-address", o.DecisionAddress, `host:port of the decision service for NGINX, Traefik and Envoy over HTTP, "" for none`)
	flags.StringVar(&o.ExtAuthzAddress, "ext-authz-bind-address", o.ExtAuthzAddress, `host:port of the decision service for Envoy over gRPC, "" for none`)
	flags.StringVar(&o.MetricsAddress, "metrics-bind-address", o.MetricsAddress, `host:port of /metrics, "" for none`)
	flags.StringVar(&o.ProbeAddress, "health-probe-bind-address", o.ProbeAddress, `host:port of /healthz and /readyz, "" for none`)
	flags.StringVar(&o.Upstream, "upstream", o.Upstream, "URL of the partner that the reverse proxy forwards to")
	flags.StringVar(&o.UpstreamCAFile, "upstream-ca-file", o.UpstreamCAFile, "certificates that sign the partner's (default: the system's)")
	flags.StringVar(&o.UpstreamCertFile, "upstream-cert-file", o.UpstreamCertFile, "client certificate shown to the partner")
	flags.StringVar(&o.UpstreamKeyFile, "upstream-key-file", o.UpstreamKeyFile, "key of --upstream-cert-file")
	flags.StringVar(&o.CertFile, "tls-cert-file", o.CertFile, "the gateway's certificate, reloaded when it changes (default: plain text)")
	flags.StringVar(&o.KeyFile, "tls-key-file", o.KeyFile, "key of --tls-cert-file")
	flags.StringVar(&o.ClientCAFile, "client-ca-file", o.ClientCAFile, "certificates that sign those of clients")
	flags.StringVar(&o.Authority, "authority", o.Authority, "kubernetes checks tokens against the lease in the API; none knows the ledger alone")
	flags.DurationVar(&o.AuthorityMaxAge, "authority-max-age", o.AuthorityMaxAge, "how long a read of a lease counts before it is confirmed anew, should the watch be broken")
	flags.StringVar(&o.Authentication, "authentication", o.Authentication, "how callers say who they are: token (a bearer token in Fencing-Authorization), certificate, or none")
	flags.StringVar(&o.TokenAudience, "token-audience", o.TokenAudience, "for whom bearer tokens have to be meant (default: the API server)")
	flags.StringArrayVar(&o.Allow, "allow", o.Allow, "USER=NAMESPACE/NAME: that user may use that lease, * any (repeatable; default: the RBAC verb use on the lease decides)")
	flags.StringVar(&o.LedgerFile, "ledger-file", o.LedgerFile, "file of the embedded ledger, for one replica")
	flags.StringVar(&o.LedgerURL, "ledger-url", o.LedgerURL, "PostgreSQL of the ledger, for several replicas, instead of --ledger-file")
	flags.DurationVar(&o.KeepOutcomes, "keep-outcomes", o.KeepOutcomes, "how long the outcome of a call with an Idempotency-Key is remembered")
	flags.DurationVar(&o.Wait, "wait", o.Wait, "how long a newer token waits for older calls in flight before it cancels them")
	flags.DurationVar(&o.CallTimeout, "call-timeout", o.CallTimeout, "bound of a call, 0 for none")
	flags.DurationVar(&o.DrainTimeout, "drain-timeout", o.DrainTimeout, "how long calls in flight may take to end when the gateway ends")
	flags.Int64Var(&o.MaxBody, "max-body-bytes", o.MaxBody, "longest body of a call, 0 for any")
	flags.BoolVar(&o.AccessLog, "access-log", o.AccessLog, "write a line on every call to the standard output")
}

// Validate names the first setting that is out of range.
func (o *Options) Validate() error {
	_, allowErr := o.allowed()
	switch {
	case o.ProxyAddress == "" && o.DecisionAddress == "" && o.ExtAuthzAddress == "":
		return errors.New("nothing to serve: set --proxy-bind-address, --decision-bind-address or --ext-authz-bind-address")
	case o.ProxyAddress != "" && !validUpstream(o.Upstream):
		return fmt.Errorf(`--upstream=%q: must be an http or https URL without query, as long as --proxy-bind-address is not ""`, o.Upstream)
	case (o.UpstreamCertFile == "") != (o.UpstreamKeyFile == ""):
		return errors.New("--upstream-cert-file and --upstream-key-file: give both or none")
	case (o.CertFile == "") != (o.KeyFile == ""):
		return errors.New("--tls-cert-file and --tls-key-file: give both or none")
	case o.ClientCAFile != "" && o.CertFile == "":
		return errors.New("--client-ca-file: needs --tls-cert-file")
	case !slices.Contains([]string{AuthorityKubernetes, AuthorityNone}, o.Authority):
		return fmt.Errorf("--authority=%q: must be %s or %s", o.Authority, AuthorityKubernetes, AuthorityNone)
	case o.AuthorityMaxAge < 100*time.Millisecond || o.AuthorityMaxAge > time.Hour:
		return fmt.Errorf("--authority-max-age=%v: must be from 100ms to 1h", o.AuthorityMaxAge)
	case !slices.Contains([]string{AuthenticationToken, AuthenticationCertificate, AuthenticationNone}, o.Authentication):
		return fmt.Errorf("--authentication=%q: must be %s, %s or %s", o.Authentication, AuthenticationToken, AuthenticationCertificate, AuthenticationNone)
	case o.Authentication == AuthenticationToken && o.Authority == AuthorityNone:
		return fmt.Errorf("--authentication=%s: needs the API to review tokens, so not --authority=%s; use %s, or %s where the network alone decides who calls",
			AuthenticationToken, AuthorityNone, AuthenticationCertificate, AuthenticationNone)
	case o.Authentication == AuthenticationCertificate && o.ClientCAFile == "":
		return fmt.Errorf("--authentication=%s: needs --client-ca-file", AuthenticationCertificate)
	case o.Authentication == AuthenticationNone && len(o.Allow) > 0:
		return fmt.Errorf("--allow: needs to know callers, so not --authentication=%s", AuthenticationNone)
	case o.Authentication != AuthenticationNone && o.Authority == AuthorityNone && len(o.Allow) == 0:
		return fmt.Errorf("--authority=%s: needs --allow, since no API can be asked who may use a lease", AuthorityNone)
	case o.TokenAudience != "" && o.Authentication != AuthenticationToken:
		return fmt.Errorf("--token-audience: needs --authentication=%s", AuthenticationToken)
	case allowErr != nil:
		return allowErr
	case o.LedgerFile == "" && o.LedgerURL == "":
		return errors.New("--ledger-file: must name a file, or --ledger-url a database")
	case o.KeepOutcomes < time.Minute || o.KeepOutcomes > 10*365*24*time.Hour:
		return fmt.Errorf("--keep-outcomes=%v: must be from 1m to 87600h", o.KeepOutcomes)
	case o.Wait < 0 || o.Wait > time.Hour:
		return fmt.Errorf("--wait=%v: must be from 0s to 1h", o.Wait)
	case o.CallTimeout < 0 || o.CallTimeout > 24*time.Hour:
		return fmt.Errorf("--call-timeout=%v: must be from 0s to 24h", o.CallTimeout)
	case o.DrainTimeout < 0 || o.DrainTimeout > time.Hour:
		return fmt.Errorf("--drain-timeout=%v: must be from 0s to 1h", o.DrainTimeout)
	case o.MaxBody < 0:
		return fmt.Errorf("--max-body-bytes=%d: must not be negative", o.MaxBody)
	}
	return nil
}

func validUpstream(s string) bool {
	u, err := url.Parse(s)
	return err == nil && (u.Scheme == "http" || u.Scheme == "https") && u.Host != "" && u.RawQuery == "" && u.Fragment == "" && u.User == nil
}

// allowed gives the leases of each user, nil where the API is asked.
func (o *Options) allowed() (map[string][]string, error) {
	if len(o.Allow) == 0 {
		return nil, nil //nolint:nilnil // no list is an answer
	}
	leases := map[string][]string{}
	for _, entry := range o.Allow {
		// A user's name may hold "=", a lease's may not.
		i := strings.LastIndexByte(entry, '=')
		if i < 1 || entry[i+1:] != "*" && strings.Count(entry[i+1:], "/") != 1 {
			return nil, fmt.Errorf("--allow=%q: must be USER=NAMESPACE/NAME or USER=*", entry)
		}
		leases[entry[:i]] = append(leases[entry[:i]], entry[i+1:])
	}
	return leases, nil
}
