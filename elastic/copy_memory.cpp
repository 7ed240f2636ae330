#include "elastic/copy_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

namespace tessera::internal {

using nlohmann::json;

namespace {

// Returns a file in memory that cannot shrink, so that no reader faults; -1 if the system refuses it.
int create_file(int64_t bytes) {
  // A larger file would end the process (SIGXFSZ).
  if (rlimit files{}; ::getrlimit(RLIMIT_FSIZE, &files) == 0 && files.rlim_cur < static_cast<rlim_t>(bytes)) return -1;
  const int descriptor = ::memfd_create("tessera copies", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (descriptor < 0) return -1;
  if (::ftruncate(descriptor, bytes) == 0 && ::fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0)
    return descriptor;
  ::close(descriptor);
  return -1;
}

struct stat status_of(int descriptor) {
  struct stat status {};
  ::fstat(descriptor, &status);
  return status;
}

}  // namespace

CopyMemory::CopyMemory(int64_t bytes) : descriptor_(create_file(std::max<int64_t>(bytes, 1))), bytes_(bytes) {
  map(PROT_READ | PROT_WRITE);
}

CopyMemory::CopyMemory(const json& notice) : origin_(notice), bytes_(notice.at("bytes").get<int64_t>()) {
  const std::string path = "/proc/" + std::to_string(notice.at("process").get<int64_t>()) + "/fd/" +
                           std::to_string(notice.at("descriptor").get<int>());
  descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor_ < 0) throw std::system_error(errno, std::generic_category(), path);
  // In another container these numbers mean another file.
  const struct stat status = status_of(descriptor_);
  const bool is_meant = status.st_dev == notice.at("device").get<dev_t>() &&
                        status.st_ino == notice.at("file").get<ino_t>() && status.st_size >= bytes_ && bytes_ >= 0 &&
                        (::fcntl(descriptor_, F_GET_SEALS) & F_SEAL_SHRINK) != 0;
  if (is_meant) map(PROT_READ);
  ::close(std::exchange(descriptor_, -1));  // the mapping keeps the memory
  if (!is_meant) throw std::runtime_error(path + " is not the memory of a copy");
}

CopyMemory::~CopyMemory() {
  ::munmap(data_, static_cast<size_t>(std::max<int64_t>(bytes_, 1)));
  if (descriptor_ >= 0) ::close(descriptor_);
}

void CopyMemory::map(int access) {
  void* const mapped = ::mmap(nullptr, static_cast<size_t>(std::max<int64_t>(bytes_, 1)), access,
                              descriptor_ >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, descriptor_, 0);
  if (mapped == MAP_FAILED) {
    const int error = errno;
    if (descriptor_ >= 0) ::close(descriptor_);
    throw std::system_error(error, std::generic_category(), "mapping " + std::to_string(bytes_) + " bytes of a copy");
  }
  data_ = static_cast<char*>(mapped);
}

json CopyMemory::notice() const {
  if (descriptor_ < 0) return nullptr;
  const struct stat status = status_of(descriptor_);
  return {{"process", ::getpid()},
          {"descriptor", descriptor_},
          {"device", status.st_dev},
          {"file", status.st_ino},
          {"bytes", bytes_}};
}

bool CopyMemory::contains(const char* data, int64_t bytes) const {
  return data >= data_ && bytes >= 0 && bytes <= bytes_ && data - data_ <= bytes_ - bytes;
}

char* CopyMemory::reserve(int64_t bytes) {
  if (bytes > bytes_ - reserved_) throw std::out_of_range("the part is larger than its memory");
  return data_ + std::exchange(reserved_, reserved_ + bytes);
}

std::shared_ptr<CopyMemory> CopyMemories::take(int64_t bytes) {
  std::unique_ptr<CopyMemory> memory;
  std::vector<std::unique_ptr<CopyMemory>> outgrown;  // parts of another size are of another group, or come no more
  {
    const std::lock_guard lock(unused_->mutex);
    for (auto& one : unused_->all)
      if (one->bytes() != bytes)
        outgrown.push_back(std::move(one));
      else if (!memory)
        memory = std::move(one);
    std::erase(unused_->all, nullptr);
  }
  outgrown.clear();
  if (memory)
    memory->reserve_nothing();
  else
    memory = std::make_unique<CopyMemory>(bytes);
  return {memory.release(), [unused = unused_](CopyMemory* given) {
            const std::lock_guard lock(unused->mutex);
            unused->all.emplace_back(given);
          }};
}

}  // namespace tessera::internal
