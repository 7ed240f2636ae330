#include "core/comm/shared_memory/peer_memory.h"

#include <ATen/Parallel.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/StringUtil.h>
#include <c10/util/env.h>
#include <poll.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sstream>
#include <system_error>
#include <thread>
#include <utility>

#include <tessera/launch.h>
#include "core/runtime/file.h"
#include "core/runtime/host.h"

namespace tessera::internal {

// The process of a member. It is read from the board only when the group is made. So later writes to the board cannot
// redirect this rank to another process.
struct PeerMemory::Process {
  explicit Process(const SharedBoard::Member& member)
      : pid(member.pid), magic(member.magic), magic_address(member.magic_address) {}

  bool is_this() const { return pid == ::getpid(); }
  bool is_reached() const {
    if (is_this()) return true;
    uint64_t word = 0;
    iovec own{&word, sizeof(word)};
    iovec theirs{reinterpret_cast<void*>(magic_address), sizeof(word)};
    return ::process_vm_readv(pid, &own, 1, &theirs, 1, 0) == static_cast<ssize_t>(sizeof(word)) && word == magic;
  }

  pid_t pid;
  uint64_t magic, magic_address;
};

namespace {

constexpr char kNone[] = "none";  // has no destructor, because a detached thread may use it while the process ends

// The longest time that close() waits for a copying peer. A shorter time would be correct, but leak memory more often.
constexpr auto kCopyGrace = std::chrono::seconds(1);

// A random number that peers read to check that they reach this process, and not a later one with an equal id.
const uint64_t& magic() {
  static const uint64_t number = random_bits();
  return number;
}

// Indexed by PeerMemory::Outcome.
constexpr const char* kCauses[] = {
    "", "", "timed out", "it has left the group", "its process is gone", "it has another number of bytes for it"};

uint64_t operation_of(uint64_t tag) { return tag >> 32; }

uint64_t as_integer(const void* address) { return reinterpret_cast<uintptr_t>(address); }

// Returns a text that is equal in two processes if their boot, PID namespace and user are equal; kNone if unknown.
std::string host_identity() {
  char name[64] = {};
  if (::readlink("/proc/self/ns/pid", name, sizeof(name) - 1) < 0) return kNone;
  const std::string boot = boot_id();
  return boot.empty() ? kNone : c10::str(boot, "/", name, "/", ::geteuid());
}

// Texts that ranks exchange through the store, under one key for each kind and rank.
struct Notices {
  c10d::Store& store;
  const int rank;

  void put(const std::string& kind, const std::string& text) { store.set(key(kind, rank), text); }
  std::vector<std::string> of(const std::string& kind, const std::vector<int>& ranks) {
    std::vector<std::string> keys, texts;
    for (int peer : ranks) keys.push_back(key(kind, peer));
    for (const auto& bytes : store.multiGet(keys)) texts.emplace_back(bytes.begin(), bytes.end());
    return texts;
  }
  static std::string key(const std::string& kind, int rank) { return c10::str("tessera/memory/", kind, "/", rank); }
};

// Returns the ranks of this host in order, or none if this rank does not take part. Each rank reads the list of its own
// host. The list is complete when all ranks of the group have signed in.
std::vector<int> ranks_of_host(Notices& notices, int size, std::chrono::milliseconds timeout, bool is_wanted) {
  const bool is_switched_off = c10::utils::check_env("TESSERA_PEER_MEMORY") == false;
  const std::string identity = is_wanted && !is_switched_off ? host_identity() : kNone;
  const std::string list = "tessera/memory/host/" + identity + "/", all = "tessera/memory/all_signed_in";
  c10d::Store& store = notices.store;
  if (identity != kNone) store.set(list + std::to_string(store.add(list + "ranks", 1)), std::to_string(notices.rank));
  if (store.add("tessera/memory/signed_in", 1) == size) store.set(all, "yes");
  store.wait({all}, timeout);
  if (identity == kNone) return {};
  std::vector<std::string> keys;
  for (int64_t i = 1, count = store.add(list + "ranks", 0); i <= count; ++i) keys.push_back(list + std::to_string(i));
  std::vector<int> host;
  for (const auto& bytes : store.multiGet(keys)) host.push_back(std::stoi(std::string(bytes.begin(), bytes.end())));
  std::ranges::sort(host);
  return host;
}

bool all_agree(Notices& notices, const std::string& kind, const std::vector<int>& host, bool answer) {
  notices.put(kind, answer ? "yes" : "no");
  const auto answers = notices.of(kind, host);
  return std::ranges::all_of(answers, [](const std::string& text) { return text == "yes"; });
}

// Returns the board of a host's ranks if all of them have opened it and reach each other's memory, else null.
std::shared_ptr<SharedBoard> share_board(Notices& notices, int rank, const std::vector<int>& host) {
  const int ranks = static_cast<int>(host.size());
  const auto self = std::ranges::find(host, rank) - host.begin();
  std::shared_ptr<SharedBoard> board;
  try {
    if (self == 0) {
      board = SharedBoard::create(ranks);
      notices.put("board", board->notice());
    } else {
      board = SharedBoard::open(notices.of("board", {host.front()})[0], ranks);
    }
    SharedBoard::Member& member = board->member(static_cast<int>(self));
    member.pid = ::getpid();
    member.magic = magic();
    member.magic_address = as_integer(&magic());
  } catch (const std::runtime_error&) {  // the board could not be created or opened
    if (self == 0) notices.put("board", kNone);
  }
  bool reaches_all = all_agree(notices, "opened", host, board != nullptr);
  for (int peer = 0; reaches_all && peer < ranks; ++peer)
    reaches_all = PeerMemory::Process(board->member(peer)).is_reached();
  if (!all_agree(notices, "reaches", host, reaches_all)) return nullptr;
  if (self == 0) board->close_file();
  return board;
}

// Permits the ranks of a host to access this process's memory while the result exists. Null if not needed or wanted.
std::unique_ptr<TracerPermission> permit(Notices& notices, const std::vector<int>& host, bool permits_tracing) {
  notices.put("lineage", c10::Join(" ", lineage()));
  std::vector<std::vector<pid_t>> lineages;
  for (const std::string& text : notices.of("lineage", host)) {
    std::istringstream pids(text);
    lineages.emplace_back(std::istream_iterator<pid_t>(pids), std::istream_iterator<pid_t>());
  }
  const bool is_alone =
      std::ranges::all_of(lineages, [](const auto& pids) { return !pids.empty() && pids.front() == ::getpid(); });
  return is_alone || !permits_tracing ? nullptr : std::make_unique<TracerPermission>(common_ancestor(lineages));
}

}  // namespace

// A rank's process, with a pidfd, because process ids are reused. The descriptor is -1 for this process, or if the
// kernel has no pidfd.
struct PeerMemory::Peer {
  explicit Peer(const SharedBoard::Member& member) : process(member) {
    if (process.is_this()) return;
    descriptor = static_cast<int>(::syscall(SYS_pidfd_open, process.pid, 0));
    if (descriptor >= 0 && !process.is_reached()) ::close(std::exchange(descriptor, -1));  // the process has just ended
  }
  Peer(Peer&& other) noexcept : process(other.process), descriptor(std::exchange(other.descriptor, -1)) {}
  ~Peer() {
    if (descriptor >= 0) ::close(descriptor);
  }

  const Process process;
  int descriptor = -1;
};

std::unique_ptr<PeerMemory> PeerMemory::connect(c10d::Store& store, int rank, int size,
                                                std::chrono::milliseconds timeout, bool is_wanted,
                                                bool permits_tracing) {
  Notices notices{store, rank};
  const auto host = ranks_of_host(notices, size, timeout, is_wanted);
  if (host.size() < 2) return nullptr;
  auto permission = permit(notices, host, permits_tracing);
  auto board = share_board(notices, rank, host);
  if (!board) return nullptr;
  std::vector<int> local(size, -1);
  std::vector<Peer> peers;
  for (int i = 0; i < board->ranks(); ++i) {
    local[host[i]] = i;
    peers.emplace_back(board->member(i));
  }
  return std::unique_ptr<PeerMemory>(
      new PeerMemory(rank, std::move(local), std::move(board), std::move(peers), std::move(permission), timeout));
}

PeerMemory::PeerMemory(int rank, std::vector<int> local, std::shared_ptr<SharedBoard> board, std::vector<Peer> peers,
                       std::unique_ptr<TracerPermission> permission, std::chrono::milliseconds timeout)
    : rank_(rank),
      local_(std::move(local)),
      board_(std::move(board)),
      peers_(std::move(peers)),
      permission_(std::move(permission)),
      timeout_(timeout),
      cores_(available_cores()) {}

PeerMemory::~PeerMemory() { close(); }

std::chrono::microseconds PeerMemory::poll_time() const {
  return internal::poll_time(board_->ranks(), cores_, at::get_num_threads());
}

std::string cause_of(PeerMemory::Outcome outcome) { return kCauses[static_cast<size_t>(outcome)]; }

bool PeerMemory::is_alive(int peer) const {
  const auto& [process, descriptor] = peers_[local_[peer]];
  if (descriptor < 0) return process.is_reached();
  pollfd ends{descriptor, POLLIN, 0};
  // A pidfd is readable when its process has ended, reaped or not.
  return retried([&] { return ::poll(&ends, 1, 0); }) == 0;
}

void PeerMemory::copy(bool to_peer, void* own, uint64_t theirs, uint64_t bytes, int peer) const {
  const Process& process = peers_[local_[peer]].process;
  if (process.is_this()) {
    void* other = PublishedMemory::find(theirs, bytes, to_peer);
    std::memcpy(to_peer ? other : own, to_peer ? own : other, bytes);
    return;
  }
  if (!is_alive(peer)) throw std::runtime_error("its process is gone");  // a new process may have the peer's process id
  for (uint64_t done = 0; done < bytes;) {
    iovec here{static_cast<std::byte*>(own) + done, bytes - done};
    iovec there{reinterpret_cast<void*>(theirs + done), bytes - done};
    const auto move = to_peer ? &::process_vm_writev : &::process_vm_readv;
    const ssize_t moved = retried([&] { return move(process.pid, &here, 1, &there, 1, 0); });
    if (moved <= 0)
      throw std::system_error(moved == 0 ? EFAULT : errno, std::generic_category(),
                              "reaching the memory of its process");
    done += static_cast<uint64_t>(moved);
  }
}

PeerMemory::Announced PeerMemory::announce(SharedBoard::State kind, const at::Tensor& tensor, int peer, uint64_t tag) {
  const bool is_send = kind == SharedBoard::kSend;
  void* const data = is_send ? const_cast<void*>(tensor.const_data_ptr()) : tensor.mutable_data_ptr();
  const int self = local_[rank_], other = local_[peer];
  SharedBoard::Channel& channel = is_send ? board_->channel(self, other) : board_->channel(other, self);
  const auto until = RunClock::now() + timeout_;
  PublishedMemory published;
  if (peers_[other].process.is_this()) published = PublishedMemory(data, tensor.nbytes(), /*is_written=*/!is_send);
  const uint64_t address = published.number() != 0 ? published.number() : as_integer(data);
  SharedBoard::Announced made;
  const auto try_to_announce = [&] {
    if (member(rank_).has_left.load() != 0) throw std::runtime_error("this rank has left the group");
    made = SharedBoard::announce(channel, kind, tag, {address, tensor.nbytes()}, kAtOnceBytes, until);
    return made.slot != nullptr;
  };
  if (!try_to_announce()) {
    // The channel is full of messages that are not matched, not copied or not freed yet.
    const auto outcome = watch(peer, SharedBoard::kNoOperation, until, [&] {
      copy_all_matched([&](const Announcement& message) { return message.peer == peer; });
      if (reap()) SharedBoard::notify(member(peer), self);
      return try_to_announce();
    });
    if (outcome != Outcome::kDone) throw std::runtime_error(cause_of(outcome));
  }
  Announced message = std::make_shared<Announcement>(
      Announcement{made.slot, kind, data, tensor.nbytes(), tag, peer, std::move(published)});
  if (made.state == SharedBoard::kOtherBytes) {
    SharedBoard::notify(member(peer), self);
    throw std::runtime_error(c10::str("it has ", made.slot->side(SharedBoard::opposite(kind)).bytes,
                                      " bytes where this rank has ", message->bytes));
  }
  if (made.state == SharedBoard::copying(kind)) {
    copy_claimed(*message);
    return nullptr;
  }
  if (made.state == SharedBoard::kMatched) SharedBoard::notify(member(peer), self, operation_of(tag));
  if (announced_.size() >= reap_at_) reap();
  announced_.push_back(message);
  return message;
}

void PeerMemory::copy_claimed(Announcement& message) {
  const auto notifies = c10::make_scope_exit([&] { SharedBoard::notify(member(message.peer), local_[rank_]); });
  try {
    const uint64_t theirs = message.slot->side(SharedBoard::opposite(message.kind)).address;
    copy(message.kind == SharedBoard::kSend, message.data, theirs, message.bytes, message.peer);
  } catch (const std::exception& error) {
    message.slot->state.store(SharedBoard::kBroken, std::memory_order_release);
    throw Unreachable(message.peer, error.what());
  }
  copied_bytes_ += message.bytes;
  message.published = {};
  std::exchange(message.slot, nullptr)->state.store(SharedBoard::kDone, std::memory_order_release);
}

void PeerMemory::copy_if_matched(const Announced& message) {
  if (message && message->slot != nullptr && SharedBoard::claim(*message->slot, message->kind)) copy_claimed(*message);
}

// Copies receives first, because this rank needs them, and a waiting peer copies its own receives.
template <class IsMeant>
void PeerMemory::copy_all_matched(IsMeant is_meant) {
  for (const auto kind : {SharedBoard::kReceive, SharedBoard::kSend})
    for (const Announced& message : announced_)
      if (message->kind == kind && is_meant(*message)) copy_if_matched(message);
}

// Frees the slots of copied messages, and removes complete messages from announced_. Returns whether it freed a slot.
bool PeerMemory::reap() {
  bool freed = false;
  std::erase_if(announced_, [&](const Announced& message) {
    if (message->slot != nullptr && message->slot->state.load(std::memory_order_acquire) == SharedBoard::kDone) {
      message->published = {};
      std::exchange(message->slot, nullptr)->state.store(SharedBoard::kFree, std::memory_order_release);
      freed = true;
    }
    return message->slot == nullptr;
  });
  reap_at_ = 2 * announced_.size() + 64;
  return freed;
}

PeerMemory::Outcome PeerMemory::wait(const Announced& message, Deadline until) {
  if (!message || message->slot == nullptr) return Outcome::kDone;
  uint32_t state = SharedBoard::kFree;
  const auto is_over = [&] {
    state = message->slot->state.load(std::memory_order_acquire);
    return state == SharedBoard::kDone || state == SharedBoard::kOtherBytes || state == SharedBoard::kBroken;
  };
  const uint64_t operation = operation_of(message->tag);
  const Outcome outcome = watch(message->peer, operation, until, [&] {
    if (is_over()) return true;
    copy_all_matched([&](const Announcement& other) { return operation_of(other.tag) == operation; });
    return message->slot == nullptr || is_over();
  });
  if (outcome != Outcome::kDone || message->slot == nullptr) return outcome;
  if (state == SharedBoard::kOtherBytes) return Outcome::kOtherBytes;
  if (state == SharedBoard::kBroken && has_left(message->peer)) return Outcome::kPeerLeft;
  if (state == SharedBoard::kBroken) throw Unreachable(message->peer, "a message could not be copied");
  message->published = {};
  std::exchange(message->slot, nullptr)->state.store(SharedBoard::kFree, std::memory_order_release);
  return Outcome::kDone;
}

template <class IsOver>
PeerMemory::Outcome PeerMemory::watch(int peer, uint64_t operation, Deadline until, IsOver is_over) {
  SharedBoard::Member& self = member(rank_);
  if (is_over()) return Outcome::kDone;
  const auto began = RunClock::now();
  auto asked = began;
  const auto poll_time = this->poll_time();
  self.awaited.store(local_[peer]);
  self.awaited_operation.store(operation);
  for (;;) {
    // Reads has_left before is_over(). A peer completes its messages before it sets has_left, so no message is missed.
    const uint32_t seen = self.events.load();
    const bool has_left = member(peer).has_left.load() != 0;
    if (is_over()) return Outcome::kDone;
    if (interrupted_.load()) return Outcome::kInterrupted;
    if (has_left) return Outcome::kPeerLeft;
    const auto now = RunClock::now();
    if (now - began < poll_time) {
      std::this_thread::yield();  // the awaited rank may need this core
      continue;
    }
    if (now >= until) return Outcome::kTimedOut;
    if (now - asked >= kAskEvery) {
      asked = now;
      if (!is_alive(peer)) return Outcome::kPeerDied;
    }
    SharedBoard::sleep(self, seen, std::min<std::chrono::nanoseconds>(kAskEvery, until - now));
  }
}

void PeerMemory::interrupt() {
  interrupted_.store(true);
  SharedBoard::notify(member(rank_), SharedBoard::kAnyone);
  board_->ring();
}

bool PeerMemory::close() noexcept {
  if (member(rank_).has_left.exchange(1) != 0) return !may_be_touched_.load();
  const int self = local_[rank_];
  const auto until = RunClock::now() + kCopyGrace;
  for (size_t rank = 0; rank < local_.size(); ++rank) {
    const int other = local_[rank];
    if (other < 0 || other == self) continue;
    const auto while_copying = [&] {
      std::this_thread::yield();
      return is_alive(static_cast<int>(rank));
    };
    const auto take_back = [&](SharedBoard::Channel& channel, SharedBoard::State kind) {
      try {
        return SharedBoard::take_back(channel, kind, until, while_copying);
      } catch (const std::exception&) {
        // The peer died or was stopped while it held the channel's lock. Only a stopped peer may still copy.
        return !is_alive(static_cast<int>(rank));
      }
    };
    const bool gives = take_back(board_->channel(self, other), SharedBoard::kSend);
    const bool takes = take_back(board_->channel(other, self), SharedBoard::kReceive);
    if (!gives || !takes) may_be_touched_ = true;
    SharedBoard::notify(board_->member(other), self);
  }
  board_->ring();
  permission_.reset();
  return !may_be_touched_;
}

}  // namespace tessera::internal
