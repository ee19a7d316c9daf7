package client

import (
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	crclient "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/test/env"
)

// python reads patches as "kind name body" and prints what became of each.
const python = `
import json, ssl, sys
sys.path.insert(0, sys.argv[1])
import fencedlease
host, namespace, name = sys.argv[2:5]
tls = ssl.create_default_context(cafile=sys.argv[5] + "/ca")
tls.load_cert_chain(sys.argv[5] + "/cert", sys.argv[5] + "/key")
lease = fencedlease.Lease(host, tls, namespace, name)
for line in sys.stdin:
    kind, object, body = line.split(" ", 2)
    path = f"/api/v1/namespaces/{namespace}/{kind}s/{object}"
    verb = "DELETE" if body.strip() == "delete" else "PATCH"
    status, cause, said = lease.write(verb, path, json.loads(body) if verb == "PATCH" else None)
    if status >= 300:
        sys.exit(f"{status} {cause}: {said['message']}")
lease.release()
`

// program starts a client in another language: it reads patches from its
// input and writes them with its token.
type program func(t *testing.T, e *env.Environment, cfg *rest.Config, namespace string) *exec.Cmd

func inPython(t *testing.T, _ *env.Environment, cfg *rest.Config, namespace string) *exec.Cmd {
	t.Helper()
	server, err := url.Parse(cfg.Host)
	if err != nil {
		t.Fatal(err)
	}
	folder := t.TempDir()
	for name, data := range map[string][]byte{"ca": cfg.CAData, "cert": cfg.CertData, "key": cfg.KeyData} {
		if err := os.WriteFile(filepath.Join(folder, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return exec.CommandContext(t.Context(), "python3", "-c", python, "../../docs/examples/python", server.Host, namespace, "main", folder)
}

func inBash(t *testing.T, e *env.Environment, cfg *rest.Config, namespace string) *exec.Cmd {
	t.Helper()
	path := writeKubeconfig(t, cfg)
	kubeconfig, err := clientcmd.LoadFromFile(path)
	if err != nil {
		t.Fatal(err)
	}
	kubeconfig.Contexts[kubeconfig.CurrentContext].Namespace = namespace
	if err := clientcmd.WriteToFile(*kubeconfig, path); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "bash", "../../docs/examples/bash/fencedlease.sh", "main")
	cmd.Env = append(os.Environ(), "KUBECONFIG="+path, "PATH="+e.Assets+":"+os.Getenv("PATH"))
	return cmd
}

// TestOtherLanguages: a client of under 60 lines waits for its turn, records
// and writes, releases; and one that was stopped writes nothing afterwards.
func TestOtherLanguages(t *testing.T) {
	for language, test := range map[string]struct {
		start program
		file  string
	}{
		"python": {inPython, "python/fencedlease.py"},
		"bash":   {inBash, "bash/fencedlease.sh"},
	} {
		t.Run(language, func(t *testing.T) {
			t.Parallel()
			text, err := os.ReadFile("../../docs/examples/" + test.file)
			if err != nil {
				t.Fatal(err)
			}
			if lines := strings.Count(string(text), "\n"); lines >= 60 {
				t.Errorf("it has %d lines", lines)
			}
			e := everything(t)
			namespace := e.Namespace(t)
			makeLease(t, e, namespace, 3)
			cfg := worker(t, e, namespace, "in-"+language)
			app := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "app", Labels: map[string]string{fence.LabelLease: "main"}}}
			if err := e.Admin.Create(t.Context(), app); err != nil {
				t.Fatal(err)
			}
			shows := func(by string) func() bool {
				return func() bool {
					return e.Admin.Get(t.Context(), crclient.ObjectKeyFromObject(app), app) == nil && app.Data["by"] == by
				}
			}
			line := func(by string) string { return fmt.Sprintf("configmap app {\"data\": {\"by\": %q}}\n", by) }
			run := func() (io.WriteCloser, *strings.Builder, *exec.Cmd) {
				cmd := test.start(t, e, cfg, namespace)
				in, err := cmd.StdinPipe()
				if err != nil {
					t.Fatal(err)
				}
				said := &strings.Builder{}
				cmd.Stderr = said
				if err := cmd.Start(); err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = cmd.Process.Kill() })
				return in, said, cmd
			}

			in, _, first := run()
			_, _ = io.WriteString(in, line("the first"))
			await(t, "the first wrote", shows("the first"))
			before := fence.Recorded(app.Annotations)
			// It renews: the lease does not lapse while nothing is to be done.
			in2, said2, second := run()
			lapse := time.After(5 * time.Second)
			_, _ = io.WriteString(in2, line("the second"))
			<-lapse
			if !shows("the first")() {
				t.Fatal("the second did not wait")
			}
			_, _ = io.WriteString(in, line("the first again"))
			await(t, "the first wrote again", shows("the first again"))
			_ = in.Close()
			if err := first.Wait(); err != nil {
				t.Fatalf("the first: %v", err)
			}
			await(t, "the second wrote", shows("the second"))
			if after := fence.Recorded(app.Annotations); after <= before {
				t.Errorf("recorded %s after %s", after, before)
			}

			// The second is stopped, a third takes over, the second goes on.
			_ = second.Process.Signal(syscall.SIGSTOP)
			in3, said3, third := run()
			_, _ = io.WriteString(in3, line("the third"))
			await(t, "the third wrote", shows("the third"))
			_, _ = io.WriteString(in2, line("the second again"))
			_ = in2.Close()
			_ = second.Process.Signal(syscall.SIGCONT)
			if err := second.Wait(); err == nil {
				t.Errorf("the second ended well: %s", said2)
			}
			if !strings.Contains(strings.ToLower(said2.String()), "lost") && !strings.Contains(said2.String(), string(fence.StaleToken)) {
				t.Errorf("the second says %q", said2)
			}
			if !shows("the third")() {
				t.Errorf("%q wrote after the third", app.Data["by"])
			}
			_ = in3.Close()
			if err := third.Wait(); err != nil {
				t.Errorf("the third: %v: %s", err, said3)
			}
			claims := &v1alpha1.LeaseClaimList{}
			await(t, "nothing holds", func() bool {
				return e.Admin.List(t.Context(), claims, crclient.InNamespace(namespace)) == nil && held(claims) == 0
			})
		})
	}
}

// held counts the claims that hold a lease.
func held(claims *v1alpha1.LeaseClaimList) int {
	n := 0
	for _, c := range claims.Items {
		for _, condition := range c.Status.Conditions {
			if condition.Type == v1alpha1.LeaseClaimHeld && condition.Status == metav1.ConditionTrue {
				n++
			}
		}
	}
	return n
}
