#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/runtime/guarded_by.h"
#include "elastic/copy_memory.h"

namespace tessera::internal {

// Parts of the training state in this process's memory: its own, and copies of other ranks'.

// A file in pieces of memory.
struct CopiedFile {
  struct Piece {
    std::shared_ptr<const void> owner;  // of the memory
    const char* data = nullptr;
    int64_t begin = 0, bytes = 0;  // of the file
  };
  std::vector<Piece> pieces;
  // Checksums, if the pieces are blocks that another host has sent. Equal blocks of successive steps share memory.
  std::vector<uint64_t> sums;
  int64_t bytes = 0;
  // Appends bytes of an owner's memory.
  void add(std::shared_ptr<const void> owner, const char* data, int64_t count);
  // Copies a range. Throws std::out_of_range beyond the end.
  void read(void* data, int64_t count, int64_t position) const;
};
// Hosts send each other files in blocks of this size, the last of which may be shorter.
inline constexpr int64_t kCopyBlockBytes = int64_t{1} << 20;
int64_t block_count(int64_t bytes);
// Returns the bytes of a block.
std::string read_block(const CopiedFile& file, size_t index);

// One rank's part of one committed step.
struct PartName {
  int64_t generation = 0;  // of the group
  int64_t step = 0;
  int owner = 0;  // the rank in that group
  auto operator<=>(const PartName&) const = default;
};
struct CopiedPart {
  int world = 0;            // the size of the group
  std::string description;  // its entries of the manifest (describe_part())
  std::map<std::string, CopiedFile> files;
  // Have most bytes of the files, unless another host has sent them. Successive parts share one, with the unchanged
  // tensors.
  std::vector<std::shared_ptr<const CopyMemory>> memories;
};

// The parts of one step that a process holds.
struct HeldStep {
  int64_t generation = 0, step = 0;
  int world = 0;
  std::vector<int> owners;
};
nlohmann::json to_json(const std::vector<HeldStep>& held);
std::vector<HeldStep> held_from_json(const nlohmann::json& entries);

// The newest step of which the members hold every part, and the members that hold each one. `held` is by member. Null
// members hold nothing. Returns a world of 0 if there is none. A later generation is newer at any step: the steps of an
// earlier one that were not continued are void.
struct CompleteStep {
  int64_t generation = -1, step = -1;
  int world = 0;
  std::vector<std::vector<int>> holders;  // by owner: members in ascending order
};
CompleteStep newest_complete_step(const std::vector<std::vector<HeldStep>>& held);

// The ranks that hold copies of this rank's part, given the host of each rank: `copies` different ones, on other hosts
// while there are any, so that each rank of a host has its own partner. Returns fewer if the world is too small.
std::vector<int> partners_of(int rank, const std::vector<std::string>& hosts, int copies);

// Thread-safe.
class CopyStore {
 public:
  void put(const PartName& name, std::shared_ptr<const CopiedPart> part);
  std::shared_ptr<const CopiedPart> find(const PartName& name) const;  // null if it is not held
  // The newest held part of an owner in a generation; null if there is none.
  std::shared_ptr<const CopiedPart> newest(int64_t generation, int owner) const;
  std::vector<HeldStep> held() const;
  // Frees the parts of all steps before this one, which is known to be complete.
  void free_before(int64_t generation, int64_t step);
  // Frees the parts of all steps after this one, from which the ranks go on. Older ones stay until a copy of the new
  // group is complete, because the chosen step may have one holder of a part left.
  void free_after(int64_t generation, int64_t step);
  // The bytes of distinct memory.
  int64_t bytes() const;

 private:
  mutable std::mutex mutex_;
  std::map<PartName, std::shared_ptr<const CopiedPart>> parts_ TESSERA_GUARDED_BY(mutex_);
};

// Builds a file in a part's memory from sequential writes. Bytes that are there, or in memory that is shared with other
// parts, are not copied.
class CopiedFileWriter {
 public:
  explicit CopiedFileWriter(std::shared_ptr<CopyMemory> memory, std::shared_ptr<const CopyMemory> shared = nullptr)
      : memory_(std::move(memory)), shared_(std::move(shared)) {}
  void append(const void* data, int64_t count);
  // Adds the first bytes, which were left out.
  CopiedFile finish(std::string_view start);

 private:
  const std::shared_ptr<CopyMemory> memory_;
  const std::shared_ptr<const CopyMemory> shared_;
  CopiedFile rest_;
};

}  // namespace tessera::internal
