//go:build unix

package fencecli

import (
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/utils/clock"
)

// forwarded are the signals that a command is given in our place.
var forwarded = []os.Signal{
	syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2,
}

// group is a command in a process group of its own, with all that it started
// there.
type group struct {
	id    int
	clock clock.WithTicker
	// exited gives what the command itself ended with.
	exited chan error
	// terminal is where the group runs in the foreground, or -1.
	terminal int
}

// startGroup starts a command. On a terminal its group becomes the foreground
// one: it can read, and an interrupt is its own to handle.
func startGroup(cmd *exec.Cmd, c clock.WithTicker) (*group, error) {
	g := &group{clock: c, exited: make(chan error, 1), terminal: -1}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if f, ok := cmd.Stdin.(*os.File); ok && inForeground(int(f.Fd())) {
		g.terminal = int(f.Fd())
		cmd.SysProcAttr.Foreground, cmd.SysProcAttr.Ctty = true, g.terminal
		// To suspend the holder of a lease is to lose it, so Ctrl-Z does
		// nothing. The command inherits that.
		signal.Ignore(syscall.SIGTSTP)
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	g.id = cmd.Process.Pid
	go func() { g.exited <- cmd.Wait() }()
	return g, nil
}

// inForeground tells whether this process owns the terminal that it was given;
// as a background job it must not take it from the shell.
func inForeground(fd int) bool {
	owner, err := unix.IoctlGetInt(fd, unix.TIOCGPGRP)
	return err == nil && owner == unix.Getpgrp()
}

// signal sends to the whole group. It fails only where nobody is left.
func (g *group) signal(sig syscall.Signal) { _ = syscall.Kill(-g.id, sig) }

// end ends what is left of the group: SIGTERM, and SIGKILL after the grace
// period. Stopped processes are continued, so that they can obey.
func (g *group) end(grace time.Duration) {
	g.signal(syscall.SIGTERM)
	g.signal(syscall.SIGCONT)
	if !g.gone(grace) {
		g.signal(syscall.SIGKILL)
		g.gone(time.Second)
	}
	if g.terminal >= 0 {
		// Taking the terminal back from the background would stop us.
		signal.Ignore(syscall.SIGTTOU)
		_ = unix.IoctlSetPointerInt(g.terminal, unix.TIOCSPGRP, unix.Getpgrp())
	}
}

// gone waits until no process of the group is left, for at most the limit.
func (g *group) gone(limit time.Duration) bool {
	end := g.clock.Now().Add(limit)
	tick := g.clock.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		// As the first process of a container we inherit orphans: a dead one
		// would count as alive until it is waited for.
		for {
			if pid, err := syscall.Wait4(-g.id, nil, syscall.WNOHANG, nil); pid <= 0 || err != nil {
				break
			}
		}
		if syscall.Kill(-g.id, 0) == syscall.ESRCH {
			return true
		}
		if !g.clock.Now().Before(end) {
			return false
		}
		<-tick.C()
	}
}
