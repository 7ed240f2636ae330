#include "core/comm/store_client.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <optional>
#include <typeinfo>
#include <utility>

#include "core/comm/short_name_lookups.h"
#include "core/runtime/guarded_by.h"
#include "core/runtime/run_clock.h"
#include "core/runtime/sigpipe_block.h"

namespace tessera::internal {
namespace {

// Longest time that ~StoreClient() waits for a call in progress. Only a call whose caller timed out can take longer.
constexpr std::chrono::milliseconds kEndGrace{500};

}  // namespace

c10d::Store& underlying(c10d::Store& store) {
  auto* const prefixed = dynamic_cast<c10d::PrefixStore*>(&store);
  return prefixed == nullptr ? store : *prefixed->getUnderlyingNonPrefixStore();
}

c10::intrusive_ptr<c10d::TCPStore> open_tcp_store(const std::string& host, c10d::TCPStoreOptions options) {
  options.waitWorkers = false;
  const SigpipeBlock no_sigpipe;  // blocks SIGPIPE also in the server's thread, which inherits the mask
  const ShortNameLookups short_lookups;
  return c10::make_intrusive<c10d::TCPStore>(host, options);
}

void PollingStore::wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) {
  constexpr std::chrono::microseconds kLongestPause{20'000};
  const auto until = RunClock::now() + timeout;
  for (std::chrono::microseconds pause{100}; !check(keys); pause = std::min(2 * pause, kLongestPause)) {
    if (timeout != c10d::Store::kNoTimeout && RunClock::now() >= until)
      C10_THROW_ERROR(DistStoreError, c10::str("timed out after ", static_cast<double>(timeout.count()) * 1e-3,
                                               " s, waiting for the keys ", c10::Join(", ", keys)));
    std::this_thread::sleep_for(pause);
  }
}

// A queue of store calls, which run() makes in order. Owned by the StoreClient and by its thread. Thread-safe.
class StoreThread {
 public:
  explicit StoreThread(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  c10d::Store& store() const { return *store_; }

  void run() {
    const SigpipeBlock no_sigpipe;         // calls write to sockets
    const ShortNameLookups short_lookups;  // TCPStore looks up the names of its peers for its log
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return must_end_ || !calls_.empty(); });
      if (must_end_) break;
      const auto call = std::move(calls_.front());
      calls_.pop_front();
      busy_since_ = RunClock::now();
      lock.unlock();
      call();
      lock.lock();
      busy_since_.reset();
    }
    has_ended_ = true;
    changed_.notify_all();
  }

  void add(std::function<void()> call) {
    const std::lock_guard lock(mutex_);
    calls_.push_back(std::move(call));
    changed_.notify_all();
  }

  // Returns the duration of the call in progress, or 0 if there is none.
  RunClock::duration unanswered() const {
    const std::lock_guard lock(mutex_);
    return busy_since_ ? RunClock::now() - *busy_since_ : RunClock::duration(0);
  }

  // Makes run() return after the call in progress. Returns true if run() ends within `patience`.
  bool end(std::chrono::milliseconds patience) {
    std::unique_lock lock(mutex_);
    must_end_ = true;
    changed_.notify_all();
    return changed_.wait_for(lock, patience, [this] { return has_ended_; });
  }

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> calls_ TESSERA_GUARDED_BY(mutex_);
  std::optional<RunClock::time_point> busy_since_ TESSERA_GUARDED_BY(mutex_);
  bool must_end_ TESSERA_GUARDED_BY(mutex_) = false, has_ended_ TESSERA_GUARDED_BY(mutex_) = false;
};

c10::intrusive_ptr<c10d::Store> StoreClient::of(c10::intrusive_ptr<c10d::Store> store,
                                                std::chrono::milliseconds patience) {
  c10d::Store& last = underlying(*store);
  if (dynamic_cast<StoreClient*>(&last) != nullptr || typeid(last) == typeid(c10d::HashStore)) return store;
  return c10::make_intrusive<StoreClient>(std::move(store), patience);
}

void StoreClient::limit_patience(c10d::Store& store, std::chrono::milliseconds patience) {
  auto* const client = dynamic_cast<StoreClient*>(&underlying(store));
  if (client != nullptr) client->patience_ = std::min(client->patience_.load(), patience);
}

StoreClient::StoreClient(c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds patience)
    : PollingStore(patience),
      patience_(patience),
      calls_(std::make_shared<StoreThread>(std::move(store))),
      thread_([calls = calls_] { calls->run(); }) {}

StoreClient::~StoreClient() {
  if (process_.is_this() && calls_->end(kEndGrace))
    thread_.join();
  else
    thread_.detach();  // the thread is blocked in a call, or does not exist in this child of fork()
}

// Makes a call on the thread and returns its result. The call may outlive this function, so `act` must own its data.
template <class Act>
auto StoreClient::call(Act act) const {
  using Answer = decltype(act(calls_->store()));
  struct Call {
    std::packaged_task<Answer()> task;
    std::atomic<bool> is_taken = false;  // set by thread_ before it runs the task, or by a caller that times out
  };
  const auto made = std::make_shared<Call>();
  // Captures a plain reference, because the thread that runs the task also owns the store.
  made->task = std::packaged_task<Answer()>([&store = calls_->store(), act = std::move(act)] { return act(store); });
  auto answer = made->task.get_future();
  calls_->add([made] {
    if (!made->is_taken.exchange(true)) made->task();
  });
  const auto began = RunClock::now();
  for (;;) {
    const auto patience = patience_.load();
    if (answer.wait_for(next_slice(began + patience)) == std::future_status::ready) break;
    if (RunClock::now() < began + patience && calls_->unanswered() < patience) continue;
    made->is_taken = true;
    C10_THROW_ERROR(DistStoreError,
                    c10::str(kNoAnswer, ", and has not for ", static_cast<double>(patience.count()) * 1e-3,
                             " s: that process has stopped, or the link to it is cut"));
  }
  return answer.get();
}

void StoreClient::set(const std::string& key, const std::vector<uint8_t>& value) {
  call([=](c10d::Store& store) { store.set(key, value); });
}

std::vector<uint8_t> StoreClient::compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                             const std::vector<uint8_t>& desired) {
  return call([=](c10d::Store& store) { return store.compareSet(key, expected, desired); });
}

std::vector<uint8_t> StoreClient::get(const std::string& key) {
  wait({key});
  return call([=](c10d::Store& store) { return store.get(key); });
}

int64_t StoreClient::add(const std::string& key, int64_t value) {
  return call([=](c10d::Store& store) { return store.add(key, value); });
}

bool StoreClient::deleteKey(const std::string& key) {
  return call([=](c10d::Store& store) { return store.deleteKey(key); });
}

bool StoreClient::check(const std::vector<std::string>& keys) {
  return call([=](c10d::Store& store) { return store.check(keys); });
}

int64_t StoreClient::getNumKeys() {
  return call([](c10d::Store& store) { return store.getNumKeys(); });
}

void StoreClient::append(const std::string& key, const std::vector<uint8_t>& value) {
  call([=](c10d::Store& store) { store.append(key, value); });
}

std::vector<std::vector<uint8_t>> StoreClient::multiGet(const std::vector<std::string>& keys) {
  wait(keys);
  return call([=](c10d::Store& store) { return store.multiGet(keys); });
}

void StoreClient::multiSet(const std::vector<std::string>& keys, const std::vector<std::vector<uint8_t>>& values) {
  call([=](c10d::Store& store) { store.multiSet(keys, values); });
}

bool StoreClient::hasExtendedApi() const { return calls_->store().hasExtendedApi(); }  // does not call the server

std::vector<std::string> StoreClient::listKeys() {
  return call([](c10d::Store& store) { return store.listKeys(); });
}

}  // namespace tessera::internal
