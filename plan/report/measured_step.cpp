#include <tessera/plan/measured_step.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <utility>

#include "core/runtime/lfs_pointer.h"
#include "core/trace/trace_file.h"

namespace tessera {
using namespace internal;
namespace {

// A trace event of one rank, with its start and end.
struct Span {
  std::string category, name, operation;
  double begin_s = 0, end_s = 0;
};

[[noreturn]] void refuse_trace(const std::filesystem::path& file, const std::string& why) {
  throw std::invalid_argument("trace " + file.string() + " " + why);
}

std::vector<Span> spans_of(const std::filesystem::path& file, int rank) try {
  std::ifstream stream(std::filesystem::is_regular_file(file) ? file : "");  // opening a pipe would block
  if (!stream) refuse_trace(file, "cannot be read");
  std::vector<Span> spans;
  int64_t last_run = -1;
  if (const std::string problem = lfs_problem(begin_of_file(file.string(), 64)); !problem.empty())
    refuse_trace(file, problem);
  if (!may_hold_trace(file.string())) refuse_trace(file, "is not a trace of TESSERA_TRACE");
  for (std::string line; std::getline(stream, line);) {
    if (line.size() < 2) continue;  // skips the closing bracket
    const auto event = nlohmann::json::parse(line.begin() + 1, line.end(), nullptr, /*allow_exceptions=*/false);
    if (!event.is_object() || event.value("ph", "") != "X") continue;
    const auto pid = event.value("pid", int64_t{-1});
    const int64_t run = pid / kPidsOfRun;
    if (pid < 0 || pid % kPidsOfRun != rank || run < last_run) continue;
    if (run > last_run) spans.clear();
    last_run = run;
    const double begin_s = event.value("ts", 0.0) * 1e-6;
    const std::string operation = event.contains("args") ? event["args"].value("operation", "") : "";
    spans.push_back({event.value("cat", ""), event.value("name", ""), operation, begin_s,
                     begin_s + event.value("dur", 0.0) * 1e-6});
  }
  std::ranges::stable_sort(spans, {}, &Span::begin_s);
  return spans;
} catch (const nlohmann::json::exception& error) {  // thrown for a field of another type
  refuse_trace(file, std::string("is damaged: ") + error.what());
}

// Returns the end times of optimizer steps. Optimizer spans without compute between them belong to one step. A gradient
// reduction does not end a step, because each backward of a gradient accumulation may reduce.
std::vector<double> ends_of_steps(const std::vector<Span>& spans) {
  std::vector<double> ends;
  bool has_computed = true;
  for (const Span& span : spans) {
    if (span.category == "compute") has_computed = true;
    if (span.category != "optimizer") continue;
    if (std::exchange(has_computed, false)) {
      ends.push_back(span.end_s);
    } else {
      ends.back() = std::max(ends.back(), span.end_s);
    }
  }
  return ends;
}

}  // namespace

MeasuredStep measured_step(const std::filesystem::path& trace, int rank) {
  const std::vector<Span> spans = spans_of(trace, rank);
  const std::vector<double> ends = ends_of_steps(spans);
  const auto computes = [](const Span& span) { return span.category == "compute"; };
  if (ends.empty() && std::ranges::any_of(spans, computes))
    refuse_trace(trace, "has computing of rank " + std::to_string(rank) +
                            " but no optimizer, with which each step ends: those of torch::optim are in no trace, "
                            "unless OSS or ShardedDataParallel steps them; tessera::AdamW is, and all of Tessera's");
  if (ends.size() < 3)
    refuse_trace(trace, "has " + std::to_string(ends.size()) + " steps of rank " + std::to_string(rank) +
                            ", expected 3 or more, of which the first does not count");
  std::vector<std::pair<double, size_t>> steps;  // each step's duration, and the index of its end in `ends`
  for (size_t i = 1; i < ends.size(); ++i) steps.emplace_back(ends[i] - ends[i - 1], i);
  const auto middle = steps.begin() + static_cast<std::ptrdiff_t>(steps.size() / 2);
  std::ranges::nth_element(steps, middle);
  const double begin = ends[middle->second - 1], end = ends[middle->second];

  MeasuredStep step{.total_s = end - begin, .steps = static_cast<int>(steps.size())};
  double optimizer_until = begin;
  for (const Span& span : spans) {
    if (span.end_s <= begin || span.end_s > end) continue;
    MeasuredInterval each{.name = span.name, .begin_s = span.begin_s - begin, .end_s = span.end_s - begin};
    if (span.category == "optimizer") {
      if (span.end_s <= optimizer_until) continue;  // skips a span inside an earlier optimizer span
      optimizer_until = span.end_s;
      each.name = "optimizer";
    } else if (span.category == "compute") {
      each.in_backward = span.operation == "backward" || span.name == "backward";
    } else {
      const bool waits = span.category == "wait";
      each.kind = waits ? MeasuredInterval::Kind::kWait : MeasuredInterval::Kind::kCollective;
      each.name = span.operation + (span.name.empty() ? "" : " of " + span.name);
      if (waits) step.wait_s += span.end_s - std::max(span.begin_s, begin);
    }
    step.intervals.push_back(std::move(each));
  }
  return step;
}

}  // namespace tessera
