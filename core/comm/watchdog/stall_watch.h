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

#include "core/comm/watchdog/rank_waits.h"

namespace tessera::internal {

// Finds out, through the store, why an operation does not end: a second thread per rank that looks on while operations
// end within a second. Then the first rank to look shows what it has started lately, and every other one
// compares that with its own: ranks that started different operations under the same number have diverged (one of them
// left out a layer, say). A rank that failed has left its reason in the store. Either ends the wait long before the
// timeout, with an error that says who and what. (PyTorch's flight recorder collects the same for reading after the
// fact.) A transport may know, too, that what is waited for cannot come. And a rank that lets go of the group says
// after how many operations, so that who waits for a later one need not wait for it. A rank that waits calls the store
// nine times a second, thirteen times where groups were split, however many ranks there are.
//
// Ranks may wait for each other in different groups, too, one in the group of all, say, and another in one that was
// split from it. Each of these looks well by itself, so a rank of split groups leaves what it waits for in the store of
// the group of all, and the rank that shows its operations looks for a cycle (core/comm/watchdog/wait_graph.h) there.
//
// Where no transport knows (NCCL's kernels wait for ever for a process that was killed), ranks beat: each tells the
// store that it lives, and one that waits asks whether the next one does. So the dead are found whoever they are, by
// one call a beat and rank, two while it waits; and that the store itself has gone, with rank 0's process, ends a wait.
//
// The process that has the store, rank 0's mostly, may be the first to end, and what has been said there goes with it.
// So ranks that wait for nothing ask whether there is news, four times a second (ask_every()), and that process, once
// the group has failed, waits until all have read why or have left, kReaders at most: await_readers(), ~StallWatch.
// Where it has not, there is nothing to be read but that the store will go, and it waits for two of their questions at
// most: c10d would complain of the third.
//
// It may be stopped, too, and c10d's calls of the store then have no timeout. So they are all made by threads that can
// be left behind, and nothing else here waits longer than kPatience for an answer. Thread-safe.
class StallWatch {
 public:
  static constexpr std::chrono::milliseconds kPatience{2000};
  static constexpr std::chrono::milliseconds kLookEvery{250};
  // Once a second where there are so many ranks that the store would have much to answer.
  static constexpr std::chrono::milliseconds ask_every(int ranks) {
    return std::clamp(std::chrono::milliseconds(ranks), kLookEvery, std::chrono::milliseconds(1000));
  }
  static constexpr std::chrono::milliseconds kReaders{3000};
  static constexpr int kBeatsMissed = 10;  // after which a rank counts as dead

  // What the watch's thread calls, every quarter of a second while a wait takes long.
  struct Callbacks {
    std::function<void()> interrupt;  // the wait has become pointless; explanation() tells why
    // Why the transport will not bring what is waited for; "": it may.
    std::function<std::string()> why_disconnected = {};
  };

  struct Options {
    std::chrono::milliseconds beat_every{};  // 0 for no beats, else at least kLookEvery; the same on all ranks
    bool serves_store = false;               // the store goes with this process
    RankWaits::Place place = {};
  };

  // A world of one needs no thread.
  StallWatch(c10::intrusive_ptr<c10d::Store> store, int rank, int size, Callbacks callbacks, Options options);
  StallWatch(c10::intrusive_ptr<c10d::Store> store, int rank, int size, Callbacks callbacks)
      : StallWatch(std::move(store), rank, size, std::move(callbacks), Options()) {}
  ~StallWatch();  // nothing is called any more
  StallWatch(const StallWatch&) = delete;
  StallWatch& operator=(const StallWatch&) = delete;

  // For the watch of a group of these ranks of this one, `name` being no other's of those. To be called on ranks that
  // are in none as well.
  RankWaits::Place part(const std::string& name, const std::vector<int>& members);

  // Notes an operation as number `sequence` of this rank.
  void started(uint64_t sequence, std::string description);
  // With a sequence: the calling thread, which starts nothing until the wait ends, waits until all ranks have started
  // that operation.
  void begin_wait(std::optional<uint64_t> sequence = {});
  void end_wait();

  // Tells that this rank starts no operation any more, all of its own being through. To be called before what waits for
  // the others, as the end of a communicator of NCCL's may; the destructor does it otherwise.
  void leave() noexcept;

  // Tells all ranks that this one is out of the group. The first reason counts; it is not told to anybody where
  // explanation() has given other ranks' reasons, which all know.
  void publish_failure(const std::string& reason) noexcept;

  // In all groups of this process, which is about to end: nothing of theirs is closed, so that they do not end before
  // it. Returns when others have read it, as await_readers().
  static void publish_failure_of_process(const std::string& reason) noexcept;

  // Where the store goes with this process: returns once the other ranks have read why the group has ended, or have
  // left it, or after kReaders; if it has not failed, after two of their questions. To be called when they have been
  // woken up. The first call counts.
  void await_readers() noexcept;

  // Why the last wait was interrupted, or, after a failure of the transport, what ranks that failed said of it; else
  // "".
  std::string explanation();

  RankWaits& waits() noexcept;  // of this rank, in all groups

  // Which ranks wait too, and which do not: for the text of a timeout. "" if the store does not say.
  std::string who_waits();

  // For how long its thread has waited for an answer of the store by now.
  std::chrono::milliseconds unanswered();

  // Why the store did not say something that it was asked; "" if it did.
  std::string store_failure();

 private:
  template <class Ask>
  auto ask_store(Ask ask) -> std::optional<decltype(ask())>;

  struct State;
  static void publish_failure(const std::shared_ptr<State>& state, const std::string& reason) noexcept;
  static void await_readers(State& state) noexcept;

  const std::shared_ptr<State> state_;  // the thread's too
  std::thread thread_;
};

}  // namespace tessera::internal
