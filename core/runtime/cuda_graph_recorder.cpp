// Compiled only with TESSERA_CUDA.
#include "core/runtime/graph_recorder.h"

#include <ATen/cuda/CUDAGraph.h>

namespace tessera::internal {
namespace {

class CudaGraphRecorder final : public GraphRecorder {
 public:
  // Applies capture rules to this thread only, because the watchdog's thread queries events of earlier operations.
  void begin() override { graph_.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal); }
  void end() override { graph_.capture_end(); }
  void replay() override { graph_.replay(); }

 private:
  at::cuda::CUDAGraph graph_;
};

}  // namespace

std::unique_ptr<GraphRecorder> make_cuda_graph_recorder() { return std::make_unique<CudaGraphRecorder>(); }

}  // namespace tessera::internal
