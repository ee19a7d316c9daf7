package fencecli

import (
	"errors"
	"fmt"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/fencedlease/fencedlease/client"
	"github.com/fencedlease/fencedlease/fence"
)

func TestExitCode(t *testing.T) {
	missing := apierrors.NewNotFound(schema.GroupResource{Resource: "configmaps"}, "web")
	stale := apierrors.NewForbidden(schema.GroupResource{Resource: "configmaps"}, "web",
		errors.New(`admission webhook "x" denied the request: StaleToken: [a/b] token 41 is stale`))
	forbidden := apierrors.NewForbidden(schema.GroupResource{Resource: "configmaps"}, "web", errors.New("no rule"))
	for name, test := range map[string]struct {
		err  error
		want int
	}{
		"nothing":                          {nil, 0},
		"any failure":                      {missing, 1},
		"no permission is no rejection":    {forbidden, 1},
		"a wrong command line":             {fmt.Errorf("x: %w", usagef("y")), 2},
		"a rejection":                      {fmt.Errorf("apply: %w", stale), 3},
		"a rejection among other failures": {errors.Join(missing, fmt.Errorf("apply: %w", stale)), 3},
		"a stale token of our own finding": {fmt.Errorf("%w: x", fence.ErrStale), 3},
		"a lost lease":                     {&client.LostError{Lease: "a/b", Token: 1, Reason: client.LossLapsed}, 4},
		"another holder":                   {fmt.Errorf("%w: x", client.ErrNotAcquired), 5},
		"a command's own code":             {codeError{errors.New(""), 7}, 7},
	} {
		t.Run(name, func(t *testing.T) {
			if got := exitCode(test.err); got != test.want {
				t.Fatalf("got %d, want %d", got, test.want)
			}
		})
	}
}
