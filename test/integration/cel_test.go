package integration

import (
	"fmt"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/test/env"
)

// bare has the CRDs alone: nobody writes but the test.
var bare = env.Shared(env.Options{})

// change is one write to an object that is stored as before says; an empty
// want is success, else a part of the API server's message.
type change struct {
	before, patch string
	status        bool
	want          string
}

const holderA = `"holder":{"claimName":"a","claimUID":"uid-a","identity":"a"}`

func TestFencedLeaseRules(t *testing.T) {
	for name, c := range map[string]change{
		"a first token is taken":                 {patch: `{"status":{"token":1}}`, status: true},
		"the token may stay":                     {before: `{"status":{"token":7}}`, patch: `{"status":{"token":7,"waiting":3}}`, status: true},
		"the token may grow":                     {before: `{"status":{"token":7}}`, patch: `{"status":{"token":8}}`, status: true},
		"the token never decreases":              {before: `{"status":{"token":7}}`, patch: `{"status":{"token":6}}`, status: true, want: "token must be greater than or equal to the current one"},
		"the token never vanishes":               {before: `{"status":{"token":7}}`, patch: `{"status":{"token":null}}`, status: true, want: "token must not be removed"},
		"the status never vanishes":              {before: `{"status":{"token":7}}`, patch: `{"status":null}`, status: true, want: "token must not be removed"},
		"a token is at least 1":                  {patch: `{"status":{"token":0}}`, status: true, want: "should be greater than or equal to 1"},
		"the highest token is taken":             {patch: `{"status":{"token":9007199254740991}}`, status: true},
		"no token is above 2^53-1":               {patch: `{"status":{"token":9007199254740992}}`, status: true, want: "should be less than or equal to 9007199254740991"},
		"a holder has a token":                   {patch: `{"status":{` + holderA + `}}`, status: true, want: "a holder must have a token"},
		"a first holder is taken":                {patch: `{"status":{"token":7,` + holderA + `}}`, status: true},
		"a holder may go":                        {before: `{"status":{"token":7,` + holderA + `}}`, patch: `{"status":{"holder":null}}`, status: true},
		"another holder with a higher token":     {before: `{"status":{"token":7,` + holderA + `}}`, patch: `{"status":{"token":8,"holder":{"claimUID":"uid-b","claimName":"b"}}}`, status: true},
		"another holder needs a higher token":    {before: `{"status":{"token":7,` + holderA + `}}`, patch: `{"status":{"holder":{"claimUID":"uid-b"}}}`, status: true, want: "another holder, acquisition or reaffirmation must have a higher token"},
		"a holder after none needs a higher one": {before: `{"status":{"token":7}}`, patch: `{"status":{` + holderA + `}}`, status: true, want: "another holder, acquisition or reaffirmation must have a higher token"},
		"a reaffirmation needs a higher token":   {before: `{"status":{"token":7,` + holderA + `}}`, patch: `{"status":{"holder":{"reaffirm":1}}}`, status: true, want: "another holder, acquisition or reaffirmation must have a higher token"},
		"a holder is a claim or a Lease":         {patch: `{"status":{"token":7,"holder":{"identity":"a"}}}`, status: true, want: "exactly one of the fields in [claimUID lease] must be set"},
		"a holder is not both":                   {patch: `{"status":{"token":7,"holder":{"identity":"a","claimUID":"u","lease":{"uid":"x"}}}}`, status: true, want: "exactly one of the fields in [claimUID lease] must be set"},
		"leaseRef cannot be added":               {patch: `{"spec":{"leaseRef":{"name":"native"}}}`, want: "leaseRef cannot be added or removed"},
		"leaseRef cannot be removed":             {before: `{"spec":{"leaseRef":{"name":"native"}}}`, patch: `{"spec":{"leaseRef":null}}`, want: "leaseRef cannot be added or removed"},
		"leaseRef cannot be renamed":             {before: `{"spec":{"leaseRef":{"name":"native"}}}`, patch: `{"spec":{"leaseRef":{"name":"other"}}}`, want: "leaseRef.name cannot be changed"},
		"leaseRef may stay":                      {before: `{"spec":{"leaseRef":{"name":"native"}}}`, patch: `{"spec":{"leaseDurationSeconds":20}}`},
		"the shortest duration":                  {patch: `{"spec":{"leaseDurationSeconds":1}}`},
		"no duration":                            {patch: `{"spec":{"leaseDurationSeconds":0}}`, want: "should be greater than or equal to 1"},
		"too long a duration":                    {patch: `{"spec":{"leaseDurationSeconds":86401}}`, want: "should be less than or equal to 86400"},
		"the delay comes back to zero":           {before: `{"spec":{"handoverDelaySeconds":30}}`, patch: `{"spec":{"handoverDelaySeconds":0}}`},
		"the highest priority":                   {patch: `{"spec":{"maxPriority":1000000}}`},
		"too high a priority":                    {patch: `{"spec":{"maxPriority":1000001}}`, want: "should be less than or equal to 1000000"},
		"the highest minToken":                   {patch: `{"spec":{"minToken":6755399441055744}}`},
		"too high a minToken":                    {patch: `{"spec":{"minToken":6755399441055745}}`, want: "should be less than or equal to 6755399441055744"},
		"an exception names a user":              {patch: `{"spec":{"unstampedWrites":{"except":[{"user":"amy","action":"Allow"}]}}}`},
		"an exception names one principal":       {patch: `{"spec":{"unstampedWrites":{"except":[{"user":"amy","group":"g","action":"Allow"}]}}}`, want: "exactly one of the fields in [user group serviceAccount] must be set"},
		"an exception names some principal":      {patch: `{"spec":{"unstampedWrites":{"except":[{"action":"Allow"}]}}}`, want: "exactly one of the fields in [user group serviceAccount] must be set"},
		"an unknown action":                      {patch: `{"spec":{"unstampedWrites":{"default":"Perhaps"}}}`, want: `supported values: "Deny", "Warn", "Allow"`},
		"an allowed namespace":                   {patch: `{"spec":{"allowedNamespaces":["*","shop"]}}`},
		"a namespace that cannot be":             {patch: `{"spec":{"allowedNamespaces":["Shop"]}}`, want: "should match"},
		"waiting at its most":                    {patch: `{"status":{"waiting":2147483647}}`, status: true},
		"a token above 32 bits":                  {before: `{"status":{"token":2147483648}}`, patch: `{"status":{"token":4294967296}}`, status: true},
		"the longest duration":                   {patch: `{"spec":{"leaseDurationSeconds":86400}}`},
		"waiting comes back to zero":             {before: `{"status":{"waiting":3}}`, patch: `{"status":{"waiting":0}}`, status: true},
	} {
		t.Run(name, func(t *testing.T) {
			e := bare(t)
			lease := &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: e.Namespace(t), Name: "lease"}}
			if strings.Contains(c.before, "leaseRef") {
				lease.Spec.LeaseRef, c.before = &v1alpha1.LeaseReference{Name: "native"}, ""
			}
			c.run(t, e, lease)
		})
	}
}

func TestFencedLeaseNameIsALabelValue(t *testing.T) {
	e := bare(t)
	for length, want := range map[int]string{63: "", 64: "name must be at most 63 characters"} {
		lease := &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: e.Namespace(t), Name: strings.Repeat("x", length)}}
		expectMessage(t, e.Admin.Create(t.Context(), lease), want)
	}
}

func finishedAs(reason string) string {
	return fmt.Sprintf(`{"status":{"conditions":[{"type":"Held","status":"False","reason":%q,"message":"","lastTransitionTime":"2026-01-01T00:00:00Z"}]}}`, reason)
}

func TestLeaseClaimRules(t *testing.T) {
	const renewal, other = `{"spec":{"renewTime":"2026-01-01T00:00:01.000000Z"}}`, `{"spec":{"renewTime":"2026-01-01T00:00:02.000000Z"}}`
	cases := map[string]change{
		"leaseName cannot be changed":       {patch: `{"spec":{"leaseName":"other"}}`, want: "leaseName cannot be changed"},
		"holderIdentity cannot be added":    {patch: `{"spec":{"holderIdentity":"b"}}`, want: "holderIdentity cannot be added or removed"},
		"user cannot be added":              {patch: `{"spec":{"user":{"username":"amy"}}}`, want: "user cannot be added or removed"},
		"a renewal is taken":                {before: renewal, patch: other},
		"priority may change":               {patch: `{"spec":{"priority":5}}`},
		"priority comes back to zero":       {before: `{"spec":{"priority":5}}`, patch: `{"spec":{"priority":0}}`},
		"priority at its most":              {patch: `{"spec":{"priority":1000000}}`},
		"too high a priority":               {patch: `{"spec":{"priority":1000001}}`, want: "should be less than or equal to 1000000"},
		"reaffirm may grow":                 {before: `{"spec":{"reaffirm":1}}`, patch: `{"spec":{"reaffirm":2}}`},
		"reaffirm at its most":              {patch: `{"spec":{"reaffirm":9007199254740991}}`},
		"reaffirm never decreases":          {before: `{"spec":{"reaffirm":2}}`, patch: `{"spec":{"reaffirm":1}}`, want: "reaffirm must not decrease"},
		"reaffirm never vanishes":           {before: `{"spec":{"reaffirm":2}}`, patch: `{"spec":{"reaffirm":null}}`, want: "reaffirm must not be removed"},
		"a ticket is given":                 {patch: `{"status":{"ticket":1}}`, status: true},
		"a ticket cannot be changed":        {before: `{"status":{"ticket":1}}`, patch: `{"status":{"ticket":2}}`, status: true, want: "ticket cannot be changed"},
		"a ticket never vanishes":           {before: `{"status":{"ticket":1}}`, patch: `{"status":{"ticket":null}}`, status: true, want: "ticket must not be removed"},
		"a ticket never goes with status":   {before: `{"status":{"ticket":1}}`, patch: `{"status":null}`, status: true, want: "ticket must not be removed"},
		"a claim's token may grow":          {before: `{"status":{"token":7}}`, patch: `{"status":{"token":8}}`, status: true},
		"a claim's token never decreases":   {before: `{"status":{"token":7}}`, patch: `{"status":{"token":6}}`, status: true, want: "token must be greater than or equal to the current one"},
		"a claim's token never vanishes":    {before: `{"status":{"token":7}}`, patch: `{"status":{"token":null}}`, status: true, want: "token must not be removed"},
		"a waiting claim may be renewed":    {before: finishedAs(v1alpha1.ReasonWaiting), patch: renewal},
		"a waiting claim may be granted":    {before: finishedAs(v1alpha1.ReasonWaiting), patch: finishedAs(v1alpha1.ReasonGranted), status: true},
		"a time to live at its most":        {patch: `{"spec":{"ttlSecondsAfterFinished":604800}}`},
		"too long a time to live":           {patch: `{"spec":{"ttlSecondsAfterFinished":604801}}`, want: "should be less than or equal to 604800"},
		"a time to live may come to zero":   {patch: `{"spec":{"ttlSecondsAfterFinished":0}}`},
		"an unfinished claim may reaffirm":  {before: finishedAs(v1alpha1.ReasonGranted), patch: `{"spec":{"reaffirm":1}}`},
		"a finished claim's metadata moves": {before: finishedAs(v1alpha1.ReasonLapsed), patch: `{"metadata":{"labels":{"a":"b"}}}`},
	}
	for _, reason := range []string{v1alpha1.ReasonLapsed, v1alpha1.ReasonPreempted, v1alpha1.ReasonRevoked, v1alpha1.ReasonRefused} {
		cases[reason+" is not renewed"] = change{before: finishedAs(reason), patch: renewal, want: "a finished claim cannot be renewed or reaffirmed"}
		cases[reason+" is not reaffirmed"] = change{before: finishedAs(reason), patch: `{"spec":{"reaffirm":1}}`, want: "a finished claim cannot be renewed or reaffirmed"}
		cases[reason+" stays finished"] = change{before: finishedAs(reason), patch: finishedAs(v1alpha1.ReasonGranted), status: true, want: "a finished claim stays finished"}
		cases[reason+" keeps its conditions"] = change{before: finishedAs(reason), patch: `{"status":{"conditions":null}}`, status: true, want: "a finished claim stays finished"}
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			e := bare(t)
			c.run(t, e, &v1alpha1.LeaseClaim{
				ObjectMeta: metav1.ObjectMeta{Namespace: e.Namespace(t), Name: "claim"},
				Spec:       v1alpha1.LeaseClaimSpec{LeaseName: "lease"},
			})
		})
	}
}

func TestLeaseClaimImmutables(t *testing.T) {
	for name, c := range map[string]change{
		"holderIdentity cannot be changed": {patch: `{"spec":{"holderIdentity":"b"}}`, want: "holderIdentity cannot be changed"},
		"holderIdentity cannot be removed": {patch: `{"spec":{"holderIdentity":null}}`, want: "holderIdentity cannot be added or removed"},
		"user cannot be changed":           {patch: `{"spec":{"user":{"username":"bob"}}}`, want: "user cannot be changed"},
		"user cannot be removed":           {patch: `{"spec":{"user":null}}`, want: "user cannot be added or removed"},
		"the rest may":                     {patch: `{"spec":{"renewTime":"2026-01-01T00:00:01.000000Z"}}`},
	} {
		t.Run(name, func(t *testing.T) {
			e := bare(t)
			c.run(t, e, &v1alpha1.LeaseClaim{
				ObjectMeta: metav1.ObjectMeta{Namespace: e.Namespace(t), Name: "claim"},
				Spec:       v1alpha1.LeaseClaimSpec{LeaseName: "lease", HolderIdentity: "a", User: &v1alpha1.ClaimUser{Username: "admin"}},
			})
		})
	}
}

// TestConditionsFromTheStart: a fresh object has the condition that readers
// wait for.
func TestConditionsFromTheStart(t *testing.T) {
	e := bare(t)
	namespace := e.Namespace(t)
	lease := &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "lease"}}
	claim := &v1alpha1.LeaseClaim{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "claim"}, Spec: v1alpha1.LeaseClaimSpec{LeaseName: "lease"}}
	for _, o := range []client.Object{lease, claim} {
		if err := e.Admin.Create(t.Context(), o); err != nil {
			t.Fatal(err)
		}
	}
	want := func(conditions []metav1.Condition, kind string) {
		if len(conditions) != 1 || conditions[0].Type != kind || conditions[0].Status != metav1.ConditionUnknown || conditions[0].Reason != v1alpha1.ReasonPending {
			t.Errorf("conditions %+v", conditions)
		}
	}
	want(lease.Status.Conditions, v1alpha1.FencedLeaseReady)
	want(claim.Status.Conditions, v1alpha1.LeaseClaimHeld)
	if lease.Spec.LeaseDurationSeconds != v1alpha1.DefaultLeaseDurationSeconds {
		t.Errorf("a lease without spec has a duration of %d s", lease.Spec.LeaseDurationSeconds)
	}
}

func (c change) run(t *testing.T, e *env.Environment, o client.Object) {
	t.Helper()
	if err := e.Admin.Create(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	patch := func(body string, status bool) error {
		raw := client.RawPatch(types.MergePatchType, []byte(body))
		if status {
			return e.Admin.Status().Patch(t.Context(), o, raw)
		}
		return e.Admin.Patch(t.Context(), o, raw)
	}
	if c.before != "" {
		if err := patch(c.before, strings.HasPrefix(c.before, `{"status"`)); err != nil {
			t.Fatal(err)
		}
	}
	expectMessage(t, patch(c.patch, c.status), c.want)
}

func expectMessage(t *testing.T, err error, want string) {
	t.Helper()
	switch {
	case want == "" && err != nil:
		t.Errorf("refused: %v", err)
	case want != "" && (err == nil || !strings.Contains(err.Error(), want)):
		t.Errorf("got %v, want %q", err, want)
	}
}

// TestHighTokensAreExact: what people read a token with gives every digit.
func TestHighTokensAreExact(t *testing.T) {
	e := bare(t)
	namespace := e.Namespace(t)
	lease := &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "lease"}}
	if err := e.Admin.Create(t.Context(), lease); err != nil {
		t.Fatal(err)
	}
	for _, token := range []int64{1 << 31, 1 << 32, 1<<53 - 2, 1<<53 - 1} {
		lease.Status.Token = token
		if err := e.Admin.Status().Update(t.Context(), lease); err != nil {
			t.Fatal(err)
		}
		for _, output := range []string{"json", "yaml", "wide", "jsonpath={.status.token}", "custom-columns=T:.status.token"} {
			out, errOut, err := e.Kubectl(t, e.Config, "", "get", "fencedlease", "lease", "-n", namespace, "-o", output)
			if err != nil || !strings.Contains(out, fmt.Sprint(token)) {
				t.Errorf("kubectl get -o %s of token %d: %v\n%s%s", output, token, err, out, errOut)
			}
		}
	}
}
