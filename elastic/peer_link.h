#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/runtime/guarded_by.h"

namespace tessera::internal {

// Requests between the processes of an elastic run, over TCP. Each process serves requests on its own threads, even
// while it computes. Like gloo's connections, these connections carry no secrets and are not encrypted.

// A request or an answer: JSON fields, and bytes that are not converted to JSON.
struct PeerMessage {
  nlohmann::json fields = nlohmann::json::object();
  std::string bytes;
};

// A process of the run. Is a value type.
struct Member {
  std::string id;       // random, unique for each process
  std::string address;  // numeric address at which the process serves requests
  int port = 0;
  std::string host;  // equal for processes of one host
  bool operator==(const Member&) const = default;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Member, id, address, port, host)

// A request failed. `is_gone`: the process has provably ended, because its host refuses connections to its port or
// another process answers there. Otherwise the process may live: it is stopped, slow, or cannot be reached.
class PeerError : public std::runtime_error {
 public:
  PeerError(const std::string& text, bool is_gone) : std::runtime_error(text), is_gone_(is_gone) {}
  bool is_gone() const { return is_gone_; }

 private:
  bool is_gone_;
};

// A connection to a member. Must be used by one thread.
class PeerConnection {
 public:
  // Connects within `patience`, or throws PeerError. If `is_cancelled` becomes true, a call in progress throws
  // PeerError soon. `is_cancelled` must outlive the connection, or be null.
  PeerConnection(const Member& member, std::chrono::milliseconds patience,
                 const std::atomic<bool>* is_cancelled = nullptr);
  ~PeerConnection();
  PeerConnection(const PeerConnection&) = delete;
  PeerConnection& operator=(const PeerConnection&) = delete;

  // Sends a request and returns the answer. Throws PeerError if the connection fails or the answer is incomplete after
  // `patience`. Throws std::runtime_error with the member's text if the member could not serve the request.
  PeerMessage ask(PeerMessage request, std::chrono::milliseconds patience);

 private:
  const Member member_;
  const std::atomic<bool>* const is_cancelled_;
  int descriptor_ = -1;
};

// A member that is neither stopped nor overloaded answers within this time.
inline constexpr std::chrono::milliseconds kPromptAnswer{500};

// Connects, asks once and disconnects. If that fails, connects again: a refusal then proves that the process has ended.
// On failure, throws PeerError, also if the member could not serve the request.
PeerMessage ask_member(const Member& member, PeerMessage request, std::chrono::milliseconds patience);

// Serves requests of other members until it is destroyed.
class PeerServer {
 public:
  // Answers the requests of one connection, in order, on the connection's thread. If it throws, sends the error's text.
  using Session = std::function<PeerMessage(PeerMessage&& request)>;

  // Listens at a free port of `address` (numeric), or throws std::runtime_error. Calls `make_session` per connection.
  PeerServer(const std::string& address, std::string id, std::function<Session()> make_session);
  // Ends all connections; blocks until the sessions have returned.
  ~PeerServer();
  PeerServer(const PeerServer&) = delete;
  PeerServer& operator=(const PeerServer&) = delete;

  int port() const { return port_; }
  // Returns whether this process was stopped for at least `least`, and continued within the last `recent`.
  bool was_stopped(std::chrono::milliseconds least, std::chrono::milliseconds recent) const;

 private:
  void accept_connections();
  void serve(int descriptor);
  void join_ended();

  const std::string id_;
  const std::function<Session()> make_session_;
  int listening_ = -1;
  int port_ = 0;
  std::atomic<bool> ends_ = false;
  // Pauses of the accepting thread, of a second or more. Measured by steady_clock, because RunClock omits them.
  struct Stop {
    std::chrono::steady_clock::time_point end;
    std::chrono::steady_clock::duration length;
  };
  mutable std::mutex mutex_;
  std::vector<Stop> stops_ TESSERA_GUARDED_BY(mutex_);
  std::chrono::steady_clock::time_point last_turn_ TESSERA_GUARDED_BY(mutex_) = std::chrono::steady_clock::now();
  std::map<int, std::thread> connections_ TESSERA_GUARDED_BY(mutex_);  // threads, by descriptor
  std::set<int> has_ended_ TESSERA_GUARDED_BY(mutex_);                 // descriptors
  std::thread acceptor_;
};

}  // namespace tessera::internal
