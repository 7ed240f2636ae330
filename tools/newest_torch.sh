#!/usr/bin/env bash
# Builds the libraries, train_gpt and a consumer of the installed package with the newest supported libtorch. Tests its
# fused kernels. Trains a few steps with both versions: losses and gradient norms must be equal in every digit.
set -euo pipefail
cd "$(dirname "$0")/.."
jobs=${JOBS:-$(nproc)}

tools/setup.sh
tools/setup.sh 2.15.0
cmake --preset release --log-level=WARNING >/dev/null
# As in README.md for another libtorch, in a separate build tree. -O1 compiles the libraries in two thirds of the time.
cmake --preset release -B build/newest -DCMAKE_PREFIX_PATH="$PWD/.deps/torch-2.15.0/torch" \
  -DCMAKE_CXX_FLAGS_RELEASE="-O1 -DNDEBUG" -DTESSERA_BUILD_TESTS=ON --log-level=WARNING >/dev/null
for tree in release newest; do
  cmake --build "build/$tree" -j "$jobs" --target tessera_all train_gpt
done
cmake --build build/newest -j "$jobs" --target optim_tests
build/newest/tests/optim/optim_tests --gtest_brief=1 --gtest_filter='FusedKernels.*:Dtypes.*:GroupOptions.*'

# The package stores the path of its libtorch, so the consumer finds the newest one.
prefix="$PWD/build/newest/prefix"
rm -rf "$prefix"
cmake --install build/newest --prefix "$prefix" --component development >/dev/null
if command -v ccache >/dev/null; then
  export CMAKE_CXX_COMPILER_LAUNCHER=ccache CCACHE_BASEDIR="$PWD" CCACHE_NOHASHDIR=1
fi
cmake -S tests/consumer -B build/newest/consumer -G Ninja -DCMAKE_PREFIX_PATH="$prefix" --log-level=WARNING >/dev/null
cmake --build build/newest/consumer -j "$jobs" --target consumer
build/newest/consumer/consumer

# losses <preset> <arguments...>: prints the results of a run without its speed.
losses() {
  local out="build/newest/steps_$1"
  rm -rf "$out"
  "build/$1/examples/train_gpt" "${@:2}" --ranks 2 --layers 2 --width 24 --heads 3 --context 16 --steps 8 --batch 4 \
    --val-every 4 --threads 1 --sample 0 --seed 1 --out "$out" >"build/newest/$1.log" 2>&1 ||
    { cat "build/newest/$1.log" >&2; return 1; }
  sed -E 's/"tokens_per_s":[^,]*,//' "$out/metrics.jsonl"
}

failed=0
for wrapper in ddp sdp fsdp; do
  ours=$(losses release --wrapper "$wrapper")
  theirs=$(losses newest --wrapper "$wrapper")
  if [ -n "$ours" ] && [ "$ours" = "$theirs" ]; then
    echo "$wrapper: $(wc -l <<<"$ours") steps, the same with both"
  else
    failed=1
    echo "$wrapper: differs"
    diff <(echo "$ours") <(echo "$theirs") || true
  fi
done
exit "$failed"
