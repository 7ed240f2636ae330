#include <chrono>
#include <cstring>
#include <future>
#include <thread>

#include "tessera/async/task_queue.h"
#include "tessera/offload/copy_engine.h"
#include "tessera/offload/simulated_link.h"

namespace tessera {
namespace {

// The copies of one direction, one after the other. Its thread calls no operator of torch: only bytes move.
class Lane {
 public:
  Lane(CopyDirection direction, const SimulatedLink& link) : direction_(direction), link_(link) {}

  std::future<void> add(const at::Tensor& to, const at::Tensor& from) {
    return queue_.add([this, to = to.mutable_data_ptr(), from = from.const_data_ptr(),
                       bytes = static_cast<int64_t>(from.nbytes())] { copy(to, from, bytes); });
  }

 private:
  void copy(void* to, const void* from, int64_t bytes) const {
    const auto begin = std::chrono::steady_clock::now();
    if (link_.before_copy) link_.before_copy(direction_, bytes);
    if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
    if (link_.bytes_per_s > 0)
      std::this_thread::sleep_until(begin +
                                    std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                                        std::chrono::duration<double>(static_cast<double>(bytes) / link_.bytes_per_s)));
  }

  const CopyDirection direction_;
  const SimulatedLink& link_;
  TaskQueue queue_{1};  // last: its thread uses the rest
};

class ThreadCopy : public Copy::Operation {
 public:
  ThreadCopy(at::Tensor to, at::Tensor from, std::future<void> done, std::shared_ptr<std::atomic<int64_t>> late_copies)
      : to_(std::move(to)), from_(std::move(from)), done_(done.share()), late_copies_(std::move(late_copies)) {}
  ~ThreadCopy() override { done_.wait(); }
  void order() override {
    if (!std::exchange(is_noted_, true) && done_.wait_for(std::chrono::seconds(0)) != std::future_status::ready)
      ++*late_copies_;
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
  explicit ThreadCopyEngine(const SimulatedLink& link)
      : CopyEngine(at::kCPU), link_(link), in_(CopyDirection::kToDevice, link_), out_(CopyDirection::kToHost, link_) {}

 private:
  Copy start(CopyDirection direction, at::Tensor to, at::Tensor from) override {
    std::future<void> done = (direction == CopyDirection::kToDevice ? in_ : out_).add(to, from);
    return Copy(std::make_unique<ThreadCopy>(std::move(to), std::move(from), std::move(done), late_copies()));
  }

  const SimulatedLink link_;
  Lane in_, out_;
};

}  // namespace

std::unique_ptr<CopyEngine> make_thread_copy_engine(const SimulatedLink& link) {
  return std::make_unique<ThreadCopyEngine>(link);
}

}  // namespace tessera
