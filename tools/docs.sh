#!/usr/bin/env bash
# Builds the API reference, build/docs/index.html: Doxygen over the public headers. Fails on any warning.
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
