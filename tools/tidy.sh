#!/usr/bin/env bash
# tools/tidy.sh [library...]: clang-tidy, by .clang-tidy, over the libraries (those named, or all), each as one
# file, and so over every header that one of them includes. Fails if it has anything to say.
set -euo pipefail
cd "$(dirname "$0")/.."
build=build/tidy
# Without precompiled headers: gcc's are not clang's. So this finds missing includes as well.
cmake --preset release -B "$build" -DCMAKE_EXPORT_COMPILE_COMMANDS=ON -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON \
  -DTESSERA_BUILD_EXAMPLES=OFF --log-level=WARNING >/dev/null
files=()
for file in "$build"/*/CMakeFiles/tessera_*.dir/Unity/unity_0_cxx.cxx; do
  library=${file#"$build"/}
  library=${library%%/*}
  if [ $# -eq 0 ] || [[ " $* " == *" $library "* ]]; then files+=("$file"); fi
done
tools/clang_tool.sh clang-tidy --version >/dev/null # unpacks it, if need be, once
printf '%s\0' "${files[@]}" |
  xargs -0 -n 1 -P "${JOBS:-$(nproc)}" tools/clang_tool.sh clang-tidy -p "$build" --quiet --warnings-as-errors='*'
