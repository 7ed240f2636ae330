#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include <tessera/communicator.h>
#include <tessera/errors.h>
#include "core/runtime/run_clock.h"

namespace tessera::internal {

// Thrown on all ranks if one rank has a failure that no other class describes, such as lack of memory. Does not mean
// that a checkpoint is damaged.
class OtherFailure : public CheckpointError {
 public:
  using CheckpointError::CheckpointError;
};

// Stores the time of the last progress of a long operation. The thread that makes progress calls beat(). Thread-safe.
class Heartbeat {
 public:
  // A rank counts as stuck if one step (an fsync or a rename) takes longer than this multiple of the group's timeout.
  static constexpr int kMostTimeouts = 4;

  Heartbeat() { beat(); }
  void beat() { last_ = Clock::now().time_since_epoch().count(); }
  bool is_older_than(std::chrono::milliseconds age) const {
    return Clock::now().time_since_epoch() - Clock::duration(last_.load()) > age;
  }

 private:
  using Clock = RunClock;
  std::atomic<Clock::rep> last_;
};

// The result of one rank's part of a collective function. Ranks exchange outcomes as text. `error` is "" on success.
struct Outcome {
  // Exception types, in order: CheckpointError, CheckpointMismatch, StorageUnavailable, OtherFailure, invalid_argument.
  enum Kind : char { kFailure = 'F', kMismatch = 'X', kUnavailable = 'U', kOther = 'O', kMisuse = 'M' };
  Kind kind = kFailure;
  std::string error;
  std::string result;  // the value that the part returned

  std::string to_text() const;
  static Outcome from_text(const std::string& text);
};

// Runs this rank's part. Returns the part's result or exception as an Outcome. Does not catch CommError.
Outcome attempt(const std::function<std::string()>& part);

// Gathers the outcomes of all ranks, and returns their results in rank order. If any rank failed, throws the error of
// the lowest failed rank, with the rank's number, on all ranks. Collective.
std::vector<std::string> gather_results(Communicator& comm, const Outcome& own, const std::string& what);

// Like gather_results(), but returns no results. Cheaper, because it gathers texts only after a failure. Collective.
void require_success(Communicator& comm, const Outcome& own, const std::string& what);

// Runs `part` on each rank. If `part` fails on any rank, throws the error on all ranks. Collective.
void on_all_ranks(Communicator& comm, const std::string& what, const std::function<void()>& part);

// Like on_all_ranks(), for parts whose durations may differ by more than the group's timeout. Runs `part` on a thread
// while the ranks exchange heartbeats. `part` must not call collectives. If a rank is lost, each other rank throws
// CommError after its own part has ended. If a rank does not call beat() for kMostTimeouts times the group's timeout,
// all ranks throw a CheckpointError that names this rank. The stuck rank throws only after its part has ended.
void on_all_ranks_slowly(Communicator& comm, const std::string& what, Heartbeat& heartbeat,
                         const std::function<void()>& part);

// Throws the error of the first failed outcome, with its rank. A no-op if no outcome is a failure.
void throw_failures(const std::vector<Outcome>& outcomes, const std::string& what);

}  // namespace tessera::internal
