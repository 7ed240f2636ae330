#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include <tessera/detail/copy_traffic.h>
#include <tessera/detail/operation_handle.h>

namespace tessera::internal {

enum class CopyDirection : uint8_t { kToDevice, kToHost };
struct SimulatedLink;  // offload/streams/simulated_link.h, for tests

// When a copy is over; shared by its handle and the engine.
class CopyEnd {
 public:
  virtual ~CopyEnd() = default;
  virtual bool is_over() = 0;
  virtual void wait() = 0;  // does not throw for a copy that failed
};

// Host memory that copies use, which it keeps alive until they are over. Thread-safe.
class HostMemoryInUse {
 public:
  int64_t add(at::Tensor host, std::shared_ptr<CopyEnd> end);
  void remove(int64_t number);
  void remove_ended();
  void wait_for(const at::Tensor& host);

 private:
  struct Held {
    at::Tensor host;
    std::shared_ptr<CopyEnd> end;
  };
  std::mutex mutex_;
  std::map<int64_t, Held> held_;
  int64_t next_ = 0;
};

// A copy, as an engine implements it. It keeps both tensors alive.
class CopyOperation : public AsyncOperation {
 public:
  CopyOperation(at::Tensor to, at::Tensor from, std::shared_ptr<std::atomic<int64_t>> late_copies)
      : to_(std::move(to)), from_(std::move(from)), late_copies_(std::move(late_copies)) {}
  virtual void order() = 0;         // see Copy::wait()
  virtual void order_device() = 0;  // see Copy::wait_on_device()

 protected:
  // Called before a wait; counts the copy if it is not over at the first.
  void note_wait(bool is_over) {
    if (!std::exchange(is_noted_, true) && !is_over) ++*late_copies_;
  }
  const at::Tensor to_, from_;

 private:
  const std::shared_ptr<std::atomic<int64_t>> late_copies_;
  bool is_noted_ = false;
};

// The handle of a copy between host and device that is under way. Move-only; used from the thread that started it.
class [[nodiscard]] Copy : public OperationHandle<CopyOperation> {
 public:
  using OperationHandle::OperationHandle;

  // Afterwards the result may be used: by what this thread starts on the device next (copies to an accelerator, which
  // the host does not wait for), by the host (copies to it). Throws what went wrong.
  void wait() {
    if (operation() != nullptr) operation()->order();
  }
  // Afterwards the device's tensor is free for what this thread starts on the device next; the host does not wait for
  // an accelerator.
  void wait_on_device() {
    if (operation() != nullptr) operation()->order_device();
  }
  // Afterwards both tensors are free for anything. The handle is then done().
  void wait_on_host() { finish(); }
};

// Copies between host and device beside the computation, both ways at once.
//
// An accelerator gets a stream for each direction: a copy begins after what the caller's current stream has been given
// so far, and wait() orders the caller's stream after it. Where the device is the CPU, which then stands in for an
// accelerator, a thread for each direction does the same with memcpy. Copies of one direction happen in the order of
// the calls.
//
// A handle may be dropped at any time: an accelerator's current stream is then ordered after the copy, as far as it is
// not, and the engine keeps host memory until the copy is over; before that is written to, wait_for_host_memory().
//
// Used by one thread at a time. Destruction waits for what is under way.
class CopyEngine {
 public:
  static std::unique_ptr<CopyEngine> make(at::Device device);
  virtual ~CopyEngine() = default;
  CopyEngine(const CopyEngine&) = delete;
  CopyEngine& operator=(const CopyEngine&) = delete;

  // to <- from: contiguous, one dtype, one number of elements, one in host memory and one on the device. Throws
  // std::invalid_argument otherwise.
  Copy to_device(const at::Tensor& to, const at::Tensor& from) {
    return checked_start(CopyDirection::kToDevice, to, from);
  }
  Copy to_host(const at::Tensor& to, const at::Tensor& from) { return checked_start(CopyDirection::kToHost, to, from); }

  // Returns when no copy of this engine's uses this host memory, or other views of it, any more.
  void wait_for_host_memory(const at::Tensor& host) { in_use_->wait_for(host); }

  CopyTraffic traffic() const;

 protected:
  explicit CopyEngine(at::Device device) : device_(device) {}
  virtual Copy start(CopyDirection direction, at::Tensor to, at::Tensor from) = 0;
  const at::Device device_;

  // For the handles, which may outlive the engine.
  const std::shared_ptr<HostMemoryInUse>& in_use() const { return in_use_; }
  std::shared_ptr<std::atomic<int64_t>> late_copies() const { return {counters_, &counters_->late_copies}; }

 private:
  struct Counters {
    std::atomic<int64_t> to_device_bytes = 0, to_host_bytes = 0, copies = 0, late_copies = 0;
  };
  Copy checked_start(CopyDirection direction, const at::Tensor& to, const at::Tensor& from);

  const std::shared_ptr<Counters> counters_ = std::make_shared<Counters>();
  const std::shared_ptr<HostMemoryInUse> in_use_ = std::make_shared<HostMemoryInUse>();
};

// For an accelerator, and for the CPU that stands in for one.
std::unique_ptr<CopyEngine> make_stream_copy_engine(at::Device device);
std::unique_ptr<CopyEngine> make_thread_copy_engine(const SimulatedLink& link);

}  // namespace tessera::internal
