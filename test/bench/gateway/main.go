// Command gateway measures, in one run, what the fence costs a call: the
// gateway beside the same reverse proxy without a fence, and beside NGINX where
// it is on the PATH, each a process of its own; and what a million keys cost
// the embedded ledger.
//
// The partner answers at once, so that nothing but the proxy is measured.
package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/gateway"
)

func main() { os.Exit(run(os.Args[1:])) }

func run(args []string) int {
	ctx := context.Background()
	var err error
	switch {
	case len(args) == 3 && args[0] == roleProxy:
		err = serveUnfenced(args[1], args[2])
	case len(args) == 2 && args[0] == roleKeys:
		err = fillLedger(ctx, args[1])
	default:
		err = bench(ctx)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		return 1
	}
	return 0
}

// What the program is told to be by its first argument.
const (
	roleProxy = "unfenced-proxy"
	roleKeys  = "keys"
)

const (
	rounds      = 41
	calls       = 2400 // of a round
	connections = 16
)

// subject is one proxy.
type subject struct {
	name    string
	address string
	// advance presents a newer token with each call, on a key of the
	// connection's own.
	advance bool
	cmd     *exec.Cmd

	// rates are calls per second over all connections, latencies the medians in
	// microseconds over one, cpu the processor time of the proxy in microseconds
	// a call; each by round.
	rates, latencies, cpu []float64
}

// request gives the bytes of one call.
func request(text []byte, key int64, token fence.Token) []byte {
	return fmt.Appendf(text[:0], "POST /capture HTTP/1.1\r\nHost: partner\r\nContent-Length: 13\r\n%s: shop/orders\r\n%s: order-%d\r\n%s: %d\r\n\r\n{\"amount\":42}",
		fence.HeaderLease, fence.HeaderKey, key, fence.HeaderToken, token)
}

// last numbers the connections that have keys of their own.
var last atomic.Int64

// exchange makes n calls over one connection. It costs less than net/http, so
// that the proxy has the processor.
func (s *subject) exchange(ctx context.Context, n int, took func(time.Duration)) error {
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", s.address)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	r := bufio.NewReader(c)
	var text []byte
	token, key := fence.Token(42), int64(7)
	if s.advance {
		key = 1000 + last.Add(1)
	}
	for i := range n + warm {
		if s.advance {
			token++
		}
		text = request(text, key, token)
		began := time.Now()
		if _, err := c.Write(text); err != nil {
			return err
		}
		resp, err := http.ReadResponse(r, nil)
		if err != nil {
			return err
		}
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			return err
		}
		if resp.StatusCode != http.StatusOK {
			return fmt.Errorf("%s: status %d: %s", s.name, resp.StatusCode, body)
		}
		if i >= warm {
			took(time.Since(began))
		}
	}
	return nil
}

// warm is how many calls of a connection are not counted.
const warm = 5

func (s *subject) round(ctx context.Context) error {
	used, err := processor(s.cmd.Process.Pid)
	if err != nil {
		return err
	}
	var times []float64
	if err := s.exchange(ctx, calls/4, func(d time.Duration) { times = append(times, microseconds(d)) }); err != nil {
		return err
	}
	s.latencies = append(s.latencies, median(times))
	g, ctx := errgroup.WithContext(ctx)
	began := time.Now()
	for range connections {
		g.Go(func() error { return s.exchange(ctx, calls/connections, func(time.Duration) {}) })
	}
	if err := g.Wait(); err != nil {
		return err
	}
	s.rates = append(s.rates, float64(calls+connections*warm)/time.Since(began).Seconds())
	now, err := processor(s.cmd.Process.Pid)
	s.cpu = append(s.cpu, microseconds(now-used)/(calls/4+calls+(1+connections)*warm))
	return err
}

func microseconds(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

// processor is the time of it that a process has used.
func processor(pid int) (time.Duration, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	// The name may hold blanks. Ticks are hundredths of a second.
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	var ticks int64
	for _, field := range fields[11:13] {
		n, err := strconv.ParseInt(field, 10, 64)
		if err != nil {
			return 0, err
		}
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond, nil
}

func median(all []float64) float64 {
	all = slices.Sorted(slices.Values(all))
	return all[len(all)/2]
}

func mean(all []float64) (sum float64) {
	for _, one := range all {
		sum += one / float64(len(all))
	}
	return sum
}

// against compares each round with the same round of another.
func against(all, base []float64, compare func(a, b float64) float64) float64 {
	var compared []float64
	for i := range all {
		compared = append(compared, compare(all[i], base[i]))
	}
	return median(compared)
}

func bench(ctx context.Context) (err error) {
	dir, err := os.MkdirTemp("", "fence-bench-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	program := filepath.Join(dir, "fencedlease")
	if out, err := exec.CommandContext(ctx, "go", "build", "-o", program, "./cmd/fencedlease").CombinedOutput(); err != nil {
		return fmt.Errorf("build: %w\n%s", err, out)
	}
	partner := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		_, _ = io.WriteString(w, "captured")
	}))
	defer partner.Close()
	self, err := os.Executable()
	if err != nil {
		return err
	}
	fenced := func(name, ledger string, log bool, advance bool) *subject {
		s := &subject{name: name, address: freeAddress(), advance: advance}
		s.cmd = exec.CommandContext(ctx, program, "gateway", "--authority=none", "--authentication=none", "--access-log="+strconv.FormatBool(log),
			"--ledger-file="+filepath.Join(dir, ledger), "--upstream="+partner.URL, "--proxy-bind-address="+s.address, "--metrics-bind-address=", "--health-probe-bind-address=")
		return s
	}
	base := &subject{name: "the proxy without a fence", address: freeAddress()}
	base.cmd = exec.CommandContext(ctx, self, roleProxy, base.address, partner.URL)
	subjects := []*subject{
		base,
		fenced("the gateway, same token", "same", false, false),
		fenced("the gateway, same token, access log", "logged", true, false),
		fenced("the gateway, each call a newer token", "newer", false, true),
	}
	if nginx, err := exec.LookPath("nginx"); err == nil {
		s := &subject{name: "NGINX without a fence", address: freeAddress()}
		file := filepath.Join(dir, "nginx.conf")
		if err := os.WriteFile(file, fmt.Appendf(nil, nginxConf, dir, strings.TrimPrefix(partner.URL, "http://"), s.address), 0o600); err != nil {
			return err
		}
		s.cmd = exec.CommandContext(ctx, nginx, "-e", "stderr", "-p", dir, "-c", file)
		subjects = append(subjects, s)
	}
	for _, s := range subjects {
		if err := s.start(ctx); err != nil {
			return err
		}
		defer func() { _ = s.cmd.Process.Kill(); _ = s.cmd.Wait() }()
	}
	shuffle := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // no secret
	for range rounds {
		// Interleaved, so that a slow moment hits all, and each time in another
		// order: what runs after something light is quicker.
		for _, i := range shuffle.Perm(len(subjects)) {
			if err := subjects[i].round(ctx); err != nil {
				return err
			}
		}
	}
	fmt.Printf("%d rounds of %d calls over %d connections and %d over one; medians of the rounds, each beside the same round without a fence\n",
		rounds, calls, connections, calls/4)
	for _, s := range subjects {
		fmt.Printf("%-38s %7.0f calls/s %4.0f %%   %6.0f us %+6.0f us   %5.0f us of processor\n", s.name,
			median(s.rates), 100*against(s.rates, base.rates, func(a, b float64) float64 { return a / b }),
			median(s.latencies), against(s.latencies, base.latencies, func(a, b float64) float64 { return a - b }), mean(s.cpu))
	}
	keys := exec.CommandContext(ctx, self, roleKeys, filepath.Join(dir, "keys"))
	keys.Stdout, keys.Stderr = os.Stdout, os.Stderr
	return keys.Run()
}

const nginxConf = `daemon off; master_process off; pid %[1]s/nginx.pid; error_log stderr;
events {}
http {
  access_log off; keepalive_requests 1000000;
  client_body_temp_path %[1]s/body; proxy_temp_path %[1]s/proxy; fastcgi_temp_path %[1]s/f; uwsgi_temp_path %[1]s/u; scgi_temp_path %[1]s/s;
  upstream partner { server %[2]s; keepalive 256; keepalive_requests 1000000; }
  server {
    listen %[3]s;
    location / { proxy_pass http://partner; proxy_http_version 1.1; proxy_set_header Connection ""; }
  }
}
`

// start starts a proxy and waits until it listens.
func (s *subject) start(ctx context.Context) error {
	s.cmd.Stderr = os.Stderr
	if err := s.cmd.Start(); err != nil {
		return fmt.Errorf("%s: %w", s.name, err)
	}
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		c, err := (&net.Dialer{}).DialContext(ctx, "tcp", s.address)
		if err == nil {
			return c.Close()
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("%s does not listen: %w", s.name, err)
		}
	}
}

// freeAddress gives one that nobody listens on.
func freeAddress() string {
	l := httptest.NewUnstartedServer(nil).Listener
	defer func() { _ = l.Close() }()
	return l.Addr().String()
}

// buffers are kept as the gateway keeps them.
type buffers struct{ pool sync.Pool }

const bufferSize = 32 << 10

func (b *buffers) Get() []byte {
	if kept, ok := b.pool.Get().(*[bufferSize]byte); ok {
		return kept[:]
	}
	return make([]byte, bufferSize)
}

func (b *buffers) Put(buffer []byte) { b.pool.Put((*[bufferSize]byte)(buffer)) }

// serveUnfenced is the gateway's proxy as it would be without a fence: the
// same settings of server, proxy, transport and garbage collection.
func serveUnfenced(address, upstream string) error {
	gateway.CollectLess()
	target, err := url.Parse(upstream)
	if err != nil {
		return err
	}
	protocols := &http.Protocols{}
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true)
	protocols.SetUnencryptedHTTP2(true)
	server := &http.Server{
		Addr: address, Protocols: protocols, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 64 << 10,
		Handler: &httputil.ReverseProxy{
			Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(target) },
			FlushInterval: -1,
			BufferPool:    &buffers{},
			Transport: &http.Transport{
				Proxy: http.ProxyFromEnvironment, DialContext: (&net.Dialer{Timeout: 10 * time.Second}).DialContext, TLSHandshakeTimeout: 10 * time.Second,
				ForceAttemptHTTP2: true, MaxIdleConnsPerHost: 256, IdleConnTimeout: 2 * time.Minute, DisableCompression: true, ExpectContinueTimeout: time.Second,
			},
		},
	}
	return server.ListenAndServe()
}
