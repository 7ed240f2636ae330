#!/usr/bin/env bash
# tools/format.sh [--check]: formats every source file with .clang-format; with --check changes no file, and fails if one
# is not formatted.
set -euo pipefail
cd "$(dirname "$0")/.."
how=(-i)
[ "${1:-}" = --check ] && how=(--dry-run --Werror)
git ls-files '*.h' '*.cpp' | xargs tools/clang_tool.sh clang-format "${how[@]}"
