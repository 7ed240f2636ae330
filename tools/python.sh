#!/usr/bin/env bash
# Runs Python with what the comparisons with other programs need: torch itself (the wheel that
# tools/setup.sh has unpacked), safetensors, transformers, numpy. The first call sets up .deps/python
# from PyPI; nothing outside .deps changes. Arguments are Python's: tools/python.sh file.py ...
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
torch_dir="$root/.deps/torch-2.11.0"
environment="$root/.deps/python"

say() { printf 'python.sh: %s\n' "$*" >&2; }

nvidia_libraries() {
  find "$environment"/lib/python3*/site-packages/nvidia -type d -name lib 2>/dev/null | tr '\n' ':'
}
runs() { LD_LIBRARY_PATH="$(nvidia_libraries)${LD_LIBRARY_PATH:-}" "$environment/bin/python" "$@"; }

set_up() {
  local pip=("$environment/bin/python" -m pip install --quiet --disable-pip-version-check)
  say "setting up $environment"
  python3 -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { say "the torch wheel is for Python 3.11"; exit 1; }
  rm -rf "$environment"
  python3 -m venv "$environment"
  # What torch needs of pure Python, and what the tests use.
  "${pip[@]}" 'numpy<3' 'safetensors<1' 'transformers<6' filelock typing-extensions sympy networkx jinja2 fsspec
  echo "$torch_dir" >"$(echo "$environment"/lib/python3*/site-packages)/torch-wheel.pth"
  # torch is built for CUDA and wants its libraries even where there is no GPU: those that no CUDA
  # Toolkit brings, then, if that was not enough, all that its wheel asks for.
  "${pip[@]}" --no-deps nvidia-cufile nvidia-cusparselt-cu13==0.8.0 nvidia-nvshmem-cu13==3.4.5
  if ! runs -c 'import torch' 2>/dev/null; then
    say "there is no CUDA Toolkit: fetching torch's CUDA libraries (2 GB)"
    "${pip[@]}" 'cuda-toolkit[cublas,cudart,cufft,cufile,cupti,curand,cusolver,cusparse,nvjitlink,nvrtc,nvtx]==13.0.2' \
      nvidia-cudnn-cu13==9.19.0.56 nvidia-nccl-cu13==2.28.9
    runs -c 'import torch'
  fi
  touch "$environment/complete"
}

[ -e "$environment/complete" ] || set_up
runs "$@"
