#include "core/comm/watchdog/watchdog_loop.h"

#include "core/comm/store_client.h"
#include "core/runtime/call_with_timeout.h"

namespace tessera::internal {
namespace {

using std::chrono::steady_clock;

// Returns `place` with this rank's registry. The group of all ranks makes the registry.
WaitRegistry::Place with_registry(WaitRegistry::Place place, const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                  int size) {
  if (!place.waits) place.waits = std::make_shared<WaitRegistry>(store, rank, size);
  return place;
}

}  // namespace

std::string lost_store_text(const std::exception& error) {
  const std::string reason = error.what();
  if (reason.starts_with(StoreClient::kNoAnswer)) return reason.substr(0, reason.find('\n'));
  return "the store cannot be reached any more, so the process of rank 0 has probably ended (" +
         reason.substr(0, reason.find('\n')) + ")";
}

bool LoopControl::sleep(std::chrono::milliseconds duration) {
  std::unique_lock lock(mutex_);
  return !changed_.wait_for(lock, duration, [this] { return must_stop_; });
}

void LoopControl::begin_calls() {
  std::lock_guard lock(mutex_);
  calls_since_ = steady_clock::now();
}

void LoopControl::end_calls() {
  std::lock_guard lock(mutex_);
  calls_since_.reset();
}

void LoopControl::end_loop() {
  std::lock_guard lock(mutex_);
  has_ended_ = true;
  changed_.notify_all();
}

bool LoopControl::stop(std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  must_stop_ = true;
  changed_.notify_all();
  return changed_.wait_for(lock, patience, [this] { return has_ended_; });
}

std::chrono::milliseconds LoopControl::unanswered() const {
  std::lock_guard lock(mutex_);
  if (!calls_since_) return {};
  return std::chrono::duration_cast<std::chrono::milliseconds>(steady_clock::now() - *calls_since_);
}

WatchdogLoop::WatchdogLoop(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, Watchdog::Callbacks called,
                           const Watchdog::Options& options)
    : news(store, rank, size, options.serves_store),
      callbacks(std::move(called)),
      place_(with_registry(options.place, store, rank, size)),
      size_(size),
      search_(store, rank, news, place_),
      heartbeat_(store, rank, size, options.beat_every) {}

void WatchdogLoop::publish_failure(const std::string& reason) noexcept {
  try {
    if (!failure.begin_publishing()) return;
    call_with_timeout(Watchdog::kPatience, [self = shared_from_this(), reason] {
      self->news.publish_failure(reason);
      return true;
    });
  } catch (const std::exception&) {
    // If rank 0's process, which serves the store, has ended, closed connections end the waits of all ranks.
  }
}

void WatchdogLoop::await_readers() noexcept {
  if (!news.serves_store() || size_ == 1) return;
  std::call_once(awaited_readers_, [this] {
    try {
      call_with_timeout(Watchdog::kReaders, [self = shared_from_this(), has_failed = failure.has_failed()] {
        self->news.await_readers(has_failed, 2 * Watchdog::ask_every(self->size_), Watchdog::kReaders);
        return true;
      });
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the store is lost, so no rank reads it
    }
  });
}

void WatchdogLoop::look_at_stall() {
  if (const std::string known = failure.explanation(); !known.empty())
    return interrupt(known, false);  // repeated, because the wait may be for another message now
  const auto own = operations.recent();
  const std::string disconnected = callbacks.why_disconnected();  // called before the store, which may be lost
  StallSearch::Reason reason;
  try {
    reason = search_.find_failure_or_divergence(own);
  } catch (const std::exception&) {
    // Rank 0's process may be ending, and its store with it. If a connection is closed, that is the reason.
    if (disconnected.empty()) throw;
  }
  if (reason.text.empty()) reason.text = disconnected;
  if (reason.text.empty()) reason.text = search_.find_leaver(own);
  if (reason.text.empty()) {
    place_.waits->show();
    reason.text = search_.find_cycle(operations.long_wait());
  }
  if (!reason.text.empty()) interrupt(reason.text, reason.is_published);
}

void WatchdogLoop::interrupt(const std::string& reason, bool is_published) {
  if (operations.if_waiting([&] { failure.explain(reason, is_published); })) callbacks.interrupt();
}

// Polls for failures, and for the end of the store, on a rank that does not wait.
void WatchdogLoop::ask_for_news() {
  if (!news.has_news()) return look_for_divergence();
  const std::string found = news.read_failures();
  failure.explain(found, !found.empty());
  if (found.empty() && !news.serves_store())
    failure.set_store_failure("rank 0, whose process has the store, has left the group");
  news.say_informed();
}

// A rank that waits in another group may have diverged in this one. The ranks that are stalled here cannot detect it,
// because only the first of them publishes its operations.
void WatchdogLoop::look_for_divergence() {
  if (!place_.waits->has_long_wait()) return;
  const std::string found = search_.find_divergence(operations.recent());
  if (found.empty()) return;
  failure.explain(found, /*is_published=*/false);
  publish_failure(found);
}

void WatchdogLoop::run() {
  while (control.sleep(Watchdog::kLookEvery)) {
    const auto now = steady_clock::now();
    const bool is_stalled = operations.is_stalled();
    const bool beats = heartbeat_.is_due();
    const bool asks = !is_stalled && !news.has_said_informed() && failure.store_failure().empty() &&
                      now - asked_for_news_ >= Watchdog::ask_every(size_);
    if (!is_stalled && !search_.is_active() && !beats && !asks) continue;
    if (asks) asked_for_news_ = now;
    control.begin_calls();
    try {
      if (is_stalled) look_at_stall();
      if (!is_stalled && search_.is_active()) search_.end();
      if (asks) ask_for_news();
      if (beats)
        if (const std::string dead = heartbeat_.beat(is_stalled); !dead.empty()) interrupt(dead, false);
    } catch (const std::exception& error) {
      // Without heartbeats, the wait continues: transports detect the end of the store's process. The loop tries again.
      if (is_stalled && heartbeat_.is_on()) interrupt(lost_store_text(error), false);
      // Stops asking for news, because c10d logs every call that fails.
      if (asks && failure.store_failure().empty()) failure.set_store_failure(lost_store_text(error));
    }
    control.end_calls();
  }
  control.end_loop();
}

}  // namespace tessera::internal
