#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include <tessera/communicator.h>

namespace tessera::internal {

// Implemented by backends, which keep the store of their rendezvous.
class HasStore {
 public:
  virtual ~HasStore() = default;
  virtual const c10::intrusive_ptr<c10d::Store>& store() const = 0;
  // Returns a rank whose process is known to have ended, or -1. Ranks of other hosts are not known. Thread-safe.
  virtual int ended_rank() const { return -1; }
};

// Named texts that the ranks of a group exchange through its store. Not collective, thread-safe, and non-blocking. For
// work that takes longer than the group's timeout, or that runs outside the training loop's thread. Texts should have
// at most a few KiB and be removed after use, because one process stores them all. All functions throw CommError if the
// store cannot be reached, usually because rank 0's process has ended.
class StoreMailbox {
 public:
  // `topic` is a prefix of all names. It must be equal on all ranks, and no other mailbox of the group may use it.
  StoreMailbox(const Communicator& comm, std::string topic);

  void leave(const std::string& name, const std::string& text) const;
  std::optional<std::string> find(const std::string& name) const;  // nullopt if there is no such text
  // Adds to the number of this name, which is 0 at first, and returns the sum. A text must not have this name.
  int64_t add(const std::string& name, int64_t amount) const;
  void remove(const std::string& name) const;
  // Limits all waits for the store of a group that is about to be given up. See StoreClient.
  void limit_patience(std::chrono::milliseconds patience) const;

  int ended_rank() const;  // see HasStore

 private:
  template <class Act>
  auto reach(const std::string& name, Act act) const;

  const HasStore& owner_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const std::string topic_;
};

}  // namespace tessera::internal
