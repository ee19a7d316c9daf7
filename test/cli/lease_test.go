package cli

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

func TestAcquireLeavesTheLeaseHeldUntilReleased(t *testing.T) {
	f := newFixture(t)
	f.lease(t, "deploy")
	exported := f.must(t, "acquire", "deploy", "--identity=build-7", "--export")
	status := f.status(t, "deploy")
	token := strconv.FormatInt(status.Token, 10)
	if want := fmt.Sprintf("export FENCING_LEASE=%s/deploy FENCING_TOKEN=%s\n", f.namespace, token); exported != want {
		t.Fatalf("printed %q, want %q", exported, want)
	}
	if status.Holder == nil || status.Holder.Identity != "build-7" {
		t.Fatalf("held by %+v, want build-7", status.Holder)
	}
	eventually(t, "the hand-over shows among the events", func() bool {
		return strings.Contains(f.must(t, "describe", "deploy"), "token "+token+` was issued to "build-7"`)
	})
	f.must(t, "release", "deploy", "--fencing-token="+token)
	eventually(t, "the lease is free", func() bool { return f.status(t, "deploy").Holder == nil })
	if got := f.must(t, "release", f.namespace+"/deploy", "--fencing-token="+token); !strings.Contains(got, "before") {
		t.Fatalf("a second release printed %q", got)
	}
}

func TestAcquirePrintsTheClaim(t *testing.T) {
	f := newFixture(t)
	f.lease(t, "deploy")
	claim := &v1alpha1.LeaseClaim{}
	if err := json.Unmarshal([]byte(f.must(t, "acquire", "deploy", "-o", "json")), claim); err != nil {
		t.Fatal(err)
	}
	if claim.Kind != "LeaseClaim" || claim.Status.Token == 0 || claim.Status.Token != f.status(t, "deploy").Token {
		t.Fatalf("printed %+v", claim)
	}
}

// A holder that comes back late cannot release its successor's lease.
func TestReleaseLeavesANewerHolderAlone(t *testing.T) {
	f := newFixture(t)
	f.lease(t, "deploy", duration(1))
	old := f.must(t, "acquire", "deploy", "-o", "jsonpath={.status.token}")
	newer := f.must(t, "acquire", "deploy", "--wait=20s", "-o", "jsonpath={.status.token}")
	r := f.fence(t, "release", "deploy", "--fencing-token="+old)
	if r.code != 3 || !strings.Contains(r.stderr, "current "+newer) {
		t.Fatalf("got %v, want exit code 3 and the current token", r)
	}
}

func TestListPrintsHoldersInEveryForm(t *testing.T) {
	f := newFixture(t)
	f.lease(t, "deploy")
	f.lease(t, "free")
	token := f.must(t, "acquire", "deploy", "--identity=build-7", "-o", "jsonpath={.status.token}")
	rows := strings.Split(strings.TrimSpace(f.must(t, "list")), "\n")
	if len(rows) != 3 {
		t.Fatalf("%d rows: %q", len(rows), rows)
	}
	for i, want := range [][]string{
		{"NAME", "HOLDER", "TOKEN", "SINCE", "WAITING", "READY", "AGE"},
		{"deploy", "build-7", token},
		{"free", "<none>", "<none>", "<none>"},
	} {
		if got := strings.Fields(rows[i]); len(got) < len(want) || strings.Join(got[:len(want)], " ") != strings.Join(want, " ") {
			t.Errorf("row %d is %q, want %q", i, got, want)
		}
	}
	if got := f.must(t, "list", "-A"); !strings.Contains(got, f.namespace) || !strings.HasPrefix(got, "NAMESPACE") {
		t.Errorf("-A printed %q", got)
	}
	for output, want := range map[string]string{
		"name":                               "fencedlease.fencedlease.io/deploy\nfencedlease.fencedlease.io/free\n",
		"jsonpath={.items[*].metadata.name}": "deploy free",
	} {
		if got := f.must(t, "list", "-o", output); got != want {
			t.Errorf("-o %s printed %q, want %q", output, got, want)
		}
	}
	leases := &v1alpha1.FencedLeaseList{}
	if err := json.Unmarshal([]byte(f.must(t, "list", "-o", "json")), leases); err != nil || len(leases.Items) != 2 {
		t.Errorf("-o json: %v, %d leases", err, len(leases.Items))
	}
}

func TestDescribeShowsTheQueueInItsOrderAndTheNewestEvents(t *testing.T) {
	f := newFixture(t)
	f.lease(t, "deploy", func(s *v1alpha1.FencedLeaseSpec) { s.MaxPriority = new(int32(5)) })
	f.must(t, "acquire", "deploy", "--identity=holder")
	for i, args := range [][]string{{"--identity=second"}, {"--identity=first", "--priority=5"}} {
		f.background(t, append([]string{"run", "deploy"}, append(args, "--", "true")...)...)
		eventually(t, "another claim waits", func() bool {
			waiting := f.status(t, "deploy").Waiting
			return waiting != nil && int(*waiting) == i+1
		})
	}
	for i, note := range []string{"oldest", "middle", "newest"} {
		at := metav1.NewTime(time.Now().Add(time.Duration(i+1) * time.Hour))
		if err := f.Admin.Create(t.Context(), &corev1.Event{
			ObjectMeta:     metav1.ObjectMeta{Namespace: f.namespace, Name: note},
			InvolvedObject: corev1.ObjectReference{APIVersion: v1alpha1.GroupVersion.String(), Kind: "FencedLease", Namespace: f.namespace, Name: "deploy"},
			Reason:         "Rejected", Message: note, LastTimestamp: at,
		}); err != nil {
			t.Fatal(err)
		}
	}
	got := f.must(t, "describe", "deploy", "--events=2")
	position := -1
	for _, want := range []string{"Token:", "Holder:     holder", "Claim:      deploy-", "Queue:", "first", "second", "Events:", "middle", "newest"} {
		at := strings.Index(got, want)
		if at <= position {
			t.Fatalf("%q is missing or in the wrong place:\n%s", want, got)
		}
		position = at
	}
	if strings.Contains(got, "oldest") {
		t.Fatalf("shows more than 2 events:\n%s", got)
	}
}

func TestMistakesEndWithTheUsageCodeAndSayWhatToDo(t *testing.T) {
	f := newFixture(t)
	for name, test := range map[string]struct {
		args []string
		want string
	}{
		"an unknown command":          {[]string{"seize"}, "unknown command"},
		"an unknown flag":             {[]string{"list", "--wide"}, "unknown flag"},
		"an unknown output":           {[]string{"list", "-o", "csv"}, "allowed formats"},
		"no lease":                    {[]string{"describe"}, "accepts 1 arg"},
		"a lease's name out of range": {[]string{"describe", "De_ploy"}, "[namespace/]name"},
		"too many slashes":            {[]string{"describe", "a/b/c"}, "[namespace/]name"},
		"run without a command":       {[]string{"run", "deploy"}, "LEASE -- COMMAND"},
		"run without the dashes":      {[]string{"run", "deploy", "true"}, "LEASE -- COMMAND"},
		"two ways to wait":            {[]string{"acquire", "deploy", "--try", "--wait=1s"}, "exclude each other"},
		"a negative wait":             {[]string{"acquire", "deploy", "--wait=-1s"}, "must not be negative"},
		"no token":                    {[]string{"release", "deploy"}, "FENCING_TOKEN"},
		"a malformed token":           {[]string{"release", "deploy", "--fencing-token=042"}, "must not start with 0"},
	} {
		t.Run(name, func(t *testing.T) {
			if r := f.fence(t, test.args...); r.code != 2 || !strings.Contains(r.stderr, test.want) {
				t.Fatalf("got %v, want exit code 2 and %q", r, test.want)
			}
		})
	}
}

// kubectl asks the script that is named after the plugin.
func TestCompletionOffersLeases(t *testing.T) {
	f := newFixture(t)
	f.lease(t, "deploy")
	f.lease(t, "other")
	for typed, want := range map[string]string{"": "deploy\nother\n:4\n", "d": "deploy\n:4\n", f.namespace + "/o": f.namespace + "/other\n:4\n"} {
		r := f.end(t, nil, "../../hack/krew/kubectl_complete-fence", "describe", typed)
		if r.stdout != want {
			t.Errorf("%q is completed with %v, want %q", typed, r, want)
		}
	}
}

// A rejection by the webhook shows on the lease and on the object; a write
// that presents nothing leaves no trace there.
func TestDescribeAndExplainShowWhatTheWebhookRejected(t *testing.T) {
	f := newFixture(t)
	f.lease(t, "deploy", duration(1))
	older := f.acquired(t, "--identity=older")
	newer := f.acquired(t, "--identity=newer")
	apply := func(token string) result {
		return f.fenceWith(t, app("1"), "apply", "--lease=deploy", "--fencing-token="+token, "-f", "-")
	}
	if r := apply(older); r.code != 3 {
		t.Fatalf("the older token: %v", r)
	}
	if r := apply(newer); r.code != 0 {
		t.Fatalf("the newer token: %v", r)
	}
	if r := f.kubectl(t, "label", "configmap/app", "by=nobody"); r.code == 0 {
		t.Fatal("a write without a token passed")
	}
	want := "configmaps " + f.namespace + "/app by"
	eventually(t, "the rejection shows", func() bool { return strings.Contains(f.must(t, "describe", "deploy"), want) })
	for _, command := range [][]string{{"describe", "deploy"}, {"explain", "configmap/app"}} {
		got := f.must(t, command...)
		if !strings.Contains(got, want) || !strings.Contains(got, "\n  StaleToken") || strings.Contains(got, "\n  Unstamped") {
			t.Errorf("%s:\n%s", command[0], got)
		}
	}
	if r := f.kubectl(t, "label", "configmap/plain", "fencedlease.io/lease=deploy"); r.code != 0 {
		t.Fatal(r)
	}
	if got := f.must(t, "explain", "configmap/plain"); strings.Contains(got, want) {
		t.Errorf("of another object:\n%s", got)
	}
}
