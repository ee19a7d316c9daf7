package gateway

import (
	"crypto/tls"
	"crypto/x509"
	"net/http"
	"testing"

	"github.com/fencedlease/fencedlease/fence"
)

// TestCertificates: a caller is who its certificate says, and may use the
// leases that are listed for it; without a good certificate nothing arrives.
func TestCertificates(t *testing.T) {
	t.Parallel()
	ours, others := newAuthority(t), newAuthority(t)
	server := ours.server(t)
	p := newPartner(t, nil)
	g := start(t, p.URL, func(o *Options) {
		o.DecisionAddress = "127.0.0.1:0"
		o.CertFile, o.KeyFile, o.ClientCAFile = server.certFile, server.keyFile, ours.caFile
		o.Authentication = AuthenticationCertificate
		o.Allow = []string{"alice=" + lease, "o=bob=*"}
	})
	const other = "shop/other"
	client := x509.ExtKeyUsageClientAuth
	for name, c := range map[string]struct {
		certificate certificate
		lease       string
		more        []string
		// status is 0 where there is no answer at all.
		status int
		reason fence.Reason
	}{
		"a user of the lease":              {ours.client(t, "alice", client), lease, nil, http.StatusOK, ""},
		"a user of all leases":             {ours.client(t, "o=bob", client), other, nil, http.StatusOK, ""},
		"a user of another lease":          {ours.client(t, "alice", client), other, nil, http.StatusForbidden, NotAllowed},
		"a user of none":                   {ours.client(t, "carol", client), lease, nil, http.StatusForbidden, NotAllowed},
		"a name is not a list's beginning": {ours.client(t, "alice=shop/orders", client), lease, nil, http.StatusForbidden, NotAllowed},
		"a bearer token beside it":         {ours.client(t, "alice", client), lease, []string{fence.HeaderAuthorization, "Bearer x"}, http.StatusUnauthorized, Unauthenticated},
		"a certificate without a name":     {ours.client(t, "", client), lease, nil, http.StatusUnauthorized, Unauthenticated},
		"another authority's":              {others.client(t, "alice", client), lease, nil, 0, ""},
		"one for servers":                  {ours.client(t, "alice", x509.ExtKeyUsageServerAuth), lease, nil, 0, ""},
		"none":                             {certificate{}, lease, nil, 0, ""},
	} {
		t.Run(name, func(t *testing.T) {
			for protocol, next := range map[string][]string{"HTTP/1.1": {"http/1.1"}, "HTTP/2": {"h2"}} {
				for _, service := range []string{"proxy", "decision"} {
					config := &tls.Config{RootCAs: server.pool, NextProtos: next, MinVersion: tls.VersionTLS12}
					if c.certificate.certFile != "" {
						config.Certificates = []tls.Certificate{c.certificate.pair}
					}
					transport := &http.Transport{TLSClientConfig: config, ForceAttemptHTTP2: protocol == "HTTP/2"}
					defer transport.CloseIdleConnections()
					req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "https://"+g.address[service]+"/capture", nil)
					if err != nil {
						t.Fatal(err)
					}
					if req.Header = stamped("42", c.more...); c.lease != lease {
						req.Header.Set(fence.HeaderLease, c.lease)
					}
					var a answer
					resp, err := (&http.Client{Transport: transport}).Do(req)
					if err == nil {
						if a, err = readAnswer(resp); err != nil {
							t.Fatal(err)
						}
						if resp.Proto[:6] != protocol[:6] {
							t.Errorf("spoke %s, not %s", resp.Proto, protocol)
						}
					}
					if a.status != c.status || a.reason != c.reason {
						t.Errorf("%s over %s: %d %s, %v; want %d %s: %s", service, protocol, a.status, a.reason, err, c.status, c.reason, a.body)
					}
					arrived := len(p.calls()) > 0
					if want := c.status == http.StatusOK && service == "proxy"; arrived != want {
						t.Errorf("%s over %s: arrived %t, want %t", service, protocol, arrived, want)
					}
				}
			}
		})
	}
}

// TestPartnerIsAuthenticated: calls go to no other than the partner, and it may
// ask who calls.
func TestPartnerIsAuthenticated(t *testing.T) {
	t.Parallel()
	ours := newAuthority(t)
	server, gatewayCertificate := ours.server(t), ours.client(t, "gateway", x509.ExtKeyUsageClientAuth)
	p := &partner{answer: func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Client", r.TLS.PeerCertificates[0].Subject.CommonName)
	}}
	p.Server = newUnstarted(p)
	p.TLS = &tls.Config{Certificates: []tls.Certificate{server.pair}, ClientCAs: ours.pool, ClientAuth: tls.RequireAndVerifyClientCert, MinVersion: tls.VersionTLS12}
	p.StartTLS()
	t.Cleanup(p.Close)
	g := start(t, p.URL, func(o *Options) {
		o.UpstreamCAFile, o.UpstreamCertFile, o.UpstreamKeyFile = ours.caFile, gatewayCertificate.certFile, gatewayCertificate.keyFile
	})
	if a := g.call(t, http.MethodPost, "/capture", "", stamped("42")); a.status != http.StatusOK || a.header.Get("X-Client") != "gateway" {
		t.Errorf("%+v", a)
	}
	stranger := start(t, p.URL, func(o *Options) { o.UpstreamCAFile = newAuthority(t).caFile })
	if a := stranger.call(t, http.MethodPost, "/capture", "", stamped("42")); a.status != http.StatusBadGateway || a.reason != NotSent {
		t.Errorf("a partner of another authority: %+v", a)
	}
	sameTokens(t, p, "42")
}
