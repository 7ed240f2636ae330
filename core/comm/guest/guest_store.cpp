#include "core/comm/guest/guest_store.h"

#include <c10/util/StringUtil.h>
#include <fcntl.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <sstream>
#include <string_view>
#include <utility>
#include <vector>

#include <tessera/errors.h>
#include "core/comm/store_client.h"
#include "core/comm/watchdog/group_news.h"
#include "core/memory/memory_file.h"
#include "core/runtime/host.h"

namespace tessera::internal {
namespace {

// MemoryFile is the first base class, so that it is destroyed last: ~FileStore() still opens the file.
class MemoryStore : private MemoryFile, public c10d::FileStore {
 public:
  explicit MemoryStore(MemoryFile file)
      : MemoryFile(std::move(file)), FileStore(MemoryFile::path(), /*numWorkers=*/-1) {}
  c10::intrusive_ptr<c10d::Store> clone() override { return c10::make_intrusive<MemoryStore>(duplicate()); }
};

// Returns a store in a memory file, or null if not all ranks can open the file.
c10::intrusive_ptr<c10d::Store> share_memory_store(const TextExchange& exchange, const std::string& who, int rank) {
  MemoryFile file;
  const auto notices = exchange_or_fail(exchange, who, [&] {
    if (rank == 0) file = MemoryFile::create("tessera_store");
    return file.is_open() ? file.notice() : std::string();
  });
  const auto answers = exchange_or_fail(exchange, who, [&] {
    if (rank != 0 && !notices[0].empty()) file = MemoryFile::open(notices[0], O_RDWR);
    return std::string(file.is_open() ? "yes" : "no");
  });
  if (std::ranges::count(answers, "yes") != std::ssize(answers)) return nullptr;
  return c10::make_intrusive<MemoryStore>(std::move(file));
}

using StorePtr = c10::intrusive_ptr<c10d::Store>;

constexpr std::string_view kPart = "group/split";  // prefix of the keys of parts of a group

StorePtr keys_of(const StorePtr& store, int size, int64_t number) {
  return c10::make_intrusive<c10d::PrefixStore>(c10::str("tessera/", size, ".", number), store);
}

// Deletes the keys of earlier groups of this size, the oldest first. Stops at the first group that a rank still uses.
// Keeps the keys of the parts that split() made of these groups, because a part may outlive its group.
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

MadeStore make_store(const TextExchange& exchange, const std::string& who, int rank, bool one_host,
                     const std::string& address, std::chrono::milliseconds timeout) {
  if (one_host)
    if (auto store = share_memory_store(exchange, who, rank)) return {std::move(store)};
  c10::intrusive_ptr<c10d::Store> store;
  const auto open_store = [&](const std::string& host, uint16_t port) {
    c10d::TCPStoreOptions options;
    options.port = port;
    options.isServer = rank == 0;
    options.timeout = timeout;
    auto made = open_tcp_store(host, options);
    store = made;
    return made->getPort();
  };
  const auto notices = exchange_or_fail(exchange, who, [&]() -> std::string {
    return rank == 0 ? c10::str(open_store("127.0.0.1", 0), ' ', random_bits()) : "";
  });
  uint16_t port = 0;
  std::string token;
  std::istringstream(notices[0]) >> port >> token;
  exchange_or_fail(exchange, who, [&]() -> std::string {
    if (rank != 0) open_store(address, port);
    return "";
  });
  return {c10::make_intrusive<c10d::PrefixStore>(token, store), rank == 0};
}

bool serves_store(const StorePtr& store) { return dynamic_cast<c10d::TCPStore*>(&underlying(*store)) != nullptr; }

StorePtr next_group(const StorePtr& store, int rank, int size) {
  const int64_t number = store->add(c10::str("tessera/groups/", size, "/", rank), 1);
  if (rank == 0) {
    try {
      delete_left_groups(store, size, number - 1);
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the keys stay in a store that cannot list them
    }
  }
  return keys_of(store, size, number);
}

}  // namespace tessera::internal
