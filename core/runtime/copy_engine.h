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

#include "core/runtime/guarded_by.h"

namespace tessera::internal {

enum class CopyDirection : uint8_t { kToDevice, kToHost };
struct SimulatedLink;  // offload/streams/simulated_link.h, for tests

// The completion of a copy, shared by the copy's handle and the engine.
class CopyEnd {
 public:
  virtual ~CopyEnd() = default;
  virtual bool is_over() = 0;
  virtual void wait() = 0;  // does not throw if the copy has failed
};

// Keeps host memory alive until the copies that use it are complete. Thread-safe.
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
  std::map<int64_t, Held> held_ TESSERA_GUARDED_BY(mutex_);
  int64_t next_ TESSERA_GUARDED_BY(mutex_) = 0;
};

// A copy in flight, implemented by each kind of engine. Owns references to both tensors.
class CopyOperation : public AsyncOperation {
 public:
  CopyOperation(at::Tensor to, at::Tensor from, std::shared_ptr<std::atomic<int64_t>> late_copies)
      : to_(std::move(to)), from_(std::move(from)), late_copies_(std::move(late_copies)) {}
  virtual void order() = 0;         // see Copy::wait()
  virtual void order_device() = 0;  // see Copy::wait_on_device()

 protected:
  // Must be called before each wait. Counts the copy as late if it is incomplete (not `is_over`) at the first call.
  void note_wait(bool is_over) {
    if (!std::exchange(is_noted_, true) && !is_over) ++*late_copies_;
  }
  const at::Tensor to_, from_;

 private:
  const std::shared_ptr<std::atomic<int64_t>> late_copies_;
  bool is_noted_ = false;
};

// The handle of a copy in flight between host and device. Move-only; must be used by the thread that started the copy.
class [[nodiscard]] Copy : public OperationHandle<CopyOperation> {
 public:
  using OperationHandle::OperationHandle;

  // Makes the result usable; throws the error of a failed copy. If the copy is to the host, blocks the host. If the
  // copy is to an accelerator, only orders this thread's later work after the copy.
  void wait() {
    if (operation() != nullptr) operation()->order();
  }
  // Lets later work of this thread reuse the device's tensor. On an accelerator, does not block the host.
  void wait_on_device() {
    if (operation() != nullptr) operation()->order_device();
  }
  // Blocks until both tensors may be reused. The handle is then done().
  void wait_on_host() { finish(); }
};

// Copies between host and device concurrently with computation, in both directions at once.
//
// An accelerator has one stream for each direction. A copy starts after the work that is enqueued on the caller's
// current stream, and wait() orders that stream after the copy. If the device is the CPU, which simulates an
// accelerator, a thread for each direction copies by memcpy. Copies of one direction complete in the order of the
// calls.
//
// A handle may be dropped at any time. On a CPU, this blocks. On an accelerator, it orders the current stream after the
// copy, and the engine keeps the host memory until the copy completes: writes to it need wait_for_host_memory() first.
//
// Must be used by one thread at a time. The destructor waits for copies in flight.
class CopyEngine {
 public:
  static std::unique_ptr<CopyEngine> make(at::Device device);
  virtual ~CopyEngine() = default;
  CopyEngine(const CopyEngine&) = delete;
  CopyEngine& operator=(const CopyEngine&) = delete;

  // Start a copy of `from` to `to`. Both tensors must be contiguous, of one dtype and numel, one in host memory and one
  // on the device. Otherwise throw std::invalid_argument.
  Copy to_device(const at::Tensor& to, const at::Tensor& from) {
    return checked_start(CopyDirection::kToDevice, to, from);
  }
  Copy to_host(const at::Tensor& to, const at::Tensor& from) { return checked_start(CopyDirection::kToHost, to, from); }

  // Blocks until no copy of this engine uses the memory of `host`, by any view of it. Thread-safe.
  void wait_for_host_memory(const at::Tensor& host) { in_use_->wait_for(host); }

  CopyTraffic traffic() const;

 protected:
  explicit CopyEngine(at::Device device) : device_(device) {}
  virtual Copy start(CopyDirection direction, at::Tensor to, at::Tensor from) = 0;
  const at::Device device_;

  // State that handles share with the engine, because a handle may outlive the engine.
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

// Make the engine of an accelerator, and of a CPU that simulates one.
std::unique_ptr<CopyEngine> make_stream_copy_engine(at::Device device);
std::unique_ptr<CopyEngine> make_thread_copy_engine(const SimulatedLink& link);

}  // namespace tessera::internal
