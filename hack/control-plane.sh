#!/usr/bin/env bash
# Leaves etcd, kube-apiserver, kube-controller-manager and kubectl under
# bin/k8s/<version> and prints that folder on standard output; all else that it
# says goes to standard error.
#
# In order: KUBEBUILDER_ASSETS if set, what is there already, setup-envtest's
# download, a build from the Go module proxy (hack/controlplane). Apart from
# Go's own caches it writes below bin/ only.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
module=$root/hack/controlplane
version=$(sed -n 's|^\tk8s.io/kubernetes v||p' "$module/go.mod")
dir=$root/bin/k8s/$version
programs=(etcd kube-apiserver kube-controller-manager kubectl)

say() { printf 'control-plane: %s\n' "$*" >&2; }

if [ -n "${KUBEBUILDER_ASSETS:-}" ]; then
	for p in etcd kube-apiserver kubectl; do
		[ -x "$KUBEBUILDER_ASSETS/$p" ] || { say "KUBEBUILDER_ASSETS=$KUBEBUILDER_ASSETS has no executable $p: unset it, or name a folder that setup-envtest filled"; exit 1; }
	done
	[ -x "$KUBEBUILDER_ASSETS/kube-controller-manager" ] ||
		say "note: $KUBEBUILDER_ASSETS has no kube-controller-manager; tests that need one say so and fail"
	echo "$KUBEBUILDER_ASSETS"
	exit 0
fi

mkdir -p "$root/bin/k8s"
# Two calls at once (make -j, two terminals) must not build into each other.
exec 9>"$root/bin/k8s/.lock"
flock -n 9 || { say "another build is running; waiting for it"; flock 9; }

# The sums are written last, so a build that was cut off has none and is redone.
complete() { (cd "$dir" 2>/dev/null && sha256sum --check --status --strict SHA256SUMS 2>/dev/null && [ "$(wc -l <SHA256SUMS)" = ${#programs[@]} ]); }

if complete; then
	echo "$dir"
	exit 0
fi
[ ! -d "$dir" ] || say "$dir is incomplete or damaged; making it anew"
rm -rf "$dir" "$dir.partial"
mkdir -p "$dir.partial"
trap 'rm -rf "$dir.partial"' EXIT

minor=${version%.*}
if [ -z "${CONTROL_PLANE_BUILD:-}" ]; then
	say "asking setup-envtest for Kubernetes $minor (set CONTROL_PLANE_BUILD=1 to skip this)"
	if assets=$(cd "$root/hack/tools" && timeout 120 go tool setup-envtest use "$minor.x" --bin-dir "$root/bin/k8s/envtest" -p path 2>/dev/null) && [ -x "$assets/kube-apiserver" ]; then
		cp "$assets"/{etcd,kube-apiserver,kubectl} "$dir.partial/"
		rm -rf "$root/bin/k8s/envtest"
	else
		rm -rf "$root/bin/k8s/envtest"
		say "no download to be had; building from source (about 4 minutes on 2 cores the first time)"
	fi
fi

ldflags="-s -w"
for v in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
	ldflags+=" -X $v.gitVersion=v$version -X $v.gitMajor=${version%%.*} -X $v.gitMinor=$(cut -d. -f2 <<<"$version") -X $v.gitTreeState=clean"
done

n=0
for p in "${programs[@]}"; do
	n=$((n + 1))
	if [ -x "$dir.partial/$p" ]; then
		say "[$n/${#programs[@]}] $p: downloaded"
		continue
	fi
	case $p in
	etcd) package=./cmd/etcd ;;
	*) package=k8s.io/kubernetes/cmd/$p ;;
	esac
	say "[$n/${#programs[@]}] $p: building $package"
	start=$SECONDS
	(cd "$module" && GOFLAGS=-mod=readonly CGO_ENABLED=0 go build -trimpath -ldflags "$ldflags" -o "$dir.partial/$p" "$package")
	say "[$n/${#programs[@]}] $p: done in $((SECONDS - start)) s"
done

for p in "${programs[@]}"; do
	"$dir.partial/$p" --version >/dev/null 2>&1 || "$dir.partial/$p" version --client >/dev/null 2>&1 ||
		{ say "$p does not run: see $dir.partial/$p --version"; exit 1; }
done
(cd "$dir.partial" && sha256sum "${programs[@]}" >SHA256SUMS)
mv "$dir.partial" "$dir"
trap - EXIT
say "ready: $dir"
echo "$dir"
