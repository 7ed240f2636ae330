#include <chrono>
#include <cstring>
#include <future>
#include <thread>

#include "core/memory/without_data.h"
#include "core/runtime/copy_engine.h"
#include "core/runtime/task_queue.h"
#include "offload/streams/simulated_link.h"

namespace tessera::internal {
namespace {

thread_local const SimulatedLink* current_link = nullptr;

class ThreadEnd : public CopyEnd {
 public:
  explicit ThreadEnd(std::shared_future<void> end) : future(std::move(end)) {}
  bool is_over() override { return future.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }
  void wait() override { future.wait(); }
  const std::shared_future<void> future;
};

class ThreadCopy : public Copy::Operation {
 public:
  ThreadCopy(at::Tensor to, at::Tensor from, const at::Tensor& host, std::future<void> done,
             std::shared_ptr<HostMemoryInUse> in_use, std::shared_ptr<std::atomic<int64_t>> late_copies)
      : CopyOperation(std::move(to), std::move(from), std::move(late_copies)),
        end_(std::make_shared<ThreadEnd>(done.share())),
        in_use_(std::move(in_use)),
        use_(in_use_->add(host, end_)) {}
  ~ThreadCopy() override {
    end_->wait();
    in_use_->remove(use_);
  }
  void order() override {
    note_wait(end_->is_over());
    end_->future.get();
  }
  void order_device() override { order(); }
  void finish() override { order(); }

 private:
  const std::shared_ptr<ThreadEnd> end_;
  const std::shared_ptr<HostMemoryInUse> in_use_;
  const int64_t use_;
};

class ThreadCopyEngine : public CopyEngine {
 public:
  explicit ThreadCopyEngine(const SimulatedLink& link) : CopyEngine(at::kCPU), link_(link) {}

 private:
  Copy start(CopyDirection direction, at::Tensor to, at::Tensor from) override {
    TaskQueue& queue = direction == CopyDirection::kToDevice ? in_ : out_;
    std::future<void> done = queue.add([this, direction, to = to.mutable_data_ptr(), from = from.const_data_ptr(),
                                        bytes = from.nbytes()] { copy(direction, to, from, bytes); });
    const at::Tensor host = direction == CopyDirection::kToHost ? to : from;
    return Copy(
        std::make_unique<ThreadCopy>(std::move(to), std::move(from), host, std::move(done), in_use(), late_copies()));
  }

  // Runs on a thread of a queue. Must not call torch operators.
  void copy(CopyDirection direction, void* to, const void* from, size_t bytes) const {
    const auto begin = std::chrono::steady_clock::now();
    if (link_.before_copy) link_.before_copy(direction, static_cast<int64_t>(bytes));
    if (bytes > 0 && !without_data_) std::memcpy(to, from, bytes);
    if (link_.bytes_per_s > 0)
      std::this_thread::sleep_until(begin +
                                    std::chrono::duration<double>(static_cast<double>(bytes) / link_.bytes_per_s));
  }

  const SimulatedLink link_;
  const bool without_data_ = is_without_data();
  // One queue for each direction. Declared last, because the threads of the queues use the other members.
  TaskQueue in_{1}, out_{1};
};

}  // namespace

SimulatedLinkScope::SimulatedLinkScope(SimulatedLink link) : link_(std::move(link)), scope_(current_link, &link_) {}
const SimulatedLink* SimulatedLinkScope::current() { return current_link; }

std::unique_ptr<CopyEngine> make_thread_copy_engine(const SimulatedLink& link) {
  return std::make_unique<ThreadCopyEngine>(link);
}

}  // namespace tessera::internal
