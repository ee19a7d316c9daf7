package controllers

import (
	"fmt"
	"strconv"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
)

const (
	// maxRestoredToken is the highest last-token that is taken from a backup:
	// it leaves as many tokens again.
	maxRestoredToken fence.Token = 1 << 52
	// maxSkipped is how many reserved tokens may have been skipped by crashes
	// above what else is known of a lease.
	maxSkipped fence.Token = 1 << 20
)

// nextToken is the rule of issuing: above every token that this lease, or one
// of its name before it, was ever issued. A store's revision grows with each
// write, so the first token starts above the revision; floor is what the
// cluster-wide floor holds, for tokens that ran ahead of it. The error is a
// cannotIssueError.
func nextToken(lease *v1alpha1.FencedLease, floor fence.Token) (fence.Token, error) {
	known := max(fence.Token(lease.Status.Token), fence.Token(lease.Spec.MinToken))
	if lease.Status.Token == 0 {
		revision, err := revisionOf(lease.ResourceVersion)
		if err != nil {
			return 0, err
		}
		known = max(known, revision, floor)
	}
	next := known
	if text, ok := lease.Annotations[fence.AnnotationLastToken]; ok {
		last, err := fence.ParseToken(text)
		if err == nil && last > max(maxRestoredToken, known+maxSkipped) {
			err = fmt.Errorf("%s is above %s", last, maxRestoredToken)
		}
		if err != nil {
			return 0, &cannotIssueError{v1alpha1.ReasonInvalidLastToken, fmt.Sprintf(
				"annotation %s: %v; take it off, and set spec.minToken above every token of this lease", fence.AnnotationLastToken, err)}
		}
		next = max(next, last)
	}
	if next++; !next.Valid() {
		return 0, &cannotIssueError{v1alpha1.ReasonTokensExhausted, fmt.Sprintf("the next token would exceed %d: create another lease", fence.MaxToken)}
	}
	return next, nil
}

// revisionOf reads a resourceVersion as the store's revision.
func revisionOf(resourceVersion string) (fence.Token, error) {
	n, err := strconv.ParseInt(resourceVersion, 10, 64)
	if err != nil || n < 1 || n >= int64(fence.MaxToken) {
		return 0, &cannotIssueError{v1alpha1.ReasonInvalidResourceVersion, fmt.Sprintf(
			"resourceVersion %q is not an integer that a token can start from", resourceVersion)}
	}
	return fence.Token(n), nil
}
