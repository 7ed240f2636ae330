#include "tessera/async/task_queue.h"

#include <utility>

namespace tessera {

TaskQueue::TaskQueue(int threads) {
  for (int i = 0; i < threads; ++i) workers_.emplace_back([this] { run(); });
}

TaskQueue::~TaskQueue() {
  {
    std::lock_guard lock(mutex_);
    is_closing_ = true;
  }
  changed_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

std::future<void> TaskQueue::add(std::function<void()> task) {
  std::packaged_task<void()> packaged(std::move(task));
  std::future<void> done = packaged.get_future();
  {
    std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(packaged));
  }
  changed_.notify_one();
  return done;
}

void TaskQueue::run() {
  for (;;) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return is_closing_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    std::packaged_task<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
  }
}

}  // namespace tessera
