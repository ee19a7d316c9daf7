package fencecli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	authenticationv1 "k8s.io/api/authentication/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/cli-runtime/pkg/genericclioptions"

	"github.com/fencedlease/fencedlease/fence"
)

type rbacOptions struct {
	*cli
	output  *genericclioptions.PrintFlags
	account string
	groups  []string
}

func newRBAC(c *cli) *cobra.Command {
	o := &rbacOptions{cli: c, output: printFlags().WithDefaultOutput("yaml")}
	cmd := &cobra.Command{
		Use:   "rbac [ACCOUNT]",
		Short: "Print the rules that let an account present tokens by header",
		Long: "A program presents its token by impersonating itself with one extra. The rules grant just that: the account's own\n" +
			"name, its groups, and the extra. Without an account they are for the one that asks. Nobody can be asked for the\n" +
			"groups of another user: give them. Nothing is changed.",
		Example: "  kubectl fence rbac system:serviceaccount:shop:deployer | kubectl apply -f -\n  kubectl fence rbac jane --group=deployers",
		Args:    cobra.MaximumNArgs(1),
		RunE:    run(o),
	}
	o.output.AddFlags(cmd)
	cmd.Flags().StringArrayVar(&o.groups, "group", nil, "a group of the user's (repeatable)")
	return cmd
}

func (o *rbacOptions) Complete(_ *cobra.Command, args []string) error {
	if len(args) == 1 {
		o.account = args[0]
	}
	return nil
}

func (o *rbacOptions) Validate() error {
	if len(o.groups) > 0 {
		if _, _, isServiceAccount := splitServiceAccount(o.account); o.account == "" || isServiceAccount {
			return errors.New("--group: is for a named user; the groups of service accounts and of the own account are known")
		}
	}
	return validOutput(o.output)
}

func (o *rbacOptions) Run(ctx context.Context) error {
	if o.account == "" {
		_, api, err := o.connect()
		if err != nil {
			return err
		}
		review := &authenticationv1.SelfSubjectReview{}
		if err := api.Create(ctx, review); err != nil {
			return fmt.Errorf("find out the own account: %w", err)
		}
		o.account, o.groups = review.Status.UserInfo.Username, review.Status.UserInfo.Groups
	}
	return o.print(o.output, selfImpersonation(o.account, o.groups)...)
}

// splitServiceAccount reads "system:serviceaccount:namespace:name".
func splitServiceAccount(account string) (namespace, name string, ok bool) {
	rest, ok := strings.CutPrefix(account, "system:serviceaccount:")
	if !ok {
		return "", "", false
	}
	namespace, name, ok = strings.Cut(rest, ":")
	return namespace, name, ok && len(validation.IsDNS1123Label(namespace)) == 0 && len(validation.IsDNS1123Subdomain(name)) == 0
}

// selfImpersonation grants an account what a client impersonates to present a
// token: the name, the groups that the API server does not add by itself, and
// the one extra.
func selfImpersonation(account string, groups []string) []runtime.Object {
	// Roles may be named by anything that is one part of a path.
	name := "fencedlease:present:" + strings.NewReplacer("/", "-", "%", "-").Replace(account)
	rules := []rbacv1.PolicyRule{impersonate("authentication.k8s.io", "userextras/"+fence.ExtraToken)}
	namespace, serviceAccount, isServiceAccount := splitServiceAccount(account)
	subject := rbacv1.Subject{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: account}
	if isServiceAccount {
		subject = rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Namespace: namespace, Name: serviceAccount}
	} else {
		rules = append(rules, impersonate("", "users", account))
		groups = slices.DeleteFunc(slices.Clone(groups), func(g string) bool { return g == "system:authenticated" })
		if len(groups) > 0 {
			rules = append(rules, impersonate("", "groups", groups...))
		}
	}
	meta := metav1.ObjectMeta{Name: name}
	objects := []runtime.Object{
		&rbacv1.ClusterRole{ObjectMeta: meta, Rules: rules},
		&rbacv1.ClusterRoleBinding{
			ObjectMeta: meta, Subjects: []rbacv1.Subject{subject},
			RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name},
		},
	}
	if isServiceAccount {
		// To impersonate one is asked for in its own namespace.
		meta.Namespace = namespace
		objects = append(objects,
			&rbacv1.Role{ObjectMeta: meta, Rules: []rbacv1.PolicyRule{impersonate("", "serviceaccounts", serviceAccount)}},
			&rbacv1.RoleBinding{
				ObjectMeta: meta, Subjects: []rbacv1.Subject{subject},
				RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: name},
			})
	}
	return objects
}

func impersonate(group, resource string, names ...string) rbacv1.PolicyRule {
	return rbacv1.PolicyRule{APIGroups: []string{group}, Resources: []string{resource}, ResourceNames: names, Verbs: []string{"impersonate"}}
}
