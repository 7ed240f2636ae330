#include "core/comm/watchdog/group_news.h"

#include <c10/util/StringUtil.h>

#include <sstream>
#include <thread>
#include <vector>

namespace tessera::internal {
namespace {

// The largest number of failures that an error lists. It lists the first ones, which usually caused the others.
constexpr int kMostFailures = 4;

// Keys of the store. They have no destructor, because detached threads may use them while the process ends.
constexpr char kNews[] = "tessera/news";
constexpr char kInformed[] = "tessera/informed";  // number of ranks that no longer need the store
constexpr char kLeft[] = "tessera/left";          // the leaver with the fewest operations: "<started_count> <rank>"

std::string failure_key(int64_t number) { return c10::str("tessera/failure/", number); }

}  // namespace

void GroupNews::publish_failure(const std::string& reason) {
  store_->set(failure_key(store_->add("tessera/failures", 1)), c10::str("rank ", rank_, " failed: ", reason));
  store_->set(kNews, "yes");
  say_informed();
}

std::string GroupNews::read_failures() const {
  std::vector<std::string> texts;
  for (int number = 1; number <= kMostFailures && store_->check({failure_key(number)}); ++number)
    texts.push_back(store_->get_to_str(failure_key(number)));
  return c10::Join("; ", texts);
}

bool GroupNews::has_news() const { return store_->check({kNews}); }

bool GroupNews::have_all_left(c10d::Store& store, int size, bool serves_store) {
  return store.add(kInformed, 0) >= (serves_store ? size - 1 : size);
}

void GroupNews::say_informed() {
  if (said_informed_.exchange(true) || serves_store_) return;  // the rank that serves the store is not counted
  store_->add(kInformed, 1);
}

void GroupNews::say_left(uint64_t started_count, const std::function<bool()>& has_failed) {
  if (said_left_.exchange(true)) return;
  const auto started_by = [](const std::string& text) { return std::stoull(text); };
  const std::string text = c10::str(started_count, ' ', rank_);
  for (std::string known; !has_failed();) {
    const auto bytes = store_->compareSet(kLeft, std::vector<uint8_t>(known.begin(), known.end()),
                                          std::vector<uint8_t>(text.begin(), text.end()));
    known.assign(bytes.begin(), bytes.end());
    if (known == text || started_by(known) <= started_count) break;
  }
  say_informed();
}

std::optional<GroupNews::Leaver> GroupNews::find_leaver() const {
  if (!store_->check({kLeft})) return std::nullopt;
  Leaver leaver{};
  std::istringstream(store_->get_to_str(kLeft)) >> leaver.started_count >> leaver.rank;
  return leaver;
}

void GroupNews::await_readers(bool has_failed, std::chrono::milliseconds most,
                              std::chrono::milliseconds most_after_failure) {
  const auto began = std::chrono::steady_clock::now();
  const auto end = began + (has_failed || has_news() ? most_after_failure : most);
  bool is_told = false;
  while (store_->add(kInformed, 0) < size_ - 1 && std::chrono::steady_clock::now() < end) {
    if (!std::exchange(is_told, true)) store_->set(kNews, "yes");
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

}  // namespace tessera::internal
