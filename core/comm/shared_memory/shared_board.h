#pragma once

#include <pthread.h>
#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace tessera::internal {

// Shared memory in which the ranks of one host announce messages to each other: a member for each rank, and slots for
// each ordered pair of them. Plain data, all zero at first but for the locks. It has no name that could be left behind:
// it is a memfd, which the others open through /proc, where the kernel asks for the same permission as for reading the
// process's memory. A number that nobody can guess says which one is meant. Ranks that are threads of one process share
// one mapping.
//
// A process may be stopped at any place, so nothing here waits without a deadline.
class SharedBoard {
 public:
  using Deadline = std::chrono::steady_clock::time_point;
  // Announced by one side; by the other too, and either may copy; copied by the sender or the receiver, who is through
  // with it at kDone: the other side frees it. The last two end the group: nobody copies, and nobody frees.
  enum State : uint32_t { kFree, kSend, kReceive, kMatched, kPushing, kPulling, kDone, kOtherBytes, kBroken };

  // What one side has announced: where, in its memory; to a peer of its process, PublishedMemory::number().
  struct Side {
    uint64_t address, bytes;
  };
  // One message, and what became of it.
  struct Slot {
    std::atomic<uint32_t> state;
    uint64_t tag;
    Side sender, receiver;
    Side& side(State kind) { return kind == kSend ? sender : receiver; }
  };
  static constexpr State opposite(State kind) { return kind == kSend ? kReceive : kSend; }
  static constexpr State copying(State kind) { return kind == kSend ? kPushing : kPulling; }

  struct alignas(64) Member {
    std::atomic<uint32_t> events;  // counts up at whatever this rank may wait for
    std::atomic<uint32_t> is_asleep;
    std::atomic<int32_t> awaited;             // the rank on whose doing it wakes up
    std::atomic<uint64_t> awaited_operation;  // or of what messages, if there is something to copy
    std::atomic<uint32_t> has_left;
    int32_t pid;
    uint64_t magic;  // a number that lies in its memory, where the next says: whether it can be reached
    uint64_t magic_address;
  };

  // What goes from one rank to another.
  struct alignas(64) Channel {
    static constexpr size_t kSlots = 1024;
    pthread_mutex_t mutex;  // robust: a process that dies does not take it along
    uint32_t used;          // slots beyond were never used
    Slot slots[kSlots];
  };

  // A new one for that many ranks. Throws std::system_error.
  static std::shared_ptr<SharedBoard> create(int ranks);
  // The one of that many ranks for which a rank gave this notice, in this process or another one. Throws
  // std::runtime_error if it cannot be opened, or is none.
  static std::shared_ptr<SharedBoard> open(const std::string& notice, int ranks);
  ~SharedBoard();
  SharedBoard(const SharedBoard&) = delete;
  SharedBoard& operator=(const SharedBoard&) = delete;

  std::string notice() const;  // for open()
  void close_fd();             // once all have opened it
  int ranks() const { return ranks_; }
  Member& member(int rank) const;
  Channel& channel(int from, int to) const;
  // For their SharedRounds: SharedRoundsPlan(ranks()).bytes(), on a page of its own.
  std::byte* rounds_area() const;

  // The slot of what the peer announced with this tag and the opposite kind, and what it is now: kMatched; up to
  // `at_once_bytes` copying(kind), so the caller has to copy; kOtherBytes. Else a new one, in the state `kind`, or none
  // if there is no room. Throws std::runtime_error if the peer died in here, or has stopped in here until then.
  struct Announced {
    Slot* slot = nullptr;
    State state = kFree;
  };
  static Announced announce(Channel& channel, State kind, uint64_t tag, Side own, uint64_t at_once_bytes,
                            Deadline until);
  // Whether the caller, who announced it in this kind, is now the one to copy it.
  static bool claim(Slot& slot, State kind);
  // Frees what was announced in this kind and not matched yet, and breaks what was and nobody copies. `while_copying`
  // is called for as long as something is being copied, until it returns false. False if it still was at the deadline.
  static bool take_back(Channel& channel, State kind, Deadline until, const std::function<bool()>& while_copying);

  // Lets the member look again at what it waits for, if it is something of rank `from` (kAnyone: of any) or of that
  // operation: of many ranks each has news for each, and who wakes up for other news does so in vain.
  static constexpr int kAnyone = -1;
  static constexpr uint64_t kNoOperation = UINT64_MAX;
  static void notify(Member& member, int from, uint64_t operation = kNoOperation);
  // Returns when `events` is not `seen` any more, unless that was of nothing `awaited`, or after that time, or for no
  // reason. The caller has set what is awaited before it read `events`.
  static void sleep(Member& self, uint32_t seen, std::chrono::nanoseconds most);

  // Wakes all that listen; with the second, where one of them waits for room.
  void ring() const;
  void ring_for_room() const;
  // For as long as it lives a rank hears the bell: sleep() returns once it has rung more often than `rings` says, after
  // that time, or for no reason.
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
  // For as long as it lives a rank waits for room.
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
  // At the start of the memory.
  struct alignas(64) Header {
    uint64_t number[2];
    int32_t ranks;
    alignas(64) std::atomic<uint32_t> rings;
    std::atomic<uint32_t> listeners, waits_for_room;
  };
  SharedBoard(int fd, int ranks);
  Header& header() const { return *reinterpret_cast<Header*>(base_); }

  int fd_;
  const int ranks_;
  const size_t bytes_;
  std::byte* base_;
};

}  // namespace tessera::internal
