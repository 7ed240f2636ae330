#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include <tessera/communicator.h>

namespace tessera::internal {

// Interface of communicator backends that keep the c10d store of their rendezvous.
class HasStore {
 public:
  virtual ~HasStore() = default;
  virtual const c10::intrusive_ptr<c10d::Store>& store() const = 0;
  // Returns a rank of this host whose process is known to have ended, or -1 if there is none. Thread-safe.
  virtual int ended_rank() const { return -1; }
};

// Named texts that the ranks of a group exchange through its store. Thread-safe. Calls are not collective, and do not
// wait for other ranks. Used for work that outlasts the group's timeout, or that runs outside the training loop's
// thread. Texts should have at most a few KiB and be removed after use, because one process stores all of them. All
// functions that call the store throw CommError if it cannot be reached, usually because rank 0's process has ended.
class StoreMailbox {
 public:
  // `topic` is a prefix of all names. It must be equal on all ranks, and no other mailbox of the group may use it.
  // `comm` must outlive this object. Throws std::logic_error if its backend keeps no store.
  StoreMailbox(const Communicator& comm, std::string topic);

  void leave(const std::string& name, const std::string& text) const;
  std::optional<std::string> find(const std::string& name) const;  // returns nullopt if there is no such text
  // Adds `amount` to the number `name`, which is 0 at first, and returns the sum. A text must not have the same name.
  int64_t add(const std::string& name, int64_t amount) const;
  void remove(const std::string& name) const;
  // Lowers the time limit of each store call. Used before a group is abandoned. See StoreClient::limit_patience().
  void limit_patience(std::chrono::milliseconds patience) const;

  int ended_rank() const;  // see HasStore::ended_rank()

 private:
  template <class Act>
  auto reach(const std::string& name, Act act) const;

  const HasStore& owner_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const std::string topic_;
};

}  // namespace tessera::internal
