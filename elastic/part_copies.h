#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/format/manifest.h"
#include "checkpoint/load/load_state.h"
#include "checkpoint/save/save_plan.h"
#include "elastic/copies.h"
#include "elastic/peer_link.h"
#include "elastic/unchanged_pieces.h"

namespace tessera::internal {

// Returns the identity of a step's parts, which is equal on all ranks.
uint64_t id_of_step(const std::string& run, int64_t generation, int64_t step);
// Returns the manifest of a step from the descriptions of all parts, by rank. Throws CheckpointError if the
// descriptions do not fit together.
Manifest assemble_manifest(const std::vector<std::string>& descriptions, uint64_t id);

// Sends a part to a member, except blocks that the member has already. Throws like PeerConnection::ask().
void send_part(PeerConnection& to, const PartName& name, const CopiedPart& part, std::chrono::milliseconds patience);
// Lets a member of this host map the part's memories. Returns false if the member cannot. The memories must not change
// while the member may hold the part. Throws like send_part().
bool share_part(PeerConnection& to, const PartName& name, const CopiedPart& part, std::chrono::milliseconds patience);
// Receives the parts sent over one connection, by the requests "share_part", "begin_part", "block" and "end_part".
class PartReceiver {
 public:
  explicit PartReceiver(CopyStore& store) : store_(store) {}
  PeerMessage answer(PeerMessage&& request);

 private:
  PeerMessage map_part(const nlohmann::json& fields, std::string bytes);

  CopyStore& store_;
  PartName name_;
  std::shared_ptr<CopiedPart> part_;
};

// Copies this rank's part of one step: to its own memory, then to its partners. The copy runs on a thread of its own.
class PartCopy {
 public:
  // Captures the state. Data on a device is copied after the work of the current stream, into `staging`: memory from
  // take_staging() of an earlier copy, if any. `unchanged` holds the memory that successive parts share.
  PartCopy(CopyStore& store, CopyMemories& memories, UnchangedPieces& unchanged, const PartName& name, int world,
           uint64_t id, const StateObjects& state, const nlohmann::json& extra, std::vector<Member> partners,
           std::chrono::milliseconds patience, at::Tensor staging);
  // Cancels the copy, and waits for its thread.
  ~PartCopy() { is_cancelled_ = true; }
  PartCopy(const PartCopy&) = delete;
  PartCopy& operator=(const PartCopy&) = delete;

  const PartName& name() const { return name_; }
  // Blocks until the copy has ended, at most for `time`. Returns whether the copy has ended.
  bool wait_for(std::chrono::milliseconds time) { return error_.wait_for(time) == std::future_status::ready; }
  // Blocks until the copy has ended. Returns its error; "" if this rank and all partners hold the part. Must be called
  // at most once.
  std::string wait() { return error_.get(); }
  // Returns the staging memory for the next copy; undefined for a model on the CPU. Must be called after wait().
  at::Tensor take_staging() { return device_.is_cpu() ? at::Tensor() : copies_.take_memory(); }

 private:
  std::string run();

  CopyStore& store_;
  UnchangedPieces& unchanged_;
  const PartName name_;
  const int world_;
  const uint64_t id_;
  const at::Device device_;
  const std::vector<Member> partners_;
  const std::chrono::milliseconds patience_;
  const std::set<std::string> frozen_;  // names of the frozen parameters
  SavePlan plan_;
  const std::shared_ptr<CopyMemory> memory_;  // has room for all pieces; only written pages use memory
  std::vector<Piece> shared_;                 // pieces in the memory of unchanged_
  HostCopies copies_;
  std::atomic<bool> is_cancelled_ = false;
  std::future<std::string> error_;  // last: its thread uses the members above
};

}  // namespace tessera::internal
