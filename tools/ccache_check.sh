#!/usr/bin/env bash
# Checks that ccache serves clean builds: builds the targets (the libraries, or those given) with an empty cache, then
# in another clone, in another build folder of that clone, and with the preset `dev`. Each of these must take 19 of 20
# files from the cache.
#
# Shared between presets: `dev` and `release` share precompiled headers, but not objects, because `dev` compiles file by
# file and `release` one file for each folder. `cuda` and `release` share the libraries' objects but those of CUDA's own
# files. `asan`, `tsan` and another libtorch (-DCMAKE_PREFIX_PATH=) have other options or headers, and share nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=(tessera_all)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export CCACHE_DIR="$work/cache"
failed=0

# build <clone> <folder> <preset> <target...>: prints `hits` and `misses`, and stores them.
build() {
  local clone=$work/$1 folder=$2 preset=$3 begin=$SECONDS statistics
  shift 3
  if [ ! -e "$clone" ]; then
    mkdir -p "$clone"
    git ls-files -z | xargs -0 cp --parents -t "$clone"
    ln -s "$root/.deps" "$clone/.deps"
  fi
  ccache --zero-stats >/dev/null
  (cd "$clone" && cmake --preset "$preset" -B "$folder" -DTESSERA_BUILD_TESTS=ON --log-level=WARNING >/dev/null &&
    cmake --build "$folder" -j "${JOBS:-$(nproc)}" --target "$@" >"$work/log" 2>&1) || { tail -n 20 "$work/log"; exit 1; }
  statistics=$(ccache --print-stats)
  hits=$(awk '$1 == "direct_cache_hit" || $1 == "preprocessed_cache_hit" { n += $2 } END { print n + 0 }' <<<"$statistics")
  misses=$(awk '$1 == "cache_miss" { n += $2 } END { print n + 0 }' <<<"$statistics")
  echo "$preset in $folder of the ${clone##*/} clone: $hits of $((hits + misses)) compilations from the cache, $((SECONDS - begin)) s"
}

served() {
  build "$@"
  [ $((hits + misses)) -gt 0 ] && [ $((20 * hits)) -ge $((19 * (hits + misses))) ] || { failed=1; echo "that is less than 95 %"; }
}

build first build/release release "${targets[@]}"
served second build/release release "${targets[@]}"
served second build/other release "${targets[@]}"
served second build/dev dev tessera_pch_libraries
exit "$failed"
