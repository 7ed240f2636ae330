#include <cstring>
#include <map>
#include <mutex>
#include <set>

#include "checkpoint/storage/storage.h"

namespace tessera::internal {
namespace {

namespace fs = std::filesystem;
using Bytes = std::shared_ptr<const std::string>;

struct Files {
  std::mutex mutex;
  std::map<std::string, Bytes> by_name;
};
// Returns all files in memory. Never destroyed, because a background removal may run until the process ends.
Files& files() {
  static auto* const all = new Files;
  return *all;
}

Bytes find(const fs::path& path) {
  const std::lock_guard lock(files().mutex);
  const auto found = files().by_name.find(path.native());
  return found == files().by_name.end() ? nullptr : found->second;
}
void set(const fs::path& path, std::string text) {
  const std::lock_guard lock(files().mutex);
  files().by_name[path.native()] = std::make_shared<const std::string>(std::move(text));
}

// Returns the prefix of the names of a folder's files, with exactly one trailing slash: "memory://run/step-1/".
std::string prefix_of(const fs::path& folder) {
  std::string prefix = folder.native();
  while (prefix.ends_with('/') && !prefix.ends_with("://")) prefix.pop_back();
  return prefix.ends_with("://") ? prefix : prefix + "/";
}

class MemoryInput : public InputFile {
 public:
  MemoryInput(const fs::path& path, Bytes bytes, ThrowFailure fail)
      : InputFile(path), bytes_(std::move(bytes)), fail_(fail) {}
  int64_t bytes() const override { return static_cast<int64_t>(bytes_->size()); }
  void read(void* data, int64_t bytes, int64_t position) const override {
    if (position + bytes > this->bytes())
      fail_({path(), FileAction::kRead, 0, "ends at byte " + std::to_string(this->bytes())});
    if (bytes > 0) std::memcpy(data, bytes_->data() + position, static_cast<size_t>(bytes));
  }

 private:
  const Bytes bytes_;
  const ThrowFailure fail_;
};

class MemoryOutput : public OutputFile {
 public:
  MemoryOutput(fs::path path, int64_t start_bytes, int64_t bytes) : path_(std::move(path)) {
    text_.reserve(static_cast<size_t>(bytes));
    text_.resize(static_cast<size_t>(start_bytes));
  }
  void append(const void* data, int64_t bytes) override {
    text_.append(static_cast<const char*>(data), static_cast<size_t>(bytes));
  }
  void finish(std::string_view start) override {
    text_.replace(0, start.size(), start);
    set(path_, std::move(text_));
  }

 private:
  const fs::path path_;
  std::string text_;
};

class MemoryStorage : public Storage {
 public:
  using Storage::Storage;

  std::unique_ptr<InputFile> open(const fs::path& path) const override {
    auto bytes = find(path);
    if (!bytes) refuse(path, FileAction::kOpen, "there is no such file in this process's memory");
    return std::make_unique<MemoryInput>(path, std::move(bytes), fail_);
  }
  std::unique_ptr<OutputFile> create(const fs::path& path, int64_t start_bytes, int64_t bytes) const override {
    return std::make_unique<MemoryOutput>(path, start_bytes, bytes);
  }
  void put(const fs::path& path, std::string_view text, bool) const override { set(path, std::string(text)); }
  std::string beginning(const fs::path& path, int64_t max_bytes) const override {
    const auto bytes = find(path);
    return bytes ? bytes->substr(0, static_cast<size_t>(max_bytes)) : "";
  }
  bool exists(const fs::path& file) const override { return find(file) != nullptr; }
  std::vector<std::string> list(const fs::path& folder) const override {
    const std::string prefix = prefix_of(folder);
    std::set<std::string> names;
    const std::lock_guard lock(files().mutex);
    const auto& all = files().by_name;
    for (auto entry = all.lower_bound(prefix); entry != all.end() && entry->first.starts_with(prefix); ++entry)
      names.insert(entry->first.substr(prefix.size(), entry->first.find('/', prefix.size()) - prefix.size() + 1));
    return {names.begin(), names.end()};
  }
  void remove(const fs::path& file) const override {
    const std::lock_guard lock(files().mutex);
    files().by_name.erase(file.native());
  }
  void remove_all(const fs::path& folder) const override {
    const std::string prefix = prefix_of(folder);
    const std::lock_guard lock(files().mutex);
    std::erase_if(files().by_name, [&](const auto& entry) { return entry.first.starts_with(prefix); });
  }
  int reading_threads() const override { return 3; }
};

}  // namespace

std::unique_ptr<Storage> make_memory_storage(ThrowFailure fail) { return std::make_unique<MemoryStorage>(fail); }

}  // namespace tessera::internal
