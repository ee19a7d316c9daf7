#!/usr/bin/env bash
# A client of FencedLease in bash and kubectl, for leases without holderBinding; docs/protocol.md has the rules.
# usage: fencedlease.sh LEASE <<<'configmap app {"data": {"version": "2"}}'
# Each line of the input is a merge patch, sent with the lease's token. Ends with 1 where a patch fails or the lease is lost.
set -euo pipefail
lease=$1 claim=$1-$$-$RANDOM$RANDOM$RANDOM token='' reason='' said='' line=''

k() { kubectl --request-timeout=5s "$@"; }
now() { local up; read -r up _ </proc/uptime; echo "${up/./}"; } # hundredths of a second, by a clock that nobody can set
fail() { echo "fencedlease: [$lease] $*" >&2; exit 1; }
alive() { (($(now) < renewed + duration * 4 / 5)) || fail "lost token $token: not renewed in time"; }

renew() { # a failure is a sign of nothing: the clock decides
	local sent stamp
	sent=$(now)
	TZ=UTC printf -v stamp '%(%FT%T)T.%sZ' "${EPOCHREALTIME%.*}" "${EPOCHREALTIME#*.}"
	k patch leaseclaim "$claim" --type=merge -p '{"spec": {"renewTime": "'"$stamp"'"}}' >/dev/null && renewed=$sent
	alive
}

present() { # one patch with the token
	alive
	said=$(k "${as[@]}" --as-user-extra="fencedlease.io/token=$token" patch "$@" --type=merge 2>&1)
}

duration=$((100 * $(k get fencedlease "$lease" -o 'jsonpath={.spec.leaseDurationSeconds}')))
me=$(k auth whoami -o 'jsonpath={.status.userInfo.username}')
as=("--as=$me")
for group in $(k auth whoami -o 'jsonpath={.status.userInfo.groups[*]}'); do
	[[ $me == system:serviceaccount:* || $group == system:authenticated ]] || as+=("--as-group=$group")
done
renewed=$(now)
# The name is this process's alone, so it stands for the UID.
trap 'k delete leaseclaim "$claim" --ignore-not-found --wait=false >/dev/null' EXIT
k create -f - >/dev/null <<END
{"apiVersion": "fencedlease.io/v1alpha1", "kind": "LeaseClaim", "metadata": {"name": "$claim"},
 "spec": {"leaseName": "$lease", "holderIdentity": "bash"}}
END
until [[ $reason == Granted ]]; do
	read -r reason token < <(k get leaseclaim "$claim" -o 'jsonpath={.status.conditions[?(@.type=="Held")].reason} {.status.token}') || :
	[[ $reason =~ ^(Granted|Pending|Waiting|)$ ]] || fail "$reason"
	(($(now) < renewed + duration / 3)) || renew
	sleep 0.2
done
while :; do
	status=0 && read -r -t 0.5 part || status=$?
	line+=$part
	(($(now) < renewed + duration / 3)) || renew
	((status <= 128)) || continue # no line yet
	read -r kind name patch <<<"$line"
	if [[ -n $patch ]] && ! present "$kind" "$name" -p "$patch"; then
		[[ $said == *NotRecorded:* ]] || fail "$said"
		present "$kind" "$name" --field-manager=fencedlease -p '{"metadata": {"annotations": {"fencedlease.io/token": "'"$token"'"}}}' || fail "$said"
		present "$kind" "$name" -p "$patch" || fail "$said"
	fi
	((status == 0)) || exit 0
	line=''
done
