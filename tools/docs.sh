#!/usr/bin/env bash
# The API reference, build/docs/index.html: Doxygen over tessera.h, the headers that it includes, and those that
# docs/reference/Doxyfile adds. Fails on any warning.
set -euo pipefail
cd "$(dirname "$0")/.."
out=build/docs
rm -rf "$out"
mkdir -p "$out"
headers=$(sed -nE 's/^#include "tessera\/(.*)"$/\1/p' tessera.h)
doxygen - <<<"@INCLUDE = docs/reference/Doxyfile
OUTPUT_DIRECTORY = $out
INPUT += ${headers//$'\n'/ }"
echo "$out/index.html"
