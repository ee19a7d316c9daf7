package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/fencedlease/fencedlease/internal/controlplane"
)

// operator is the operator as its own process.
type operator struct {
	cmd     *exec.Cmd
	address string
}

func startOperator(ctx context.Context, cp *controlplane.ControlPlane, dir string) (*operator, error) {
	cfg, err := cp.Operator()
	if err != nil {
		return nil, err
	}
	data, err := controlplane.KubeConfig(cfg)
	if err != nil {
		return nil, err
	}
	kubeconfig, program := filepath.Join(dir, "kubeconfig"), filepath.Join(dir, "fencedlease")
	if err := os.WriteFile(kubeconfig, data, 0o600); err != nil {
		return nil, err
	}
	if out, err := exec.CommandContext(ctx, "go", "build", "-o", program, "github.com/fencedlease/fencedlease/cmd/fencedlease").CombinedOutput(); err != nil {
		return nil, fmt.Errorf("build the operator: %w\n%s", err, out)
	}
	metrics, err := freeAddress(ctx)
	if err != nil {
		return nil, err
	}
	probes, err := freeAddress(ctx)
	if err != nil {
		return nil, err
	}
	o := &operator{address: "http://" + metrics + "/metrics"}
	o.cmd = exec.CommandContext(ctx, program, "manager", "--metrics-bind-address="+metrics, "--health-probe-bind-address="+probes,
		"--certificates=files", "--webhook-cert-dir="+cp.Webhook.LocalServingCertDir,
		"--webhook-host="+cp.Webhook.LocalServingHost, fmt.Sprintf("--webhook-port=%d", cp.Webhook.LocalServingPort), "--zap-log-level=error")
	o.cmd.Env = append(os.Environ(), "KUBECONFIG="+kubeconfig)
	var log bytes.Buffer
	o.cmd.Stderr = &log
	if err := o.cmd.Start(); err != nil {
		return nil, err
	}
	limit := time.Now().Add(time.Minute)
	for {
		if _, err = get(ctx, "http://"+probes+"/readyz"); err == nil {
			return o, nil
		}
		if time.Now().After(limit) {
			o.stop()
			return nil, fmt.Errorf("the operator is not ready: %w\n%s", err, &log)
		}
		pass(100 * time.Millisecond)
	}
}

func (o *operator) stop() {
	_ = o.cmd.Process.Signal(os.Interrupt)
	_ = o.cmd.Wait()
}

func freeAddress(ctx context.Context) (string, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}

func get(ctx context.Context, url string) ([]byte, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, err
	}
	defer func() { _ = response.Body.Close() }()
	text, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %s", url, response.Status, text)
	}
	return text, err
}

// sample is what the operator says of itself.
type sample struct {
	at                           time.Time
	requests, cpu, memory, depth float64
}

func (o *operator) sample(ctx context.Context) (s sample, err error) {
	text, err := get(ctx, o.address)
	if err != nil {
		return s, err
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(text))
	if err != nil {
		return s, err
	}
	s.at = time.Now()
	for _, m := range families["rest_client_requests_total"].GetMetric() {
		s.requests += m.GetCounter().GetValue()
	}
	s.cpu = families["process_cpu_seconds_total"].GetMetric()[0].GetCounter().GetValue()
	s.memory = families["process_resident_memory_bytes"].GetMetric()[0].GetGauge().GetValue()
	for _, m := range families["workqueue_depth"].GetMetric() {
		s.depth += m.GetGauge().GetValue()
	}
	return s, nil
}

// load is what the operator needed for something.
type load struct{ cores, memory, depth, requests float64 }

// observe looks at the operator twice a second while do runs.
func (b *bench) observe(ctx context.Context, do func() error) (l load, err error) {
	first, err := b.operator.sample(ctx)
	if err != nil {
		return l, err
	}
	done := make(chan error, 1)
	go func() { done <- do() }()
	tick := time.NewTicker(500 * time.Millisecond)
	defer tick.Stop()
	for running := true; running; {
		select {
		case err := <-done:
			if err != nil {
				return l, err
			}
			running = false
		case <-tick.C:
		}
		now, err := b.operator.sample(ctx)
		if err != nil {
			return l, err
		}
		seconds := now.at.Sub(first.at).Seconds()
		l.cores, l.requests = (now.cpu-first.cpu)/seconds, (now.requests-first.requests)/seconds
		l.memory, l.depth = max(l.memory, now.memory), max(l.depth, now.depth)
	}
	fmt.Printf("  operator: %.2f cores, %.0f MiB resident at most, queue at most %.0f deep, %.0f requests a second\n", l.cores, l.memory/(1<<20), l.depth, l.requests)
	return l, nil
}
