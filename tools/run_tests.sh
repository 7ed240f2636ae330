#!/usr/bin/env bash
# tools/run_tests.sh <preset> [arguments of ctest]: runs the tests, as many at a time as there are processors
# (or JOBS), and says at the end which ten took longest.
set -uo pipefail
cd "$(dirname "$0")/.."
log=$(mktemp)
trap 'rm -f "$log"' EXIT
ctest --preset "$1" -j "${JOBS:-$(nproc)}" "${@:2}" 2>&1 | tee "$log"
status=${PIPESTATUS[0]}
printf '\nthe slowest, in seconds:\n'
sed -nE 's/^ *[0-9]+\/[0-9]+ Test +#[0-9]+: ([^ ]+) .* ([0-9.]+) sec.*/\2 \1/p' "$log" | sort -rn | head -n 10 |
  while read -r seconds name; do printf '%8s  %s\n' "$seconds" "$name"; done
exit "$status"
