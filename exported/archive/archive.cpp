#include "exported/archive/archive.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>
#include <vector>

#include <tessera/errors.h>
#include "core/runtime/crc32.h"
#include "core/runtime/lfs_pointer.h"

namespace tessera::internal {

// ---- mapping ------------------------------------------------------------------------------------

std::shared_ptr<MappedFile> MappedFile::open(const std::filesystem::path& path) {
  auto fail = [&](const std::string& what) -> void {
    throw ExportedError(path.string() + ": " + what + ": " + std::generic_category().message(errno));
  };
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // must not block on a pipe
  if (descriptor < 0) fail("cannot be opened");
  struct Close {
    int descriptor;
    ~Close() { ::close(descriptor); }
  } close{descriptor};
  struct stat status {};
  if (::fstat(descriptor, &status) != 0) fail("cannot be looked at");
  if (!S_ISREG(status.st_mode)) throw ExportedError(path.string() + ": is not a regular file");
  if (status.st_size == 0) throw ExportedError(path.string() + ": is empty");
  void* data = ::mmap(nullptr, static_cast<size_t>(status.st_size), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE,
                      descriptor, 0);
  if (data == MAP_FAILED) fail("cannot be mapped");
  return std::shared_ptr<MappedFile>(new MappedFile(static_cast<char*>(data), status.st_size));
}

MappedFile::~MappedFile() { ::munmap(data_, static_cast<size_t>(bytes_)); }

// ---- zip ----------------------------------------------------------------------------------------
// APPNOTE.TXT of PKWARE, sections 4.3 and 4.5.3.

namespace {

constexpr uint32_t kLocalHeader = 0x04034b50, kCentralHeader = 0x02014b50, kEnd = 0x06054b50, kEnd64 = 0x06064b50,
                   kLocator64 = 0x07064b50;
constexpr size_t kLocalHeaderBytes = 30, kCentralHeaderBytes = 46, kEndBytes = 22, kEnd64Bytes = 56,
                 kLocator64Bytes = 20, kMaxCommentBytes = 65535;
constexpr uint64_t kMaxMembers = 1'000'000;

// Reads numbers at offsets of a text that may be too short.
class ZipReader {
 public:
  ZipReader(std::string_view bytes, const std::string& where) : bytes_(bytes), where_(where) {}

  template <class Number>
  Number number(uint64_t at) const {
    return little_endian<Number>(part(at, sizeof(Number)));
  }
  std::string_view part(uint64_t at, uint64_t count) const {
    if (at > bytes_.size() || count > bytes_.size() - at) refuse("it ends early: it is truncated or damaged");
    return bytes_.substr(at, count);
  }
  template <class Number>
  static Number little_endian(std::string_view bytes) {
    Number value = 0;
    for (size_t i = sizeof(Number); i-- > 0;)
      value = static_cast<Number>(value << 8 | static_cast<unsigned char>(bytes[i]));
    return value;
  }
  uint64_t bytes() const { return bytes_.size(); }
  [[noreturn]] void refuse(const std::string& reason) const { throw ExportedError(where_ + ": " + reason); }

 private:
  std::string_view bytes_;
  const std::string& where_;
};

struct Directory {
  uint64_t begin = 0, bytes = 0, members = 0;
};

Directory find_directory(const ZipReader& zip) {
  if (zip.bytes() < kEndBytes) zip.refuse("it is too short to be a zip archive");
  uint64_t end = zip.bytes() - kEndBytes;
  const uint64_t first = end > kMaxCommentBytes ? end - kMaxCommentBytes : 0;
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
  zip.part(directory.begin, directory.bytes);
  return directory;
}

struct CentralEntry {
  std::string name;
  uint64_t bytes = 0, compressed_bytes = 0, header = 0;
  uint32_t crc32 = 0;
};

// The extra field has the numbers that exceed 32 bits, in this order.
void read_zip64(const ZipReader& zip, std::string_view extra, CentralEntry& entry) {
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

CentralEntry read_entry(const ZipReader& zip, uint64_t& at) {
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
    zip.refuse("'" + entry.name + "' is compressed: torch.export stores members as they are, and they are mapped");
  at += kCentralHeaderBytes + name_bytes + extra_bytes + comment_bytes;
  return entry;
}

ArchiveMember find_member(const ZipReader& zip, const CentralEntry& entry) {
  if (zip.part(entry.header, kLocalHeaderBytes).empty() || zip.number<uint32_t>(entry.header) != kLocalHeader)
    zip.refuse("'" + entry.name + "' does not lie where the directory says");
  const uint64_t begin = entry.header + kLocalHeaderBytes + zip.number<uint16_t>(entry.header + 26) +
                         zip.number<uint16_t>(entry.header + 28);
  zip.part(begin, entry.bytes);
  return {static_cast<int64_t>(begin), static_cast<int64_t>(entry.bytes), entry.crc32};
}

}  // namespace

std::map<std::string, ArchiveMember> read_zip(std::string_view archive, const std::string& where) {
  const ZipReader zip(archive, where);
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
  std::sort(taken.begin(), taken.end());
  for (size_t i = 1; i < taken.size(); ++i)
    if (taken[i].first < taken[i - 1].second) zip.refuse("its members overlap");
  return members;
}

// ---- the archive --------------------------------------------------------------------------------

void MemberChecks::check(const ArchiveMember& member, const std::string& name) {
  const std::lock_guard lock(mutex_);
  if (member.crc32 == 0 || checked_.contains(member.begin)) return;
  const uint32_t found = crc32({file_->data() + member.begin, static_cast<size_t>(member.bytes)});
  if (found != member.crc32)
    throw ExportedError("'" + name + "' is damaged: its CRC-32 is " + std::to_string(found) + ", the archive has " +
                        std::to_string(member.crc32));
  checked_.insert(member.begin);
}

Archive::Archive(const std::filesystem::path& path)
    : where_(path.string()), file_(MappedFile::open(path)), checks_(std::make_shared<MemberChecks>(file_)) {
  const std::string_view bytes(file_->data(), static_cast<size_t>(file_->bytes()));
  if (const std::string problem = lfs_problem(bytes.substr(0, 64)); !problem.empty())
    throw ExportedError(where_ + ": " + problem);
  const auto members = read_zip(bytes, where_);
  // All members are in one folder, named like the file at the time of the export.
  const std::string_view first = members.empty() ? std::string_view() : std::string_view(members.begin()->first);
  const std::string folder(first.substr(0, first.find('/') + 1));
  for (const auto& [name, member] : members)
    if (name.starts_with(folder)) members_.emplace(name.substr(folder.size()), member);
  if (!has("archive_format") || text("archive_format") != "pt2")
    throw ExportedError(where_ + ": is not an archive of torch.export.save (torch 2.9 or newer)");
}

const ArchiveMember& Archive::member(const std::string& name) const {
  const auto found = members_.find(name);
  if (found == members_.end()) throw ExportedError(where_ + ": has no '" + name + "'");
  return found->second;
}

std::string_view Archive::text(const std::string& name) const {
  const ArchiveMember& own = member(name);
  checks_->check(own, name);
  return {file_->data() + own.begin, static_cast<size_t>(own.bytes)};
}

std::vector<std::string> Archive::names(const std::string& prefix, const std::string& suffix) const {
  std::vector<std::string> names;
  for (const auto& [name, member] : members_)
    if (name.starts_with(prefix) && name.ends_with(suffix)) names.push_back(name);
  return names;
}

}  // namespace tessera::internal
