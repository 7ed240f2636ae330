#include "core/comm/watchdog/wait_registry.h"

#include <c10/util/StringUtil.h>

#include <atomic>
#include <utility>

namespace tessera::internal {
namespace {

// Keys that are never deleted.
std::string where_key(int rank) { return c10::str("tessera/where/", rank); }
std::string cycle_key(const std::string& group, uint64_t sequence) {
  return c10::str("tessera/cycle", group, "/", sequence);
}

}  // namespace

void WaitRegistry::add(std::weak_ptr<Group> group) {
  std::lock_guard lock(mutex_);
  std::erase_if(groups_, [](const auto& known) { return known.expired(); });
  groups_.push_back(std::move(group));
}

WaitRegistry::Place WaitRegistry::split(const Place& place, const std::string& name, const std::vector<int>& members) {
  std::vector<int> ranks;
  for (int member : members) ranks.push_back(place.ranks.empty() ? member : place.ranks[member]);
  std::lock_guard lock(mutex_);
  is_split_ = true;
  return {place.waits, place.name + "/" + name, std::move(ranks)};
}

void WaitRegistry::note_failure(const std::string& text) {
  std::lock_guard lock(mutex_);
  if (failure_.empty()) failure_ = text;
}

std::string WaitRegistry::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

bool WaitRegistry::is_split() const {
  std::lock_guard lock(mutex_);
  return is_split_;
}

// Reads the waits before progress(): if a wait ends in between, started_count may grow, which can only hide a cycle.
std::vector<GroupWait> WaitRegistry::waits() const {
  std::vector<std::shared_ptr<Group>> groups;
  {
    std::lock_guard lock(mutex_);
    for (const auto& known : groups_)
      if (auto group = known.lock()) groups.push_back(std::move(group));
  }
  std::vector<GroupWait> found;
  std::vector<uint64_t> threads;
  for (const auto& group : groups) {
    const auto wait = group->long_wait();
    if (!wait) continue;
    const Place& place = group->place();
    found.push_back({place.name, place.ranks, wait->sequence, wait->operation, {}});
    threads.push_back(wait->thread);
  }
  for (const auto& group : groups) {
    const Progress progress = group->progress();
    for (size_t i = 0; i < found.size(); ++i)
      if (threads[i] == progress.thread) found[i].started[group->place().name] = progress.started_count;
  }
  return found;
}

void WaitRegistry::show() {
  if (!is_split()) return;
  std::lock_guard lock(showing_);
  std::string text = text_of_waits(waits());
  if (text == shown_) return;
  store_->set(where_key(rank_), text);
  shown_ = std::move(text);
}

std::vector<GroupWait> WaitRegistry::shown_by(int other) const {
  if (!store_->check({where_key(other)})) return {};
  return waits_of_text(store_->get_to_str(where_key(other)));
}

std::string WaitRegistry::find_cycle() {
  if (!is_split()) return "";
  const WaitCycle cycle = find_wait_cycle(rank_, size_, [this](int other) { return shown_by(other); });
  if (cycle.empty()) return "";
  std::string text = cycle_text(cycle, size_);
  for (const auto& [rank, wait] : cycle) store_->set(cycle_key(wait.group, wait.sequence), text);
  return text;
}

std::string WaitRegistry::told_of(const std::string& group, uint64_t sequence) const {
  const std::string key = cycle_key(group, sequence);
  return is_split() && store_->check({key}) ? store_->get_to_str(key) : "";
}

std::string WaitRegistry::wait_of(int other) const {
  if (!is_split()) return "";
  const auto waits = shown_by(other);
  return waits.empty() ? "" : wait_text(waits.front(), size_);
}

uint64_t thread_number() {
  static std::atomic<uint64_t> threads{0};
  thread_local const uint64_t number = ++threads;
  return number;
}

}  // namespace tessera::internal
