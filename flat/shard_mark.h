#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <utility>

namespace tessera {

// A copy of a shard in 16 bit, which travels in the shard's place. It is right while the shard's
// version counter says what `version` does.
struct NarrowCopy {
  at::Tensor values;  // [numel of the shard]
  uint32_t version = 0;
};

// A parameter's part of it.
struct NarrowPart {
  at::Tensor values;
  std::shared_ptr<NarrowCopy> whole;

  // To be called after a write to the parameter that wrote here too, and raised the version by one.
  void note_write(const at::Tensor& parameter) const {
    const uint32_t now = parameter.unsafeGetTensorImpl()->version_counter().current_version();
    if (whole->version + 1 == now) whole->version = now;  // else it was out of date before
  }
};

// Marks a leaf tensor as a wrapper's part of a parameter, so that code which expects whole
// parameters can refuse it, and optimizers find its copy in 16 bit, if it has one. The mark stays
// with the TensorImpl.
void mark_as_shard(const at::Tensor& tensor, NarrowPart narrow = {});
bool is_shard(const at::Tensor& tensor);
// Null if there is none.
const NarrowPart* narrow_copy_of(const at::Tensor& tensor);

}  // namespace tessera
