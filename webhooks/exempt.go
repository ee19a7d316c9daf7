package webhooks

import (
	"slices"
	"strings"

	authenticationv1 "k8s.io/api/authentication/v1"
)

// ExemptUsers are the principals of the control plane, by exact name, among them
// every controller to which the API server's default RBAC gives a role: the
// fence neither judges nor delays their writes, so that the control plane never
// depends on it. The match conditions of config/webhook and the policies name
// the same ones.
var ExemptUsers = []string{
	"system:apiserver",
	"system:kube-controller-manager",
	"system:kube-scheduler",
	"system:serviceaccount:fencedlease-system:fencedlease",
	"system:serviceaccount:kube-system:attachdetach-controller",
	"system:serviceaccount:kube-system:certificate-controller",
	"system:serviceaccount:kube-system:clusterrole-aggregation-controller",
	"system:serviceaccount:kube-system:cronjob-controller",
	"system:serviceaccount:kube-system:daemon-set-controller",
	"system:serviceaccount:kube-system:deployment-controller",
	"system:serviceaccount:kube-system:device-taint-eviction-controller",
	"system:serviceaccount:kube-system:disruption-controller",
	"system:serviceaccount:kube-system:endpoint-controller",
	"system:serviceaccount:kube-system:endpointslice-controller",
	"system:serviceaccount:kube-system:endpointslicemirroring-controller",
	"system:serviceaccount:kube-system:ephemeral-volume-controller",
	"system:serviceaccount:kube-system:expand-controller",
	"system:serviceaccount:kube-system:generic-garbage-collector",
	"system:serviceaccount:kube-system:horizontal-pod-autoscaler",
	"system:serviceaccount:kube-system:job-controller",
	"system:serviceaccount:kube-system:kube-apiserver-serving-clustertrustbundle-publisher",
	"system:serviceaccount:kube-system:legacy-service-account-token-cleaner",
	"system:serviceaccount:kube-system:namespace-controller",
	"system:serviceaccount:kube-system:node-controller",
	"system:serviceaccount:kube-system:persistent-volume-binder",
	"system:serviceaccount:kube-system:pod-garbage-collector",
	"system:serviceaccount:kube-system:podcertificaterequestcleaner",
	"system:serviceaccount:kube-system:podgroup-protection-controller",
	"system:serviceaccount:kube-system:pv-protection-controller",
	"system:serviceaccount:kube-system:pvc-protection-controller",
	"system:serviceaccount:kube-system:replicaset-controller",
	"system:serviceaccount:kube-system:replication-controller",
	"system:serviceaccount:kube-system:resource-claim-controller",
	"system:serviceaccount:kube-system:resourcepoolstatusrequest-controller",
	"system:serviceaccount:kube-system:resourcequota-controller",
	"system:serviceaccount:kube-system:root-ca-cert-publisher",
	"system:serviceaccount:kube-system:route-controller",
	"system:serviceaccount:kube-system:selinux-warning-controller",
	"system:serviceaccount:kube-system:service-account-controller",
	"system:serviceaccount:kube-system:service-cidrs-controller",
	"system:serviceaccount:kube-system:service-controller",
	"system:serviceaccount:kube-system:statefulset-controller",
	"system:serviceaccount:kube-system:storage-version-garbage-collector",
	"system:serviceaccount:kube-system:storage-version-migrator-controller",
	"system:serviceaccount:kube-system:ttl-after-finished-controller",
	"system:serviceaccount:kube-system:ttl-controller",
	"system:serviceaccount:kube-system:validatingadmissionpolicy-status-controller",
	"system:serviceaccount:kube-system:volumeattributesclass-protection-controller",
}

// Exempt gives the exempt users of an installation: the control plane's but for
// those that are judged all the same, the operator's account in its own
// namespace, and those that are added.
func Exempt(operatorNamespace string, added, judged []string) []string {
	users := make([]string, 0, len(ExemptUsers)+len(added))
	for _, user := range ExemptUsers {
		if !slices.Contains(judged, user) {
			users = append(users, strings.Replace(user, ":fencedlease-system:", ":"+operatorNamespace+":", 1))
		}
	}
	return append(users, added...)
}

// MayJudge tells whether a user is one of ExemptUsers that an installation may
// take off: every one but the operator.
func MayJudge(user string) bool {
	return slices.Contains(ExemptUsers, user) && !strings.HasPrefix(user, "system:serviceaccount:fencedlease-system:")
}

// ExemptGroups are exempt too.
var ExemptGroups = []string{"system:nodes"}

// exempt tells whether a principal is one of the installation's exempt ones.
func exempt(u authenticationv1.UserInfo, users []string) bool {
	return slices.Contains(users, u.Username) ||
		slices.ContainsFunc(u.Groups, func(g string) bool { return slices.Contains(ExemptGroups, g) })
}
