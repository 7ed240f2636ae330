#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tessera::internal {

// Tensors among forward's arguments that were converted on the way in (MixedPrecision::cast_forward_inputs), and what
// forward has done to them: the caller's are to be as if it had been given those. Used by one thread, within a forward.
class ConvertedInputs {
 public:
  // What forward is given: the tensor in that type, itself if it is of it. One for each that the caller has.
  at::Tensor convert(const at::Tensor& own, at::ScalarType dtype);
  // Changes in place of what was given come to the caller's tensor, recorded by autograd as they are.
  void copy_changes() const;
  // The caller's tensor where this is what forward was given in its place; any other as it is.
  at::Tensor own_of(const at::Tensor& tensor) const;
  // Whether two lists have the same tensors.
  static bool are_same(const std::vector<at::Tensor>& some, const std::vector<at::Tensor>& others);

 private:
  struct Input {
    at::Tensor own, given;
    int64_t version;  // of what was given; -1: it is an inference tensor, which has none
  };
  std::vector<Input> inputs_;
};

}  // namespace tessera::internal
