#!/usr/bin/env bash
# tools/format.sh [--check]: writes every source file as .clang-format says; with --check changes none, and
# fails if one is written otherwise.
set -euo pipefail
cd "$(dirname "$0")/.."
how=(-i)
[ "${1:-}" = --check ] && how=(--dry-run --Werror)
git ls-files '*.h' '*.cpp' | xargs tools/clang_tool.sh clang-format "${how[@]}"
