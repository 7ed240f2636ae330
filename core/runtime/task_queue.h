#pragma once

#include <c10/core/thread_pool.h>

#include <functional>
#include <future>

namespace tessera::internal {

// Threads that do, or wait for, something in the place of those who have other things to do. Tasks are begun in the
// order of the calls; with one thread they also end in it. Thread-safe. Destruction waits for all of them.
class TaskQueue {
 public:
  explicit TaskQueue(int threads) : threads_(threads) {}
  ~TaskQueue() { threads_.waitWorkComplete(); }
  TaskQueue(const TaskQueue&) = delete;
  TaskQueue& operator=(const TaskQueue&) = delete;

  // The future throws what the task threw.
  std::future<void> add(std::function<void()> task);

 private:
  c10::ThreadPool threads_;
};

}  // namespace tessera::internal
