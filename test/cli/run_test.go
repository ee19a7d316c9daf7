package cli

import (
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

// alive tells whether a process runs; a dead one that nobody waited for does
// not.
func alive(pid string) bool {
	out, err := exec.Command("ps", "-o", "stat=", "-p", pid).Output()
	return err == nil && !strings.HasPrefix(strings.TrimSpace(string(out)), "Z")
}

func TestRunGivesTheCommandTheToken(t *testing.T) {
	f := newFixture(t)
	f.lease(t, "deploy")
	got := f.must(t, "run", "deploy", "--", "sh", "-c", "echo $FENCING_LEASE $FENCING_TOKEN")
	token := strconv.FormatInt(f.status(t, "deploy").Token, 10)
	if want := f.namespace + "/deploy " + token + "\n"; got != want {
		t.Fatalf("got %q, want %q", got, want)
	}
	if claims := f.claims(t); len(claims) > 0 {
		t.Fatalf("left %d claims", len(claims))
	}
}

func TestRunEndsWithTheCommandsExitCode(t *testing.T) {
	f := newFixture(t)
	f.lease(t, "deploy")
	for name, test := range map[string]struct {
		command []string
		want    int
	}{
		"success":                          {[]string{"true"}, 0},
		"its own code":                     {[]string{"sh", "-c", "exit 7"}, 7},
		"128 and the signal that ended it": {[]string{"sh", "-c", "kill -KILL $$"}, 137},
		"a command that does not exist":    {[]string{"no-such-command"}, 127},
		"a file that cannot be run":        {[]string{"/etc/hostname"}, 126},
	} {
		t.Run(name, func(t *testing.T) {
			if r := f.fence(t, append([]string{"run", "deploy", "--"}, test.command...)...); r.code != test.want {
				t.Fatalf("got %v, want exit code %d", r, test.want)
			}
		})
	}
}

func TestRunPassesStandardInput(t *testing.T) {
	f := newFixture(t)
	f.lease(t, "deploy")
	// Longer than a pipe holds.
	text := strings.Repeat("line\n", 50_000)
	if r := f.fenceWith(t, strings.NewReader(text), "run", "deploy", "--", "cat"); r.code != 0 || r.stdout != text {
		t.Fatalf("exit code %d, %d bytes of %d; %s", r.code, len(r.stdout), len(text), r.stderr)
	}
}

func TestRunStopsACommandThatIgnoresTermWithAllThatItForked(t *testing.T) {
	f := newFixture(t)
	f.lease(t, "deploy", duration(2))
	cmd := f.background(t, "run", "deploy", "--grace=300ms", "--", "sh", "-c",
		`trap '' TERM; sh -c 'trap "" TERM; echo pid $$; for i in $(seq 600); do sleep 0.1; done' & echo pid $$; for i in $(seq 600); do sleep 0.1; done`)
	pids := []string{cmd.out.next(t, "pid "), cmd.out.next(t, "pid ")}
	f.deleteClaims(t)
	cmd.ends(t, 4)
	for _, pid := range pids {
		if alive(pid) {
			t.Fatalf("process %s runs without the lease", pid)
		}
	}
}

func (f *fixture) deleteClaims(t *testing.T) {
	t.Helper()
	if err := f.Admin.DeleteAllOf(t.Context(), &v1alpha1.LeaseClaim{}, client.InNamespace(f.namespace)); err != nil {
		t.Fatal(err)
	}
}

func TestRunLeavesNothingBehindTheCommand(t *testing.T) {
	f := newFixture(t)
	f.lease(t, "deploy")
	cmd := f.background(t, "run", "deploy", "--", "sh", "-c", `sleep 300 >/dev/null 2>&1 & echo child $!; exit 7`)
	child := cmd.out.next(t, "child ")
	cmd.ends(t, 7)
	if alive(child) {
		t.Fatal("a process of the command outlived the lease")
	}
}

func TestRunForwardsSignalsAndReleasesAfterTheCommand(t *testing.T) {
	f := newFixture(t)
	f.lease(t, "deploy")
	cmd := f.background(t, "run", "deploy", "--", "sh", "-c",
		`trap 'echo stopping; read line; exit 9' TERM; echo ready; for i in $(seq 1200); do sleep 0.05; done`)
	cmd.out.next(t, "ready")
	cmd.send(t, syscall.SIGTERM)
	cmd.out.next(t, "stopping")
	if f.status(t, "deploy").Holder == nil {
		t.Fatal("released while the command winds up")
	}
	_ = cmd.stdin.Close()
	cmd.ends(t, 9)
	eventually(t, "the lease is free", func() bool { return f.status(t, "deploy").Holder == nil })
}

func TestRunLeavesTheQueueWhenInterrupted(t *testing.T) {
	f := newFixture(t)
	f.lease(t, "deploy")
	f.must(t, "acquire", "deploy")
	cmd := f.background(t, "run", "deploy", "--", "true")
	eventually(t, "two claims", func() bool { return len(f.claims(t)) == 2 })
	cmd.send(t, syscall.SIGINT)
	cmd.ends(t, 1)
	if claims := f.claims(t); len(claims) != 1 {
		t.Fatalf("left its claim in the queue: %d claims", len(claims))
	}
}

func TestRunDoesNotWaitLongerThanAsked(t *testing.T) {
	f := newFixture(t)
	f.lease(t, "deploy")
	f.must(t, "acquire", "deploy", "--identity=other")
	for name, flag := range map[string]string{"not at all": "--try", "half a second": "--wait=500ms"} {
		t.Run(name, func(t *testing.T) {
			started := time.Now()
			r := f.fence(t, "run", "deploy", flag, "--", "true")
			if r.code != 5 || time.Since(started) > 10*time.Second {
				t.Fatalf("got %v after %s, want exit code 5 at once", r, time.Since(started))
			}
		})
	}
}

// The lease is lost by this process's own clock while it is stopped: the
// command goes before anything else happens.
func TestRunStopsTheCommandAfterBeingPausedPastTheLease(t *testing.T) {
	f := newFixture(t)
	f.lease(t, "deploy", duration(1))
	cmd := f.background(t, "run", "deploy", "--", "sh", "-c", `echo child $$; for i in $(seq 600); do sleep 0.1; done`)
	child := cmd.out.next(t, "child ")
	cmd.send(t, syscall.SIGSTOP)
	eventually(t, "another holder", func() bool { return f.fence(t, "acquire", "deploy", "--try").code == 0 })
	cmd.send(t, syscall.SIGCONT)
	cmd.ends(t, 4)
	if alive(child) {
		t.Fatal("the command runs without the lease")
	}
}
