#!/usr/bin/env bash
# The API reference, build/docs/index.html: Doxygen over tessera.h and the headers that it leads to, less the internal
# ones (docs/reference/internal_headers). Fails on any warning.
set -euo pipefail
cd "$(dirname "$0")/.."
out=build/docs
rm -rf "$out"
mkdir -p "$out"
headers=$(tools/check_docs.py --headers)
doxygen - <<<"@INCLUDE = docs/reference/Doxyfile
OUTPUT_DIRECTORY = $out
INPUT += ${headers//$'\n'/ }"
echo "$out/index.html"
