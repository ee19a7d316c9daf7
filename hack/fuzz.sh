#!/usr/bin/env bash
# Runs every fuzz target of the repository for the given time each.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
time=${1:-30s}
while IFS=: read -r file target; do
	echo "fuzz $target in $(dirname "$file") for $time"
	go test "./$(dirname "$file")" -run '^$' -fuzz "^$target\$" -fuzztime "$time"
done < <(git ls-files '*_test.go' | xargs grep -Ho 'func Fuzz[A-Za-z0-9_]*' | sed 's/func //')
