#!/usr/bin/env bash
# Opens the page of `tessera plan --html` in a real browser. Checks that it draws, shows the plan's peak and the
# operator under the pointer, makes no network request and reports no error; that a measured step is drawn beside the
# prediction, red where it differs; and that dark mode has other colors. Argument: the build folder. Exit code 77
# without a browser.
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build/release}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome || true)
if [ -z "$browser" ]; then
  echo "check_plan_page: skipped, needs chromium (Debian: apt-get install chromium)" >&2
  exit 77
fi

plan() {
  "$build/tools/tessera/tessera" plan --model gpt:layers=6,width=256,heads=4,vocab=5000,sequence=128 --gpus 4 \
    --memory 1GiB --flops 1e12 --memory-bandwidth 20GB --link 10Gbit "$@"
}
# Three steps of 30 ms, in which one unit takes much longer than predicted.
python3 - >"$work/trace.json" <<'END'
import json
def line(name, category, begin_ms, ms, operation=""):
    return json.dumps({"name": name, "cat": category, "ph": "X", "pid": 0, "tid": 0, "ts": begin_ms * 1e3, "dur": ms * 1e3,
                       "args": {"operation": operation}}, separators=(",", ":"))
print('[{"name":"tessera_trace","ph":"i","pid":0,"tid":0,"args":{"rank":0}}')
for step in range(3):
    for span in (("unit 'blocks.0'", "compute", 0, 9, "forward"), ("unit 'blocks.1'", "compute", 9, 4, "forward"),
                 ("unit 'blocks.1'", "wait", 10, 2, "all-gather"), ("unit 'blocks.1'", "gather", 8, 4, "all-gather"),
                 ("unit 'blocks.0'", "compute", 13, 12, "backward"), ("AdamW", "optimizer", 25, 5)):
        name, category, begin, ms, *more = span
        print("," + line(name, category, 30 * step + begin, ms, *more))
END
plan --html "$work/page.html" --measured "$work/trace.json" >/dev/null
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
browse() {
  HOME=$work timeout 120 "$browser" --headless --no-sandbox --disable-gpu --enable-logging=stderr --v=0 \
    --host-resolver-rules="MAP * ~NOTFOUND" --window-size=1280,900 "$@"
}
browse --dump-dom "file://$work/pointed.html" >"$work/dom" 2>"$work/log"

expect() { grep -qE "$1" "$work/dom" || { echo "check_plan_page: the page has no $2" >&2; exit 1; }; }
expect "<text id=\"peak\"[^>]*>$peak</text>" "peak of $peak"
expect '<polygon points="[0-9., -]{1000,}"' "areas"
expect "<div id=\"told\"[^>]*>aten::" "text for the pointer"
expect '<h2 id="time">A step by predicted time: [0-9.]+ ms' "predicted time"
expect '<rect [^>]*><title>all-gather of [^<]*' "collectives over time"
expect '<div class="legend" id="time-legend">.*backward.*collectives.*waits.*edge: off by' "legend of times"
expect "<title>unit 'blocks.0', [0-9]+ operators, in backward" "compute by unit over time"
expect '<h2 id="measured-time">Measured, the median of 2 steps: 30.00 ms, of which 2.00 ms waits; predicted [+-]' \
  "measured step"
expect '<rect [^>]*stroke="var\(--red\)"[^>]*><title>unit .blocks.0' "mark of a difference"
expect '<tr class="large"><td>unit .blocks.0., in backward</td><td>[0-9.]+ ms</td><td>12.00 ms</td></tr>' "table of differences"
# The message has several lines.
if ! tr '\n' ' ' <"$work/dom" | grep -qE "<div id=\"told\"[^>]*>[^<]*$peak in all"; then
  echo "check_plan_page: the pointer is not told $peak" >&2
  exit 1
fi
# Reads the page's own colors from the browser.
cat "$work/page.html" - >"$work/color.html" <<'END'
<script>document.body.textContent = "paper " + getComputedStyle(document.body).backgroundColor;</script>
END
color() { browse --blink-settings=preferredColorScheme="$1" --dump-dom "file://$work/color.html" 2>>"$work/log" | grep -o 'paper rgb([0-9, ]*)'; }
if [ "$(color 0)" = "$(color 1)" ]; then
  echo "check_plan_page: the page has the same paper in the dark: $(color 0)" >&2
  exit 1
fi
# Every column of a search's table is on a page of 1,400 pixels.
plan --search --host-memory 64GiB --html "$work/wide.html" >/dev/null
cat >>"$work/wide.html" <<'END'
<script>
const right = Math.max(...[...byId("plans").rows].map(row => row.lastChild.getBoundingClientRect().right));
document.body.textContent = `columns ${byId("plans").rows[0].cells.length}, right ${Math.ceil(right)} of ${innerWidth}, ` +
  (right <= innerWidth && document.documentElement.scrollWidth <= innerWidth ? "inside" : "outside");
</script>
END
wide=$(browse --window-size=1400,900 --dump-dom "file://$work/wide.html" 2>>"$work/log" | grep -o 'columns .*side')
case $wide in
  *" inside") ;;
  *) echo "check_plan_page: the table of plans has $wide" >&2; exit 1 ;;
esac
if grep -E "CONSOLE|ERR_NAME_NOT_RESOLVED" "$work/log" >&2; then exit 1; fi
echo "check_plan_page: ok, peak $peak"
