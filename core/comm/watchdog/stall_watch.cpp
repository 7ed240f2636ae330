#include "core/comm/watchdog/stall_watch.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <sstream>
#include <utility>
#include <vector>

#include "core/comm/group_process.h"
#include "core/comm/watchdog/rank_waits.h"
#include "core/runtime/in_time.h"

namespace tessera::internal {
namespace {

using std::chrono::steady_clock;

constexpr auto kStall = std::chrono::seconds(1);
constexpr auto kLookForLeaversEvery = std::chrono::seconds(1);
// For ranks that wait in different groups: all waits are read then.
std::chrono::milliseconds search_every(int ranks) {
  return std::max(std::chrono::milliseconds(1000), ranks * std::chrono::milliseconds(10));
}
// More than can be in flight at once; what lies further back has ended on all ranks.
constexpr size_t kRecentOperations = 64;
// Those that an error lists: the first to fail are the cause.
constexpr int kMostFailures = 4;

// Keys of the store. Threads that were left behind may use them while the process ends: they have no destructors.
constexpr char kStarted[] = "tessera/started";    // what one rank that waits has started; every other one compares
constexpr char kNews[] = "tessera/news";          // there is something to read: failures, or that the store will go
constexpr char kInformed[] = "tessera/informed";  // how many ranks need the store no more
constexpr char kLeft[] = "tessera/left";          // which rank has let go of the group, after the fewest operations

// Of this process, each one's State: for when it is about to end.
std::mutex watches_mutex;
std::vector<std::weak_ptr<void>>& watches() {
  static auto* const all = new std::vector<std::weak_ptr<void>>;
  return *all;
}

std::string failure_key(int64_t number) { return c10::str("tessera/failure/", number); }
std::string waiting_key(int rank) { return c10::str("tessera/waiting/", rank); }
std::string beats_key(int rank) { return c10::str("tessera/beats/", rank); }

std::string lost_store_text(const std::exception& error) {
  const std::string reason = error.what();
  return "the store cannot be reached any more, so the process of rank 0 has probably ended (" +
         reason.substr(0, reason.find('\n')) + ")";
}

// In the order in which they were published.
std::string failures(c10d::Store& store) {
  std::vector<std::string> texts;
  for (int number = 1; number <= kMostFailures && store.check({failure_key(number)}); ++number)
    texts.push_back(store.get_to_str(failure_key(number)));
  return c10::Join("; ", texts);
}

// Those of the ranks that have not said that they wait. The store says of several keys whether all are there, so a few
// that are not are soon found among many.
void find_absent(c10d::Store& store, std::span<const int> ranks, std::vector<int>& absent) {
  std::vector<std::string> keys;
  for (int rank : ranks) keys.push_back(waiting_key(rank));
  if (ranks.empty() || store.check(keys)) return;
  if (ranks.size() == 1) return absent.push_back(ranks[0]);
  find_absent(store, ranks.first(ranks.size() / 2), absent);
  find_absent(store, ranks.subspan(ranks.size() / 2), absent);
}

// With the waits of a rank of the group of all, where it is that.
RankWaits::Place placed(RankWaits::Place place, const c10::intrusive_ptr<c10d::Store>& store, int rank, int size) {
  if (!place.waits) place.waits = std::make_shared<RankWaits>(store, rank, size);
  return place;
}

}  // namespace

struct StallWatch::State : RankWaits::Group {
  State(c10::intrusive_ptr<c10d::Store> shared, int own, int ranks, Callbacks called, Options chosen)
      : store(std::move(shared)),
        rank(own),
        size(ranks),
        options(std::move(chosen)),
        own_place(placed(options.place, store, rank, size)),
        callbacks(std::move(called)) {}

  void run();
  void say_informed();
  void say_left();
  const RankWaits::Place& place() const override { return own_place; }
  std::optional<RankWaits::Wait> long_wait() override;
  RankWaits::Progress progress() override;
  uint64_t started_count() const { return recent.empty() ? 0 : recent.back().sequence + 1; }  // under `mutex`
  bool has_failed() {
    std::lock_guard lock(mutex);
    return failure_published || !explanation.empty() || !store_failure.empty();
  }

  struct Started {
    uint64_t sequence;
    std::string description;
  };

  const GroupProcess process;
  const c10::intrusive_ptr<c10d::Store> store;
  const int rank;
  const int size;
  const Options options;
  const RankWaits::Place own_place;

  std::mutex mutex;  // guards what follows
  std::condition_variable wake;
  bool stops = false, has_ended = false;
  bool waiting = false;
  bool failure_published = false;
  bool said_informed = false, said_left = false;
  std::string store_failure;
  steady_clock::time_point wait_began;
  std::optional<uint64_t> waits_for;
  uint64_t waiting_thread = 0, starting_thread = thread_number();
  std::optional<steady_clock::time_point> asks_since;  // the store
  std::deque<Started> recent;
  std::string explanation;

  std::mutex awaiting_readers;   // guards the next
  bool awaited_readers = false;  // who were waited for

  std::mutex calling;   // guards what follows
  Callbacks callbacks;  // null once the watch is gone

 private:
  void look();  // on behalf of a wait that takes long
  void interrupt(const std::string& reason, bool is_consequence);
  void beat(bool stalled);
  void ask_for_news();
  std::string find_reason(const std::deque<Started>& own, bool& is_consequence);
  std::string find_disconnected();
  std::string find_leaver(const std::deque<Started>& own);
  std::string find_cycle();
  void end_looks();
  std::string divergence(const std::deque<Started>& own, const std::string& shown) const;

  // The thread's own.
  bool said_that_it_waits_ = false;
  std::string shown_;  // by this rank, as kStarted
  steady_clock::time_point last_beat_, asked_for_news_, looked_for_leavers_, searched_;
  int64_t beats_of_next_ = -1;
  int missed_ = 0;  // of those
};

std::optional<RankWaits::Wait> StallWatch::State::long_wait() {
  std::lock_guard lock(mutex);
  if (!waiting || !waits_for || steady_clock::now() - wait_began <= kStall) return std::nullopt;
  for (const Started& operation : recent)
    if (operation.sequence == *waits_for) return RankWaits::Wait{*waits_for, operation.description, waiting_thread};
  return RankWaits::Wait{*waits_for, "an operation of long ago", waiting_thread};
}

RankWaits::Progress StallWatch::State::progress() {
  std::lock_guard lock(mutex);
  return {started_count(), starting_thread};
}

StallWatch::StallWatch(c10::intrusive_ptr<c10d::Store> store, int rank, int size, Callbacks callbacks, Options options)
    : state_(std::make_shared<State>(std::move(store), rank, size, std::move(callbacks), std::move(options))) {
  if (size == 1) return;
  state_->own_place.waits->add(state_);
  {
    std::lock_guard lock(watches_mutex);
    std::erase_if(watches(), [](const auto& watch) { return watch.expired(); });
    watches().emplace_back(state_);
  }
  thread_ = std::thread([state = state_] { state->run(); });
}

StallWatch::~StallWatch() {
  if (!thread_.joinable()) return;
  {
    std::lock_guard lock(state_->calling);
    state_->callbacks = {};
  }
  std::unique_lock lock(state_->mutex);
  state_->stops = true;
  state_->wake.notify_all();
  const bool has_ended = state_->wake.wait_for(lock, kPatience, [&] { return state_->has_ended; });
  lock.unlock();
  has_ended ? thread_.join() : thread_.detach();
  if (!has_ended) return;
  leave();
  await_readers();
}

RankWaits::Place StallWatch::part(const std::string& name, const std::vector<int>& members) {
  return state_->own_place.waits->split(state_->own_place, name, members);
}

RankWaits& StallWatch::waits() noexcept { return *state_->own_place.waits; }

void StallWatch::started(uint64_t sequence, std::string description) {
  std::lock_guard lock(state_->mutex);
  if (state_->starting_thread != thread_number()) state_->starting_thread = 0;
  state_->recent.push_back({sequence, std::move(description)});
  if (state_->recent.size() > kRecentOperations) state_->recent.pop_front();
}

void StallWatch::begin_wait(std::optional<uint64_t> sequence) {
  std::lock_guard lock(state_->mutex);
  state_->waiting = true;
  state_->waits_for = sequence;
  state_->waiting_thread = thread_number();
  state_->wait_began = steady_clock::now();
}

void StallWatch::end_wait() {
  std::lock_guard lock(state_->mutex);
  state_->waiting = false;
}

void StallWatch::leave() noexcept {
  if (state_->size == 1) return;
  try {
    ask_store([state = state_] { return state->say_left(), true; });
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): there are no threads to be had; beats will tell
  }
}

void StallWatch::publish_failure(const std::string& reason) noexcept { publish_failure(state_, reason); }

void StallWatch::publish_failure(const std::shared_ptr<State>& state, const std::string& reason) noexcept {
  try {
    {
      std::lock_guard lock(state->mutex);
      if (std::exchange(state->failure_published, true) || !state->store_failure.empty()) return;
    }
    in_time(kPatience, [state, text = c10::str("rank ", state->rank, " failed: ", reason)] {
      c10d::Store& store = *state->store;
      store.set(failure_key(store.add("tessera/failures", 1)), text);
      store.set(kNews, "yes");
      state->say_informed();
      return true;
    });
  } catch (const std::exception&) {
    // The store lives in rank 0's process: where it is gone, so is the group, and every rank's connections close.
  }
}

void StallWatch::await_readers() noexcept { await_readers(*state_); }

void StallWatch::await_readers(State& state) noexcept {
  if (!state.options.serves_store || state.size == 1) return;
  try {
    std::lock_guard lock(state.awaiting_readers);  // a second caller, too, returns when they have read
    if (std::exchange(state.awaited_readers, true)) return;
    in_time(kReaders, [store = state.store, others = state.size - 1, has_failed = state.has_failed(),
                       most = 2 * ask_every(state.size), began = steady_clock::now()] {
      const auto end = began + (has_failed || store->check({kNews}) ? kReaders : most);
      for (bool is_told = false; store->add(kInformed, 0) < others && steady_clock::now() < end; is_told = true) {
        if (!is_told) store->set(kNews, "yes");
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
      return true;
    });
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the store is gone, and nobody reads there
  }
}

void StallWatch::publish_failure_of_process(const std::string& reason) noexcept {
  std::vector<std::shared_ptr<State>> states;
  {
    std::lock_guard lock(watches_mutex);
    for (const auto& watch : watches())
      if (const auto state = std::static_pointer_cast<State>(watch.lock()); state && state->process.is_this())
        states.push_back(state);
  }
  for (const auto& state : states) publish_failure(state, reason);
  for (const auto& state : states) await_readers(*state);
}

// The process that has the store counts the others.
void StallWatch::State::say_informed() {
  {
    std::lock_guard lock(mutex);
    if (std::exchange(said_informed, true) || options.serves_store) return;
  }
  store->add(kInformed, 1);
}

// Of ranks that leave, the one that has started the fewest operations is who is missed first. Nobody misses one of a
// group that has failed.
void StallWatch::State::say_left() {
  uint64_t own = 0;
  {
    std::lock_guard lock(mutex);
    if (std::exchange(said_left, true)) return;
    own = started_count();
  }
  const auto started_by = [](const std::string& text) { return std::stoull(text); };
  const std::string text = c10::str(own, ' ', rank);
  for (std::string known; !has_failed();) {
    const auto bytes = store->compareSet(kLeft, std::vector<uint8_t>(known.begin(), known.end()),
                                         std::vector<uint8_t>(text.begin(), text.end()));
    known.assign(bytes.begin(), bytes.end());
    if (known == text || started_by(known) <= own) break;
  }
  say_informed();
}

// What the store answers, or nothing.
template <class Ask>
auto StallWatch::ask_store(Ask ask) -> std::optional<decltype(ask())> {
  if (!store_failure().empty()) return std::nullopt;
  std::string failure = "the store, in rank 0's process, does not answer";
  try {
    if (auto answer = in_time(kPatience, std::move(ask))) return answer;
  } catch (const std::exception& error) {
    failure = lost_store_text(error);
  }
  std::lock_guard lock(state_->mutex);
  state_->store_failure = std::move(failure);
  return std::nullopt;
}

std::string StallWatch::store_failure() {
  std::lock_guard lock(state_->mutex);
  return state_->store_failure;
}

std::chrono::milliseconds StallWatch::unanswered() {
  std::lock_guard lock(state_->mutex);
  if (!state_->asks_since) return {};
  return std::chrono::duration_cast<std::chrono::milliseconds>(steady_clock::now() - *state_->asks_since);
}

std::string StallWatch::explanation() {
  {
    std::lock_guard lock(state_->mutex);
    if (!state_->explanation.empty()) return state_->explanation;
  }
  const auto found = ask_store([state = state_] {
    std::string texts = failures(*state->store);
    if (!texts.empty()) state->say_informed();
    return texts;
  });
  std::lock_guard lock(state_->mutex);
  if (found && !found->empty()) state_->failure_published = true;
  return found.value_or("");
}

std::string StallWatch::who_waits() {
  std::vector<int> others;
  for (int rank = 0; rank < state_->size; ++rank)
    if (rank != state_->rank) others.push_back(rank);
  // By rank, what those wait for in other groups that do not wait in this one.
  const auto found = ask_store([state = state_, others] {
    std::vector<int> absent;
    find_absent(*state->store, others, absent);
    std::map<int, std::string> elsewhere;
    const auto& ranks = state->own_place.ranks;
    for (int rank : absent) elsewhere[rank] = state->own_place.waits->wait_of(ranks.empty() ? rank : ranks[rank]);
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
    } else if (in_others.size() < kMostFailures) {
      in_others.push_back(c10::str("rank ", rank, " in ", wait));
    }
  }
  std::set_difference(others.begin(), others.end(), absent.begin(), absent.end(), std::back_inserter(waiting));
  if (!idle.empty()) texts.push_back("not waiting for any operation: rank " + c10::Join(", ", idle));
  if (!in_others.empty()) texts.push_back("waiting in another group: " + c10::Join("; ", in_others));
  if (!waiting.empty()) texts.push_back("waiting as well: rank " + c10::Join(", ", waiting));
  return c10::Join("; ", texts);
}

// The first number under which this rank and the one that shows its operations started different ones.
std::string StallWatch::State::divergence(const std::deque<Started>& own, const std::string& shown) const {
  std::map<uint64_t, std::string> theirs;
  std::istringstream lines(shown);
  int other_rank = 0;
  lines >> other_rank;
  uint64_t sequence = 0;
  for (std::string line; lines >> sequence && lines.get() && std::getline(lines, line);) theirs[sequence] = line;
  for (const Started& started : own) {
    const auto other = theirs.find(started.sequence);
    if (other != theirs.end() && other->second != started.description)
      return c10::str("the ranks have diverged: operation #", started.sequence, " is ", started.description,
                      " on rank ", rank, ", but ", other->second, " on rank ", other_rank);
  }
  return "";
}

std::string StallWatch::State::find_disconnected() {
  std::lock_guard lock(calling);
  return callbacks.why_disconnected ? callbacks.why_disconnected() : "";
}

// A rank that will not take part in an operation which this one has started.
std::string StallWatch::State::find_leaver(const std::deque<Started>& own) {
  const auto now = steady_clock::now();
  if (now - looked_for_leavers_ < kLookForLeaversEvery) return "";
  looked_for_leavers_ = now;
  if (!store->check({kLeft})) return "";
  uint64_t count = 0;
  int leaver = 0;
  std::istringstream(store->get_to_str(kLeft)) >> count >> leaver;
  for (const Started& operation : own) {
    if (operation.sequence < count) continue;
    say_informed();
    return c10::str("rank ", leaver, " has left the group, and takes no part in operation #", operation.sequence, ", ",
                    operation.description);
  }
  return "";
}

// One rank of the group looks for it: the others, too, wait for who is in it. Who is told of one is told before those
// that were in it, and go on in other groups, can miss it there.
std::string StallWatch::State::find_cycle() {
  own_place.waits->show();
  const auto now = steady_clock::now();
  const auto wait = long_wait();
  if (!wait) return "";
  std::string told = own_place.waits->told_of(own_place.name, wait->sequence);
  if (!told.empty() || shown_.empty() || now - searched_ < search_every(own_place.waits->size())) return told;
  searched_ = now;
  return own_place.waits->find_cycle();
}

// What the store says of the ranks that wait or have failed. `is_consequence`: other ranks know it.
std::string StallWatch::State::find_reason(const std::deque<Started>& own, bool& is_consequence) {
  std::ostringstream text;
  text << rank << '\n';
  for (const Started& started : own) text << started.sequence << ' ' << started.description << '\n';
  const std::string log = text.str();
  if (!std::exchange(said_that_it_waits_, true)) store->set(waiting_key(rank), "yes");
  std::string shown = log;
  if (shown_.empty()) {
    const auto bytes =
        store->compareSet(kStarted, std::vector<uint8_t>(), std::vector<uint8_t>(log.begin(), log.end()));
    shown.assign(bytes.begin(), bytes.end());
    if (shown == log) shown_ = log;
  } else if (shown_ != log) {
    store->set(kStarted, shown_ = log);
  }
  std::string found = failures(*store);
  is_consequence = !found.empty();
  if (is_consequence) say_informed();
  return found.empty() && shown != log ? divergence(own, shown) : found;
}

void StallWatch::State::look() {
  std::deque<Started> own;
  std::string found;
  {
    std::lock_guard lock(mutex);
    own = recent;
    found = explanation;
  }
  if (found.empty()) {
    const std::string disconnected = find_disconnected();  // first: where rank 0 has ended, so has the store
    bool is_consequence = false;
    try {
      found = find_reason(own, is_consequence);
    } catch (const std::exception&) {
      // Rank 0's process, and the store with it, is going: so do the connections to it, and the wait ends by that.
      if (disconnected.empty()) throw;
    }
    if (found.empty()) found = disconnected;
    if (found.empty()) found = find_leaver(own);
    if (found.empty()) found = find_cycle();
    if (found.empty()) return;
    return interrupt(found, is_consequence);
  }
  interrupt(found, false);  // again, should the wait have moved on just now
}

void StallWatch::State::interrupt(const std::string& reason, bool is_consequence) {
  {
    std::lock_guard lock(mutex);
    if (!waiting) return;
    if (explanation.empty()) explanation = reason;
    failure_published |= is_consequence;
  }
  std::lock_guard lock(calling);
  if (callbacks.interrupt) callbacks.interrupt();
}

// On behalf of a rank that waits for nothing, and may look for the store when it is gone.
void StallWatch::State::ask_for_news() {
  if (!store->check({kNews})) return;
  const std::string found = failures(*store);
  {
    std::lock_guard lock(mutex);
    if (explanation.empty()) explanation = found;
    failure_published |= !found.empty();
    if (found.empty() && !options.serves_store)
      store_failure = "rank 0, whose process has the store, has left the group";
  }
  say_informed();
}

// Beats are counted, not timed: where this rank itself was held up, or the store, nobody is blamed for it.
void StallWatch::State::beat(bool stalled) {
  const auto now = steady_clock::now();
  const auto since = now - std::exchange(last_beat_, now);
  store->add(beats_key(rank), 1);
  if (!stalled) beats_of_next_ = -1;
  if (!stalled) return;
  const int next = (rank + 1) % size;
  const int64_t beats = store->add(beats_key(next), 0);
  missed_ = std::exchange(beats_of_next_, beats) == beats && since < 3 * options.beat_every ? missed_ + 1 : 0;
  if (missed_ < kBeatsMissed) return;
  const double silent_s = std::chrono::duration<double>(missed_ * options.beat_every).count();
  interrupt(c10::str("rank ", next, " has given no sign of life for ", silent_s,
                     " s: its process has ended or has stopped, or it has left the group"),
            false);
}

void StallWatch::State::end_looks() {
  if (std::exchange(said_that_it_waits_, false)) store->deleteKey(waiting_key(rank));
  own_place.waits->show();
  if (!std::exchange(shown_, "").empty()) store->deleteKey(kStarted);  // another one shows its own from now on
}

void StallWatch::State::run() {
  std::unique_lock lock(mutex);
  while (!wake.wait_for(lock, kLookEvery, [&] { return stops; })) {
    const auto now = steady_clock::now();
    const bool stalled = waiting && now - wait_began > kStall;
    const bool beats = options.beat_every.count() > 0 && now - last_beat_ >= options.beat_every;
    const bool asks = !stalled && !said_informed && store_failure.empty() && now - asked_for_news_ >= ask_every(size);
    if (!stalled && !said_that_it_waits_ && !beats && !asks) continue;
    if (asks) asked_for_news_ = now;
    asks_since = now;
    lock.unlock();
    try {
      if (stalled) look();
      if (!stalled && said_that_it_waits_) end_looks();
      if (asks) ask_for_news();
      if (beats) beat(stalled);
    } catch (const std::exception& error) {
      // The store does not answer: the next look asks again, and a transport knows whether its process has gone.
      if (stalled && options.beat_every.count() > 0) interrupt(lost_store_text(error), false);
      std::lock_guard again(mutex);
      if (asks && store_failure.empty()) store_failure = lost_store_text(error);  // c10d complains of each call
    }
    lock.lock();
    asks_since.reset();
  }
  has_ended = true;
  wake.notify_all();
}

}  // namespace tessera::internal
