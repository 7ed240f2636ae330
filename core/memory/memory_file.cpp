#include "core/memory/memory_file.h"

#include <c10/util/StringUtil.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <sstream>

namespace tessera::internal {

MemoryFile::~MemoryFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

MemoryFile MemoryFile::create(const char* name) { return MemoryFile(::memfd_create(name, MFD_CLOEXEC)); }

MemoryFile MemoryFile::create_fixed(const char* name, int64_t bytes) {
  // A call of ftruncate() beyond this limit would end the process by SIGXFSZ.
  if (rlimit files{}; ::getrlimit(RLIMIT_FSIZE, &files) == 0 && files.rlim_cur < static_cast<rlim_t>(bytes))
    return MemoryFile();
  MemoryFile file(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const bool is_fixed = file.is_open() && ::ftruncate(file.descriptor_, bytes) == 0 &&
                        ::fcntl(file.descriptor_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0;
  return is_fixed ? std::move(file) : MemoryFile();
}

MemoryFile MemoryFile::open(const std::string& notice, int flags) {
  std::istringstream words(notice);
  std::string process, descriptor, device, inode;
  words >> process >> descriptor >> device >> inode;
  MemoryFile file(::open(c10::str("/proc/", process, "/fd/", descriptor).c_str(), flags | O_CLOEXEC));
  return file.is_open() && file.identity() == device + ' ' + inode ? std::move(file) : MemoryFile();
}

MemoryFile MemoryFile::duplicate() const { return MemoryFile(::fcntl(descriptor_, F_DUPFD_CLOEXEC, 0)); }

bool MemoryFile::is_fixed_at(int64_t bytes) const {
  struct stat file {};
  return ::fstat(descriptor_, &file) == 0 && file.st_size >= bytes &&
         (::fcntl(descriptor_, F_GET_SEALS) & F_SEAL_SHRINK) != 0;
}

std::string MemoryFile::identity() const {
  struct stat file {};
  return ::fstat(descriptor_, &file) == 0 ? c10::str(file.st_dev, ' ', file.st_ino) : "";
}

std::string MemoryFile::notice() const { return c10::str(::getpid(), ' ', descriptor_, ' ', identity()); }

}  // namespace tessera::internal
