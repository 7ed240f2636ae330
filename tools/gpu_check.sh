#!/usr/bin/env bash
# Builds, tests on the machine's GPUs, and prints benchmarks. The tests are the programs with the simulated accelerator
# (ctest's label `accelerator`), run on GPUs instead.
set -euo pipefail
cd "$(dirname "$0")/.."

nvidia-smi --query-gpu=index,name,memory.total,driver_version --format=csv || {
  echo "gpu_check: no GPU answers (nvidia-smi)" >&2
  exit 1
}
jobs=${JOBS:-$(nproc)}
cmake --preset release --log-level=WARNING -DTESSERA_BUILD_TESTS=ON -DTESSERA_TEST_GPU=ON
cmake --build --preset release -j "$jobs" --target accelerator_programs tessera_gpu
cmake --preset cuda --log-level=WARNING -DTESSERA_BUILD_BENCH=ON
cmake --build --preset cuda -j "$jobs" --target gpu_step

echo "==== tests"
log=build/release/gpu_tests.log
status=0
TESSERA_TEST_GPU=$PWD/build/release/tests/support/gpu/libtessera_gpu.so \
  ctest --preset release -L accelerator --verbose >"$log" 2>&1 || status=$?
grep -hoE '(skipped: .*|\[  FAILED  \] [A-Za-z].*|[0-9]+% tests passed.*)' "$log" | sort -u
if [ "$status" -ne 0 ]; then
  echo "gpu_check: tests failed, see $log" >&2
  exit 1
fi

echo "==== ranks that share a GPU"
TESSERA_TEST_GPU=$PWD/build/release/tests/support/gpu/libtessera_gpu.so timeout 600 \
  build/release/tests/accelerator/accelerator_ranks 2 3 4 || status=1

echo "==== figures"
devices=$(nvidia-smi --list-gpus | wc -l)
for ((ranks = 1; ranks <= devices; ranks *= 2)); do
  build/cuda/bench/gpu_step "$ranks"
done
build/cuda/bench/gpu_step 1 200 512 # of which the host's work is most
# Compares with PyTorch's FSDP2, if a PyTorch with GPU support is installed.
if python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
  python3 bench/gpu/peers.py
  python3 bench/gpu/peers.py 200 512
fi
