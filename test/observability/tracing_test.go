package observability

import (
	"context"
	"encoding/hex"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	common "go.opentelemetry.io/proto/otlp/common/v1"
	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/internal/controlplane"
	"github.com/fencedlease/fencedlease/internal/operator"
	"github.com/fencedlease/fencedlease/test/env"
)

// span is what is looked at of one.
type span struct {
	service, name, trace string
	attributes           map[string]string
}

// spans collects what is exported by OTLP.
type spans struct {
	collector.UnimplementedTraceServiceServer
	mu  sync.Mutex
	all []span
}

func (s *spans) Export(_ context.Context, r *collector.ExportTraceServiceRequest) (*collector.ExportTraceServiceResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, resource := range r.ResourceSpans {
		service := texts(resource.GetResource().GetAttributes())["service.name"]
		for _, scope := range resource.ScopeSpans {
			for _, one := range scope.Spans {
				s.all = append(s.all, span{service, one.Name, hex.EncodeToString(one.TraceId), texts(one.Attributes)})
			}
		}
	}
	return &collector.ExportTraceServiceResponse{}, nil
}

func texts(attributes []*common.KeyValue) map[string]string {
	all := map[string]string{}
	for _, a := range attributes {
		switch v := a.GetValue().GetValue().(type) {
		case *common.AnyValue_StringValue:
			all[a.Key] = v.StringValue
		case *common.AnyValue_IntValue:
			all[a.Key] = fmt.Sprint(v.IntValue)
		}
	}
	return all
}

// find gives a span that is one of those looked for.
func (s *spans) find(is func(span) bool) (found span, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, one := range s.all {
		if is(one) {
			return one, true
		}
	}
	return span{}, false
}

// TestTraces: the webhook's verdict is a part of the write's own trace, which
// the API server began, and the operator's requests are traced.
func TestTraces(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	got, server := &spans{}, grpc.NewServer()
	collector.RegisterTraceServiceServer(server, got)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	endpoint := listener.Addr().String()
	config := filepath.Join(t.TempDir(), "tracing.yaml")
	text := fmt.Sprintf("apiVersion: apiserver.config.k8s.io/v1\nkind: TracingConfiguration\nendpoint: %s\nsamplingRatePerMillion: 1000000\n", endpoint)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	cp, err := controlplane.Start(t.Context(), controlplane.Options{Webhook: true, Policy: true, APIServerArgs: map[string]string{"tracing-config-file": config}})
	if err != nil {
		t.Fatal(err)
	}
	w := &world{T: t, ControlPlane: cp, namespace: "traced", log: &output{}}
	t.Cleanup(func() { w.must(cp.Stop()) })
	w.admin, err = client.New(cp.Config, client.Options{Scheme: operator.Scheme()})
	w.must(err)
	w.must(w.admin.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.namespace}}))
	w.runManager("--tracing-endpoint="+endpoint, "--tracing-sampling-rate-per-million=1000000")
	lease := w.lease("traced", nil)
	token := w.token(w.claim(lease, "holder"))
	w.must(w.admin.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{
		Namespace: w.namespace, Name: "traced", Labels: map[string]string{fence.LabelLease: lease.Name}, Annotations: map[string]string{fence.AnnotationToken: fmt.Sprint(token)},
	}}))
	if err := w.write("traced", 0, "unstamped"); err == nil {
		t.Fatal("an unstamped write passed")
	}
	var judged span
	w.await("the verdict is traced", func() (ok bool) {
		judged, ok = got.find(func(s span) bool {
			return s.service == "fencedlease" && s.name == "POST /fence" && s.attributes["fencedlease.reason"] == string(fence.Unstamped)
		})
		return ok
	})
	if a := judged.attributes; a["fencedlease.lease"] != lease.String() || a["fencedlease.decision"] != "denied" || a["fencedlease.token"] != "0" {
		t.Errorf("the span says %v", a)
	}
	w.await("the API server's part of that trace is there", func() bool {
		_, ok := got.find(func(s span) bool { return s.service == "apiserver" && s.trace == judged.trace })
		return ok
	})
	w.await("a token's issue is traced", func() bool {
		_, ok := got.find(func(s span) bool { return s.service == "fencedlease" && s.name == "HTTP PUT" })
		return ok
	})
}

// runManager runs the operator as a process of its own: a second one in this
// process would share its metrics with the first.
func (w *world) runManager(flags ...string) {
	w.Helper()
	kubeconfig := filepath.Join(w.TempDir(), "kubeconfig")
	cfg, err := w.Operator()
	w.must(err)
	data, err := controlplane.KubeConfig(cfg)
	w.must(err)
	w.must(os.WriteFile(kubeconfig, data, 0o600))
	hook := w.Webhook
	cmd := exec.Command(env.Program(w), append([]string{"manager", "--namespace=" + controlplane.OperatorNamespace, "--metrics-bind-address=0", "--health-probe-bind-address=0",
		"--certificates=files", "--webhook-cert-dir=" + hook.LocalServingCertDir, "--webhook-host=" + hook.LocalServingHost, fmt.Sprintf("--webhook-port=%d", hook.LocalServingPort)}, flags...)...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+kubeconfig)
	cmd.Stdout, cmd.Stderr = w.log, w.log
	w.must(cmd.Start())
	w.Cleanup(func() {
		w.must(cmd.Process.Signal(syscall.SIGTERM))
		if err := cmd.Wait(); err != nil || w.Failed() {
			w.Errorf("%v\n%s", err, w.log.String())
		}
	})
	w.await("the webhook serves", func() bool {
		conn, err := net.Dial("tcp", net.JoinHostPort(hook.LocalServingHost, fmt.Sprint(hook.LocalServingPort)))
		if err == nil {
			_ = conn.Close()
		}
		return err == nil
	})
}
