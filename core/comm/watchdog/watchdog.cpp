#include "core/comm/watchdog/watchdog.h"

#include <c10/util/StringUtil.h>

#include <exception>
#include <iterator>
#include <map>
#include <mutex>

#include "core/comm/group_process.h"
#include "core/comm/store_client.h"
#include "core/comm/watchdog/stall_search.h"
#include "core/comm/watchdog/watchdog_loop.h"
#include "core/runtime/call_with_timeout.h"

namespace tessera::internal {
namespace {

// The largest number of waits in other groups that an error lists.
constexpr size_t kMostWaits = 4;

// The watchdogs of this process, for publish_failure_of_process(). Never destroyed.
class ProcessWatchdogs {
 public:
  void add(const std::shared_ptr<WatchdogLoop>& watchdog) {
    std::lock_guard lock(mutex_);
    std::erase_if(all_, [](const auto& known) { return known.expired(); });
    all_.emplace_back(watchdog);
  }
  std::vector<std::shared_ptr<WatchdogLoop>> of_this_process() {
    std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<WatchdogLoop>> found;
    for (const auto& known : all_)
      if (auto watchdog = known.lock(); watchdog && watchdog->process.is_this()) found.push_back(std::move(watchdog));
    return found;
  }
  static ProcessWatchdogs& instance() {
    static auto* const all = new ProcessWatchdogs;
    return *all;
  }

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<WatchdogLoop>> all_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace

Watchdog::Watchdog(c10::intrusive_ptr<c10d::Store> store, int rank, int size, Callbacks callbacks, Options options)
    : store_(std::move(store)),
      rank_(rank),
      size_(size),
      loop_(std::make_shared<WatchdogLoop>(store_, rank, size, std::move(callbacks), options)) {
  if (size == 1) return;
  waits().add(loop_);
  ProcessWatchdogs::instance().add(loop_);
  thread_ = std::thread([loop = loop_] { loop->run(); });
}

Watchdog::~Watchdog() {
  if (!thread_.joinable()) return;
  loop_->callbacks.clear();
  if (!loop_->control.stop(kPatience)) {
    thread_.detach();
    return;
  }
  thread_.join();
  leave();
  await_readers();
}

WaitRegistry::Place Watchdog::part(const std::string& name, const std::vector<int>& members) {
  return waits().split(loop_->place(), name, members);
}

WaitRegistry& Watchdog::waits() noexcept { return *loop_->place().waits; }

void Watchdog::started(uint64_t sequence, std::string description) {
  loop_->operations.add(sequence, std::move(description));
}

void Watchdog::begin_wait(std::optional<uint64_t> sequence) { loop_->operations.begin_wait(sequence); }

void Watchdog::end_wait() { loop_->operations.end_wait(); }

void Watchdog::leave() noexcept {
  if (size_ == 1) return;
  try {
    ask_store([loop = loop_] {
      loop->news.say_left(loop->progress().started_count, [&] { return loop->failure.has_failed(); });
      return true;
    });
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): if no thread can start, nothing is published
  }
}

void Watchdog::publish_failure(const std::string& reason) noexcept { loop_->publish_failure(reason); }

void Watchdog::await_readers() noexcept { loop_->await_readers(); }

void Watchdog::publish_failure_of_process(const std::string& reason) noexcept {
  const auto watchdogs = ProcessWatchdogs::instance().of_this_process();
  for (const auto& watchdog : watchdogs) watchdog->publish_failure(reason);
  for (const auto& watchdog : watchdogs) watchdog->await_readers();
}

bool Watchdog::is_first_to_tell() noexcept {
  const auto watchdogs = ProcessWatchdogs::instance().of_this_process();
  if (watchdogs.empty()) return true;
  try {
    const auto answer =
        call_with_timeout(kPatience, [loop = watchdogs.front()] { return loop->news.is_first_to_tell(); });
    if (answer) return *answer;
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the store is lost, so this rank decides alone
  }
  return !watchdogs.front()->failure.is_known_to_all();
}

// Returns the store's answer. If there is none, records that the store has failed, and returns nullopt.
template <class Ask>
auto Watchdog::ask_store(Ask ask) -> std::optional<decltype(ask())> {
  if (!store_failure().empty()) return std::nullopt;
  std::string failure = StoreClient::kNoAnswer;
  try {
    if (auto answer = call_with_timeout(kPatience, std::move(ask))) return answer;
  } catch (const std::exception& error) {
    failure = lost_store_text(error);
  }
  loop_->failure.set_store_failure(std::move(failure));
  return std::nullopt;
}

std::string Watchdog::store_failure() { return loop_->failure.store_failure(); }

std::chrono::milliseconds Watchdog::unanswered() { return loop_->control.unanswered(); }

std::string Watchdog::explanation() {
  if (std::string known = loop_->failure.explanation(); !known.empty()) return known;
  const auto found = ask_store([loop = loop_] {
    std::string texts = loop->news.read_failures();
    if (!texts.empty()) loop->news.say_informed();
    return texts;
  });
  if (found && !found->empty()) loop_->failure.explain(*found, /*is_published=*/true);
  return found.value_or("");
}

std::string Watchdog::waiting_ranks() {
  std::vector<int> others;
  for (int rank = 0; rank < size_; ++rank)
    if (rank != rank_) others.push_back(rank);
  // The ranks that are not stalled in this group, and their waits in other groups.
  const auto found = ask_store([store = store_, loop = loop_, others] {
    const std::vector<int> absent = ranks_not_stalled(*store, others);
    std::map<int, std::string> elsewhere;
    const auto& [waits, name, ranks] = loop->place();
    for (int rank : absent) elsewhere[rank] = waits->wait_of(ranks.empty() ? rank : ranks[rank]);
    return std::pair(absent, elsewhere);
  });
  if (!found) return "";
  const auto& [absent, elsewhere] = *found;
  std::vector<int> idle, waiting;
  std::vector<std::string> texts, in_others;
  for (int rank : absent) {
    const std::string& wait = elsewhere.at(rank);
    if (wait.empty()) {
      idle.push_back(rank);
    } else {
      in_others.push_back(c10::str("rank ", rank, " in ", wait));
    }
  }
  if (in_others.size() > kMostWaits) {
    in_others[kMostWaits] = c10::str(in_others.size() - kMostWaits, " more");
    in_others.resize(kMostWaits + 1);
  }
  std::set_difference(others.begin(), others.end(), absent.begin(), absent.end(), std::back_inserter(waiting));
  if (!idle.empty()) texts.push_back("not waiting for any operation: " + ranks_text(idle));
  if (!in_others.empty()) texts.push_back("waiting in another group: " + c10::Join("; ", in_others));
  if (!waiting.empty()) texts.push_back("waiting as well: " + ranks_text(waiting));
  return c10::Join("; ", texts);
}

}  // namespace tessera::internal
