package fencecli

import (
	"errors"
	"fmt"
	"slices"

	"github.com/fencedlease/fencedlease/client"
	"github.com/fencedlease/fencedlease/fence"
)

// Exit codes, as docs/cli.md lists them. run ends with its command's own code
// where the command ended by itself.
const (
	exitOK = iota
	exitFailed
	// exitUsage: the command line is wrong; nothing was sent.
	exitUsage
	// exitRejected: a fence rejected the write, or would.
	exitRejected
	// exitLost: the lease was lost.
	exitLost
	// exitNotAcquired: another claim holds the lease.
	exitNotAcquired
	// exitNotExecutable and exitNotFound are the shell's codes for a command
	// that cannot be run or does not exist; exitSignal is added to the number
	// of the signal that ended a command.
	exitNotExecutable = 126
	exitNotFound      = 127
	exitSignal        = 128
)

// usageError is a mistake on the command line.
type usageError struct{ error }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// codeError gives the exit code that it ends with; its text may be empty.
type codeError struct {
	error
	code int
}

func (e codeError) Unwrap() error { return e.error }

// exitCode maps what a command ended with to the exit code.
func exitCode(err error) int {
	var code codeError
	var usage usageError
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &code):
		return code.code
	case errors.As(err, &usage):
		return exitUsage
	case errors.Is(err, client.ErrNotAcquired):
		return exitNotAcquired
	case errors.Is(err, fence.ErrStale):
		return exitRejected
	case errors.Is(err, fence.ErrLost):
		return exitLost
	}
	if rejected(err) {
		return exitRejected
	}
	return exitFailed
}

// rejected tells whether a fence rejected any of the writes that err tells of.
func rejected(err error) bool {
	if _, ok := client.Reason(err); ok {
		return true
	}
	if several, ok := err.(interface{ Unwrap() []error }); ok {
		return slices.ContainsFunc(several.Unwrap(), rejected)
	}
	inner := errors.Unwrap(err)
	return inner != nil && rejected(inner)
}
