package cli

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// terminal starts the plugin on a terminal of its own; keys are what is typed.
func (f *fixture) terminal(t *testing.T, args ...string) (cmd *background, keys *os.File) {
	t.Helper()
	keys, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = keys.Close() })
	if err := unix.IoctlSetPointerInt(int(keys.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	number, err := unix.IoctlGetInt(int(keys.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	screen, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = screen.Close() }()
	cmd = &background{Cmd: f.program(t.Context(), filepath.Join(plugin, "kubectl-fence"), append([]string{"--namespace=" + f.namespace}, args...)...)}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = screen, screen, screen
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	cmd.out = newLines(keys)
	return cmd, keys
}

func TestRunGivesTheCommandTheTerminal(t *testing.T) {
	f := newFixture(t)
	f.lease(t, "deploy")
	cmd, keys := f.terminal(t, "run", "deploy", "--", "sh", "-c",
		`trap 'echo interrupted; exit 9' INT; echo ready; read line; echo "read $line"; for i in $(seq 1200); do sleep 0.05; done`)
	cmd.out.next(t, "ready")
	fmt.Fprintln(keys, "hello")
	cmd.out.next(t, "read hello")
	// Ctrl-Z would lose the lease and does nothing; Ctrl-C is the command's.
	fmt.Fprint(keys, "\x1a\x03")
	cmd.ends(t, 9)
}
