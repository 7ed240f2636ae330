#include "core/launch/rendezvous.h"

#include <c10/util/StringUtil.h>
#include <c10/util/hash.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <exception>
#include <sstream>
#include <thread>
#include <vector>

#include <tessera/errors.h>
#include "core/comm/group_process.h"
#include "core/comm/store_client.h"
#include "core/launch/clock_exchange.h"
#include "core/launch/local_address.h"
#include "core/runtime/call_with_timeout.h"
#include "core/runtime/run_clock.h"
#include "core/runtime/warn.h"

namespace tessera::internal {
namespace {

using std::chrono::milliseconds;
using Clock = RunClock;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

// The timeout of the first store call. A store answers within milliseconds, but later if many ranks call it at once.
std::chrono::milliseconds first_answer(int world) { return milliseconds(8000) + world * milliseconds(5); }

// A rank that waits longer than this prints the missing ranks, to explain the hang to the user.
constexpr milliseconds kSilence = std::chrono::seconds(10);
constexpr milliseconds kConnectRetry{50};
constexpr milliseconds kShortestPoll{2};
constexpr milliseconds kLongestPoll{200};
constexpr char kComplete[] = "complete";
constexpr char kRefused = '!';
constexpr char kClocks[] = "clocks";
constexpr char kToken[] = "token";  // key of the token's hash
constexpr char kEnded[] = "ended";  // key of the number of a rank that ended before all had joined
constexpr char kSilent[] = "whoever listens there does not answer: it is no store, or its process has stopped";

std::string seconds_text(milliseconds duration) { return c10::str(static_cast<double>(duration.count()) / 1000, " s"); }

[[noreturn]] void fail_to_join(const LaunchEnvironment& own, milliseconds timeout, const std::string& reason) {
  throw CommError(c10::str("tessera::init: rank ", own.rank, " of ", own.world_size, " (", own.launcher,
                           ") could not join its group at ", own.master_address, ":", own.master_port, " (timeout ",
                           seconds_text(timeout), "): ", reason));
}

StorePtr store_of_run(const StorePtr& store, const std::string& job, int restart_count) {
  return c10::make_intrusive<c10d::PrefixStore>(c10::str("tessera/", job, "/", restart_count), store);
}

// Keys hold only a hash of the token, because every client of the store can list them.
std::string hash_of_token(const std::string& token) { return c10::sha1("tessera " + token).str(); }

StorePtr store_of_token(const StorePtr& store, const std::string& token) {
  return c10::make_intrusive<c10d::PrefixStore>(hash_of_token(token), store);
}

std::string rank_key(int rank) { return c10::str("rank/", rank); }

// The text that a rank publishes for rank 0: "<world size> <address> <clock>". Only a traced rank publishes its clock.
struct Arrival {
  int world_size = 0;
  std::string address;
  std::string clock;
};

Arrival parse_arrival(const std::vector<uint8_t>& bytes) {
  Arrival arrival;
  std::istringstream(std::string(bytes.begin(), bytes.end())) >> arrival.world_size >> arrival.address >> arrival.clock;
  return arrival;
}

// Rank 0's answer to all ranks: "<rank> <address>", or '!' and the error that ends the group. The other ranks read only
// this answer, so that their cost does not grow with the world size.
struct ReachableRank {
  int rank = -1;  // first rank with an address that is not loopback; -1 if all ranks are on one host
  std::string address;
};

// The procedure by which one rank joins the group.
class Joining {
 public:
  Joining(const LaunchEnvironment& environment, milliseconds timeout)
      : environment_(environment), timeout_(timeout), start_(Clock::now()) {}

  Rendezvous join(const std::string& fixed_address) {
    StorePtr store = open_store();
    const std::string address = fixed_address.empty() ? first_address() : fixed_address;
    ReachableRank reachable;
    std::optional<Trace::Run> run;
    try {
      check_token(store);
      store = store_of_token(store, environment_.token);
      check_in(store, address);
      reachable = await_all(store);
      run = compare_clocks(store);
    } catch (const c10::Error&) {
      fail("the store was lost, perhaps since rank 0 ended: ", text_of(std::current_exception()));
    }
    return {c10::make_intrusive<c10d::PrefixStore>("group", store), reachable_address(address, reachable),
            std::move(run)};
  }

 private:
  template <class... Parts>
  [[noreturn]] void fail(const Parts&... reason) const {
    fail_to_join(environment_, timeout_, c10::str(reason...));
  }

  milliseconds remaining() const {
    const auto left = std::chrono::duration_cast<milliseconds>(start_ + timeout_ - Clock::now());
    return std::max(left, milliseconds(1));  // c10d interprets 0 as no timeout
  }

  bool is_late() const { return Clock::now() - start_ >= timeout_; }
  bool is_report_due() const { return !reported_ && Clock::now() - start_ >= kSilence; }

  void report_wait(const std::string& waiting_for) {
    if (!is_report_due()) return;
    reported_ = true;
    warn(c10::str("rank ", environment_.rank, " of ", environment_.world_size, " waits at ",
                  environment_.master_address, ":", environment_.master_port, " for ", waiting_for, " (timeout ",
                  seconds_text(timeout_), ")"));
  }

  // Blocks until rank 0 (or the agent) listens. This function polls because c10d's client tries only once a second, and
  // logs every failure with a stack trace.
  void await_server() {
    for (;;) {
      const auto patience = static_cast<int>(std::min<int64_t>(remaining().count(), 5000));
      const auto reason = try_connect(environment_.master_address, environment_.master_port, patience);
      if (reason.empty()) return;
      if (is_late()) fail("nobody listens there: ", reason);
      report_wait("rank 0 to listen there (" + reason + ")");
      std::this_thread::sleep_for(std::min(kConnectRetry, remaining()));
    }
  }

  void require_itself() const {
    try {
      require_loopback(environment_.master_port);
    } catch (const std::runtime_error& error) {
      fail("it serves the store, and cannot reach itself: ", error.what());
    }
  }

  StorePtr open_store() {
    const bool serves = environment_.rank == 0 && !environment_.agent_serves_store;
    c10d::TCPStoreOptions options;
    options.port = static_cast<uint16_t>(environment_.master_port);
    options.isServer = serves;
    serves ? require_itself() : await_server();
    options.timeout = std::min(remaining(), first_answer(environment_.world_size));
    // The server listens on all addresses, so its own client need not resolve the host's name.
    const std::string host = serves ? "127.0.0.1" : environment_.master_address;
    try {
      auto store = call_with_timeout(options.timeout, [host, options] { return open_tcp_store(host, options); });
      if (!store) fail(kSilent);
      return store_of_run(StoreClient::of(std::move(*store), timeout_), environment_.job, environment_.restart_count);
    } catch (const CommError&) {
      throw;
    } catch (const std::exception&) {
      const std::string reason = text_of(std::current_exception());
      if (serves && reason.find("EADDRINUSE") != std::string::npos)
        fail("the port is in use by another program, or an earlier run of this one; choose another MASTER_PORT");
      fail("no store answers there: ", reason);
    }
  }

  // Throws if the launching process has reported, by tell_of_end(), that a rank ended before all had joined.
  void require_all_live(const StorePtr& store) const {
    if (environment_.agent_serves_store && store->check({kEnded}))
      fail("rank ", store->get_to_str(kEnded), " has ended before all had come");
  }

  // c10d's store accepts any client, so the group's keys begin with the hash of the group's token. This check throws in
  // a process whose token is missing or belongs to another job.
  void check_token(const StorePtr& store) {
    const std::string own = hash_of_token(environment_.token);
    if (environment_.rank == 0) return store->set(kToken, own);
    for (auto delay = kShortestPoll; !store->check({kToken}); delay = std::min(delay * 2, kLongestPoll)) {
      if (is_late()) fail("rank 0 did not come");
      require_all_live(store_of_token(store, environment_.token));
      report_wait("rank 0");
      std::this_thread::sleep_for(std::min(delay, remaining()));
    }
    if (store->get_to_str(kToken) != own)
      fail(environment_.token.empty() ? "this process has no TESSERA_STORE_TOKEN, and the group has one"
                                      : "this process has another TESSERA_STORE_TOKEN than rank 0",
           "; expected the same on all ranks: is it one of them?");
  }

  void check_in(const StorePtr& store, const std::string& address) const {
    const int rank = environment_.rank;
    if (store->add(c10::str("arrivals/", rank), 1) > 1)
      fail("another process, or an earlier init() of this one, has already come as rank ", rank);
    const std::string clock = Trace::active() == nullptr ? "" : " " + Trace::clock_id();
    store->set(rank_key(rank), c10::str(environment_.world_size, " ", address, clock));
    // Each rank compares its world size with that of the first rank to publish one. Otherwise a rank with a smaller
    // world size would wait for fewer ranks, and then continue.
    const auto own = std::to_string(environment_.world_size);
    const auto first = store->compareSet("world_size", std::string(), own);
    if (first != own)
      fail("its world size is ", own, ", but ", first, " on the rank that came first; expected the same on all");
  }

  // Rank 0 waits for all ranks and then publishes one key. The other ranks poll this key, because c10d logs every wait
  // that times out.
  ReachableRank await_all(const StorePtr& store) {
    std::vector<std::string> keys;
    for (int rank = 0; rank < environment_.world_size; ++rank) keys.push_back(rank_key(rank));
    auto delay = kShortestPoll;
    for (size_t present = 0;;) {
      if (environment_.rank == 0) {
        while (present < keys.size() && store->check({keys[present]})) ++present;
        if (present == keys.size()) store->set(kComplete, all_have_come(store, keys));
      }
      if (store->check({kComplete})) break;
      require_all_live(store);
      if (is_late() || is_report_due()) {
        const auto missing = missing_ranks(store, keys);
        if (is_late()) fail(missing.empty() ? "rank 0" : ranks_text(missing), " did not come");
        report_wait(ranks_text(missing));
      }
      std::this_thread::sleep_for(std::min(delay, remaining()));
      delay = std::min(delay * 2, kLongestPoll);
    }
    const std::string text = store->get_to_str(kComplete);
    if (text[0] == kRefused) fail(text.substr(1));
    ReachableRank reachable;
    std::istringstream(text) >> reachable.rank >> reachable.address;
    return reachable;
  }

  // Called on rank 0. Checks all arrivals. Returns the value of kComplete: a reachable rank, or an error for all ranks.
  std::string all_have_come(const StorePtr& store, const std::vector<std::string>& keys) const {
    ReachableRank reachable;
    std::string clocks;
    const auto arrivals = store->multiGet(keys);
    for (size_t rank = 0; rank < arrivals.size(); ++rank) {
      const Arrival arrival = parse_arrival(arrivals[rank]);
      if (arrival.world_size != environment_.world_size)
        return c10::str(kRefused, "the world size of rank ", rank, " is ", arrival.world_size, "; expected ",
                        environment_.world_size);
      if (reachable.rank < 0 && !is_loopback_address(arrival.address))
        reachable = {static_cast<int>(rank), arrival.address};
      clocks += arrival.clock + '\n';
    }
    store->set(kClocks, clocks);
    return c10::str(reachable.rank, " ", reachable.address);
  }

  std::optional<Trace::Run> compare_clocks(const StorePtr& store) const {
    if (Trace::active() == nullptr) return std::nullopt;
    std::vector<std::string> clocks;
    std::istringstream lines(store->get_to_str(kClocks));
    for (std::string clock; std::getline(lines, clock);) clocks.push_back(clock);
    return agree_on_traced_run(*store, environment_.rank, clocks);
  }

  static std::vector<int> missing_ranks(const StorePtr& store, const std::vector<std::string>& keys) {
    std::vector<int> missing;
    for (size_t rank = 0; rank < keys.size(); ++rank)
      if (!store->check({keys[rank]})) missing.push_back(static_cast<int>(rank));
    return missing;
  }

  std::string first_address() const {
    return environment_.one_host() ? "127.0.0.1" : address_facing(environment_.master_address);
  }

  std::string address_facing(const std::string& host) const {
    try {
      return address_towards(host, environment_.master_port);
    } catch (const std::runtime_error& error) {
      fail(error.what());
    }
  }

  // A rank on rank 0's host may have found only a loopback address (see address_towards). Then it uses the address that
  // faces a rank of another host. If all ranks have found loopback addresses, all are on one host.
  std::string reachable_address(const std::string& address, const ReachableRank& reachable) const {
    if (!is_loopback_address(address) || reachable.rank < 0) return address;
    const std::string facing = address_facing(reachable.address);
    if (is_loopback_address(facing))
      fail("its own address is ", address, ", which rank ", reachable.rank, " at ", reachable.address,
           " cannot reach; set GLOO_SOCKET_IFNAME on both");
    return facing;
  }

  const LaunchEnvironment& environment_;
  const milliseconds timeout_;
  const Clock::time_point start_;
  bool reported_ = false;
};

}  // namespace

Rendezvous rendezvous(const LaunchEnvironment& environment, const std::string& address,
                      std::chrono::milliseconds timeout) {
  // Needs a timeout, because c10d's calls of the store never return if the listening process does not answer.
  auto found = call_with_timeout(timeout + kAnswerGrace, [=] { return Joining(environment, timeout).join(address); });
  if (!found) fail_to_join(environment, timeout, kSilent);
  return std::move(*found);
}

void tell_of_end(const c10::intrusive_ptr<c10d::Store>& store, const std::string& token, int rank) {
  const StorePtr own = store_of_token(store_of_run(store, "", 0), token);
  if (!own->check({kComplete})) own->set(kEnded, std::to_string(rank));
}

}  // namespace tessera::internal
