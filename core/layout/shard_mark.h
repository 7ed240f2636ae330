#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/paging/residency.h"

namespace tessera::internal {

// A copy of a host shard in gather_dtype(), which the device reads in place of the shard. Stale if `writes` is not the
// shard's Page::writes().
struct LowPrecisionCopy {
  at::Tensor values;  // [numel of the shard]
  uint32_t writes = 0;
};

// The part of a LowPrecisionCopy that belongs to one parameter.
struct LowPrecisionPart {
  at::Tensor values;
  std::shared_ptr<LowPrecisionCopy> whole;

  // Must be called once after each counted write to the parameter, by a writer that also writes to this copy.
  void note_write(const at::Tensor& parameter) const {
    const uint32_t now = page_of(parameter)->writes();
    if (whole->writes + 1 == now) whole->writes = now;  // otherwise the copy was stale before the write
  }
};

// Marks a leaf tensor as a shard: this rank's part of a parameter. Code that needs the whole parameter throws errors
// with `label` ("parameter 'fc.weight' on rank 1"). whole_sizes() then returns the whole parameter's shape, and
// low_precision_copy_of() returns `low_precision`. The mark belongs to the TensorImpl.
void mark_as_shard(const at::Tensor& tensor, std::string label, std::vector<int64_t> whole_sizes,
                   LowPrecisionPart low_precision = {});
bool is_shard(const at::Tensor& tensor);
const std::string& shard_label(const at::Tensor& tensor);  // returns `label`; the tensor must be a shard
// Returns the `low_precision` of mark_as_shard(); null if the tensor has none.
const LowPrecisionPart* low_precision_copy_of(const at::Tensor& tensor);

}  // namespace tessera::internal
