#include "core/comm/guest/memory_store.h"

#include <c10/util/StringUtil.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <utility>

#include <tessera/errors.h>
#include "core/comm/short_name_lookups.h"
#include "core/runtime/sigpipe_block.h"

namespace tessera::internal {
namespace {

// A descriptor of a file in memory.
class MemoryFile {
 public:
  explicit MemoryFile(int descriptor) : descriptor_(descriptor) {}
  MemoryFile(MemoryFile&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  MemoryFile& operator=(MemoryFile&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  ~MemoryFile() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  MemoryFile duplicate() const { return MemoryFile(::fcntl(descriptor_, F_DUPFD_CLOEXEC, 0)); }

  bool is_open() const { return descriptor_ >= 0; }
  std::string path() const { return c10::str("/proc/self/fd/", descriptor_); }
  // Identifies the file on this host: "<device> <inode>".
  std::string identity() const {
    struct stat file {};
    return ::fstat(descriptor_, &file) == 0 ? c10::str(file.st_dev, ' ', file.st_ino) : "";
  }
  // The text by which another process of the host opens it: "<process> <descriptor> <device> <inode>".
  std::string notice() const { return c10::str(::getpid(), ' ', descriptor_, ' ', identity()); }

  static MemoryFile create() { return MemoryFile(::memfd_create("tessera_store", MFD_CLOEXEC)); }
  // Opens the file of a notice. Not open if it fails or finds another file: process ids differ between PID namespaces.
  static MemoryFile open(const std::string& notice) {
    std::istringstream words(notice);
    std::string process, descriptor, device, inode;
    words >> process >> descriptor >> device >> inode;
    MemoryFile file(::open(c10::str("/proc/", process, "/fd/", descriptor).c_str(), O_RDWR | O_CLOEXEC));
    if (file.is_open() && file.identity() != device + ' ' + inode) return MemoryFile(-1);
    return file;
  }

 private:
  int descriptor_;
};

// The first base class is destroyed last: ~FileStore() opens the file.
class MemoryStore : private MemoryFile, public c10d::FileStore {
 public:
  explicit MemoryStore(MemoryFile file)
      : MemoryFile(std::move(file)), FileStore(MemoryFile::path(), /*numWorkers=*/-1) {}
  c10::intrusive_ptr<c10d::Store> clone() override { return c10::make_intrusive<MemoryStore>(duplicate()); }
};

// Returns null if not all ranks can open the file.
c10::intrusive_ptr<c10d::Store> share_memory_store(const TextExchange& exchange, const std::string& who, int rank) {
  MemoryFile file(-1);
  const auto notices = exchange_or_fail(exchange, who, [&] {
    if (rank == 0) file = MemoryFile::create();
    return file.is_open() ? file.notice() : std::string();
  });
  const auto answers = exchange_or_fail(exchange, who, [&] {
    if (rank != 0 && !notices[0].empty()) file = MemoryFile::open(notices[0]);
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
  const SigpipeBlock no_sigpipe;  // for the server's thread, which inherits the mask
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
