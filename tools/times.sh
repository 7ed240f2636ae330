#!/usr/bin/env bash
# Measures the time of `make demo`, `make test` and `.ci/run`, and prints it at their end:
#
#   tools/times.sh begin                      starts anew
#   tools/times.sh step <name> <command...>   runs the command, and records its time
#   tools/times.sh note <text>                adds a text from a step to its line of the table
#   tools/times.sh report                     prints the steps, and the slowest compilations of all build trees
#
# Inside a step, begin and report are no-ops and a step is a note, so .ci/run reports on `make test` too. "computed" is
# processor time of programs and kernel, which depends less on other users of the machine.
set -euo pipefail
cd "$(dirname "$0")/.."
export TESSERA_TIMES=${TESSERA_TIMES:-build/times}

begin() {
  mkdir -p "$(dirname "$TESSERA_TIMES")"
  date +begin' %s' >"$TESSERA_TIMES"
}

step() {
  local name=$1 status=0 times
  shift
  local inside=${TESSERA_IN_STEP:-}
  export TESSERA_IN_STEP=1
  [ -e "$TESSERA_TIMES" ] || begin
  times=$(mktemp)
  TIMEFORMAT='%R %U %S'
  { time "$@" 2>&3; } 3>&2 2>"$times" || status=$?
  awk -v name="$name" -v inside="$inside" '{ if (inside) printf "note %s: %.0f s, %.0f computed\n", name, $1, $2 + $3
                                            else printf "step %.1f %.1f %s\n", $1, $2 + $3, name }' "$times" >>"$TESSERA_TIMES"
  rm -f "$times"
  return "$status"
}

# "<seconds> <output>" of each compilation since begin. .ninja_log has its start and end, in milliseconds since ninja's
# start, and a time stamp, in nanoseconds.
compilations() {
  local log begun
  begun=$(sed -n 's/^begin //p' "$TESSERA_TIMES")
  for log in build/*/.ninja_log; do
    [ -e "$log" ] || continue
    awk -v begun="$begun" -v preset="$(basename "$(dirname "$log")")" '
      $4 ~ /\.(o|gch)$/ && $3 / 1e9 >= begun {
        what = $4
        sub(/CMakeFiles\//, "", what); sub(/\.dir\//, ": ", what); sub(/Unity\/unity_/, "part ", what)
        sub(/_cxx\.cxx\.o$/, "", what); sub(/cmake_pch\.hxx\.gch$/, "precompiled header", what)
        seconds[what] = ($2 - $1) / 1e3
      }
      END { for (what in seconds) printf "%.1f %s, %s\n", seconds[what], preset, what }' "$log"
  done
}

report() {
  [ -e "$TESSERA_TIMES" ] || return 0
  local all
  printf '\nwhere the time went, in seconds\n%9s %9s %9s\n' began clock computed
  awk '$1 == "step" { printf "%9.0f %9.0f %9.0f  ", at, $2, $3; at += $2
                      for (i = 4; i <= NF; ++i) printf "%s%s", $i, i < NF ? " " : "\n"
                      printf "%s", notes; notes = "" }
       $1 == "note" { sub(/^note /, ""); notes = notes sprintf("%33s%s\n", "", $0) }' "$TESSERA_TIMES"
  all=$(compilations | sort -rn)
  [ -n "$all" ] || return 0
  printf '\nthe slowest of %d compilations, by the clock\n' "$(wc -l <<<"$all")"
  head -n 6 <<<"$all" | while read -r seconds what; do printf '%9.0f  %s\n' "$seconds" "$what"; done
}

case "${1:-}" in
  begin | report) [ -n "${TESSERA_IN_STEP:-}" ] || "$1" ;;
  step) step "${@:2}" ;;
  note) printf 'note %s\n' "${*:2}" >>"$TESSERA_TIMES" ;;
  *) sed -n '2,12s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
