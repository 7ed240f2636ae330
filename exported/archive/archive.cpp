#include "exported/archive/archive.h"

#include <algorithm>
#include <string_view>
#include <system_error>
#include <utility>

#include <tessera/errors.h>
#include "core/runtime/crc32.h"
#include "core/runtime/lfs_pointer.h"

namespace tessera::internal {

// ---- zip ----------------------------------------------------------------------------------------
// PKWARE's APPNOTE.TXT describes the format in sections 4.3 and 4.5.3.

namespace {

constexpr uint32_t kLocalHeader = 0x04034b50, kCentralHeader = 0x02014b50, kEnd = 0x06054b50, kEnd64 = 0x06064b50,
                   kLocator64 = 0x07064b50;
constexpr size_t kLocalHeaderBytes = 30, kCentralHeaderBytes = 46, kEndBytes = 22, kEnd64Bytes = 56,
                 kLocator64Bytes = 20, kMaxCommentBytes = 65535;
constexpr uint64_t kMaxMembers = 1'000'000;

// Reads numbers and byte ranges at offsets of an archive. Throws if the archive is too short.
class ZipReader {
 public:
  ZipReader(const ReadBytes& read, int64_t bytes, const std::string& where)
      : read_(read), bytes_(static_cast<uint64_t>(bytes)), where_(where) {}

  template <class Number>
  Number number(uint64_t at) {
    return little_endian<Number>(part(at, sizeof(Number)));
  }
  // Returns `count` bytes at offset `at`. The view is valid until the next read.
  std::string_view part(uint64_t at, uint64_t count) {
    require(at, count);
    if (at < window_begin_ || at + count > window_begin_ + window_.size()) {
      window_.resize(std::min(std::max(count, kWindowBytes), bytes_ - at));
      window_begin_ = at;
      read_(window_.data(), std::ssize(window_), static_cast<int64_t>(at));
    }
    return std::string_view(window_).substr(at - window_begin_, count);
  }
  // Throws if the archive is too short to contain these bytes.
  void require(uint64_t at, uint64_t count) const {
    if (at > bytes_ || count > bytes_ - at) refuse("it ends early: it is truncated or damaged");
  }
  template <class Number>
  static Number little_endian(std::string_view bytes) {
    Number value = 0;
    for (size_t i = sizeof(Number); i-- > 0;)
      value = static_cast<Number>(value << 8 | static_cast<unsigned char>(bytes[i]));
    return value;
  }
  uint64_t bytes() const { return bytes_; }
  [[noreturn]] void refuse(const std::string& reason) const { throw ExportedError(where_ + ": " + reason); }

 private:
  static constexpr uint64_t kWindowBytes = 4096;

  const ReadBytes& read_;
  const uint64_t bytes_;
  const std::string& where_;
  std::string window_;
  uint64_t window_begin_ = 0;
};

struct Directory {
  uint64_t begin = 0, bytes = 0, members = 0;
};

Directory find_directory(ZipReader& zip) {
  if (zip.bytes() < kEndBytes) zip.refuse("it is too short to be a zip archive");
  uint64_t end = zip.bytes() - kEndBytes;
  const uint64_t first = end > kMaxCommentBytes ? end - kMaxCommentBytes : 0;
  zip.part(first, zip.bytes() - first);  // reads the end of the archive in one piece
  while (zip.number<uint32_t>(end) != kEnd) {
    if (end == first) zip.refuse("it is not a zip archive, or is truncated: it has no end of a directory");
    --end;
  }
  Directory directory{zip.number<uint32_t>(end + 16), zip.number<uint32_t>(end + 12), zip.number<uint16_t>(end + 10)};
  if (end >= kLocator64Bytes && zip.number<uint32_t>(end - kLocator64Bytes) == kLocator64) {
    const auto end64 = zip.number<uint64_t>(end - kLocator64Bytes + 8);
    if (zip.part(end64, kEnd64Bytes).empty() || zip.number<uint32_t>(end64) != kEnd64)
      zip.refuse("its zip64 directory is damaged");
    directory = {zip.number<uint64_t>(end64 + 48), zip.number<uint64_t>(end64 + 40), zip.number<uint64_t>(end64 + 32)};
  }
  if (directory.members > kMaxMembers) zip.refuse("it has " + std::to_string(directory.members) + " members");
  zip.require(directory.begin, directory.bytes);
  return directory;
}

struct CentralEntry {
  std::string name;
  uint64_t bytes = 0, compressed_bytes = 0, header = 0;
  uint32_t crc32 = 0;
};

// Replaces each number of `entry` that does not fit 32 bits (UINT32_MAX) by the next 64-bit number in the extra field.
void read_zip64(ZipReader& zip, std::string_view extra, CentralEntry& entry) {
  while (extra.size() >= 4) {
    const auto id = ZipReader::little_endian<uint16_t>(extra);
    const size_t count = ZipReader::little_endian<uint16_t>(extra.substr(2));
    if (count > extra.size() - 4) zip.refuse("the extra field of '" + entry.name + "' is damaged");
    std::string_view field = extra.substr(4, count);
    extra.remove_prefix(4 + count);
    if (id != 1) continue;
    for (uint64_t* number : {&entry.bytes, &entry.compressed_bytes, &entry.header}) {
      if (*number != UINT32_MAX) continue;
      if (field.size() < 8) zip.refuse("the zip64 field of '" + entry.name + "' is damaged");
      *number = ZipReader::little_endian<uint64_t>(field);
      field.remove_prefix(8);
    }
  }
}

CentralEntry read_entry(ZipReader& zip, uint64_t& at) {
  if (zip.part(at, kCentralHeaderBytes).empty() || zip.number<uint32_t>(at) != kCentralHeader)
    zip.refuse("its directory is damaged");
  const size_t name_bytes = zip.number<uint16_t>(at + 28), extra_bytes = zip.number<uint16_t>(at + 30),
               comment_bytes = zip.number<uint16_t>(at + 32);
  CentralEntry entry{std::string(zip.part(at + kCentralHeaderBytes, name_bytes)), zip.number<uint32_t>(at + 24),
                     zip.number<uint32_t>(at + 20), zip.number<uint32_t>(at + 42), zip.number<uint32_t>(at + 16)};
  const auto flags = zip.number<uint16_t>(at + 8), method = zip.number<uint16_t>(at + 10);
  read_zip64(zip, zip.part(at + kCentralHeaderBytes + name_bytes, extra_bytes), entry);
  if ((flags & 1) != 0) zip.refuse("'" + entry.name + "' is encrypted");
  if (method != 0 || entry.bytes != entry.compressed_bytes)
    zip.refuse("'" + entry.name + "' is compressed: torch.export stores members as they are");
  at += kCentralHeaderBytes + name_bytes + extra_bytes + comment_bytes;
  return entry;
}

ArchiveMember find_member(ZipReader& zip, const CentralEntry& entry) {
  if (zip.part(entry.header, kLocalHeaderBytes).empty() || zip.number<uint32_t>(entry.header) != kLocalHeader)
    zip.refuse("'" + entry.name + "' does not lie where the directory says");
  const uint64_t begin = entry.header + kLocalHeaderBytes + zip.number<uint16_t>(entry.header + 26) +
                         zip.number<uint16_t>(entry.header + 28);
  zip.require(begin, entry.bytes);
  return {static_cast<int64_t>(begin), static_cast<int64_t>(entry.bytes), entry.crc32};
}

}  // namespace

std::map<std::string, ArchiveMember> read_zip(const ReadBytes& read, int64_t archive_bytes, const std::string& where) {
  ZipReader zip(read, archive_bytes, where);
  const Directory directory = find_directory(zip);
  std::map<std::string, ArchiveMember> members;
  std::vector<std::pair<int64_t, int64_t>> taken;
  uint64_t at = directory.begin;
  for (uint64_t i = 0; i < directory.members; ++i) {
    const CentralEntry entry = read_entry(zip, at);
    const ArchiveMember member = find_member(zip, entry);
    taken.emplace_back(static_cast<int64_t>(entry.header), member.begin + member.bytes);
    if (!members.emplace(entry.name, member).second) zip.refuse("it has two members '" + entry.name + "'");
  }
  std::ranges::sort(taken);
  for (size_t i = 1; i < taken.size(); ++i)
    if (taken[i].first < taken[i - 1].second) zip.refuse("its members overlap");
  return members;
}

// ---- archives of torch.export -------------------------------------------------------------------

namespace {

File open_archive(const std::filesystem::path& path) {
  std::error_code error;
  const auto target = std::filesystem::is_symlink(path, error) ? std::filesystem::canonical(path, error) : path;
  return File::open(error ? path : target, [](const FileFailure& failure) {
    throw ExportedError(failure.path.string() + ": " +
                        (failure.problem.empty() ? "cannot be opened or read: " + failure.reason() : failure.problem));
  });
}

constexpr int64_t kReadAtOnce = 1 << 18;  // small enough to stay in the cache until the checksum is computed

// Reads a member in pieces, and returns its CRC-32. Writes the piece at `offset` of the member to place_of(offset).
template <class PlaceOf>
uint32_t read_pieces(const File& file, const ArchiveMember& member, PlaceOf place_of) {
  uint32_t crc = 0;
  for (int64_t begin = 0; begin < member.bytes; begin += kReadAtOnce) {
    const int64_t bytes = std::min(kReadAtOnce, member.bytes - begin);
    char* const piece = place_of(begin);
    file.read(piece, bytes, member.begin + begin);
    crc = crc32({piece, static_cast<size_t>(bytes)}, crc);
  }
  return crc;
}

void compare(const File& file, const ArchiveMember& member, const std::string& name, uint32_t found) {
  if (found != member.crc32)
    throw ExportedError(file.path().string() + ": '" + name + "' is damaged: its CRC-32 is " + std::to_string(found) +
                        ", the archive has " + std::to_string(member.crc32));
}

}  // namespace

ArchiveFile::ArchiveFile(const std::filesystem::path& path) : file_(open_archive(path)) {}

void ArchiveFile::read_member(const ArchiveMember& member, const std::string& name, void* to, bool is_checked) const {
  if (!is_checked || member.crc32 == 0) return read(to, member.bytes, member.begin);
  compare(file_, member, name,
          read_pieces(file_, member, [to](int64_t begin) { return static_cast<char*>(to) + begin; }));
}

void ArchiveFile::check_member(const ArchiveMember& member, const std::string& name) {
  const std::lock_guard lock(mutex_);
  if (member.crc32 == 0 || checked_.contains(member.begin)) return;
  std::string piece(static_cast<size_t>(std::min(kReadAtOnce, member.bytes)), '\0');
  compare(file_, member, name, read_pieces(file_, member, [&](int64_t /*begin*/) { return piece.data(); }));
  checked_.insert(member.begin);
}

Archive::Archive(const std::filesystem::path& path)
    : where_(path.string()), file_(std::make_shared<ArchiveFile>(path)) {
  std::string beginning(static_cast<size_t>(std::min<int64_t>(file_->bytes(), 64)), '\0');
  file_->read(beginning.data(), std::ssize(beginning), 0);
  if (const std::string problem = lfs_problem(beginning); !problem.empty())
    throw ExportedError(where_ + ": " + problem);
  const auto members = read_zip([this](void* to, int64_t bytes, int64_t position) { file_->read(to, bytes, position); },
                                file_->bytes(), where_);
  // Removes the top folder from all names. The folder is named after the file that torch.export.save() wrote.
  const std::string_view first = members.empty() ? std::string_view() : std::string_view(members.begin()->first);
  const std::string folder(first.substr(0, first.find('/') + 1));
  for (const auto& [name, member] : members)
    if (name.starts_with(folder)) members_.emplace(name.substr(folder.size()), member);
  if (!has("archive_format") || text("archive_format") != "pt2")
    throw ExportedError(where_ + ": is not an archive of torch.export.save (torch 2.9 or newer)");
}

const ArchiveMember& Archive::member(const std::string& name) const {
  const auto found = members_.find(name);
  if (found == members_.end()) throw ExportedError("it has no '" + name + "'");
  return found->second;
}

std::string Archive::text(const std::string& name) const {
  const ArchiveMember& own = member(name);
  std::string text(static_cast<size_t>(own.bytes), '\0');
  file_->read_member(own, name, text.data(), true);
  return text;
}

std::vector<std::string> Archive::names(const std::string& prefix, const std::string& suffix) const {
  std::vector<std::string> names;
  for (const auto& [name, member] : members_)
    if (name.starts_with(prefix) && name.ends_with(suffix)) names.push_back(name);
  return names;
}

}  // namespace tessera::internal
