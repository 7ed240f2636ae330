#!/usr/bin/env bash
# Exhausts the model of commit and regroup with spin, and requires that each planted fault is found. Exits with 77
# (skipped) without spin or a C compiler. Writes to a temporary folder only. With TESSERA_TEST_MATRIX=full
# also exhausts two regroups in a row.
#
#   tests/elastic/check_model.sh [<seconds of a processor for one run>]
set -euo pipefail
model="$(cd "$(dirname "$0")" && pwd)/regroup.pml"
limit=${1:-50}
compiler=$(command -v gcc || command -v cc || true)
if ! command -v spin >/dev/null || [ -z "$compiler" ]; then
  echo "check_model: spin (Debian's package spin) or a C compiler was not found; skipped" >&2
  exit 77
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"

# run_checker <flags of the model ...>: prints the checker's report.
run_checker() {
  rm -f pan* ./*.trail
  spin -a "$@" "$model" >spin.log 2>&1 || { cat spin.log >&2; exit 1; }
  "$compiler" -O2 -w -DSAFETY -DCOLLAPSE -DVECTORSZ=4096 -DMEMLIM=3000 -o pan pan.c
  (ulimit -t "$limit" && ./pan -m1000000 -w25 2>&1) || true
}

# require_exhausted <what> <flags of the model ...>
require_exhausted() {
  local what=$1 report
  shift
  report=$(run_checker "$@")
  if ! grep -q 'errors: 0' <<<"$report" || grep -qE 'Search not completed|max search depth|pan: reached' <<<"$report"; then
    printf '%s\ncheck_model: %s has an error, or was not exhausted in %s s of a processor\n' "$report" "$what" "$limit" >&2
    exit 1
  fi
  echo "check_model: $what: exhausted $(awk '/states, stored/ {print $1; exit}' <<<"$report") states without an error"
}

require_exhausted "commit, two deaths" -DCOMMIT
require_exhausted "regroup, two deaths and a slow rank" -DATTEMPTS=3
require_exhausted "join, two deaths and a slow rank" -DJOIN
if [ "${TESSERA_TEST_MATRIX:-}" = full ]; then
  require_exhausted "two regroups, two deaths and a slow rank" -DGENERATIONS=3 -DATTEMPTS=2
fi
for fault in "DISCARD_EARLY -DCOMMIT" MINORITY OLD_BALLOT IGNORE_ACCEPTED "ENTER_ACCEPTED -DJOIN" "NO_RECORD -DJOIN"; do
  # shellcheck disable=SC2086
  report=$(run_checker -D$fault)
  if ! grep -q 'assertion violated' <<<"$report"; then
    printf '%s\ncheck_model: the planted fault %s was not found\n' "$report" "$fault" >&2
    exit 1
  fi
  echo "check_model: found the planted fault ${fault%% *}"
done
