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

// The position of a member (a file) in a zip archive, and its checksum.
struct ArchiveMember {
  int64_t begin = 0;
  int64_t bytes = 0;
  uint32_t crc32 = 0;  // 0 if not recorded (torch.serialization.set_crc32_options(False))
};

// Reads exactly `bytes` bytes at `position`. Throws on failure.
using ReadBytes = std::function<void(void* to, int64_t bytes, int64_t position)>;

// Returns the members of a zip or zip64 archive. Members must be uncompressed and unencrypted, as torch.save and
// torch.export write them. They must have unique names, be inside the archive, and not overlap. For any other file,
// throws ExportedError with a text that starts with `where`.
std::map<std::string, ArchiveMember> read_zip(const ReadBytes& read, int64_t archive_bytes, const std::string& where);

// An open archive file. Thread-safe. A read either completes or throws ExportedError that names the file. Does not map
// the file into memory, because SIGBUS would end this process if another process truncated the file.
class ArchiveFile {
 public:
  // Opens a regular file. Follows symbolic links, because caches of model hubs use them. Throws ExportedError on error.
  explicit ArchiveFile(const std::filesystem::path& path);

  int64_t bytes() const { return file_.bytes(); }
  void read(void* to, int64_t bytes, int64_t position) const { file_.read(to, bytes, position); }
  // Reads a whole member. If `is_checked`, also verifies a recorded CRC-32. If the member is damaged, throws
  // ExportedError that names the file and the member.
  void read_member(const ArchiveMember& member, const std::string& name, void* to, bool is_checked) const;
  // Verifies a member's CRC-32, if recorded, in the first call for the member. Throws ExportedError if it is damaged.
  void check_member(const ArchiveMember& member, const std::string& name);

 private:
  const File file_;
  std::mutex mutex_;
  std::set<int64_t> checked_;  // offsets of members that check_member() has verified
};

// An archive of torch.export (.pt2), which is a zip archive of JSON and raw tensors. Does not trust the file: checks
// that every member is inside the file.
class Archive {
 public:
  // Opens an archive. Throws ExportedError if the file is not an archive of torch.export.
  explicit Archive(const std::filesystem::path& path);

  const std::string& where() const { return where_; }  // the file's path, for messages
  bool has(const std::string& name) const { return members_.contains(name); }
  // Returns the member `name`, a path in the archive's top folder. Throws ExportedError if there is no such member.
  const ArchiveMember& member(const std::string& name) const;
  // Returns the bytes of a member. Throws ExportedError if there is no such member, or if its CRC-32 does not match.
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
