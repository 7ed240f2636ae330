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

// A failure that was not a CheckpointError when thrown, such as lack of memory. Does not mean that a checkpoint is
// damaged.
class OtherFailure : public CheckpointError {
 public:
  using CheckpointError::CheckpointError;
};

// Shows progress of a long operation. The working thread calls beat(), a waiting thread is_older_than(). Thread-safe.
class Heartbeat {
 public:
  // A rank counts as stuck if one step (an fsync or a rename) takes this many times the group's timeout.
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

// The result of one rank's part of a collective function, which ranks send as text. `error` is "" on success.
struct Outcome {
  // The exception type: CheckpointError, CheckpointMismatch, StorageUnavailable, OtherFailure or std::invalid_argument.
  enum Kind : char { kFailure = 'F', kMismatch = 'X', kUnavailable = 'U', kOther = 'O', kMisuse = 'M' };
  Kind kind = kFailure;
  std::string error;
  std::string result;  // the rank's value, if it succeeded

  std::string to_text() const;
  static Outcome from_text(const std::string& text);
};

// Runs this rank's part. Returns its result, or its exception, as an Outcome. Does not catch CommError.
Outcome attempt(const std::function<std::string()>& part);

// Exchanges outcomes. If any rank failed, throws on all ranks the error of the lowest failed rank, with that rank's
// number. Otherwise returns the results in rank order. Collective.
std::vector<std::string> gather_results(Communicator& comm, const Outcome& own, const std::string& what);

// Like gather_results(), but returns no results and gathers texts only if a rank failed. Collective.
void require_success(Communicator& comm, const Outcome& own, const std::string& what);

// Runs a part without a result. Throws on all ranks if the part fails on one rank. Collective.
void on_all_ranks(Communicator& comm, const std::string& what, const std::function<void()>& part);

// Like on_all_ranks(), for parts whose durations may differ by more than the group's timeout. Runs the part, which must
// not be collective, on a thread while the ranks exchange heartbeats. If a rank is lost, the other ranks throw
// CommError when their own parts end. If a rank is silent for kMostTimeouts times the group's timeout, all ranks throw
// a CheckpointError that names that rank. The silent rank throws only when its part has ended.
void on_all_ranks_slowly(Communicator& comm, const std::string& what, Heartbeat& heartbeat,
                         const std::function<void()>& part);

// Throws like gather_results() if any outcome is a failure.
void throw_failures(const std::vector<Outcome>& outcomes, const std::string& what);

}  // namespace tessera::internal
