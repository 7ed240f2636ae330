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
  std::string page(kTimelineHtml);
  page.replace(page.find(kDataPlace, page.find("id=\"data\"")), kDataPlace.size(), written);
  return page;
}

}  // namespace tessera
