#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include <tessera/copy_traffic.h>
#include <tessera/detail/saved_inputs.h>

namespace tessera {

// How ActivationOffload takes host memory.
struct ActivationOffloadOptions {
  bool pin_memory = true;                // page-locked, which devices copy from and to by themselves
  int64_t host_limit_bytes = 0;          // 0: no bound
  int64_t min_bytes = int64_t{1} << 20;  // smaller tensors stay on the device
};

// Keeps the inputs of checkpointed() blocks in host memory between forward and backward, so that a
// deep model's device memory is that of one block (DeepSpeed's cpu_checkpointing).
//
//   tessera::ActivationOffload activations(comm->device());
//   at::Tensor loss;
//   {
//     tessera::ActivationOffload::Scope scope(activations);
//     loss = loss_of(model(x));           // whose blocks are called through checkpointed()
//   }
//   loss.backward();
//
// Copies go beside the computation in both directions, at most two tensors in each: forward lets go of
// a tensor when it has left, backward fetches the one before the one that it computes with. The values are
// those at the time of the call; results are bit for bit those without. Thread-safe. Outlives the graphs.
class ActivationOffload : public internal::SavedInputs {
 public:
  // Of tensors on this device.
  explicit ActivationOffload(at::Device device, ActivationOffloadOptions options = {});
  ~ActivationOffload() override;

  // Throws std::runtime_error beyond host_limit_bytes.
  std::unique_ptr<internal::SavedInput> keep(const at::Tensor& tensor) override;

  // Host memory in use now, in bytes.
  int64_t host_bytes() const;
  // What has been copied since construction.
  CopyTraffic traffic() const;

 private:
  class Pipeline;
  const std::shared_ptr<Pipeline> pipeline_;
};

}  // namespace tessera
