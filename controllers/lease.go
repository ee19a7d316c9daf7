package controllers

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	logf "sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
)

// leaseReconciler turns the claims of one lease into tokens.
type leaseReconciler struct {
	client client.Client
	// live reads past the cache.
	live     client.Reader
	clock    clock.PassiveClock
	events   events.EventRecorder
	renewals *renewals
	floor    *floor
	seal     *sealer
	table    *leaseTable
	// finished counts the time to live of finished claims, delays the
	// hand-over delay of leases, waited the age of claims in the queue: all
	// from when this process first saw the cause. vacant counts the time that
	// a lease with claims in its queue has no holder.
	finished, delays, waited, vacant *renewals
	// gone is the claim of each lease that was last seen to be deleted while it
	// held: a UID does not come back.
	gone sync.Map
}

// Reconcile implements reconcile.Reconciler.
func (r *leaseReconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	result, err := r.reconcile(ctx, req.NamespacedName)
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) || errors.Is(err, errBehind) {
		// Somebody was faster, or the cache is behind: look again.
		return ctrl.Result{RequeueAfter: 20 * time.Millisecond}, nil
	}
	return result, err
}

// errBehind is that the cache is known to lack what was written already.
var errBehind = errors.New("the cache is behind")

func (r *leaseReconciler) reconcile(ctx context.Context, key types.NamespacedName) (ctrl.Result, error) {
	all := &v1alpha1.LeaseClaimList{}
	if err := r.client.List(ctx, all, client.InNamespace(key.Namespace), client.MatchingFields{claimsByLease: key.Name}); err != nil {
		return ctrl.Result{}, err
	}
	current := &v1alpha1.FencedLease{}
	if err := r.client.Get(ctx, key, current); apierrors.IsNotFound(err) {
		r.gone.Delete(key)
		return r.withoutLease(ctx, key, all)
	} else if err != nil {
		return ctrl.Result{}, err
	}
	if !current.DeletionTimestamp.IsZero() {
		return ctrl.Result{}, nil
	}
	s := situation{lease: current, lapsed: map[types.UID]bool{}}
	for i := range all.Items {
		c := &all.Items[i]
		if c.Status.Token > current.Status.Token && !finished(c) && s.lease == current {
			// The claim knows of a token that this view of the lease does not:
			// the cache is behind, or the token is a former lease's.
			s.lease = &v1alpha1.FencedLease{}
			if err := r.live.Get(ctx, key, s.lease); err != nil {
				return ctrl.Result{}, err
			}
		}
		if c.DeletionTimestamp.IsZero() {
			s.claims = append(s.claims, c)
		}
	}
	if err := r.findHolder(ctx, &s, all.Items); err != nil {
		return ctrl.Result{}, err
	}
	if err := r.mark(ctx, s.lease); err != nil {
		return ctrl.Result{}, err
	}
	next, err := r.observe(ctx, &s)
	if err != nil {
		return ctrl.Result{}, err
	}
	p, err := r.decide(ctx, &s)
	if err != nil {
		return ctrl.Result{}, err
	}
	lease, retry, err := r.carryOut(ctx, s, &p)
	if err != nil {
		return ctrl.Result{}, err
	}
	next = sooner(next, retry)
	// The holder is told first, then who came first: places are given in the
	// order of arrival, wherever this ends.
	rank := func(c *v1alpha1.LeaseClaim) int64 {
		if holdsClaim(lease, c) {
			return 0
		}
		return p.ticket(c)
	}
	slices.SortFunc(s.claims, func(a, b *v1alpha1.LeaseClaim) int { return cmp.Compare(rank(a), rank(b)) })
	for _, c := range s.claims {
		wait, err := r.tell(ctx, lease, c, p)
		if err != nil {
			return ctrl.Result{}, err
		}
		next = sooner(next, wait)
	}
	return ctrl.Result{RequeueAfter: sooner(next, p.delay)}, nil
}

// findHolder adds the holder's claim where the cache does not show it yet:
// nobody counts as gone before the API server says so.
func (r *leaseReconciler) findHolder(ctx context.Context, s *situation, cached []v1alpha1.LeaseClaim) error {
	holder := s.lease.Status.Holder
	if gone, ok := r.gone.Load(client.ObjectKeyFromObject(s.lease)); ok && holder != nil && holder.ClaimUID == gone {
		return nil
	}
	if holder == nil || holder.ClaimName == "" ||
		slices.ContainsFunc(cached, func(c v1alpha1.LeaseClaim) bool { return string(c.UID) == holder.ClaimUID }) {
		return nil
	}
	c := &v1alpha1.LeaseClaim{}
	err := r.live.Get(ctx, client.ObjectKey{Namespace: s.lease.Namespace, Name: holder.ClaimName}, c)
	if err == nil && string(c.UID) == holder.ClaimUID && c.DeletionTimestamp.IsZero() {
		s.claims = append(s.claims, c)
	}
	return client.IgnoreNotFound(err)
}

// decide plans on what the cache shows, but for what a token is issued on: the
// claim that is granted next is read again, and left out where it is released,
// finished or was granted before; and the cache must show the lease as it is.
func (r *leaseReconciler) decide(ctx context.Context, s *situation) (plan, error) {
	for {
		p := decide(*s)
		if !p.issue && !p.revoke {
			return p, nil
		}
		var reading errgroup.Group
		reading.Go(func() error { return r.upToDate(ctx, s.lease) })
		if !p.issue || p.holder.ClaimUID == "" {
			return p, reading.Wait()
		}
		now := &v1alpha1.LeaseClaim{}
		err := r.live.Get(ctx, client.ObjectKey{Namespace: s.lease.Namespace, Name: p.holder.ClaimName}, now)
		if err := errors.Join(client.IgnoreNotFound(err), reading.Wait()); err != nil {
			return plan{}, err
		}
		if err == nil && string(now.UID) == p.holder.ClaimUID && now.DeletionTimestamp.IsZero() && !finished(now) &&
			(now.Status.Token == 0 || holdsClaim(s.lease, now)) {
			p.read = now
			return p, nil
		}
		s.claims = slices.DeleteFunc(s.claims, func(c *v1alpha1.LeaseClaim) bool { return string(c.UID) == p.holder.ClaimUID })
	}
}

// upToDate fails where the lease is not as the cache shows it. The store would
// refuse the reservation, but the lease table, which is written beside it, would
// have who holds refused for as long.
func (r *leaseReconciler) upToDate(ctx context.Context, cached *v1alpha1.FencedLease) error {
	now := &v1alpha1.FencedLease{}
	if err := r.live.Get(ctx, client.ObjectKeyFromObject(cached), now); err != nil {
		return err
	}
	if now.ResourceVersion != cached.ResourceVersion {
		return errBehind
	}
	return nil
}

// observe fills in who lapsed, and gives when to look again. Before anybody
// counts as lapsed it is read again from the API server.
func (r *leaseReconciler) observe(ctx context.Context, s *situation) (next time.Duration, err error) {
	duration := time.Duration(s.lease.Spec.LeaseDurationSeconds) * time.Second
	for _, c := range s.claims {
		if finished(c) {
			continue
		}
		r.waited.see(c.UID, "")
		left := duration - r.renewals.see(c.UID, renewalOf(c))
		if left <= 0 {
			now := &v1alpha1.LeaseClaim{}
			switch err := r.live.Get(ctx, client.ObjectKeyFromObject(c), now); {
			case apierrors.IsNotFound(err):
			case err != nil:
				return 0, err
			case now.UID == c.UID:
				left = duration - r.renewals.see(c.UID, renewalOf(now))
			}
		}
		if left <= 0 {
			s.lapsed[c.UID] = true
			continue
		}
		next = sooner(next, left)
	}
	if ref := s.lease.Spec.LeaseRef; ref != nil {
		left, err := r.observeNative(ctx, s, ref.Name)
		if err != nil {
			return 0, err
		}
		next = sooner(next, left)
	}
	if held := meta.FindStatusCondition(s.lease.Status.Conditions, v1alpha1.FencedLeaseHeld); held != nil &&
		held.Reason == v1alpha1.ReasonHandoverDelay && s.lease.Status.Holder == nil && s.lease.Spec.HandoverDelaySeconds != nil {
		delay := time.Duration(*s.lease.Spec.HandoverDelaySeconds) * time.Second
		s.delay = delay - r.delays.see(s.lease.UID, strconv.FormatInt(s.lease.Status.Token, 10))
	}
	return next, nil
}

func (r *leaseReconciler) observeNative(ctx context.Context, s *situation, name string) (time.Duration, error) {
	key := client.ObjectKey{Namespace: s.lease.Namespace, Name: name}
	left := time.Duration(0)
	for _, reader := range []client.Reader{r.client, r.live} {
		native := &coordinationv1.Lease{}
		if err := reader.Get(ctx, key, native); apierrors.IsNotFound(err) {
			s.native = nil
			return 0, nil
		} else if err != nil {
			return 0, err
		}
		s.native = native
		duration := time.Duration(s.lease.Spec.LeaseDurationSeconds) * time.Second
		if native.Spec.LeaseDurationSeconds != nil {
			duration = time.Duration(*native.Spec.LeaseDurationSeconds) * time.Second
		}
		mark := native.ResourceVersion
		if left = duration - r.renewals.see(native.UID, mark); left > 0 {
			return left, nil
		}
	}
	s.lapsed[s.native.UID] = true
	return 0, nil
}

// carryOut brings the lease to what the plan says: reserve, seal, publish. It
// gives the lease as it then is, and when to try again what could not be done.
func (r *leaseReconciler) carryOut(ctx context.Context, s situation, p *plan) (lease *v1alpha1.FencedLease, retry time.Duration, err error) {
	lease = s.lease.DeepCopy()
	ready := metav1.Condition{Type: v1alpha1.FencedLeaseReady, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonReady, Message: "tokens can be issued"}
	var floor fence.Token
	if s.lease.Status.Token == 0 {
		floor, err = r.floor.read(ctx)
	}
	if err == nil {
		_, err = nextToken(lease, floor)
	}
	if err != nil {
		ready = notReady(err)
		if ready.Reason == "" {
			return nil, 0, err
		}
		if ready.Reason == v1alpha1.ReasonFloorUnavailable {
			retry = cannotRetry
		}
	} else if ref := lease.Spec.LeaseRef; ref != nil && s.native == nil {
		ready = notReady(&cannotIssueError{v1alpha1.ReasonLeaseNotFound, fmt.Sprintf("Lease %s does not exist in this namespace", ref.Name)})
	} else if ref != nil {
		ready.Message = fmt.Sprintf("tokens follow Lease %s; processes that share one identity there share one token", ref.Name)
	}
	handsOver := s.lease.Status.Token > 0 && (s.lease.Status.Holder == nil || p.left != "") && (p.issue || p.delayed)
	if handsOver {
		r.vacant.see(lease.UID, "")
	}
	if p.issue || p.revoke {
		start := r.clock.Now()
		defer func() {
			if p.issue && err == nil {
				issueTime.Observe(r.clock.Since(start).Seconds())
			}
		}()
		token, incomplete, err := r.reserve(ctx, lease, floor, p.holder)
		var cannot *cannotIssueError
		switch {
		case errors.As(err, &cannot):
			// Nothing is published: who holds goes on holding.
			ready, retry = notReady(err), cannotRetry
			p.issue, p.revoke, p.left, p.holder = false, false, "", s.lease.Status.Holder
		case err != nil:
			return nil, 0, err
		default:
			lease.Status.Token = int64(token)
			if p.issue {
				p.holder = p.holder.DeepCopy()
				p.holder.AcquireTime = new(metav1.NewMicroTime(r.clock.Now()))
			}
			if incomplete != "" {
				ready.Reason, ready.Message = v1alpha1.ReasonSealIncomplete, incomplete
			}
		}
	} else if old := meta.FindStatusCondition(lease.Status.Conditions, v1alpha1.FencedLeaseReady); old != nil &&
		old.Reason == v1alpha1.ReasonSealIncomplete && ready.Status == metav1.ConditionTrue {
		ready.Reason, ready.Message = old.Reason, old.Message // until the next hand-over
	}
	lease.Status.Holder = p.holder
	lease.Status.Waiting = &p.waiting
	lease.Status.ObservedGeneration = &lease.Generation
	for _, condition := range []metav1.Condition{ready, heldOf(lease, *p)} {
		condition.ObservedGeneration = lease.Generation
		setCondition(&lease.Status.Conditions, condition, r.clock)
	}
	if equality.Semantic.DeepEqual(lease.Status, s.lease.Status) {
		return lease, retry, nil
	}
	if err := r.client.Status().Update(ctx, lease); err != nil {
		r.table.retract(lease)
		return nil, 0, err
	}
	if handsOver && p.issue {
		handoverTime.Observe(r.vacant.see(lease.UID, "").Seconds())
		r.vacant.forget(lease.UID)
	}
	r.announce(ctx, s, *p, lease)
	return lease, retry, nil
}

// cannotRetry is how long to wait before trying again what only people, or
// another part of the cluster, can mend; a change of the lease comes first.
const cannotRetry = 5 * time.Second

// cannotIssueError is why no token can be issued, as the Ready condition says it.
type cannotIssueError struct{ reason, message string }

func (e *cannotIssueError) Error() string { return e.message }

func notReady(err error) metav1.Condition {
	condition := metav1.Condition{Type: v1alpha1.FencedLeaseReady, Status: metav1.ConditionFalse, Message: err.Error()}
	var cannot *cannotIssueError
	if errors.As(err, &cannot) {
		condition.Reason = cannot.reason
	}
	return condition
}

// setCondition sets a condition with the time of its own clock.
func setCondition(conditions *[]metav1.Condition, condition metav1.Condition, c clock.PassiveClock) {
	condition.LastTransitionTime = metav1.NewTime(c.Now())
	meta.SetStatusCondition(conditions, condition)
}

func heldOf(lease *v1alpha1.FencedLease, p plan) metav1.Condition {
	held := metav1.Condition{Type: v1alpha1.FencedLeaseHeld, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonFree, Message: "nobody holds the lease"}
	before := meta.FindStatusCondition(lease.Status.Conditions, v1alpha1.FencedLeaseHeld)
	switch {
	case p.holder != nil:
		held.Status, held.Reason = metav1.ConditionTrue, v1alpha1.ReasonHeld
		held.Message = fmt.Sprintf("%q holds it with token %d", p.holder.Identity, lease.Status.Token)
	case p.delayed,
		// Nobody waits yet; the delay counts all the same.
		p.left == v1alpha1.ReasonLapsed && lease.Spec.HandoverDelaySeconds != nil && *lease.Spec.HandoverDelaySeconds > 0,
		p.left == "" && before != nil && before.Reason == v1alpha1.ReasonHandoverDelay && p.delay > 0:
		held.Reason, held.Message = v1alpha1.ReasonHandoverDelay, "the last holder lapsed, and handoverDelaySeconds runs"
	}
	return held
}

// reserve writes the next token where a crash cannot lose it, seals what the
// lease seals, and lets the lease table expect the token. Then it is ready to
// be published; incomplete names what was not sealed in time where the lease
// goes on without.
func (r *leaseReconciler) reserve(ctx context.Context, lease *v1alpha1.FencedLease, floor fence.Token, holder *v1alpha1.Holder) (token fence.Token, incomplete string, err error) {
	if token, err = nextToken(lease, floor); err != nil {
		return 0, "", err
	}
	next := lease.DeepCopy()
	next.Status.Token, next.Status.Holder = int64(token), holder
	// Where nothing is to be sealed nor a floor to be raised, which may keep the
	// token from being issued, the table need not wait for the reservation. It
	// costs a revision itself.
	revision, err := revisionOf(lease.ResourceVersion)
	if err != nil {
		return 0, "", err
	}
	together := lease.Spec.Seal == nil && token <= revision+1
	var writing errgroup.Group
	if together {
		writing.Go(func() error { return r.table.expect(ctx, next) })
	}
	incomplete, err = r.reserveAndSeal(ctx, lease, token)
	if err = errors.Join(err, writing.Wait()); err == nil && !together {
		if revision, _ := revisionOf(lease.ResourceVersion); token > revision {
			r.table.runsAhead(token)
		}
		err = r.table.expect(ctx, next)
	}
	if err != nil {
		r.table.retract(lease)
		return 0, "", err
	}
	return token, incomplete, nil
}

func (r *leaseReconciler) reserveAndSeal(ctx context.Context, lease *v1alpha1.FencedLease, token fence.Token) (incomplete string, err error) {
	if lease.Annotations == nil {
		lease.Annotations = map[string]string{}
	}
	lease.Annotations[fence.AnnotationLastToken] = token.String()
	if err := r.client.Update(ctx, lease); err != nil {
		return "", err
	}
	revision, err := revisionOf(lease.ResourceVersion)
	if err != nil {
		return "", err
	}
	if token > revision {
		// It ran ahead of the store, so a lease created anew would not start
		// above it by itself.
		if err := r.floor.raise(ctx, token); err != nil {
			return "", err
		}
	}
	return r.seal.seal(ctx, lease, token)
}

// guardedNamespaces are those where objects may name the lease; "*" is all.
func guardedNamespaces(lease *v1alpha1.FencedLease) []string {
	return append([]string{lease.Namespace}, lease.Spec.AllowedNamespaces...)
}

// mark labels the namespaces where the lease guards objects, so that the
// fence looks at requests there that carry no label of the object's.
func (r *leaseReconciler) mark(ctx context.Context, lease *v1alpha1.FencedLease) error {
	for _, name := range guardedNamespaces(lease) {
		namespace := &corev1.Namespace{}
		if err := r.client.Get(ctx, client.ObjectKey{Name: name}, namespace); apierrors.IsNotFound(err) {
			continue // "*", or not there yet: its creation leads back here
		} else if err != nil {
			return err
		}
		if namespace.Labels[fence.LabelNamespaceMark] == "true" {
			continue
		}
		patch := fmt.Appendf(nil, `{"metadata":{"labels":{%q:"true"}}}`, fence.LabelNamespaceMark)
		if err := r.client.Patch(ctx, namespace, client.RawPatch(types.MergePatchType, patch)); err != nil {
			return fmt.Errorf("mark namespace %s: %w", name, err)
		}
	}
	return nil
}

// tell brings a claim's status to what follows from the lease's, and removes
// it where it is finished and its time is over. It gives when to look again.
func (r *leaseReconciler) tell(ctx context.Context, lease *v1alpha1.FencedLease, c *v1alpha1.LeaseClaim, p plan) (time.Duration, error) {
	if finished(c) {
		return r.expire(ctx, c)
	}
	if equality.Semantic.DeepEqual(r.statusOf(lease, c, p), c.Status) {
		return 0, nil
	}
	now, read := p.read, p.read != nil && p.read.UID == c.UID
	var err error
	if !read {
		now = &v1alpha1.LeaseClaim{}
		err = r.live.Get(ctx, client.ObjectKeyFromObject(c), now)
	}
	switch {
	case apierrors.IsNotFound(err) || err == nil && now.UID != c.UID:
		return 0, nil // released meanwhile
	case err != nil:
		return 0, err
	case finished(now):
		return r.expire(ctx, now)
	case lease.UID != "" && now.Status.Token > lease.Status.Token && p.finish[c.UID].reason == "":
		return 0, errBehind
	}
	before := now.DeepCopy()
	now.Status = r.statusOf(lease, now, p)
	if equality.Semantic.DeepEqual(now.Status, before.Status) {
		return 0, nil
	}
	err = r.client.Status().Patch(ctx, now, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
	switch {
	case apierrors.IsNotFound(err):
		return 0, nil
	case apierrors.IsConflict(err) && read: // renewed since it was read
		p.read = nil
		return r.tell(ctx, lease, c, p)
	}
	if err == nil && finished(now) {
		return r.expire(ctx, now)
	}
	return 0, err
}

// statusOf is what a claim's status has to be. What it says of a claim in the
// queue is the same whoever holds: a hand-over writes no claim but the two
// that it concerns.
func (r *leaseReconciler) statusOf(lease *v1alpha1.FencedLease, c *v1alpha1.LeaseClaim, p plan) v1alpha1.LeaseClaimStatus {
	status := *c.Status.DeepCopy()
	held := metav1.Condition{
		Type: v1alpha1.LeaseClaimHeld, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonWaiting,
		Message: "in the queue: the lease's status tells who holds it, and whether it is ready",
	}
	end, ends := p.finish[c.UID]
	switch {
	case holdsClaim(lease, c):
		held.Status, held.Reason, held.Message = metav1.ConditionTrue, v1alpha1.ReasonGranted, fmt.Sprintf("holds the lease with token %d", lease.Status.Token)
		status.Token, status.AcquireTime = lease.Status.Token, lease.Status.Holder.AcquireTime
	case ends:
		held.Reason, held.Message = end.reason, end.message
	case lease.UID == "":
		held.Message = fmt.Sprintf("FencedLease %s does not exist in this namespace: the claim waits for it", c.Spec.LeaseName)
	}
	if status.Ticket == 0 {
		status.Ticket = p.tickets[c.UID]
	}
	setCondition(&status.Conditions, held, r.clock)
	return status
}

// expire removes a finished claim once its time to live is over, counted from
// when this process first saw it finished.
func (r *leaseReconciler) expire(ctx context.Context, c *v1alpha1.LeaseClaim) (time.Duration, error) {
	r.renewals.forget(c.UID)
	ttl := time.Duration(v1alpha1.DefaultTTLSecondsAfterFinished) * time.Second
	if c.Spec.TTLSecondsAfterFinished != nil {
		ttl = time.Duration(*c.Spec.TTLSecondsAfterFinished) * time.Second
	}
	if left := ttl - r.finished.see(c.UID, ""); left > 0 {
		return left, nil
	}
	if err := r.client.Delete(ctx, c, client.Preconditions{UID: &c.UID}); err != nil {
		return 0, client.IgnoreNotFound(err)
	}
	r.finished.forget(c.UID)
	return 0, nil
}

// withoutLease answers claims of a lease that does not exist.
func (r *leaseReconciler) withoutLease(ctx context.Context, key types.NamespacedName, claims *v1alpha1.LeaseClaimList) (ctrl.Result, error) {
	if len(claims.Items) == 0 {
		return ctrl.Result{}, nil
	}
	if err := r.live.Get(ctx, key, &v1alpha1.FencedLease{}); err == nil {
		return ctrl.Result{}, errBehind
	} else if !apierrors.IsNotFound(err) {
		return ctrl.Result{}, err
	}
	var next time.Duration
	for i := range claims.Items {
		c := &claims.Items[i]
		if !c.DeletionTimestamp.IsZero() {
			continue
		}
		p := plan{}
		if c.Status.Token > 0 {
			p.finish = map[types.UID]ending{c.UID: {v1alpha1.ReasonLapsed, "the lease was deleted"}}
		}
		wait, err := r.tell(ctx, &v1alpha1.FencedLease{}, c, p)
		if err != nil {
			return ctrl.Result{}, err
		}
		next = sooner(next, wait)
	}
	return ctrl.Result{RequeueAfter: next}, nil
}

// announce tells people of a hand-over, or that none is possible, once it is
// published.
func (r *leaseReconciler) announce(ctx context.Context, s situation, p plan, lease *v1alpha1.FencedLease) {
	log := logf.FromContext(ctx)
	before := s.lease.Status.Holder
	switch {
	case p.revoke:
		log.Info("Revoked a token", "token", s.lease.Status.Token, "reason", v1alpha1.ReasonRevoked, "minToken", lease.Spec.MinToken)
		r.events.Eventf(lease, nil, corev1.EventTypeWarning, v1alpha1.ReasonRevoked, "Revoke", "token %d was revoked by minToken %d", s.lease.Status.Token, lease.Spec.MinToken)
	case p.left != "" && before != nil:
		log.Info("A holder left", "token", s.lease.Status.Token, "reason", p.left, "holder", before.Identity)
		r.events.Eventf(lease, nil, corev1.EventTypeNormal, p.left, "End", "%q no longer holds the lease; its token was %d", before.Identity, s.lease.Status.Token)
	}
	was, ready := meta.FindStatusCondition(s.lease.Status.Conditions, v1alpha1.FencedLeaseReady), meta.FindStatusCondition(lease.Status.Conditions, v1alpha1.FencedLeaseReady)
	if ready.Status == metav1.ConditionFalse && (was == nil || was.Reason != ready.Reason) {
		log.Info("Could not issue a token", "token", lease.Status.Token, "reason", ready.Reason, "why", ready.Message)
	}
	if !p.issue {
		return
	}
	tokensIssued.Inc()
	log.Info("Issued a token", "token", lease.Status.Token, "reason", v1alpha1.ReasonGranted, "holder", p.holder.Identity)
	r.events.Eventf(lease, nil, corev1.EventTypeNormal, v1alpha1.ReasonGranted, "Grant", "token %d was issued to %q", lease.Status.Token, p.holder.Identity)
	for _, c := range s.claims {
		if holdsClaim(lease, c) && !holdsClaim(s.lease, c) {
			queueAge.Observe(r.waited.see(c.UID, "").Seconds())
		}
	}
}

// sooner gives the earlier of two times to look again; 0 is never.
func sooner(a, b time.Duration) time.Duration {
	if a <= 0 || b > 0 && b < a {
		return b
	}
	return a
}

// renewalOf is what a renewal changes in a claim.
func renewalOf(c *v1alpha1.LeaseClaim) string {
	text := strconv.FormatInt(reaffirm(c.Spec.Reaffirm), 10)
	if c.Spec.RenewTime != nil {
		text += c.Spec.RenewTime.UTC().Format(metav1.RFC3339Micro)
	}
	return text
}
