#!/usr/bin/env bash
# Runs Python with the packages for comparisons with other programs: torch (the wheel that tools/setup.sh unpacks),
# safetensors, transformers, numpy. The first call creates .deps/python from PyPI; changes nothing outside .deps.
# Arguments are Python's: tools/python.sh file.py ... A preceding "--with zoo" adds torchvision, timm, diffusers and
# peft; "--with s3" an S3 server; "--with tensorboard" TensorBoard; "--with peft" only peft.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
torch_dir="$root/.deps/torch-2.11.0"
environment="$root/.deps/python"

say() { printf 'python.sh: %s\n' "$*" >&2; }

nvidia_libraries() {
  find "$environment"/lib/python3*/site-packages/nvidia -type d -name lib 2>/dev/null | tr '\n' ':'
}
# Names torch's wheel by its present path, because .deps may have been moved since its environment was made.
runs() {
  LD_LIBRARY_PATH="$(nvidia_libraries)${LD_LIBRARY_PATH:-}" PYTHONPATH="$torch_dir${PYTHONPATH:+:$PYTHONPATH}" \
    "$environment/bin/python" "$@"
}

set_up() {
  local pip=("$environment/bin/python" -m pip install --quiet --disable-pip-version-check)
  say "setting up $environment"
  python3 -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { say "the torch wheel is for Python 3.11"; exit 1; }
  rm -rf "$environment"
  python3 -m venv "$environment"
  # torch's dependencies in pure Python, and the tests' packages.
  "${pip[@]}" 'numpy<3' 'safetensors<1' 'transformers<6' 'xxhash<4' filelock typing-extensions sympy networkx jinja2 fsspec
  # torch is built for CUDA and needs its libraries even without a GPU. First adds the libraries that are not in a CUDA
  # Toolkit. If torch still does not load, adds all that its wheel requires.
  "${pip[@]}" --no-deps nvidia-cufile nvidia-cusparselt-cu13==0.8.0 nvidia-nvshmem-cu13==3.4.5
  if ! runs -c 'import torch' 2>/dev/null; then
    say "there is no CUDA Toolkit: fetching torch's CUDA libraries (2 GB)"
    "${pip[@]}" 'cuda-toolkit[cublas,cudart,cufft,cufile,cupti,curand,cusolver,cusparse,nvjitlink,nvrtc,nvtx]==13.0.2' \
      nvidia-cudnn-cu13==9.19.0.56 nvidia-nccl-cu13==2.28.9
    runs -c 'import torch'
  fi
  touch "$environment/complete"
}

# Versions made for this torch. Ignores their own requirements, which would install another torch.
set_up_zoo() {
  say "adding torchvision, timm, diffusers and peft"
  "$environment/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
    torchvision==0.26.0 'timm<2' 'diffusers<1' 'peft<1' 'accelerate<2' importlib-metadata zipp pillow psutil \
    requests urllib3 idna charset-normalizer certifi
  runs -c 'import torchvision, timm, diffusers, peft'
  touch "$environment/complete-zoo"
}

# moto checks signatures and stores objects in memory.
set_up_s3() {
  say "adding moto, a server of S3"
  "$environment/bin/python" -m pip install --quiet --disable-pip-version-check 'moto[s3]<6' flask flask-cors
  runs -c 'import boto3, moto.server'
  touch "$environment/complete-s3"
}

set_up_tensorboard() {
  say "adding TensorBoard"
  "$environment/bin/python" -m pip install --quiet --disable-pip-version-check 'tensorboard<3'
  runs -c 'import tensorboard.backend.event_processing.event_accumulator'
  touch "$environment/complete-tensorboard"
}

set_up_peft() {
  say "adding peft"
  "$environment/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps 'peft<1' 'accelerate<2' psutil
  runs -c 'import peft'
  touch "$environment/complete-peft"
}

[ -e "$environment/complete" ] || set_up
if [ "${1:-}" = --with ]; then
  case "$2" in
    zoo | s3 | tensorboard | peft) [ -e "$environment/complete-$2" ] || "set_up_$2" ;;
    *) say "--with $2: there are zoo, s3, tensorboard and peft"; exit 1 ;;
  esac
  shift 2
fi
runs "$@"
