package decision

import (
	"bytes"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/gateway"
)

// nginx runs the real NGINX with the shipped configuration. Callers come to
// its front.
func nginx(t *testing.T, decision, _, partner string) door {
	t.Helper()
	program, err := exec.LookPath("nginx")
	if err != nil {
		// Debian has it where the PATH of a user does not lead.
		if program, err = exec.LookPath("/usr/sbin/nginx"); err != nil {
			t.Fatal("no nginx on this machine: apt-get install nginx")
		}
	}
	dir, front, judging := t.TempDir(), freeAddress(t), freeAddress(t)
	text := configure(t, "nginx.conf",
		"http {", "http {\n"+`access_log off; client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi; uwsgi_temp_path uwsgi; scgi_temp_path scgi;`,
		"server 127.0.0.1:9080;", "server "+decision+";",
		// Twice, so that there is another one to go on to after a failure.
		"server 127.0.0.1:9002;", "server "+partner+" max_fails=0; server "+partner+" max_fails=0;",
		"listen 127.0.0.1:8080;", "listen "+front+";",
		"listen 127.0.0.1:8081;", "listen "+judging+";",
		"proxy_pass http://127.0.0.1:8081;", "proxy_pass http://"+judging+";")
	file := filepath.Join(dir, "nginx.conf")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	cmd := exec.CommandContext(t.Context(), program, "-p", dir, "-c", file, "-e", "stderr", "-g", "daemon off; pid nginx.pid; error_log stderr;")
	cmd.Stderr = &log
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() {
		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
			t.Error(err)
		}
		<-ended
		if t.Failed() {
			t.Logf("nginx wrote\n%s", log.Bytes())
		}
	})
	eventually(t, "NGINX listens", func() bool {
		conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", front)
		if err == nil {
			_ = conn.Close()
		}
		return err == nil
	})
	return door{
		address:   front,
		undecided: outcome{status: http.StatusServiceUnavailable, reason: gateway.Undecided},
		silent:    outcome{status: http.StatusServiceUnavailable},
		differs: map[string]outcome{
			// NGINX drops names with underscores.
			"underscore":                   {status: http.StatusForbidden, reason: fence.Unstamped},
			"underscore beside the header": passes("43"),
			// It passes Connection on to nobody, and drops nothing that it names.
			"named by Connection": passes("43"),
		},
	}
}

func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	return l.Addr().String()
}

func TestNGINX(t *testing.T)        { testDoor(t, nginx) }
func TestNGINXFailing(t *testing.T) { testFailing(t, nginx) }

// TestNGINXJudgesWholeCalls: a worker that is stopped halfway through sending
// a body is judged when the body is whole.
func TestNGINXJudgesWholeCalls(t *testing.T) {
	f := newFixture(t)
	d := nginx(t, f.decision, f.extAuthz, f.partner.address)
	head := f.head("42", "Content-Type: text/plain")
	head[0] = "Content-Length: 8"
	got := send(t, d.address, http.MethodPost, head, func(w io.Writer) {
		write := func(s string) {
			if _, err := io.WriteString(w, s); err != nil {
				t.Error(err)
			}
		}
		write("EUR ")
		// Were the call judged by its head, it would be before these.
		for range 10 {
			if got := f.call(t, d, http.MethodPost, f.head("42")); got != passes("42") {
				t.Errorf("the holder: %+v", got)
			}
		}
		f.issue(t, 43)
		if got := f.call(t, d, http.MethodPost, f.head("43")); got != passes("43") {
			t.Errorf("the new holder: %+v", got)
		}
		write("5.00")
	})
	if want := (outcome{status: http.StatusForbidden, reason: fence.StaleToken}); got != want || len(f.partner.calls()) > 0 {
		t.Errorf("the old holder, resumed: %+v, want %+v", got, want)
	}
}

// TestNGINXRepeatsNothing: NGINX does not send a call again whose connection
// broke, since the repeat would not be judged.
func TestNGINXRepeatsNothing(t *testing.T) {
	f := newFixture(t)
	d := nginx(t, f.decision, f.extAuthz, f.partner.address)
	f.partner.breaks.Store(true)
	for _, method := range []string{http.MethodPost, http.MethodGet, http.MethodDelete} {
		got := send(t, d.address, method, f.head("42"), nil)
		if arrived := f.partner.calls(); got.status != http.StatusBadGateway || len(arrived) != 1 {
			t.Errorf("%s: %+v, arrived %d times", method, got, len(arrived))
		}
	}
}
