#include "optim/quantized/quantized_weight.h"

#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>
#include <torch/nn/init.h>

#include <cmath>
#include <stdexcept>
#include <utility>

#include "core/layout/deferred.h"
#include "core/runtime/require.h"

namespace tessera::internal {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

struct Kept : torch::CustomClassHolder {
  explicit Kept(std::shared_ptr<const QuantizedWeight> kept) : weight(std::move(kept)) {}
  const std::shared_ptr<const QuantizedWeight> weight;
};

// Computes input x values^T. For backward, saves the quantized weight instead of the values.
class FrozenLinear : public torch::autograd::Function<FrozenLinear> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const at::Tensor& values,
                            std::shared_ptr<const QuantizedWeight> weight) {
    context->saved_data["weight"] = c10::IValue::make_capsule(c10::make_intrusive<Kept>(std::move(weight)));
    return at::linear(input, values);
  }
  static tensor_list backward(AutogradContext* context, const tensor_list& gradients) {
    const auto& weight = static_cast<Kept&>(*context->saved_data["weight"].toCapsule()).weight;
    return {at::matmul(gradients[0], weight->base(gradients[0].scalar_type())), {}, {}};
  }
};

}  // namespace

QuantizedWeight::QuantizedWeight(torch::nn::Module& owner, const std::string& name, std::string fqn,
                                 WeightFormat format, const LoraOptions& lora)
    : owner_(owner.weak_from_this()),
      name_(name),
      fqn_(std::move(fqn)),
      format_(format),
      lora_(lora),
      sizes_(owner.named_parameters(/*recurse=*/false)[name].sizes().vec()),
      dtype_(owner.named_parameters(/*recurse=*/false)[name].scalar_type()),
      bytes_(owner.named_parameters(/*recurse=*/false)[name]) {
  at::NoGradGuard no_grad;
  // Uses the device of the future values, because a deferred weight itself is on the meta device.
  const auto options = at::TensorOptions().dtype(dtype_).device(device_of_values(bytes_));
  bytes_.set_requires_grad(false);
  bytes_.mutable_grad().reset();
  if (format_ != WeightFormat::kFull) {
    const at::Tensor bytes = is_deferred(bytes_) ? encoded_later(format_, bytes_) : encoded(format_, bytes_);
    const OrdinaryScope ordinary;  // deferred() must not record the compatibility check of set_data()
    bytes_.set_data(bytes);
  }
  if (lora_.rank > 0) {
    at::Tensor a = at::empty({lora_.rank, sizes_[1]}, options);
    torch::nn::init::kaiming_uniform_(a, std::sqrt(5));
    a_ = owner.register_parameter(adapter_name("a"), std::move(a));
    b_ = owner.register_parameter(adapter_name("b"), at::zeros({sizes_[0], lora_.rank}, options));
  }
}

std::shared_ptr<QuantizedWeight> QuantizedWeight::make(torch::nn::Module& owner, const std::string& name,
                                                       std::string fqn, WeightFormat format, const LoraOptions& lora) {
  return std::shared_ptr<QuantizedWeight>(new QuantizedWeight(owner, name, std::move(fqn), format, lora));
}

at::Tensor QuantizedWeight::handle() {
  const OrdinaryScope ordinary;
  return stand_in_view(shared_from_this(), fqn_, device_of_values(bytes_), dtype_, sizes_);
}

at::Tensor QuantizedWeight::base(at::ScalarType dtype) const {
  if (format_ == WeightFormat::kFull) return bytes_.to(dtype);
  try {
    return decoded(format_, bytes_, sizes_[0] * sizes_[1], dtype).view(sizes_);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument("'" + fqn_ + "': " + error.what());
  }
}

at::Tensor QuantizedWeight::values(const at::Tensor& bytes, const at::Tensor& a, const at::Tensor& b,
                                   bool with_adapter) const {
  at::NoGradGuard no_grad;
  at::Tensor whole = format_ == WeightFormat::kFull ? bytes.to(at::kFloat)
                                                    : decoded(format_, bytes, sizes_[0] * sizes_[1], at::kFloat);
  whole = whole.view(sizes_);
  if (with_adapter && has_adapter())
    whole = whole + at::matmul(b.to(at::kFloat), a.to(at::kFloat)) * (lora_.alpha / static_cast<double>(lora_.rank));
  return whole.to(dtype_);
}

void QuantizedWeight::merge() { merged_ = values(/*with_adapter=*/true); }

at::Tensor QuantizedWeight::values_for(const std::string& operation) const {
  if (is_merged()) return merged_;
  require<std::logic_error>(!has_adapter(), operation, " was given the weight '", fqn_,
                            "', which has an adapter: a product with an input alone knows what to do with it. Leave it "
                            "out of quantize_linears(), or merge_adapters() to evaluate");
  return base(dtype_);
}

at::Tensor QuantizedWeight::linear(const at::Tensor& input, const at::Tensor& bias) {
  const auto owner = owner_.lock();
  const bool trains = owner != nullptr && owner->is_training();
  if (is_merged()) {
    if (trains && c10::GradMode::is_enabled())
      throw std::logic_error("'" + fqn_ + "' trains while its adapter is merged: unmerge_adapters() first");
    return at::linear(input, merged_.to(input.scalar_type()), bias);
  }
  at::Tensor result;
  if (format_ == WeightFormat::kFull) {
    result = at::linear(input, bytes_, bias);
  } else {
    // Decodes outside FrozenLinear, in whose no-grad mode wrappers would take this use for an evaluation.
    const at::Tensor values = base(input.scalar_type());
    result = c10::GradMode::is_enabled() && input.requires_grad()
                 ? FrozenLinear::apply(input, values, shared_from_this())
                 : at::linear(input, values);
    if (bias.defined()) result = result + bias;
  }
  if (!has_adapter()) return result;
  const at::Tensor given = lora_.dropout > 0 ? at::dropout(input, lora_.dropout, trains) : input;
  return result + at::linear(at::linear(given, a_), b_) * (lora_.alpha / static_cast<double>(lora_.rank));
}

}  // namespace tessera::internal
