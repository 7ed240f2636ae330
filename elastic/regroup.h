#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/runtime/guarded_by.h"
#include "core/runtime/run_clock.h"
#include "elastic/copies.h"
#include "elastic/peer_link.h"

namespace tessera::internal {

// [Note: how survivors decide]
// The next group is decided by single-decree Paxos, one instance for each generation. Its acceptors are the members of
// the old group; each serves requests on threads of its own. A value is the members, the step, and the store of the
// next group. A quorum is a majority of the old members, or all of them but those that are proven dead. Any two quorums
// share a member that lives, or all members of one are dead, so two groups cannot form. A member that was stopped
// meanwhile finds the decision when it returns. tests/elastic/regroup.pml specifies the protocol.
// Sources: Lamport, Paxos Made Simple (2001); torchft's quorum; Gemini (SOSP'23) for the copies.

// The composition of a group. A value.
struct Decision {
  int64_t generation = 0;       // of the new group
  std::vector<Member> members;  // by rank
  Member store;                 // that serves the group's store; may have left the group
  CompleteStep step;  // that it continues from; holders are indices in `sources`. A world of 0: none is complete.
  std::vector<Member> sources;  // the members that hold the step
  // The change: the size of the old group, its ranks that are not members, and the ranks of members that joined.
  int world_before = 0;
  std::vector<int> lost, joined;
};
nlohmann::json to_json(const Decision& decision);
Decision decision_from_json(const nlohmann::json& fields);

// Whether these members may decide for the group. All sets are indices of its members.
bool is_quorum(int group_size, const std::set<int>& agreeing, const std::set<int>& proven_dead);

// A member's vote on the successor of one generation, and the decisions that it has learned. Thread-safe.
class Acceptor {
 public:
  // From now on answers for this generation.
  void begin(int64_t generation);
  // This rank has left the group of the generation, and holds these parts.
  void arrive(int64_t generation, const std::vector<HeldStep>& held);

  // This process takes part in no decision any more: it counts as ended.
  void retire();

  // The answers to requests: {"op": "look" | "prepare" | "accept" | "decided", "generation": ...}.
  nlohmann::json answer(const nlohmann::json& request);
  // The decision on the successor of a generation, if it is known here.
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
  std::map<int64_t, nlohmann::json> decisions_ TESSERA_GUARDED_BY(mutex_);  // by generation of the old group
};

struct RegroupOptions {
  std::chrono::milliseconds stopped_after{0};  // a member that is silent, or does not arrive, for that long is left out
  std::chrono::milliseconds timeout{0};        // of the whole regroup
  int least_ranks = 1;
  int most_ranks = 0;  // 0: no limit
  // The processes that wait to join, and hold nothing. Those that answer become members. Null: none.
  std::function<std::vector<Member>()> joiners = nullptr;
  // Reads the decision, if a member has recorded it before it let a process in. Null: no process joins.
  std::function<std::optional<nlohmann::json>()> recorded = nullptr;
  // Whether the folder's file names a later group, or says that the run has ended: proofs of death do not count then.
  // Null: no folder.
  std::function<bool()> has_gone_on = nullptr;
  // Whether this process was stopped: the others may have gone on without it and ended. Proofs of death do not count
  // then. Null: it was not.
  std::function<bool()> was_stopped = nullptr;
};

// Finds the next group of a member, on the training loop's thread.
class Regroup {
 public:
  // Sends a request to a member and returns the answer's fields. Throws PeerError, as ask_member(). Must be
  // thread-safe: all members are asked at once, so that several silent ones cost one timeout.
  using Ask = std::function<nlohmann::json(const Member& member, const nlohmann::json& request,
                                           std::chrono::milliseconds patience)>;
  // Serves a store for a new group, if this member leads it: sets the decision's address and port.
  using ServeStore = std::function<void(Decision& decision)>;

  Regroup(const Decision& old_group, int rank, Acceptor& acceptor, Ask ask, ServeStore serve_store,
          const RegroupOptions& options);

  // Blocks until the next group is known, at most for the timeout. The decision may leave this member out: it was
  // stopped. Throws CommError, which names the members that do not answer.
  Decision run();

 private:
  struct Seen {
    bool is_gone = false;
    bool has_answered = false;  // the last request, as a member of this group
    bool has_arrived = false;
    std::vector<HeldStep> held;
    RunClock::time_point ask_again{};  // a silent member is asked less often
  };
  std::optional<nlohmann::json> propose();
  // A group of the agreeing members and the processes that join.
  Decision compose(const std::set<int>& agreeing);
  // Whether these members are a quorum. If they need proofs of death, a recorded decision counts: the members that have
  // ended may have formed a group with a process that this rank does not know. Throws CommError if they have gone on
  // without this rank while it could not reach them, and have ended since.
  bool may_decide(const std::set<int>& agreeing);
  // Returns the answers of the members that answer. Updates the states of the members.
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
