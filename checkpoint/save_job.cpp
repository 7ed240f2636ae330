#include "tessera/checkpoint/save_job.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <stdexcept>

#include "tessera/checkpoint/checked_json.h"
#include "tessera/checkpoint/checksum.h"
#include "tessera/checkpoint/entries.h"
#include "tessera/checkpoint/errors.h"
#include "tessera/comm/agreement.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// Each group's asynchronous save that is under way, and the error of one that nobody waited for, so
// that the next save can wait and tell. Kept by group, not in the model, because the two saves may be
// of different models; the one piece of global state here, guarded, and gone with the group.
struct Underway {
  std::weak_ptr<SaveJob> job;
  std::string failure;
};
std::mutex underway_mutex;
using UnderwayByGroup = std::map<std::weak_ptr<Communicator>, Underway, std::owner_less<std::weak_ptr<Communicator>>>;
UnderwayByGroup& underway() {
  static UnderwayByGroup map;
  std::erase_if(map, [](const auto& entry) { return entry.first.expired(); });
  return map;
}

fs::path message_path(const fs::path& directory, int rank) { return directory / (".message-" + five_digits(rank)); }

// So that ranks whose optimizers differ are told apart without sending the names of all parameters.
std::string fingerprint(const SavedOptimizer& optimizer) {
  SavedOptimizer same = optimizer;
  same.numbers.clear();
  return to_hex(checksum(optimizer_to_json(same).dump()));
}

void check_options(const SaveOptions& options) {
  if (options.keep_last < 0)
    throw std::invalid_argument("keep_last is " + std::to_string(options.keep_last) + ", expected 0 or more");
  if (!is_block_bytes(options.block_bytes))
    throw std::invalid_argument("block_bytes is " + std::to_string(options.block_bytes) +
                                ", expected a multiple of 16 up to 1 GiB");
}

void check_extra(const json& extra) {
  if (json_depth(extra, kMaxExtraDepth) > kMaxExtraDepth)
    throw std::invalid_argument("`extra` nests deeper than " + std::to_string(kMaxExtraDepth) + " levels");
  try {
    static_cast<void>(extra.dump());
  } catch (const json::exception& error) {
    throw std::invalid_argument(std::string("`extra` cannot be written as JSON: ") + error.what());
  }
}

// Replaces each piece's data by a copy in host memory; one allocation for all.
void copy_to_host(std::vector<Piece>& pieces, bool pinned) {
  constexpr int64_t kAlignment = 64;
  auto padded = [](int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; };
  int64_t total = 0;
  for (const Piece& piece : pieces)
    total += padded(piece.box.numel() * static_cast<int64_t>(c10::elementSize(piece.dtype)));
  const at::Tensor buffer = at::empty({total}, at::TensorOptions().dtype(at::kByte).pinned_memory(pinned));
  int64_t offset = 0;
  for (Piece& piece : pieces) {
    const int64_t bytes = piece.box.numel() * static_cast<int64_t>(c10::elementSize(piece.dtype));
    at::Tensor copy = buffer.narrow(0, offset, bytes).view(piece.dtype).view(piece.box.sizes);
    copy.copy_(piece.data());
    piece.data = [copy] { return copy; };
    offset += padded(bytes);
  }
}

}  // namespace

SaveJob::SaveJob(fs::path dir, std::shared_ptr<Communicator> comm, const SaveOptions& options)
    : dir_(std::move(dir)), comm_(std::move(comm)), options_(options) {}

std::shared_ptr<SaveJob> SaveJob::begin(const fs::path& dir, std::shared_ptr<Communicator> comm,
                                        const SaveOptions& options) {
  std::shared_ptr<SaveJob> job(new SaveJob(dir, comm, options));
  std::shared_ptr<SaveJob> before;
  std::string failure;
  {
    std::lock_guard lock(underway_mutex);
    auto& entry = underway()[comm];
    before = entry.job.lock();
    failure = std::exchange(entry.failure, "");
  }
  if (before) {
    before->join();
    if (!before->delivered_) failure = before->failure_;
    before->delivered_ = true;
  }
  if (const auto told = gather_texts(*comm, comm->rank() == 0 ? failure : "", "an asynchronous save")[0]; !told.empty())
    throw CheckpointError("the asynchronous save before failed: " + told);
  require_agreement(*comm, "where to save a checkpoint",
                    {"directory " + dir.string(), "keep_last " + std::to_string(options.keep_last),
                     "block_bytes " + std::to_string(options.block_bytes)});
  const auto made = settle(*comm, attempt([&] {
    check_options(options);
    if (comm->rank() != 0) return std::string();
    job->partial_ = std::make_unique<PartialCheckpoint>(dir);
    return job->partial_->path().string();
  }),
                           "saving " + dir.string());
  job->partial_path_ = made[0];
  return job;
}

SaveJob::~SaveJob() {
  join();
  if (delivered_ || failure_.empty()) return;
  std::lock_guard lock(underway_mutex);
  underway()[comm_].failure = failure_;
}

void SaveJob::join() {
  if (thread_.joinable()) thread_.join();
}

std::string SaveJob::write_part(const SavePlan& plan) {
  std::error_code ignored;
  if (!fs::is_directory(partial_path_, ignored))
    throw CheckpointError(
        partial_path_.string() +
        ": is not there, though rank 0 has made it: the directory must be on a file system that all ranks share");
  const SavedTensors saved =
      write_pieces(partial_path_, "rank-" + five_digits(comm_->rank()), plan.pieces, options_.block_bytes);
  json rng = json::object();
  for (const auto& [device, bytes] : plan.rng) rng[device] = bytes_to_hex(bytes);
  json optimizer;
  if (plan.optimizer)
    optimizer = {{"fingerprint", fingerprint(*plan.optimizer)},
                 {"numbers", optimizer_to_json(*plan.optimizer).at("numbers")}};
  return json{
      {"files", files_to_json(saved)}, {"tensors", tensors_to_json(saved)}, {"optimizer", optimizer}, {"rng", rng}}
      .dump();
}

void SaveJob::commit(const std::vector<std::string>& parts) {
  Manifest manifest{.world_size = comm_->size(), .optimizer = plan_.optimizer, .extra = plan_.extra};
  manifest.saved.block_bytes = options_.block_bytes;
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    const std::string where = "what rank " + std::to_string(rank) + " wrote";
    const json part = parse_json(parts[rank], where);
    SavedTensors saved{.block_bytes = options_.block_bytes};
    files_from_json(part.at("files"), where, saved);
    tensors_from_json(part.at("tensors"), where, saved);
    append(manifest.saved, std::move(saved));
    auto& states = manifest.rng.emplace_back();
    for (const auto& [device, bytes] : part.at("rng").items())
      states[device] = bytes_from_hex(bytes.get<std::string>());
    if (!manifest.optimizer) continue;
    if (part.at("optimizer").at("fingerprint") != fingerprint(*plan_.optimizer))
      throw CheckpointError("the optimizer of rank " + std::to_string(rank) +
                            " differs from rank 0's in its groups or options");
    for (const auto& [name, numbers] : part.at("optimizer").at("numbers").items())
      for (const auto& [key, number] : numbers.items()) {
        auto& known = manifest.optimizer->numbers[name];
        const auto found =
            std::find_if(known.begin(), known.end(), [&, k = key](const auto& entry) { return entry.first == k; });
        if (found == known.end()) {
          known.emplace_back(key, number.get<int64_t>());
        } else if (found->second != number.get<int64_t>()) {
          throw CheckpointError("ranks differ in '" + key + "' of '" + name + "': rank " + std::to_string(rank) +
                                " has " + number.dump() + ", one before " + std::to_string(found->second));
        }
      }
  }
  if (!options_.rng) manifest.rng.clear();
  partial_->commit(std::move(manifest));
  partial_.reset();  // removes what was there before
  if (options_.keep_last == 0) return;
  try {
    remove_old_checkpoints(fs::absolute(dir_).lexically_normal().parent_path(), options_.keep_last);
  } catch (const CheckpointError& error) {
    throw CheckpointError(dir_.string() + " is complete, but removing older ones failed: " + error.what());
  }
}

void SaveJob::run(const std::function<SavePlan()>& plan) {
  const std::string what = "saving " + dir_.string();
  std::vector<std::string> parts;
  try {
    parts = settle(*comm_, attempt([&] {
      plan_ = plan();
      check_extra(plan_.extra);
      std::string part = write_part(plan_);
      plan_.pieces.clear();
      return part;
    }),
                   what);
  } catch (...) {
    partial_.reset();
    throw;
  }
  settle(*comm_, attempt([&] {
    if (comm_->rank() == 0) commit(parts);
    return std::string();
  }),
         what);
}

void SaveJob::start(const std::function<SavePlan()>& plan) {
  settle(*comm_, attempt([&] {
    plan_ = plan();
    check_extra(plan_.extra);
    copy_to_host(plan_.pieces, comm_->device().is_cuda());
    return std::string();
  }),
         "saving " + dir_.string());
  {
    std::lock_guard lock(underway_mutex);
    underway()[comm_].job = weak_from_this();
  }
  thread_ = std::thread([this] { background(); });
}

void SaveJob::background() {
  Outcome own = attempt([&] {
    std::string part = write_part(plan_);
    plan_.pieces.clear();  // the copies
    return part;
  });
  plan_.pieces.clear();
  if (comm_->rank() != 0) {
    leave_message(own);
  } else {
    try {
      const auto outcomes = await_messages(std::move(own));
      throw_failures(outcomes, "saving " + dir_.string());
      std::vector<std::string> parts;
      for (const auto& outcome : outcomes) parts.push_back(outcome.result);
      commit(parts);
    } catch (const std::exception& error) {
      failure_ = error.what();
    }
    partial_.reset();
  }
  done_ = true;
}

void SaveJob::leave_message(const Outcome& outcome) {
  const fs::path path = message_path(partial_path_, comm_->rank());
  const fs::path draft = path.string() + ".draft";
  std::error_code ignored;
  if (!outcome.error.empty()) {
    // If the disk is full, this rank's own files, useless now, make room for the message.
    const std::string own = "rank-" + five_digits(comm_->rank());
    for (const auto& entry : fs::directory_iterator(partial_path_, ignored))
      if (entry.path().filename().string().starts_with(own)) fs::remove(entry.path(), ignored);
  }
  try {
    fs::remove(draft, ignored);
    write_text(draft, outcome.to_text());
    rename_entry(draft, path, true);
  } catch (const CheckpointError&) {
    // Nowhere to leave it: rank 0 will say that this rank did not finish.
  }
}

std::vector<Outcome> SaveJob::await_messages(Outcome own) {
  using Clock = std::chrono::steady_clock;
  std::vector<Outcome> outcomes(comm_->size());
  outcomes[0] = std::move(own);
  std::vector<int> missing;
  for (int rank = 1; rank < comm_->size(); ++rank) missing.push_back(rank);
  // A rank that still writes is alive: what counts is the time since the directory last grew.
  auto last_growth = Clock::now();
  uint64_t last_bytes = 0;
  auto pause = std::chrono::milliseconds(1);
  while (!missing.empty()) {
    std::erase_if(missing, [&](int rank) {
      const fs::path path = message_path(partial_path_, rank);
      std::error_code ignored;
      if (!fs::exists(path, ignored)) return false;
      outcomes[rank] = Outcome::from_text(read_text(path, kMaxManifestBytes));
      fs::remove(path, ignored);
      return true;
    });
    if (missing.empty()) break;
    uint64_t bytes = 0;
    std::error_code ignored;
    for (const auto& entry : fs::directory_iterator(partial_path_, ignored)) bytes += entry.file_size(ignored);
    if (bytes != last_bytes) last_bytes = bytes, last_growth = Clock::now();
    if (cancelled_ || Clock::now() - last_growth > comm_->timeout())
      throw CheckpointError("saving " + dir_.string() + ": rank " + std::to_string(missing.front()) +
                            " did not finish writing" + (cancelled_ ? " before the save was given up" : " in time"));
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, std::chrono::milliseconds(100));
  }
  return outcomes;
}

void SaveJob::wait() {
  if (delivered_) return;
  join();
  delivered_ = true;
  if (const auto told = gather_texts(*comm_, failure_, "waiting for a save")[0]; !told.empty())
    throw CheckpointError(told);
}

}  // namespace tessera
