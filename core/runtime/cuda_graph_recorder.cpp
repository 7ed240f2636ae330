// Compiled only with TESSERA_CUDA.
#include "core/runtime/graph_recorder.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>

#include <exception>

namespace tessera::internal {
namespace {

// A CUDAGraph whose capture may fail. In libtorch 2.11, capture_end() of a failed capture throws before it ends the
// capture for the allocators and the generators. Afterwards every random operator of the device would throw, and the
// device's allocator would free no block that several streams had used.
class Graph : public at::cuda::CUDAGraph {
 public:
  void begin(cudaStreamCaptureMode mode) {
    or_abandon([&] { capture_begin({0, 0}, mode); });
  }
  void end() {
    or_abandon([&] { capture_end(); });
  }

 private:
  template <class Call>
  void or_abandon(Call call) {
    try {
      call();
    } catch (const std::exception&) {
      if (!capture_ended_) abandon();
      throw;
    }
  }
  void abandon() noexcept {
    for (const auto& entry : captured_generator_states_) end_capture_of(*entry.first);
    try {
      c10::cuda::CUDACachingAllocator::endAllocateToPool(capture_dev_, mempool_id_);
      at::getHostAllocator(at::kCUDA)->end_allocate_to_pool(mempool_id_);
      capture_ended_ = true;           // so that the destructor releases the pools
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the allocators had no capture to end
    }
  }
  // Newer versions of libtorch have no flag `capturing_`: their destructor ends the generator's capture.
  template <class State>
  static void end_capture_of(State& state) {
    if constexpr (requires { state.capturing_; }) state.capturing_ = false;
  }
};

class CudaGraphRecorder final : public GraphRecorder {
 public:
  // Applies capture rules to this thread only, because the watchdog's thread queries events of earlier operations.
  void begin() override { graph_.begin(cudaStreamCaptureModeThreadLocal); }
  void end() override { graph_.end(); }
  void replay() override { graph_.replay(); }

 private:
  Graph graph_;
};

}  // namespace

std::unique_ptr<GraphRecorder> make_cuda_graph_recorder() { return std::make_unique<CudaGraphRecorder>(); }

}  // namespace tessera::internal
