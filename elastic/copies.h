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

// Parts of the training state in this process's memory: its own part, and copies of other ranks' parts.

// The content of a file, in pieces of memory.
struct CopiedFile {
  struct Piece {
    std::shared_ptr<const void> owner;  // owns the memory of `data`
    const char* data = nullptr;
    int64_t begin = 0, bytes = 0;  // position in the file, and length
  };
  std::vector<Piece> pieces;
  // The blocks' checksums if send_part() sent the file, else empty. Equal blocks of successive parts share memory.
  std::vector<uint64_t> sums;
  int64_t bytes = 0;
  // Appends `count` bytes at `data` without copying them; `owner` owns them.
  void add(std::shared_ptr<const void> owner, const char* data, int64_t count);
  // Copies the `count` bytes at `position` to `data`. Throws std::out_of_range if the range exceeds the file.
  void read(void* data, int64_t count, int64_t position) const;
};
// Files are sent between hosts in blocks of this size. The last block of a file may be shorter.
inline constexpr int64_t kCopyBlockBytes = int64_t{1} << 20;
int64_t block_count(int64_t bytes);
std::string read_block(const CopiedFile& file, size_t index);

// Names one rank's part of one committed step.
struct PartName {
  int64_t generation = 0;  // number of the group
  int64_t step = 0;
  int owner = 0;  // the rank in that group that owns the part
  auto operator<=>(const PartName&) const = default;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(PartName, generation, step, owner)

struct CopiedPart {
  int world = 0;            // number of ranks of the group
  std::string description;  // the part's entries of the manifest (describe_part())
  std::map<std::string, CopiedFile> files;
  // The memories that hold the files' bytes, except headers; empty if send_part() sent the files. Unchanged tensors are
  // in a memory that successive parts share.
  std::vector<std::shared_ptr<const CopyMemory>> memories;
};

// The parts of one step that a process holds: those of the ranks in `owners`.
struct HeldStep {
  int64_t generation = 0, step = 0;
  int world = 0;
  std::vector<int> owners;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(HeldStep, generation, step, world, owners)

// The newest step of which the members together hold every part, and the holders of each part; `world` is 0 if there is
// no such step. A step of a later generation counts as newer even if its number is lower, because the later group may
// have gone back to an earlier step. In newest_complete_step(), `held` is indexed by member.
struct CompleteStep {
  int64_t generation = -1, step = -1;
  int world = 0;
  std::vector<std::vector<int>> holders;  // by owner: the members that hold its part, in ascending order
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(CompleteStep, generation, step, world, holders)
CompleteStep newest_complete_step(const std::vector<std::vector<HeldStep>>& held);

// Returns the ranks that must hold copies of the part of `rank`: `copies` ranks, or fewer if the world is too small.
// Takes a rank of each other host first. Where possible, ranks of one host get different partners. `hosts` is by rank.
std::vector<int> partners_of(int rank, const std::vector<std::string>& hosts, int copies);

// The parts that this process holds. Is thread-safe.
class CopyStore {
 public:
  void put(const PartName& name, std::shared_ptr<const CopiedPart> part);
  std::shared_ptr<const CopiedPart> find(const PartName& name) const;  // null if the part is not held
  // Returns the newest held part of an owner in a generation; null if there is none.
  std::shared_ptr<const CopiedPart> newest(int64_t generation, int owner) const;
  std::vector<HeldStep> held() const;
  // Frees the parts of all earlier steps. Must not be called before this step is complete in memory on all ranks.
  void free_before(int64_t generation, int64_t step);
  // Frees the parts of all later steps; called when the ranks go back to this step. Keeps earlier steps as a fallback
  // (until free_before()), because a part of this step may have only one holder left.
  void free_after(int64_t generation, int64_t step);
  // Returns the bytes in use. Memory that several parts share counts once.
  int64_t bytes() const;

 private:
  mutable std::mutex mutex_;
  std::map<PartName, std::shared_ptr<const CopiedPart>> parts_ TESSERA_GUARDED_BY(mutex_);
};

// Builds a file of a part from sequential writes. Copies bytes to `memory` unless they are in `memory` already, or in
// `shared`, the memory that successive parts share.
class CopiedFileWriter {
 public:
  explicit CopiedFileWriter(std::shared_ptr<CopyMemory> memory, std::shared_ptr<const CopyMemory> shared = nullptr)
      : memory_(std::move(memory)), shared_(std::move(shared)) {}
  void append(const void* data, int64_t count);
  // Returns the file: the bytes `start`, followed by the appended bytes. Must be called only once.
  CopiedFile finish(std::string_view start);

 private:
  const std::shared_ptr<CopyMemory> memory_;
  const std::shared_ptr<const CopyMemory> shared_;
  CopiedFile rest_;
};

}  // namespace tessera::internal
