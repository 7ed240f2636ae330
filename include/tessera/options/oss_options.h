#pragma once

#include <ATen/core/ScalarType.h>

#include <cstdint>
#include <optional>

#include <tessera/options/offload_options.h>

namespace tessera {

// How OSS exchanges parameters after a step. The same on all ranks.
struct OssOptions {
  // What updated parameters travel in, kHalf or kBFloat16 say: half the bytes for fp32 parameters.
  // The owner's values stay exact, as its master copy; the other ranks get them rounded, as
  // FairScale's broadcast_fp16. Empty: the parameters' own dtype, and all ranks have the same bits.
  std::optional<at::ScalarType> broadcast_dtype;

  // Parameters of less than 1 MiB travel together, up to this many bytes at a time.
  int64_t broadcast_bucket_bytes = int64_t{16} << 20;

  // For debugging: compares the parameters of all ranks after every N-th step, and throws std::runtime_error, naming
  // the first that differs. 0: TESSERA_DEBUG=replicas or replicas:N says, else never. Never with broadcast_dtype.
  int64_t compare_replicas_every = 0;

  // Where the step happens. In host memory gradients travel there and new values back, parameter by parameter
  // while others are stepped if the optimizer is HostAdam or HostAdamW, else all before and all after the step.
  OffloadOptions offload;
};

}  // namespace tessera
