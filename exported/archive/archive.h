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

// Returns the members of a zip archive, zip64 included. They must be uncompressed and unencrypted, as torch.save and
// torch.export write them, with unique names, inside the archive and without overlap. Otherwise throws ExportedError
// that starts with `where`.
std::map<std::string, ArchiveMember> read_zip(const ReadBytes& read, int64_t archive_bytes, const std::string& where);

// An open archive. Reads are complete or throw ExportedError that names the file. The file is not memory-mapped: if
// another process truncated it, an access would end this process by SIGBUS. Thread-safe.
class ArchiveFile {
 public:
  // Opens a regular file; follows symbolic links, of which the caches of model hubs consist. Throws ExportedError.
  explicit ArchiveFile(const std::filesystem::path& path);

  int64_t bytes() const { return file_.bytes(); }
  void read(void* to, int64_t bytes, int64_t position) const { file_.read(to, bytes, position); }
  // Reads a whole member, and compares it with its CRC-32 if `is_checked`. Throws ExportedError that names the member
  // if it is damaged.
  void read_member(const ArchiveMember& member, const std::string& name, void* to, bool is_checked) const;
  // Reads a whole member and compares it with its CRC-32, once.
  void check_member(const ArchiveMember& member, const std::string& name);

 private:
  const File file_;
  std::mutex mutex_;
  std::set<int64_t> checked_;  // beginnings
};

// An archive of torch.export (.pt2): a zip of JSON and raw tensors. Untrusted: verifies that every member is inside the
// file.
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
  // Names of members with this prefix and suffix.
  std::vector<std::string> names(const std::string& prefix, const std::string& suffix) const;
  const std::shared_ptr<ArchiveFile>& file() const { return file_; }

 private:
  std::string where_;
  std::shared_ptr<ArchiveFile> file_;
  std::map<std::string, ArchiveMember> members_;
};

}  // namespace tessera::internal
