package cli

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestHoldKeepsTheTokenInAFileOnlyWhileItHolds(t *testing.T) {
	for name, test := range map[string]struct {
		end  func(*testing.T, *fixture, *background)
		code int
	}{
		"interrupted": {func(t *testing.T, _ *fixture, cmd *background) { cmd.send(t, syscall.SIGTERM) }, 0},
		"lost":        {func(t *testing.T, f *fixture, _ *background) { f.deleteClaims(t) }, 4},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			f.lease(t, "worker")
			dir := t.TempDir()
			file := filepath.Join(dir, "token")
			if err := os.WriteFile(file, []byte("7\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			cmd := f.background(t, "hold", "worker", "--file="+file)
			eventually(t, "the token is in the file", func() bool {
				data, err := os.ReadFile(file)
				token := f.status(t, "worker").Token
				return err == nil && token > 0 && string(data) == strconv.FormatInt(token, 10)+"\n"
			})
			test.end(t, f, cmd)
			cmd.ends(t, test.code)
			left, err := os.ReadDir(dir)
			if err != nil || len(left) > 0 {
				t.Fatalf("left %v, %v", left, err)
			}
		})
	}
}

func TestHoldDoesNotHoldWhereItCannotWrite(t *testing.T) {
	f := newFixture(t)
	f.lease(t, "worker")
	if r := f.fence(t, "hold", "worker", "--file="+filepath.Join(t.TempDir(), "missing", "token")); r.code != 1 || !strings.Contains(r.stderr, "write the token") {
		t.Fatalf("got %v", r)
	}
	if claims := f.claims(t); len(claims) > 0 {
		t.Fatalf("left %d claims", len(claims))
	}
}

func TestAMissingTokenFileMeansThatTheLeaseIsLost(t *testing.T) {
	f := newFixture(t)
	if r := f.fence(t, "release", "worker", "--token-file="+filepath.Join(t.TempDir(), "token")); r.code != 4 {
		t.Fatalf("got %v, want exit code 4", r)
	}
}

// What a sidecar holds goes with its Pod: the claim is the Pod's to own.
func TestHoldBelongsToItsPod(t *testing.T) {
	f := newFixture(t)
	f.lease(t, "worker")
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: f.namespace, Name: "worker-0"},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "worker", Image: "worker"}}},
	}
	if err := f.Admin.Create(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "token")
	cmd := f.background(t, "hold", "worker", "--file="+file, "--pod-name="+pod.Name, "--pod-uid="+string(pod.UID))
	eventually(t, "the command knows that it holds the lease", func() bool { _, err := os.Stat(file); return err == nil })
	claims := f.claims(t)
	if len(claims) != 1 || len(claims[0].OwnerReferences) != 1 || claims[0].OwnerReferences[0].UID != pod.UID {
		t.Fatalf("got %+v, want one claim that the Pod owns", claims)
	}
	cmd.send(t, syscall.SIGTERM)
	cmd.ends(t, 0)
}
