package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/internal/controlplane"
	"github.com/fencedlease/fencedlease/internal/operator"
)

// play runs both stories and fails where anything differs from what it tells.
func play(ctx context.Context, out io.Writer) (err error) {
	dir, err := os.MkdirTemp("", "fencedlease-demo-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	fmt.Fprintln(out, "Starting a real etcd and kube-apiserver, the operator and its webhook ...")
	cp, err := controlplane.Start(ctx, controlplane.Options{Webhook: true, Policy: true})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, cp.Stop()) }()
	stopOperator, err := startOperator(ctx, cp)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stopOperator()) }()

	s := &stage{out: out, kubeconfig: filepath.Join(dir, "kubeconfig")}
	if err := os.WriteFile(s.kubeconfig, cp.KubeConfig, 0o600); err != nil {
		return err
	}
	if s.admin, err = client.New(cp.Config, client.Options{Scheme: operator.Scheme()}); err != nil {
		return err
	}
	if err := s.story(ctx, "1. Guarded: the ConfigMap carries the label "+fence.LabelLease+": "+leaseName, "guarded", true); err != nil {
		return err
	}
	if err := s.story(ctx, "2. The same without the label", "unguarded", false); err != nil {
		return err
	}
	fmt.Fprintf(out, "\nSame workers, same pause, same write: the label is the difference.\n")
	return nil
}

func startOperator(ctx context.Context, cp *controlplane.ControlPlane) (stop func() error, err error) {
	cfg, err := cp.Operator()
	if err != nil {
		return nil, err
	}
	o := operator.Defaults()
	o.Namespace = controlplane.OperatorNamespace
	o.MetricsAddress, o.ProbeAddress = "0", "0"
	o.WebhookHost, o.WebhookPort = cp.Webhook.LocalServingHost, cp.Webhook.LocalServingPort
	o.Certificates, o.CertDir = operator.CertificatesFiles, cp.Webhook.LocalServingCertDir
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- operator.Run(ctx, cfg, o) }()
	return func() error { cancel(); return <-done }, nil
}

type stage struct {
	out        io.Writer
	admin      client.Client
	kubeconfig string
	start      time.Time
}

func (s *stage) say(who, what, result string) {
	fmt.Fprintf(s.out, "  %5.1f s  %-9s %-46s %s\n", time.Since(s.start).Seconds(), who, what, result)
}

// story plays the one story; guarded tells which end it has to have.
func (s *stage) story(ctx context.Context, title, object string, guarded bool) (err error) {
	fmt.Fprintf(s.out, "\n%s\n\n", title)
	s.start = time.Now()
	if err := s.setUp(ctx, object, guarded); err != nil {
		return err
	}
	a, err := s.startWorker(ctx, "a")
	if err != nil {
		return err
	}
	defer a.kill()
	b, err := s.startWorker(ctx, "b")
	if err != nil {
		return err
	}
	defer b.kill()

	tokenA, err := a.do("acquire")
	if err != nil {
		return fmt.Errorf("worker A acquires: %w", err)
	}
	s.say("worker A", "acquires the lease", fmt.Sprintf("token %d", tokenA))
	if err := s.expectWrite(a, object, "a-1", ""); err != nil {
		return err
	}
	if _, err := a.do("check"); err != nil {
		return fmt.Errorf("worker A checks: %w", err)
	}
	s.say("worker A", "checks the lease before it writes batch a-2", "it holds")
	if err := a.signal(syscall.SIGSTOP); err != nil {
		return err
	}
	s.say("worker A", "is stopped between check and write (SIGSTOP)", "")

	tokenB, err := b.do("acquire")
	if err != nil {
		return fmt.Errorf("worker B acquires: %w", err)
	}
	if tokenB <= tokenA {
		return fmt.Errorf("worker B was issued token %d after %d", tokenB, tokenA)
	}
	s.say("worker B", "acquires the lease once A's lapsed", fmt.Sprintf("token %d", tokenB))
	if err := s.expectWrite(b, object, "b-1", ""); err != nil {
		return err
	}
	if err := a.signal(syscall.SIGCONT); err != nil {
		return err
	}
	s.say("worker A", "resumes (SIGCONT), sure that it holds", "")
	want, end := "", "a-2"
	if guarded {
		want, end = string(fence.StaleToken), "b-1"
	}
	if err := s.expectWrite(a, object, "a-2", want); err != nil {
		return err
	}

	cm := &corev1.ConfigMap{}
	if err := s.admin.Get(ctx, client.ObjectKey{Namespace: namespace, Name: object}, cm); err != nil {
		return err
	}
	if got := cm.Data["batch"]; got != end {
		return fmt.Errorf("the ConfigMap holds %q, and the story says %q", got, end)
	}
	if guarded {
		s.say("", "the ConfigMap holds batch "+end, "B's state stands")
	} else {
		s.say("", "the ConfigMap holds batch "+end, "B's state is LOST, and nobody was told")
	}
	_, err = b.do("release")
	return err
}

// setUp makes the lease, once, and the object.
func (s *stage) setUp(ctx context.Context, object string, guarded bool) error {
	lease := &v1alpha1.FencedLease{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: leaseName},
		Spec:       v1alpha1.FencedLeaseSpec{LeaseDurationSeconds: leaseSeconds},
	}
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: object}}
	if err := client.IgnoreAlreadyExists(s.admin.Create(ctx, lease)); err != nil {
		return err
	}
	if guarded {
		cm.Labels = map[string]string{fence.LabelLease: leaseName}
	}
	// The first create waits for the operator and its webhook to be up.
	var last error
	if err := wait.PollUntilContextTimeout(ctx, 50*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
		last = s.admin.Create(ctx, cm)
		return last == nil, nil
	}); err != nil {
		return fmt.Errorf("create ConfigMap %s: %w", object, errors.Join(err, last))
	}
	return nil
}

// expectWrite lets a worker write; cause is the rejection that has to follow,
// empty for success.
func (s *stage) expectWrite(w *process, object, value, cause string) error {
	token, err := w.do("write", object, value)
	what := fmt.Sprintf("writes batch %s with token %d", value, token)
	if cause == "" {
		if err != nil {
			return fmt.Errorf("worker %s %s: %w", w.name, what, err)
		}
		s.say("worker "+strings.ToUpper(w.name), what, "accepted")
		return nil
	}
	if err == nil || !strings.Contains(err.Error(), cause) {
		return fmt.Errorf("worker %s %s: got %w, want a rejection with %s", w.name, what, err, cause)
	}
	s.say("worker "+strings.ToUpper(w.name), what, "REJECTED by the API server:")
	fmt.Fprintf(s.out, "\n%s\n\n", wrap(err.Error(), "           ", 96))
	return nil
}

// wrap breaks text into lines.
func wrap(text, indent string, width int) string {
	var b strings.Builder
	column := 0
	for word := range strings.FieldsSeq(text) {
		if column == 0 || column+1+len(word) > width {
			if column > 0 {
				b.WriteByte('\n')
			}
			b.WriteString(indent)
			column = 0
		} else {
			b.WriteByte(' ')
			column++
		}
		b.WriteString(word)
		column += len(word)
	}
	return b.String()
}

// process is a worker's process.
type process struct {
	name    string
	cmd     *exec.Cmd
	in      io.WriteCloser
	answers *json.Decoder
}

func (s *stage) startWorker(ctx context.Context, name string) (*process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, self, "worker", name)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+s.kubeconfig)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	return &process{name: name, cmd: cmd, in: in, answers: json.NewDecoder(bufio.NewReader(out))}, cmd.Start()
}

// do gives a worker one command and waits for its answer.
func (p *process) do(command ...string) (int64, error) {
	if _, err := fmt.Fprintln(p.in, strings.Join(command, " ")); err != nil {
		return 0, err
	}
	var a answer
	if err := p.answers.Decode(&a); err != nil {
		return 0, fmt.Errorf("worker %s gave no answer: %w", p.name, err)
	}
	if a.Error != "" {
		return a.Token, errors.New(a.Error)
	}
	return a.Token, nil
}

func (p *process) signal(s syscall.Signal) error { return p.cmd.Process.Signal(s) }

func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}
