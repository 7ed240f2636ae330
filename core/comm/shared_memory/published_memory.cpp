#include "core/comm/shared_memory/published_memory.h"

#include <c10/util/StringUtil.h>

#include <mutex>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "core/runtime/guarded_by.h"

namespace tessera::internal {
namespace {

struct Published {
  void* data;
  uint64_t bytes;
  bool is_written;
};

std::mutex ranges_mutex;
uint64_t numbers_given TESSERA_GUARDED_BY(ranges_mutex) = 0;
std::unordered_map<uint64_t, Published>& ranges() {
  static auto* const all = new std::unordered_map<uint64_t, Published>;
  return *all;
}

}  // namespace

PublishedMemory::PublishedMemory(void* data, uint64_t bytes, bool is_written) {
  std::lock_guard lock(ranges_mutex);
  number_ = ++numbers_given;
  ranges().emplace(number_, Published{data, bytes, is_written});
}

PublishedMemory::PublishedMemory(PublishedMemory&& other) noexcept : number_(std::exchange(other.number_, 0)) {}

PublishedMemory& PublishedMemory::operator=(PublishedMemory&& other) noexcept {
  std::swap(number_, other.number_);
  return *this;
}

PublishedMemory::~PublishedMemory() {
  if (number_ == 0) return;
  std::lock_guard lock(ranges_mutex);
  ranges().erase(number_);
}

void* PublishedMemory::find(uint64_t number, uint64_t bytes, bool to_write) {
  std::lock_guard lock(ranges_mutex);
  const auto found = ranges().find(number);
  if (found == ranges().end() || found->second.bytes != bytes || found->second.is_written != to_write)
    throw std::runtime_error(c10::str("no rank of this process has published ", bytes, " bytes to be ",
                                      to_write ? "written" : "read", " under the number ", number));
  return found->second.data;
}

}  // namespace tessera::internal
