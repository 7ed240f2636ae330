#!/usr/bin/env bash
# Adds the peers to the environment of tools/python.sh: FairScale, DeepSpeed, and matplotlib for the plots. torch is the
# wheel that the library is built with, so packages are installed from PyPI without their torch. A second call is a no-op.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
environment="$root/.deps/python"
"$root/tools/python.sh" -c 'import torch' # makes the environment
[ -e "$environment/peers_complete" ] && exit 0
printf 'compare: fetching FairScale and DeepSpeed\n' >&2
pip=("$environment/bin/python" -m pip install --quiet --disable-pip-version-check)
"${pip[@]}" setuptools wheel matplotlib psutil packaging hjson msgpack ninja py-cpuinfo einops 'pydantic>=2' tqdm
# Their builds import torch.
LD_LIBRARY_PATH=$(find "$environment"/lib/python3*/site-packages/nvidia -type d -name lib | tr '\n' ':') \
  DS_BUILD_OPS=0 "${pip[@]}" --no-deps --no-build-isolation fairscale==0.4.13 deepspeed==0.19.8
touch "$environment/peers_complete"
