#!/usr/bin/env bash
# Runs every writer, then every reader, then demands a clean tree: what is
# committed is what the sources generate.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

before=$(git status --porcelain)
step() { echo "verify: $*" >&2; }

step "generated code and manifests"
make -s generate manifests
step "module files"
for m in . hack/tools hack/controlplane; do (cd "$m" && go mod tidy); done
step "formatting"
unformatted=$(git ls-files '*.go' | xargs gofmt -l)
[ -z "$unformatted" ] || { printf 'not gofmt-ed:\n%s\n' "$unformatted" >&2; exit 1; }
step "layout"
hack/layout.sh
step "lint"
make -s lint
step "a clean tree"
after=$(git status --porcelain)
if [ "$before" != "$after" ]; then
	printf 'generated files are stale or files were left behind; commit what this changed:\n%s\n' "$after" >&2
	exit 1
fi
echo "verify: all fresh" >&2
