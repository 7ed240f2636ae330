#pragma once

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "core/memory/memory_file.h"
#include "core/runtime/run_clock.h"

namespace tessera::internal {

// Shared memory in which the ranks of one host announce messages to each other. The memory contains a Member for each
// rank and a Channel for each ordered pair of ranks. All bytes are zero at first, except for the locks. The memory is a
// memfd, which leaves no file behind. Other ranks open it through /proc, if the kernel lets them read the creator's
// memory. Ranks that are threads of one process share one mapping.
//
// A process may be stopped at any point, so every wait here has a deadline.
class SharedBoard {
 public:
  using Deadline = RunClock::time_point;
  // States of a message. kSend, kReceive: announced by one side. kMatched: announced by both, so either side may copy.
  // kPushing, kPulling: being copied by the sender or receiver. kDone: copied; the other side must free the slot.
  // kOtherBytes (sizes differ), kBroken: the group fails, and the slot is never freed.
  enum State : uint32_t { kFree, kSend, kReceive, kMatched, kPushing, kPulling, kDone, kOtherBytes, kBroken };

  // The address of one side's tensor, or PublishedMemory::number() for a peer of the same process.
  struct Side {
    uint64_t address, bytes;
  };
  struct Slot {
    std::atomic<uint32_t> state;
    uint64_t tag;
    Side sender, receiver;
    Side& side(State kind) { return kind == kSend ? sender : receiver; }
  };
  static constexpr State opposite(State kind) { return kind == kSend ? kReceive : kSend; }
  static constexpr State copying(State kind) { return kind == kSend ? kPushing : kPulling; }

  struct alignas(64) Member {
    std::atomic<uint32_t> events;  // incremented by every event that this rank may wait for
    std::atomic<uint32_t> is_asleep;
    std::atomic<int32_t> awaited;             // the rank whose events wake this rank
    std::atomic<uint64_t> awaited_operation;  // or the operation whose messages wake this rank
    std::atomic<uint32_t> has_left;
    int32_t pid;
    uint64_t magic;  // the number stored at magic_address, which proves that the memory is reachable
    uint64_t magic_address;
  };

  // The messages from one rank to another.
  struct alignas(64) Channel {
    static constexpr size_t kSlots = 1024;
    pthread_mutex_t mutex;  // a robust mutex, because its owner may die
    uint32_t used;          // slots from here on were never used
    Slot slots[kSlots];
  };

  // Creates a board for `ranks` ranks. Throws std::runtime_error if the system or `ulimit -f` refuses its memory.
  static std::shared_ptr<SharedBoard> create(int ranks);
  // Opens the board whose notice() is `notice`, and which this process or another one has created. Throws
  // std::runtime_error if the board cannot be opened, or does not have `ranks` ranks.
  static std::shared_ptr<SharedBoard> open(const std::string& notice, int ranks);
  ~SharedBoard();
  SharedBoard(const SharedBoard&) = delete;
  SharedBoard& operator=(const SharedBoard&) = delete;

  std::string notice() const { return file_.notice(); }  // the argument of open()
  void close_file() { file_ = MemoryFile(); }            // called when all ranks have opened the board
  int ranks() const { return ranks_; }
  Member& member(int rank) const;
  Channel& channel(int from, int to) const;
  // The memory for SharedRounds: SharedRoundsPlan(ranks()).bytes() bytes, beginning at a page boundary.
  std::byte* rounds_area() const;

  // Announces a message of this kind. If the peer has announced the opposite kind with this tag, returns the peer's
  // slot in its new state: kMatched, kOtherBytes, or, for at most `at_once_bytes`, copying(kind): the caller must then
  // copy the message. Otherwise returns a new slot in the state `kind`, or a null slot if the channel is full. Throws
  // std::runtime_error if the peer holds the channel's lock, and has died or is stopped until the deadline.
  struct Announced {
    Slot* slot = nullptr;
    State state = kFree;
  };
  static Announced announce(Channel& channel, State kind, uint64_t tag, Side own, uint64_t at_once_bytes,
                            Deadline until);
  // Claims a matched message. Returns true if the caller, which announced `kind`, must copy the message now.
  static bool claim(Slot& slot, State kind);
  // Frees unmatched slots of this kind, and sets matched slots that are not being copied to kBroken. Then polls each
  // message that is being copied until its copy ends, or until `while_copying`, called after each poll, returns false.
  // Returns false if a message is still being copied at the deadline. Throws as announce() does.
  static bool take_back(Channel& channel, State kind, Deadline until, const std::function<bool()>& while_copying);

  // Counts an event of rank `from` and of `operation`. Wakes the member if it waits for one of them, or if `from` is
  // kAnyone. Other events do not wake the member: with many ranks, most events do not concern its wait.
  static constexpr int kAnyone = -1;
  static constexpr uint64_t kNoOperation = UINT64_MAX;
  static void notify(Member& member, int from, uint64_t operation = kNoOperation);
  // Blocks until an awaited event has changed `events` from `seen`, for at most `most`; may return spuriously. The
  // caller must set `awaited` before it reads `events`.
  static void sleep(Member& self, uint32_t seen, std::chrono::nanoseconds most);

  // ring() wakes all listeners. ring_for_room() wakes all listeners if a WaitForRoom exists; otherwise it is a no-op.
  void ring() const;
  void ring_for_room() const;
  // Registers a listener while this object exists. rings() returns the number of calls of ring(). sleep() blocks until
  // that number differs from `rings`, or until `most` has passed; it may return spuriously.
  class Listener {
   public:
    explicit Listener(const SharedBoard& board);
    ~Listener();
    Listener(const Listener&) = delete;
    Listener& operator=(const Listener&) = delete;
    uint32_t rings() const;
    void sleep(uint32_t rings, std::chrono::nanoseconds most) const;

   private:
    const SharedBoard& board_;
  };
  // Registers a wait for room for a round of SharedRounds, while this object exists.
  class WaitForRoom {
   public:
    explicit WaitForRoom(const SharedBoard& board);
    ~WaitForRoom();
    WaitForRoom(const WaitForRoom&) = delete;
    WaitForRoom& operator=(const WaitForRoom&) = delete;

   private:
    const SharedBoard& board_;
  };

 private:
  struct alignas(64) Header {
    int32_t ranks;
    alignas(64) std::atomic<uint32_t> rings;
    std::atomic<uint32_t> listeners, waits_for_room;
  };
  SharedBoard(MemoryFile file, int ranks);
  Header& header() const { return *reinterpret_cast<Header*>(base_); }

  MemoryFile file_;
  const int ranks_;
  const size_t bytes_;
  std::byte* base_;
};

}  // namespace tessera::internal
