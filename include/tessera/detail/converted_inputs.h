#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tessera::internal {

// The tensors among forward's arguments that MixedPrecision::cast_forward_inputs converts. Changes that forward makes
// to a converted tensor are copied to the caller's. Used by one thread, during one forward.
class ConvertedInputs {
 public:
  // Returns the tensor in `dtype`: one result for each argument, the argument itself if it has the dtype.
  at::Tensor convert(const at::Tensor& own, at::ScalarType dtype);
  // Copies changes in place to the caller's tensors; autograd records the copies.
  void copy_changes() const;
  // Returns the caller's tensor for a converted one; any other tensor unchanged.
  at::Tensor own_of(const at::Tensor& tensor) const;
  // Whether two lists have the same tensors.
  static bool are_same(const std::vector<at::Tensor>& some, const std::vector<at::Tensor>& others);

 private:
  struct Input {
    at::Tensor own, given;
    int64_t version;  // of `given`; -1: an inference tensor, which has no version
  };
  std::vector<Input> inputs_;
};

}  // namespace tessera::internal
