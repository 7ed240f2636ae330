#!/usr/bin/env bash
# tools/gpu_check.sh [tests|ranks|figures ...]: builds, then runs these parts (default: all) on the machine's GPUs:
#   tests    the programs with the simulated accelerator (ctest's label `accelerator`), on GPUs instead
#   ranks    2, 3 and 4 ranks as processes that share a GPU
#   figures  a CUDA graph, and bench/gpu/run.py, which writes the table of docs/gpu.md
# Takes at most MINUTES (default 12): the figures get the time that is left, at most 8 minutes. PYTHON (default python3)
# is a Python with torch; without one, PyTorch is not measured. Continues after a failure; prints a verdict at the end.
set -euo pipefail
cd "$(dirname "$0")/.."
parts=("$@")
[ $# -gt 0 ] || parts=(tests ranks figures)
minutes=${MINUTES:-12}
failed=()

nvidia-smi --query-gpu=index,name,memory.total,driver_version --format=csv || {
  echo "gpu_check: no GPU answers (nvidia-smi)" >&2
  exit 1
}
# Seconds until the script must end, at least 1 and at most $1.
at_most() {
  local left=$((60 * minutes - SECONDS))
  [ "$left" -gt 1 ] || left=1
  echo $((left < $1 ? left : $1))
}
build() {
  cmake --preset "$1" --log-level=WARNING "-D$2=ON" "-D$3=ON" >/dev/null &&
    cmake --build --preset "$1" -j "${JOBS:-$(nproc)}" --target "${@:4}" >"build/$1.log" 2>&1 || {
    tail -n 20 "build/$1.log"
    failed+=("build of $1")
  }
}
mkdir -p build
gpu=$PWD/build/release/tests/support/gpu/libtessera_gpu.so

tests() {
  local log=build/release/gpu_tests.log status=0
  TESSERA_TEST_GPU=$gpu timeout "$(at_most 240)" ctest --preset release -L accelerator --verbose >"$log" 2>&1 || status=$?
  grep -hoE '(skipped: .*|\[  FAILED  \] [A-Za-z].*|[0-9]+% tests passed.*)' "$log" | sort -u | head -n 60
  [ "$status" -eq 0 ] || failed+=("tests (see $log)")
}
ranks() {
  TESSERA_TEST_GPU=$gpu timeout "$(at_most 300)" build/release/tests/accelerator/accelerator_ranks 2 3 4 | cut -c-300 |
    tail -n 60 || failed+=(ranks)
}
figures() {
  timeout "$(at_most 60)" build/cuda/bench/cuda_graph || failed+=("CUDA graph")
  local seconds
  seconds=$(at_most 480)
  timeout "$seconds" python3 bench/gpu/run.py --python "${PYTHON:-python3}" --write \
    --minutes "$(((seconds - 20) / 60)).$((((seconds - 20) % 60) * 10 / 60))" || failed+=(figures)
}

for part in "${parts[@]}"; do
  case $part in
    tests | ranks | figures) ;;
    *)
      echo "gpu_check: there is no part $part; expected tests, ranks, figures" >&2
      exit 2
      ;;
  esac
done
[[ " ${parts[*]} " =~ \ (tests|ranks)\  ]] && build release TESSERA_BUILD_TESTS TESSERA_TEST_GPU accelerator_programs tessera_gpu
[[ " ${parts[*]} " =~ \ figures\  ]] && build cuda TESSERA_BUILD_BENCH TESSERA_CUDA gpu_bench cuda_graph
for part in "${parts[@]}"; do
  echo "==== $part, after $SECONDS s"
  "$part"
done
if [ ${#failed[@]} -gt 0 ]; then
  printf 'gpu_check: FAILED: %s\n' "${failed[@]}"
  exit 1
fi
echo "gpu_check: passed: ${parts[*]}, $SECONDS s"
