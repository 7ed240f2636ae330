// Replaces nccl_backend.cpp in builds without TESSERA_CUDA.
#include "core/comm/nccl/nccl_communicator.h"

namespace tessera::internal {

std::shared_ptr<NcclBackends> nccl_backends() { return nullptr; }

}  // namespace tessera::internal
