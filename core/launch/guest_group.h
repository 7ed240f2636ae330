#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <string>

#include <tessera/launch.h>

namespace tessera::internal {

// Like communicator_from(store), but ranks of other hosts reach this rank at `address`. For callers that know which
// network the ranks share. If `address` is "", uses public_address(), which chooses the first network.
std::shared_ptr<Communicator> communicator_at(std::string address, c10::intrusive_ptr<c10d::Store> store, int rank,
                                              int size, GroupOptions options);

// Returns a text of the options that must be equal on all ranks of a group on `device`.
std::string describe(const GroupOptions& options, const at::Device& device);

}  // namespace tessera::internal
