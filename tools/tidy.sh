#!/usr/bin/env bash
# tools/tidy.sh [library...]: clang-tidy, by .clang-tidy, over the libraries (those named, or all) and over every
# header that they include. Fails if it has anything to say.
# They are two files, what trains and what reads and writes: reading torch's headers is what takes the time.
set -euo pipefail
cd "$(dirname "$0")/.."
build=build/tidy
# Without precompiled headers: gcc's are not clang's. So this finds missing includes as well.
cmake --preset release -B "$build" -DCMAKE_EXPORT_COMPILE_COMMANDS=ON -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON \
  -DTESSERA_BUILD_EXAMPLES=OFF -DTESSERA_UNITY=OFF --log-level=WARNING >/dev/null

# The libraries' files in the order of the build, and the flags of gloo's, which are all that any of them needs.
python3 - "$build" "$@" <<'EOF'
import json, os, shlex, sys

build, wanted = sys.argv[1], sys.argv[2:]
files, flags = {"train": [], "files": []}, []
for entry in json.load(open(f"{build}/compile_commands.json")):
    library = os.path.relpath(entry["file"]).split("/")[0]
    if f"{library}/CMakeFiles/tessera_{library}.dir" not in entry["command"]:
        continue
    if not wanted or library in wanted:
        files["files" if library in ("checkpoint", "exported", "plan") else "train"].append(entry["file"])
    if entry["file"].endswith("/gloo_connections.cpp"):
        words = shlex.split(entry["command"])
        flags = words[1:words.index("-o")]
for name, members in files.items():
    open(f"{build}/{name}.cpp", "w").writelines(f'#include "{file}"\n' for file in members)
open(f"{build}/flags", "w").writelines(f"{flag}\n" for flag in flags)
EOF
mapfile -t flags <"$build/flags"
tools/clang_tool.sh clang-tidy --version >/dev/null # unpacks it, if need be, once
printf '%s\n' "$build"/{train,files}.cpp |
  xargs -P "${JOBS:-$(nproc)}" -I{} tools/clang_tool.sh clang-tidy --quiet --warnings-as-errors='*' {} -- "${flags[@]}"
