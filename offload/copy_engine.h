#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>

#include "tessera/async/operation_handle.h"

namespace tessera {

enum class CopyDirection : uint8_t { kToDevice, kToHost };
struct SimulatedLink;  // offload/simulated_link.h, for tests

// A copy, as an engine implements it.
class CopyOperation : public AsyncOperation {
 public:
  virtual void order() = 0;  // see Copy::wait()
};

// The handle of a copy between host and device that is under way. It keeps both tensors alive.
// Move-only; used from the thread that started the copy.
class [[nodiscard]] Copy : public OperationHandle<CopyOperation> {
 public:
  using OperationHandle::OperationHandle;

  // Afterwards the result may be used: by what this thread starts on the device next (copies to an
  // accelerator, which the host does not wait for), by the host (copies to it). Throws what went wrong.
  void wait() {
    if (operation() != nullptr) operation()->order();
  }
  // Afterwards both tensors are free for anything. The handle is then done().
  void wait_on_host() { finish(); }
};

// What an engine has copied since it was made.
struct CopyTraffic {
  int64_t to_device_bytes = 0;
  int64_t to_host_bytes = 0;
  int64_t copies = 0;
  int64_t late_copies = 0;  // of these, were not over when somebody first waited: not hidden entirely
};

// Copies between host and device beside the computation, both ways at once.
//
// An accelerator gets a stream for each direction: a copy begins after what the caller's current
// stream has been given so far, and wait() orders the caller's stream after it. Where the device is
// the CPU, which then stands in for an accelerator, a thread for each direction does the same with
// memcpy. Copies of one direction happen in the order of the calls.
//
// Used by one thread at a time. Destruction waits for what is under way.
class CopyEngine {
 public:
  static std::unique_ptr<CopyEngine> make(at::Device device);
  virtual ~CopyEngine() = default;
  CopyEngine(const CopyEngine&) = delete;
  CopyEngine& operator=(const CopyEngine&) = delete;

  // to <- from: contiguous, one dtype, one number of elements, one in host memory and one on the
  // device. Throws std::invalid_argument otherwise.
  Copy to_device(const at::Tensor& to, const at::Tensor& from) {
    return checked_start(CopyDirection::kToDevice, to, from);
  }
  Copy to_host(const at::Tensor& to, const at::Tensor& from) { return checked_start(CopyDirection::kToHost, to, from); }

  CopyTraffic traffic() const;

 protected:
  explicit CopyEngine(at::Device device) : device_(device) {}
  virtual Copy start(CopyDirection direction, at::Tensor to, at::Tensor from) = 0;
  const at::Device device_;

  // For the handles, which may outlive the engine.
  std::shared_ptr<std::atomic<int64_t>> late_copies() const { return {counters_, &counters_->late_copies}; }

 private:
  struct Counters {
    std::atomic<int64_t> to_device_bytes = 0, to_host_bytes = 0, copies = 0, late_copies = 0;
  };
  Copy checked_start(CopyDirection direction, const at::Tensor& to, const at::Tensor& from);

  const std::shared_ptr<Counters> counters_ = std::make_shared<Counters>();
};

// For an accelerator, and for the CPU that stands in for one.
std::unique_ptr<CopyEngine> make_stream_copy_engine(at::Device device);
std::unique_ptr<CopyEngine> make_thread_copy_engine(const SimulatedLink& link);

}  // namespace tessera
