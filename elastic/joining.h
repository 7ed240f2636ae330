#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
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
// Rank 0 of each group writes the group's members to a file in a shared folder. A later process asks them to join,
// again and again. Members note the request. In commit() the ranks agree that a process waits, complete a copy of the
// step, and leave the group; or a rank is lost. Either way they decide the next group as in [Note: how survivors
// decide], and its value contains the waiting processes. These have no vote on it. A member's answer to the next
// request carries the decision, which the member has recorded in the folder before: a rank that counts others as proven
// dead must learn of the group that they formed with the process. A waiting process that dies, or a member that does,
// is a loss as any other.
//
// Sources: the rendezvous of torchrun and the lighthouse of torchft, which are servers of their own.

inline constexpr char kRendezvousVariable[] = "TESSERA_ELASTIC_RENDEZVOUS";  // of spawn_elastic()
inline constexpr char kJoinVariable[] = "TESSERA_ELASTIC_JOIN";

// A run and its current group. A value.
struct RunFacts {
  std::string run_id;
  int first_world = 0;
  int64_t generation = 0;
  std::vector<Member> members;
  bool has_ended = false;  // without error
};
nlohmann::json to_json(const RunFacts& facts);
RunFacts facts_from_json(const nlohmann::json& fields);

// The file by which later processes find the run.
class RunFile {
 public:
  explicit RunFile(const std::filesystem::path& folder);
  const std::filesystem::path& path() const { return path_; }
  // Replaces the file. `id` must be unique for each process. Throws std::runtime_error.
  void write(const RunFacts& facts, const std::string& id) const;
  // Returns nullopt if there is no file. Throws std::runtime_error, with the path, if it is damaged.
  std::optional<RunFacts> read() const;

  // Records the decision on a group that a process joins. Each decision of a run has a file of its own. Throws
  // std::runtime_error.
  void record(const std::string& run_id, const Decision& decision, const std::string& id) const;
  // The recorded decision on a generation, or nullopt. Throws std::runtime_error.
  std::optional<nlohmann::json> recorded(const std::string& run_id, int64_t generation) const;
  // Whether the run has had a later group, or has ended. Throws std::runtime_error.
  bool has_later_group(const std::string& run_id, int64_t generation) const;
  // Deletes the records of a run that has ended.
  void forget(const std::string& run_id) const;

 private:
  std::filesystem::path record_path(const std::string& run_id, int64_t generation) const;
  std::filesystem::path path_;
};

// ElasticOptions::rendezvous, or else that of spawn_elastic(). Empty: none.
std::filesystem::path rendezvous_folder(const ElasticOptions& options);

// Whether a member of the run in this file answers.
bool is_alive(const RunFile& file);

// Whether the run in this file has ended: no member lives that has not left it. Does not throw.
bool has_ended(const RunFile& file);

// A temporary folder of this host, which is deleted with its files at the end.
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

// The processes that ask this member to join. Thread-safe.
class JoinRequests {
 public:
  // This process is a member of the group from now on. `options` must be equal in a joining process.
  void enter(RunFacts facts, const Decision& group, std::string options);
  // This process is no member any more.
  void leave();
  // The answer to {"op": "join", "member": ..., "options": ...}: "refused" with the run's options; else "facts", and
  // the "decision" on the current group if the process is in it. Empty if this process is no member.
  nlohmann::json answer(const nlohmann::json& request);
  // The processes that still ask, the first ones first.
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

// Asks the members of a run to join, until a decision contains this process.
class Joiner {
 public:
  struct Place {
    RunFacts facts;
    Decision group;
  };
  Joiner(RunFile file, Member self, std::string options, std::chrono::milliseconds stopped_after,
         std::chrono::milliseconds timeout);
  // Blocks until this process has a place; nullopt if the run has ended without error. Throws std::invalid_argument if
  // the run has other options. Throws CommError if no member has answered for the timeout, or if all members have been
  // proven dead for `stopped_after`.
  std::optional<Place> await_place();

 private:
  // Asks all members once.
  std::optional<Place> ask();
  // Updates the members from the file. Returns whether the run has ended.
  bool read_file();
  [[noreturn]] void fail(const std::string& reason) const;

  const RunFile file_;
  const Member self_;
  const std::string options_;
  const std::chrono::milliseconds stopped_after_, timeout_;
  std::optional<RunFacts> run_;
  std::map<std::string, RunClock::time_point> ask_again_;  // silent members, by id
  bool has_answer_ = false, are_all_gone_ = false;         // of the last round
};

}  // namespace tessera::internal
