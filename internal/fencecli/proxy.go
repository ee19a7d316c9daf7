package fencecli

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httputil"
	"os"
	"path/filepath"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/client-go/util/cert"

	"github.com/fencedlease/fencedlease/client"
	"github.com/fencedlease/fencedlease/fence"
)

// proxy is an API server on the loopback address for one command: whatever
// the command writes there presents the token. Only who has the kubeconfig,
// with its random secret, gets in.
type proxy struct {
	server *http.Server
	dir    string
	// kubeconfig is the file that leads there.
	kubeconfig string
}

// startProxy serves the API server of cfg with holder's token on every write.
func startProxy(ctx context.Context, cfg *rest.Config, holder client.Holder, namespace string) (_ *proxy, err error) {
	cfg = rest.CopyConfig(cfg)
	// exec and port-forward take over their connection, which HTTP/2 forbids.
	cfg.NextProtos = []string{"http/1.1"}
	stamping, err := client.Config(ctx, cfg, holder)
	if err != nil {
		return nil, err
	}
	transport := &proxyTransport{holder: holder}
	if transport.stamped, err = rest.TransportFor(stamping); err != nil {
		return nil, err
	}
	if transport.plain, err = rest.TransportFor(cfg); err != nil {
		return nil, err
	}
	target, _, err := rest.DefaultServerUrlFor(cfg)
	if err != nil {
		return nil, err
	}
	const host = "127.0.0.1"
	pem, key, err := cert.GenerateSelfSignedCertKey(host, []net.IP{net.ParseIP(host)}, nil)
	if err != nil {
		return nil, fmt.Errorf("make the proxy's certificate: %w", err)
	}
	pair, err := tls.X509KeyPair(pem, key)
	if err != nil {
		return nil, err
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", net.JoinHostPort(host, "0"))
	if err != nil {
		return nil, fmt.Errorf("start the proxy: %w", err)
	}
	secret := rand.Text()
	forward := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(target)
			r.Out.Header.Del("Authorization")
		},
		Transport:     transport,
		FlushInterval: -1, // watches
		ErrorHandler:  proxyError,
	}
	p := &proxy{server: &http.Server{
		Handler:           authenticated(secret, forward),
		TLSConfig:         &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12},
		ReadHeaderTimeout: 10 * time.Second,
		TLSNextProto:      map[string]func(*http.Server, *tls.Conn, http.Handler){}, // as above
	}}
	defer func() {
		if err != nil {
			p.stop()
		}
	}()
	go func() { _ = p.server.ServeTLS(listener, "", "") }()

	if p.dir, err = os.MkdirTemp("", "kubectl-fence-"); err != nil {
		return nil, err
	}
	p.kubeconfig = filepath.Join(p.dir, "kubeconfig")
	const name = "kubectl-fence"
	return p, clientcmd.WriteToFile(clientcmdapi.Config{
		Clusters:       map[string]*clientcmdapi.Cluster{name: {Server: "https://" + listener.Addr().String(), CertificateAuthorityData: pem}},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{name: {Token: secret}},
		Contexts:       map[string]*clientcmdapi.Context{name: {Cluster: name, AuthInfo: name, Namespace: namespace}},
		CurrentContext: name,
	}, p.kubeconfig)
}

// stop ends the proxy and removes its files.
func (p *proxy) stop() {
	_ = p.server.Close()
	if p.dir != "" {
		_ = os.RemoveAll(p.dir)
	}
}

// authenticated lets in who has the secret.
func authenticated(secret string, next http.Handler) http.Handler {
	want := []byte("Bearer " + secret)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if subtle.ConstantTimeCompare([]byte(r.Header.Get("Authorization")), want) != 1 {
			answer(w, apierrors.NewUnauthorized("the proxy's kubeconfig holds the secret"))
			return
		}
		next.ServeHTTP(w, r)
	})
}

// proxyTransport stamps what passes through the proxy. What impersonates by
// itself, as a stamping program does or kubectl --as, goes on as it is: it
// presents what it says. Either way no write is sent once the lease is lost.
type proxyTransport struct {
	stamped, plain http.RoundTripper
	holder         client.Holder
}

func (t *proxyTransport) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.Header.Get(authenticationv1.ImpersonateUserHeader) == "" {
		return t.stamped.RoundTrip(req)
	}
	if req.Method != http.MethodGet && req.Method != http.MethodHead {
		if _, err := t.holder.Present(); err != nil {
			return nil, err
		}
	}
	return t.plain.RoundTrip(req)
}

// proxyError answers where the API server did not.
func proxyError(w http.ResponseWriter, _ *http.Request, err error) {
	if errors.Is(err, fence.ErrLost) {
		answer(w, apierrors.NewForbidden(schema.GroupResource{}, "", err))
		return
	}
	answer(w, apierrors.NewGenericServerResponse(http.StatusBadGateway, "", schema.GroupResource{}, "", err.Error(), 0, true))
}

func answer(w http.ResponseWriter, err *apierrors.StatusError) {
	status := err.Status()
	status.Kind, status.APIVersion = "Status", "v1"
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(int(status.Code))
	_ = json.NewEncoder(w).Encode(status)
}
