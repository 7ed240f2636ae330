#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <future>
#include <mutex>
#include <thread>

#include "tessera/offload/copy_engine.h"

namespace tessera {
namespace {

// The copies of one direction, one after the other. Its thread calls no operator of torch: only bytes move.
class Lane {
 public:
  Lane(CopyDirection direction, const SimulatedLink& link) : direction_(direction), link_(link), worker_([this] { run(); }) {}
  ~Lane() {
    {
      std::lock_guard lock(mutex_);
      is_closing_ = true;
    }
    changed_.notify_one();
    worker_.join();
  }

  std::future<void> add(const at::Tensor& to, const at::Tensor& from) {
    Task task{to.mutable_data_ptr(), from.const_data_ptr(), static_cast<int64_t>(from.nbytes()), {}};
    std::future<void> done = task.done.get_future();
    {
      std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    changed_.notify_one();
    return done;
  }

 private:
  struct Task {
    void* to;
    const void* from;
    int64_t bytes;
    std::promise<void> done;
  };

  void run() {
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return is_closing_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      try {
        copy(task);
        task.done.set_value();
      } catch (...) {
        task.done.set_exception(std::current_exception());
      }
    }
  }

  void copy(const Task& task) const {
    const auto begin = std::chrono::steady_clock::now();
    if (link_.before_copy) link_.before_copy(direction_, task.bytes);
    if (task.bytes > 0) std::memcpy(task.to, task.from, task.bytes);
    if (link_.bytes_per_s > 0)
      std::this_thread::sleep_until(begin + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                                                std::chrono::duration<double>(static_cast<double>(task.bytes) / link_.bytes_per_s)));
  }

  const CopyDirection direction_;
  const SimulatedLink& link_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool is_closing_ = false;
  std::thread worker_;
};

class ThreadCopy : public Copy::Operation {
 public:
  ThreadCopy(at::Tensor to, at::Tensor from, std::future<void> done, std::shared_ptr<std::atomic<int64_t>> late_copies)
      : to_(std::move(to)), from_(std::move(from)), done_(done.share()), late_copies_(std::move(late_copies)) {}
  ~ThreadCopy() override { done_.wait(); }
  void order() override {
    if (!std::exchange(is_noted_, true) && done_.wait_for(std::chrono::seconds(0)) != std::future_status::ready) ++*late_copies_;
    done_.get();
  }
  void finish() override { order(); }

 private:
  const at::Tensor to_, from_;
  const std::shared_future<void> done_;
  std::shared_ptr<std::atomic<int64_t>> late_copies_;
  bool is_noted_ = false;
};

class ThreadCopyEngine : public CopyEngine {
 public:
  explicit ThreadCopyEngine(SimulatedLink link)
      : CopyEngine(at::kCPU), link_(std::move(link)), in_(CopyDirection::kToDevice, link_), out_(CopyDirection::kToHost, link_) {}

 private:
  Copy start(CopyDirection direction, at::Tensor to, at::Tensor from) override {
    std::future<void> done = (direction == CopyDirection::kToDevice ? in_ : out_).add(to, from);
    return Copy(std::make_unique<ThreadCopy>(std::move(to), std::move(from), std::move(done), late_copies()));
  }

  const SimulatedLink link_;
  Lane in_, out_;
};

}  // namespace

std::unique_ptr<CopyEngine> make_thread_copy_engine(SimulatedLink link) {
  return std::make_unique<ThreadCopyEngine>(std::move(link));
}

}  // namespace tessera
