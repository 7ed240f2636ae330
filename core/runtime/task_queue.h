#pragma once

#include <c10/core/thread_pool.h>

#include <functional>
#include <future>
#include <memory>
#include <utility>

namespace tessera::internal {

// A thread pool that runs tasks in submission order. With one thread, tasks also complete in that order. Thread-safe.
// The destructor waits for all tasks.
class TaskQueue {
 public:
  explicit TaskQueue(int threads) : threads_(threads) {}
  ~TaskQueue() { threads_.waitWorkComplete(); }
  TaskQueue(const TaskQueue&) = delete;
  TaskQueue& operator=(const TaskQueue&) = delete;

  // The future rethrows the exception of the task.
  std::future<void> add(std::function<void()> task) {
    const auto packaged = std::make_shared<std::packaged_task<void()>>(std::move(task));
    threads_.run([packaged] { (*packaged)(); });
    return packaged->get_future();
  }

 private:
  c10::ThreadPool threads_;
};

}  // namespace tessera::internal
