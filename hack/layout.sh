#!/usr/bin/env bash
# Checks the rules of the layout that no linter knows: which way imports
# point, and where a program may end itself.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
fail=0
complain() { echo "layout: $*" >&2; fail=1; }
module=$(go list -m)

deps() { go list -deps "$@" 2>/dev/null; }

if deps ./fence | grep -v "^$module/fence$" | grep -q '\.'; then
	complain "package fence imports more than the standard library: $(deps ./fence | grep '\.' | grep -v "^$module/fence$" | head -3 | tr '\n' ' ')"
fi
if go list -f '{{.ImportPath}} {{join .Imports " "}}' ./... | grep " $module/cmd/"; then
	complain "something imports cmd"
fi
if git ls-files '*.go' | grep -v '^cmd/[^/]*/main.go$' | grep -v '_test.go$' | grep -v '^test/' | grep -v '^docs/' | grep -v '^hack/' | xargs grep -n 'os\.Exit(' ; then
	complain "os.Exit outside cmd/*/main.go"
fi
exit $fail
