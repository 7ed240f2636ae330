#include "core/comm/descriptors.h"

#include <c10/util/StringUtil.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <iterator>
#include <system_error>

#include <tessera/errors.h>

namespace tessera::internal {
namespace {

// A reserve for files that the program and libraries open meanwhile.
constexpr int64_t kReserve = 32;

int64_t open_descriptors() {
  std::error_code error;
  const std::filesystem::directory_iterator all("/proc/self/fd", error);
  return error ? 0 : std::distance(all, std::filesystem::directory_iterator());
}

}  // namespace

void require_descriptors(int64_t needed, const std::string& for_what) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const auto bounded = [](rlim_t value) { return static_cast<int64_t>(std::min<rlim_t>(value, INT64_MAX)); };
  const int64_t wanted = open_descriptors() + needed + kReserve;
  if (wanted <= bounded(limit.rlim_cur)) return;
  const rlim_t before = limit.rlim_cur;
  limit.rlim_cur = limit.rlim_max == RLIM_INFINITY ? static_cast<rlim_t>(wanted)
                                                   : std::min(static_cast<rlim_t>(wanted), limit.rlim_max);
  if (limit.rlim_cur > before && ::setrlimit(RLIMIT_NOFILE, &limit) == 0 && bounded(limit.rlim_cur) >= wanted) return;
  throw CommError(c10::str(for_what, ": ", needed,
                           " descriptors of sockets and files are needed, but this process may open ",
                           std::max<int64_t>(bounded(limit.rlim_max) - open_descriptors() - kReserve, 0),
                           " more (hard limit RLIMIT_NOFILE ", bounded(limit.rlim_max), "): raise it (ulimit -Hn)"));
}

void open_standard_descriptors() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(fd, F_GETFD) < 0 && errno == EBADF) ::open("/dev/null", O_RDWR);  // open() takes the lowest free number
}

}  // namespace tessera::internal
