// Stores that do not answer, and the clock that measures deadlines.
#include "core/comm/store_client.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <array>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <mutex>
#include <regex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <tessera/errors.h>
#include "core/comm/backends.h"
#include "core/comm/group_process.h"
#include "core/comm/store_mailbox.h"
#include "core/runtime/run_clock.h"
#include "tests/support/built.h"

namespace tessera::store_client_test {
using namespace internal;
namespace {

using namespace std::chrono_literals;

// As c10d's TCPStore while its server is stopped: every call waits for ever, and blocks the others.
class StoppableStore : public c10d::HashStore {
 public:
  void set(const std::string& key, const std::vector<uint8_t>& value) override { answer(), HashStore::set(key, value); }
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override {
    return answer(), HashStore::compareSet(key, expected, desired);
  }
  std::vector<uint8_t> get(const std::string& key) override { return answer(), HashStore::get(key); }
  int64_t add(const std::string& key, int64_t value) override { return answer(), HashStore::add(key, value); }
  int64_t getNumKeys() override { return answer(), HashStore::getNumKeys(); }
  bool check(const std::vector<std::string>& keys) override { return answer(), HashStore::check(keys); }
  bool deleteKey(const std::string& key) override { return answer(), HashStore::deleteKey(key); }
  void append(const std::string& key, const std::vector<uint8_t>& value) override {
    answer(), HashStore::append(key, value);
  }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    return answer(), HashStore::multiGet(keys);
  }
  void multiSet(const std::vector<std::string>& keys, const std::vector<std::vector<uint8_t>>& values) override {
    answer(), HashStore::multiSet(keys, values);
  }
  std::vector<std::string> listKeys() override { return answer(), HashStore::listKeys(); }

  void stop(bool is_stopped) {
    const std::lock_guard lock(mutex_);
    is_stopped_ = is_stopped;
    changed_.notify_all();
  }

 private:
  void answer() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !is_stopped_; });
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_stopped_ = false;
};

std::string error_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const std::exception&) {
    return text_of(std::current_exception());
  }
  return "";
}

void expect_no_answer(const std::function<void()>& act) {
  const std::string error = error_of(act);
  EXPECT_NE(error.find(StoreClient::kNoAnswer), std::string::npos) << error;
}

TEST(StoreClient, EveryCallEnds) {
  const auto store = c10::make_intrusive<StoppableStore>();
  const std::vector<uint8_t> value{1};
  {
    c10d::PrefixStore client("prefix", StoreClient::of(store, 10s));
    client.set("before", "1");
    EXPECT_EQ(client.get_to_str("before"), "1");
    store->stop(true);
    StoreClient::limit_patience(client, 50ms);
    expect_no_answer([&] { client.set("given up", value); });
    expect_no_answer([&] { client.compareSet("key", value, value); });
    expect_no_answer([&] { client.get("key"); });
    expect_no_answer([&] { client.add("key", 1); });
    expect_no_answer([&] { client.deleteKey("key"); });
    expect_no_answer([&] { client.check({"key"}); });
    expect_no_answer([&] { client.getNumKeys(); });
    expect_no_answer([&] { client.wait({"key"}); });
    expect_no_answer([&] { client.wait({"key"}, 10s); });
    expect_no_answer([&] { client.append("key", value); });
    expect_no_answer([&] { client.multiGet({"key"}); });
    expect_no_answer([&] { client.multiSet({"key"}, {value}); });
    expect_no_answer([&] { client.listKeys(); });
    EXPECT_TRUE(client.hasExtendedApi());
  }
  store->stop(false);
  while (store.use_count() > 1) std::this_thread::sleep_for(1ms);  // the thread that was left behind ends
}

TEST(StoreClient, AnswersAgainAndMakesNoCallThatWasGivenUp) {
  const auto store = c10::make_intrusive<StoppableStore>();
  StoreClient client(store, 10s);
  store->stop(true);
  StoreClient::limit_patience(client, 50ms);
  expect_no_answer([&] { client.check({"key"}); });  // the thread makes this call
  expect_no_answer([&] { client.set("key", std::string("late")); });
  store->stop(false);
  while (!error_of([&] { client.check({"key"}); }).empty()) {
  }
  EXPECT_FALSE(store->check({"key"}));
}

TEST(StoreClient, AWaitForAKeyHasATimeout) {
  StoreClient client(c10::make_intrusive<StoppableStore>(), 10s);
  const std::string error = error_of([&] { client.wait({"key"}, 50ms); });
  EXPECT_NE(error.find("timed out after 0.05 s, waiting for the keys key"), std::string::npos) << error;
  client.set("key", std::string("text"));
  client.wait({"key"}, 50ms);
  EXPECT_EQ(client.get_to_str("key"), "text");
}

TEST(StoreClient, ACallInProgressEndsWhenThePatienceIsLimited) {
  const auto store = c10::make_intrusive<StoppableStore>();
  const auto client = c10::make_intrusive<c10d::PrefixStore>("prefix", StoreClient::of(store, 1h));
  store->stop(true);
  auto call = std::async(std::launch::async, [&] { return error_of([&] { client->check({"key"}); }); });
  StoreClient::limit_patience(*client, 20ms);
  EXPECT_NE(call.get().find(StoreClient::kNoAnswer), std::string::npos);
  store->stop(false);
}

TEST(StoreClient, OnlyStoresThatMayFallSilentNeedAThread) {
  const auto in_this_process = c10::make_intrusive<c10d::HashStore>();
  EXPECT_EQ(StoreClient::of(in_this_process, 1s), in_this_process);
  const auto client = StoreClient::of(c10::make_intrusive<StoppableStore>(), 1s);
  const auto part = c10::make_intrusive<c10d::PrefixStore>("a", c10::make_intrusive<c10d::PrefixStore>("b", client));
  EXPECT_EQ(StoreClient::of(part, 1s), part);
  EXPECT_EQ(client->clone(), client);
}

// Runs ranks as threads over a store that stops when all have joined.
void with_silent_store(int world, const std::function<void(std::shared_ptr<Communicator>&)>& body) {
  const auto store = c10::make_intrusive<StoppableStore>();
  std::mutex mutex;
  std::condition_variable joined_changed;
  int joined = 0;
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < world; ++rank)
    ranks.emplace_back([&, rank] {
      auto comm = make_gloo_communicator(store, rank, world, {.address = "127.0.0.1", .timeout = 1min});
      std::unique_lock lock(mutex);
      if (++joined == world) store->stop(true);
      joined_changed.notify_all();
      joined_changed.wait(lock, [&] { return joined == world; });
      lock.unlock();
      StoreClient::limit_patience(*dynamic_cast<HasStore&>(*comm).store(), 200ms);
      body(comm);
    });
  for (std::thread& rank : ranks) rank.join();
  store->stop(false);
}

// All calls of a group end, and its destruction.
TEST(StoreClient, AGroupWhoseStoreIsSilentEnds) {
  with_silent_store(2, [](std::shared_ptr<Communicator>& comm) {
    const StoreMailbox notes(*comm, "topic");
    for (const auto& act :
         std::vector<std::function<void()>>{[&] { notes.leave("name", "text"); }, [&] { notes.find("name"); },
                                            [&] { notes.add("number", 1); }, [&] { notes.remove("name"); }})
      EXPECT_NE(error_of(act).find("does not answer"), std::string::npos);
    EXPECT_NE(error_of([&] { comm->split(0); }), "");
    comm.reset();
  });
  with_silent_store(2, [](std::shared_ptr<Communicator>& comm) { comm->abort("tested"); });
}

// As a store from which another rank removes a text while this rank looks for it.
class EmptiedStore : public c10d::HashStore {
 public:
  bool check(const std::vector<std::string>& keys) override {
    const bool has_keys = HashStore::check(keys);
    for (const auto& key : keys) HashStore::deleteKey(key);
    return has_keys;
  }
};

TEST(StoreMailbox, FindDoesNotWaitForATextThatWasRemoved) {
  const auto comm = make_gloo_communicator(c10::make_intrusive<EmptiedStore>(), 0, 1, {.timeout = 2s});
  const StoreMailbox notes(*comm, "topic");
  EXPECT_EQ(notes.find("name"), std::nullopt);
  notes.leave("name", "text");
  std::optional<std::string> text;
  EXPECT_EQ(error_of([&] { text = notes.find("name"); }), "");
  EXPECT_EQ(text, "text");
  notes.remove("name");
  EXPECT_EQ(notes.find("name"), std::nullopt);
}

// As a store of the program that throws an exception of its own.
class LostStore : public c10d::HashStore {
 public:
  int64_t add(const std::string& key, int64_t value) override {
    if (is_lost) throw std::runtime_error("the server has ended");
    return HashStore::add(key, value);
  }
  std::atomic<bool> is_lost = false;
};

TEST(StoreMailbox, AnyExceptionOfTheStoreIsACommError) {
  const auto store = c10::make_intrusive<LostStore>();
  const auto comm = make_gloo_communicator(store, 0, 1, {.timeout = 2s});
  const StoreMailbox notes(*comm, "topic");
  EXPECT_EQ(notes.add("number", 1), 1);
  store->is_lost = true;
  EXPECT_THROW(notes.add("number", 1), CommError);
}

// Stops a child for longer than any gap that counts.
TEST(RunClock, StandsStillWhileTheProcessIsStopped) {
  const pid_t child = ::fork();
  if (child == 0) {
    const auto began = RunClock::now();
    const auto steady = std::chrono::steady_clock::now();
    ::raise(SIGSTOP);
    const auto ran = RunClock::now() - began;
    const auto took = std::chrono::steady_clock::now() - steady;
    const auto again = RunClock::now();
    bool goes_on = false;
    // On busy processors the clock's thread may run much later.
    for (int i = 0; i < 100 && !goes_on; ++i) {
      std::this_thread::sleep_for(50ms);
      goes_on = RunClock::now() - again >= 40ms;
    }
    ::_exit(took - ran > 1s && ran >= 0s && goes_on ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, WUNTRACED), child);
  ASSERT_TRUE(WIFSTOPPED(status));
  std::this_thread::sleep_for(2500ms);
  ::kill(child, SIGCONT);
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

// The places where the library makes a store, or gets one from outside. There it becomes a StoreClient. Calls of c10d's
// store have no deadline, so a new place must do the same and be listed here.
TEST(StoreClient, EveryStoreOfTheLibraryGoesThroughOne) {
  const std::filesystem::path tree = testing_support::built(TESSERA_TREE);
  const std::regex makes(R"(make_intrusive<c10d::\w*Store>|open_tcp_store\(|c10d::(TCP|File|Hash)Store \w+[({;])");
  const std::regex makes_prefix(R"(make_intrusive<c10d::PrefixStore>)");
  const std::regex wraps(R"((=|\(|return) ?StoreClient::of\()");
  std::set<std::string> making, wrapping;
  for (const char* folder : {"core", "checkpoint", "fsdp", "sdp", "oss", "offload", "optim", "exported", "plan"})
    for (const auto& entry : std::filesystem::recursive_directory_iterator(tree / folder)) {
      if (entry.path().extension() != ".cpp" && entry.path().extension() != ".h") continue;
      std::ifstream file(entry.path());
      for (std::string line; std::getline(file, line);) {
        const std::string name = entry.path().lexically_relative(tree).string();
        if (std::regex_search(line, makes) && !std::regex_search(line, makes_prefix)) making.insert(name);
        if (std::regex_search(line, wraps)) wrapping.insert(name);
      }
    }
  EXPECT_EQ(making,
            (std::set<std::string>{"core/comm/guest/guest_store.cpp",  // a store that a group wraps
                                   "core/comm/store_client.cpp", "core/comm/store_client.h",  // open_tcp_store()
                                   "core/launch/guest_group.cpp",                             // a HashStore
                                   "core/launch/launch.cpp",                                  // a HashStore
                                   "core/launch/rendezvous.cpp", "core/launch/spawn_local.cpp"}));
  EXPECT_EQ(wrapping,
            (std::set<std::string>{"core/comm/gloo/gloo_communicator.cpp", "core/comm/nccl/nccl_communicator.cpp",
                                   "core/launch/rendezvous.cpp", "core/launch/spawn_local.cpp"}));
}

}  // namespace
}  // namespace tessera::store_client_test
