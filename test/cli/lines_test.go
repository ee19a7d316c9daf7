package cli

import (
	"bufio"
	"io"
	"strings"
	"testing"
	"time"
)

// lines reads a stream line by line.
type lines struct{ c chan string }

func newLines(r io.Reader) *lines {
	l := &lines{make(chan string, 1024)}
	go func() {
		defer close(l.c)
		s := bufio.NewScanner(r)
		for s.Scan() {
			l.c <- s.Text()
		}
	}()
	return l
}

// next awaits the next line that starts with the prefix and gives the rest.
func (l *lines) next(t *testing.T, prefix string) string {
	t.Helper()
	deadline := time.NewTimer(30 * time.Second)
	defer deadline.Stop()
	for {
		select {
		case line, ok := <-l.c:
			if !ok {
				t.Fatalf("ended without a line %q", prefix)
			}
			if rest, found := strings.CutPrefix(line, prefix); found {
				return rest
			}
		case <-deadline.C:
			t.Fatalf("no line %q", prefix)
		}
	}
}
