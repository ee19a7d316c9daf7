package controllers

import (
	"fmt"
	"strconv"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
)

// maxRestoredToken is the highest last-token that a backup may bring back: it
// leaves as many tokens again as the lease can ever have issued.
const maxRestoredToken fence.Token = 1 << 52

// lastToken reads the annotation that holds the newest reserved token, 0
// where there is none.
func lastToken(lease *v1alpha1.FencedLease) (fence.Token, error) {
	text, ok := lease.Annotations[fence.AnnotationLastToken]
	if !ok {
		return 0, nil
	}
	token, err := fence.ParseToken(text)
	switch {
	case err != nil:
		return 0, &cannotIssue{v1alpha1.ReasonInvalidLastToken, fmt.Sprintf(
			"annotation %s: %v; take it off, and set spec.minToken above every token of this lease", fence.AnnotationLastToken, err)}
	case token > maxRestoredToken && token != fence.Token(lease.Status.Token):
		return 0, &cannotIssue{v1alpha1.ReasonInvalidLastToken, fmt.Sprintf(
			"annotation %s: %s is above %s; take it off, and set spec.minToken above every token of this lease", fence.AnnotationLastToken, token, maxRestoredToken)}
	}
	return token, nil
}

// nextToken is the rule of issuing: above every token that this lease, or one
// of its name before it, was ever issued. A store's revision grows with each
// write, so the first token starts above the revision; floor is what the
// cluster-wide floor holds, for tokens that ran ahead of it.
func nextToken(lease *v1alpha1.FencedLease, floor fence.Token) (fence.Token, error) {
	last, err := lastToken(lease)
	if err != nil {
		return 0, err
	}
	next := max(fence.Token(lease.Status.Token), last, fence.Token(lease.Spec.MinToken))
	if lease.Status.Token == 0 {
		revision, err := revisionOf(lease.ResourceVersion)
		if err != nil {
			return 0, err
		}
		next = max(next, revision, floor)
	}
	next++
	if !next.Valid() {
		return 0, &cannotIssue{v1alpha1.ReasonTokensExhausted, fmt.Sprintf("the next token would exceed %d: create another lease", fence.MaxToken)}
	}
	return next, nil
}

// revisionOf reads a resourceVersion as the store's revision.
func revisionOf(resourceVersion string) (fence.Token, error) {
	n, err := strconv.ParseInt(resourceVersion, 10, 64)
	if err != nil || n < 1 || n >= int64(fence.MaxToken) {
		return 0, &cannotIssue{v1alpha1.ReasonInvalidResourceVersion, fmt.Sprintf(
			"resourceVersion %q is not an integer that a token can start from", resourceVersion)}
	}
	return fence.Token(n), nil
}
