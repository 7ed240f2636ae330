#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>

#include "core/memory/pinned_pool.h"
#include "core/runtime/copy_engine.h"
#include "offload/activations/saved_inputs.h"

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
class ActivationOffload : public SavedInputs {
 public:
  // Of tensors on this device.
  explicit ActivationOffload(at::Device device, ActivationOffloadOptions options = {});
  ~ActivationOffload() override;

  // Throws std::runtime_error beyond host_limit_bytes.
  std::unique_ptr<SavedInput> keep(const at::Tensor& tensor) override;

  // Host memory in use now, in bytes.
  int64_t host_bytes() const { return pool_.lent_bytes(); }
  // The most of host_bytes() since construction.
  int64_t peak_host_bytes() const { return pool_.peak_lent_bytes(); }
  // What has been copied since construction.
  CopyTraffic traffic() const { return copies_->traffic(); }

 private:
  struct Kept;
  class OffloadedInput;
  at::Tensor fetch(Kept& kept);
  void start_fetch(Kept& kept);
  void forget(Kept& kept);

  const ActivationOffloadOptions options_;
  std::mutex mutex_;
  PinnedPool pool_;
  const std::unique_ptr<CopyEngine> copies_;
  std::deque<std::shared_ptr<Kept>> leaving_;  // the oldest first
  std::shared_ptr<Kept> latest_;               // of those alive
};

}  // namespace tessera
