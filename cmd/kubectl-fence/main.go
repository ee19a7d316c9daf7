// Command kubectl-fence is the kubectl plugin of FencedLease.
package main

import (
	"os"

	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/utils/clock"

	"github.com/fencedlease/fencedlease/internal/fencecli"
)

func main() {
	os.Exit(fencecli.Execute(os.Args[1:], genericiooptions.IOStreams{In: os.Stdin, Out: os.Stdout, ErrOut: os.Stderr}, clock.RealClock{}))
}
