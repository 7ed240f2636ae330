#include "elastic/peer_link.h"

#include <c10/util/ScopeExit.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <system_error>
#include <utility>

#include "core/runtime/run_clock.h"
#include "core/runtime/sigpipe_block.h"

namespace tessera::internal {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;  // measures stops of this process, which RunClock omits
using nlohmann::json;

constexpr uint64_t kMagic = 0x3141'7365'5454'4c45;
constexpr uint64_t kMostFieldBytes = uint64_t{1} << 30, kMostBytes = uint64_t{1} << 31, kMostGrowth = uint64_t{1} << 20;
constexpr milliseconds kTurn{100}, kLeastStop{1000};  // poll interval; shortest pause that counts as a stop

struct FrameHead {
  uint64_t magic = kMagic, field_bytes = 0, bytes = 0;
};

// The socket was closed or reset by the other side.
struct Disconnected {};
// The other side has not answered in time.
struct TimedOut {};

class Deadline {
 public:
  Deadline() = default;  // never ends
  explicit Deadline(milliseconds patience, const std::atomic<bool>* is_cancelled = nullptr)
      : end_(RunClock::now() + patience), is_cancelled_(is_cancelled) {}
  // Blocks until the descriptor is ready. Throws TimedOut at the deadline or if cancelled; Disconnected on errors.
  void await(int descriptor, short events) const {
    for (;;) {
      if ((end_ && RunClock::now() >= *end_) || (is_cancelled_ != nullptr && *is_cancelled_)) throw TimedOut();
      pollfd entry{descriptor, events, 0};
      const int slice_ms = end_ ? static_cast<int>(std::chrono::ceil<milliseconds>(next_slice(*end_)).count()) : -1;
      const int ready = ::poll(&entry, 1, slice_ms);
      if (ready > 0) return;
      if (ready < 0 && errno != EINTR) throw Disconnected();
    }
  }

 private:
  std::optional<RunClock::time_point> end_;
  const std::atomic<bool>* is_cancelled_ = nullptr;
};

void send_all(int descriptor, const void* data, uint64_t bytes, const Deadline& deadline) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t sent = ::send(descriptor, at, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) {
      at += sent;
      bytes -= static_cast<uint64_t>(sent);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      deadline.await(descriptor, POLLOUT);
    } else if (errno != EINTR) {
      throw Disconnected();
    }
  }
}

void receive_all(int descriptor, void* data, uint64_t bytes, const Deadline& deadline) {
  char* at = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t received = ::recv(descriptor, at, bytes, MSG_DONTWAIT);
    if (received > 0) {
      at += received;
      bytes -= static_cast<uint64_t>(received);
    } else if (received == 0) {
      throw Disconnected();
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      deadline.await(descriptor, POLLIN);
    } else if (errno != EINTR) {
      throw Disconnected();
    }
  }
}

void send_message(int descriptor, const PeerMessage& message, const Deadline& deadline) {
  const std::string fields = message.fields.dump();
  const FrameHead head{kMagic, fields.size(), message.bytes.size()};
  std::string start(reinterpret_cast<const char*>(&head), sizeof(head));
  start += fields;
  send_all(descriptor, start.data(), start.size(), deadline);
  send_all(descriptor, message.bytes.data(), message.bytes.size(), deadline);
}

// Allocates memory as bytes arrive, because a header from another program may claim any size.
std::string receive_text(int descriptor, uint64_t bytes, const Deadline& deadline) {
  std::string text;
  while (text.size() < bytes) {
    const size_t begin = text.size();
    text.resize(std::min<uint64_t>(bytes, begin + kMostGrowth));
    receive_all(descriptor, text.data() + begin, text.size() - begin, deadline);
  }
  return text;
}

// Receives a message: the header by `first`, the rest by `deadline`. Throws TimedOut or Disconnected.
PeerMessage receive_message(int descriptor, const Deadline& first, const Deadline& deadline) {
  FrameHead head;
  receive_all(descriptor, &head, sizeof(head), first);
  if (head.magic != kMagic || head.field_bytes > kMostFieldBytes || head.bytes > kMostBytes) throw Disconnected();
  PeerMessage message;
  const std::string fields = receive_text(descriptor, head.field_bytes, deadline);
  message.bytes = receive_text(descriptor, head.bytes, deadline);
  message.fields = json::parse(fields, nullptr, /*allow_exceptions=*/false);
  if (!message.fields.is_object()) throw Disconnected();
  return message;
}

struct FreeAddress {
  void operator()(addrinfo* info) const { ::freeaddrinfo(info); }
};
std::unique_ptr<addrinfo, FreeAddress> resolve(const std::string& address, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (::getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return nullptr;
  return std::unique_ptr<addrinfo, FreeAddress>(found);
}

std::string name_of(const Member& member) {
  return "the process at " + member.address + ":" + std::to_string(member.port);
}

// Returns a connected descriptor, or throws PeerError.
int connect_to(const Member& member, milliseconds patience, const std::atomic<bool>* is_cancelled) {
  const auto address = resolve(member.address, member.port);
  if (!address) throw PeerError(name_of(member) + ": the address is not numeric", false);
  const int descriptor = ::socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, address->ai_protocol);
  if (descriptor < 0) throw PeerError(name_of(member) + ": no socket: " + std::strerror(errno), false);
  int error = ::connect(descriptor, address->ai_addr, address->ai_addrlen) == 0 ? 0 : errno;
  try {
    if (error == EINPROGRESS) {
      Deadline(patience, is_cancelled).await(descriptor, POLLOUT);
      socklen_t length = sizeof(error);
      ::getsockopt(descriptor, SOL_SOCKET, SO_ERROR, &error, &length);
    }
  } catch (const TimedOut&) {
    error = ETIMEDOUT;
  } catch (const Disconnected&) {
    error = ECONNRESET;
  }
  if (error != 0) {
    ::close(descriptor);
    throw PeerError(name_of(member) + ": connecting: " + std::strerror(error), error == ECONNREFUSED);
  }
  const int on = 1;
  ::setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  return descriptor;
}

}  // namespace

PeerConnection::PeerConnection(const Member& member, milliseconds patience, const std::atomic<bool>* is_cancelled)
    : member_(member), is_cancelled_(is_cancelled), descriptor_(connect_to(member, patience, is_cancelled)) {}

PeerConnection::~PeerConnection() { ::close(descriptor_); }

PeerMessage PeerConnection::ask(PeerMessage request, milliseconds patience) {
  request.fields["to"] = member_.id;
  PeerMessage answer;
  try {
    const Deadline deadline(patience, is_cancelled_);
    send_message(descriptor_, request, deadline);
    answer = receive_message(descriptor_, deadline, deadline);
  } catch (const Disconnected&) {
    throw PeerError(name_of(member_) + " has closed the connection", false);
  } catch (const TimedOut&) {
    throw PeerError(name_of(member_) + " has not answered within " + std::to_string(patience.count()) + " ms", false);
  }
  if (answer.fields.contains("other_process"))
    throw PeerError(name_of(member_) + " is another one: the member's has ended", true);
  if (const auto error = answer.fields.find("error"); error != answer.fields.end())
    throw std::runtime_error(name_of(member_) + ": " + error->get<std::string>());
  return answer;
}

PeerMessage ask_member(const Member& member, PeerMessage request, milliseconds patience) {
  try {
    return PeerConnection(member, patience).ask(std::move(request), patience);
  } catch (const PeerError& error) {
    if (error.is_gone()) throw;
    PeerConnection again(member, patience);  // throws if the process has ended meanwhile
    throw;
  } catch (const std::runtime_error& error) {  // the member lives, but could not serve the request
    throw PeerError(error.what(), false);
  }
}

PeerServer::PeerServer(const std::string& address, std::string id, std::function<Session()> make_session)
    : id_(std::move(id)), make_session_(std::move(make_session)) {
  const auto found = resolve(address, 0);
  if (!found) throw std::runtime_error("tessera::Elastic: " + address + " is not a numeric address");
  listening_ = ::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, found->ai_protocol);
  auto undo = c10::make_scope_exit([this] { ::close(listening_); });
  sockaddr_storage own{};
  socklen_t length = sizeof(own);
  if (listening_ < 0 || ::bind(listening_, found->ai_addr, found->ai_addrlen) != 0 ||
      ::listen(listening_, SOMAXCONN) != 0 ||
      ::getsockname(listening_, reinterpret_cast<sockaddr*>(&own), &length) != 0)
    throw std::runtime_error("tessera::Elastic: cannot listen at " + address + ": " + std::strerror(errno));
  port_ = ntohs(own.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6*>(&own)->sin6_port
                                          : reinterpret_cast<const sockaddr_in*>(&own)->sin_port);
  const SigpipeBlock no_sigpipe;  // the server's threads inherit the blocked signal
  acceptor_ = std::thread([this] { accept_connections(); });
  undo.release();
}

PeerServer::~PeerServer() {
  ends_ = true;
  ::shutdown(listening_, SHUT_RDWR);  // ends accept()
  acceptor_.join();
  ::close(listening_);
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [descriptor, thread] : connections_) {
      ::shutdown(descriptor, SHUT_RDWR);
      has_ended_.insert(descriptor);
    }
  }
  join_ended();
}

void PeerServer::accept_connections() {
  while (!ends_) {
    pollfd entry{listening_, POLLIN, 0};
    ::poll(&entry, 1, static_cast<int>(kTurn.count()));
    {
      const std::lock_guard lock(mutex_);
      const auto now = Clock::now();
      const auto pause = now - std::exchange(last_turn_, now);
      if (pause >= kLeastStop) stops_.push_back({now, pause});
    }
    if (entry.revents == 0) continue;
    const int descriptor = ::accept4(listening_, nullptr, nullptr, SOCK_CLOEXEC);
    if (descriptor < 0) {
      if (ends_ || errno == EBADF || errno == EINVAL) return;  // other errors, such as a lack of memory, may pass
      std::this_thread::sleep_for(milliseconds(10));
      continue;
    }
    join_ended();
    const int on = 1;
    ::setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    const std::lock_guard lock(mutex_);
    try {
      connections_.emplace(descriptor, std::thread([this, descriptor] { serve(descriptor); }));
    } catch (const std::system_error&) {  // no thread could start; the other process may ask again
      ::close(descriptor);
    }
  }
}

bool PeerServer::was_stopped(milliseconds least, milliseconds recent) const {
  const std::lock_guard lock(mutex_);
  const auto now = Clock::now(), since = now - recent;
  if (now - last_turn_ >= least + kTurn) return true;  // the accepting thread has not run for too long
  return std::ranges::any_of(stops_, [&](const Stop& stop) { return stop.length >= least && stop.end >= since; });
}

void PeerServer::join_ended() {
  std::map<int, std::thread> ended;
  {
    const std::lock_guard lock(mutex_);
    for (const int descriptor : has_ended_) ended.insert(connections_.extract(descriptor));
    has_ended_.clear();
  }
  for (auto& [descriptor, thread] : ended) {
    thread.join();
    ::close(descriptor);
  }
}

void PeerServer::serve(int descriptor) {
  try {
    const Session session = make_session_();
    const Deadline never;
    for (;;) {
      PeerMessage request = receive_message(descriptor, never, never), answer;
      if (request.fields.value("to", "") != id_) {
        answer.fields["other_process"] = true;
      } else {
        try {
          answer = session(std::move(request));
        } catch (const std::exception& error) {
          answer.fields["error"] = error.what();
        }
      }
      send_message(descriptor, answer, never);
    }
  } catch (...) {  // NOLINT(bugprone-empty-catch): Disconnected, or out of memory; the client sees the closing
  }
  ::shutdown(descriptor, SHUT_RDWR);
  const std::lock_guard lock(mutex_);
  if (!ends_) has_ended_.insert(descriptor);
}

}  // namespace tessera::internal
