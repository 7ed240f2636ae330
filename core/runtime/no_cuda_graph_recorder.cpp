// Replaces cuda_graph_recorder.cpp in builds without TESSERA_CUDA.
#include "core/runtime/graph_recorder.h"

namespace tessera::internal {

std::unique_ptr<GraphRecorder> make_cuda_graph_recorder() { return nullptr; }

}  // namespace tessera::internal
