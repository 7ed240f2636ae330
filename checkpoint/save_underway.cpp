#include "tessera/checkpoint/save_underway.h"

#include <map>

namespace tessera {
namespace {

// The one piece of global state of saves.
std::mutex underway_mutex;
using UnderwayByGroup = std::map<std::weak_ptr<Communicator>, Underway, std::owner_less<std::weak_ptr<Communicator>>>;
UnderwayByGroup& underway() {
  // Not destroyed, since pinned memory is not to be freed when the device's library has ended.
  static auto& map = *new UnderwayByGroup;
  static const struct AtExit {
    ~AtExit() {
      for (const auto& [group, entry] : map)
        if (entry.removal) entry.removal->join();
    }
  } at_exit;
  std::erase_if(map, [](const auto& entry) { return entry.first.expired(); });
  return map;
}

}  // namespace

void with_underway(const std::shared_ptr<Communicator>& comm, const std::function<void(Underway&)>& use) {
  const std::lock_guard lock(underway_mutex);
  use(underway()[comm]);
}

}  // namespace tessera
