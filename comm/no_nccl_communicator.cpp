// Stands in for nccl_communicator.cpp in builds without TESSERA_CUDA.
#include <stdexcept>

#include "tessera/comm/backends.h"

namespace tessera {

std::shared_ptr<Communicator> make_nccl_communicator(c10::intrusive_ptr<c10d::Store>, int rank, int, at::Device device,
                                                     std::chrono::milliseconds) {
  throw std::invalid_argument("rank " + std::to_string(rank) + ": the NCCL backend for " + device.str() +
                              " is not in this build of Tessera: configure with -DTESSERA_CUDA=ON (preset cuda)");
}

}  // namespace tessera
