#!/usr/bin/env bash
# tools/run_tests.sh <preset> [arguments of ctest]: runs the tests, two more at a time than there are processors (or
# JOBS), because some wait for timeouts. Prints the ten slowest at the end.
#
# Repeats failed tests once, one at a time, because a stalled machine can fail a test. A test that passes then does not
# fail the run, but is listed ("passed only when run again: ..."), because it may be a rare bug. No repeats after a
# sanitizer's report: a race or a bad access seen once is real.
set -uo pipefail
cd "$(dirname "$0")/.."
preset=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed_log=build/$preset/Testing/Temporary/LastTestsFailed.log # a line "<number>:<name>" for each

# The failed tests of the last run, sorted.
failed_names() { [ ! -e "$failed_log" ] || sed 's/^[0-9]*://' "$failed_log" | sort; }

# c10d's TCPStore asks for the name of each peer. A name server that loses a query must not cost a test 5 s.
export RES_OPTIONS=${RES_OPTIONS:-timeout:1 attempts:4}
rm -f "$failed_log"
TIMEFORMAT=$'\n%0R s, in which programs computed for %0U s and the kernel for %0S s'
time ctest --preset "$preset" -j $((${JOBS:-$(nproc)} + 2)) --no-tests=error "${@:2}" 2>&1 | tee "$work/log"
status=${PIPESTATUS[0]}
failed_names >"$work/first"

reports='(Address|Leak|Thread)Sanitizer:|runtime error:'
if [ "$status" -ne 0 ] && [ -s "$work/first" ] && ! grep -qE "$reports" "$work/log"; then
  printf '\n==== once more, alone: %s\n' "$(paste -s -d' ' "$work/first")"
  # By name: --rerun-failed selects by number, and a preset's filter changes the numbers.
  ctest --preset "$preset" -R "^($(paste -s -d'|' "$work/first"))\$" -j 1 --no-tests=error 2>&1
  status=$?
  # ctest does not update the list if no test fails.
  if [ "$status" -eq 0 ]; then : >"$work/second"; else failed_names >"$work/second"; fi
fi

printf '\nthe slowest, in seconds:\n'
sed -nE 's/^ *[0-9]+\/[0-9]+ Test +#[0-9]+: ([^ ]+) .* ([0-9.]+) sec.*/\2 \1/p' "$work/log" | sort -rn | head -n 10 |
  while read -r seconds name; do printf '%8s  %s\n' "$seconds" "$name"; done

if [ -e "$work/second" ]; then
  # ctest's summary, for the final results.
  total=$(sed -nE 's/.* tests failed out of ([0-9]+)$/\1/p' "$work/log" | tail -n 1)
  failed=$(wc -l <"$work/second")
  again=$(comm -23 "$work/first" "$work/second" | paste -s -d' ')
  [ -z "$again" ] || printf '\npassed only when run again: %s\n' "$again"
  [ "$failed" -eq 0 ] || printf '\nfailed twice: %s\n' "$(paste -s -d' ' "$work/second")"
  printf '\n%d%% tests passed, %d tests failed out of %d\n' $((100 * (total - failed) / total)) "$failed" "$total"
fi
exit "$status"
