// Checkpoints in object stores, which have neither renames nor locks. Each save writes to its own folder
// "<target>/<id>/". Writing the manifest, which contains the folder's name, commits the save.
#include <chrono>
#include <string>
#include <vector>

#include <tessera/errors.h>
#include "checkpoint/format/checksum.h"
#include "checkpoint/format/entries.h"
#include "checkpoint/load/find_checkpoints.h"
#include "checkpoint/save/commit.h"

namespace tessera::internal {
namespace {

namespace fs = std::filesystem;

// The age at which a save counts as abandoned if its process may still run on another host.
constexpr int64_t kAbandonedSeconds = int64_t{24} * 3600;

int64_t now_seconds() {
  return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// Returns whether the save to this folder has ended or was abandoned. A draft has two lines: process and start time.
bool is_abandoned(const fs::path& save) {
  const std::string draft = storage_of(save).beginning(save / kDraftName, 1024);
  if (draft.empty()) return true;
  const size_t end = draft.find('\n');
  return is_of_ended_process(draft.substr(0, end)) ||
         now_seconds() - std::atoll(draft.c_str() + std::min(end, draft.size() - 1)) > kAbandonedSeconds;
}

// Returns the folder name in the target's manifest, or "" if there is no readable manifest.
std::string named_folder(const fs::path& target) {
  try {
    return is_checkpoint(target) ? read_manifest(target).folder : "";
  } catch (const CheckpointError&) {
    return "";
  }
}

// Removes abandoned saves. Reads drafts before the manifest, or it could remove a save that commits in between.
void clear_target(const fs::path& target, const std::function<void()>& progress = [] {}) {
  const Storage& storage = storage_of(target);
  std::vector<std::string> abandoned;
  for (const auto& listed : storage.list(target))
    if (const std::string name = save_folder(listed); !name.empty() && is_abandoned(target / name))
      abandoned.push_back(name);
  if (abandoned.empty()) return;
  const bool was_complete = is_checkpoint(target);
  const std::string named = named_folder(target);
  if (was_complete && named.empty()) return;  // the manifest is damaged, or was uploaded from a local checkpoint
  for (const auto& name : abandoned)
    if (name != named) storage.remove_all(target / name), progress();
}

class RemotePartial : public PartialCheckpoint {
 public:
  RemotePartial(const fs::path& target, const std::function<void()>& progress) : PartialCheckpoint(target) {
    const Storage& storage = storage_of(target_);
    if (!is_checkpoint(target_))
      for (const auto& listed : storage.list(target_))
        if (save_folder(listed).empty())
          throw CheckpointError(target_.string() + ": holds something else than a checkpoint; it is left as it is");
    clear_target(target_, progress);
    path_ = target_ / to_hex(id_);
    storage.put(path_ / kDraftName, process_name() + "\n" + std::to_string(now_seconds()) + "\n", /*durable=*/true);
  }

  ~RemotePartial() override {
    const Storage& storage = storage_of(path_);
    try {
      // Without its draft, the next save removes the folder, unless the failed commit has written the manifest.
      if (!is_committed_) has_asked_ ? storage.remove(path_ / kDraftName) : storage.remove_all(path_);
      if (is_committed_)
        for (const auto& name : replaced_)
          name.ends_with('/') ? storage.remove_all(target_ / name) : storage.remove(target_ / name);
    } catch (const std::exception&) {  // ignores errors, because the next save to this target removes abandoned folders
    }
  }

  void commit(Manifest manifest) override {
    complete(manifest);
    manifest.folder = path_.filename();
    const Storage& storage = storage_of(target_);
    if (is_checkpoint(target_)) find_replaced();
    has_asked_ = true;
    try {
      storage.put(target_ / kManifestName, format_manifest(manifest), /*durable=*/true);
      storage.remove(path_ / kDraftName);
    } catch (const CheckpointError&) {
      // Despite the error, the manifest may have been written. The save is then complete, and its files must stay.
      if (named_folder(target_) != manifest.folder) throw;
    }
    is_committed_ = true;
  }

 private:
  // Lists the files of the replaced checkpoint: the data folder, or the rank files if the checkpoint was uploaded from
  // a local folder. Never lists files that no save wrote.
  void find_replaced() {
    const std::string named = named_folder(target_);
    if (!named.empty()) return replaced_.push_back(named + "/");
    for (const auto& listed : storage_of(target_).list(target_))
      if (is_of_save(listed) && listed.ends_with(".safetensors")) replaced_.push_back(listed);
  }

  bool has_asked_ = false;  // whether commit() has begun to write the manifest
  std::vector<std::string> replaced_;
};

}  // namespace

std::unique_ptr<PartialCheckpoint> begin_remote_checkpoint(const fs::path& target,
                                                           const std::function<void()>& progress) {
  return std::make_unique<RemotePartial>(target, progress);
}

void remove_remote_checkpoint(const fs::path& checkpoint) {
  // Removes the manifest first, so that a partly removed checkpoint does not look complete.
  const Storage& storage = storage_of(checkpoint);
  storage.remove(checkpoint / kManifestName);
  for (const auto& listed : storage.list(checkpoint))
    if (is_of_save(listed))
      listed.ends_with('/') ? storage.remove_all(checkpoint / listed) : storage.remove(checkpoint / listed);
}

void clear_remote_leftovers(const fs::path& folder) {
  for (const auto& listed : storage_of(folder).list(folder))
    if (listed.ends_with('/')) clear_target(folder / listed.substr(0, listed.size() - 1));
}

}  // namespace tessera::internal
