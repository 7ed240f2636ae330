#!/usr/bin/env bash
# Opens the page of `tessera plan --html` in a real browser: it draws, says the peak that the plan says, tells what is
# under the pointer, asks nothing of a network and complains of nothing. Argument: the folder of the build.
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build/release}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome || true)
if [ -z "$browser" ]; then
  echo "check_plan_page: needs chromium (Debian: apt-get install chromium)" >&2
  exit 2
fi

plan() {
  "$build/tools/tessera/tessera" plan --model gpt:layers=6,width=256,heads=4,vocab=5000,sequence=128 --gpus 4 \
    --memory 1GiB --flops 1e12 --memory-bandwidth 20GB --link 10Gbit "$@"
}
plan --html "$work/page.html" >/dev/null
peak=$(plan --json | python3 -c '
import json, sys
peak = next(choice["peak_bytes"] for choice in json.load(sys.stdin) if choice["recommended"])
print(f"{peak / 2**20:.1f} MiB" if peak < 2**30 else f"{peak / 2**30:.2f} GiB")')

# The pointer on the peak.
cat "$work/page.html" - >"$work/pointed.html" <<'END'
<script>
const at = document.querySelector("circle").getBoundingClientRect();
byId("picture").dispatchEvent(new PointerEvent("pointermove", { clientX: at.x + at.width / 2, clientY: at.y + 40 }));
</script>
END
HOME=$work timeout 120 "$browser" --headless --no-sandbox --disable-gpu --enable-logging=stderr --v=0 \
  --host-resolver-rules="MAP * ~NOTFOUND" --window-size=1280,900 --dump-dom "file://$work/pointed.html" \
  >"$work/dom" 2>"$work/log"

expect() { grep -qE "$1" "$work/dom" || { echo "check_plan_page: the page has no $2" >&2; exit 1; }; }
expect "<text id=\"peak\"[^>]*>$peak</text>" "peak of $peak"
expect '<polygon points="[0-9., -]{1000,}"' "areas"
expect "<div id=\"told\"[^>]*>aten::" "text for the pointer"
expect '<h2 id="time">A step by predicted time: [0-9.]+ ms' "predicted time"
expect '<rect [^>]*><title>all-gather of [^<]*' "collectives over time"
expect "<title>unit 'blocks.0', [0-9]+ operators, in backward" "compute by unit over time"
# The message comes over several lines.
if ! tr '\n' ' ' <"$work/dom" | grep -qE "<div id=\"told\"[^>]*>[^<]*$peak in all"; then
  echo "check_plan_page: the pointer is not told $peak" >&2
  exit 1
fi
if grep -E "CONSOLE|ERR_NAME_NOT_RESOLVED" "$work/log" >&2; then exit 1; fi
echo "check_plan_page: ok, peak $peak"
