#include "core/launch/process_setup.h"

#include <c10/util/StringUtil.h>

#include <mutex>
#include <vector>

#include "core/comm/descriptors.h"
#include "core/launch/shared_cores.h"
#include "core/memory/memory_cache.h"
#include "core/runtime/warn.h"

namespace tessera {
using namespace internal;
namespace {

struct Effect {
  bool ProcessSetup::*field;
  const char* name;
  void (*set)();   // null if the group itself makes the change when needed
  void (*undo)();  // null if the group itself undoes the change
  int holders = 0;
};

std::mutex effects_mutex;
// Effect::holders is guarded by effects_mutex.
Effect effects[] = {
    {&ProcessSetup::cache_memory, "cache_memory", &start_caching_memory, &stop_caching_memory},
    {&ProcessSetup::terminate_handler, "terminate_handler", &tell_when_terminated, &stop_telling_when_terminated},
    {&ProcessSetup::permit_tracing, "permit_tracing", nullptr, nullptr},  // TracerPermission applies and undoes it
    {&ProcessSetup::raise_descriptor_limit, "raise_descriptor_limit", nullptr, &restore_descriptor_limit},
    {&ProcessSetup::open_standard_descriptors, "open_standard_descriptors", &internal::open_standard_descriptors,
     &close_standard_descriptors},
    {&ProcessSetup::share_cores, "share_cores", nullptr, &stop_sharing_cores},  // init() calls share_cores()
    {&ProcessSetup::stop_signals, "stop_signals", &catch_stop_signals, &release_stop_signals},
    {&ProcessSetup::print_warnings, "print_warnings", &start_printing_warnings, &stop_printing_warnings},
};

}  // namespace

std::string ProcessSetup::describe() const {
  std::vector<const char*> names;
  for (const Effect& effect : effects)
    if (this->*effect.field) names.push_back(effect.name);
  return names.empty() ? "nothing" : c10::Join(", ", names);
}

namespace internal {

ProcessEffects::ProcessEffects(const ProcessSetup& setup) : setup_(setup) {
  std::lock_guard lock(effects_mutex);
  for (Effect& effect : effects)
    if (setup_.*effect.field && effect.holders++ == 0 && effect.set != nullptr) effect.set();
}

ProcessEffects::~ProcessEffects() {
  std::lock_guard lock(effects_mutex);
  for (Effect& effect : effects)
    if (setup_.*effect.field && --effect.holders == 0 && effect.undo != nullptr) effect.undo();
}

}  // namespace internal
}  // namespace tessera
