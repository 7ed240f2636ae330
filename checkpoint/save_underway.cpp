#include "tessera/checkpoint/save_underway.h"

#include <cstdlib>
#include <map>
#include <set>
#include <vector>

namespace tessera {
namespace {

// The one piece of global state of saves.
std::mutex underway_mutex;
using UnderwayByGroup = std::map<std::weak_ptr<Communicator>, Underway, std::owner_less<std::weak_ptr<Communicator>>>;
UnderwayByGroup& underway() {
  // Not destroyed, since pinned memory is not to be freed when the device's library has ended.
  static auto& map = *new UnderwayByGroup;
  std::erase_if(map, [](const auto& entry) { return entry.first.expired(); });
  return map;
}

}  // namespace

void await_removals_at_exit(const std::string& scheme) {
  static auto& schemes = *new std::set<std::string>;
  const std::lock_guard lock(underway_mutex);
  if (!schemes.insert(scheme).second) return;
  std::atexit([] {
    std::vector<std::shared_ptr<Removal>> removals;
    {
      const std::lock_guard lock(underway_mutex);
      for (const auto& [group, entry] : underway()) removals.push_back(entry.removal);
    }
    for (const auto& removal : removals)
      if (removal) removal->join();
  });
}

void with_underway(const std::shared_ptr<Communicator>& comm, const std::function<void(Underway&)>& use) {
  const std::lock_guard lock(underway_mutex);
  use(underway()[comm]);
}

}  // namespace tessera
