#pragma once

#include <cstdint>

namespace tessera {

// What a wrapper holds on this rank, in bytes of tensors. FlatLayout predicts each figure.
struct MemoryReport {
  int64_t shard_bytes = 0;           // this rank's part of the parameters
  int64_t grad_bytes = 0;            // its part of the gradients, with memory that is kept for the next ones
  int64_t gathered_bytes = 0;        // full parameters of the units gathered or being gathered now
  int64_t peak_gathered_bytes = 0;   // the most of that at one time
  int64_t secondary_bytes = 0;       // parts of gathered ones that are kept for backward (hybrid sharding) now
  int64_t peak_secondary_bytes = 0;  // the most of that at one time
  int64_t bucket_bytes = 0;          // full gradients waiting for, or in, their reduce-scatter now
  int64_t peak_bucket_bytes = 0;     // the most of that at one time
  int64_t largest_unit_bytes = 0;    // full parameters of the largest unit
  int64_t unsharded_bytes = 0;       // the parameters of the whole model
  int64_t staging_bytes = 0;         // with offload: shards on their way to the device or from it, now
  int64_t peak_staging_bytes = 0;    // the most of that at one time

  // All of the above by where it lies; what is page-locked is counted in host_bytes, too.
  int64_t device_bytes = 0;
  int64_t host_bytes = 0;
  int64_t pinned_bytes = 0;
  int64_t disk_bytes = 0;
};

}  // namespace tessera
