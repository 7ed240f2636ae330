#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>

#include <tessera/detail/copy_traffic.h>

namespace tessera {

// Options of ActivationOffload.
struct ActivationOffloadOptions {
  bool pin_memory = true;                // true: copies to page-locked memory, which devices access directly
  int64_t host_limit_bytes = 0;          // upper limit of host memory; 0: no limit
  int64_t min_bytes = int64_t{1} << 20;  // tensors of fewer bytes stay on the device
};

// Keeps the inputs of checkpointed() blocks in host memory between forward and backward, like DeepSpeed's
// cpu_checkpointing. A deep model then needs device memory for the activations of only one block at a time.
//
//   tessera::ActivationOffload activations(comm->device());
//   at::Tensor loss;
//   {
//     tessera::ActivationOffload::Scope scope(activations);
//     loss = loss_of(model(x));           // the blocks are called through checkpointed()
//   }
//   loss.backward();
//
// Copies overlap computation, at most two in each direction. When a third copy to the host starts, forward frees the
// device memory of the oldest one. Backward fetches the input of the next block in advance. Results are bit-equal to
// those without offload. Thread-safe. Autograd graphs of the blocks may outlive this object; scopes must not.
class ActivationOffload {
 public:
  // Offloads tensors of `device`. Tensors of other device types, such as masks in host memory, stay where they are. If
  // `device` has no index, uses the thread's current device.
  explicit ActivationOffload(at::Device device, ActivationOffloadOptions options = {});
  ~ActivationOffload();

  // While this object exists, checkpointed() on this thread keeps its inputs in `activations`.
  class Scope {
   public:
    // Makes `activations` the offload of this thread until this scope ends.
    explicit Scope(ActivationOffload& activations);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    ActivationOffload* const before_;
  };
  static ActivationOffload* current();  // the offload of this thread's innermost scope; null outside scopes

  // Returns the tensor, on its original device. Dense tensors keep their strides. May be called several times.
  using Fetch = std::function<at::Tensor()>;
  // Copies a tensor to the host, and keeps the copy until the returned function is destroyed. Returns an empty function
  // if the tensor is not copied. Throws std::runtime_error if the copy would exceed host_limit_bytes.
  Fetch keep(const at::Tensor& tensor);

  int64_t host_bytes() const;             // bytes of host memory in use now
  internal::CopyTraffic traffic() const;  // number and bytes of copies since construction

 private:
  class Pipeline;
  const std::shared_ptr<Pipeline> pipeline_;
};

}  // namespace tessera
