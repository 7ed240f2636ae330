#include "offload/disk/disk_space.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>

#include "core/memory/memory_kind_scope.h"
#include "core/memory/without_data.h"

namespace tessera::internal {
namespace {

void throw_offload_error(const FileFailure& failure) {
  const std::string where = "offload directory '" + failure.path.string() + "'";
  if (failure.action == FileAction::kClaim && !failure.problem.empty())
    throw std::runtime_error(where + " " + failure.problem);
  const char* operation = "use";
  if (failure.action == FileAction::kCreate) operation = "cannot make a file";
  if (failure.action == FileAction::kClaim) operation = "cannot claim space";
  if (failure.action == FileAction::kRead) operation = failure.problem.empty() ? "read" : "read past the end";
  if (failure.action == FileAction::kWrite) operation = "write";
  throw std::runtime_error(where + ": " + operation + ": " + failure.reason());
}

}  // namespace

File offload_file(const std::string& directory) { return File::create_unnamed(directory, &throw_offload_error); }

DiskSpace::DiskSpace(const std::string& directory)
    : file_(is_without_data() ? std::nullopt : std::optional(offload_file(directory))) {}

// Uses the first free piece that is large enough. If there is none, extends the file.
int64_t DiskSpace::claim(int64_t bytes) {
  const auto piece = std::ranges::find_if(free_bytes_, [&](const auto& free) { return free.second >= bytes; });
  if (piece == free_bytes_.end()) {
    const int64_t begin = file_ ? file_->extend(bytes) : claimed_bytes_;
    claimed_bytes_ = begin + bytes;
    counted_.push_back(count_disk_bytes(bytes));
    return begin;
  }
  const auto [offset, free] = *piece;
  free_bytes_.erase(piece);
  if (free > bytes) free_bytes_.emplace(offset + bytes, free - bytes);
  return offset;
}

void DiskSpace::free(int64_t offset, int64_t bytes) {
  auto next = free_bytes_.lower_bound(offset);
  if (next != free_bytes_.end() && next->first == offset + bytes) {
    bytes += next->second;
    next = free_bytes_.erase(next);
  }
  if (next != free_bytes_.begin() && std::prev(next)->first + std::prev(next)->second == offset) {
    std::prev(next)->second += bytes;
  } else {
    free_bytes_.emplace(offset, bytes);
  }
}

}  // namespace tessera::internal
