#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>

namespace tessera::internal {

inline constexpr char kNcclWatchKeys[] = "watch";  // prefix of the keys of an NCCL group's news, in the group's store

// Messages of a group's ranks in its store: failures, ranks that have left, and the number of ranks that no longer need
// the store. All functions call the store, so they may block, and throw if the store is lost. Thread-safe.
class GroupNews {
 public:
  GroupNews(c10::intrusive_ptr<c10d::Store> store, int rank, int size, bool serves_store)
      : store_(std::move(store)), rank_(rank), size_(size), serves_store_(serves_store) {}

  bool serves_store() const { return serves_store_; }
  // Whether no rank of a group needs the store any more, not counting rank 0 if its process serves it (`serves_store`).
  static bool have_all_left(c10d::Store& store, int size, bool serves_store);

  void publish_failure(const std::string& reason);
  // Returns whether this is the first call by any rank of the group. The first caller reports the end of its process.
  bool is_first_to_tell() { return store_->add("tessera/told", 1) == 1; }
  // Returns the first four failures, in the order in which they were published; "" if there are none.
  std::string read_failures() const;
  // Returns whether there is news: a failure, or the coming end of the store.
  bool has_news() const;

  // Publishes that this rank no longer needs the store, unless this process serves it. Later calls are no-ops.
  void say_informed();
  bool has_said_informed() const { return said_informed_; }
  // Publishes that this rank starts no more operations after the first `started_count`, and no longer needs the store.
  // Later calls are no-ops. If several ranks leave, the store keeps the rank with the fewest operations. If
  // `has_failed` returns true, only publishes that this rank no longer needs the store: the failure suffices as reason.
  void say_left(uint64_t started_count, const std::function<bool()>& has_failed);
  struct Leaver {
    int rank;
    uint64_t started_count;
  };
  std::optional<Leaver> find_leaver() const;

  // Announces to the other ranks that there is news. Blocks until they no longer need the store, for at most `most`. If
  // the group has failed (`has_failed`) or there is news already, blocks for at most `most_after_failure` instead.
  void await_readers(bool has_failed, std::chrono::milliseconds most, std::chrono::milliseconds most_after_failure);

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_, size_;
  const bool serves_store_;
  std::atomic<bool> said_informed_ = false, said_left_ = false;
};

}  // namespace tessera::internal
