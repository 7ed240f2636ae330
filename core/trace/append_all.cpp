#include "core/trace/append_all.h"

#include <unistd.h>

#include <cerrno>

namespace tessera::internal {

Appended append_all(int descriptor, std::string_view bytes, int64_t before_bytes) noexcept {
  Appended appended;
  size_t done = 0;
  while (done < bytes.size() && appended.error_number == 0) {
    const ssize_t written = ::write(descriptor, bytes.data() + done, bytes.size() - done);
    if (written > 0)
      done += static_cast<size_t>(written);
    else if (written == 0)
      appended.error_number = ENOSPC;
    else if (errno != EINTR)
      appended.error_number = errno;
  }
  if (appended.error_number != 0) appended.is_whole = done == 0 || ::ftruncate(descriptor, before_bytes) == 0;
  return appended;
}

}  // namespace tessera::internal
