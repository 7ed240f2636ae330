#include "tessera/checkpoint/commit.h"

#include <chrono>
#include <random>
#include <thread>

#include "tessera/checkpoint/errors.h"
#include "tessera/checkpoint/find_checkpoints.h"
#include "tessera/storage/storage.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

// Without a slash at its end, and absolute where it is local.
fs::path normal(const fs::path& target) {
  std::string text = is_remote(target) ? target.native() : fs::absolute(target).lexically_normal().native();
  while (text.size() > 1 && text.ends_with('/') && !text.ends_with("://")) text.pop_back();
  return text;
}

}  // namespace

uint64_t draw_checkpoint_id() {
  std::random_device device;
  return uint64_t{device()} << 32 | device();
}

PartialCheckpoint::PartialCheckpoint(const fs::path& target) : target_(normal(target)), id_(draw_checkpoint_id()) {
  // Of "s3://bucket" too.
  if (!target_.has_filename() ||
      (is_remote(target_) && target_.native().find('/', scheme_of(target_).size() + 3) == std::string::npos))
    throw CheckpointError(target.string() + ": is not a name for a checkpoint");
}

void PartialCheckpoint::complete(Manifest& manifest) const {
  manifest.id = manifest.saved.id = id_;
  manifest.folder.clear();
  manifest.sequence = 1;
  const auto others = complete_checkpoints(folder());
  if (!others.empty()) manifest.sequence = peek_sequence(others.back()).value_or(0) + 1;
  check_saved_tensors(manifest.saved, path_.string());
}

std::unique_ptr<PartialCheckpoint> PartialCheckpoint::begin(const fs::path& target) {
  return is_remote(target) ? begin_remote_checkpoint(target) : begin_local_checkpoint(target);
}

void remove_old_checkpoints(const fs::path& folder, int keep) {
  const auto all = complete_checkpoints(folder);
  for (size_t i = 0; i + static_cast<size_t>(keep) < all.size(); ++i)
    is_remote(folder) ? remove_remote_checkpoint(all[i]) : remove_local_checkpoint(all[i]);
  is_remote(folder) ? clear_remote_leftovers(folder) : clear_local_leftovers(folder);
}

ReadHold::ReadHold(const fs::path& checkpoint) {
  if (is_remote(checkpoint)) return;
  // Whoever has it for himself has just completed it, or is about to remove it, and not for long.
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  while (lock_.take_shared(checkpoint / kManifestName) == LockOutcome::kHeldByOther &&
         std::chrono::steady_clock::now() < end)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
}

}  // namespace tessera
