#pragma once

#include <cstdint>
#include <string_view>

namespace tessera {

// The purpose of a tensor's memory.
enum class MemoryKind : uint8_t {
  kUnknown,      // outside of any scope
  kParameters,   // this rank's shards; replicated parameters and buffers
  kGathered,     // full parameters of unsharded units
  kSecondary,    // secondary shards that are kept for backward, in hybrid sharding
  kBuckets,      // gradients that are not reduced yet
  kGradients,    // reduced gradients
  kOptimizer,    // optimizer state
  kActivations,  // made in forward and kept for backward
  kTemporaries,  // other results of operators
  kStaging,      // offload: buffers of transfers
  kHost,         // offload: host memory, page-locked on accelerators
  kDisk,         // offload: bytes of a file, no memory
  kTransport,    // a communicator's own, during operations
  kScratch,      // allocated and freed inside one operator
};
inline constexpr size_t kMemoryKinds = 14;

// The name of a kind ("gathered"), a static string.
std::string_view name_of(MemoryKind kind);

}  // namespace tessera
