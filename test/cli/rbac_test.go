package cli

import (
	"strings"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"

	"github.com/fencedlease/fencedlease/fence"
)

// The rules are just enough: without them an account presents tokens by
// annotations alone, with them by header, and it can impersonate nobody else.
func TestRBACGrantsAnAccountToPresentTokens(t *testing.T) {
	for name, test := range map[string]struct {
		account func(namespace string) string
		groups  []string
		flags   []string
	}{
		"a service account": {func(ns string) string { return "system:serviceaccount:" + ns + ":deployer" }, nil, nil},
		"a user":            {func(ns string) string { return "https://login.example.com#" + ns }, []string{"deployers"}, []string{"--group=deployers"}},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			f.lease(t, "deploy")
			account := test.account(f.namespace)
			groups := test.groups
			if strings.HasPrefix(account, "system:serviceaccount:") {
				groups = []string{"system:serviceaccounts", "system:serviceaccounts:" + f.namespace}
			}
			f.Grant(t, f.namespace, account,
				rbacv1.PolicyRule{APIGroups: []string{fence.Group}, Resources: []string{"fencedleases"}, Verbs: []string{"get", "list", "guard"}},
				rbacv1.PolicyRule{APIGroups: []string{fence.Group}, Resources: []string{"leaseclaims"}, Verbs: []string{"create", "get", "watch", "list", "patch", "delete"}},
				rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"configmaps"}, Verbs: []string{"create", "get", "patch", "delete"}})
			deployer := f.as(t, f.UserConfig(t, account, groups...))
			write := []string{"run", "deploy", "--proxy", "--", "kubectl", "--namespace=" + f.namespace, "apply", "-f", guardedManifest(t, "web", "one")}
			if r := deployer.fence(t, write...); r.code != 0 || !presentsByAnnotations(r) {
				t.Fatalf("before the grant: %v, want that it goes on by annotations and hints at rbac", r)
			}

			rules := f.must(t, append([]string{"rbac", account}, test.flags...)...)
			if r := f.end(t, strings.NewReader(rules), f.Assets+"/kubectl", "apply", "-f", "-"); r.code != 0 {
				t.Fatal(r)
			}
			if own := deployer.must(t, "rbac"); own != rules {
				t.Errorf("for the own account it printed\n%s\ninstead of\n%s", own, rules)
			}
			eventually(t, "the account may present tokens by header", func() bool {
				r := deployer.fence(t, write...)
				return r.code == 0 && !presentsByAnnotations(r)
			})
			for _, as := range [][]string{{"--as=somebody"}, {"--as=" + account, "--as-group=system:masters"}} {
				if r := deployer.kubectl(t, append(as, "get", "--raw=/version")...); !strings.Contains(r.stderr, "cannot impersonate") {
					t.Errorf("%s: %v", as, r)
				}
			}
		})
	}
}

func presentsByAnnotations(r result) bool { return strings.Contains(r.stderr, "kubectl fence rbac") }
