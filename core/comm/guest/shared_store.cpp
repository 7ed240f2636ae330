#include "core/comm/guest/shared_store.h"

#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <exception>
#include <string_view>
#include <vector>

#include "core/comm/store_client.h"
#include "core/comm/watchdog/group_news.h"

namespace tessera::internal {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

constexpr std::string_view kPart = "group/split";  // prefix of the keys of groups that were split

StorePtr keys_of(const StorePtr& store, int size, int64_t number) {
  return c10::make_intrusive<c10d::PrefixStore>(c10::str("tessera/", size, ".", number), store);
}

// Deletes the keys of earlier groups of this size, the oldest first. Stops at the first group that a rank still uses.
// Keeps the keys of groups that were split, which may outlive the group that they were split from.
void delete_left_groups(const StorePtr& store, int size, int64_t last) {
  const std::string oldest_key = c10::str("tessera/oldest/", size);
  int64_t oldest = 1 + store->add(oldest_key, 0);
  for (; oldest <= last; ++oldest) {
    const auto group = c10::make_intrusive<c10d::PrefixStore>("group", keys_of(store, size, oldest));
    const auto of_nccl = c10::make_intrusive<c10d::PrefixStore>(kNcclWatchKeys, group);
    const bool serves = serves_store(store);
    if (!GroupNews::have_all_left(*group, size, serves) && !GroupNews::have_all_left(*of_nccl, size, serves)) return;
    const std::string prefix = c10::str("tessera/", size, ".", oldest, "/");
    std::vector<std::string> keys;
    for (const std::string& key : store->listKeys())
      if (const size_t at = key.find(prefix); at != std::string::npos)
        if (key.compare(at + prefix.size(), kPart.size(), kPart) != 0) keys.push_back(key.substr(at));
    for (const std::string& key : keys) store->deleteKey(key);
    store->add(oldest_key, 1);
  }
}

}  // namespace

bool serves_store(const StorePtr& store) { return dynamic_cast<c10d::TCPStore*>(&underlying(*store)) != nullptr; }

StorePtr next_group(const StorePtr& store, int rank, int size) {
  const int64_t number = store->add(c10::str("tessera/groups/", size, "/", rank), 1);
  if (rank == 0) {
    try {
      delete_left_groups(store, size, number - 1);
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): not every store lists or deletes keys
    }
  }
  return keys_of(store, size, number);
}

}  // namespace tessera::internal
