#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>

#include <tessera/detail/copy_traffic.h>

namespace tessera {

// Options of ActivationOffload: its use of host memory.
struct ActivationOffloadOptions {
  bool pin_memory = true;                // page-locked memory, which devices access directly
  int64_t host_limit_bytes = 0;          // 0: no limit
  int64_t min_bytes = int64_t{1} << 20;  // smaller tensors stay on the device
};

// Keeps the inputs of checkpointed() blocks in host memory between forward and backward. A deep model then needs device
// memory for the activations of one block only (DeepSpeed's cpu_checkpointing).
//
//   tessera::ActivationOffload activations(comm->device());
//   at::Tensor loss;
//   {
//     tessera::ActivationOffload::Scope scope(activations);
//     loss = loss_of(model(x));           // the blocks are called through checkpointed()
//   }
//   loss.backward();
//
// Copies overlap computation, with at most two tensors in flight in each direction. Forward frees a tensor once it is
// copied; backward fetches the input of the next block in advance. Results are bit-equal to those without offload. Is
// thread-safe. Must outlive the graphs.
class ActivationOffload {
 public:
  // Accepts tensors on this device.
  explicit ActivationOffload(at::Device device, ActivationOffloadOptions options = {});
  ~ActivationOffload();

  // While this object exists, checkpointed() on this thread keeps its inputs in `activations`.
  class Scope {
   public:
    // Replaces the current scope until destruction.
    explicit Scope(ActivationOffload& activations);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    ActivationOffload* const before_;
  };
  // The offload of this thread's innermost scope; null outside scopes.
  static ActivationOffload* current();

  // Returns a tensor of equal values, sizes and strides on the original device. May be called several times.
  using Fetch = std::function<at::Tensor()>;
  // Copies a tensor to the host, and keeps the copy until the result is destroyed. Returns an empty function for a
  // tensor that stays on the device. Throws std::runtime_error beyond host_limit_bytes.
  Fetch keep(const at::Tensor& tensor);

  // Host memory in use now, in bytes.
  int64_t host_bytes() const;
  // The copies since construction.
  internal::CopyTraffic traffic() const;

 private:
  class Pipeline;
  const std::shared_ptr<Pipeline> pipeline_;
};

}  // namespace tessera
