#include "checkpoint/save/group_saves.h"

#include <cstdlib>
#include <exception>
#include <map>
#include <set>
#include <utility>
#include <vector>
#include "core/runtime/warn.h"

namespace tessera::internal {
namespace {

// Guards the map of saves_by_group() and the set in await_removals_at_exit().
std::mutex saves_mutex;
using SavesByGroup = std::map<std::weak_ptr<Communicator>, GroupSaves, std::owner_less<std::weak_ptr<Communicator>>>;
SavesByGroup& saves_by_group() {
  // Never destroyed, because pinned memory must not be freed after the device's library was unloaded.
  static auto& map = *new SavesByGroup;
  // Keeps a removal in flight: ~Removal() would wait for it under saves_mutex, and so block the saves of all groups.
  std::erase_if(map, [](const auto& entry) {
    const auto& [group, saves] = entry;
    return group.expired() && (!saves.removal || saves.removal->has_ended());
  });
  return map;
}

std::vector<std::shared_ptr<Removal>> removals() {
  std::vector<std::shared_ptr<Removal>> all;
  const std::lock_guard lock(saves_mutex);
  for (const auto& [group, saves] : saves_by_group())
    if (saves.removal) all.push_back(saves.removal);
  return all;
}

}  // namespace

Removal::Removal(std::function<void()> remove, std::shared_ptr<Removal> before)
    : thread_([this, remove = std::move(remove), before = std::move(before)]() mutable {
        if (before) before->join();
        before.reset();
        try {
          remove();
        } catch (const std::exception& error) {
          warn(error.what());
        }
        remove = nullptr;
        ended_ = true;
      }) {}

void Removal::join() {
  const std::lock_guard lock(mutex_);
  if (!thread_.joinable()) return;
  if (::getpid() == process_)
    thread_.join();
  else
    new (&thread_) std::thread;  // forgets the handle: in a child of fork(), another thread may have it
}

void await_removals_at_exit(const std::string& scheme) {
  static auto& schemes = *new std::set<std::string>;
  const std::lock_guard lock(saves_mutex);
  if (!schemes.insert(scheme).second) return;
  std::atexit([] {
    for (const auto& removal : removals()) removal->join();
  });
}

void with_group_saves(const std::shared_ptr<Communicator>& comm, const std::function<void(GroupSaves&)>& visit) {
  const std::lock_guard lock(saves_mutex);
  visit(saves_by_group()[comm]);
}

}  // namespace tessera::internal
