#include "core/comm/descriptors.h"

#include <c10/util/StringUtil.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <iterator>
#include <mutex>
#include <optional>
#include <system_error>
#include <utility>

#include <tessera/errors.h>

namespace tessera::internal {
namespace {

// A reserve of descriptors, for files that the program and libraries open while the ranks connect.
constexpr int64_t kReserve = 32;

int64_t open_descriptors() {
  std::error_code error;
  const std::filesystem::directory_iterator all("/proc/self/fd", error);
  return error ? 0 : std::distance(all, std::filesystem::directory_iterator());
}

std::mutex limit_mutex;
// Soft limit before and after this process raised it; null if it was not raised. Guarded by limit_mutex.
std::optional<std::pair<rlim_t, rlim_t>> raised;

bool set_soft_limit(rlimit limit, rlim_t value) {
  limit.rlim_cur = value;
  return value <= limit.rlim_max && ::setrlimit(RLIMIT_NOFILE, &limit) == 0;
}

bool raise_soft_limit(const rlimit& limit, rlim_t wanted) {
  const rlim_t before = limit.rlim_cur;
  if (!set_soft_limit(limit, wanted)) return false;
  raised = {raised && raised->second == before ? raised->first : before, wanted};
  return true;
}

bool is_null_device(int fd) {
  struct stat opened = {}, null_device = {};
  return ::fstat(fd, &opened) == 0 && ::stat("/dev/null", &null_device) == 0 && opened.st_rdev == null_device.st_rdev;
}

std::mutex standard_mutex;
std::array<bool, 3> is_opened_as_null{};  // indexed by descriptor; guarded by standard_mutex

}  // namespace

void require_descriptors(int64_t needed, const std::string& for_what, bool may_raise) {
  std::lock_guard lock(limit_mutex);
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const auto bounded = [](rlim_t value) { return static_cast<int64_t>(std::min<rlim_t>(value, INT64_MAX)); };
  const int64_t wanted = open_descriptors() + needed + kReserve;
  if (wanted <= bounded(limit.rlim_cur)) return;
  if (may_raise && raise_soft_limit(limit, static_cast<rlim_t>(wanted))) return;
  const rlim_t most = may_raise ? limit.rlim_max : limit.rlim_cur;
  throw CommError(c10::str(
      for_what, ": ", needed, " descriptors of sockets and files are needed, but this process may open ",
      std::max<int64_t>(bounded(most) - open_descriptors() - kReserve, 0), " more (", may_raise ? "hard" : "soft",
      " limit RLIMIT_NOFILE ", bounded(most), "): raise it (ulimit -", may_raise ? "H" : "S", "n)"));
}

void restore_descriptor_limit() {
  std::lock_guard lock(limit_mutex);
  rlimit limit{};
  if (!raised || ::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const auto [before, after] = *std::exchange(raised, std::nullopt);
  if (limit.rlim_cur == after) set_soft_limit(limit, before);
}

void open_standard_descriptors() {
  std::lock_guard lock(standard_mutex);
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(fd, F_GETFD) < 0 && errno == EBADF)
      is_opened_as_null[fd] = ::open("/dev/null", O_RDWR) == fd;  // open() returns the lowest free descriptor
}

void close_standard_descriptors() {
  std::lock_guard lock(standard_mutex);
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (std::exchange(is_opened_as_null[fd], false) && is_null_device(fd)) ::close(fd);
}

}  // namespace tessera::internal
