#include "core/comm/watchdog/stall_search.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <map>
#include <span>
#include <sstream>

namespace tessera::internal {
namespace {

using std::chrono::steady_clock;

constexpr char kStarted[] = "tessera/started";  // key of the operations of the first rank to stall
constexpr auto kSearchLeaversEvery = std::chrono::seconds(1);

std::string waiting_key(int rank) { return c10::str("tessera/waiting/", rank); }

// A search for a cycle reads the waits of all ranks, so the interval between searches grows with the number of ranks.
std::chrono::milliseconds search_cycles_every(int ranks) {
  return std::max(std::chrono::milliseconds(1000), ranks * std::chrono::milliseconds(10));
}

// Appends the ranks that are not stalled to `found`. Bisects, because one call of the store checks all keys of a range.
void find_not_stalled(c10d::Store& store, std::span<const int> ranks, std::vector<int>& found) {
  std::vector<std::string> keys;
  for (int rank : ranks) keys.push_back(waiting_key(rank));
  if (ranks.empty() || store.check(keys)) return;
  if (ranks.size() == 1) return found.push_back(ranks[0]);
  find_not_stalled(store, ranks.first(ranks.size() / 2), found);
  find_not_stalled(store, ranks.subspan(ranks.size() / 2), found);
}

}  // namespace

std::vector<int> ranks_not_stalled(c10d::Store& store, const std::vector<int>& ranks) {
  std::vector<int> found;
  find_not_stalled(store, ranks, found);
  return found;
}

std::string published_text(int rank, const std::deque<StartedOperation>& operations) {
  std::string text = c10::str(rank, '\n');
  for (const StartedOperation& operation : operations)
    text += c10::str(operation.sequence, ' ', operation.description, '\n');
  return text;
}

std::string divergence_text(int rank, const std::deque<StartedOperation>& own, const std::string& published) {
  std::map<uint64_t, std::string> theirs;
  std::istringstream lines(published);
  int other_rank = 0;
  lines >> other_rank;
  uint64_t sequence = 0;
  for (std::string line; lines >> sequence && lines.get() && std::getline(lines, line);) theirs[sequence] = line;
  for (const StartedOperation& started : own) {
    const auto other = theirs.find(started.sequence);
    if (other != theirs.end() && other->second != started.description)
      return c10::str("the ranks have diverged: operation #", started.sequence, " is ", started.description,
                      " on rank ", rank, ", but ", other->second, " on rank ", other_rank);
  }
  return "";
}

StallSearch::Reason StallSearch::find_failure_or_divergence(const std::deque<StartedOperation>& own) {
  const std::string log = published_text(rank_, own);
  if (!std::exchange(is_active_, true)) store_->set(waiting_key(rank_), "yes");
  std::string published = log;
  if (published_.empty()) {
    const auto bytes =
        store_->compareSet(kStarted, std::vector<uint8_t>(), std::vector<uint8_t>(log.begin(), log.end()));
    published.assign(bytes.begin(), bytes.end());
    if (published == log) published_ = log;
  } else if (published_ != log) {
    store_->set(kStarted, published_ = log);
  }
  const std::string failures = news_.read_failures();
  if (failures.empty()) return {published != log ? divergence_text(rank_, own, published) : ""};
  news_.say_informed();
  return {failures, /*is_published=*/true};
}

std::string StallSearch::find_divergence(const std::deque<StartedOperation>& own) {
  // Reads the key: unlike get(), compareSet() does not block if it is absent, and sets it only if "" is expected.
  const std::vector<uint8_t> none{'-'};
  const auto bytes = store_->compareSet(kStarted, none, none);
  return divergence_text(rank_, own, std::string(bytes.begin(), bytes.end()));
}

std::string StallSearch::find_leaver(const std::deque<StartedOperation>& own) {
  const auto now = steady_clock::now();
  if (now - searched_leavers_ < kSearchLeaversEvery) return "";
  searched_leavers_ = now;
  const auto leaver = news_.find_leaver();
  if (!leaver) return "";
  for (const StartedOperation& operation : own) {
    if (operation.sequence < leaver->started_count) continue;
    news_.say_informed();
    return c10::str("rank ", leaver->rank, " has left the group, and takes no part in operation #", operation.sequence,
                    ", ", operation.description);
  }
  return "";
}

std::string StallSearch::find_cycle(const std::optional<WaitRegistry::Wait>& wait) {
  const auto now = steady_clock::now();
  if (!wait) return "";
  std::string told = place_.waits->told_of(place_.name, wait->sequence);
  if (!told.empty() || published_.empty() || now - searched_cycles_ < search_cycles_every(place_.waits->size()))
    return told;
  searched_cycles_ = now;
  return place_.waits->find_cycle();
}

void StallSearch::end() {
  is_active_ = false;
  store_->deleteKey(waiting_key(rank_));
  place_.waits->show();
  if (!std::exchange(published_, "").empty()) store_->deleteKey(kStarted);  // lets another rank publish its operations
}

}  // namespace tessera::internal
