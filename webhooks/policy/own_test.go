package policy_test

import (
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/internal/controlplane"
	"github.com/fencedlease/fencedlease/test/env"
	"github.com/fencedlease/fencedlease/webhooks/policy"
)

func TestMain(m *testing.M) { os.Exit(env.Main(m)) }

// installed has the policies on our own kinds, and neither webhook nor
// operator.
var installed = env.Shared(env.Options{})

// sender is an account, with the groups and extras of its requests.
type sender struct {
	name   string
	groups []string
	extra  map[string][]string
}

const reason = "incident 7"

var (
	masters = []string{"system:masters"}
	amy     = sender{name: "amy"}
	eve     = sender{name: "eve"}
	// eve gives a reason, and has no right to bypass; boss has it, and root has
	// every right.
	eveBypasses  = sender{name: "eve", extra: map[string][]string{fence.ExtraBypass: {reason}}}
	boss         = sender{name: "boss"}
	bossBypasses = sender{name: "boss", extra: map[string][]string{fence.ExtraBypass: {reason}}}
	bossNoReason = sender{name: "boss", extra: map[string][]string{fence.ExtraBypass: {""}}}
	root         = sender{name: "root", groups: masters}
	rootBypasses = sender{name: "root", groups: masters, extra: map[string][]string{fence.ExtraBypass: {reason}}}
	operator     = sender{name: controlplane.OperatorUser, groups: masters}
	collector    = sender{name: "system:serviceaccount:kube-system:generic-garbage-collector", groups: masters}
	node         = sender{name: "system:node:n1", groups: []string{"system:nodes", "system:masters"}}
)

func inPod(uid string) sender {
	return sender{name: "amy", extra: map[string][]string{"authentication.kubernetes.io/pod-uid": {uid}}}
}

// stage is a namespace to act in.
type stage struct {
	*testing.T
	*env.Environment
	namespace string
}

func newStage(t *testing.T, e *env.Environment) *stage {
	t.Helper()
	return &stage{T: t, Environment: e, namespace: e.Namespace(t)}
}

func (s *stage) must(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

func (s *stage) as(who sender, handler rest.WarningHandler) client.Client {
	s.Helper()
	cfg := rest.CopyConfig(s.Config)
	cfg.Impersonate = rest.ImpersonationConfig{UserName: who.name, Groups: who.groups, Extra: who.extra}
	cfg.WarningHandler = handler
	c, err := client.New(cfg, client.Options{Scheme: s.Scheme})
	s.must(err)
	return c
}

var grants sync.Once

// ready gives the environment once its policies are in force and its accounts
// have their rights, which are all but that to bypass.
func ready(t *testing.T) *env.Environment {
	t.Helper()
	e := installed(t)
	grants.Do(func() {
		verbs := []string{"get", "create", "update", "patch", "delete", "deletecollection"}
		for _, name := range []string{"amy", "eve", "boss"} {
			e.Grant(t, "", name,
				rbacv1.PolicyRule{APIGroups: []string{fence.Group}, Resources: []string{"*"}, Verbs: verbs},
				rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"configmaps", "namespaces", "namespaces/status", "namespaces/finalize"}, Verbs: verbs})
		}
		e.Grant(t, "", "boss", rbacv1.PolicyRule{APIGroups: []string{fence.Group}, Resources: []string{"fencedleases"}, Verbs: []string{fence.VerbBypass}})
		// The API server sees policies in the order in which they were made.
		s := &stage{T: t, Environment: e}
		await(t, "the policies are in force", s.refuses(func(ctx context.Context, c client.Client, _ string) error {
			return c.Update(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: controlplane.OperatorNamespace, Name: fence.TableName}, Data: map[string]string{"a": "b"}})
		}))
	})
	return e
}

func await(t *testing.T, what string, done func() bool) {
	t.Helper()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	limit := time.After(30 * time.Second)
	for !done() {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatalf("waited half a minute until %s", what)
		}
	}
}

// says gives what a policy denied a request with, empty where it passed.
func says(t *testing.T, err error) string {
	t.Helper()
	if err == nil {
		return ""
	}
	_, message, ok := strings.Cut(err.Error(), "denied request: ")
	if !ok || !apierrors.IsForbidden(err) {
		t.Errorf("not refused by a policy: %v", err)
	}
	return message
}

// attempt is a write and what becomes of it: want is the policy's message,
// empty where the write passes.
type attempt struct {
	by    sender
	write func(ctx context.Context, c client.Client, namespace string) error
	want  string
}

// try tries each write in a namespace of its own that prepare fills, first as
// a dry run, which has to be answered alike.
func try(t *testing.T, prepare func(*stage), attempts map[string]attempt) {
	t.Helper()
	for name, a := range attempts {
		t.Run(name, func(t *testing.T) {
			s := newStage(t, ready(t))
			prepare(s)
			c := s.as(a.by, nil)
			for _, w := range []client.Client{client.NewDryRunClient(c), c} {
				if diff := cmp.Diff(a.want, says(t, a.write(t.Context(), w, s.namespace))); diff != "" {
					t.Errorf("the answer (-want +got):\n%s", diff)
				}
			}
		})
	}
}

func patch(o client.Object, body string) func(context.Context, client.Client, string) error {
	return func(ctx context.Context, c client.Client, namespace string) error {
		o := o.DeepCopyObject().(client.Object)
		if o.GetNamespace() == "" {
			o.SetNamespace(namespace)
		}
		return c.Patch(ctx, o, client.RawPatch(types.MergePatchType, []byte(body)))
	}
}

func remove(o client.Object) func(context.Context, client.Client, string) error {
	return func(ctx context.Context, c client.Client, namespace string) error {
		o := o.DeepCopyObject().(client.Object)
		if o.GetNamespace() == "" {
			o.SetNamespace(namespace)
		}
		return c.Delete(ctx, o)
	}
}

func TestClaims(t *testing.T) {
	const (
		notOwn   = "NotHolder: spec.user has to be the account, and podUID the pod, that creates the claim; set it to your own, or leave it out"
		notMaker = "NotHolder: only the account that made the claim renews, reaffirms or deletes it; bypass with a reason, or let it lapse"
	)
	claim := func(name, user, pod string) *v1alpha1.LeaseClaim {
		c := &v1alpha1.LeaseClaim{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v1alpha1.LeaseClaimSpec{LeaseName: "main"}}
		if user != "" {
			c.Spec.User = &v1alpha1.ClaimUser{Username: user, PodUID: pod}
		}
		return c
	}
	create := func(user, pod string) func(context.Context, client.Client, string) error {
		return func(ctx context.Context, c client.Client, namespace string) error {
			n := claim("new", user, pod)
			n.Namespace = namespace
			return c.Create(ctx, n)
		}
	}
	all := func(ctx context.Context, c client.Client, namespace string) error {
		return c.DeleteAllOf(ctx, &v1alpha1.LeaseClaim{}, client.InNamespace(namespace))
	}
	bound, ofPod, free := claim("bound", "", ""), claim("of-pod", "", ""), claim("free", "", "")
	const (
		renew    = `{"spec":{"renewTime":"2026-01-01T00:00:00.000000Z"}}`
		reaffirm = `{"spec":{"reaffirm":1}}`
		label    = `{"metadata":{"labels":{"a":"b"}}}`
		owner    = `{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"Pod","name":"gone","uid":"gone"}]}}`
	)
	try(t, func(s *stage) {
		for name, pod := range map[string]string{"bound": "", "of-pod": "p1"} {
			c := claim(name, "amy", pod)
			c.Namespace = s.namespace
			s.must(s.as(inPod("p1"), nil).Create(s.Context(), c))
		}
		c := claim("free", "", "")
		c.Namespace = s.namespace
		s.must(s.as(amy, nil).Create(s.Context(), c))
	}, map[string]attempt{
		"made for oneself":                      {amy, create("amy", ""), ""},
		"made for oneself in one's pod":         {inPod("p1"), create("amy", "p1"), ""},
		"made for oneself in another pod":       {inPod("p2"), create("amy", "p1"), notOwn},
		"made for a pod from outside":           {amy, create("amy", "p1"), notOwn},
		"made for nobody":                       {eve, create("", ""), ""},
		"made for another":                      {eve, create("amy", ""), notOwn},
		"made for another by an administrator":  {root, create("amy", ""), notOwn},
		"made for another with a reason":        {bossBypasses, create("amy", ""), notOwn},
		"made for another by the control plane": {collector, create("amy", ""), ""},

		"renewed":                                   {amy, patch(bound, renew), ""},
		"renewed from the pod":                      {inPod("p1"), patch(ofPod, renew), ""},
		"renewed from another pod":                  {inPod("p2"), patch(ofPod, renew), notMaker},
		"renewed by another":                        {eve, patch(bound, renew), notMaker},
		"renewed by an administrator":               {root, patch(bound, renew), notMaker},
		"renewed by another where nobody is named":  {eve, patch(free, renew), ""},
		"renewed by another with a reason":          {eveBypasses, patch(bound, renew), notMaker},
		"renewed with a reason and the right":       {bossBypasses, patch(bound, renew), ""},
		"renewed with the right and no reason":      {boss, patch(bound, renew), notMaker},
		"renewed with the right and an empty one":   {bossNoReason, patch(bound, renew), notMaker},
		"renewed with a reason by an administrator": {rootBypasses, patch(bound, renew), ""},
		"renewed by a node":                         {node, patch(bound, renew), ""},
		"reaffirmed":                                {amy, patch(bound, reaffirm), ""},
		"reaffirmed by another":                     {eve, patch(bound, reaffirm), notMaker},
		"labelled by another":                       {eve, patch(bound, label), ""},
		"given an owner":                            {amy, patch(bound, owner), ""},
		// The garbage collector would delete it at once.
		"given an owner by another": {eve, patch(bound, owner), notMaker},

		"deleted":                  {amy, remove(bound), ""},
		"deleted from another pod": {inPod("p2"), remove(ofPod), notMaker},
		"deleted by another":       {eve, remove(bound), notMaker},
		"deleted by another where nobody is named":  {eve, remove(free), ""},
		"deleted with a reason and the right":       {bossBypasses, remove(bound), ""},
		"deleted with a reason by an administrator": {rootBypasses, remove(bound), ""},
		"deleted by the garbage collector":          {collector, remove(bound), ""},
		"deleted with all others":                   {eve, all, notMaker},
	})
}

func TestLastToken(t *testing.T) {
	const refused = "FenceRemoved: only the operator writes the annotation fencedlease.io/last-token, save that a malformed one may be taken off; leave it"
	lease := func(name string) *v1alpha1.FencedLease {
		return &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Name: name}}
	}
	set := func(value string) string {
		return fmt.Sprintf(`{"metadata":{"annotations":{%q:%s}}}`, fence.AnnotationLastToken, value)
	}
	create := func(ctx context.Context, c client.Client, namespace string) error {
		l := lease("restored")
		l.Namespace, l.Annotations = namespace, map[string]string{fence.AnnotationLastToken: "4711"}
		return c.Create(ctx, l)
	}
	status := func(ctx context.Context, c client.Client, namespace string) error {
		l := lease("issued")
		l.Namespace = namespace
		if err := c.Status().Patch(ctx, l, client.RawPatch(types.MergePatchType, []byte(set(`"7"`)))); err != nil {
			return err
		}
		if got := l.Annotations[fence.AnnotationLastToken]; got != "42" {
			return fmt.Errorf("a status update made it %s", got)
		}
		return nil
	}
	try(t, func(s *stage) {
		for name, last := range map[string]string{"new": "", "issued": "42", "malformed": "4_2", "huge": "4503599627370497", "beyond": "9007199254740993"} {
			l := lease(name)
			l.Namespace = s.namespace
			if last != "" {
				l.Annotations = map[string]string{fence.AnnotationLastToken: last}
			}
			s.must(s.Admin.Create(s.Context(), l))
		}
	}, map[string]attempt{
		"restored with it":                    {eve, create, ""},
		"set":                                 {eve, patch(lease("new"), set(`"42"`)), refused},
		"set by an administrator":             {root, patch(lease("new"), set(`"42"`)), refused},
		"set with a reason and the right":     {rootBypasses, patch(lease("new"), set(`"42"`)), refused},
		"set by the operator":                 {operator, patch(lease("new"), set(`"42"`)), ""},
		"raised":                              {eve, patch(lease("issued"), set(`"43"`)), refused},
		"lowered":                             {eve, patch(lease("issued"), set(`"41"`)), refused},
		"raised by the operator":              {operator, patch(lease("issued"), set(`"43"`)), ""},
		"taken off":                           {eve, patch(lease("issued"), set(`null`)), refused},
		"written by a status update":          {eve, status, ""},
		"left alone":                          {eve, patch(lease("issued"), `{"spec":{"leaseDurationSeconds":30},"metadata":{"annotations":{"a":"b"}}}`), ""},
		"taken off where it is malformed":     {eve, patch(lease("malformed"), set(`null`)), ""},
		"mended where it is malformed":        {eve, patch(lease("malformed"), set(`"42"`)), refused},
		"left alone where it is malformed":    {eve, patch(lease("malformed"), `{"spec":{"leaseDurationSeconds":30}}`), ""},
		"taken off beyond what is issued":     {eve, patch(lease("huge"), set(`null`)), ""},
		"taken off beyond what a token is":    {eve, patch(lease("beyond"), set(`null`)), ""},
		"deleted with its lease":              {eve, remove(lease("issued")), ""},
		"deleted with its lease by the owner": {amy, remove(lease("issued")), ""},
	})
}

// TestTables: the lease table and the floor of first tokens are the operator's.
func TestTables(t *testing.T) {
	const refused = "FenceRemoved: only the operator writes the lease table and the floor of first tokens; bypass with a reason"
	kept := func(name string, data map[string]string) *corev1.ConfigMap {
		return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: controlplane.OperatorNamespace, Name: name}, Data: data}
	}
	create := func(o *corev1.ConfigMap) func(context.Context, client.Client, string) error {
		return func(ctx context.Context, c client.Client, _ string) error { return c.Create(ctx, o.DeepCopy()) }
	}
	all := func(ctx context.Context, c client.Client, _ string) error {
		return c.DeleteAllOf(ctx, &corev1.ConfigMap{}, client.InNamespace(controlplane.OperatorNamespace), client.HasLabels{"test"})
	}
	elsewhere := func(ctx context.Context, c client.Client, namespace string) error {
		return c.Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: fence.TableName}, Data: map[string]string{"a": "b"}})
	}
	table, floor, other := kept(fence.TableName, nil), kept(policy.FloorName, nil), kept("other", nil)
	full := map[string]string{"token": "4711"}
	const (
		forge  = `{"data":{"token":"1"}}`
		label  = `{"metadata":{"labels":{"a":"b"}}}`
		freeze = `{"immutable":true}`
		owner  = `{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"ConfigMap","name":"nobody","uid":"11111111-1111-1111-1111-111111111111"}]}}`
	)
	owned := func(o *corev1.ConfigMap) *corev1.ConfigMap {
		o = o.DeepCopy()
		o.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "ConfigMap", Name: "nobody", UID: "11111111-1111-1111-1111-111111111111"}}
		return o
	}
	missing := func(s *stage) {
		for _, o := range []*corev1.ConfigMap{table, floor, other} {
			s.must(client.IgnoreNotFound(s.as(operator, nil).Delete(s.Context(), o.DeepCopy())))
		}
	}
	try(t, missing, map[string]attempt{
		"installed empty":                 {root, create(table), ""},
		"made with what it says":          {root, create(kept(fence.TableName, full)), refused},
		"the floor made":                  {root, create(kept(policy.FloorName, full)), refused},
		"the floor made by the operator":  {operator, create(kept(policy.FloorName, full)), ""},
		"the floor made with a reason":    {bossBypasses, create(kept(policy.FloorName, full)), ""},
		"another one made":                {eve, create(kept("other", full)), ""},
		"one of the name made elsewhere":  {eve, elsewhere, ""},
		"the floor made empty":            {root, create(kept(policy.FloorName, nil)), refused},
		"made with an owner":              {root, create(owned(table)), refused},
		"made so that nobody can fill it": {root, create(&corev1.ConfigMap{ObjectMeta: table.ObjectMeta, Immutable: new(true)}), refused},
	})
	try(t, func(s *stage) {
		missing(s)
		for _, name := range []string{fence.TableName, policy.FloorName, "other"} {
			o := kept(name, full)
			o.Labels = map[string]string{"test": name}
			s.must(s.as(operator, nil).Create(s.Context(), o))
		}
	}, map[string]attempt{
		"the table changed":                                {eve, patch(table, forge), refused},
		"the table changed by an administrator":            {root, patch(table, forge), refused},
		"the table changed by the operator":                {operator, patch(table, forge), ""},
		"the table changed with a reason":                  {eveBypasses, patch(table, forge), refused},
		"the table changed with a reason and the right":    {bossBypasses, patch(table, forge), ""},
		"the table changed with the right alone":           {boss, patch(table, forge), refused},
		"the table labelled":                               {root, patch(table, label), ""},
		"the table frozen":                                 {root, patch(table, freeze), refused},
		"the table deleted":                                {eve, remove(table), refused},
		"the table deleted with the right to uninstall":    {root, remove(table), ""},
		"the table deleted by the control plane":           {collector, remove(table), ""},
		"the table given an owner that is gone":            {root, patch(table, owner), refused},
		"the floor given an owner that is gone":            {root, patch(floor, owner), refused},
		"another one given an owner":                       {eve, patch(other, owner), ""},
		"the floor changed":                                {eve, patch(floor, forge), refused},
		"the floor raised by the operator":                 {operator, patch(floor, `{"data":{"token":"4712"}}`), ""},
		"the floor changed with a reason and the right":    {bossBypasses, patch(floor, forge), ""},
		"the floor deleted":                                {root, remove(floor), refused},
		"the floor deleted with a reason and the right":    {bossBypasses, remove(floor), ""},
		"another one changed":                              {eve, patch(other, forge), ""},
		"another one deleted":                              {eve, remove(other), ""},
		"all deleted":                                      {root, all, refused},
		"all deleted with a reason and the right":          {rootBypasses, all, ""},
		"all deleted by the control plane with their name": {collector, all, ""},
	})
}

// TestMarks: a namespace keeps its mark while the lease table knows leases
// there.
func TestMarks(t *testing.T) {
	const refused = "FenceRemoved: leases are used in this namespace, and without the label fencedlease.io/leases the fence would not see its /scale and evictions; leave it"
	mark := func(value, more string) string {
		return fmt.Sprintf(`{"metadata":{"labels":{%q:%s}%s}}`, fence.LabelNamespaceMark, value, more)
	}
	withReason := mark("null", fmt.Sprintf(`,"annotations":{%q:%q}`, fence.AnnotationBypass, reason))
	write := func(body string) func(context.Context, client.Client, string) error {
		return func(ctx context.Context, c client.Client, namespace string) error {
			return c.Patch(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, client.RawPatch(types.MergePatchType, []byte(body)))
		}
	}
	status := func(ctx context.Context, c client.Client, namespace string) error {
		return c.Status().Patch(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, client.RawPatch(types.MergePatchType, []byte(mark("null", ""))))
	}
	finalize := func(ctx context.Context, c client.Client, namespace string) error {
		ns := &corev1.Namespace{}
		if err := c.Get(ctx, client.ObjectKey{Name: namespace}, ns); err != nil {
			return err
		}
		delete(ns.Labels, fence.LabelNamespaceMark)
		return c.SubResource("finalize").Update(ctx, ns)
	}
	// marked marks the namespace, which the policies then know as one where
	// these leases are used, by default one of its own.
	marked := func(s *stage, leases ...fence.TableLease) {
		s.must(write(mark(`"true"`, ""))(s.Context(), s.Admin, s.namespace))
		if leases == nil {
			leases = []fence.TableLease{{Namespace: s.namespace, Name: "main", Lease: fence.Lease{Current: 42}}}
		}
		data, _ := fence.PackTable(leases, 1, 0)
		table := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: controlplane.OperatorNamespace, Name: fence.TableName}, Data: data}
		c := s.as(operator, nil)
		s.must(client.IgnoreNotFound(c.Delete(s.Context(), table.DeepCopy())))
		s.must(c.Create(s.Context(), table))
		await(s.T, "the policies know the table", s.refuses(write(mark("null", ""))))
	}
	try(t, func(s *stage) { marked(s) }, map[string]attempt{
		"taken off":                                            {eve, write(mark("null", "")), refused},
		"taken off by an administrator":                        {root, write(mark("null", "")), refused},
		"emptied":                                              {eve, write(mark(`""`, "")), refused},
		"made another value":                                   {eve, write(mark(`"false"`, "")), refused},
		"taken off by the status":                              {eve, status, refused},
		"taken off by the finalizers":                          {eve, finalize, refused},
		"taken off with a reason":                              {eveBypasses, write(mark("null", "")), refused},
		"taken off with a reason and the right":                {bossBypasses, write(mark("null", "")), ""},
		"taken off with a reason in annotations":               {eve, write(withReason), refused},
		"taken off with the right and a reason in annotations": {boss, write(withReason), ""},
		"taken off with the right alone":                       {boss, write(mark("null", "")), refused},
		"taken off by the operator":                            {operator, write(mark("null", "")), ""},
		"left alone":                                           {eve, write(`{"metadata":{"labels":{"a":"b"}}}`), ""},
		"gone with its namespace": {eve, func(ctx context.Context, c client.Client, namespace string) error {
			return c.Delete(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}})
		}, ""},
	})
	try(t, func(s *stage) { s.must(write(mark(`"true"`, ""))(s.Context(), s.Admin, s.namespace)) }, map[string]attempt{
		"taken off where no lease is used": {eve, write(mark("null", "")), ""},
	})
	elsewhere := func(holder string, allowed ...string) fence.TableLease {
		return fence.TableLease{Namespace: "infra", Name: "main", Lease: fence.Lease{Current: 42, Held: true, Holder: holder}, AllowedNamespaces: allowed}
	}
	try(t, func(s *stage) { marked(s, elsewhere("pod-b", "a", s.namespace, "z")) }, map[string]attempt{
		"taken off where a lease of another namespace is used": {eve, write(mark("null", "")), refused},
	})
	try(t, func(s *stage) { marked(s, elsewhere("pod-b"), elsewhere("pod-b", "*")) }, map[string]attempt{
		"taken off where a lease is for all": {eve, write(mark("null", "")), refused},
	})
	try(t, func(s *stage) {
		// One lease for all first, so that the policies are known to have the table.
		marked(s, elsewhere("pod-b", "*"))
		data, _ := fence.PackTable([]fence.TableLease{elsewhere("pod-b", "a", s.namespace+"z")}, 2, 0)
		s.must(s.as(operator, nil).Update(s.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: controlplane.OperatorNamespace, Name: fence.TableName}, Data: data}))
		refuses := s.refuses(write(mark("null", "")))
		await(s.T, "the policies know the new table", func() bool { return !refuses() })
	}, map[string]attempt{
		"taken off where the lease of another namespace is used in a third": {eve, write(mark("null", "")), ""},
	})
	try(t, func(s *stage) {
		marked(s)
		s.must(s.as(operator, nil).Delete(s.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: controlplane.OperatorNamespace, Name: fence.TableName}}))
		refuses := s.refuses(write(mark("null", "")))
		await(s.T, "the policies miss the table", func() bool { return !refuses() })
	}, map[string]attempt{
		"taken off where there is no table": {eve, write(mark("null", "")), ""},
	})
}

// refuses tells whether an administrator's write is refused now.
func (s *stage) refuses(write func(context.Context, client.Client, string) error) func() bool {
	c := client.NewDryRunClient(s.as(root, nil))
	return func() bool { return apierrors.IsForbidden(write(s.Context(), c, s.namespace)) }
}

// warnings collects what the API server warns of.
type warnings []string

func (w *warnings) HandleWarningHeader(_ int, _, text string) { *w = append(*w, text) }

var withPolicies = env.Shared(env.Options{Policy: true})

// TestBypasses: a bypass that no webhook sees passes with a warning, and one
// without the right or without a reason does not pass.
func TestBypasses(t *testing.T) {
	e := withPolicies(t)
	verbs := []string{"get", "create", "update", "patch", "delete", "deletecollection"}
	for _, name := range []string{"eve", "boss"} {
		e.Grant(t, "", name, rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"configmaps"}, Verbs: verbs})
	}
	e.Grant(t, "", "boss", rbacv1.PolicyRule{APIGroups: []string{fence.Group}, Resources: []string{"fencedleases"}, Verbs: []string{fence.VerbBypass}})
	guarded := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "guarded"}}
	const data = `{"data":{"a":"b"}}`
	annotate := func(name, value string) string {
		return fmt.Sprintf(`{"metadata":{"annotations":{%q:%q}},"data":{"a":"b"}}`, name, value)
	}
	presents := sender{name: "boss", extra: map[string][]string{fence.ExtraBypass: {reason}, fence.ExtraToken: {"41"}}}
	all := func(ctx context.Context, c client.Client, namespace string) error {
		return c.DeleteAllOf(ctx, &corev1.ConfigMap{}, client.InNamespace(namespace), client.HasLabels{fence.LabelLease})
	}
	for name, c := range map[string]struct {
		by    sender
		write func(context.Context, client.Client, string) error
		// reason is the fence's for a rejection, empty where it passes with a
		// warning, and quiet where it passes without.
		reason fence.Reason
		quiet  bool
	}{
		"an update with the right and a reason":       {by: bossBypasses, write: patch(guarded, data)},
		"an update with a reason in annotations":      {by: boss, write: patch(guarded, annotate(fence.AnnotationBypass, reason))},
		"a delete":                                    {by: bossBypasses, write: remove(guarded)},
		"a collection's delete":                       {by: bossBypasses, write: all},
		"a write that takes the guard off":            {by: bossBypasses, write: patch(guarded, fmt.Sprintf(`{"metadata":{"labels":{%q:null}}}`, fence.LabelLease))},
		"an administrator's":                          {by: rootBypasses, write: patch(guarded, data)},
		"an administrator's without a reason":         {by: root, write: patch(guarded, data), reason: fence.Unstamped},
		"one without the right":                       {by: eveBypasses, write: patch(guarded, data), reason: fence.Unstamped},
		"one without a reason":                        {by: boss, write: patch(guarded, data), reason: fence.Unstamped},
		"one with an empty reason":                    {by: bossNoReason, write: patch(guarded, data), reason: fence.Unstamped},
		"one that presents a token":                   {by: presents, write: patch(guarded, data), reason: fence.StaleToken},
		"one that changes the record":                 {by: bossBypasses, write: patch(guarded, annotate(fence.AnnotationToken, "7")), reason: fence.FenceRemoved},
		"one that marks it for a delete":              {by: bossBypasses, write: patch(guarded, annotate(fence.AnnotationDeleteToken, "42")), reason: fence.FenceRemoved},
		"what a principal of the control plane gives": {by: sender{collector.name, masters, bossBypasses.extra}, write: patch(guarded, data), quiet: true},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStage(t, e)
			lease := &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: "main"}}
			s.must(s.Admin.Create(t.Context(), lease))
			lease.Status.Token, lease.Status.Holder = 42, &v1alpha1.Holder{ClaimName: "b", ClaimUID: "b", Identity: "pod-b"}
			s.must(s.Admin.Status().Update(t.Context(), lease))
			o := guarded.DeepCopy()
			o.Namespace, o.Labels = s.namespace, map[string]string{fence.LabelLease: "main"}
			o.Annotations = map[string]string{fence.AnnotationToken: "42"}
			s.must(s.as(collector, nil).Create(t.Context(), o))
			await(t, "the policies know the lease", func() bool {
				return strings.Contains(fmt.Sprint(client.NewDryRunClient(s.as(sender{"holder", masters, map[string][]string{fence.ExtraToken: {"41"}}}, nil)).Delete(t.Context(), o.DeepCopy())), "pod-b")
			})
			var warned warnings
			w := s.as(c.by, &warned)
			for _, w := range []client.Client{client.NewDryRunClient(w), w} {
				warned = nil
				err := c.write(t.Context(), w, s.namespace)
				got := fence.Reason("")
				if err != nil {
					got, _, _ = cutReason(err)
				}
				if got != c.reason {
					t.Errorf("got %v, want %q", err, c.reason)
				}
				want := fmt.Sprintf("[%s/main] bypassed: %s", s.namespace, reason)
				said := strings.Contains(strings.Join(warned, "\n"), want)
				if said != (c.reason == "" && !c.quiet) {
					t.Errorf("warned of %q", warned)
				}
			}
		})
	}
}

// cutReason gives the fence's reason that a rejection starts with.
func cutReason(err error) (fence.Reason, string, bool) {
	_, message, _ := strings.Cut(err.Error(), "denied request: ")
	reason, rest, ok := strings.Cut(message, ": ")
	return fence.Reason(reason), rest, ok
}
