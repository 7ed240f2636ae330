#include "core/comm/guest/memory_store.h"

#include <c10/util/StringUtil.h>
#include <fcntl.h>
#include <sys/random.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <utility>

#include <tessera/errors.h>
#include "core/comm/short_name_lookups.h"
#include "core/memory/memory_file.h"
#include "core/runtime/sigpipe_block.h"

namespace tessera::internal {
namespace {

// MemoryFile is the first base class, so that it is destroyed last: ~FileStore() still opens the file.
class MemoryStore : private MemoryFile, public c10d::FileStore {
 public:
  explicit MemoryStore(MemoryFile file)
      : MemoryFile(std::move(file)), FileStore(MemoryFile::path(), /*numWorkers=*/-1) {}
  c10::intrusive_ptr<c10d::Store> clone() override { return c10::make_intrusive<MemoryStore>(duplicate()); }
};

// Returns a store in a file in memory, or null if not all ranks can open the file.
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

}  // namespace

MadeStore make_store(const TextExchange& exchange, const std::string& who, int rank, bool one_host,
                     const std::string& address, std::chrono::milliseconds timeout) {
  if (one_host)
    if (auto store = share_memory_store(exchange, who, rank)) return {std::move(store)};
  const SigpipeBlock no_sigpipe;  // blocks SIGPIPE also in the server's thread, which inherits the mask
  const ShortNameLookups short_lookups;
  c10::intrusive_ptr<c10d::Store> store;
  const auto open_store = [&](const std::string& host, uint16_t port) {
    c10d::TCPStoreOptions options;
    options.port = port;
    options.isServer = rank == 0;
    options.waitWorkers = false;
    options.timeout = timeout;
    auto made = c10::make_intrusive<c10d::TCPStore>(host, options);
    store = made;
    return made->getPort();
  };
  const auto notices = exchange_or_fail(exchange, who, [&]() -> std::string {
    uint64_t token = 0;
    if (rank != 0) return "";
    if (::getrandom(&token, sizeof(token), 0) != sizeof(token)) token = 1;
    return c10::str(open_store("127.0.0.1", 0), ' ', token);
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

}  // namespace tessera::internal
