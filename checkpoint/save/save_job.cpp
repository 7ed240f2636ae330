#include "checkpoint/save/save_job.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/StringUtil.h>

#include <future>
#include <stdexcept>
#include <utility>

#include <tessera/errors.h>
#include <tessera/host_results.h>
#include "checkpoint/format/checksum.h"
#include "checkpoint/format/entries.h"
#include "checkpoint/save/group_saves.h"
#include "checkpoint/save/saved_part.h"
#include "checkpoint/state/saved_state.h"
#include "core/comm/agreement.h"
#include "core/comm/group_process.h"
#include "core/runtime/require.h"
#include "core/runtime/stream_uses.h"
#include "core/runtime/warn.h"
#include "core/trace/ranges.h"

namespace tessera::internal {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMaxPartBytes = int64_t{1} << 30;

fs::path part_path(const fs::path& directory, int rank) { return directory / (".part-" + five_digits(rank)); }
fs::path subgroup_path(const fs::path& directory, int leader) { return directory / (".group-" + five_digits(leader)); }

void check_options(const SaveOptions& options) {
  require(options.keep_last >= 0, "keep_last is ", options.keep_last, ", expected 0 or more");
  require(is_block_bytes(options.block_bytes), "block_bytes is ", options.block_bytes,
          ", expected a multiple of 16 up to 1 GiB");
}

// If the previous save failed, throws its error. Otherwise waits for a removal in flight that may still delete this
// save's target. Rank 0's arguments decide for all ranks. Collective.
void settle_before(Communicator& comm, const std::string& failure, const std::shared_ptr<Removal>& removal,
                   const fs::path& dir, Heartbeat& heartbeat) {
  constexpr char kFailed = 'F', kRemoves = 'R';
  std::string own;
  std::error_code ignored;
  if (!failure.empty())
    own = kFailed + failure;
  else if (removal && !removal->has_ended() && (is_remote(dir) || fs::exists(dir, ignored)))
    own = kRemoves;
  const std::string told = gather_texts(comm, comm.rank() == 0 ? own : "", "how the save before ended")[0];
  if (told.empty()) return;
  if (told[0] == kFailed) throw CheckpointError("the asynchronous save before failed: " + told.substr(1));
  on_all_ranks_slowly(comm, "removing checkpoints before saving " + dir.string(), heartbeat, [&] {
    if (comm.rank() == 0) removal->join();
  });
}

}  // namespace

SaveJob::SaveJob(fs::path dir, std::shared_ptr<Communicator> comm, const SaveOptions& options)
    : dir_(std::move(dir)),
      what_("saving " + dir_.string()),
      comm_(std::move(comm)),
      options_(options),
      subgroups_(comm_->rank(), comm_->size()) {}

std::shared_ptr<SaveJob> SaveJob::begin(const fs::path& dir, std::shared_ptr<Communicator> comm,
                                        const SaveOptions& options, bool is_async,
                                        const std::vector<std::string>& objects) {
  comm->require_values("saving the checkpoint '" + dir.string() + "'");
  const auto job = make_group<SaveJob>(dir, comm, options);  // a child of fork() must not remove the save's files
  std::shared_ptr<SaveJob> before;
  std::shared_ptr<Removal> removal;
  std::string failure;
  with_group_saves(comm, [&](GroupSaves& saves) {
    before = saves.job.lock();
    removal = saves.removal;
    failure = std::exchange(saves.failure, "");
    job->copies_ = HostCopies(std::exchange(saves.host, {}));
  });
  if (before) {
    before->join();
    job->copies_ = HostCopies(before->copies_.take_memory());
    if (!before->delivered_.exchange(true)) failure = before->result_.error;
    with_group_saves(comm, [&](GroupSaves& saves) { removal = saves.removal; });
  }
  settle_before(*comm, failure, removal, dir, job->heartbeat_);
  std::vector<std::string> lines{"directory " + dir.string(),
                                 "keep_last " + std::to_string(options.keep_last),
                                 "block_bytes " + std::to_string(options.block_bytes),
                                 "copy_in_background " + std::to_string(options.copy_in_background),
                                 "rng " + std::to_string(options.rng),
                                 "asynchronous " + std::to_string(is_async)};
  lines.insert(lines.end(), objects.begin(), objects.end());
  require_agreement(*comm, "where to save a checkpoint", lines);
  on_all_ranks(*comm, job->what_, [&] { check_options(options); });
  on_all_ranks_slowly(*comm, job->what_, job->heartbeat_, [&] {
    if (comm->rank() == 0) job->partial_ = PartialCheckpoint::begin(dir, [&] { job->heartbeat_.beat(); });
  });
  const auto& partial = job->partial_;
  const std::string told =
      gather_texts(*comm, partial ? to_hex(partial->id()) + partial->path().string() : "", job->what_)[0];
  job->id_ = from_hex(told.substr(0, 16));
  job->partial_path_ = told.substr(16);
  return job;
}

void SaveJob::await_save_before(const std::shared_ptr<Communicator>& comm) {
  std::shared_ptr<SaveJob> job;
  with_group_saves(comm, [&](const GroupSaves& saves) { job = saves.job.lock(); });
  if (job) job->join();
}

void SaveJob::hurry_save_of(const std::shared_ptr<Communicator>& comm) {
  std::shared_ptr<SaveJob> job;
  with_group_saves(comm, [&](const GroupSaves& saves) { job = saves.job.lock(); });
  if (job) job->hurry(/*all_ranks_leave=*/true);
}

SaveJob::~SaveJob() {
  join();
  const bool is_untold = !delivered_ && !result_.error.empty();
  if (is_untold)  // warns, because there may be no next save that could throw the error
    warn(c10::str(what_, " failed, and nobody has waited for it: ", result_.error));
  with_group_saves(comm_, [&](GroupSaves& saves) {
    if (is_untold) saves.failure = result_.error;
    if (at::Tensor memory = copies_.take_memory(); memory.defined()) saves.host = std::move(memory);
  });
}

void SaveJob::join() {
  const std::lock_guard lock(joining_);
  if (thread_.joinable()) thread_.join();
}

void SaveJob::write_part() {
  const Storage& storage = storage_of(partial_path_);
  require<CheckpointError>(storage.exists(partial_path_ / kDraftName), partial_path_.string(),
                           ": is not there, though rank 0 has made it: somebody has removed it, or it is not on a file "
                           "system that all ranks share");
  const RankFileFields fields{comm_->rank(), id_, options_.block_bytes, options_.rng ? plan_.rng : GeneratorStates()};
  SavedPart part(comm_->size());
  part.set(write_rank_files(partial_path_, fields, plan_.pieces, [&](int64_t) { heartbeat_.beat(); }),
           plan_.optimizers);
  plan_.pieces.clear();
  storage.put(part_path(partial_path_, comm_->rank()), part.text(), /*durable=*/false);
}

void SaveJob::merge_subgroup() {
  SavedPart part(comm_->size());
  for (int rank = subgroups_.leader(); rank < subgroups_.end(); ++rank) {
    const fs::path path = part_path(partial_path_, rank);
    part.add(read_text(path, kMaxPartBytes), "rank " + std::to_string(rank));
    storage_of(path).remove(path);
    heartbeat_.beat();
  }
  storage_of(partial_path_).put(subgroup_path(partial_path_, subgroups_.leader()), part.text(), /*durable=*/false);
}

void SaveJob::commit() {
  SavedPart part(comm_->size());
  for (int subgroup = 0; subgroup < subgroups_.count(); ++subgroup) {
    const int first = subgroup * subgroups_.ranks();
    const fs::path path = subgroup_path(partial_path_, first);
    part.add(read_text(path, kMaxPartBytes), "rank " + std::to_string(first) + " or one after it");
    storage_of(path).remove(path);
    heartbeat_.beat();
  }
  Manifest manifest = std::move(part).manifest(plan_.optimizers);
  manifest.models = plan_.models;
  manifest.saved.block_bytes = options_.block_bytes;
  manifest.saved.has_rng = options_.rng;
  manifest.extra = plan_.extra;
  manifest.beside = plan_.beside;
  partial_->commit(std::move(manifest));
}

void SaveJob::clean_up() {
  auto remove = [partial = std::shared_ptr<PartialCheckpoint>(std::move(partial_)), keep = options_.keep_last,
                 dir = dir_]() mutable {
    const fs::path folder = partial->folder();
    partial.reset();  // removes the replaced checkpoint
    if (keep == 0) return;
    try {
      remove_old_checkpoints(folder, keep);
    } catch (const CheckpointError& error) {
      throw CheckpointError(dir.string() + " is complete, but removing older ones failed: " + error.what());
    }
  };
  await_removals_at_exit(scheme_of(dir_));
  with_group_saves(comm_, [&](GroupSaves& saves) {
    saves.removal = std::make_shared<Removal>(std::move(remove), std::move(saves.removal));
  });
}

void SaveJob::run(const std::function<SavePlan()>& plan) {
  const NestedRange range([&] { return what_; });
  on_all_ranks(*comm_, what_, [&] {
    plan_ = plan();
    // Synchronizes here, because the writing thread has a different current stream.
    await_current_stream(comm_->device());
  });
  on_all_ranks_slowly(*comm_, what_, heartbeat_, [&] { write_part(); });
  on_all_ranks_slowly(*comm_, what_, heartbeat_, [&] {
    if (comm_->rank() == subgroups_.leader()) merge_subgroup();
  });
  on_all_ranks_slowly(*comm_, what_, heartbeat_, [&] {
    if (comm_->rank() == 0) commit();
  });
  if (comm_->rank() == 0) clean_up();
}

void SaveJob::start(const std::function<SavePlan()>& plan) {
  const NestedRange range([&] { return "start of " + what_; });
  coordinator_.emplace(comm_, "save/" + to_hex(id_), what_);
  std::promise<bool> agreement;
  try {
    on_all_ranks(*comm_, what_, [&] {
      plan_ = plan();
      copied_ = plan_.watched.empty();
      copies_.begin(plan_, comm_->device(), options_.block_bytes);
      // The thread starts to work only after all ranks have started their threads.
      thread_ = std::thread([this, agreed = agreement.get_future()]() mutable {
        if (agreed.get()) background();
      });
    });
  } catch (...) {
    agreement.set_value(false);
    throw;
  }
  with_group_saves(comm_, [&](GroupSaves& saves) { saves.job = weak_from_this(); });
  agreement.set_value(true);
}

void SaveJob::set_copied() {
  plan_.watched.clear();
  copied_ = true;
  copied_.notify_all();
}

void SaveJob::end_copies() {
  const std::shared_ptr<void> at_end(nullptr, [&](void*) { set_copied(); });
  copies_.end(plan_, comm_->device(), [&] { heartbeat_.beat(); });
}

void SaveJob::background() {
  make_current(comm_->device());
  const at::NoGradGuard no_grad;
  const NestedRange range([&] { return what_; });
  try {
    const Outcome own = coordinator_->work(heartbeat_, [&] {
      end_copies();
      write_part();
    });
    result_ = coordinator_->finish(own, heartbeat_, [&] { merge_subgroup(); }, [&] { commit(); });
    if (partial_ && result_.error.empty()) clean_up();
  } catch (const std::exception& error) {  // thrown if the store or another rank is lost
    result_ = {.error = error.what()};
  }
  set_copied();
  plan_.pieces.clear();
  partial_.reset();
  done_ = true;
}

void SaveJob::wait() {
  join();
  if (delivered_.exchange(true) || result_.error.empty()) return;
  if (result_.kind == Outcome::kMisuse) throw std::invalid_argument(result_.error);
  throw CheckpointError(result_.error);
}

}  // namespace tessera::internal
