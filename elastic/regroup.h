#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <vector>

#include "core/runtime/guarded_by.h"
#include "core/runtime/run_clock.h"
#include "elastic/copies.h"
#include "elastic/peer_link.h"

namespace tessera::internal {

// [Note: how survivors decide]
// The next group is decided by single-decree Paxos, one instance for each generation. Its acceptors are the members of
// the old group; each serves requests on threads of its own. A decided value has the members, the step, and the store
// of the next group. A quorum is a majority of the old members, or all old members that are not proven dead. Any two
// quorums share a living member, or all members of one are dead. So two groups cannot form. A member that was stopped
// finds the decision when it continues. tests/elastic/regroup.pml specifies the protocol.
// Sources: Lamport, Paxos Made Simple (2001); torchft's quorum; Gemini (SOSP'23) for the copies.

// The agreed composition of the next group, and the step from which that group continues. A value type.
struct Decision {
  int64_t generation = 0;       // number of the new group
  std::vector<Member> members;  // indexed by rank
  Member store;                 // serves the group's store; may have left the group
  CompleteStep step;  // the step to continue from; step.world is 0 if none. step.holders are indices in `sources`
  std::vector<Member> sources;  // the members of the old group that continue
  // world_before: size of the old group. lost: old ranks of lost members. joined: new ranks of joined processes.
  int world_before = 0;
  std::vector<int> lost, joined;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Decision, generation, members, store, step, sources, world_before, lost, joined)

// Asks a member what its Acceptor knows of the group of this generation. Throws like ask_member().
nlohmann::json look_at(const Member& member, int64_t generation, std::chrono::milliseconds patience);
// Returns whether `looked`, an answer to look_at(), says that the member has left the group.
bool has_left(const nlohmann::json& looked);

// Returns whether the agreeing members may decide for the group. Both sets contain indices of the group's members.
bool is_quorum(int group_size, const std::set<int>& agreeing, const std::set<int>& proven_dead);

// A member's vote on the successor of one generation, and the decisions known to that member. Thread-safe.
class Acceptor {
 public:
  // Starts to answer for the group of this generation. Forgets promises and votes for earlier groups.
  void begin(int64_t generation);
  // If begin() set this generation, notes that this rank has left its group and holds these parts. Otherwise a no-op.
  void arrive(int64_t generation, const std::vector<HeldStep>& held);

  // Withdraws this process from decisions. The other members then treat the process as ended.
  void retire();

  // Returns the answer to a request: {"op": "look" | "prepare" | "accept" | "decided", "generation": ...}.
  nlohmann::json answer(const nlohmann::json& request);
  // Returns the decision on the successor of a generation; nullopt if this process does not know it.
  std::optional<nlohmann::json> decision(int64_t generation) const;
  int64_t highest_ballot() const;

 private:
  mutable std::mutex mutex_;
  int64_t generation_ TESSERA_GUARDED_BY(mutex_) = -1;
  bool is_retired_ TESSERA_GUARDED_BY(mutex_) = false;
  bool has_arrived_ TESSERA_GUARDED_BY(mutex_) = false;
  nlohmann::json held_ TESSERA_GUARDED_BY(mutex_) = nlohmann::json::array();
  int64_t promised_ TESSERA_GUARDED_BY(mutex_) = 0, accepted_ballot_ TESSERA_GUARDED_BY(mutex_) = 0;
  nlohmann::json accepted_ TESSERA_GUARDED_BY(mutex_);
  std::map<int64_t, nlohmann::json> decisions_ TESSERA_GUARDED_BY(mutex_);  // by generation of the replaced group
};

struct RegroupOptions {
  std::chrono::milliseconds stopped_after{0};  // time until a member that is silent, or does not arrive, is left out
  std::chrono::milliseconds timeout{0};        // limit of the whole regroup
  int least_ranks = 1;
  int most_ranks = 0;  // 0: no limit
  // Returns the processes that wait to join. Each one that answers joins, up to most_ranks. If null, none joins.
  std::function<std::vector<Member>()> joiners = nullptr;
  // Returns the decision that a member has recorded to let a process in, or nullopt. If null, there are no records.
  std::function<std::optional<Decision>()> recorded = nullptr;
  // Returns whether the run's file names a later group or says that the run has ended. If so, run() throws CommError
  // instead of forming a quorum by proofs of death. If null, there is no file.
  std::function<bool()> has_gone_on = nullptr;
  // Returns whether this process was stopped. If so, proofs of death do not count, because the other members may have
  // continued without this process and ended. If null, this process was not stopped.
  std::function<bool()> was_stopped = nullptr;
};

// Finds the next group of this member. Runs on the training loop's thread. Borrows `old_group` and `acceptor`.
class Regroup {
 public:
  // Sends a request to a member and returns the answer's fields. Throws PeerError like ask_member(). Must be
  // thread-safe: all members are asked concurrently, so that several silent ones cost one timeout.
  using Ask = std::function<nlohmann::json(const Member& member, const nlohmann::json& request,
                                           std::chrono::milliseconds patience)>;
  // Called if this member leads the decision: serves a store for the new group, and sets Decision::store.
  using ServeStore = std::function<void(Decision& decision)>;

  Regroup(const Decision& old_group, int rank, Acceptor& acceptor, Ask ask, ServeStore serve_store,
          const RegroupOptions& options);

  // Blocks until the next group is known. If this member was stopped, the decision may leave it out. Throws CommError
  // at the timeout, or earlier if the other members may have continued without this one and ended.
  Decision run();

 private:
  struct Seen {
    bool is_gone = false;
    bool has_answered = false;  // whether the member has answered the last request as a member of this group
    bool has_arrived = false;
    std::vector<HeldStep> held;
    RunClock::time_point ask_again{};  // a silent member must not be asked before this time
  };
  std::optional<nlohmann::json> propose();
  // Returns a decision for a group of the agreeing members that have arrived, and the processes that join.
  Decision compose(const std::set<int>& agreeing);
  // Returns whether these members are a quorum. If the quorum needs proofs of death, first reads a recorded decision:
  // ended members may have formed a group with a process unknown to this rank. Throws CommError if the run's file shows
  // that the ended members had continued without this rank.
  bool may_decide(const std::set<int>& agreeing);
  // Sends a request to members and updates their states. Returns the answers of the members that answer.
  std::map<int, nlohmann::json> request(const std::vector<int>& members, nlohmann::json fields);
  std::vector<int> first_members(int count) const;
  int first_that_answers() const;
  std::set<int> gone() const;
  bool was_stopped() const { return options_.was_stopped && options_.was_stopped(); }
  [[noreturn]] void fail() const;

  const Decision& group_;
  const int rank_;
  Acceptor& acceptor_;
  const Ask ask_;
  const ServeStore serve_store_;
  const RegroupOptions options_;
  std::vector<Seen> seen_;
  std::optional<nlohmann::json> found_;
};

}  // namespace tessera::internal
