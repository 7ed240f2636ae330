#include "core/comm/guest/text_exchange.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>

#include <tessera/errors.h>
#include "core/comm/group_process.h"
#include "core/runtime/call_with_timeout.h"

namespace tessera::internal {
namespace {

using std::chrono::milliseconds;

// First character of an exchanged text: the rank has failed, its arguments are invalid, or it has succeeded.
constexpr char kFailedText = '!', kInvalidText = '?', kFineText = ' ';

// Exchanges one text of each rank through a store. run() returns the texts of all ranks. Collective.
class StoreRound {
 public:
  StoreRound(c10d::Store& store, std::string prefix, int rank, int size, milliseconds timeout)
      : store_(store), prefix_(std::move(prefix)), rank_(rank), size_(size), timeout_(timeout) {}

  std::vector<std::string> run(const std::string& own) {
    if (store_.add(prefix_ + "came/" + std::to_string(rank_), 1) > 1)
      throw std::invalid_argument(c10::str("another process or thread has already come as rank ", rank_, " of ", size_,
                                           "; expected each rank once, and a store of its own for each group that is "
                                           "made at the same time (c10d::PrefixStore)"));
    store_.set(key(rank_), c10::str(size_, ' ', own));
    if (rank_ == 0) store_.set(all_, collect());
    if (!wait_for(all_)) throw CommError(missing_text(missing_ranks()));
    return split(store_.get_to_str(all_));
  }

 private:
  static constexpr std::chrono::microseconds kShortestPause{100}, kLongestPause{20'000};

  std::string key(int rank) const { return prefix_ + std::to_string(rank); }

  // Returns false after the timeout. Polls, because c10d's own wait blocks all other calls of the store.
  bool wait_for(const std::string& key) {
    for (auto pause = kShortestPause; !store_.check({key}); pause = std::min(2 * pause, kLongestPause)) {
      if (RunClock::now() - began_ >= timeout_) return false;
      std::this_thread::sleep_for(pause);
    }
    return true;
  }

  std::vector<int> missing_ranks() {
    std::vector<int> missing;
    for (int rank = 0; rank < size_; ++rank)
      if (!store_.check({key(rank)})) missing.push_back(rank);
    return missing.empty() ? std::vector<int>{0} : missing;
  }

  std::string missing_text(const std::vector<int>& missing) const {
    return c10::str(ranks_text(missing), " did not come within ", static_cast<double>(timeout_.count()) * 1e-3, " s");
  }

  // Called on rank 0. Returns one of the characters above, then "<length> <text>" of each rank or the text of an error.
  std::string collect() {
    std::string all(1, kFineText);
    for (int rank = 0; rank < size_; ++rank) {
      if (!wait_for(key(rank))) return kFailedText + missing_text(missing_ranks());
      const std::string entry = store_.get_to_str(key(rank));
      const size_t end = entry.find(' ');
      if (entry.substr(0, end) != std::to_string(size_))
        return kInvalidText + c10::str("rank ", rank, " passes a world size of ", entry.substr(0, end), ", rank 0 of ",
                                       size_, "; expected the same size on all ranks");
      const std::string text = entry.substr(end + 1);
      all += c10::str(text.size(), ' ', text);
    }
    return all;
  }

  std::vector<std::string> split(const std::string& all) const {
    if (all[0] == kFailedText) throw CommError(all.substr(1));
    if (all[0] == kInvalidText) throw std::invalid_argument(all.substr(1));
    std::vector<std::string> texts;
    for (size_t at = 1; at < all.size();) {
      const size_t end = all.find(' ', at);
      const size_t length = std::stoull(all.substr(at, end - at));
      texts.push_back(all.substr(end + 1, length));
      at = end + 1 + length;
    }
    if (static_cast<int>(texts.size()) != size_)
      throw std::invalid_argument(c10::str("rank ", rank_, " passes a world size of ", size_, ", rank 0 of ",
                                           texts.size(), "; expected the same size on all ranks"));
    return texts;
  }

  c10d::Store& store_;
  const std::string prefix_;
  const int rank_, size_;
  const milliseconds timeout_;
  const std::string all_ = prefix_ + "all";
  const RunClock::time_point began_ = RunClock::now();
};

}  // namespace

TextExchange exchange_through(const c10::intrusive_ptr<c10d::Store>& store, const std::string& prefix, int rank,
                              int size, std::chrono::milliseconds timeout) {
  return [=, number = std::make_shared<int>(0)](const std::string& own) {
    const std::string keys = c10::str(prefix, (*number)++, "/");
    auto texts = call_with_timeout(timeout + kAnswerGrace,
                                   [=] { return StoreRound(*store, keys, rank, size, timeout).run(own); });
    if (!texts) throw CommError("the store does not answer");
    return std::move(*texts);
  };
}

std::vector<std::string> exchange_or_fail(const TextExchange& exchange, const std::string& who,
                                          const std::function<std::string()>& own) {
  std::string text(1, kFineText);
  try {
    text += own();
  } catch (const std::invalid_argument& error) {
    text = kInvalidText + std::string(error.what());
  } catch (...) {
    text = kFailedText + text_of(std::current_exception());
  }
  auto texts = exchange(text);
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    const char kind = texts[rank].empty() ? kFineText : texts[rank][0];
    if (!texts[rank].empty()) texts[rank].erase(0, 1);
    const std::string error = c10::str(who, ": on rank ", rank, " of ", texts.size(), ": ", texts[rank]);
    if (kind == kInvalidText) throw std::invalid_argument(error);
    if (kind == kFailedText) throw CommError(error);
  }
  return texts;
}

}  // namespace tessera::internal
