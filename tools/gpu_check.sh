#!/usr/bin/env bash
# Builds for CUDA, tests on the GPUs that there are, and prints figures: what a machine with GPUs is asked first.
set -euo pipefail
cd "$(dirname "$0")/.."

nvidia-smi --query-gpu=index,name,memory.total,driver_version --format=csv || {
  echo "gpu_check: no GPU answers (nvidia-smi)" >&2
  exit 1
}
cmake --preset cuda --log-level=WARNING -DTESSERA_BUILD_BENCH=ON
cmake --build --preset cuda -j "${JOBS:-$(nproc)}" --target gpu_tests gpu_step

echo "==== tests"
build/cuda/tests/accelerator/gpu_tests --gtest_brief=1

echo "==== figures"
devices=$(nvidia-smi --list-gpus | wc -l)
for ((ranks = 1; ranks <= devices; ranks *= 2)); do
  build/cuda/bench/gpu_step "$ranks"
done
