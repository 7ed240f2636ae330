#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "core/paging/residency.h"

namespace tessera::internal {

// A copy of a shard in 16 bit, which travels in its place. Right while the shard's page counts so many writes.
struct LowPrecisionCopy {
  at::Tensor values;  // [numel of the shard]
  uint32_t writes = 0;
};

// A parameter's part of it.
struct LowPrecisionPart {
  at::Tensor values;
  std::shared_ptr<LowPrecisionCopy> whole;

  // To be called after a write to the parameter that wrote here too, and was counted once by its page.
  void note_write(const at::Tensor& parameter) const {
    const uint32_t now = page_of(parameter)->writes();
    if (whole->writes + 1 == now) whole->writes = now;  // else it was out of date before
  }
};

// Marks a leaf tensor as a wrapper's part of a parameter, so that code which expects whole parameters can refuse it by
// its label ("parameter 'fc.weight' on rank 1"), and optimizers find its copy in 16 bit, if it has one. The mark stays
// with the TensorImpl.
void mark_as_shard(const at::Tensor& tensor, std::string label, LowPrecisionPart low_precision = {});
bool is_shard(const at::Tensor& tensor);
// Of a shard.
const std::string& shard_label(const at::Tensor& tensor);
// Null if there is none.
const LowPrecisionPart* low_precision_copy_of(const at::Tensor& tensor);

}  // namespace tessera::internal
