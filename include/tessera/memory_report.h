#pragma once

#include <cstdint>

namespace tessera {

// Bytes of tensors that a wrapper holds on this rank. FlatLayout predicts each number.
struct MemoryReport {
  int64_t shard_bytes = 0;           // this rank's part of the parameters
  int64_t grad_bytes = 0;            // its part of the gradients, with memory that is kept for the next step
  int64_t gathered_bytes = 0;        // full parameters of the units gathered or being gathered now
  int64_t peak_gathered_bytes = 0;   // the peak of gathered_bytes
  int64_t secondary_bytes = 0;       // parts of gathered parameters kept for backward (hybrid sharding), now
  int64_t peak_secondary_bytes = 0;  // the peak of secondary_bytes
  int64_t bucket_bytes = 0;          // gradients in buckets, before or in their reduction, now
  int64_t peak_bucket_bytes = 0;     // the peak of bucket_bytes
  int64_t largest_unit_bytes = 0;    // full parameters of the largest unit
  int64_t unsharded_bytes = 0;       // the parameters of the whole model
  int64_t staging_bytes = 0;         // with offload: shards that are copied to or from the device, now
  int64_t peak_staging_bytes = 0;    // the peak of staging_bytes

  // The sum of the current numbers, by place. host_bytes includes page-locked memory.
  int64_t device_bytes = 0;
  int64_t host_bytes = 0;
  int64_t pinned_bytes = 0;
  int64_t disk_bytes = 0;
};

}  // namespace tessera
