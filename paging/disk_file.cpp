#include "tessera/paging/disk_file.h"

#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace tessera {
namespace {

// Without a name from the start where the file system can; else the name goes at once.
int open_nameless(const std::string& directory, int flags) {
  const int descriptor = ::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | flags, 0600);
  if (descriptor >= 0 || (errno != EOPNOTSUPP && errno != EISDIR)) return descriptor;
  std::string name = directory + "/tessera-XXXXXX";
  const int named = ::mkostemp(name.data(), O_CLOEXEC | flags);
  if (named >= 0) ::unlink(name.c_str());
  return named;
}

}  // namespace

DiskFile::DiskFile(std::string directory) : directory_(std::move(directory)) {
  descriptor_ = open_nameless(directory_, O_DIRECT);
  if (descriptor_ < 0 && errno == EINVAL) {  // tmpfs and others without direct access
    is_direct_ = false;
    descriptor_ = open_nameless(directory_, 0);
  }
  if (descriptor_ < 0) fail("cannot make a file", errno);
}

DiskFile::~DiskFile() { ::close(descriptor_); }

void DiskFile::fail(const char* operation, int error) const {
  throw std::runtime_error("offload directory '" + directory_ + "': " + operation + ": " + std::strerror(error));
}

int64_t DiskFile::extend(int64_t bytes) {
  if (bytes % kBlockBytes != 0)
    throw std::logic_error("DiskFile::extend: " + std::to_string(bytes) + " bytes are no whole blocks");
  if (bytes > 0) {
    struct statvfs room {};
    const int64_t free_bytes =
        ::fstatvfs(descriptor_, &room) == 0 ? static_cast<int64_t>(room.f_bavail * room.f_frsize) : INT64_MAX;
    // Asked first: what cannot be had in full is claimed as far as it goes, and others would miss it.
    const int error = free_bytes < bytes ? ENOSPC : ::posix_fallocate(descriptor_, bytes_, bytes);
    if (error == ENOSPC || error == EFBIG || error == EDQUOT) {
      (void)!::ftruncate(descriptor_, bytes_);
      throw std::runtime_error("offload directory '" + directory_ + "' has no room: " + std::to_string(bytes) +
                               " bytes more asked for, " + std::to_string(bytes_) + " in use, " +
                               std::to_string(free_bytes) + " free (" + std::strerror(error) + ")");
    }
    if (error != 0) fail("cannot claim space", error);
  }
  const int64_t begin = bytes_;
  bytes_ += bytes;
  return begin;
}

void DiskFile::read(void* to, int64_t bytes, int64_t offset) const {
  for (int64_t done = 0; done < bytes;) {
    const ssize_t count = ::pread(descriptor_, static_cast<char*>(to) + done, bytes - done, offset + done);
    if (count > 0)
      done += count;
    else if (count == 0)
      fail("read past the end", EIO);
    else if (errno != EINTR)
      fail("read", errno);
  }
}

void DiskFile::write(const void* from, int64_t bytes, int64_t offset) const {
  for (int64_t done = 0; done < bytes;) {
    const ssize_t count = ::pwrite(descriptor_, static_cast<const char*>(from) + done, bytes - done, offset + done);
    if (count >= 0)
      done += count;
    else if (errno != EINTR)
      fail("write", errno);
  }
}

}  // namespace tessera
