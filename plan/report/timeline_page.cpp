#include <tessera/plan/timeline_page.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <string_view>
#include <vector>

#include "plan/report/timeline_data.h"

namespace tessera {
using namespace internal;
namespace {

using nlohmann::json;

constexpr size_t kMostPoints = 2000;
constexpr size_t kMostCollectives = 2000;
constexpr std::string_view kDataPlace = "TIMELINE_DATA";

// The HTML page. Its script inserts data only as text, and never as markup.
constexpr std::string_view kPage = R"html(<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Memory of a training step</title>
<style>
:root { color-scheme: light dark; --ink: #1c2430; --faint: #6b7685; --line: #d9dee5; --paper: #ffffff; --card: #f5f7fa;
  --red: #c62f3b; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e9f0; --faint: #93a0b1; --line: #333d4a; --paper: #14191f; --card: #1d242d; --red: #ff7a80; }
}
body { margin: 2rem auto; max-width: 76rem; padding: 0 1.25rem; background: var(--paper); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; }
h2 { font-size: 1.05rem; font-weight: 600; margin: 1.2rem 0 .25rem; }
h1 { font-size: 1.35rem; font-weight: 600; margin: 0 0 .25rem; overflow-wrap: anywhere; }
#options { overflow-wrap: anywhere; font-family: ui-monospace, monospace; font-size: 12.5px; }
.faint, text { color: var(--faint); fill: var(--faint); }
.facts { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1rem 0; }
.facts div { background: var(--card); border-radius: .5rem; padding: .5rem .9rem; }
.facts b { display: block; font-size: 1.2rem; font-variant-numeric: tabular-nums; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; margin: .5rem 0; }
.legend i { display: inline-block; width: .8rem; height: .8rem; border-radius: .15rem; margin-right: .35rem; }
svg { width: 100%; height: auto; display: block; }
svg text { font: 13px system-ui, sans-serif; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
td, th { text-align: right; padding: .15rem .8rem .15rem 0; font-weight: 400; }
td:first-child, th:first-child { text-align: left; }
.large { color: var(--red); }
pre { background: var(--card); border-radius: .5rem; padding: .9rem; font-size: 12.5px; white-space: pre-wrap;
  overflow-wrap: anywhere; }
#plans { font-size: 12px; }
#plans td, #plans th { padding: .15rem .5rem .15rem 0; white-space: nowrap; }
#plans th { writing-mode: vertical-rl; transform: rotate(180deg); text-align: left; padding: .5rem 0 0 0; }
#plans td:last-child { text-align: left; }
#told { position: fixed; pointer-events: none; display: none; background: var(--paper); border: 1px solid var(--line);
  border-radius: .5rem; padding: .5rem .7rem; font-size: 13px; max-width: 26rem; box-shadow: 0 3px 14px #0003;
  font-variant-numeric: tabular-nums; white-space: pre-line; }
</style>
</head>
<body>
<h1 id="title"></h1>
<div class="faint" id="options"></div>
<div class="faint" id="where"></div>
<div class="facts" id="facts"></div>
<div class="legend" id="legend"></div>
<svg id="picture" viewBox="0 0 1180 560" role="img" aria-label="bytes by kind over the operators of a run"></svg>
<div id="compared" hidden></div>
<h2 id="time" hidden></h2>
<div class="legend" id="time-legend" hidden></div>
<svg id="gantt" viewBox="0 0 1180 10" role="img" aria-label="predicted time of a step: compute by unit, collectives"></svg>
<h2 id="measured-time" hidden></h2>
<svg id="measured-gantt" viewBox="0 0 1180 10" role="img" aria-label="a measured step: compute by unit, waits, collectives"></svg>
<table id="differences" hidden></table>
<pre id="notes"></pre>
<table id="plans"></table>
<pre id="advice"></pre>
<div id="told"></div>
<script type="application/json" id="data">TIMELINE_DATA</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
// In the order of MemoryKind.
const colors = ["#b9c3cf", "#8d99ae", "#3f6fd8", "#58b0e8", "#e0a030", "#d9603b", "#7a5bc7", "#3a9d6e", "#c97fb1",
  "#98703c", "#5f7a2e"];
const box = { left: 92, right: 1165, top: 28, bottom: 400, lane: 430 };
const [unit, unitName] = data.peak.total >= 2 ** 30 ? [2 ** 30, "GiB"]
  : data.peak.total >= 2 ** 20 ? [2 ** 20, "MiB"] : [2 ** 10, "KiB"];
function bytes(n) {
  const power = n >= 2 ** 30 ? 3 : n >= 2 ** 20 ? 2 : n >= 2 ** 10 ? 1 : 0;
  const value = n / 2 ** (10 * power);
  return value.toFixed(power === 0 ? 0 : value < 10 ? 2 : 1) + " " + ["bytes", "KiB", "MiB", "GiB"][power];
}
const byId = id => document.getElementById(id);
function svg(name, attributes, text, parent = byId("picture")) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (text !== undefined) made.textContent = text;
  return parent.appendChild(made);
}
function html(parent, name, text) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  return parent.appendChild(made);
}
// The legend: a color with its label.
function explain(legend, color, text) {
  const entry = html(byId(legend), "span");
  html(entry, "i").style.background = color;
  entry.append(text);
  return entry;
}
document.title = data.title;
byId("title").textContent = data.title;
byId("options").textContent = data.options;
byId("where").textContent = "Peak " + data.peak.where + ".";
// The table of plans, with upright headings: its lines of text are wider than a page.
const lines = data.notes.split("\n"), cellsOf = line => line.trim().split(/ {2,}/);
const heading = lines.findIndex(line => line.startsWith("stage  "));
let afterPlans = Math.max(heading, 0);
while (heading >= 0 && afterPlans < lines.length && cellsOf(lines[afterPlans]).length === cellsOf(lines[heading]).length) {
  const row = html(byId("plans"), "tr");
  for (const text of cellsOf(lines[afterPlans])) html(row, afterPlans === heading ? "th" : "td", text);
  ++afterPlans;
}
byId("notes").textContent = lines.slice(0, Math.max(heading, 0)).join("\n").trim();
byId("advice").textContent = lines.slice(afterPlans).join("\n").trim();
for (const id of ["notes", "plans", "advice"]) byId(id).hidden = !byId(id).textContent;
for (const [value, name] of [[bytes(data.peak.total), "at the peak"],
  ...(data.disk ? [[bytes(data.disk), "on the disk"]] : []),
  ...(data.memory ? [[bytes(data.memory), "of a rank"]] : []), [data.tflop + " TFLOP", "a step"],
  [String(data.operators), "operators in all"]]) {
  const fact = html(byId("facts"), "div");
  html(fact, "b", value);
  html(fact, "span", name).className = "faint";
}
const totals = data.points.map(point => point.bytes.reduce((sum, n) => sum + n, 0));
const highest = Math.max(data.peak.total, data.measured ? data.measured.peak : 0, ...totals);
const top_ = data.memory && data.memory < 4 * highest ? Math.max(highest, data.memory) * 1.05 : highest * 1.08;
const x = at => box.left + (box.right - box.left) * at / Math.max(1, data.operators - 1);
const y = n => box.bottom - (box.bottom - box.top) * n / top_;
// Scales, above the steps.
data.steps.forEach((part, index) => {
  if (index % 2) svg("rect", { x: x(part.begin), y: box.top, width: x(part.end) - x(part.begin),
    height: box.bottom - box.top, fill: "var(--card)" });
});
const step = [1, 2, 2.5, 5, 10].map(n => n * 10 ** Math.floor(Math.log10(top_ / unit / 5)))
  .find(n => top_ / unit / n <= 6);
for (let at = 0; at * unit <= top_; at += step) {
  svg("line", { x1: box.left, x2: box.right, y1: y(at * unit), y2: y(at * unit), stroke: "var(--line)" });
  svg("text", { x: box.left - 8, y: y(at * unit) + 4, "text-anchor": "end" },
    at.toFixed(step < 0.1 ? 2 : step % 1 ? 1 : 0));
}
svg("text", { x: box.left - 8, y: box.top - 12, "text-anchor": "end" }, unitName);
data.steps.forEach(part => {
  svg("line", { x1: x(part.begin), x2: x(part.begin), y1: box.top, y2: 540, stroke: "var(--line)" });
  if (x(part.end) - x(part.begin) > 40) svg("text", { x: x(part.begin) + 5, y: box.bottom + 17 }, part.name);
});
// Bytes by kind, stacked.
const below = data.points.map(() => 0);
data.kinds.forEach((kind, index) => {
  const lower = [], upper = [];
  data.points.forEach((point, i) => {
    lower.push(x(point.at).toFixed(1) + "," + y(below[i]).toFixed(1));
    below[i] += point.bytes[index];
    upper.push(x(point.at).toFixed(1) + "," + y(below[i]).toFixed(1));
  });
  svg("polygon", { points: upper.concat(lower.reverse()).join(" "), fill: colors[data.colors[index]],
    "fill-opacity": 0.85 });
  const entry = explain("legend", colors[data.colors[index]], kind + " ");
  html(entry, "span", bytes(data.peak.bytes[index]) + " at the peak").className = "faint";
});
if (data.memory && data.memory <= top_) {
  svg("line", { x1: box.left, x2: box.right, y1: y(data.memory), y2: y(data.memory), stroke: "var(--red)",
    "stroke-dasharray": "6 4" });
  svg("text", { x: box.right, y: y(data.memory) - 5, "text-anchor": "end" }, "a rank's memory, " + bytes(data.memory));
}
const peakX = x(data.peak.at);
svg("circle", { cx: peakX, cy: y(data.peak.total), r: 4.5, fill: "var(--red)" });
svg("text", { id: "peak", x: peakX + (peakX > 900 ? -9 : 9), y: y(data.peak.total) - 7,
  "text-anchor": peakX > 900 ? "end" : "start", style: "fill: var(--ink); font-weight: 600" }, bytes(data.peak.total));
// A run with data: its bytes as a line, red where they differ from the prediction.
if (data.measured) {
  const measured = data.measured, differ = measured.differences, compared = byId("compared");
  svg("polyline", { id: "measured", points: measured.points.map(p => x(p.at).toFixed(1) + "," + y(p.bytes).toFixed(1)).join(" "),
    fill: "none", stroke: "var(--ink)", "stroke-width": 1.2 });
  for (const one of differ) {
    const made = svg("rect", { class: "differs", x: x(one.begin), y: box.top, width: Math.max(2, x(one.end) - x(one.begin)),
      height: box.bottom - box.top, fill: "var(--red)", "fill-opacity": 0.22 });
    svg("title", {}, "after " + one.name + ": " + one.text, made);
  }
  compared.hidden = false;
  compared.textContent = "Measured (the line): " + bytes(measured.peak) + " at the peak, predicted " + bytes(data.peak.total) +
    (measured.other_at >= 0 ? "; from operator " + measured.other_at + " on it called others" : "") +
    (differ.length ? "; red: other bytes, first after operator " + differ[0].begin + ", " + differ[0].name + ": " + differ[0].text
      : "; the same bytes of each kind after each operator" + (measured.other_at >= 0 ? " before" : "")) + ".";
  if (differ.length || measured.other_at >= 0) compared.className = "large";
}
// Collectives, a line for each operation.
const lanes = [...new Set(data.collectives.map(one => one.operation))];
lanes.forEach((operation, lane) => {
  const at = box.lane + 8 + 24 * lane;
  svg("text", { x: box.left - 8, y: at + 12, "text-anchor": "end", style: "font-size: 10.5px" }, operation);
  svg("line", { x1: box.left, x2: box.right, y1: at + 16, y2: at + 16, stroke: "var(--line)" });
});
const largest = Math.max(1, ...data.collectives.map(one => one.bytes));
for (const one of data.collectives) {
  const at = box.lane + 8 + 24 * lanes.indexOf(one.operation), height = 2 + 14 * one.bytes / largest;
  svg("rect", { x: x(one.at) - 1, y: at + 16 - height, width: 2, height, fill: "var(--ink)", "fill-opacity": 0.65 });
}
byId("picture").setAttribute("viewBox", "0 0 1180 " + (box.lane + 24 * lanes.length + 24));
// Describes the operator or collective nearest to the pointer.
const cursor = svg("line", { y1: box.top, y2: box.lane + 8 + 24 * lanes.length, stroke: "var(--ink)",
  "stroke-opacity": 0.45, visibility: "hidden" });
function nearest(list, at) {
  let best = 0;
  list.forEach((one, i) => { if (Math.abs(one.at - at) < Math.abs(list[best].at - at)) best = i; });
  return list[best];
}
byId("picture").addEventListener("pointermove", event => {
  const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(byId("picture").getScreenCTM().inverse());
  if (point.x < box.left || point.x > box.right || !data.points.length) return hide();
  const at = (point.x - box.left) / (box.right - box.left) * (data.operators - 1);
  let text;
  if (point.y > box.lane && data.collectives.length) {
    const inLane = data.collectives.filter(
      one => one.operation === lanes[Math.min(lanes.length - 1, Math.floor((point.y - box.lane - 4) / 24))]);
    const one = nearest(inLane.length ? inLane : data.collectives, at);
    cursor.setAttribute("x1", x(one.at)), cursor.setAttribute("x2", x(one.at));
    text = one.operation + " of " + one.what + "\n" + bytes(one.bytes) + " over " + one.ranks + (one.ranks === 1 ? " rank" : " ranks");
  } else {
    const one = nearest(data.points, at);
    cursor.setAttribute("x1", x(one.at)), cursor.setAttribute("x2", x(one.at));
    text = data.names[one.name] + (one.unit ? "\n" + data.units[one.unit] : "") +
      (one.module ? "\nin " + data.modules[one.module] : "") + (one.backward ? "\nin backward" : "")
      + "\n" + bytes(one.bytes.reduce((sum, n) => sum + n, 0)) + " in all";
    data.kinds.forEach((kind, i) => { if (one.bytes[i]) text += "\n" + kind + " " + bytes(one.bytes[i]); });
  }
  cursor.setAttribute("visibility", "visible");
  const told = byId("told");
  told.textContent = text;
  told.style.display = "block";
  told.style.left = Math.min(event.clientX + 16, innerWidth - told.offsetWidth - 8) + "px";
  told.style.top = Math.min(event.clientY + 16, innerHeight - told.offsetHeight - 8) + "px";
});
function hide() { byId("told").style.display = "none"; cursor.setAttribute("visibility", "hidden"); }
byId("picture").addEventListener("pointerleave", hide);
// A step over milliseconds, a line for each lane; tooltips describe the intervals.
const ms = n => n.toFixed(n === 0 ? 0 : n < 1 ? 4 : n < 100 ? 2 : 0) + " ms";
const steps = [data.time, data.measured_time].filter(one => one);
const ends = key => steps.flatMap(one => one.lanes.flatMap(lane => lane.intervals.map(each => each[key])));
const from = Math.min(0, ...ends("begin_ms"));
const until = Math.max(1e-6, ...steps.map(one => one.total_ms), ...ends("end_ms"));
const large = new Set(data.measured_time ? data.measured_time.differences.filter(one => one.is_large).map(one => one.name) : []);
const timeColors = { compute: colors[2], backward: colors[5], exchanged: colors[4], waits: colors[0] };
function drawStep(gantt, time) {
  const across = at => box.left + (box.right - box.left) * (at - from) / (until - from);
  const bottom = 12 + 46 * time.lanes.length;
  gantt.setAttribute("viewBox", "0 0 1180 " + (bottom + 28));
  for (let i = 0; i <= 5; ++i) {
    const at = from + (until - from) * i / 5;
    svg("line", { x1: across(at), x2: across(at), y1: 4, y2: bottom, stroke: "var(--line)" }, undefined, gantt);
    svg("text", { x: across(at), y: bottom + 18, "text-anchor": i === 5 ? "end" : "middle" }, ms(at), gantt);
  }
  time.lanes.forEach((lane, line) => {
    svg("text", { x: box.left - 8, y: 12 + 46 * line + 23, "text-anchor": "end", style: "font-size: 11px" }, lane.lane, gantt);
    for (const one of lane.intervals) {
      const differs = lane.lane === "waits" ? large.has("waits")
        : large.has(one.name) || large.has(one.name + (one.backward ? ", in backward" : ""));
      const made = svg("rect", { x: across(one.begin_ms), y: 12 + 46 * line, height: 34,
        stroke: differs ? "var(--red)" : "var(--paper)", "stroke-width": differs ? 1.6 : 0.5,
        width: Math.max(0.6, across(one.end_ms) - across(one.begin_ms)),
        fill: lane.lane === "waits" ? timeColors.waits : !one.operators ? timeColors.exchanged
          : one.backward ? timeColors.backward : timeColors.compute },
        undefined, gantt);
      svg("title", {}, one.name + (one.operators > 1 ? ", " + one.operators + " operators" : "") +
        (one.backward ? ", in backward" : "") + "\n" + ms(one.end_ms - one.begin_ms) + " from " + ms(one.begin_ms), made);
    }
  });
}
if (data.time) {
  byId("time").hidden = byId("time-legend").hidden = false;
  explain("time-legend", timeColors.compute, "forward and the optimizer");
  explain("time-legend", timeColors.backward, "backward");
  explain("time-legend", timeColors.exchanged, "collectives");
  if (data.measured_time) {
    explain("time-legend", timeColors.waits, "waits");
    explain("time-legend", "var(--red)", "edge: off by more than a twentieth of the step");
  }
  byId("time").textContent = "A step by predicted time: " + ms(data.time.total_ms) + ", of which " +
    ms(data.time.exposed_ms) + " wait for collectives";
  drawStep(byId("gantt"), data.time);
}
if (data.measured_time) {
  const time = data.measured_time, off = (data.time.total_ms / time.total_ms - 1) * 100;
  byId("measured-time").hidden = byId("differences").hidden = false;
  byId("measured-time").textContent = "Measured, the median of " + time.steps + " steps: " + ms(time.total_ms) + ", of which " +
    ms(time.wait_ms) + " waits; predicted " + (off < 0 ? "" : "+") + off.toFixed(0) + " %";
  drawStep(byId("measured-gantt"), time);
  const row = (name, cells, className) => {
    const made = html(byId("differences"), "tr");
    for (const cell of cells) html(made, name, cell);
    made.className = className;
  };
  row("th", ["what differs most", "predicted", "measured"], "faint");
  for (const one of time.differences)
    row("td", [one.name, ms(one.predicted_ms), ms(one.measured_ms)], one.is_large ? "large" : "");
}
</script>
</body>
</html>
)html";

const BytesByKind& live_at(const RunRecord& record, size_t at) {
  return at == record.peak_at ? record.peak : record.operators[at].live;
}

// Splits the operators into at most kMostPoints ranges. Returns the index of each range's operator with the most bytes.
std::vector<size_t> points_of(const RunRecord& record) {
  const size_t count = record.operators.size(), stretch = (count + kMostPoints - 1) / kMostPoints;
  std::vector<size_t> points;
  for (size_t begin = 0; begin < count; begin += stretch) {
    size_t most = begin;
    for (size_t at = begin; at < std::min(begin + stretch, count); ++at)
      if (live_at(record, at).tensors() > live_at(record, most).tensors()) most = at;
    points.push_back(most);
  }
  return points;
}

// Returns the kinds of tensors that occur at any time of the run.
std::vector<size_t> kinds_of(const RunRecord& record) {
  std::vector<size_t> kinds;
  for (size_t kind = 0; kind < kMemoryKinds; ++kind) {
    if (!is_tensors(static_cast<MemoryKind>(kind))) continue;
    if (record.most.bytes[kind] > 0 || record.peak.bytes[kind] > 0) kinds.push_back(kind);
  }
  return kinds;
}

json steps_of(const RunRecord& record) {
  json steps = json::array();
  for (size_t at = 0; at < record.operators.size(); ++at) {
    const int step = record.operators[at].step;
    if (at == 0 || step != record.operators[at - 1].step)
      steps.push_back({{"name", name_of_step(step)}, {"begin", at}, {"end", at}});
    steps.back()["end"] = at;
  }
  return steps;
}

json peak_of(const RunRecord& record, const std::vector<size_t>& kinds) {
  const std::string place = record.peak_place();
  json peak = {{"at", record.peak_at},
               {"total", record.peak_bytes()},
               {"where", place.empty() ? "before any operator" : "in " + place}};
  for (const size_t kind : kinds) peak["bytes"].push_back(record.peak.bytes[kind]);
  return peak;
}

json collectives_of(const RunRecord& record) {
  json collectives = json::array();
  // If there are more than kMostCollectives collectives, splits them into ranges, and draws the largest of each range.
  const auto& all = record.collectives;
  const auto stretch = static_cast<std::ptrdiff_t>((all.size() + kMostCollectives - 1) / kMostCollectives);
  for (auto begin = all.begin(); begin != all.end();) {
    const auto end = begin + std::min(stretch, all.end() - begin);
    const auto one = std::max_element(
        begin, end, [](const RecordedCollective& a, const RecordedCollective& b) { return a.bytes < b.bytes; });
    collectives.push_back({{"operation", one->operation},
                           {"what", one->what},
                           {"ranks", one->ranks},
                           {"bytes", one->bytes},
                           {"at", one->operators}});
    begin = end;
  }
  return collectives;
}

// Describes the operators whose indices are in `drawn`. Stores each name only once, in `names`.
json described(const RunRecord& record, const std::vector<size_t>& drawn, const std::vector<size_t>& kinds,
               json& names) {
  std::map<std::string, size_t> numbers;
  json points = json::array();
  for (const size_t at : drawn) {
    const RecordedOperator& one = record.operators[at];
    json bytes = json::array();
    for (const size_t kind : kinds) bytes.push_back(live_at(record, at).bytes[kind]);
    points.push_back({{"at", at},
                      {"name", numbers.emplace(one.name, numbers.size()).first->second},
                      {"unit", one.unit},
                      {"module", one.module},
                      {"backward", one.in_backward},
                      {"bytes", std::move(bytes)}});
  }
  names = std::vector<std::string>(numbers.size());
  for (const auto& [name, number] : numbers) names[number] = name;
  return points;
}

}  // namespace

std::string timeline_page(const RunRecord& record, const TimelinePageText& text) {
  const std::vector<size_t> kinds = kinds_of(record), drawn = points_of(record);
  json names, kind_names = json::array();
  const json points = described(record, drawn, kinds, names);
  for (const size_t kind : kinds) kind_names.push_back(std::string(name_of(static_cast<MemoryKind>(kind))));
  char tflop[32];
  std::snprintf(tflop, sizeof(tflop), "%.4g", static_cast<double>(record.flop) * 1e-12);
  json time;  // null if the time is unknown
  if (text.time != nullptr)
    time = {{"total_ms", text.time->total_s * 1e3},
            {"exposed_ms", text.time->exposed_s * 1e3},
            {"lanes", lanes_of(*text.time)}};
  json measured, measured_time;  // null without a measured run
  if (text.measured != nullptr) measured = measured_memory_of(record, *text.measured, drawn);
  if (text.time != nullptr && text.measured_time != nullptr)
    measured_time = measured_time_of(*text.time, *text.measured_time);
  const json data = {{"title", text.title},
                     {"time", time},
                     {"measured", measured},
                     {"measured_time", measured_time},
                     {"options", text.options},
                     {"colors", kinds},
                     {"notes", text.notes},
                     {"memory", text.memory_bytes},
                     {"disk", record.most[MemoryKind::kDisk]},
                     {"operators", record.operators.size()},
                     {"tflop", tflop},
                     {"units", record.units},
                     {"modules", record.modules},
                     {"names", names},
                     {"kinds", kind_names},
                     {"peak", peak_of(record, kinds)},
                     {"steps", steps_of(record)},
                     {"points", points},
                     {"collectives", collectives_of(record)}};
  std::string written = data.dump(-1, ' ', /*ensure_ascii=*/true, json::error_handler_t::replace);
  // Escapes '<', because data inside a script element must not contain an end tag.
  for (size_t at = written.find('<'); at != std::string::npos; at = written.find('<', at))
    written.replace(at, 1, "\\u003c");
  std::string page(kPage);
  page.replace(page.find(kDataPlace, page.find("id=\"data\"")), kDataPlace.size(), written);
  return page;
}

}  // namespace tessera
