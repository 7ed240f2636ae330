#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include <tessera/communicator.h>
#include <tessera/errors.h>

namespace tessera::internal {

// What was no CheckpointError where it was thrown, memory that ended, say: it says nothing of any checkpoint.
class OtherFailure : public CheckpointError {
 public:
  using CheckpointError::CheckpointError;
};

// Tells that a part which takes long gets on: beaten by who does it, asked by who waits. Any threads.
class Heartbeat {
 public:
  // How many of the group's timeouts one step may take, an fsync or a rename, say, before a rank counts as stuck.
  static constexpr int kMostTimeouts = 4;

  Heartbeat() { beat(); }
  void beat() { last_ = Clock::now().time_since_epoch().count(); }
  bool is_older_than(std::chrono::milliseconds age) const {
    return Clock::now().time_since_epoch() - Clock::duration(last_.load()) > age;
  }

 private:
  using Clock = std::chrono::steady_clock;
  std::atomic<Clock::rep> last_;
};

// How one rank's part of a collective function went, as a text that can travel: "" if well.
struct Outcome {
  // What its error is thrown as: CheckpointError, CheckpointMismatch, StorageUnavailable, OtherFailure or
  // std::invalid_argument.
  enum Kind : char { kFailure = 'F', kMismatch = 'X', kUnavailable = 'U', kOther = 'O', kMisuse = 'M' };
  Kind kind = kFailure;
  std::string error;
  std::string result;  // what the rank has to tell if all went well

  std::string to_text() const;
  static Outcome from_text(const std::string& text);
};

// Runs this rank's part; what it throws becomes the outcome. CommError passes through.
Outcome attempt(const std::function<std::string()>& part);

// Tells every rank every rank's outcome. If any failed, throws on all ranks what the lowest that failed did, naming
// that rank and the cause, by the outcome's kind. Otherwise returns the results in rank order. Collective.
std::vector<std::string> gather_results(Communicator& comm, const Outcome& own, const std::string& what);

// The same where nothing is to be told: a rank gathers texts only if one failed.
void require_success(Communicator& comm, const Outcome& own, const std::string& what);

// Runs a part that has nothing to tell: it went well on all ranks, or throws on all.
void on_all_ranks(Communicator& comm, const std::string& what, const std::function<void()>& part);

// As on_all_ranks(), for a part that may take longer on one rank than on another by more than the group's timeout: it
// runs on a thread of its own, in which nothing may be collective, while the ranks show each other that they live. A
// rank that is lost meanwhile is a CommError on the others at once, which they throw when their own part has ended. So
// is, as a CheckpointError of all that names it, one without a heartbeat for kMostTimeouts times the group's timeout;
// that rank itself still waits for its part.
void on_all_ranks_slowly(Communicator& comm, const std::string& what, Heartbeat& heartbeat,
                         const std::function<void()>& part);

// Throws what gather_results() throws, if any of these failed.
void throw_failures(const std::vector<Outcome>& outcomes, const std::string& what);

}  // namespace tessera::internal
