#!/usr/bin/env bash
# Installs the build's dependencies from Debian and PyPI. A no-op for installed ones: a second call takes a fraction of
# a second. As root, installs the Debian packages; otherwise lists the missing ones, and fails only if the build needs
# them. libtorch is the PyPI wheel of torch, unpacked in .deps/ without its Python dependencies. The CUDA runtime
# libraries that libtorch_cpu.so links come from the CUDA Toolkit if installed, otherwise from their own wheels.
#
#   tools/setup.sh             everything, with the libtorch that Tessera builds with
#   tools/setup.sh 2.15.0      adds another libtorch, .deps/torch-2.15.0, for -DCMAKE_PREFIX_PATH=
#   tools/setup.sh docs        only the dependencies of the API reference
#   tools/setup.sh clang       only clang++, which compiles the public headers in `make packages`: a download of 40 MB
set -euo pipefail
cd "$(dirname "$0")/.."

torch_version=${1:-2.11.0}
[[ $torch_version =~ ^([0-9]+\.[0-9]+\.[0-9]+|docs|clang)$ ]] || { sed -n 's/^#   tools/tools/p' "$0" >&2; exit 2; }
deps="$PWD/.deps"
torch_dir="$deps/torch-$torch_version"
runtime_dir="$torch_dir/nvidia/cu13/lib" # where libtorch_cpu.so's own RPATH looks

packages=(g++ cmake ninja-build ccache unzip python3 python3-pip
  libgloo-dev libcurl4-openssl-dev libxxhash-dev libboost-program-options-dev nlohmann-json3-dev
  libgtest-dev libbenchmark-dev openmpi-bin libopenmpi-dev mpich libmpich-dev iproute2 python3-yaml spin)

say() { printf 'setup: %s\n' "$*" >&2; }
# For the table at the end of `make demo` and `make test`.
tell() { [ -z "${TESSERA_TIMES:-}" ] || tools/times.sh note "$*"; }

installed() { [ "$(dpkg-query -W -f '${db:Status-Abbrev}' "$1" 2>/dev/null)" = "ii " ]; }

# Accepts a tool from elsewhere (a python3 or cmake in /usr/local).
present() {
  case "$1" in
    clang) command -v clang++ >/dev/null || installed "$1" ;;
    g++ | cmake | unzip | python3 | ccache | doxygen) command -v "$1" >/dev/null || installed "$1" ;;
    ninja-build) command -v ninja >/dev/null || installed "$1" ;;
    python3-pip) python3 -m pip --version >/dev/null 2>&1 || installed "$1" ;;
    openmpi-bin) command -v mpirun >/dev/null || installed "$1" ;;
    mpich) command -v mpiexec.hydra >/dev/null || installed "$1" ;;
    python3-yaml) python3 -c 'import yaml' 2>/dev/null || installed "$1" ;;
    spin) command -v spin >/dev/null || installed "$1" ;;
    iproute2) command -v ip >/dev/null || installed "$1" ;;
    *) installed "$1" ;;
  esac
}

install_packages() {
  local missing=()
  for package in "${packages[@]}"; do present "$package" || missing+=("$package"); done
  [ ${#missing[@]} -eq 0 ] && return
  if [ "$(id -u)" -ne 0 ]; then
    say "not root, so please install these yourself if the build misses them:"
    say "  sudo apt-get install ${missing[*]}"
    return
  fi
  say "installing ${missing[*]}"
  local begin=$SECONDS log
  log=$(mktemp)
  # apt's output matters only if it fails.
  (export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}") >"$log" 2>&1 ||
    { cat "$log" >&2; say "apt-get failed"; exit 1; }
  rm -f "$log"
  tell "installed ${#missing[@]} Debian packages and what they need: $((SECONDS - begin)) s"
}

# Downloads one wheel and unpacks it into $2. Uses pip only to download, so no Python environment changes.
unpack_wheel() {
  local wheels="$deps/wheels" platforms=() glibc
  # pip matches these tags exactly, so lists every one that Debian 12's glibc satisfies.
  for glibc in 28 27 26 25 24 17 12 5; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
  for glibc in 2014 2010 1; do platforms+=(--platform "manylinux${glibc}_x86_64"); done
  mkdir -p "$wheels" "$2"
  say "downloading $1"
  local begin=$SECONDS
  python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --python-version 3.11 --implementation cp --abi cp311 --abi none \
    "${platforms[@]}" \
    --dest "$wheels" "$1"
  local name=${1%%==*}
  tell "downloaded $1: $(du -m "$wheels/${name//-/_}"-*.whl | cut -f1) MB, $((SECONDS - begin)) s"
  unzip -q -o "$wheels/${name//-/_}"-*.whl -d "$2"
  rm -f "$wheels/${name//-/_}"-*.whl
}

toolkit_library() {
  local root
  for root in "${CUDA_HOME:-/nonexistent}" /usr/local/cuda /usr/local/cuda-13*; do
    for path in "$root"/lib64/"$1" "$root"/lib/"$1" "$root"/extras/CUPTI/lib64/"$1"; do
      [ -e "$path" ] && { readlink -f "$path"; return; }
    done
  done
  return 0
}

install_libtorch() {
  [ -e "$torch_dir/complete" ] && return
  [ "$(uname -m)" = x86_64 ] || { say "the pinned wheel is for x86_64, this is $(uname -m): pass -DCMAKE_PREFIX_PATH=<libtorch>"; exit 1; }
  unpack_wheel "torch==$torch_version" "$torch_dir"
  # Links the CUDA libraries of libtorch_cpu.so to those of the CUDA Toolkit, if it is installed.
  mkdir -p "$runtime_dir"
  local library
  for library in libcudart.so.13 libcupti.so.13; do
    local found
    found=$(toolkit_library "$library")
    if [ -n "$found" ]; then ln -sf "$found" "$runtime_dir/$library"; fi
  done
  # The CUDA 13 libraries keep their ABI within the major version.
  [ -e "$runtime_dir/libcudart.so.13" ] || unpack_wheel "nvidia-cuda-runtime==13.0.96" "$torch_dir"
  [ -e "$runtime_dir/libcupti.so.13" ] || unpack_wheel "nvidia-cuda-cupti==13.0.85" "$torch_dir"
  touch "$torch_dir/complete"
}

if [ "${1:-}" = docs ]; then
  packages=(doxygen)
  install_packages
  command -v doxygen >/dev/null || { say "there is no doxygen"; exit 1; }
  exit
fi
if [ "${1:-}" = clang ]; then
  packages=(clang)
  install_packages
  command -v clang++ >/dev/null || { say "there is no clang++"; exit 1; }
  exit
fi
# Concurrently, because each mostly waits for its server. Installs the tools for downloads first.
if present unzip && present python3 && present python3-pip; then
  install_packages &
  install_libtorch
  wait $!
else
  install_packages
  install_libtorch
fi
