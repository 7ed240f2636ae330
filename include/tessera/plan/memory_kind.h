#pragma once

#include <cstdint>
#include <string_view>

namespace tessera {

// The purpose of a tensor's memory.
enum class MemoryKind : uint8_t {
  kUnknown,      // memory that no Tessera code labeled; see RunRecord
  kParameters,   // this rank's shards, and replicated parameters and buffers
  kGathered,     // full parameters of unsharded units
  kSecondary,    // secondary shards that are kept for backward, in hybrid sharding
  kBuckets,      // gradients that are not reduced yet
  kGradients,    // reduced gradients
  kOptimizer,    // optimizer state
  kActivations,  // results of forward that are kept for backward
  kTemporaries,  // other results of operators
  kStaging,      // offload: staging buffers of transfers
  kHost,         // offload: host memory, page-locked for accelerators
  kDisk,         // offload: bytes of files on disk, not memory
  kTransport,    // a communicator's own memory during operations
  kScratch,      // memory that one operator allocates and frees
};
inline constexpr size_t kMemoryKinds = 14;

// Returns the name of a kind ("gathered"), a static string.
std::string_view name_of(MemoryKind kind);

}  // namespace tessera
