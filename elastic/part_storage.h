#pragma once

#include <chrono>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "checkpoint/storage/storage.h"
#include "elastic/copies.h"
#include "elastic/peer_link.h"

namespace tessera::internal {

// Presents the parts of one step as the folder of a checkpoint, "copies://<name>". Rank files are written to this
// process's memory, and read from that memory and from other members. The code of checkpoint/ can use the path while
// this object exists. Several objects may exist at once.
class PartFolder {
 public:
  // Creates a folder to write one part to `memory`. `shared` holds some of the part's bytes already; null if none.
  PartFolder(std::shared_ptr<CopyMemory> memory, std::shared_ptr<const CopyMemory> shared);
  // Creates a folder to read a step, from `own` if possible. `holders`: by owner, the members that hold its part.
  PartFolder(const CopyStore& own, std::string own_id, int64_t generation, int64_t step,
             std::vector<std::vector<Member>> holders, std::chrono::milliseconds patience);
  ~PartFolder();
  PartFolder(const PartFolder&) = delete;
  PartFolder& operator=(const PartFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  // Returns the files that were written, and removes them from this folder.
  std::map<std::string, CopiedFile> take_files();

  // The storage calls the functions below. They are thread-safe, and throw a std::exception on failure.
  void add_file(const std::string& name, CopiedFile file);
  CopiedFileWriter writer() const { return CopiedFileWriter(memory_, shared_); }
  int64_t bytes_of(const std::string& name) const;
  void read(const std::string& name, void* data, int64_t bytes, int64_t position) const;

 private:
  // Registers this folder with the storage. Returns its path.
  std::filesystem::path enter();
  PartName part_of(const std::string& file) const;
  // Asks the holders in order, and returns the first answer. Throws std::runtime_error if no holder answers.
  PeerMessage ask_holders(const std::string& file, nlohmann::json fields) const;

  const std::shared_ptr<CopyMemory> memory_;
  const std::shared_ptr<const CopyMemory> shared_;
  const CopyStore* own_ = nullptr;
  const std::string own_id_;
  const int64_t generation_ = 0, step_ = 0;
  const std::vector<std::vector<Member>> holders_;
  const std::chrono::milliseconds patience_{0};
  const std::filesystem::path path_;
  mutable std::mutex mutex_;
  std::map<std::string, CopiedFile> files_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera::internal
