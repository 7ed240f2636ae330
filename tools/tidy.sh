#!/usr/bin/env bash
# tools/tidy.sh [folder...]: runs clang-tidy with .clang-tidy over the libraries and `tools`, the command `tessera` (or
# only the given folders), and over every header that they include. Fails on any finding. Merges them into three files
# (training, files, the command), because parsing torch's headers takes most of the time.
set -euo pipefail
cd "$(dirname "$0")/.."
build=build/tidy
# Without precompiled headers: clang cannot read those of gcc. So this finds missing includes as well.
cmake --preset release -B "$build" -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON -DTESSERA_BUILD_EXAMPLES=OFF -DTESSERA_UNITY=OFF \
  --log-level=WARNING >/dev/null

# Files in build order. All libraries use the flags of gloo's part, which suffice for each; the command uses its own.
python3 - "$build" "$@" <<'EOF'
import json, os, shlex, sys

build, wanted = sys.argv[1], sys.argv[2:]
files, flags = {"train": [], "files": [], "tools": []}, {}
for entry in json.load(open(f"{build}/compile_commands.json")):
    folder = os.path.relpath(entry["file"]).split("/")[0]
    if folder not in ("core", "offload", "optim", "checkpoint", "oss", "fsdp", "sdp", "exported", "elastic", "plan", "tools"):
        continue
    if "cmake_pch" in entry["file"]:
        continue
    part = "tools" if folder == "tools" else "files" if folder in ("checkpoint", "elastic", "exported", "plan") else "train"
    if not wanted or folder in wanted:
        files[part].append(entry["file"])
    words = shlex.split(entry["command"])
    if part == "tools":
        flags["tools"] = words[1:words.index("-o")]
    elif entry["file"].endswith("/gloo_connections.cpp"):
        flags["train"] = flags["files"] = words[1:words.index("-o")]
for part, members in files.items():
    open(f"{build}/{part}.cpp", "w").writelines(f'#include "{file}"\n' for file in members)
    open(f"{build}/{part}.flags", "w").writelines(f"{flag}\n" for flag in flags[part])
EOF
check() {
  local flags
  mapfile -t flags <"$1.flags"
  tools/clang_tool.sh clang-tidy --quiet --warnings-as-errors='*' "$1.cpp" -- "${flags[@]}"
}
export -f check
tools/clang_tool.sh clang-tidy --version >/dev/null # unpacks it once
printf '%s\n' "$build"/{train,files,tools} | xargs -P "${JOBS:-$(nproc)}" -I{} bash -c 'check "$1"' _ {}
