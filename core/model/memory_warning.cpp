#include "core/model/memory_warning.h"

#include <algorithm>
#include <cstdlib>
#include <iomanip>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "core/launch/launch_environment.h"
#include "core/memory/free_memory.h"
#include "core/memory/without_data.h"
#include "core/runtime/warn.h"

namespace tessera {

static thread_local int64_t planned_bytes = 0;

PlannedMemoryScope::PlannedMemoryScope(int64_t peak_bytes) : before_(std::exchange(planned_bytes, peak_bytes)) {}
PlannedMemoryScope::~PlannedMemoryScope() { planned_bytes = before_; }
int64_t PlannedMemoryScope::current() { return planned_bytes; }

}  // namespace tessera

namespace tessera::internal {
namespace {

std::string text_of(int64_t bytes) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(1);
  bytes >= (1 << 30) ? text << static_cast<double>(bytes) / (1 << 30) << " GiB"
                     : text << static_cast<double>(bytes) / (1 << 20) << " MiB";
  return text.str();
}

struct RanksOnHost {
  int ranks, rank;  // the number of ranks on this host, and this rank's index among them
};

// Without a launcher, assumes that all ranks are threads of this process.
RanksOnHost ranks_on_host(const Communicator& comm) {
  try {
    const auto environment = parse_launch_environment(std::getenv);
    if (environment.launched() && environment.local_world_size > 0)
      return {std::min(environment.local_world_size, comm.size()), std::max(environment.local_rank, 0)};
  } catch (const std::invalid_argument&) {  // init() reports the invalid variable
  }
  return {comm.size(), comm.rank()};
}

}  // namespace

std::string memory_warning(const std::string& who, const MemoryNeed& need, int ranks, int64_t free_bytes) {
  const int64_t planned = PlannedMemoryScope::current();
  const int64_t total = planned > 0 ? planned : need.parameter_bytes + need.gradient_bytes + need.in_use_bytes;
  const int64_t there = need.freed_bytes + (planned > 0 ? need.present_bytes : 0);
  if ((total - there) * ranks <= free_bytes) return {};
  std::string text = who + ":";
  if (planned > 0) {
    text += " a step as planned takes " + text_of(total);
  } else {
    if (need.parameter_bytes > 0) text += " parameters (" + text_of(need.parameter_bytes) + "),";
    text += " gradients (" + text_of(need.gradient_bytes) + ")";
    if (need.in_use_bytes > 0) text += " and units in use (" + text_of(need.in_use_bytes) + ")";
    text += " take " + text_of(total);
  }
  text += ranks == 1 ? " on this rank" : " on each of " + std::to_string(ranks) + " ranks that share this memory";
  text += ", of which " + text_of(free_bytes) + " are free";
  if (planned > 0)
    return text + (there > 0 ? ", and " + text_of(there * ranks) + " are taken already" : "") +
           ": tessera plan says what fits";
  if (need.freed_bytes > 0) text += ", and " + text_of(need.freed_bytes * ranks) + " will be";
  return text + ". The optimizer's state and activations come on top: tessera plan says what fits";
}

void warn_if_short_of_memory(const std::string& who, const MemoryNeed& need, const Communicator& comm) {
  if (is_without_data()) return;
  const RanksOnHost here = comm.device().is_cpu() ? ranks_on_host(comm) : RanksOnHost{1, 0};
  if (here.rank != 0) return;
  const auto free_bytes = free_memory_bytes(comm.device());
  if (!free_bytes) return;
  const std::string text =
      memory_warning(who + " on rank " + std::to_string(comm.rank()), need, here.ranks, *free_bytes);
  if (!text.empty()) {
    warn(text);
  }
}

}  // namespace tessera::internal
