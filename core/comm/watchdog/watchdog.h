#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/comm/watchdog/wait_registry.h"

namespace tessera::internal {

class WatchdogLoop;

// Diagnoses stalled operations through the store, on its own thread. If an operation does not end within a second, the
// waiting rank searches for the reasons below. A found reason ends the wait long before the timeout, with an error that
// names the rank and the operation:
// - A rank has failed: it has published its failure in the store.
// - The ranks have diverged, that is, started different operations. The first rank to stall publishes its last
//   operations, and the others compare them with their own.
// - A rank has left: it has published the number of operations that it started.
// - The transport reports that the data cannot arrive.
// - Ranks wait for each other in different groups, such as the group of all ranks and a group that was split from it.
//   Every rank of split groups publishes its waits, and the rank that publishes its operations searches for a cycle
//   (wait_graph.h).
// - A rank is dead and no transport reports that: NCCL's kernels wait forever for a killed process. So ranks send
//   heartbeats to the store, and a waiting rank checks those of the next rank.
//
// A waiting rank calls the store nine times a second, or thirteen times with split groups, whatever the number of
// ranks. A heartbeat costs one call, or two during a wait.
//
// The store lives in one process (usually rank 0's). If that process exits first, published failures are lost. So ranks
// that do not wait poll for failures up to four times a second (ask_every()). After a failure, await_readers() in the
// store's process blocks until all ranks have read the failure or left, for at most kReaders. Otherwise, it blocks for
// at most two polling intervals, so that the other ranks can read that the store ends, and stop polling.
//
// The store's process may also be stopped, and c10d's calls of the store then have no timeout. So only threads that can
// be detached call the store, and the callers of this class wait for an answer for at most kPatience. Thread-safe.
class Watchdog {
 public:
  static constexpr std::chrono::milliseconds kPatience{2000};
  static constexpr std::chrono::milliseconds kLookEvery{250};
  // Interval at which a rank polls for failures. It grows with the number of ranks, to limit the load of the store.
  static constexpr std::chrono::milliseconds ask_every(int ranks) {
    return std::clamp(std::chrono::milliseconds(ranks), kLookEvery, std::chrono::milliseconds(1000));
  }
  static constexpr std::chrono::milliseconds kReaders{3000};

  // The watchdog's thread calls these functions during a stall, at most every quarter of a second.
  struct Callbacks {
    std::function<void()> interrupt;  // ends a wait that cannot complete: see explanation()
    // Returns the reason why the transport cannot complete the wait; "" if the wait can complete.
    std::function<std::string()> why_disconnected = {};
  };

  struct Options {
    std::chrono::milliseconds beat_every{};  // 0 for no heartbeats, else at least kLookEvery; equal on all ranks
    bool serves_store = false;               // this process serves the store
    WaitRegistry::Place place = {};          // from part(); the default is the group of all ranks
  };

  // Starts the watchdog's thread, unless there is only one rank.
  Watchdog(c10::intrusive_ptr<c10d::Store> store, int rank, int size, Callbacks callbacks, Options options);
  Watchdog(c10::intrusive_ptr<c10d::Store> store, int rank, int size, Callbacks callbacks)
      : Watchdog(std::move(store), rank, size, std::move(callbacks), Options()) {}
  ~Watchdog();  // no callback is called afterwards
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // Returns the place of the part of the ranks `members`, for the Options of that part's watchdog. `name` must be
  // unique among the parts of this group. Must also be called on ranks that are not members.
  WaitRegistry::Place part(const std::string& name, const std::vector<int>& members);

  // Records that this rank starts operation number `sequence`.
  void started(uint64_t sequence, std::string description);
  // Declares that the calling thread waits, and starts no operation until end_wait(). If `sequence` is set, also
  // declares that the wait lasts until all ranks have started that operation.
  void begin_wait(std::optional<uint64_t> sequence = {});
  void end_wait();

  // Publishes that all operations of this rank have ended, and that it starts no more. Called by the destructor. Must
  // be called before this process waits for other ranks to leave, as in the destruction of an NCCL communicator.
  void leave() noexcept;

  // Publishes that this rank has failed. Only the first call publishes its reason. A no-op if explanation() has
  // returned failures of other ranks, which are published already, or if the store is lost.
  void publish_failure(const std::string& reason) noexcept;

  // Publishes the failure in all groups of this process, which is about to end. Does not close the groups, so the other
  // ranks do not see closed connections before they can read the reason. Then waits as await_readers() does.
  static void publish_failure_of_process(const std::string& reason) noexcept;

  // Returns true on the first call by any process of the group, so that only one process prints the reason of its end.
  // If the store is lost, returns whether this rank knows no failure of another rank. Returns true without a group.
  static bool is_first_to_tell() noexcept;

  // Must be called in each process after publish_failure() or leave(). If this process serves the store, blocks until
  // the other ranks no longer need the store: they have read the failure or left the group. Blocks for at most kReaders
  // after a failure, otherwise for at most two intervals of ask_every(). A second call is a no-op.
  void await_readers() noexcept;

  // Returns the reason why waits of this rank were interrupted. If no wait was interrupted, returns the failures that
  // other ranks have published; "" if there are none or the store does not answer.
  std::string explanation();

  WaitRegistry& waits() noexcept;  // the waits of this rank in all groups

  // Returns a text that lists the waiting and other ranks, for timeout errors; "" if the store does not answer.
  std::string waiting_ranks();

  // Returns the duration of the store call that the watchdog's thread is making; 0 if there is no call.
  std::chrono::milliseconds unanswered();

  // Returns the reason why the store did not answer; "" if the store answered.
  std::string store_failure();

 private:
  template <class Ask>
  auto ask_store(Ask ask) -> std::optional<decltype(ask())>;

  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_, size_;
  const std::shared_ptr<WatchdogLoop> loop_;
  std::thread thread_;
};

}  // namespace tessera::internal
