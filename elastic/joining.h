#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include <tessera/elastic.h>
#include "core/runtime/guarded_by.h"
#include "core/runtime/run_clock.h"
#include "elastic/peer_link.h"
#include "elastic/regroup.h"

namespace tessera::internal {

// [Note: how a process joins]
// Rank 0 of each group writes the group's members to a file in a shared folder. A process that wants to join asks these
// members repeatedly, and they note its request. In commit() the ranks agree that a process waits, complete a copy of
// the step, and leave the group. The loss of a rank also ends a group. In both cases the members decide on the next
// group as in [Note: how survivors decide], and the decision contains the waiting processes, which have no vote. A
// member records the decision in the folder before it sends the decision to a joining process. So a rank for which the
// other ranks are proven dead can read there that they formed a group with the process. If the process dies after the
// decision, the new group regroups, as after any loss.
//
// Sources: the rendezvous of torchrun and the lighthouse of torchft, which, unlike this design, need a separate server.

inline constexpr char kRendezvousVariable[] = "TESSERA_ELASTIC_RENDEZVOUS";  // set by spawn_elastic()
inline constexpr char kJoinVariable[] = "TESSERA_ELASTIC_JOIN";

// A run and its current group. Is a value type.
struct RunFacts {
  std::string run_id;
  int first_world = 0;
  int64_t generation = 0;
  std::vector<Member> members;
  bool has_ended = false;  // the run has ended without an error
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RunFacts, run_id, first_world, generation, members, has_ended)

// The file by which later processes find the run.
class RunFile {
 public:
  explicit RunFile(const std::filesystem::path& folder);
  const std::filesystem::path& path() const { return path_; }
  // Replaces the file. `id`, unique to the process, names a temporary file. Throws std::runtime_error on failure.
  void write(const RunFacts& facts, const std::string& id) const;
  // Returns the run in the file; nullopt if the file cannot be opened. Throws std::runtime_error if it is damaged.
  std::optional<RunFacts> read() const;

  // Records the decision on a group that a process joins. Each decision of a run has a file of its own. Throws
  // std::runtime_error on failure.
  void record(const std::string& run_id, const Decision& decision, const std::string& id) const;
  // Returns the recorded decision on a generation, or nullopt. Throws std::runtime_error if the file is unreadable.
  std::optional<Decision> recorded(const std::string& run_id, int64_t generation) const;
  // Returns whether the file names a later group of the run, or says that the run has ended. Throws like read().
  bool has_later_group(const std::string& run_id, int64_t generation) const;
  // Deletes the records of a run that has ended.
  void forget(const std::string& run_id) const;

 private:
  std::filesystem::path record_path(const std::string& run_id, int64_t generation) const;
  std::filesystem::path path_;
};

// Returns ElasticOptions::rendezvous, or else the folder of spawn_elastic(); empty if there is none.
std::filesystem::path rendezvous_folder(const ElasticOptions& options);

// Returns whether a member of the run in this file answers and has not left the run. Throws like RunFile::read().
bool is_alive(const RunFile& file);

// Returns whether the run has ended: the file is missing or says so, or all members have ended or left. Does not throw.
bool has_ended(const RunFile& file);

// Creates a temporary folder on this host. The destructor deletes the folder with its files.
class RendezvousFolder {
 public:
  RendezvousFolder();
  ~RendezvousFolder();
  RendezvousFolder(const RendezvousFolder&) = delete;
  RendezvousFolder& operator=(const RendezvousFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// The processes that ask this member to let them join. Is thread-safe.
class JoinRequests {
 public:
  // Sets the group of which this process is a member. answer() then refuses processes whose options are not `options`.
  void enter(RunFacts facts, const Decision& group, std::string options);
  // Ends this process's membership in its group: answer() then returns an empty object.
  void leave();
  // Returns the answer to {"op": "join", "member": ..., "options": ...}: "refused" with the run's options, if these
  // differ; else "facts", and "decision" if the group contains the member. Empty if this process is no member.
  nlohmann::json answer(const nlohmann::json& request);
  // Returns the processes that still ask to join, in the order of their first requests.
  std::vector<Member> waiting() const;

 private:
  struct Request {
    Member member;
    RunClock::time_point last_asked;
  };
  mutable std::mutex mutex_;
  std::optional<RunFacts> facts_ TESSERA_GUARDED_BY(mutex_);
  Decision group_ TESSERA_GUARDED_BY(mutex_);
  std::string options_ TESSERA_GUARDED_BY(mutex_);
  std::vector<Request> requests_ TESSERA_GUARDED_BY(mutex_);
};

// Asks the members of a run to let this process join, until a decision contains this process.
class Joiner {
 public:
  struct Place {
    RunFacts facts;
    Decision group;
  };
  Joiner(RunFile file, Member self, std::string options, std::chrono::milliseconds stopped_after,
         std::chrono::milliseconds timeout);
  // Blocks until a decision contains this process. Returns nullopt if the run has ended without an error. If the run
  // had ended before the call, first waits `stopped_after` for a next run. Throws std::invalid_argument if the run has
  // other options. Throws CommError if no member has answered for `timeout`, or if for `stopped_after` every member was
  // proven dead or had left the run.
  std::optional<Place> await_place();

 private:
  // Asks all members once, concurrently: several silent ones cost one timeout. Returns nullopt if no answer has a
  // decision. Throws std::invalid_argument if a member refuses this process.
  std::optional<Place> ask();
  // If the file has a newer group, copies it to run_. Returns whether the file says that its run has ended.
  bool read_file();
  [[noreturn]] void fail(const std::string& reason) const;

  const RunFile file_;
  const Member self_;
  const std::string options_;
  const std::chrono::milliseconds stopped_after_, timeout_;
  std::optional<RunFacts> run_;
  bool has_answer_ = false, are_all_gone_ = false;  // results of the last round
};

}  // namespace tessera::internal
