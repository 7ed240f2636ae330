#!/usr/bin/env bash
# tools/clang_tool.sh clang-format|clang-tidy <arguments...>: runs the pinned version of the tool, because other versions
# format differently. The first call unpacks its PyPI wheel in .deps/.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
name=$1
version=18.1.8
folder="$root/.deps/$name-$version"
if [ ! -e "$folder/complete" ]; then
  rm -rf "$folder"
  python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-deps \
    --target "$folder" "$name==$version" >&2
  touch "$folder/complete"
fi
exec "$folder/${name//-/_}/data/bin/$name" "${@:2}"
