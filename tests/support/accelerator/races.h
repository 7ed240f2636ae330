// Detects unordered accesses to memory, by vector clocks.
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

// The place of a request. Stores addresses, and finds the names of functions only in text().
class CallStack {
 public:
  static CallStack here();
  // Returns Tessera's functions, the innermost first, without arguments: "Unit::unshard < Scheduler::use".
  std::string text() const;

 private:
  std::vector<void*> frames_;
};

// The detector of races. A block is one allocation. Each access to a block is kept until a later access covers it.
// Memory outside of blocks belongs to the host. Is thread-safe.
class Races {
 public:
  static Races& get();

  // `alias` is the address at which kernels access this memory. Accesses through its host address may fault.
  struct BlockInfo {
    size_t bytes = 0;
    int stream = 0;  // stream that was current at the allocation
    bool is_pinned = false;
    void* alias = nullptr;
    int64_t registered_with = 0;  // number of an NCCL group, from 1
    int64_t recording = 0;        // recording during which the block was allocated (graphs.h); 0: none
  };
  void add_block(void* begin, const BlockInfo& info);
  void remove_blocks(const void* begin, size_t bytes);
  std::optional<BlockInfo> block_at(const void* address);
  // Forgets the accesses to a block, all of which must be over. The next owner needs no order after them.
  void forget(const void* begin);
  // record_stream() records that a stream uses the block. take_recorded() returns these streams, and clears the record.
  void record_stream(const void* address, int stream);
  std::set<int> take_recorded(const void* address);

  void launched(int stream, std::string what, const std::vector<Access>& accesses, const Clock* also);
  Clock clock_of(int stream);  // includes work that the host knows to be over
  void ordered(int stream, const Clock& clock);
  void host_knows(int device, const Clock& clock);
  void host_waited(int device, const Clock& clock, const char* what);
  // Reports a fault of the host at `address`, and permits the access. Returns false unless that is in a pinned block.
  bool host_touched(const void* address);

  void count_registered(int device);
  void count_event_elsewhere(int device);
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
  std::set<uintptr_t> protected_;  // pinned blocks that the host must not touch now
  std::array<Clock, kStreams> clocks_{};
  std::array<Clock, kDevices> host_{};
  std::array<Counts, kDevices> counts_{};
  std::map<std::string, int64_t> findings_;
};

}  // namespace tessera::accelerator
