#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <thread>
#include <vector>

namespace tessera {

// Threads that do, or wait for, something in the place of those who have other things to do. Tasks are
// begun in the order of the calls; with one thread they also end in it. Thread-safe. Destruction waits
// for all of them. (c10::ThreadPool does not hand a task's exception to anybody.)
class TaskQueue {
 public:
  explicit TaskQueue(int threads);
  ~TaskQueue();
  TaskQueue(const TaskQueue&) = delete;
  TaskQueue& operator=(const TaskQueue&) = delete;

  // The future throws what the task threw.
  std::future<void> add(std::function<void()> task);

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::packaged_task<void()>> tasks_;
  bool is_closing_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace tessera
