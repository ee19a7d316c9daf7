// Command gateway plays the paused worker's story on calls that cannot be taken
// back: a worker is stopped before it captures a payment, another takes over
// with a newer token and captures it, and the first one resumes. First through
// the gateway, then without it. Partner, gateway and workers are processes of
// their own.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/gateway"
)

const lease = "shop/payments"

func main() { os.Exit(run()) }

func run() int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	do := func() error { return play(ctx, os.Stdout) }
	switch args := os.Args[1:]; {
	case len(args) == 1 && args[0] == "partner":
		do = func() error { return partner(ctx, os.Stdout) }
	case len(args) == 3 && args[0] == "gateway":
		do = func() error { return serve(ctx, args[1], args[2], os.Stdout) }
	case len(args) == 1 && args[0] == "worker":
		do = func() error { return work(ctx, os.Stdin, os.Stdout) }
	}
	if err := do(); err != nil {
		fmt.Fprintln(os.Stderr, "demo-gateway:", err)
		return 1
	}
	return 0
}

// play runs both stories and fails where anything differs from what it tells.
func play(ctx context.Context, out io.Writer) (err error) {
	dir, err := os.MkdirTemp("", "fencedlease-demo-gateway-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	fmt.Fprintln(out, "Starting a partner that captures payments, and the gateway in front of it ...")
	bank, err := startServer(ctx, "partner")
	if err != nil {
		return err
	}
	defer bank.kill()
	fenced, err := startServer(ctx, "gateway", "http://"+bank.address, filepath.Join(dir, "ledger"))
	if err != nil {
		return err
	}
	defer fenced.kill()
	if err := story(ctx, out, "1. Through the gateway", bank, fenced.address, true); err != nil {
		return err
	}
	if err := story(ctx, out, "2. Without it", bank, bank.address, false); err != nil {
		return err
	}
	fmt.Fprintf(out, "\nSame workers, same pause, same call: the gateway is the difference.\n")
	return nil
}

// story plays the one story against an address; guarded tells which end it has
// to have.
func story(ctx context.Context, out io.Writer, title string, bank *process, address string, guarded bool) error {
	fmt.Fprintf(out, "\n%s\n\n", title)
	a, err := start(ctx, "worker")
	if err != nil {
		return err
	}
	defer a.kill()
	b, err := start(ctx, "worker")
	if err != nil {
		return err
	}
	defer b.kill()
	capture := func(name string, w *process, token fence.Token, order, want string) error {
		answer, err := w.do(fmt.Sprintf("http://%s %d %s", address, token, order))
		if err != nil {
			return fmt.Errorf("worker %s: %w", name, err)
		}
		fmt.Fprintf(out, "  worker %s  captures %s with token %s: %s\n", name, order, token, answer)
		if !strings.HasPrefix(answer, want) {
			return fmt.Errorf("worker %s captures %s: got %q, and the story says %q", name, order, answer, want)
		}
		return nil
	}
	if err := capture("A", a, 41, "order-6", "200 captured"); err != nil {
		return err
	}
	if err := a.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	fmt.Fprintln(out, "  worker A  is about to capture order-7, and is stopped (SIGSTOP)")
	if err := capture("B", b, 42, "order-7", "200 captured"); err != nil {
		return err
	}
	if err := a.cmd.Process.Signal(syscall.SIGCONT); err != nil {
		return err
	}
	fmt.Fprintln(out, "  worker A  resumes (SIGCONT), sure that it holds")
	want, captured, said := "403 "+string(fence.StaleToken), []string{"order-6 41", "order-7 42"}, "each order once"
	if !guarded {
		want, captured, said = "200 captured", append(captured, "order-7 41"), "order-7 was captured TWICE"
	}
	if err := capture("A", a, 41, "order-7", want); err != nil {
		return err
	}

	// What the partner logged counts, not what workers were told.
	if _, _, err := post(ctx, "http://"+bank.address+"/end", http.Header{}); err != nil {
		return err
	}
	var got []string
	for {
		line, err := bank.line()
		if err != nil {
			return fmt.Errorf("the partner's log: %w", err)
		}
		if line == "end" {
			break
		}
		got = append(got, line)
	}
	fmt.Fprintf(out, "  partner   logged %s: %s\n", strings.Join(got, ", "), said)
	if !slices.Equal(got, captured) {
		return fmt.Errorf("the partner logged %q, and the story says %q", got, captured)
	}
	return nil
}

// process is one of the story's.
type process struct {
	cmd     *exec.Cmd
	in      io.Writer
	out     *bufio.Reader
	address string
}

func start(ctx context.Context, args ...string) (*process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, self, args...)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	return &process{cmd: cmd, in: in, out: bufio.NewReader(out)}, cmd.Start()
}

// startServer starts one that prints its address first.
func startServer(ctx context.Context, args ...string) (*process, error) {
	p, err := start(ctx, args...)
	if err != nil {
		return nil, err
	}
	if p.address, err = p.line(); err != nil {
		p.kill()
		return nil, fmt.Errorf("the %s did not start: %w", args[0], err)
	}
	return p, nil
}

func (p *process) line() (string, error) {
	line, err := p.out.ReadString('\n')
	return strings.TrimSpace(line), err
}

// do gives a worker one command and waits for its answer.
func (p *process) do(command string) (string, error) {
	if _, err := fmt.Fprintln(p.in, command); err != nil {
		return "", err
	}
	return p.line()
}

func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}

// partner captures payments, and logs each on a line. It prints its address
// first.
func partner(ctx context.Context, log io.Writer) error {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	fmt.Fprintln(log, listener.Addr())
	mux := http.NewServeMux()
	mux.HandleFunc("POST /capture/{order}", func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintln(log, r.PathValue("order"), r.Header.Get(fence.HeaderToken))
		fmt.Fprint(w, "captured")
	})
	mux.HandleFunc("POST /end", func(http.ResponseWriter, *http.Request) { fmt.Fprintln(log, "end") })
	server := &http.Server{Handler: mux, ReadHeaderTimeout: time.Second}
	return server.Serve(listener)
}

// serve is the gateway in front of the partner. It prints its address.
func serve(ctx context.Context, upstream, ledger string, out io.Writer) error {
	o := gateway.Defaults()
	o.Authority, o.Authentication = gateway.AuthorityNone, gateway.AuthenticationNone
	o.ProxyAddress, o.ProbeAddress, o.MetricsAddress = "127.0.0.1:0", "", ""
	o.Upstream, o.LedgerFile, o.AccessLog = upstream, ledger, false
	return gateway.Run(ctx, nil, o, io.Discard, func(_ string, address net.Addr) { fmt.Fprintln(out, address) })
}

// work obeys lines of "URL TOKEN ORDER": one capture each.
func work(ctx context.Context, in io.Reader, out io.Writer) error {
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		var url, token, order string
		if _, err := fmt.Sscan(lines.Text(), &url, &token, &order); err != nil {
			return err
		}
		status, body, err := post(ctx, url+"/capture/"+order, http.Header{fence.HeaderLease: {lease}, fence.HeaderToken: {token}})
		if err != nil {
			return err
		}
		var problem struct {
			Detail string `json:"detail"`
		}
		if json.Unmarshal([]byte(body), &problem) == nil {
			body = problem.Detail
		}
		fmt.Fprintln(out, status, strings.TrimSpace(body))
	}
	return lines.Err()
}

func post(ctx context.Context, url string, h http.Header) (status int, body string, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, nil)
	if err != nil {
		return 0, "", err
	}
	req.Header = h
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = resp.Body.Close() }()
	read, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(read), err
}
