#include "tessera/comm/stall_watch.h"

#include <map>
#include <sstream>
#include <utility>

namespace tessera {
namespace {

using std::chrono::steady_clock;

constexpr auto kStall = std::chrono::seconds(1);
constexpr auto kLookEvery = std::chrono::milliseconds(250);
// More than can be in flight at once; what lies further back has ended on all ranks.
constexpr size_t kRecentOperations = 64;

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

}  // namespace

StallWatch::StallWatch(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::function<void()> interrupt)
    : store_(std::move(store)), rank_(rank), size_(size), interrupt_(std::move(interrupt)) {
  if (size_ > 1) thread_ = std::thread([this] { run(); });
}

StallWatch::~StallWatch() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void StallWatch::started(uint64_t sequence, std::string description) {
  std::lock_guard lock(mutex_);
  recent_.push_back({sequence, std::move(description)});
  if (recent_.size() > kRecentOperations) recent_.pop_front();
}

void StallWatch::begin_wait() {
  std::lock_guard lock(mutex_);
  waiting_ = true;
  wait_began_ = steady_clock::now();
}

void StallWatch::end_wait() {
  std::lock_guard lock(mutex_);
  waiting_ = false;
}

std::string StallWatch::key(const char* kind, int rank) const {
  return std::string("tessera/") + kind + "/" + std::to_string(rank);
}

bool StallWatch::read(const std::string& key, std::string* value) {
  if (!store_->check({key})) return false;
  const auto bytes = store_->get(key);
  value->assign(bytes.begin(), bytes.end());
  return true;
}

void StallWatch::publish_failure(const std::string& reason) noexcept {
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(failure_published_, true)) return;
  }
  try {
    store_->set(key("failed", rank_), bytes_of(reason));
  } catch (const std::exception&) {
    // The store lives in rank 0's process: where it is gone, the group is gone, and every rank
    // sees its connections close.
  }
}

std::string StallWatch::failures() {
  std::ostringstream text;
  for (int rank = 0; rank < size_; ++rank) {
    std::string reason;
    if (rank != rank_ && read(key("failed", rank), &reason)) text << "; rank " << rank << " failed: " << reason;
  }
  return text.str().empty() ? "" : text.str().substr(2);
}

// The first number under which this rank and another started different operations.
std::string StallWatch::divergence(const std::deque<Started>& own) {
  for (int rank = 0; rank < size_; ++rank) {
    std::string text;
    if (rank == rank_ || !read(key("started", rank), &text)) continue;
    std::map<uint64_t, std::string> theirs;
    std::istringstream lines(text);
    uint64_t sequence = 0;
    for (std::string line; lines >> sequence && lines.get() && std::getline(lines, line);) theirs[sequence] = line;
    for (const Started& started : own) {
      const auto other = theirs.find(started.sequence);
      if (other == theirs.end() || other->second == started.description) continue;
      std::ostringstream message;
      message << "the ranks have diverged: operation #" << started.sequence << " is " << started.description
              << " on rank " << rank_ << ", but " << other->second << " on rank " << rank;
      return message.str();
    }
  }
  return "";
}

std::string StallWatch::explanation() {
  {
    std::lock_guard lock(mutex_);
    if (!explanation_.empty()) return explanation_;
  }
  try {
    return failures();
  } catch (const std::exception& error) {
    return std::string("the store cannot be reached any more, so the process of rank 0 has probably ended (") +
           error.what() + ")";
  }
}

std::string StallWatch::who_waits() {
  std::ostringstream waiting, absent;
  try {
    for (int rank = 0; rank < size_; ++rank) {
      if (rank == rank_) continue;
      std::ostringstream& list = store_->check({key("started", rank)}) ? waiting : absent;
      list << (list.str().empty() ? "" : ", ") << rank;
    }
  } catch (const std::exception&) {
    return "the store, in rank 0's process, does not answer";
  }
  std::ostringstream text;
  if (!absent.str().empty()) text << "not waiting for any operation: rank " << absent.str();
  if (!waiting.str().empty()) text << (absent.str().empty() ? "" : "; ") << "waiting as well: rank " << waiting.str();
  return text.str();
}

void StallWatch::look() {
  std::deque<Started> own;
  {
    std::lock_guard lock(mutex_);
    own = recent_;
  }
  std::ostringstream log;
  for (const Started& started : own) log << started.sequence << ' ' << started.description << '\n';
  store_->set(key("started", rank_), bytes_of(log.str()));
  std::string found = failures();
  if (found.empty()) found = divergence(own);
  if (found.empty()) return;
  {
    std::lock_guard lock(mutex_);
    if (!waiting_) return;
    if (explanation_.empty()) explanation_ = std::move(found);
  }
  interrupt_();  // again at the next look, should the wait have moved on to its next message just now
}

void StallWatch::run() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    wake_.wait_for(lock, kLookEvery, [this] { return stop_; });
    const bool stalled = waiting_ && steady_clock::now() - wait_began_ > kStall;
    if (stop_ || (!stalled && !published_)) continue;
    published_ = stalled;
    lock.unlock();
    try {
      if (stalled) {
        look();
      } else {
        store_->deleteKey(key("started", rank_));
      }
    } catch (const std::exception&) {
      // Rank 0's process, and the store with it, is gone or going: the connections to it close too,
      // and the wait ends with that error.
    }
    lock.lock();
  }
}

}  // namespace tessera
