// `tessera trace merge`
#include <c10/util/StringUtil.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "commands.h"
#include "core/trace/merge_traces.h"
#include "plan/report/quantity_text.h"

namespace {

double microseconds(int64_t nanoseconds) { return static_cast<double>(nanoseconds) / 1000; }

nlohmann::json json_of(const tessera::internal::MergedTrace& merged) {
  nlohmann::json clocks = nlohmann::json::array();
  for (const auto& clock : merged.clocks)
    clocks.push_back({{"host", clock.host},
                      {"file", clock.file.string()},
                      {"run", clock.run},
                      {"ranks", clock.ranks},
                      {"offset_us", microseconds(clock.offset_ns)},
                      {"error_us", microseconds(clock.error_ns)}});
  return {{"events", merged.events}, {"clocks", clocks}, {"notes", merged.notes}};
}

}  // namespace

int merge_trace_files(const Arguments& arguments) {
  const auto& out = arguments.paths[0];
  const auto merged = tessera::internal::merge_traces(out, {arguments.paths.begin() + 1, arguments.paths.end()});
  for (const auto& note : merged.notes) std::fprintf(stderr, "tessera: %s\n", note.c_str());
  if (arguments.json) {
    print_json(json_of(merged));
    return 0;
  }
  std::printf("%s: %s\n", out.c_str(), tessera::internal::counted(merged.events, "event").c_str());
  for (const auto& clock : merged.clocks)
    std::printf("  %s, run %lld, rank%s %s on %s: clock moved by %.1f us, right within %.1f us\n", clock.file.c_str(),
                static_cast<long long>(clock.run) + 1, clock.ranks.size() == 1 ? "" : "s",
                c10::Join(" ", clock.ranks).c_str(), clock.host.c_str(), microseconds(clock.offset_ns),
                microseconds(clock.error_ns));
  return 0;
}
