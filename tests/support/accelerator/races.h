// What is known of the order of accesses to memory, and what is not.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tests/support/accelerator/accelerator.h"
#include "tests/support/accelerator/streams.h"

namespace tessera::accelerator {

// Where something was asked for: addresses now, names when somebody wants to read them.
class CallStack {
 public:
  static CallStack here();
  // Functions of ours from the innermost, without their arguments: "Unit::unshard < Scheduler::use".
  std::string text() const;

 private:
  std::vector<void*> frames_;
};

// The detector. A block is what an allocator gave out; every access to one is kept until a later one covers it. Memory
// outside of blocks is the host's own. Thread-safe.
class Races {
 public:
  static Races& get();

  // `alias`: where kernels reach the same memory; the host's own addresses fault when they should.
  struct BlockInfo {
    size_t bytes = 0;
    int stream = 0;  // on which it was allocated
    bool is_pinned = false;
    void* alias = nullptr;
    int64_t registered_with = 0;  // a group of NCCL's, of number 1 or more
  };
  void add_block(void* begin, const BlockInfo& info);
  void remove_blocks(const void* begin, size_t bytes);
  std::optional<BlockInfo> block_at(const void* address);
  // All that was done with the block is over, and its next owner need not know of it.
  void forget(const void* begin);
  // Streams that were recorded for the block, and are to be asked when it is freed; forgets them.
  void record_stream(const void* address, int stream);
  std::set<int> take_recorded(const void* address);

  void launched(int stream, std::string what, const std::vector<Access>& accesses, const Clock* also);
  Clock clock_of(int stream);  // with what the host knows now
  void ordered(int stream, const Clock& clock);
  void host_knows(int device, const Clock& clock);
  void host_waited(int device, const Clock& clock, const char* what);
  // The host touched an address that faulted. False if that is not for us to explain.
  bool host_touched(const void* address);

  void count_registered(int device);
  void found(const std::string& text);
  std::vector<std::string> findings();
  Counts counts(int device);
  void reset_counts();
  void reset();

 private:
  struct Entry {
    Access access;
    int stream;
    uint64_t time;
    std::shared_ptr<const std::pair<std::string, CallStack>> by;
    std::string text() const;
  };
  struct Block {
    BlockInfo info;
    std::vector<Entry> entries;
    std::set<int> recorded;
    int protection = 3;  // PROT_READ | PROT_WRITE
  };
  using Blocks = std::map<uintptr_t, Block>;
  Blocks::iterator find(uintptr_t address);
  void check(Block& block, Entry entry, const Clock* also);
  void protect(Blocks::iterator block);
  void host_knows_locked(int device, const Clock& clock);

  std::mutex mutex_;
  Blocks blocks_;
  std::set<uintptr_t> protected_;  // pinned blocks that the host may not touch now
  std::array<Clock, kStreams> clocks_{};
  std::array<Clock, kDevices> host_{};
  std::array<Counts, kDevices> counts_{};
  std::map<std::string, int64_t> findings_;
};

}  // namespace tessera::accelerator
