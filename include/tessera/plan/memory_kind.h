#pragma once

#include <cstdint>
#include <string_view>

namespace tessera {

// What the memory of tensors is for.
enum class MemoryKind : uint8_t {
  kUnknown,      // nobody has said
  kParameters,   // this rank's shards; whole parameters, and buffers, where those are not sharded
  kGathered,     // full parameters of units in use
  kSecondary,    // parts of those that are kept for backward, in hybrid sharding
  kBuckets,      // gradients on their way to the ranks that get them
  kGradients,    // reduced ones
  kOptimizer,    // what an optimizer keeps from step to step
  kActivations,  // made in forward and kept for backward
  kTemporaries,  // everything else that operators make
  kStaging,      // with offload: on the way to the device or from it
  kHost,         // with offload: in host memory, page-locked on accelerators
  kDisk,         // with offload: claimed in a file, and no memory
  kTransport,    // of a communicator's own, while it moves data
  kScratch,      // taken and given back inside one operator
};
inline constexpr size_t kMemoryKinds = 14;

// "gathered"; of a static string.
std::string_view name_of(MemoryKind kind);

}  // namespace tessera
