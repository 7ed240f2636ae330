#!/usr/bin/env bash
# Tests the packages of the preset `release` (or PRESET). The .tar.gz and the .deb of cpack must hold equal files. From
# both, the command `tessera` must run, and a consumer must find the package, build and run; so too from the Conan
# package. clang must compile the consumer and the installed headers without a warning. Installs only in a temporary
# folder; clang comes from Debian, and Conan from PyPI, in .deps/conan, where it uses no remote.
#
#   tools/check_packages.sh create    also lets Conan build its own copy of the tree: minutes more
set -euo pipefail
case "${1:-}" in '' | create) ;; *) echo "usage: tools/check_packages.sh [create]" >&2; exit 2 ;; esac
cd "$(dirname "$0")/.."
root=$PWD
preset=${PRESET:-release}
jobs=${JOBS:-$(nproc)}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
say() { printf 'packages: %s\n' "$*"; }

cmake --preset "$preset" --log-level=WARNING >/dev/null
cmake --build --preset "$preset" -j "$jobs" --target tessera_all
build="$root/build/$preset"
torch=$(sed -n 's/^TESSERA_TORCH_INCLUDE_DIR:PATH=\(.*\)\/include$/\1/p' "$build/CMakeCache.txt")

(cd "$build" && cpack -G "TGZ;DEB" -B "$work/packages" >"$work/cpack.log") || { cat "$work/cpack.log"; exit 1; }
mkdir -p "$work/tar" "$work/deb"
tar -xzf "$work"/packages/*.tar.gz -C "$work/tar" --strip-components=1
dpkg-deb -x "$work"/packages/*.deb "$work/deb"
diff -r "$work/tar" "$work/deb/usr"
say "$(cd "$work/packages" && du -h --apparent-size -- *.deb *.tar.gz | tr '\n' ' ')hold the same $(find "$work/tar" -type f | wc -l) files"
dpkg-deb -f "$work"/packages/*.deb Package Version Architecture Depends

# Lets ccache work in any temporary folder.
export CCACHE_NOHASHDIR=1 CCACHE_BASEDIR="$work" CMAKE_CXX_COMPILER_LAUNCHER
CMAKE_CXX_COMPILER_LAUNCHER=$(command -v ccache || true)
[ -n "$CMAKE_CXX_COMPILER_LAUNCHER" ] || unset CMAKE_CXX_COMPILER_LAUNCHER

"$work/tar/bin/tessera" --help >/dev/null
tools/check_docs.py --links "$work/tar/share/doc/tessera"
python3 -m py_compile "$work"/tar/share/tessera/tools/*.py
cmake -S tests/consumer -B "$work/consumer" -G Ninja -DCMAKE_PREFIX_PATH="$work/tar" --log-level=WARNING >/dev/null
cmake --build "$work/consumer" -j "$jobs" >"$work/build.log" || { cat "$work/build.log"; exit 1; }
for program in peak ranks consumer; do "$work/consumer/$program"; done
say "the archive serves find_package, and its command runs"
# Without the tree's precompiled header, which hides missing and internal headers.
cmake -S "$work/tar/share/doc/tessera/examples" -B "$work/examples" -G Ninja -DCMAKE_PREFIX_PATH="$work/tar" \
  -DCMAKE_UNITY_BUILD=ON --log-level=WARNING >/dev/null
cmake --build "$work/examples" -j "$jobs" \
  --target example_finetune example_stages example_zero_recipe example_train_gpt >"$work/build.log" || { cat "$work/build.log"; exit 1; }
for program in finetune stages zero_recipe train_gpt; do "$work/examples/$program" --help >/dev/null; done
say "the installed examples build with the package"

# The installed headers are not system headers here, so that their own warnings count.
tools/setup.sh clang
mpi=$(sed -n 's/^TESSERA_openmpi_INCLUDE_DIR:PATH=\(\/.*\)/\1/p' "$build/CMakeCache.txt")
[ -n "$mpi" ] || say "no Open MPI: clang does not check <tessera/mpi.h> (tools/setup.sh installs it)"
clang++ -std=c++20 -fsyntax-only -DNDEBUG -Wall -Wextra -Wpedantic -Wshadow -Werror -I "$work/tar/include" \
  -isystem "$torch/include" -isystem "$torch/include/torch/csrc/api/include" \
  ${mpi:+-isystem "$mpi" -include tessera/mpi.h} tests/consumer/main.cpp
say "$(clang++ --version | head -n 1) compiles the headers and the documented options without a warning"

conan="$root/.deps/conan"
[ -e "$conan/complete" ] || {
  python3 -m venv "$conan"
  "$conan/bin/pip" install --quiet --disable-pip-version-check 'conan==2.*'
  touch "$conan/complete"
}
export CONAN_HOME="$work/conan" TESSERA_TEST_BUILD="$work/test_package"
"$conan/bin/conan" profile detect >"$work/conan.log" 2>&1 || { cat "$work/conan.log"; exit 1; }
for way in export-pkg ${1:-}; do
  "$conan/bin/conan" "$way" tools/packaging/conan --no-remote -o "tessera/*:libtorch=$torch" -s build_type=Release \
    -s compiler.cppstd=20 >"$work/conan.log" 2>&1 || { cat "$work/conan.log"; exit 1; }
  grep -q '2 of 2 have the sum' "$work/conan.log" || { cat "$work/conan.log"; exit 1; }
  say "the package of \`conan $way\` serves find_package"
done
