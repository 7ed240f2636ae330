#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::internal {

// A file's bytes in memory as the kernel pages them in. Writing to them changes this process's copy of the page, never
// the file. Keeps nothing open.
class MappedFile {
 public:
  // Maps a regular file, following symbolic links (the caches of model hubs are made of them). Throws ExportedError.
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

// Where a member of a zip archive lies in it.
struct ArchiveMember {
  int64_t begin = 0;
  int64_t bytes = 0;
};

// The members of a zip archive whose bytes are stored as they are, neither compressed nor encrypted, as torch.save and
// torch.export write them; zip64 too. Throws ExportedError, beginning with `where`, for anything else, for two members
// of one name and for members that reach beyond the archive or share bytes.
std::map<std::string, ArchiveMember> read_zip(std::string_view archive, const std::string& where);

// An archive of torch.export (.pt2): a zip of JSON and raw tensors. What it says about itself is not believed: every
// member lies inside the file.
class Archive {
 public:
  // Throws ExportedError if it is not such an archive.
  explicit Archive(const std::filesystem::path& path);

  const std::string& where() const { return where_; }  // the file's name, for messages
  bool has(const std::string& name) const { return members_.contains(name); }
  // A member's bytes, by its name below the archive's top folder. Throws ExportedError if there is none.
  std::string_view member(const std::string& name) const;
  // Names of members that begin and end so.
  std::vector<std::string> names(const std::string& prefix, const std::string& suffix) const;
  const std::shared_ptr<MappedFile>& file() const { return file_; }

 private:
  std::string where_;
  std::shared_ptr<MappedFile> file_;
  std::map<std::string, ArchiveMember> members_;
};

}  // namespace tessera::internal
