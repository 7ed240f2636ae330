#!/usr/bin/env bash
# Whether ccache serves a clean build in another clone: builds the targets (the libraries, or those that are named)
# in two copies of the tree with a cache of their own, and fails if the second compiles more than one file in
# twenty itself.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=(tessera_all)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export CCACHE_DIR="$work/cache"

for copy in first second; do
  mkdir -p "$work/$copy"
  git ls-files -z | xargs -0 cp --parents -t "$work/$copy"
  ln -s "$root/.deps" "$work/$copy/.deps"
  ccache --zero-stats >/dev/null
  begin=$SECONDS
  (cd "$work/$copy" && cmake --preset "${PRESET:-release}" -DTESSERA_BUILD_TESTS=ON --log-level=WARNING >/dev/null &&
    cmake --build --preset "${PRESET:-release}" -j "${JOBS:-$(nproc)}" --target "${targets[@]}" >"$work/$copy.log" 2>&1) ||
    { tail -n 20 "$work/$copy.log"; exit 1; }
  statistics=$(ccache --print-stats)
  hits=$(awk '$1 == "direct_cache_hit" || $1 == "preprocessed_cache_hit" { n += $2 } END { print n + 0 }' <<<"$statistics")
  misses=$(awk '$1 == "cache_miss" { n += $2 } END { print n + 0 }' <<<"$statistics")
  echo "$copy build: $hits of $((hits + misses)) compilations from the cache, $((SECONDS - begin)) s"
done
[ $((hits + misses)) -gt 0 ] && [ $((20 * hits)) -ge $((19 * (hits + misses))) ]
