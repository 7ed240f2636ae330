#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/memory/buffer_pool.h"

namespace tessera {

// Parameters that travel together from their owners to all ranks after a step.
//
// A bucket's memory is [parts of rank 0 | parts of rank 1 | ...], and its parameters are views of
// it: one all-gather straight out of and into them updates them all. Large parameters stay where
// they are, a bucket of their own each. So nothing is copied, in a step or for long at the start.
class ParameterBuckets {
 public:
  // Moves the small parameters' values into buckets of at most `bucket_bytes` and makes them views
  // of these (same TensorImpl, so modules and hooks do not notice). `owners` by parameter.
  // broadcast_dtype: what values travel in; the owner's own stay as they are.
  ParameterBuckets(std::vector<at::Tensor> parameters, std::vector<int> owners, int64_t bucket_bytes,
                   std::optional<at::ScalarType> broadcast_dtype, Communicator& comm);

  // Every parameter that requires a gradient <- its owner's, all buckets at once. Collective.
  void publish();

 private:
  struct Bucket {
    std::vector<size_t> members;   // indices of parameters, by owner
    std::vector<int64_t> offsets;  // of the members in `flat`
    std::vector<int64_t> counts;   // elements by owner
    at::Tensor flat;               // [sum of counts]
  };
  struct Journey {
    Bucket* bucket;
    at::Tensor wire;  // what travels: bucket->flat, or a copy of another dtype
    Pending pending;
  };

  void plan(int64_t bucket_bytes);
  void lay_out(Bucket& bucket);
  void adopt(Bucket& bucket);  // (again) makes the members views of the bucket's memory
  bool is_adopted(const Bucket& bucket) const;
  at::Tensor place_of(const Bucket& bucket, size_t member) const;
  Journey start(Bucket& bucket);
  void finish(Journey& journey);

  const std::vector<at::Tensor> parameters_;
  const std::vector<int> owners_;
  const std::optional<at::ScalarType> broadcast_dtype_;
  Communicator& comm_;
  BufferPool pool_;  // for what travels in another dtype
  std::vector<Bucket> buckets_;
};

}  // namespace tessera
