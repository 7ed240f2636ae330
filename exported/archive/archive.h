#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
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

// The position of a member in a zip archive.
struct ArchiveMember {
  int64_t begin = 0;
  int64_t bytes = 0;
};

// Returns the members of a zip archive, zip64 included, that are stored uncompressed and unencrypted, as torch.save and
// torch.export write them. Otherwise throws ExportedError that starts with `where`; so too for duplicate names and for
// members that exceed the archive or overlap.
std::map<std::string, ArchiveMember> read_zip(std::string_view archive, const std::string& where);

// An archive of torch.export (.pt2): a zip of JSON and raw tensors. Untrusted: verifies that every member is inside the
// file.
class Archive {
 public:
  // Throws ExportedError if the file is not such an archive.
  explicit Archive(const std::filesystem::path& path);

  const std::string& where() const { return where_; }  // the file's name, for messages
  bool has(const std::string& name) const { return members_.contains(name); }
  // Returns a member's bytes by its name below the archive's top folder. Throws ExportedError if it does not exist.
  std::string_view member(const std::string& name) const;
  // Names of members with this prefix and suffix.
  std::vector<std::string> names(const std::string& prefix, const std::string& suffix) const;
  const std::shared_ptr<MappedFile>& file() const { return file_; }

 private:
  std::string where_;
  std::shared_ptr<MappedFile> file_;
  std::map<std::string, ArchiveMember> members_;
};

}  // namespace tessera::internal
