#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

namespace tessera::internal {

// What is computed anew for each operator that is given one of its tensors.
class StandIn {
 public:
  virtual ~StandIn() = default;
  // What the operator is called with in the tensor's place.
  virtual at::Tensor values_for(const std::string& operation) const = 0;
  // at::linear(input, the tensor, bias); `bias` may be undefined. Also called for the products that a linear layer is
  // made of, torch::nn::functional::linear's: with the tensor's t(), matmul, mm, and addmm without factors. Undefined:
  // as any other operator.
  virtual at::Tensor linear(const at::Tensor& /*input*/, const at::Tensor& /*bias*/) { return {}; }
  // at::batch_norm() of the input, with the tensor among its statistics or weights. Undefined: as any other operator.
  virtual at::Tensor batch_norm(const at::Tensor& /*input*/, bool /*training*/, double /*momentum*/, double /*eps*/) {
    return {};
  }
  // "quantized", for errors.
  virtual const char* what_it_is() const = 0;
};

// A tensor without data, of this dtype and shape, for which `stand_in` computes and which keeps it alive. Operators
// that would write to it throw std::logic_error, with `name`.
at::Tensor stand_in_view(std::shared_ptr<StandIn> stand_in, const std::string& name, at::Device device,
                         at::ScalarType dtype, at::IntArrayRef sizes);
// Who stands for the tensor, or null.
std::shared_ptr<StandIn> stand_in_of(const at::Tensor& tensor);

}  // namespace tessera::internal
