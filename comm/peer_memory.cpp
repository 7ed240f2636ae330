#include "tessera/comm/peer_memory.h"

#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "tessera/memory/switches.h"

namespace tessera {
namespace {

using std::chrono::steady_clock;

// How often a rank that waits asks whether its peer still lives.
constexpr auto kAskEvery = std::chrono::milliseconds(50);
// How long it looks for the message before it sleeps: waking up costs about as much.
constexpr auto kSpin = std::chrono::microseconds(30);

const std::string kNone = "none";

uint64_t magic = SharedBoard::kMagic;  // what the others look for; never written

uint64_t as_integer(const void* address) { return reinterpret_cast<uintptr_t>(address); }

std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// Equal for two processes exactly if a process id names the same process for both: one boot, PID namespace and user.
std::string host_identity() {
  char name[64] = {};
  if (::readlink("/proc/self/ns/pid", name, sizeof(name) - 1) < 0) return kNone;
  const std::string boot = first_line("/proc/sys/kernel/random/boot_id");
  return boot.empty() ? kNone : boot + "/" + name + "/" + std::to_string(::geteuid());
}

// Texts that ranks show each other, each under a key of its own.
class Notices {
 public:
  Notices(c10d::Store& store, int rank) : store_(store), rank_(rank) {}
  void put(const std::string& kind, const std::string& text) { store_.set(key(kind, rank_), text); }
  std::vector<std::string> of(const std::string& kind, const std::vector<int>& ranks) {
    std::vector<std::string> keys, texts;
    for (int rank : ranks) keys.push_back(key(kind, rank));
    for (const auto& bytes : store_.multiGet(keys)) texts.emplace_back(bytes.begin(), bytes.end());
    return texts;
  }

 private:
  static std::string key(const std::string& kind, int rank) {
    return "tessera/memory/" + kind + "/" + std::to_string(rank);
  }

  c10d::Store& store_;
  const int rank_;
};

bool reads_magic(pid_t pid, uint64_t address) {
  if (pid == ::getpid()) return true;
  uint64_t word = 0;
  iovec own{&word, sizeof(word)};
  iovec theirs{reinterpret_cast<void*>(address), sizeof(word)};
  return ::process_vm_readv(pid, &own, 1, &theirs, 1, 0) == static_cast<ssize_t>(sizeof(word)) &&
         word == SharedBoard::kMagic;
}

// The host's first rank makes the board; threads of its process share its mapping of it, since what they
// do there is ordered for those who watch (ThreadSanitizer) only under one address.
std::shared_ptr<SharedBoard> open_board(const std::string& notice, int ranks) {
  std::istringstream text(notice);
  pid_t pid = 0;
  int fd = -1;
  uintptr_t address = 0;
  if (!(text >> pid >> fd >> address)) throw std::runtime_error("no board");
  if (pid == ::getpid()) return *reinterpret_cast<std::shared_ptr<SharedBoard>*>(address);
  return SharedBoard::open(pid, fd, ranks);
}

// In their order; none where this rank is not to take part.
std::vector<int> ranks_of_host(Notices& notices, int size, bool is_wanted) {
  const std::string identity = is_wanted && !is_switched_off("TESSERA_PEER_MEMORY") ? host_identity() : kNone;
  notices.put("host", identity);
  std::vector<int> everyone(size), host;
  std::iota(everyone.begin(), everyone.end(), 0);
  const auto identities = notices.of("host", everyone);
  if (identity != kNone)
    std::copy_if(everyone.begin(), everyone.end(), std::back_inserter(host),
                 [&](int peer) { return identities[peer] == identity; });
  return host;
}

bool all_agree(Notices& notices, const std::string& kind, const std::vector<int>& host, bool answer) {
  notices.put(kind, answer ? "yes" : "no");
  const auto answers = notices.of(kind, host);
  return std::all_of(answers.begin(), answers.end(), [](const std::string& text) { return text == "yes"; });
}

// The board of a host's ranks, if all of them have opened it and reach each other's memory, else null.
std::shared_ptr<SharedBoard> share_board(Notices& notices, int rank, const std::vector<int>& host) {
  const int ranks = static_cast<int>(host.size());
  const auto self = std::find(host.begin(), host.end(), rank) - host.begin();
  std::shared_ptr<SharedBoard> board;
  try {
    if (self == 0) {
      board = SharedBoard::create(ranks);
      std::ostringstream notice;
      notice << ::getpid() << ' ' << board->fd() << ' ' << as_integer(&board);
      notices.put("board", notice.str());
    } else {
      board = open_board(notices.of("board", {host.front()})[0], ranks);
    }
    SharedBoard::Member& member = board->member(static_cast<int>(self));
    member.pid = ::getpid();
    member.magic_address = as_integer(&magic);
  } catch (const std::runtime_error&) {  // not allowed here
    if (self == 0) notices.put("board", kNone);
  }
  bool reaches_all = all_agree(notices, "opened", host, board != nullptr);
  for (int peer = 0; reaches_all && peer < ranks; ++peer)
    reaches_all = reads_magic(board->member(peer).pid, board->member(peer).magic_address);
  if (!all_agree(notices, "reaches", host, reaches_all)) return nullptr;
  if (self == 0) board->close_fd();
  return board;
}

}  // namespace

std::unique_ptr<PeerMemory> PeerMemory::connect(c10d::Store& store, int rank, int size,
                                                std::chrono::milliseconds timeout, bool is_wanted) {
  Notices notices(store, rank);
  const auto host = ranks_of_host(notices, size, is_wanted);
  if (host.size() < 2) return nullptr;
  if (first_line("/proc/sys/kernel/yama/ptrace_scope") == "1") ::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
  auto board = share_board(notices, rank, host);
  if (!board) return nullptr;
  std::vector<int> local(size, -1);
  for (size_t i = 0; i < host.size(); ++i) local[host[i]] = static_cast<int>(i);
  return std::unique_ptr<PeerMemory>(new PeerMemory(rank, std::move(local), std::move(board), timeout));
}

PeerMemory::PeerMemory(int rank, std::vector<int> local, std::shared_ptr<SharedBoard> board,
                       std::chrono::milliseconds timeout)
    : rank_(rank),
      local_(std::move(local)),
      board_(std::move(board)),
      timeout_(timeout),
      may_spin_(board_->ranks() <= static_cast<int>(std::thread::hardware_concurrency())) {}

PeerMemory::~PeerMemory() { close(); }

bool PeerMemory::is_alive(int peer) const { return reads_magic(member(peer).pid, member(peer).magic_address); }

void PeerMemory::copy(bool to_peer, void* own, uint64_t theirs, uint64_t bytes, int peer) const {
  const pid_t pid = member(peer).pid;
  if (pid == ::getpid()) {
    void* other = reinterpret_cast<void*>(theirs);
    std::memcpy(to_peer ? other : own, to_peer ? own : other, bytes);
    return;
  }
  for (uint64_t done = 0; done < bytes;) {
    iovec here{static_cast<std::byte*>(own) + done, bytes - done};
    iovec there{reinterpret_cast<void*>(theirs + done), bytes - done};
    const ssize_t moved =
        to_peer ? ::process_vm_writev(pid, &here, 1, &there, 1, 0) : ::process_vm_readv(pid, &here, 1, &there, 1, 0);
    if (moved > 0) {
      done += static_cast<uint64_t>(moved);
    } else if (moved == 0 || errno != EINTR) {
      throw std::system_error(moved == 0 ? EFAULT : errno, std::generic_category(),
                              "reaching the memory of its process");
    }
  }
}

PeerMemory::Announced PeerMemory::send(const at::Tensor& tensor, int peer, uint64_t tag) {
  return announce(SharedBoard::kSend, tensor, peer, tag);
}

PeerMemory::Announced PeerMemory::receive(const at::Tensor& tensor, int peer, uint64_t tag) {
  return announce(SharedBoard::kReceive, tensor, peer, tag);
}

PeerMemory::Announced PeerMemory::announce(SharedBoard::State kind, const at::Tensor& tensor, int peer, uint64_t tag) {
  const bool is_send = kind == SharedBoard::kSend;
  void* const data = is_send ? const_cast<void*>(tensor.const_data_ptr()) : tensor.mutable_data_ptr();
  const int self = local_[rank_], other = local_[peer];
  SharedBoard::Channel& channel = is_send ? board_->channel(self, other) : board_->channel(other, self);
  SharedBoard::Announcement announcement;
  const auto try_to_announce = [&] {
    if (member(rank_).has_left.load() != 0) throw std::runtime_error("this rank has left the group");
    announcement = SharedBoard::announce(channel, kind, tag, as_integer(data), tensor.nbytes());
    return announcement.met != nullptr || announcement.announced != nullptr;
  };
  if (!try_to_announce()) {
    // Full, of what this rank's peer has yet to meet, and of what either has yet to free.
    const auto outcome = watch(peer, [&] {
      if (reap()) SharedBoard::notify(member(peer));
      return try_to_announce();
    });
    if (outcome != Outcome::kDone)
      throw std::runtime_error("it is " + std::to_string(SharedBoard::Channel::kSlots) + " messages behind");
  }
  if (announcement.met != nullptr) {
    fulfil(*announcement.met, is_send, data, peer);
    return nullptr;
  }
  if (announced_.size() >= reap_at_) reap();
  announced_.push_back(std::make_shared<Ticket>(announcement.announced, peer));
  return announced_.back();
}

void PeerMemory::fulfil(SharedBoard::Slot& slot, bool is_send, void* own, int peer) {
  const bool fits = slot.bytes == slot.other_bytes;
  const std::string misfit =
      "it has " + std::to_string(slot.bytes) + " bytes where this rank has " + std::to_string(slot.other_bytes);
  try {
    if (!fits) throw std::runtime_error(misfit);
    copy(is_send, own, slot.address, slot.bytes, peer);
  } catch (...) {
    if (fits) slot.state.store(SharedBoard::kBroken, std::memory_order_release);
    SharedBoard::notify(member(peer));
    throw;
  }
  slot.state.store(SharedBoard::kDone, std::memory_order_release);
  SharedBoard::notify(member(peer));
}

// Frees the slots of messages that are over, and forgets those. Whether there were any.
bool PeerMemory::reap() {
  bool freed = false;
  std::erase_if(announced_, [&](const Announced& ticket) {
    if (ticket->slot != nullptr && ticket->slot->state.load(std::memory_order_acquire) == SharedBoard::kDone) {
      std::exchange(ticket->slot, nullptr)->state.store(SharedBoard::kFree, std::memory_order_release);
      freed = true;
    }
    return ticket->slot == nullptr;
  });
  reap_at_ = 2 * announced_.size() + 64;
  return freed;
}

PeerMemory::Outcome PeerMemory::wait(const Announced& message) {
  if (!message || message->slot == nullptr) return Outcome::kDone;
  uint32_t state = SharedBoard::kFree;
  const Outcome outcome = watch(message->peer, [&] {
    state = message->slot->state.load(std::memory_order_acquire);
    return state == SharedBoard::kDone || state == SharedBoard::kOtherBytes || state == SharedBoard::kBroken;
  });
  if (outcome != Outcome::kDone) return outcome;
  if (state == SharedBoard::kOtherBytes) return Outcome::kOtherBytes;
  if (state == SharedBoard::kBroken) return Outcome::kPeerLeft;
  std::exchange(message->slot, nullptr)->state.store(SharedBoard::kFree, std::memory_order_release);
  return Outcome::kDone;
}

template <class IsOver>
PeerMemory::Outcome PeerMemory::watch(int peer, IsOver is_over) {
  SharedBoard::Member& self = member(rank_);
  if (is_over()) return Outcome::kDone;
  const auto began = steady_clock::now();
  auto asked = began;
  for (;;) {
    // is_over() is asked last: a peer that has left finished its messages first, so they are seen.
    const uint32_t seen = self.events.load();
    const bool has_left = member(peer).has_left.load() != 0;
    if (is_over()) return Outcome::kDone;
    if (interrupted_.load()) return Outcome::kInterrupted;
    if (has_left) return Outcome::kPeerLeft;
    const auto now = steady_clock::now();
    if (may_spin_ && now - began < kSpin) continue;
    if (now - began >= timeout_) return Outcome::kTimedOut;
    if (now - asked >= kAskEvery) {
      asked = now;
      if (!is_alive(peer)) return Outcome::kPeerDied;
    }
    SharedBoard::sleep(self, seen, std::min<std::chrono::nanoseconds>(kAskEvery, began + timeout_ - now));
  }
}

void PeerMemory::interrupt() {
  interrupted_.store(true);
  SharedBoard::notify(member(rank_));
}

void PeerMemory::close() noexcept {
  if (member(rank_).has_left.exchange(1) != 0) return;
  const int self = local_[rank_];
  for (size_t rank = 0; rank < local_.size(); ++rank) {
    const int other = local_[rank];
    if (other < 0 || other == self) continue;
    const auto while_copying = [&] {
      std::this_thread::yield();
      return is_alive(static_cast<int>(rank));
    };
    try {
      SharedBoard::take_back(board_->channel(self, other), SharedBoard::kSend, while_copying);
      SharedBoard::take_back(board_->channel(other, self), SharedBoard::kReceive, while_copying);
    } catch (const std::exception&) {
      // The peer died, and touches nothing any more.
    }
    SharedBoard::notify(board_->member(other));
  }
}

}  // namespace tessera
