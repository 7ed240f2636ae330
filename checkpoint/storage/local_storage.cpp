#include <algorithm>
#include <cstring>
#include <set>
#include <system_error>

#include "checkpoint/storage/storage.h"

namespace tessera::internal {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kFileBufferBytes = int64_t{8} << 20;

class LocalInput : public InputFile {
 public:
  explicit LocalInput(File file) : InputFile(file.path()), file_(std::move(file)) {}
  int64_t bytes() const override { return file_.bytes(); }
  void read(void* data, int64_t bytes, int64_t position) const override { file_.read(data, bytes, position); }
  std::unique_ptr<InputFile> for_another_thread() const override {
    auto again = file_.opened_again();
    return again ? std::make_unique<LocalInput>(std::move(*again)) : nullptr;
  }

 private:
  const File file_;
};

// Writes a file in large blocks. Starts the write-back of each block at once, so that the disk works while the next
// block is copied and hashed. Allocates the disk space of a large file in advance. Without this allocation, writing
// takes a third longer, and a full disk is reported late.
class LocalOutput : public OutputFile {
 public:
  LocalOutput(File file, int64_t start_bytes, int64_t bytes)
      : file_(std::move(file)), buffer_(new char[kFileBufferBytes]), position_(start_bytes) {
    if (bytes > kFileBufferBytes) file_.reserve(bytes);
  }

  void append(const void* data, int64_t bytes) override {
    if (buffered_ + bytes > kFileBufferBytes) flush();
    if (bytes >= kFileBufferBytes) return write(data, bytes);
    if (bytes > 0) std::memcpy(buffer_.get() + buffered_, data, static_cast<size_t>(bytes));
    buffered_ += bytes;
  }

  void finish(std::string_view start) override {
    flush();
    file_.write(start.data(), static_cast<int64_t>(start.size()), 0);
    file_.sync();
  }

 private:
  void flush() {
    write(buffer_.get(), buffered_);
    buffered_ = 0;
  }
  void write(const void* data, int64_t bytes) {
    if (bytes == 0) return;
    file_.write(data, bytes, position_);
    file_.start_writing_out(position_, bytes);
    position_ += bytes;
  }

  const File file_;
  const std::unique_ptr<char[]> buffer_;
  int64_t buffered_ = 0;
  int64_t position_;
};

class LocalStorage : public Storage {
 public:
  using Storage::Storage;

  std::unique_ptr<InputFile> open(const fs::path& path) const override {
    return std::make_unique<LocalInput>(File::open(path, fail_));
  }
  std::unique_ptr<OutputFile> create(const fs::path& path, int64_t start_bytes, int64_t bytes) const override {
    return std::make_unique<LocalOutput>(File::create(path, fail_), start_bytes, bytes);
  }
  void put(const fs::path& path, std::string_view text, bool durable) const override {
    const File file = File::create(path, fail_);
    file.write(text.data(), static_cast<int64_t>(text.size()), 0);
    if (durable) file.sync();
  }
  std::string beginning(const fs::path& path, int64_t max_bytes) const override {
    if (!exists(path)) return "";
    const File file = File::open(path, fail_);
    std::string text(static_cast<size_t>(std::min(file.bytes(), max_bytes)), '\0');
    file.read(text.data(), static_cast<int64_t>(text.size()), 0);
    return text;
  }
  bool exists(const fs::path& file) const override {
    std::error_code error;
    const auto status = fs::status(file, error);
    if (status.type() == fs::file_type::none) fail_({file, FileAction::kLookAt, error.value(), ""});
    return fs::exists(status);
  }
  std::vector<std::string> list(const fs::path& folder) const override {
    std::error_code error, ignored;
    std::set<std::string> names;
    const auto entries = entries_of(folder, error);
    if (error && error != std::errc::no_such_file_or_directory && error != std::errc::not_a_directory)
      fail_({folder, FileAction::kOpen, error.value(), ""});
    for (const auto& entry : entries)
      names.insert(entry.path().filename().string() + (entry.is_directory(ignored) ? "/" : ""));
    return {names.begin(), names.end()};
  }
  void remove(const fs::path& file) const override {
    std::error_code error;
    fs::remove(file, error);
    if (error) refuse(file, FileAction::kWrite, "removing: " + error.message());
  }
  void remove_all(const fs::path& folder) const override {
    std::error_code error;
    remove_all_of(folder, error);
    if (error) refuse(folder, FileAction::kWrite, "removing: " + error.message());
  }
  int reading_threads() const override { return 3; }
};

}  // namespace

std::unique_ptr<Storage> make_local_storage(ThrowFailure fail) { return std::make_unique<LocalStorage>(fail); }

}  // namespace tessera::internal
