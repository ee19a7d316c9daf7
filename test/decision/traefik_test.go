package decision

import (
	"bytes"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/gateway"
)

// traefikConfig is the part of Traefik's dynamic configuration that the
// shipped file uses.
type traefikConfig struct {
	HTTP struct {
		Routers map[string]struct {
			EntryPoints []string `json:"entryPoints"`
			Rule        string   `json:"rule"`
			Middlewares []string `json:"middlewares"`
			Service     string   `json:"service"`
		} `json:"routers"`
		Middlewares map[string]struct {
			Buffering *struct {
				MaxRequestBodyBytes int64 `json:"maxRequestBodyBytes"`
			} `json:"buffering"`
			ForwardAuth *traefikForwardAuth `json:"forwardAuth"`
			Headers     *struct {
				CustomRequestHeaders map[string]string `json:"customRequestHeaders"`
			} `json:"headers"`
		} `json:"middlewares"`
		Services map[string]struct {
			LoadBalancer struct {
				Servers []struct {
					URL string `json:"url"`
				} `json:"servers"`
				PassHostHeader   bool   `json:"passHostHeader"`
				ServersTransport string `json:"serversTransport"`
			} `json:"loadBalancer"`
		} `json:"services"`
		ServersTransports map[string]struct {
			MaxIdleConnsPerHost int  `json:"maxIdleConnsPerHost"`
			DisableHTTP2        bool `json:"disableHTTP2"`
		} `json:"serversTransports"`
	} `json:"http"`
}

type traefikForwardAuth struct {
	Address             string   `json:"address"`
	TrustForwardHeader  bool     `json:"trustForwardHeader"`
	AuthResponseHeaders []string `json:"authResponseHeaders"`
	MaxResponseBodySize int64    `json:"maxResponseBodySize"`
}

// forwardAuth does what Traefik's middleware ForwardAuth does.
type forwardAuth struct {
	traefikForwardAuth

	client *http.Client
	next   http.Handler
}

func (a *forwardAuth) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	ask, err := http.NewRequestWithContext(r.Context(), http.MethodGet, a.Address, nil)
	if err != nil {
		w.WriteHeader(http.StatusInternalServerError)
		return
	}
	ask.Header = r.Header.Clone()
	for name := range ask.Header {
		if strings.HasPrefix(name, "X-Forwarded-") && !a.TrustForwardHeader {
			delete(ask.Header, name)
		}
	}
	client, _, _ := net.SplitHostPort(r.RemoteAddr)
	for name, value := range map[string]string{
		"Method": r.Method, "Proto": "http", "Port": "80", "Host": r.Host, "Uri": r.URL.RequestURI(), "For": client,
	} {
		ask.Header.Set("X-Forwarded-"+name, value)
	}
	answer, err := a.client.Do(ask)
	if err != nil {
		w.WriteHeader(http.StatusInternalServerError)
		return
	}
	defer func() { _ = answer.Body.Close() }()
	body, err := io.ReadAll(io.LimitReader(answer.Body, a.MaxResponseBodySize+1))
	switch {
	case err != nil:
		w.WriteHeader(http.StatusInternalServerError)
		return
	case int64(len(body)) > a.MaxResponseBodySize:
		w.WriteHeader(http.StatusUnauthorized)
		return
	case answer.StatusCode < 200 || answer.StatusCode >= 300:
		maps.Copy(w.Header(), answer.Header)
		w.WriteHeader(answer.StatusCode)
		_, _ = w.Write(body)
		return
	}
	for _, name := range a.AuthResponseHeaders {
		r.Header.Del(name)
		if values := answer.Header[http.CanonicalHeaderKey(name)]; len(values) > 0 {
			r.Header[http.CanonicalHeaderKey(name)] = values
		}
	}
	a.next.ServeHTTP(w, r)
}

// traefik does what Traefik does with the shipped configuration, as far as it
// bears on a verdict.
func traefik(t *testing.T, decision, _, partner string) door {
	t.Helper()
	text := configure(t, "traefik.yaml", "http://127.0.0.1:9080/", "http://"+decision+"/", "http://127.0.0.1:9002", "http://"+partner)
	var config traefikConfig
	if err := yaml.UnmarshalStrict([]byte(text), &config); err != nil {
		t.Fatal(err)
	}
	router := config.HTTP.Routers["partner"]
	service := config.HTTP.Services[router.Service].LoadBalancer
	if transport := config.HTTP.ServersTransports[service.ServersTransport]; transport.MaxIdleConnsPerHost != -1 || !transport.DisableHTTP2 {
		t.Errorf("a connection to the partner is used twice: %+v", transport)
	}
	target, err := url.Parse(service.Servers[0].URL)
	if err != nil {
		t.Fatal(err)
	}
	var handler http.Handler = httputil.NewSingleHostReverseProxy(target)
	for _, name := range slices.Backward(router.Middlewares) {
		next, m := handler, config.HTTP.Middlewares[name]
		switch {
		case m.Buffering != nil:
			handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if body, err := io.ReadAll(r.Body); err == nil {
					r.Body = io.NopCloser(bytes.NewReader(body))
					next.ServeHTTP(w, r)
				}
			})
		case m.ForwardAuth != nil:
			// Traefik waits 30 s; a test does not have to.
			handler = &forwardAuth{traefikForwardAuth: *m.ForwardAuth, client: &http.Client{Timeout: time.Second}, next: next}
		case m.Headers != nil:
			handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				for name, value := range m.Headers.CustomRequestHeaders {
					if r.Header.Del(name); value != "" {
						r.Header.Set(name, value)
					}
				}
				next.ServeHTTP(w, r)
			})
		default:
			t.Fatalf("no middleware %s", name)
		}
	}
	// An entry point takes off Connection, and what it names.
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for _, list := range r.Header.Values("Connection") {
			for name := range strings.SplitSeq(list, ",") {
				r.Header.Del(strings.TrimSpace(name))
			}
		}
		r.Header.Del("Connection")
		handler.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	return door{
		address:   server.Listener.Addr().String(),
		forged:    "Forged",
		undecided: outcome{status: http.StatusServiceUnavailable, reason: gateway.Undecided},
		silent:    outcome{status: http.StatusInternalServerError},
		failing: map[string]outcome{
			// Traefik hands on what it is answered.
			"answers 502": {status: http.StatusBadGateway},
		},
		differs: map[string]outcome{
			"named by Connection": {status: http.StatusForbidden, reason: fence.Unstamped},
		},
	}
}

func TestTraefik(t *testing.T)        { testDoor(t, traefik) }
func TestTraefikFailing(t *testing.T) { testFailing(t, traefik) }
