#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/paging/residency.h"

namespace tessera::internal {

// A 16-bit copy of a shard, sent instead of the shard. It is current while `writes` equals the page's number of writes.
struct LowPrecisionCopy {
  at::Tensor values;  // [numel of the shard]
  uint32_t writes = 0;
};

// The part of a LowPrecisionCopy that belongs to one parameter.
struct LowPrecisionPart {
  at::Tensor values;
  std::shared_ptr<LowPrecisionCopy> whole;

  // Must be called after one write to the parameter that also updated the copy.
  void note_write(const at::Tensor& parameter) const {
    const uint32_t now = page_of(parameter)->writes();
    if (whole->writes + 1 == now) whole->writes = now;  // otherwise the copy was stale before the write
  }
};

// Marks a leaf tensor as a wrapper's part of a parameter. Code that needs whole parameters throws with its label
// ("parameter 'fc.weight' on rank 1"). whole_sizes() returns the parameter's shape. Optimizers get the shard's 16-bit
// copy, if any. The mark belongs to the TensorImpl.
void mark_as_shard(const at::Tensor& tensor, std::string label, std::vector<int64_t> whole_sizes,
                   LowPrecisionPart low_precision = {});
bool is_shard(const at::Tensor& tensor);
// Returns the label of a tensor, which must be a shard.
const std::string& shard_label(const at::Tensor& tensor);
// Returns null if the tensor has no 16-bit copy.
const LowPrecisionPart* low_precision_copy_of(const at::Tensor& tensor);

}  // namespace tessera::internal
