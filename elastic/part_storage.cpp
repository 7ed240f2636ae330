#include "elastic/part_storage.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace tessera::internal {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr char kScheme[] = "copies";
constexpr int64_t kReadBytes = int64_t{2} << 20;

struct Folders {
  std::mutex mutex;
  std::map<std::string, PartFolder*> by_name;
};
Folders& folders() {
  static auto* const all = new Folders;  // never destroyed: threads may outlive main()
  return *all;
}

std::string new_name() {
  static std::atomic<int64_t> count = 0;
  return std::to_string(++count);
}

class PartInput : public InputFile {
 public:
  PartInput(const fs::path& path, const PartFolder& folder, ThrowFailure fail)
      : InputFile(path), folder_(folder), name_(path.filename()), fail_(fail) {
    attempt(FileAction::kOpen, [&] { bytes_ = folder_.bytes_of(name_); });
  }
  int64_t bytes() const override { return bytes_; }
  void read(void* data, int64_t bytes, int64_t position) const override {
    if (position + bytes > bytes_) fail_({path(), FileAction::kRead, 0, "ends at byte " + std::to_string(bytes_)});
    attempt(FileAction::kRead, [&] { folder_.read(name_, data, bytes, position); });
  }

 private:
  template <class Act>
  void attempt(FileAction action, Act act) const {
    try {
      act();
    } catch (const std::exception& error) {
      fail_({path(), action, 0, error.what(), /*is_unanswered=*/true});
    }
  }
  const PartFolder& folder_;
  const std::string name_;
  const ThrowFailure fail_;
  int64_t bytes_ = 0;
};

class PartOutput : public OutputFile {
 public:
  PartOutput(PartFolder& folder, std::string name)
      : folder_(folder), name_(std::move(name)), writer_(folder.writer()) {}
  void append(const void* data, int64_t bytes) override { writer_.append(data, bytes); }
  void finish(std::string_view start) override { folder_.add_file(name_, writer_.finish(start)); }

 private:
  PartFolder& folder_;
  const std::string name_;
  CopiedFileWriter writer_;
};

// Implements only the functions that write_rank_files() and SliceReader use.
class PartStorage : public Storage {
 public:
  using Storage::Storage;
  std::unique_ptr<InputFile> open(const fs::path& path) const override {
    return std::make_unique<PartInput>(path, folder_of(path), fail_);
  }
  std::unique_ptr<OutputFile> create(const fs::path& path, int64_t, int64_t) const override {
    return std::make_unique<PartOutput>(folder_of(path), path.filename());
  }
  void put(const fs::path& path, std::string_view, bool) const override { refuse_here(path); }
  std::string beginning(const fs::path&, int64_t) const override { return ""; }
  bool exists(const fs::path&) const override { return false; }
  std::vector<std::string> list(const fs::path&) const override { return {}; }
  void remove(const fs::path& path) const override { refuse_here(path); }
  void remove_all(const fs::path& path) const override { refuse_here(path); }
  int reading_threads() const override { return 1; }
  int64_t reading_bytes() const override { return kReadBytes; }

 private:
  [[noreturn]] void refuse_here(const fs::path& path) const {
    refuse(path, FileAction::kLookAt, "copies in memory have only the files of ranks");
  }
  PartFolder& folder_of(const fs::path& path) const {
    const std::lock_guard lock(folders().mutex);
    const auto found = folders().by_name.find(path.parent_path().filename());
    if (found == folders().by_name.end()) refuse(path, FileAction::kOpen, "is of copies in memory that are given up");
    return *found->second;
  }
};

}  // namespace

PartFolder::PartFolder(std::shared_ptr<CopyMemory> memory, std::shared_ptr<const CopyMemory> shared)
    : memory_(std::move(memory)), shared_(std::move(shared)), path_(enter()) {}

PartFolder::PartFolder(const CopyStore& own, std::string own_id, int64_t generation, int64_t step,
                       std::vector<std::vector<Member>> holders, std::chrono::milliseconds patience)
    : own_(&own),
      own_id_(std::move(own_id)),
      generation_(generation),
      step_(step),
      holders_(std::move(holders)),
      patience_(patience),
      path_(enter()) {}

fs::path PartFolder::enter() {
  register_storage(kScheme,
                   [](ThrowFailure fail) -> std::unique_ptr<Storage> { return std::make_unique<PartStorage>(fail); });
  const std::string name = new_name();
  const std::lock_guard lock(folders().mutex);
  folders().by_name[name] = this;
  return std::string(kScheme) + "://" + name;
}

PartFolder::~PartFolder() {
  const std::lock_guard lock(folders().mutex);
  folders().by_name.erase(path_.filename());
}

std::map<std::string, CopiedFile> PartFolder::take_files() {
  const std::lock_guard lock(mutex_);
  return std::exchange(files_, {});
}

void PartFolder::add_file(const std::string& name, CopiedFile file) {
  const std::lock_guard lock(mutex_);
  files_[name] = std::move(file);
}

// Returns the part that has the file: "rank-00042-0.safetensors" is in the part of owner 42. Throws if there is none.
PartName PartFolder::part_of(const std::string& file) const {
  constexpr std::string_view kStart = "rank-";
  const int owner = file.starts_with(kStart) ? std::atoi(file.c_str() + kStart.size()) : -1;
  if (own_ == nullptr || owner < 0 || static_cast<size_t>(owner) >= holders_.size())
    throw std::runtime_error("no rank has written " + file);
  return {generation_, step_, owner};
}

PeerMessage PartFolder::ask_holders(const std::string& file, json fields) const {
  const PartName name = part_of(file);
  fields.update(name);
  fields["file"] = file;
  std::string errors;
  for (const Member& holder : holders_[static_cast<size_t>(name.owner)]) {
    if (holder.id == own_id_) continue;
    try {
      return ask_member(holder, {fields, {}}, patience_);
    } catch (const std::exception& error) {
      errors += (errors.empty() ? "" : "; ") + std::string(error.what());
    }
  }
  throw std::runtime_error("no process that holds it answers: " + errors);
}

int64_t PartFolder::bytes_of(const std::string& name) const {
  if (const auto part = own_ != nullptr ? own_->find(part_of(name)) : nullptr) {
    const auto found = part->files.find(name);
    if (found == part->files.end()) throw std::runtime_error("there is no such file in this rank's part");
    return found->second.bytes;
  }
  return ask_holders(name, {{"op", "size"}}).fields.at("bytes").get<int64_t>();
}

void PartFolder::read(const std::string& name, void* data, int64_t bytes, int64_t position) const {
  if (const auto part = own_->find(part_of(name))) return part->files.at(name).read(data, bytes, position);
  while (bytes > 0) {
    const int64_t count = std::min(bytes, kReadBytes);
    const PeerMessage answer = ask_holders(name, {{"op", "read"}, {"position", position}, {"bytes", count}});
    if (static_cast<int64_t>(answer.bytes.size()) != count)
      throw std::runtime_error("a process has sent " + std::to_string(answer.bytes.size()) + " bytes, expected " +
                               std::to_string(count));
    std::memcpy(data, answer.bytes.data(), answer.bytes.size());
    data = static_cast<char*>(data) + count;
    bytes -= count;
    position += count;
  }
}

}  // namespace tessera::internal
