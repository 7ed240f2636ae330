#include "tessera/comm/shared_board.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <ctime>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

namespace tessera {
namespace {

size_t bytes_for(int ranks) {
  const auto count = static_cast<size_t>(ranks);
  return count * sizeof(SharedBoard::Member) + count * count * sizeof(SharedBoard::Channel);
}

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

void initialise(pthread_mutex_t& mutex) {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&mutex, &attributes);
  pthread_mutexattr_destroy(&attributes);
}

// Holds a channel's lock.
class ChannelLock {
 public:
  explicit ChannelLock(SharedBoard::Channel& channel) : mutex_(channel.mutex) {
    const int result = ::pthread_mutex_lock(&mutex_);
    if (result == 0) return;
    if (result != EOWNERDEAD) throw std::system_error(result, std::generic_category(), "pthread_mutex_lock");
    ::pthread_mutex_consistent(&mutex_);
    ::pthread_mutex_unlock(&mutex_);
    throw std::runtime_error("its process died");
  }
  ~ChannelLock() { ::pthread_mutex_unlock(&mutex_); }
  ChannelLock(const ChannelLock&) = delete;
  ChannelLock& operator=(const ChannelLock&) = delete;

 private:
  pthread_mutex_t& mutex_;
};

}  // namespace

static_assert(std::atomic<uint32_t>::is_always_lock_free, "processes share them");

std::shared_ptr<SharedBoard> SharedBoard::create(int ranks) {
  const int fd = ::memfd_create("tessera", MFD_CLOEXEC);
  if (fd < 0) fail("memfd_create");
  if (::ftruncate(fd, static_cast<off_t>(bytes_for(ranks))) != 0) {
    ::close(fd);
    fail("ftruncate");
  }
  std::shared_ptr<SharedBoard> board(new SharedBoard(fd, ranks));
  for (int from = 0; from < ranks; ++from)
    for (int to = 0; to < ranks; ++to)
      if (from != to) initialise(board->channel(from, to).mutex);
  return board;
}

std::shared_ptr<SharedBoard> SharedBoard::open(pid_t pid, int fd, int ranks) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  const int own = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (own < 0) fail(path.c_str());
  std::shared_ptr<SharedBoard> board(new SharedBoard(own, ranks));
  board->close_fd();
  return board;
}

SharedBoard::SharedBoard(int fd, int ranks) : fd_(fd), ranks_(ranks), bytes_(bytes_for(ranks)) {
  void* base = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (base == MAP_FAILED) {
    close_fd();
    fail("mmap");
  }
  base_ = static_cast<std::byte*>(base);
}

SharedBoard::~SharedBoard() {
  ::munmap(base_, bytes_);
  close_fd();
}

void SharedBoard::close_fd() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

SharedBoard::Member& SharedBoard::member(int rank) const { return reinterpret_cast<Member*>(base_)[rank]; }

SharedBoard::Channel& SharedBoard::channel(int from, int to) const {
  auto* channels = reinterpret_cast<Channel*>(base_ + static_cast<size_t>(ranks_) * sizeof(Member));
  return channels[from * ranks_ + to];
}

// No notification is lost: this counts before it looks whether the member sleeps, and sleep() says that it sleeps
// before the system compares the count with `seen`.
void SharedBoard::notify(Member& member) {
  member.events.fetch_add(1);
  if (member.is_asleep.load() != 0) ::syscall(SYS_futex, &member.events, FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

void SharedBoard::sleep(Member& self, uint32_t seen, std::chrono::nanoseconds most) {
  self.is_asleep.store(1);
  const timespec time{static_cast<time_t>(most.count() / 1000000000), static_cast<long>(most.count() % 1000000000)};
  ::syscall(SYS_futex, &self.events, FUTEX_WAIT, seen, &time, nullptr, 0);
  self.is_asleep.store(0);
}

SharedBoard::Announcement SharedBoard::announce(Channel& channel, State kind, uint64_t tag, uint64_t address,
                                                uint64_t bytes) {
  const uint32_t opposite = kind == kSend ? kReceive : kSend;
  const ChannelLock lock(channel);
  Slot* free_slot = nullptr;
  for (uint32_t i = 0; i < channel.used; ++i) {
    Slot& slot = channel.slots[i];
    const uint32_t state = slot.state.load(std::memory_order_acquire);
    if (state == kFree && free_slot == nullptr) free_slot = &slot;
    if (state != opposite || slot.tag != tag) continue;
    slot.other_bytes = bytes;
    slot.state.store(slot.bytes == bytes ? kCopying : kOtherBytes, std::memory_order_release);
    return {.met = &slot};
  }
  if (free_slot == nullptr && channel.used < Channel::kSlots) free_slot = &channel.slots[channel.used++];
  if (free_slot == nullptr) return {};
  free_slot->tag = tag;
  free_slot->address = address;
  free_slot->bytes = bytes;
  free_slot->state.store(kind, std::memory_order_release);
  return {.announced = free_slot};
}

void SharedBoard::take_back(Channel& channel, State kind, const std::function<bool()>& while_copying) {
  uint32_t used = 0;
  {
    const ChannelLock lock(channel);
    used = channel.used;
    for (uint32_t i = 0; i < used; ++i) {
      uint32_t state = kind;
      channel.slots[i].state.compare_exchange_strong(state, kFree);
    }
  }
  for (uint32_t i = 0; i < used; ++i)
    while (channel.slots[i].state.load(std::memory_order_acquire) == kCopying && while_copying()) {
    }
}

}  // namespace tessera
