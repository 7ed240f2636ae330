#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <optional>
#include <string>

#include <tessera/communicator.h>

namespace tessera::internal {

// What backends are beside a Communicator: they keep the store where their ranks met.
class HasStore {
 public:
  virtual ~HasStore() = default;
  virtual const c10::intrusive_ptr<c10d::Store>& store() const = 0;
  // One whose process has ended; -1: this rank knows of none, as of other hosts. Any thread.
  virtual int ended_rank() const { return -1; }
};

// Texts by name that the ranks of a group leave for each other in its store, beside the operations: not collective,
// from any thread, and nothing waits. For what takes longer than the group's timeout, or happens on another thread than
// the loop's. A few KiB each; they are one process's work to keep, so remove what is no longer needed. All functions
// throw CommError where the store cannot be reached any more, mostly since rank 0's process has ended.
class Notes {
 public:
  // Names begin with `topic`, the same on all ranks and no other's.
  Notes(const Communicator& comm, std::string topic);

  void leave(const std::string& name, const std::string& text) const;
  std::optional<std::string> find(const std::string& name) const;  // nothing if nobody has left it
  // Adds to the number of this name, which begins as 0, and returns the sum. Not a name of leave() or find().
  int64_t add(const std::string& name, int64_t amount) const;
  void remove(const std::string& name) const;

  int ended_rank() const;  // see HasStore, which must live

 private:
  template <class Act>
  auto reach(const std::string& name, Act act) const;

  const HasStore& owner_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const std::string topic_;
};

}  // namespace tessera::internal
