#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/elastic.h>
#include "core/comm/group_process.h"
#include "core/launch/process_setup.h"
#include "elastic/copies.h"
#include "elastic/group_store.h"
#include "elastic/joining.h"
#include "elastic/part_copies.h"
#include "elastic/peer_link.h"
#include "elastic/regroup.h"
#include "elastic/unchanged_pieces.h"

namespace tessera::internal {

// The state of this process in an elastic run, across all its groups. Only the training loop's thread may use it. The
// server's threads use only copies_, stores_, acceptor_ and join_requests_, which are thread-safe.
class ElasticState {
 public:
  // Starts a run: exchanges all ranks' addresses through the store. Collective. `address`: this host's; "" if unknown.
  ElasticState(ElasticOptions options, const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
               const std::string& address);
  // Prepares to join the run that `file` describes. run() then joins the run.
  ElasticState(ElasticOptions options, const RunFile& file, const std::string& address);
  ~ElasticState();

  void run(const std::function<void(ElasticRun& run)>& body, const std::function<ElasticRun(ElasticRunState&)>& make);

  const ElasticOptions& options() const { return options_; }
  const Decision& group() const { return group_; }
  int rank() const { return rank_; }
  int first_world() const { return first_world_; }
  int most_ranks() const { return options_.most_ranks > 0 ? options_.most_ranks : first_world_; }
  // Returns whether a process waits to join and the group has room for it.
  bool may_grow() const;
  CopyStore& copies() { return copies_; }
  CopyMemories& memories() { return memories_; }
  UnchangedPieces& unchanged() { return unchanged_; }
  const std::string& own_id() const { return self_.id; }
  // The identity of the run, equal on all ranks.
  const std::string& run_id() const { return run_id_; }
  // Throws CommError if a member has ended or left the group. A silent member is no error, because it may be slow.
  void require_members() const;
  // Returns whether a step above 0 has been complete in memory, as far as this rank knows.
  bool has_had_copies() const { return has_had_copies_; }
  void note_complete_copy() { has_had_copies_ = true; }
  at::Tensor& staging_memory() { return staging_memory_; }

 private:
  enum class Outcome { kFinished, kLost };
  PeerMessage answer(PartReceiver& receiver, PeerMessage&& request);
  void start_server();
  // Blocks until this process is a member. Returns false if the run has ended before that.
  bool join();
  // Makes this process a member of group_.
  void enter_group();
  void leave_run();
  // If group_ has joining processes, records its decision. Returns false on failure: this rank must then admit none.
  bool record_joined();
  // On rank 0, writes the file by which other processes find the run.
  void publish(bool has_ended);
  RunFacts facts() const;
  // Blocks until all members have entered the group. Throws CommError at the group's timeout, but at once if a member
  // has ended or left the group. (A wait for that member in the store would last until the timeout.)
  void await_members();
  std::shared_ptr<Communicator> make_group();
  void serve_store(Decision& decision);
  // Makes the group and runs the body. Returns kLost after a CommError, or any error if a member is lost; else throws.
  Outcome attempt(const std::function<void(ElasticRun& run)>& body,
                  const std::function<ElasticRun(ElasticRunState&)>& make);
  // Returns whether a member of the group has ended, is silent for `stopped_after`, or has left the group.
  bool has_lost_member() const;
  // Leaves the broken group and enters the next one. Throws CommError if there is none with this process.
  void regroup();

  // Counts as a group, so that the process settings, which end with the last group, stay in force between two groups.
  const LiveGroup between_groups_;
  const GroupProcess process_;
  const ElasticOptions options_;
  int first_world_ = 0;
  const std::optional<ProcessEffects> effects_;
  const std::optional<RunFile> file_;
  bool is_joining_ = false;
  CopyMemories memories_;
  UnchangedPieces unchanged_;
  CopyStore copies_;
  ServedStores stores_;
  Acceptor acceptor_;
  JoinRequests join_requests_;
  std::string run_id_;
  Member self_;
  Decision group_;
  int rank_ = 0;
  std::optional<ElasticChange> change_;
  std::chrono::steady_clock::time_point lost_at_;
  at::Tensor staging_memory_;
  bool has_had_copies_ = false;
  int failures_at_step_ = 0;            // successive failures after the same step, none of which lost a rank
  std::shared_ptr<PeerServer> server_;  // last: its threads use the members above; not destroyed by a child of fork()
};

// Implements ElasticRun, for one group.
class ElasticRunState {
 public:
  ElasticRunState(ElasticState& all, std::shared_ptr<Communicator> comm, std::optional<ElasticChange> change,
                  std::chrono::steady_clock::time_point lost_at);

  const std::shared_ptr<Communicator>& comm() const { return comm_; }
  int64_t step() const { return step_; }
  int accumulation() const;
  int first_world() const { return all_.first_world(); }
  int64_t generation() const { return all_.group().generation; }
  const std::optional<ElasticChange>& change() const { return change_; }
  int64_t copied_bytes() const { return all_.copies().bytes(); }

  nlohmann::json restore(const TrainingState& state);
  void commit(const nlohmann::json& extra);
  // Blocks until all ranks have returned from the body.
  void finish();

 private:
  nlohmann::json restore_from_memory();
  std::optional<nlohmann::json> restore_from_disk();
  void start_copy(const nlohmann::json& extra);
  struct Agreed {
    bool is_copied;  // false if the copy in progress has failed on a rank
    bool may_grow;
  };
  // Waits for the copy in progress, if there is one, and agrees on the result with the other ranks. Is collective.
  Agreed end_copy();
  void report_resumed();

  ElasticState& all_;
  const std::shared_ptr<Communicator> comm_;
  std::optional<ElasticChange> change_;
  const std::chrono::steady_clock::time_point lost_at_;
  std::vector<Member> partners_;
  std::optional<TrainingState> state_;
  int64_t step_ = 0;
  bool has_resumed_ = false;
  bool has_warned_ = false;
  std::unique_ptr<PartCopy> copy_;
};

}  // namespace tessera::internal
