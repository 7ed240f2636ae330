#include "elastic/copy_memory.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

namespace tessera::internal {

using nlohmann::json;

CopyMemory::CopyMemory(int64_t bytes)
    : bytes_(bytes), file_(MemoryFile::create_fixed("tessera copies", std::max<int64_t>(bytes, 1))) {
  map(file_, PROT_READ | PROT_WRITE);
}

CopyMemory::CopyMemory(const json& notice) : origin_(notice), bytes_(notice.at("bytes").get<int64_t>()) {
  const auto text = notice.at("file").get<std::string>();
  const MemoryFile file = MemoryFile::open(text, O_RDONLY);  // closed at the end, because the mapping keeps the memory
  if (!file.is_open() || bytes_ < 0 || !file.is_fixed_at(bytes_))
    throw std::runtime_error("'" + text + "' is not the memory of a copy");
  map(file, PROT_READ);
}

CopyMemory::~CopyMemory() { ::munmap(data_, static_cast<size_t>(std::max<int64_t>(bytes_, 1))); }

void CopyMemory::map(const MemoryFile& file, int access) {
  void* const mapped = ::mmap(nullptr, static_cast<size_t>(std::max<int64_t>(bytes_, 1)), access,
                              file.is_open() ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, file.descriptor(), 0);
  if (mapped == MAP_FAILED)
    throw std::system_error(errno, std::generic_category(), "mapping " + std::to_string(bytes_) + " bytes of a copy");
  data_ = static_cast<char*>(mapped);
}

json CopyMemory::notice() const {
  if (!file_.is_open()) return nullptr;
  return {{"file", file_.notice()}, {"bytes", bytes_}};
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
  std::vector<std::unique_ptr<CopyMemory>> outgrown;  // memory of other sizes, which the group no longer needs
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
