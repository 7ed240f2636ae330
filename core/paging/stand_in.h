#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

namespace tessera::internal {

// Represents a tensor without data. Computes the tensor's values anew for each operator that uses it.
class StandIn {
 public:
  virtual ~StandIn() = default;
  // Returns the values that an operator gets in place of the tensor.
  virtual at::Tensor values_for(const std::string& operation) const = 0;
  // Computes at::linear(input, the tensor, bias); `bias` may be undefined. Also called for matmul, mm, and addmm (beta
  // = alpha = 1) with the tensor's t(), as in torch::nn::functional::linear. If it returns undefined, the operator runs
  // on values_for().
  virtual at::Tensor linear(const at::Tensor& /*input*/, const at::Tensor& /*bias*/) { return {}; }
  // Computes at::batch_norm() of the input, for a tensor that is one of its statistics or weights. If it returns
  // undefined, the operator runs on values_for().
  virtual at::Tensor batch_norm(const at::Tensor& /*input*/, bool /*training*/, double /*momentum*/, double /*eps*/) {
    return {};
  }
  // "quantized", for errors.
  virtual const char* what_it_is() const = 0;
};

// Makes a tensor without data, of this dtype and shape, which owns `stand_in`. Operators that would write to it throw
// std::logic_error with `name`.
at::Tensor stand_in_view(std::shared_ptr<StandIn> stand_in, const std::string& name, at::Device device,
                         at::ScalarType dtype, at::IntArrayRef sizes);
// The stand-in of the tensor, or null.
std::shared_ptr<StandIn> stand_in_of(const at::Tensor& tensor);

}  // namespace tessera::internal
