#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tessera::internal {

// Converts the tensors in forward's arguments, for MixedPrecision::cast_forward_inputs. Copies forward's in-place
// changes of the converted tensors back to the caller's tensors. Must be used by one thread, during one forward.
class ConvertedInputs {
 public:
  // Returns `own` itself if it has this dtype, otherwise a converted copy. Later calls for `own` return the same copy.
  at::Tensor convert(const at::Tensor& own, at::ScalarType dtype);
  // Copies in-place changes to the caller's tensors. Autograd records the copies.
  void copy_changes() const;
  // Returns the caller's tensor if `tensor` is a converted copy, otherwise `tensor` itself.
  at::Tensor own_of(const at::Tensor& tensor) const;
  // Returns whether two lists have the same tensor objects in the same order.
  static bool are_same(const std::vector<at::Tensor>& some, const std::vector<at::Tensor>& others);

 private:
  struct Input {
    at::Tensor own, given;
    int64_t version;  // autograd's version counter of `given` before forward
  };
  std::vector<Input> inputs_;
};

}  // namespace tessera::internal
