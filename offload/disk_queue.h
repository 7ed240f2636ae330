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

// Threads that wait for a disk in the place of those who have other things to do. Tasks are begun in
// the order of the calls. Thread-safe. Destruction waits for all of them.
class DiskQueue {
 public:
  explicit DiskQueue(int threads);
  ~DiskQueue();
  DiskQueue(const DiskQueue&) = delete;
  DiskQueue& operator=(const DiskQueue&) = delete;

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
