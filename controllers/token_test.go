package controllers

import (
	"errors"
	"strconv"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
)

func leaseWith(revision, last string, token, minimum int64) *v1alpha1.FencedLease {
	lease := &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "main", ResourceVersion: revision}}
	if last != "none" {
		lease.Annotations = map[string]string{fence.AnnotationLastToken: last}
	}
	lease.Status.Token, lease.Spec.MinToken = token, minimum
	return lease
}

func TestNextToken(t *testing.T) {
	for name, c := range map[string]struct {
		revision, last string
		token, minimum int64
		floor          fence.Token
		want           fence.Token
		reason         string
	}{
		"the first starts above the revision":           {revision: "100", last: "none", want: 101},
		"the first starts above the floor":              {revision: "100", last: "none", floor: 500, want: 501},
		"the first starts above a restored last-token":  {revision: "100", last: "700", floor: 500, want: 701},
		"the first starts above minToken":               {revision: "100", last: "none", minimum: 900, want: 901},
		"a later one follows the current":               {revision: "5000", last: "101", token: 101, floor: 9000, want: 102},
		"a reserved one is skipped":                     {revision: "5000", last: "105", token: 101, want: 106},
		"minToken lifts a later one":                    {revision: "5000", last: "101", token: 101, minimum: 200, want: 201},
		"minToken below changes nothing":                {revision: "5000", last: "101", token: 101, minimum: 50, want: 102},
		"a last-token at the most":                      {revision: "100", last: "4503599627370496", want: 4503599627370497},
		"a last-token above it":                         {revision: "100", last: "4503599627370497", reason: v1alpha1.ReasonInvalidLastToken},
		"one reserved above it after a crash":           {revision: "100", last: "6755399441055745", token: 7, minimum: 6755399441055744, want: 6755399441055746},
		"one reserved above a high floor after a crash": {revision: "100", last: "6000000000000001", floor: 6000000000000000, want: 6000000000000002},
		"a malformed last-token":                        {revision: "100", last: "042", reason: v1alpha1.ReasonInvalidLastToken},
		"an empty last-token":                           {revision: "100", last: "", reason: v1alpha1.ReasonInvalidLastToken},
		"a malformed one stops a later token too":       {revision: "100", last: "x", token: 7, reason: v1alpha1.ReasonInvalidLastToken},
		"a resourceVersion that is no integer":          {revision: "abc", last: "none", reason: v1alpha1.ReasonInvalidResourceVersion},
		"no resourceVersion":                            {revision: "", last: "none", reason: v1alpha1.ReasonInvalidResourceVersion},
		"a resourceVersion beyond tokens":               {revision: "9007199254740991", last: "none", reason: v1alpha1.ReasonInvalidResourceVersion},
		"the resourceVersion does not matter later":     {revision: "abc", last: "none", token: 7, want: 8},
		"the highest token is issued":                   {revision: "100", last: "none", token: 9007199254740990, want: fence.MaxToken},
		"and none after it":                             {revision: "100", last: "none", token: int64(fence.MaxToken), reason: v1alpha1.ReasonTokensExhausted},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := nextToken(leaseWith(c.revision, c.last, c.token, c.minimum), c.floor)
			var cannot *cannotIssueError
			if c.reason != "" {
				if !errors.As(err, &cannot) || cannot.reason != c.reason {
					t.Errorf("got %v, %v, want reason %s", got, err, c.reason)
				}
			} else if err != nil || got != c.want {
				t.Errorf("got %v, %v, want %v", got, err, c.want)
			}
		})
	}
}

// TestNextTokenIsAboveAll: whatever is known of a lease, the next token is
// above all of it.
func TestNextTokenIsAboveAll(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.Int64Range(1, 1<<52)
		revision, last := n.Draw(t, "revision"), n.Draw(t, "last")
		token := rapid.OneOf(rapid.Just(int64(0)), n).Draw(t, "token")
		minimum := rapid.OneOf(rapid.Just(int64(0)), n).Draw(t, "minimum")
		floor := rapid.OneOf(rapid.Just(int64(0)), n).Draw(t, "floor")
		got, err := nextToken(leaseWith(strconv.FormatInt(revision, 10), strconv.FormatInt(last, 10), token, minimum), fence.Token(floor))
		if err != nil {
			t.Fatal(err)
		}
		above := []int64{last, token, minimum}
		if token == 0 {
			above = append(above, revision, floor)
		}
		for _, a := range above {
			if int64(got) <= a {
				t.Errorf("next is %d, not above %d", got, a)
			}
		}
	})
}
