#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

namespace tessera::internal {

// Provides the values of a tensor without data (stand_in_view()), anew for each operator that uses the tensor.
class StandIn {
 public:
  virtual ~StandIn() = default;
  // Returns the values that `operation` receives in place of the tensor.
  virtual at::Tensor values_for(const std::string& operation) const = 0;
  // Computes at::linear(input, tensor, bias) for the represented tensor; `bias` may be undefined. Also called for
  // matmul, mm, and addmm (with beta = alpha = 1) of the tensor's t(), which torch::nn::functional::linear uses. If the
  // function returns an undefined tensor, the operator runs on values_for().
  virtual at::Tensor linear(const at::Tensor& /*input*/, const at::Tensor& /*bias*/) { return {}; }
  // Computes at::batch_norm() of `input`, if the represented tensor is one of the operator's statistics or weights. If
  // the function returns an undefined tensor, the operator runs on values_for().
  virtual at::Tensor batch_norm(const at::Tensor& /*input*/, bool /*training*/, double /*momentum*/, double /*eps*/) {
    return {};
  }
  // Returns a description for errors, such as "quantized".
  virtual const char* what_it_is() const = 0;
};

// Returns a tensor of this dtype and shape, without data. The tensor owns `stand_in`. Operators that would write to the
// tensor throw std::logic_error with `name`.
at::Tensor stand_in_view(std::shared_ptr<StandIn> stand_in, const std::string& name, at::Device device,
                         at::ScalarType dtype, at::IntArrayRef sizes);
// Returns the stand-in of the tensor; null if it has none.
std::shared_ptr<StandIn> stand_in_of(const at::Tensor& tensor);

}  // namespace tessera::internal
