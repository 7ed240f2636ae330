#include "core/comm/shared_memory/shared_board.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <ctime>
#include <map>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "core/comm/shared_memory/shared_rounds_plan.h"

namespace tessera::internal {
namespace {

size_t bytes_before_rounds(size_t header_bytes, int ranks) {
  const auto count = static_cast<size_t>(ranks);
  const size_t bytes =
      header_bytes + count * sizeof(SharedBoard::Member) + count * count * sizeof(SharedBoard::Channel);
  return (bytes + SharedRoundsPlan::kPageBytes - 1) / SharedRoundsPlan::kPageBytes * SharedRoundsPlan::kPageBytes;
}

size_t bytes_for(size_t header_bytes, int ranks) {
  return bytes_before_rounds(header_bytes, ranks) + SharedRoundsPlan(ranks).bytes();
}

void initialise(pthread_mutex_t& mutex) {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&mutex, &attributes);
  pthread_mutexattr_destroy(&attributes);
}

timespec as_timespec(std::chrono::nanoseconds time) {
  return {static_cast<time_t>(time.count() / 1000000000), static_cast<long>(time.count() % 1000000000)};
}

// Boards that this process has created, by notice. Other threads of this process open the same objects.
std::mutex boards_mutex;
std::map<std::string, std::weak_ptr<SharedBoard>>& boards() {
  static auto* const boards = new std::map<std::string, std::weak_ptr<SharedBoard>>;
  return *boards;
}

class ChannelLock {
 public:
  ChannelLock(SharedBoard::Channel& channel, SharedBoard::Deadline until) : mutex_(channel.mutex) {
    int result = ::pthread_mutex_trylock(&mutex_);
    if (result == EBUSY) result = lock_until(until);
    if (result == 0) return;
    if (result == ETIMEDOUT) throw std::runtime_error("timed out: its process has stopped");
    if (result != EOWNERDEAD) throw std::system_error(result, std::generic_category(), "pthread_mutex_lock");
    ::pthread_mutex_consistent(&mutex_);
    ::pthread_mutex_unlock(&mutex_);
    throw std::runtime_error("its process died");
  }
  ~ChannelLock() { ::pthread_mutex_unlock(&mutex_); }
  ChannelLock(const ChannelLock&) = delete;
  ChannelLock& operator=(const ChannelLock&) = delete;

 private:
  int lock_until(SharedBoard::Deadline until) {
    for (;;) {
#ifdef __SANITIZE_THREAD__  // ThreadSanitizer does not know clocklock, and would report each unlock
      const auto time = as_timespec((std::chrono::system_clock::now() + next_slice(until)).time_since_epoch());
      const int result = ::pthread_mutex_timedlock(&mutex_, &time);
#else  // a monotonic clock, because the wall clock may be set back
      const auto time = as_timespec((std::chrono::steady_clock::now() + next_slice(until)).time_since_epoch());
      const int result = ::pthread_mutex_clocklock(&mutex_, CLOCK_MONOTONIC, &time);
#endif
      if (result != ETIMEDOUT || RunClock::now() >= until) return result;
    }
  }

  pthread_mutex_t& mutex_;
};

}  // namespace

static_assert(std::atomic<uint32_t>::is_always_lock_free, "processes share them");

std::shared_ptr<SharedBoard> SharedBoard::create(int ranks) {
  auto file = MemoryFile::create_fixed("tessera", static_cast<int64_t>(bytes_for(sizeof(Header), ranks)));
  std::shared_ptr<SharedBoard> board(new SharedBoard(std::move(file), ranks));
  board->header().ranks = ranks;
  for (int from = 0; from < ranks; ++from)
    for (int to = 0; to < ranks; ++to)
      if (from != to) initialise(board->channel(from, to).mutex);
  std::lock_guard lock(boards_mutex);
  std::erase_if(boards(), [](const auto& entry) { return entry.second.expired(); });
  boards().emplace(board->notice(), board);
  return board;
}

std::shared_ptr<SharedBoard> SharedBoard::open(const std::string& notice, int ranks) {
  std::shared_ptr<SharedBoard> board;
  {
    // Threads must share one mapping, because ThreadSanitizer relates accesses by their virtual address.
    std::lock_guard lock(boards_mutex);
    const auto found = boards().find(notice);
    if (found != boards().end()) board = found->second.lock();
  }
  if (!board) {
    board.reset(new SharedBoard(MemoryFile::open(notice, O_RDWR), ranks));
    board->close_file();
  }
  if (board->header().ranks != ranks) throw std::runtime_error("no board of these ranks");
  return board;
}

SharedBoard::SharedBoard(MemoryFile file, int ranks)
    : file_(std::move(file)), ranks_(ranks), bytes_(bytes_for(sizeof(Header), ranks)) {
  if (!file_.is_fixed_at(static_cast<int64_t>(bytes_))) throw std::runtime_error("no board of these ranks");
  void* base = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file_.descriptor(), 0);
  if (base == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
  base_ = static_cast<std::byte*>(base);
}

SharedBoard::~SharedBoard() { ::munmap(base_, bytes_); }

SharedBoard::Member& SharedBoard::member(int rank) const {
  return reinterpret_cast<Member*>(base_ + sizeof(Header))[rank];
}

SharedBoard::Channel& SharedBoard::channel(int from, int to) const {
  auto* channels = reinterpret_cast<Channel*>(base_ + sizeof(Header) + static_cast<size_t>(ranks_) * sizeof(Member));
  return channels[from * ranks_ + to];
}

std::byte* SharedBoard::rounds_area() const { return base_ + bytes_before_rounds(sizeof(Header), ranks_); }

// No event is lost. This function increments the count before it reads `is_asleep` and `awaited`. The member sets
// `awaited` before it reads the count, and `is_asleep` before the kernel compares the count with `seen`.
void SharedBoard::notify(Member& member, int from, uint64_t operation) {
  member.events.fetch_add(1);
  const bool is_awaited = from == kAnyone || member.awaited.load() == from ||
                          (operation != kNoOperation && member.awaited_operation.load() == operation);
  if (!is_awaited) return;
  if (member.is_asleep.load() != 0) ::syscall(SYS_futex, &member.events, FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

void SharedBoard::sleep(Member& self, uint32_t seen, std::chrono::nanoseconds most) {
  self.is_asleep.store(1);
  const timespec time = as_timespec(most);
  ::syscall(SYS_futex, &self.events, FUTEX_WAIT, seen, &time, nullptr, 0);
  self.is_asleep.store(0);
}

// No ring is missed, for the same reason as in notify().
void SharedBoard::ring() const {
  std::atomic<uint32_t>& rings = header().rings;
  rings.fetch_add(1);
  if (header().listeners.load() != 0) ::syscall(SYS_futex, &rings, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void SharedBoard::ring_for_room() const {
  if (header().waits_for_room.load() != 0) ring();
}

SharedBoard::Listener::Listener(const SharedBoard& board) : board_(board) { board_.header().listeners.fetch_add(1); }

SharedBoard::Listener::~Listener() { board_.header().listeners.fetch_sub(1); }

uint32_t SharedBoard::Listener::rings() const { return board_.header().rings.load(); }

void SharedBoard::Listener::sleep(uint32_t rings, std::chrono::nanoseconds most) const {
  const timespec time = as_timespec(most);
  ::syscall(SYS_futex, &board_.header().rings, FUTEX_WAIT, rings, &time, nullptr, 0);
}

SharedBoard::WaitForRoom::WaitForRoom(const SharedBoard& board) : board_(board) {
  board_.header().waits_for_room.fetch_add(1);
}

SharedBoard::WaitForRoom::~WaitForRoom() { board_.header().waits_for_room.fetch_sub(1); }

SharedBoard::Announced SharedBoard::announce(Channel& channel, State kind, uint64_t tag, Side own,
                                             uint64_t at_once_bytes, Deadline until) {
  const ChannelLock lock(channel, until);
  Slot* free_slot = nullptr;
  for (uint32_t i = 0; i < channel.used; ++i) {
    Slot& slot = channel.slots[i];
    const uint32_t state = slot.state.load(std::memory_order_acquire);
    if (state == kFree && free_slot == nullptr) free_slot = &slot;
    if (state != opposite(kind) || slot.tag != tag) continue;
    slot.side(kind) = own;
    State matched = own.bytes <= at_once_bytes ? copying(kind) : kMatched;
    if (slot.side(opposite(kind)).bytes != own.bytes) matched = kOtherBytes;
    slot.state.store(matched, std::memory_order_release);
    return {&slot, matched};
  }
  if (free_slot == nullptr && channel.used < Channel::kSlots) free_slot = &channel.slots[channel.used++];
  if (free_slot == nullptr) return {};
  free_slot->tag = tag;
  free_slot->side(kind) = own;
  free_slot->state.store(kind, std::memory_order_release);
  return {free_slot, kind};
}

bool SharedBoard::claim(Slot& slot, State kind) {
  uint32_t state = kMatched;
  return slot.state.compare_exchange_strong(state, copying(kind), std::memory_order_acq_rel);
}

bool SharedBoard::take_back(Channel& channel, State kind, Deadline until, const std::function<bool()>& while_copying) {
  uint32_t used = 0;
  {
    const ChannelLock lock(channel, until);
    used = channel.used;
    for (uint32_t i = 0; i < used; ++i) {
      std::atomic<uint32_t>& state = channel.slots[i].state;
      uint32_t announced = kind, matched = kMatched;
      state.compare_exchange_strong(announced, kFree);
      state.compare_exchange_strong(matched, kBroken);
    }
  }
  for (uint32_t i = 0; i < used; ++i)
    for (;;) {
      const uint32_t state = channel.slots[i].state.load(std::memory_order_acquire);
      if ((state != kPushing && state != kPulling) || !while_copying()) break;
      if (RunClock::now() >= until) return false;
    }
  return true;
}

}  // namespace tessera::internal
