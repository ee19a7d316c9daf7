package webhooks

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admission/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
)

// object is an object's JSON: its metadata and one field of data.
type object struct {
	lease, leaseNamespace      string
	token, writeID, floor      string
	deleteToken, bypass        string
	finalizers                 []string
	deleting                   bool
	data                       string
	managedTime, managedFields string
}

func (o *object) raw() runtime.RawExtension {
	if o == nil {
		return runtime.RawExtension{}
	}
	set := func(pairs ...string) map[string]string {
		m := map[string]string{}
		for i := 0; i < len(pairs); i += 2 {
			if pairs[i+1] != "" {
				m[pairs[i]] = pairs[i+1]
			}
		}
		return m
	}
	meta := map[string]any{
		"name": "o", "namespace": "shop",
		"labels": set(fence.LabelLease, o.lease, fence.LabelLeaseNamespace, o.leaseNamespace),
		"annotations": set(fence.AnnotationToken, o.token, fence.AnnotationWriteID, o.writeID, fence.AnnotationFloor, o.floor,
			fence.AnnotationDeleteToken, o.deleteToken, fence.AnnotationBypass, o.bypass),
		"finalizers": o.finalizers,
	}
	if o.deleting {
		meta["deletionTimestamp"] = "2026-01-01T00:00:00Z"
	}
	if o.managedTime != "" {
		meta["managedFields"] = []any{map[string]any{"manager": o.managedFields, "time": o.managedTime}}
	}
	raw, err := json.Marshal(map[string]any{"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": map[string]string{"by": o.data}})
	if err != nil {
		panic(err)
	}
	return runtime.RawExtension{Raw: raw}
}

// judged is one request; what is not given is an update of a ConfigMap by amy
// where lease main has token 42, held by pod-b.
type judged struct {
	old, new *object
	delete   bool
	sub      string
	header   []string
	reason   string // of a bypass, by header
	user     string
	groups   []string
	may      map[string]bool
	lease    func(*v1alpha1.FencedLease)
	noLease  bool
	cluster  bool // a cluster-scoped object
	unmarked bool // the namespace

	want    fence.Reason
	says    string
	warning string
}

// answer answers decide's questions from the case.
func (c judged) answer(t *testing.T) verdict {
	t.Helper()
	lease := &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "main"}}
	lease.Status.Token, lease.Status.Holder = 42, &v1alpha1.Holder{ClaimUID: "u", Identity: "pod-b", User: &v1alpha1.ClaimUser{Username: "amy"}}
	if c.lease != nil {
		c.lease(lease)
	}
	r := &admissionv1.AdmissionRequest{
		Operation: admissionv1.Update, Namespace: "shop", Name: "o", SubResource: c.sub,
		Resource: metav1.GroupVersionResource{Version: "v1", Resource: "configmaps"},
		Object:   c.new.raw(), OldObject: c.old.raw(),
		UserInfo: authenticationv1.UserInfo{Username: "amy", Groups: c.groups, Extra: map[string]authenticationv1.ExtraValue{}},
	}
	if c.user != "" {
		r.UserInfo.Username = c.user
	}
	if c.old == nil {
		r.Operation = admissionv1.Create
	}
	if c.delete {
		r.Operation = admissionv1.Delete
	}
	if c.cluster {
		r.Namespace = ""
	}
	if len(c.header) > 0 {
		r.UserInfo.Extra[fence.ExtraToken] = c.header
	}
	if c.reason != "" {
		r.UserInfo.Extra[fence.ExtraBypass] = []string{c.reason}
	}
	w, err := readRequest(r)
	if err != nil {
		t.Fatal(err)
	}
	f := facts{may: map[string]bool{}}
	if !c.noLease {
		f.lease = lease
	}
	for range 10 {
		v, q := decide(w, f)
		switch q {
		case nothing:
			return v
		case readLive:
			f.live = true
		case readMark:
			f.marked = new(!c.unmarked)
		case mayGuard:
			f.may[fence.VerbGuard] = c.may[fence.VerbGuard]
		case mayBypass:
			f.may[fence.VerbBypass] = c.may[fence.VerbBypass]
		}
	}
	t.Fatal("decide asks the same question again")
	return verdict{}
}

func TestDecide(t *testing.T) {
	guarded := func(change func(*object)) *object {
		o := &object{lease: "main", token: "42", writeID: "a", data: "x"}
		if change != nil {
			change(o)
		}
		return o
	}
	stored := guarded(nil)
	changed := func(change func(*object)) *object {
		o := guarded(change)
		o.data = "y"
		return o
	}
	stamped := func(token string) *object {
		return changed(func(o *object) { o.token, o.writeID = token, "b" })
	}
	guard, bypass := map[string]bool{fence.VerbGuard: true}, map[string]bool{fence.VerbBypass: true}

	for name, c := range map[string]judged{
		// who is not guarded
		"an unguarded object is not judged": {old: &object{data: "x"}, new: &object{data: "y"}},

		// rule 1
		"anybody finishes a deletion": {
			old: guarded(func(o *object) { o.deleting, o.finalizers = true, []string{"a", "b"} }), noLease: true,
			new: guarded(func(o *object) { o.deleting, o.finalizers = true, []string{"b"} }),
		},
		"nobody finishes one with a stale token": {
			old:    guarded(func(o *object) { o.deleting, o.finalizers = true, []string{"a"} }),
			new:    guarded(func(o *object) { o.deleting = true }),
			header: []string{"41"}, want: fence.StaleToken,
		},
		"nobody finishes one with a superseded token": {
			old:    guarded(func(o *object) { o.token, o.deleting, o.finalizers = "41", true, []string{"a"} }),
			new:    guarded(func(o *object) { o.token, o.deleting = "41", true }),
			header: []string{"41"}, want: fence.StaleToken,
		},
		"nobody finishes one with a revoked token": {
			old:    guarded(func(o *object) { o.deleting, o.finalizers = true, []string{"a"} }),
			new:    guarded(func(o *object) { o.deleting = true }),
			header: []string{"42"}, lease: func(l *v1alpha1.FencedLease) { l.Spec.MinToken = 50 }, want: fence.StaleToken,
		},
		"nobody finishes one with a malformed token": {
			old:    guarded(func(o *object) { o.deleting, o.finalizers = true, []string{"a"} }),
			new:    guarded(func(o *object) { o.deleting = true }),
			header: []string{"042"}, want: fence.MalformedToken,
		},
		"what changes more is a write": {
			old:  guarded(func(o *object) { o.deleting, o.finalizers = true, []string{"a"} }),
			new:  changed(func(o *object) { o.deleting = true }),
			want: fence.Unstamped,
		},
		"adding a finalizer is a write": {
			old:  guarded(func(o *object) { o.deleting, o.finalizers = true, []string{"a"} }),
			new:  guarded(func(o *object) { o.deleting, o.finalizers = true, []string{"a", "b"} }),
			want: fence.Unstamped,
		},
		"taking finalizers off what is not being deleted is a write": {
			old: guarded(func(o *object) { o.finalizers = []string{"a"} }), new: guarded(nil), want: fence.Unstamped,
		},

		// rule 2
		"a write that changes nothing passes":          {old: stored, new: guarded(nil)},
		"so does a stale one":                          {old: stored, new: guarded(nil), header: []string{"41"}},
		"timestamps of managed fields do not count":    {old: guarded(func(o *object) { o.managedTime, o.managedFields = "2026-01-01T00:00:01Z", "m" }), new: guarded(func(o *object) { o.managedTime, o.managedFields = "2026-01-01T00:00:02Z", "m" })},
		"managed fields do":                            {old: guarded(func(o *object) { o.managedTime, o.managedFields = "2026-01-01T00:00:01Z", "m" }), new: guarded(func(o *object) { o.managedTime, o.managedFields = "2026-01-01T00:00:01Z", "n" }), want: fence.Unstamped},
		"sent again under a stored write-id it is not": {old: stored, new: changed(nil), want: fence.Unstamped, says: "may be committed already"},

		// rules 3, 4, 5, 7
		"a current token":                             {old: stored, new: stamped("42")},
		"the current token by header":                 {old: stored, new: changed(nil), header: []string{"42"}},
		"a first token":                               {old: guarded(func(o *object) { o.token, o.writeID = "", "" }), new: stamped("42")},
		"a stale token":                               {old: stored, new: stamped("41"), want: fence.StaleToken},
		"a stale one by header":                       {old: stored, new: changed(nil), header: []string{"41"}, want: fence.StaleToken},
		"a stale one by the lease alone":              {old: guarded(func(o *object) { o.token = "7" }), new: stamped("41"), want: fence.StaleToken},
		"one below the floor":                         {old: guarded(func(o *object) { o.token, o.floor = "41", "43" }), new: changed(func(o *object) { o.token, o.writeID, o.floor = "42", "b", "43" }), want: fence.StaleToken},
		"one that was never issued":                   {old: stored, new: stamped("43"), want: fence.UnissuedToken},
		"a malformed one":                             {old: stored, new: stamped("042"), want: fence.MalformedToken},
		"two by header":                               {old: stored, new: changed(nil), header: []string{"42", "42"}, want: fence.MalformedToken},
		"an empty header":                             {old: stored, new: changed(nil), header: []string{""}, want: fence.MalformedToken},
		"a header above the record does not record":   {old: guarded(func(o *object) { o.token = "41" }), new: changed(func(o *object) { o.token = "41" }), header: []string{"42"}, want: fence.NotRecorded},
		"a header that records":                       {old: guarded(func(o *object) { o.token = "41" }), new: changed(nil), header: []string{"42"}},
		"a header and another annotation disagree":    {old: stored, new: stamped("41"), header: []string{"42"}, want: fence.FenceRemoved},
		"a token without a new write-id":              {old: guarded(func(o *object) { o.token = "41" }), new: changed(nil), want: fence.Unstamped, says: "change fencedlease.io/write-id too"},
		"an inherited token is not presented":         {old: stored, new: changed(nil), want: fence.Unstamped},
		"a malformed record locks nobody out":         {old: guarded(func(o *object) { o.token = "zzz" }), new: stamped("42")},
		"the floor is the operator's":                 {old: stored, new: changed(func(o *object) { o.writeID, o.floor = "b", "42" }), want: fence.FenceRemoved},
		"a revoked token":                             {old: stored, new: stamped("42"), lease: func(l *v1alpha1.FencedLease) { l.Spec.MinToken = 50 }, want: fence.StaleToken, says: "revoked"},
		"by annotations where the header is demanded": {old: stored, new: stamped("42"), lease: func(l *v1alpha1.FencedLease) { l.Spec.Presentation = "Header" }, want: fence.Unstamped},

		// rule 6
		"no lease":                            {old: stored, new: stamped("42"), noLease: true, want: fence.UnknownLease},
		"a lease that allows the namespace":   {old: guarded(func(o *object) { o.leaseNamespace = "infra" }), new: changed(func(o *object) { o.leaseNamespace, o.writeID = "infra", "b" }), lease: func(l *v1alpha1.FencedLease) { l.Namespace, l.Spec.AllowedNamespaces = "infra", []string{"shop"} }},
		"one that does not":                   {old: guarded(func(o *object) { o.leaseNamespace = "infra" }), new: changed(func(o *object) { o.leaseNamespace, o.writeID = "infra", "b" }), lease: func(l *v1alpha1.FencedLease) { l.Namespace = "infra" }, want: fence.UnknownLease, says: "does not allow this namespace"},
		"and nothing presented":               {old: guarded(func(o *object) { o.leaseNamespace = "infra" }), new: guarded(func(o *object) { o.leaseNamespace, o.data = "infra", "y" }), lease: func(l *v1alpha1.FencedLease) { l.Namespace = "infra" }, want: fence.Unstamped, says: "lease not for this namespace"},
		"every namespace, and cluster-scoped": {cluster: true, old: guarded(func(o *object) { o.leaseNamespace = "infra" }), new: changed(func(o *object) { o.leaseNamespace, o.writeID = "infra", "b" }), lease: func(l *v1alpha1.FencedLease) { l.Namespace, l.Spec.AllowedNamespaces = "infra", []string{"*"} }},

		// rule 8
		"the holder's account":          {old: stored, new: stamped("42"), lease: func(l *v1alpha1.FencedLease) { l.Spec.HolderBinding = "User" }},
		"another account":               {old: stored, new: stamped("42"), user: "bob", lease: func(l *v1alpha1.FencedLease) { l.Spec.HolderBinding = "User" }, want: fence.NotHolder},
		"a lapsed token passes":         {old: stored, new: stamped("42"), lease: func(l *v1alpha1.FencedLease) { l.Status.Holder = nil }},
		"a lapsed token that may not":   {old: stored, new: stamped("42"), lease: func(l *v1alpha1.FencedLease) { l.Status.Holder, l.Spec.LapsedWrites = nil, "Deny" }, want: fence.Lapsed},
		"a held one where lapsed count": {old: stored, new: stamped("42"), lease: func(l *v1alpha1.FencedLease) { l.Spec.LapsedWrites = "Deny" }},

		// unstamped writes
		"warned":                            {old: stored, new: changed(nil), lease: func(l *v1alpha1.FencedLease) { l.Spec.UnstampedWrites = &v1alpha1.UnstampedWrites{Default: "Warn"} }, warning: "Unstamped"},
		"allowed, and the annotations left": {old: stored, new: changed(nil), lease: func(l *v1alpha1.FencedLease) { l.Spec.UnstampedWrites = &v1alpha1.UnstampedWrites{Default: "Allow"} }},
		"allowed, and the record lowered": {old: stored, new: changed(func(o *object) { o.token = "7" }), want: fence.FenceRemoved,
			lease: func(l *v1alpha1.FencedLease) { l.Spec.UnstampedWrites = &v1alpha1.UnstampedWrites{Default: "Allow"} }},
		"an exception by service account": {old: stored, new: changed(nil), user: "system:serviceaccount:argo:ctl", lease: func(l *v1alpha1.FencedLease) {
			l.Spec.UnstampedWrites = &v1alpha1.UnstampedWrites{Default: "Deny", Except: []v1alpha1.UnstampedException{{ServiceAccount: &v1alpha1.ServiceAccountReference{Namespace: "argo", Name: "ctl"}, Action: "Allow"}}}
		}},
		"an exception by group denies": {old: stored, new: changed(nil), groups: []string{"ops"}, want: fence.Unstamped, lease: func(l *v1alpha1.FencedLease) {
			l.Spec.UnstampedWrites = &v1alpha1.UnstampedWrites{Default: "Allow", Except: []v1alpha1.UnstampedException{{Group: "ops", Action: "Deny"}}}
		}},
		"the first exception decides": {old: stored, new: changed(nil), lease: func(l *v1alpha1.FencedLease) {
			l.Spec.UnstampedWrites = &v1alpha1.UnstampedWrites{Except: []v1alpha1.UnstampedException{{User: "amy", Action: "Allow"}, {User: "amy", Action: "Deny"}}}
		}},

		// bypass
		"a bypass":                         {old: stored, new: changed(nil), reason: "incident 7", may: bypass, warning: "incident 7"},
		"a bypass by annotation":           {old: stored, new: changed(func(o *object) { o.bypass = "incident 7" }), may: bypass, warning: "incident 7"},
		"a stored reason is none":          {old: guarded(func(o *object) { o.bypass = "old" }), new: changed(func(o *object) { o.bypass = "old" }), may: bypass, want: fence.Unstamped, says: "another one"},
		"a reason without the right":       {old: stored, new: changed(nil), reason: "please", want: fence.Unstamped, says: `lacks the verb "bypass" on fencedleases/main in namespace shop`},
		"the right without a reason":       {old: stored, new: changed(nil), may: bypass, want: fence.Unstamped},
		"a stamped write never bypasses":   {old: stored, new: stamped("41"), reason: "incident 7", may: bypass, want: fence.StaleToken},
		"a bypass with no lease":           {old: stored, new: changed(nil), noLease: true, reason: "incident 7", may: bypass, warning: "incident 7"},
		"a bypass deletes":                 {old: stored, delete: true, reason: "incident 7", may: bypass, warning: "incident 7"},
		"a bypass takes the label off":     {old: stored, new: &object{data: "y"}, reason: "incident 7", may: bypass, warning: "incident 7"},
		"a bypass leaves the record":       {old: stored, new: changed(func(o *object) { o.token = "7" }), reason: "incident 7", may: bypass, want: fence.FenceRemoved},
		"but lowers what was never issued": {old: guarded(func(o *object) { o.token = "9000" }), new: changed(nil), reason: "restore", may: bypass, warning: "restore"},
		"and not to what was not issued":   {old: guarded(func(o *object) { o.token = "9000" }), new: changed(func(o *object) { o.token = "8000" }), reason: "restore", may: bypass, want: fence.FenceRemoved},

		// rule 9
		"the label taken off":                         {old: stored, new: &object{data: "x", token: "42", writeID: "a"}, want: fence.FenceRemoved},
		"the label taken off with the current token":  {old: stored, new: &object{data: "x", token: "42", writeID: "b"}, want: fence.FenceRemoved},
		"the label pointed elsewhere":                 {old: stored, new: changed(func(o *object) { o.lease, o.writeID = "mine", "b" }), want: fence.FenceRemoved},
		"the label pointed to another namespace":      {old: stored, new: changed(func(o *object) { o.leaseNamespace, o.writeID = "infra", "b" }), want: fence.FenceRemoved},
		"the record stripped with a token by header":  {old: stored, new: changed(func(o *object) { o.token = "" }), header: []string{"42"}, want: fence.FenceRemoved},
		"the label put on with the right":             {old: &object{data: "x"}, new: &object{data: "x", lease: "main"}, may: guard},
		"the label put on without it":                 {old: &object{data: "x"}, new: &object{data: "x", lease: "main"}, want: fence.Unstamped},
		"the label of no lease":                       {old: &object{data: "x"}, new: &object{data: "x", lease: "main"}, noLease: true, may: guard, want: fence.UnknownLease},
		"the label with a forged record":              {old: &object{data: "x"}, new: &object{data: "x", lease: "main", token: "9000"}, may: guard, want: fence.FenceRemoved},
		"the label with the current token":            {old: &object{data: "x"}, new: &object{data: "x", lease: "main", token: "42", writeID: "z"}, may: guard},
		"the label with the token, without the right": {old: &object{data: "x"}, new: &object{data: "x", lease: "main", token: "42", writeID: "z"}, want: fence.Unstamped},
		"the label with a floor":                      {old: &object{data: "x"}, new: &object{data: "x", lease: "main", floor: "9000"}, may: guard, want: fence.FenceRemoved},
		"the label with a delete mark":                {old: &object{data: "x"}, new: &object{data: "x", lease: "main", deleteToken: "42"}, may: guard, want: fence.FenceRemoved},

		// creates
		"a create with the current token":            {new: &object{lease: "main", token: "42", writeID: "a"}},
		"a create with an old token":                 {new: &object{lease: "main", token: "41", writeID: "a"}, want: fence.StaleToken},
		"a create with a token of another cluster":   {new: &object{lease: "main", token: "9000", writeID: "a"}, want: fence.UnissuedToken},
		"a restore before its lease":                 {new: &object{lease: "main", token: "41", writeID: "a"}, noLease: true, want: fence.UnknownLease},
		"a create by header alone records nothing":   {new: &object{lease: "main"}, header: []string{"42"}, want: fence.NotRecorded},
		"a create by header that records":            {new: &object{lease: "main", token: "42"}, header: []string{"42"}},
		"a create of somebody who may guard":         {new: &object{lease: "main"}, may: guard},
		"a create of somebody else":                  {new: &object{lease: "main"}, want: fence.Unstamped},
		"a create below the token reserved for seal": {new: &object{lease: "main", token: "42", writeID: "a"}, lease: sealing, want: fence.StaleToken},
		"a create where nobody sees its /scale": {new: &object{lease: "main", leaseNamespace: "infra", token: "42", writeID: "a"}, unmarked: true, want: fence.UnknownLease, says: fence.LabelNamespaceMark,
			lease: func(l *v1alpha1.FencedLease) { l.Namespace, l.Spec.AllowedNamespaces = "infra", []string{"*"} }},
		"a stale one there": {new: &object{lease: "main", leaseNamespace: "infra", token: "41", writeID: "a"}, unmarked: true, want: fence.StaleToken,
			lease: func(l *v1alpha1.FencedLease) { l.Namespace, l.Spec.AllowedNamespaces = "infra", []string{"*"} }},
		"the label put on there": {old: &object{data: "x"}, new: &object{data: "x", lease: "main", leaseNamespace: "infra"}, may: guard, unmarked: true, want: fence.UnknownLease,
			lease: func(l *v1alpha1.FencedLease) { l.Namespace, l.Spec.AllowedNamespaces = "infra", []string{"*"} }},
		"a create with a floor": {new: &object{lease: "main", token: "42", writeID: "a", floor: "42"}, want: fence.FenceRemoved},

		// deletes
		"a delete without a token":             {old: stored, delete: true, want: fence.Unstamped},
		"a delete by the recorded token":       {old: stored, delete: true, header: []string{"42"}},
		"a delete by a stale one":              {old: stored, delete: true, header: []string{"41"}, want: fence.StaleToken},
		"a delete above the record":            {old: guarded(func(o *object) { o.token = "41" }), delete: true, header: []string{"42"}, want: fence.NotRecorded},
		"a delete that the holder decided":     {old: guarded(func(o *object) { o.deleteToken = "42" }), delete: true, user: "bob"},
		"a delete that a former one decided":   {old: guarded(func(o *object) { o.deleteToken = "41" }), delete: true, want: fence.Unstamped},
		"a delete decided by what is no token": {old: guarded(func(o *object) { o.deleteToken, o.token = "x", "x" }), delete: true, want: fence.Unstamped},

		// what the holder decides of a deletion
		"the holder's mark":                  {old: stored, new: changed(func(o *object) { o.writeID, o.deleteToken = "b", "42" })},
		"the holder's mark by header":        {old: stored, new: changed(func(o *object) { o.deleteToken = "42" }), header: []string{"42"}},
		"the holder's mark with its record":  {old: guarded(func(o *object) { o.token = "41" }), new: changed(func(o *object) { o.writeID, o.deleteToken = "b", "42" })},
		"a mark for whoever comes next":      {old: stored, new: changed(func(o *object) { o.writeID, o.deleteToken = "b", "43" }), want: fence.FenceRemoved, says: fence.AnnotationDeleteToken},
		"a mark for whoever came before":     {old: stored, new: changed(func(o *object) { o.deleteToken = "41" }), header: []string{"42"}, want: fence.FenceRemoved},
		"a mark that is no token":            {old: stored, new: changed(func(o *object) { o.writeID, o.deleteToken = "b", "042" }), want: fence.FenceRemoved},
		"a mark taken off":                   {old: guarded(func(o *object) { o.deleteToken = "42" }), new: stamped("42")},
		"a former mark left where it stands": {old: guarded(func(o *object) { o.deleteToken = "41" }), new: changed(func(o *object) { o.writeID, o.deleteToken = "b", "41" })},

		// paths that keep no annotation
		"a status write by the recorded token": {sub: "status", old: stored, new: changed(nil), header: []string{"42"}},
		"one whose stamp was dropped":          {sub: "status", old: stored, new: changed(nil), want: fence.Unstamped, says: fence.ExtraToken},
	} {
		t.Run(name, func(t *testing.T) {
			v := c.answer(t)
			if v.allowed != (c.want == "") || !v.allowed && v.reason != c.want {
				t.Fatalf("got %+v, want %q", v, c.want)
			}
			if !v.allowed && !strings.HasPrefix(v.message, string(c.want)+": [shop/main] ") && !strings.HasPrefix(v.message, string(c.want)+": [infra/main] ") {
				t.Errorf("the message does not start with cause and lease: %s", v.message)
			}
			if !strings.Contains(v.message, c.says) {
				t.Errorf("the message does not say %q: %s", c.says, v.message)
			}
			if (v.warning == "") != (c.warning == "") || !strings.Contains(v.warning, c.warning) {
				t.Errorf("warning %q, want %q", v.warning, c.warning)
			}
		})
	}
}

// TestCacheThatLags: the cache has 41 for the current token and the API server
// 42. What leaves no record is never passed on what the cache says, and nothing
// is refused on it.
func TestCacheThatLags(t *testing.T) {
	cached := &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "main"}}
	cached.Status.Token = 41
	live := cached.DeepCopy()
	live.Status.Token = 42
	for name, c := range map[string]struct {
		operation admissionv1.Operation
		sub       string
		record    string
		token     string
		want      fence.Reason
	}{
		"a delete":                         {admissionv1.Delete, "", "41", "41", fence.StaleToken},
		"a scale":                          {admissionv1.Update, "scale", "41", "41", fence.StaleToken},
		"an eviction":                      {admissionv1.Create, "eviction", "41", "41", fence.StaleToken},
		"a delete by the holder":           {admissionv1.Delete, "", "42", "42", ""},
		"a scale by the holder":            {admissionv1.Update, "scale", "42", "42", ""},
		"the holder's first write":         {admissionv1.Update, "", "41", "42", ""},
		"a create by the holder":           {admissionv1.Create, "", "", "42", ""},
		"a create by the superseded one":   {admissionv1.Create, "", "", "41", fence.StaleToken},
		"a token above what both know yet": {admissionv1.Update, "", "41", "43", fence.UnissuedToken},
	} {
		t.Run(name, func(t *testing.T) {
			r := &admissionv1.AdmissionRequest{
				Operation: c.operation, Namespace: "shop", Name: "o", SubResource: c.sub, Resource: metav1.GroupVersionResource{Version: "v1", Resource: "pods"},
				UserInfo: authenticationv1.UserInfo{Username: "amy", Extra: map[string]authenticationv1.ExtraValue{fence.ExtraToken: {c.token}}},
			}
			if c.record != "" {
				r.OldObject = (&object{lease: "main", token: c.record}).raw()
			}
			if c.sub == "" && c.operation != admissionv1.Delete {
				r.Object = (&object{lease: "main", token: c.token, data: "new"}).raw()
			}
			w, err := readRequest(r)
			if err != nil {
				t.Fatal(err)
			}
			f := facts{lease: cached, marked: new(true)}
			v, q := decide(w, f)
			if q == readLive {
				f.lease, f.live = live, true
				v, q = decide(w, f)
			}
			if q != nothing || v.reason != c.want || v.allowed != (c.want == "") {
				t.Errorf("%+v, asks %v; want %q", v, q, c.want)
			}
		})
	}
}

func sealing(l *v1alpha1.FencedLease) {
	l.Spec.Seal = &v1alpha1.Seal{Resources: []v1alpha1.SealedResource{{Resource: "configmaps"}}}
	l.Annotations = map[string]string{fence.AnnotationLastToken: "43"}
}

func TestBindingCarriesNothing(t *testing.T) {
	for name, o := range map[string]*object{
		"the label": {lease: "main"}, "a token": {token: "42"}, "a floor": {floor: "42"}, "a delete mark": {deleteToken: "42"},
	} {
		t.Run(name, func(t *testing.T) {
			if v := (judged{sub: "binding", new: o}).answer(t); v.allowed || v.reason != fence.FenceRemoved {
				t.Errorf("got %+v", v)
			}
		})
	}
	if v := (judged{sub: "binding", new: &object{}}).answer(t); !v.allowed {
		t.Errorf("a plain Binding: %+v", v)
	}
}

// FuzzRequest feeds whatever bytes as old and new object: no panic, and where
// a token is stale, every lower one is rejected on the same objects.
func FuzzRequest(f *testing.F) {
	f.Add(string((&object{lease: "main", token: "42", writeID: "a"}).raw().Raw), string((&object{lease: "main", token: "41", writeID: "b"}).raw().Raw), "41", "update")
	f.Add("", string((&object{lease: "main"}).raw().Raw), "", "create")
	f.Add(`{"metadata":null}`, `{"metadata":{"annotations":null}}`, "7", "update")
	f.Add(`null`, `[]`, "+7", "delete")
	f.Fuzz(func(t *testing.T, old, object, header, operation string) {
		judge := func(token string) verdict {
			r := &admissionv1.AdmissionRequest{
				Operation: admissionv1.Operation(strings.ToUpper(operation)), Namespace: "shop", Resource: metav1.GroupVersionResource{Resource: "configmaps"},
				Object: runtime.RawExtension{Raw: []byte(object)}, OldObject: runtime.RawExtension{Raw: []byte(old)},
				UserInfo: authenticationv1.UserInfo{Extra: map[string]authenticationv1.ExtraValue{fence.ExtraToken: {token}}},
			}
			w, err := readRequest(r)
			if err != nil {
				return verdict{reason: "error"}
			}
			lease := &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "main"}}
			lease.Status.Token = 42
			v, _ := decide(w, facts{lease: lease, live: true, marked: new(true), may: map[string]bool{fence.VerbBypass: false, fence.VerbGuard: true}})
			return v
		}
		v := judge(header)
		token, err := fence.ParseToken(header)
		if err == nil && v.reason == fence.StaleToken && token > 1 {
			if lower := judge(fmt.Sprint(int64(token) - 1)); lower.allowed {
				t.Errorf("%s is stale and %d passes", header, token-1)
			}
		}
	})
}
