#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera::internal {

// A file's bytes in memory, paged in by the kernel. A write changes this process's copy of the page, never the file.
// Keeps no file descriptor open.
class MappedFile {
 public:
  // Maps a regular file; follows symbolic links, of which the caches of model hubs consist. Throws ExportedError.
  static std::shared_ptr<MappedFile> open(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  MappedFile(char* data, int64_t bytes) : data_(data), bytes_(bytes) {}
  char* const data_;
  const int64_t bytes_;
};

// The position of a member in a zip archive, and its checksum.
struct ArchiveMember {
  int64_t begin = 0;
  int64_t bytes = 0;
  uint32_t crc32 = 0;  // 0: not recorded (torch.serialization.set_crc32_options(False))
};

// Returns the members of a zip archive, zip64 included, that are stored uncompressed and unencrypted, as torch.save and
// torch.export write them. Otherwise throws ExportedError that starts with `where`; so too for duplicate names and for
// members that exceed the archive or overlap.
std::map<std::string, ArchiveMember> read_zip(std::string_view archive, const std::string& where);

// Compares members of an archive with their CRC-32, each once. Thread-safe.
class MemberChecks {
 public:
  explicit MemberChecks(std::shared_ptr<MappedFile> file) : file_(std::move(file)) {}

  // Reads the whole member. Throws ExportedError that names it if it is damaged.
  void check(const ArchiveMember& member, const std::string& name);

 private:
  const std::shared_ptr<MappedFile> file_;
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
  // Returns the bytes of a member, checked.
  std::string_view text(const std::string& name) const;
  // Names of members with this prefix and suffix.
  std::vector<std::string> names(const std::string& prefix, const std::string& suffix) const;
  const std::shared_ptr<MappedFile>& file() const { return file_; }
  const std::shared_ptr<MemberChecks>& checks() const { return checks_; }

 private:
  std::string where_;
  std::shared_ptr<MappedFile> file_;
  std::shared_ptr<MemberChecks> checks_;
  std::map<std::string, ArchiveMember> members_;
};

}  // namespace tessera::internal
