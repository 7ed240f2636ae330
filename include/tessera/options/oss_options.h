#pragma once

#include <ATen/core/ScalarType.h>

#include <cstdint>
#include <optional>

#include <tessera/options/offload_options.h>

namespace tessera {

// Options of OSS. Must be equal on all ranks, except limits of memory.
struct OssOptions {
  // The dtype of published parameters on the wire, kHalf or kBFloat16 for example: half the bytes for fp32 parameters.
  // The owner keeps its exact values as a master copy; the other ranks get rounded ones, like FairScale's
  // broadcast_fp16. Empty: the parameters' own dtype, so that all ranks hold the same bits.
  std::optional<at::ScalarType> broadcast_dtype{};

  // Parameters of less than 1 MiB share buckets of up to this many bytes.
  int64_t broadcast_bucket_bytes = int64_t{16} << 20;

  // For debugging: compares the parameters of all ranks after every N-th step, and throws std::runtime_error, naming
  // the first that differs. 0: TESSERA_DEBUG=replicas or replicas:N says, else never. Never with broadcast_dtype.
  int64_t compare_replicas_every = 0;

  // Steps in host memory: gradients are copied to the host and new values back. HostAdam and HostAdamW overlap the
  // copies of a parameter with the steps of others; with other optimizers all copies come before and after the step.
  OffloadOptions offload{};
};

}  // namespace tessera
