#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "core/runtime/file.h"

namespace tessera::internal {

// The position of a member in a zip archive, and its checksum.
struct ArchiveMember {
  int64_t begin = 0;
  int64_t bytes = 0;
  uint32_t crc32 = 0;  // 0: not recorded (torch.serialization.set_crc32_options(False))
};

// Reads exactly `bytes` bytes at `position`, or throws.
using ReadBytes = std::function<void(void* to, int64_t bytes, int64_t position)>;

// Returns the members of a zip archive (or zip64). Members must be uncompressed and unencrypted, as torch.save and
// torch.export write them. They must have unique names, be inside the archive, and not overlap. Otherwise throws
// ExportedError, whose text starts with `where`.
std::map<std::string, ArchiveMember> read_zip(const ReadBytes& read, int64_t archive_bytes, const std::string& where);

// An open archive. Reads are complete or throw ExportedError that names the file. The file is not memory-mapped: if
// another process truncated it, an access would end this process by SIGBUS. Is thread-safe.
class ArchiveFile {
 public:
  // Opens a regular file. Follows symbolic links, because caches of model hubs use them. Throws ExportedError.
  explicit ArchiveFile(const std::filesystem::path& path);

  int64_t bytes() const { return file_.bytes(); }
  void read(void* to, int64_t bytes, int64_t position) const { file_.read(to, bytes, position); }
  // Reads a whole member, and compares it with its CRC-32 if `is_checked`. Throws ExportedError that names the member
  // if it is damaged.
  void read_member(const ArchiveMember& member, const std::string& name, void* to, bool is_checked) const;
  // Compares a whole member with its CRC-32, unless an earlier call did. Throws ExportedError if it is damaged.
  void check_member(const ArchiveMember& member, const std::string& name);

 private:
  const File file_;
  std::mutex mutex_;
  std::set<int64_t> checked_;  // offsets of members that check_member() has compared
};

// An archive of torch.export (.pt2): a zip archive of JSON and raw tensors. The file is not trusted: verifies that
// every member is inside it.
class Archive {
 public:
  // Throws ExportedError if the file is not such an archive.
  explicit Archive(const std::filesystem::path& path);

  const std::string& where() const { return where_; }  // the file's name, for messages
  bool has(const std::string& name) const { return members_.contains(name); }
  // Returns a member by its name below the archive's top folder. Throws ExportedError if it does not exist.
  const ArchiveMember& member(const std::string& name) const;
  // Returns the bytes of a member. Throws ExportedError if its CRC-32 does not match.
  std::string text(const std::string& name) const;
  // Returns the names of members with this prefix and suffix.
  std::vector<std::string> names(const std::string& prefix, const std::string& suffix) const;
  const std::shared_ptr<ArchiveFile>& file() const { return file_; }

 private:
  std::string where_;
  std::shared_ptr<ArchiveFile> file_;
  std::map<std::string, ArchiveMember> members_;
};

}  // namespace tessera::internal
