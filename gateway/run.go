package gateway

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"runtime/debug"
	"time"

	authv3 "github.com/envoyproxy/go-control-plane/envoy/service/auth/v3"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/certwatcher"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/gateway/ledger"
	"github.com/fencedlease/fencedlease/gateway/ledger/bolt"
	"github.com/fencedlease/fencedlease/gateway/ledger/postgres"
)

// Bounds of a connection that no flag sets.
const (
	headerTimeout = 10 * time.Second
	idleTimeout   = 2 * time.Minute
	mostHeader    = 64 << 10
	dialTimeout   = 10 * time.Second
	mostIdle      = 256
)

// CollectLess has this process collect garbage less often than Go's default,
// unless GOGC in the environment says how often. It suits a proxy, which keeps a
// few megabytes and makes some kilobytes for each call.
func CollectLess() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(400)
	}
}

// Run serves until ctx ends and calls in flight have ended, or the drain
// timeout has. The configuration reaches the API; it is nil without authority.
// The access log goes to out. Where listening is not nil it gets each address
// by the flag's name once it is served.
func Run(ctx context.Context, cfg *rest.Config, o Options, out io.Writer, listening func(flag string, address net.Addr)) (err error) {
	if err := o.Validate(); err != nil {
		return err
	}
	book, err := o.openLedger(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, book.Close()) }()
	s := &server{options: o, ledger: book, listening: listening, registry: prometheus.NewRegistry()}
	s.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	var access *slog.Logger
	if o.AccessLog {
		access = slog.New(slog.NewJSONHandler(out, nil))
	}
	s.observer = newObserver(s.registry, access)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s.group, ctx = errgroup.WithContext(ctx)
	if err = s.connect(ctx, cfg); err == nil {
		err = s.serve(ctx)
	}
	if err != nil {
		cancel()
	}
	return errors.Join(err, s.group.Wait())
}

// server is a running gateway.
type server struct {
	options   Options
	ledger    ledger.Ledger
	gate      *Gate
	observer  *observer
	registry  *prometheus.Registry
	group     *errgroup.Group
	ready     []func(context.Context) error
	listening func(string, net.Addr)
}

func (o *Options) openLedger(ctx context.Context) (ledger.Ledger, error) {
	if o.LedgerURL != "" {
		return postgres.Open(ctx, o.LedgerURL, postgres.Options{Wait: o.Wait, Keep: o.KeepOutcomes})
	}
	return bolt.Open(o.LedgerFile, bolt.Options{Keep: o.KeepOutcomes})
}

// connect makes the gate, with the API behind it where the options want it.
func (s *server) connect(ctx context.Context, cfg *rest.Config) error {
	s.gate = &Gate{Ledger: s.ledger}
	s.ready = append(s.ready, s.ledger.Ready)
	var api client.Client
	if s.options.Authority == AuthorityKubernetes {
		scheme := runtime.NewScheme()
		if err := errors.Join(clientgoscheme.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
			return err
		}
		var err error
		if api, err = client.New(cfg, client.Options{Scheme: scheme}); err != nil {
			return fmt.Errorf("reach the API: %w", err)
		}
		informers, err := cache.New(cfg, cache.Options{Scheme: scheme})
		if err != nil {
			return fmt.Errorf("reach the API: %w", err)
		}
		authority := newCluster(api, clock.RealClock{}, s.options.AuthorityMaxAge)
		s.group.Go(func() error { return informers.Start(ctx) })
		if err := authority.follow(ctx, informers); err != nil {
			return err
		}
		s.gate.Authority = authority
		s.ready = append(s.ready, func(ctx context.Context) error {
			if !informers.WaitForCacheSync(ctx) {
				return errors.New("the watch of leases is not synced")
			}
			return nil
		})
	}
	if s.options.Authentication != AuthenticationNone {
		allowed, err := s.options.allowed()
		if err != nil {
			return err
		}
		s.gate.Callers = newAccounts(api, s.options.Authentication == AuthenticationToken, s.options.TokenAudience, allowed, clock.RealClock{})
	}
	return nil
}

// serve listens everywhere, and only then serves.
func (s *server) serve(ctx context.Context) error {
	o := s.options
	config, err := s.tlsConfig(ctx)
	if err != nil {
		return err
	}
	decider := &Decider{gate: s.gate, observer: s.observer, clock: clock.RealClock{}}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) })
	mux.HandleFunc("GET /readyz", s.answerReady)
	metrics := http.NewServeMux()
	metrics.Handle("GET /metrics", promhttp.HandlerFor(s.registry, promhttp.HandlerOpts{}))

	type service struct {
		flag, address string
		config        *tls.Config
		run           func(ctx context.Context, l net.Listener, config *tls.Config) error
	}
	overHTTP := func(h http.Handler) func(context.Context, net.Listener, *tls.Config) error {
		return func(ctx context.Context, l net.Listener, config *tls.Config) error {
			return serveHTTP(ctx, l, config, h, o.DrainTimeout)
		}
	}
	services := []service{
		{"health-probe-bind-address", o.ProbeAddress, nil, overHTTP(bodiless(mux))},
		{"metrics-bind-address", o.MetricsAddress, nil, overHTTP(bodiless(metrics))},
		{"decision-bind-address", o.DecisionAddress, config, overHTTP(bodiless(decider))},
		{"ext-authz-bind-address", o.ExtAuthzAddress, config, func(ctx context.Context, l net.Listener, config *tls.Config) error {
			return serveGRPC(ctx, l, config, &extAuthz{decider: decider}, o.DrainTimeout)
		}},
	}
	if o.ProxyAddress != "" {
		transport, err := o.transport()
		if err != nil {
			return err
		}
		s.group.Go(func() error { <-ctx.Done(); transport.CloseIdleConnections(); return nil })
		target, err := url.Parse(o.Upstream)
		if err != nil {
			return err
		}
		proxy := newProxy(s.gate, s.observer, clock.RealClock{}, target, transport, o.Wait, o.CallTimeout, o.MaxBody) //nolint:contextcheck // each call brings its own
		services = append(services, service{"proxy-bind-address", o.ProxyAddress, config, overHTTP(proxy)})
	}
	for _, one := range services {
		if one.address == "" {
			continue
		}
		listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", one.address)
		if err != nil {
			return fmt.Errorf("--%s: %w", one.flag, err)
		}
		s.group.Go(func() error { return one.run(ctx, listener, one.config.Clone()) }) // servers change it
		if s.listening != nil {
			s.listening(one.flag, listener.Addr())
		}
	}
	return nil
}

// bodiless answers requests whose bodies say nothing. The server would read
// them first, for however long the caller takes to send them.
func bodiless(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ContentLength != 0 {
			_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(answerLimit)) // a connection that is gone takes none
		}
		h.ServeHTTP(w, r)
	})
}

// answerReady tells whether new calls can be judged here.
func (s *server) answerReady(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), time.Second)
	defer cancel()
	for _, check := range s.ready {
		if err := check(ctx); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
	}
	_, _ = io.WriteString(w, "ok\n") // whoever asked is gone: nobody is left to tell
}

func (s *server) tlsConfig(ctx context.Context) (*tls.Config, error) {
	o := s.options
	if o.CertFile == "" {
		return nil, nil //nolint:nilnil // plain text
	}
	watcher, err := certwatcher.New(o.CertFile, o.KeyFile)
	if err != nil {
		return nil, fmt.Errorf("--tls-cert-file: %w", err)
	}
	s.group.Go(func() error { return watcher.Start(ctx) })
	config := &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: watcher.GetCertificate}
	if o.ClientCAFile == "" {
		return config, nil
	}
	if config.ClientCAs, err = certPool("--client-ca-file", o.ClientCAFile); err != nil {
		return nil, err
	}
	config.ClientAuth = tls.VerifyClientCertIfGiven
	if o.Authentication == AuthenticationCertificate {
		config.ClientAuth = tls.RequireAndVerifyClientCert
	}
	return config, nil
}

func certPool(flag, file string) (*x509.CertPool, error) {
	pem, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", flag, err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("%s: %s holds no certificate in PEM", flag, file)
	}
	return pool, nil
}

// transport reaches the partner. It goes through no other proxy unless the
// environment names one.
func (o *Options) transport() (*http.Transport, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if o.UpstreamCAFile != "" {
		var err error
		if config.RootCAs, err = certPool("--upstream-ca-file", o.UpstreamCAFile); err != nil {
			return nil, err
		}
	}
	if o.UpstreamCertFile != "" {
		certificate, err := tls.LoadX509KeyPair(o.UpstreamCertFile, o.UpstreamKeyFile)
		if err != nil {
			return nil, fmt.Errorf("--upstream-cert-file: %w", err)
		}
		config.Certificates = []tls.Certificate{certificate}
	}
	return &http.Transport{
		Proxy:               http.ProxyFromEnvironment,
		DialContext:         (&net.Dialer{Timeout: dialTimeout}).DialContext,
		TLSClientConfig:     config,
		TLSHandshakeTimeout: dialTimeout,
		ForceAttemptHTTP2:   true,
		MaxIdleConnsPerHost: mostIdle,
		IdleConnTimeout:     idleTimeout,
		DisableCompression:  true,
		// Wait for a partner that says whether it wants the body.
		ExpectContinueTimeout: time.Second,
	}, nil
}

// serveHTTP serves until ctx ends, and then lets calls end.
func serveHTTP(ctx context.Context, l net.Listener, config *tls.Config, h http.Handler, drain time.Duration) error {
	protocols := &http.Protocols{}
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true)
	protocols.SetUnencryptedHTTP2(true)
	calls, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	server := &http.Server{
		Handler: h, TLSConfig: config, Protocols: protocols,
		ReadHeaderTimeout: headerTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: mostHeader,
		BaseContext: func(net.Listener) context.Context { return calls },
		// "OPTIONS *" would be answered 200 without a verdict.
		DisableGeneralOptionsHandler: true,

		ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError),
	}
	served := make(chan error, 1)
	go func() {
		if config != nil {
			served <- server.ServeTLS(l, "", "")
		} else {
			served <- server.Serve(l)
		}
	}()
	select {
	case err := <-served:
		return err
	case <-ctx.Done():
	}
	limit, cancelLimit := context.WithTimeout(calls, drain)
	defer cancelLimit()
	if err := server.Shutdown(limit); err != nil {
		cancel() // what still runs is cut off
		return errors.Join(fmt.Errorf("calls were cut off: %w", err), server.Close())
	}
	return nil
}

func serveGRPC(ctx context.Context, l net.Listener, config *tls.Config, service authv3.AuthorizationServer, drain time.Duration) error {
	var options []grpc.ServerOption
	if config != nil {
		options = append(options, grpc.Creds(credentials.NewTLS(config)))
	}
	server := grpc.NewServer(options...)
	authv3.RegisterAuthorizationServer(server, service)
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	select {
	case err := <-served:
		return err
	case <-ctx.Done():
	}
	timer := time.AfterFunc(drain, server.Stop)
	defer timer.Stop()
	server.GracefulStop()
	return <-served
}
