#include "core/trace/merge_traces.h"

#include <c10/util/StringUtil.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <system_error>
#include <tuple>
#include <utility>

#include "core/runtime/lfs_pointer.h"
#include "core/trace/trace_file.h"

namespace fs = std::filesystem;

namespace tessera::internal {
namespace {

using nlohmann::ordered_json;

constexpr std::string_view kMergedBegin = R"({"displayTimeUnit":"ms","otherData":{"merged by":"tessera trace merge")";

template <class... Parts>
[[noreturn]] void refuse_trace(const Parts&... why) {
  throw std::runtime_error(c10::str(why...));
}

// A rank of a run, as described by the rank's "tessera_trace" event.
struct TracedRank {
  std::string run, host, clock;
  int rank = 0;
  int64_t offset_ns = 0, error_ns = 0;
  int64_t unix_minus_steady_ns = 0;  // the host's Unix clock minus the host's steady clock
};

struct Input {
  fs::path path;
  std::map<int64_t, TracedRank> sources;  // the key is the "pid" of the rank's events
};

// Returns `ns`. Refuses a time that is so large that sums of several times could overflow.
int64_t in_range(const char* name, int64_t ns, int64_t most = int64_t{1} << 59) {
  if (ns < -most || ns > most) refuse_trace("'", name, "' is ", ns, " ns, which is out of range");
  return ns;
}

TracedRank source_of(const ordered_json& event) {
  const auto& args = event.at("args");
  return {args.at("run").get<std::string>(),
          args.at("host").get<std::string>(),
          args.at("clock").get<std::string>(),
          args.at("rank").get<int>(),
          in_range("offset_ns", args.at("offset_ns").get<int64_t>()),
          args.at("error_ns").get<int64_t>(),
          in_range("unix_ns", args.at("unix_ns").get<int64_t>(), int64_t{1} << 61) -
              in_range("steady_ns", args.at("steady_ns").get<int64_t>())};
}

// Calls visit() for each event of a file. Returns whether the last line is incomplete.
bool for_each_event(const fs::path& path, const std::function<void(ordered_json&)>& visit) {
  std::ifstream file(path, std::ios::binary);
  if (!file) refuse_trace("cannot read ", path.string());
  int64_t number = 0;
  for (std::string line; std::getline(file, line);) {
    if (file.eof()) return true;  // no line end: a process was killed during the write
    ++number;
    if (number > 1 && line == "]" && file.peek() == std::ifstream::traits_type::eof()) return false;
    const char expected = number == 1 ? '[' : ',';
    auto event = ordered_json::parse(line.empty() ? "" : line.substr(1), nullptr, /*allow_exceptions=*/false);
    if (line.empty() || line[0] != expected || !event.is_object())
      refuse_trace(path.string(), ", line ", number, ": expected '", expected, "' and an event, got '",
                   line.substr(0, 40), line.size() > 40 ? "...'" : "'");
    try {
      visit(event);
    } catch (const std::exception& error) {
      refuse_trace(path.string(), ", line ", number, ": ", error.what());
    }
  }
  if (file.bad()) refuse_trace("cannot read ", path.string());
  return false;
}

const TracedRank& source_for(const Input& input, const ordered_json& event) {
  const auto found = input.sources.find(event.at("pid").get<int64_t>());
  if (found == input.sources.end())
    refuse_trace("process ", event.at("pid").dump(), " has no tessera_trace before this event");
  return found->second;
}

class Merge {
 public:
  explicit Merge(const std::vector<fs::path>& in) {
    for (const auto& path : in) inputs_.push_back({path, {}});
    for (Input& input : inputs_) read(input);
    find_unix_offsets();
    for (const Input& input : inputs_) find_begin(input);
    for (const Input& input : inputs_) describe(input);
  }

  void write(std::ostream& out) {
    out << kMergedBegin;
    for (const auto& clock : merged.clocks)
      out << ",\n"
          << ordered_json(c10::str("clock of run ", clock.run + 1, ", ranks ", c10::Join(" ", clock.ranks))).dump()
          << ":" << ordered_json(c10::str(clock.host, ", right within ", clock.error_ns / 1000.0, " us")).dump();
    out << "},\"traceEvents\":[";
    for (const Input& input : inputs_)
      for_each_event(input.path, [&](ordered_json& event) {
        out << (std::exchange(is_first_, false) ? "\n" : ",\n") << moved(input, event).dump();
      });
    out << "\n]}\n";
  }

  MergedTrace merged;

 private:
  using RankOfRun = std::pair<std::string, int>;

  // Adds the ranks in the file to `input`, and checks that every event of the file can be read.
  void read(Input& input) {
    const std::string path = input.path.string();
    if (!fs::is_regular_file(input.path))
      refuse_trace("cannot read ", path, ": expected a file that TESSERA_TRACE has made");
    if (begin_of_file(input.path, kMergedBegin.size()) == kMergedBegin)
      refuse_trace(path, " is a merged trace; give the traces that it was made of");
    if (const std::string problem = lfs_problem(begin_of_file(path, 64)); !problem.empty())
      refuse_trace(path, " ", problem);
    if (begin_of_file(input.path, kTraceBegin.size()) != kTraceBegin)
      refuse_trace(path, " is not a trace: expected one that TESSERA_TRACE has made, which begins with ", kTraceBegin);
    const bool is_cut = for_each_event(input.path, [&](ordered_json& event) {
      if (event.at("name") == "tessera_trace") {
        const auto source = source_of(event);
        // All inputs together may have only one such event for each rank of a run, even if ranks share a file.
        const auto [holder, is_new] = holders_.try_emplace({source.run, source.rank}, path);
        if (!is_new) refuse_trace("rank ", source.rank, " of the same run is in ", holder->second, " already");
        input.sources[event.at("pid").get<int64_t>()] = source;
      }
      source_for(input, event);
      const bool is_metadata = event.at("ph") == "M";
      if (is_metadata && !event.contains("ts")) return;
      if (!is_metadata) ++merged.events;
      in_range("ts", std::llround(std::clamp(event.at("ts").get<double>() * 1000, -1e18, 1e18)));
    });
    if (is_cut) merged.notes.push_back(path + ": ends in a part of an event, which is left out");
  }

  // Finds the offset of Unix time to each run's reference clock, from the rank whose clock has the smallest error.
  void find_unix_offsets() {
    std::map<std::string, int64_t> errors;
    for (const Input& input : inputs_)
      for (const auto& [pid, source] : input.sources) {
        const auto known = errors.find(source.run);
        if (known != errors.end() && known->second <= source.error_ns) continue;
        errors[source.run] = source.error_ns;
        unix_minus_reference_ns_[source.run] = source.unix_minus_steady_ns - source.offset_ns;
      }
  }

  int64_t unix_ns(const TracedRank& source, const ordered_json& ts) const {
    return std::llround(ts.get<double>() * 1000) + source.offset_ns + unix_minus_reference_ns_.at(source.run);
  }

  void find_begin(const Input& input) {
    for_each_event(input.path, [&](ordered_json& event) {
      if (event.at("ph") == "M") return;
      const TracedRank& source = source_for(input, event);
      const int64_t at = unix_ns(source, event.at("ts"));
      begin_ns_ = std::min(begin_ns_, at);
      const auto [begin, is_first] = begin_of_run_.try_emplace(source.run, at);
      if (!is_first) begin->second = std::min(begin->second, at);
    });
  }

  int64_t number_of(const std::string& run) const {
    const int64_t begin = begin_of_run_.at(run);
    return std::ranges::count_if(
        begin_of_run_, [&](const auto& other) { return std::pair(other.second, other.first) < std::pair(begin, run); });
  }

  void describe(const Input& input) {
    std::map<std::tuple<int64_t, std::string, int64_t>, MergedClock> clocks;  // the key is {run, clock, offset}
    for (const auto& [pid, source] : input.sources) {
      const int64_t run = number_of(source.run);
      auto& clock = clocks[{run, source.clock, source.offset_ns}];
      clock.host = source.host;
      clock.file = input.path;
      clock.run = run;
      clock.offset_ns = source.offset_ns;
      clock.error_ns = source.error_ns;
      clock.ranks.insert(source.rank);
    }
    for (auto& [key, clock] : clocks) merged.clocks.push_back(std::move(clock));
  }

  ordered_json& moved(const Input& input, ordered_json& event) const {
    const TracedRank& source = source_for(input, event);
    const int64_t run = number_of(source.run);
    event["pid"] = run * kPidsOfRun + source.rank;
    if (event.at("name") == "process_name")
      event["args"]["name"] =
          c10::str(begin_of_run_.size() > 1 ? c10::str("run ", run + 1, ", ") : "", "rank ", source.rank);
    if (event.contains("ts")) event["ts"] = static_cast<double>(unix_ns(source, event.at("ts")) - begin_ns_) / 1000;
    return event;
  }

  std::vector<Input> inputs_;
  std::map<RankOfRun, std::string> holders_;  // the file that contains each rank's events
  std::map<std::string, int64_t> unix_minus_reference_ns_, begin_of_run_;
  int64_t begin_ns_ = std::numeric_limits<int64_t>::max();
  bool is_first_ = true;
};

}  // namespace

MergedTrace merge_traces(const fs::path& out, const std::vector<fs::path>& in) {
  if (fs::exists(out) && (!fs::is_regular_file(out) || begin_of_file(out, kMergedBegin.size()) != kMergedBegin))
    refuse_trace(out.string(), " exists and is no merged trace; it is left as it is");
  Merge merge(in);
  const std::string unfinished = c10::str(out.string(), ".", ::getpid(), ".tmp");
  try {
    std::ofstream file(unfinished, std::ios::binary);
    merge.write(file);
    if (!file.flush()) refuse_trace("cannot write ", unfinished);
    file.close();
    fs::rename(unfinished, out);
  } catch (const std::exception&) {
    std::error_code ignored;
    fs::remove(unfinished, ignored);
    throw;
  }
  return std::move(merge.merged);
}

}  // namespace tessera::internal
