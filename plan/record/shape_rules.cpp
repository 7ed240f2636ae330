#include "plan/record/shape_rules.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sum.h>

#include <initializer_list>
#include <unordered_map>

namespace tessera::internal {
namespace {

using Tensors = std::vector<at::Tensor>;
using Sizes = std::vector<int64_t>;

const at::Tensor tensor(const MetaArguments& arguments, size_t index) {
  return arguments[index].isTensor() ? arguments[index].toTensor() : at::Tensor();
}
Sizes sizes(const MetaArguments& arguments, size_t index) { return arguments[index].toIntVector(); }

at::Tensor of(const Sizes& shape, const at::Tensor& like) { return at::empty(shape, like.options()); }
at::Tensor of(const Sizes& shape, const at::Tensor& like, at::ScalarType dtype) {
  return at::empty(shape, like.options().dtype(dtype));
}
at::Tensor contiguous_like(const at::Tensor& tensor) { return of(tensor.sizes().vec(), tensor); }

ShapeRule like(size_t index) {
  return [=](const MetaArguments& arguments) { return Tensors{at::empty_like(tensor(arguments, index))}; };
}
ShapeRule like(size_t index, at::ScalarType dtype) {
  return [=](const MetaArguments& arguments) {
    const at::Tensor self = tensor(arguments, index);
    return Tensors{at::empty_like(self, self.options().dtype(dtype))};
  };
}
ShapeRule pair_like(size_t index) {
  return [=](const MetaArguments& arguments) {
    return Tensors{at::empty_like(tensor(arguments, index)), at::empty_like(tensor(arguments, index))};
  };
}
// Returns the rule of an operator on two tensors. The result has the broadcast shape and the promoted dtype.
ShapeRule both(size_t a, size_t b) {
  return [=](const MetaArguments& arguments) { return Tensors{at::add(tensor(arguments, a), tensor(arguments, b))}; };
}
Tensors scalar(const MetaArguments& arguments) { return {of({}, tensor(arguments, 0))}; }
// Returns the rule of a loss. The result has the broadcast shape if argument `reduction` is 0 (none), else one element.
ShapeRule loss(size_t reduction) {
  return [=](const MetaArguments& arguments) {
    const at::Tensor whole = at::add(tensor(arguments, 0), tensor(arguments, 1));
    return Tensors{arguments[reduction].toInt() == 0 ? whole : of({}, whole)};
  };
}

// Returns the dtype of a norm's statistics in libtorch: fp32 for 16-bit input with fp32 parameters, else the input's.
at::ScalarType statistics_dtype(const at::Tensor& input, std::initializer_list<at::Tensor> parameters) {
  if (input.scalar_type() == at::kBFloat16 || input.scalar_type() == at::kHalf)
    for (const at::Tensor& parameter : parameters)
      if (parameter.defined() && parameter.scalar_type() == at::kFloat) return at::kFloat;
  return input.scalar_type();
}

Tensors layer_norm(const MetaArguments& a) {
  const at::Tensor input = tensor(a, 0);
  const at::ScalarType dtype = statistics_dtype(input, {tensor(a, 2), tensor(a, 3)});
  Sizes shape = input.sizes().vec();
  const size_t normalized = sizes(a, 1).size();
  for (size_t i = shape.size() - normalized; i < shape.size(); ++i) shape[i] = 1;
  return {contiguous_like(input), of(shape, input, dtype), of(shape, input, dtype)};
}

// Returns the gradients of input, weight and bias that `wanted` selects. `parameter` has the sizes of the weight, which
// may be undefined.
Tensors norm_backward(const at::Tensor& input, const at::Tensor& weight, const Sizes& parameter,
                      const c10::List<bool>& wanted) {
  const at::ScalarType dtype = weight.defined() ? weight.scalar_type() : input.scalar_type();
  return {wanted.get(0) ? at::empty_like(input) : at::Tensor(),
          wanted.get(1) ? of(parameter, input, dtype) : at::Tensor(),
          wanted.get(2) ? of(parameter, input, dtype) : at::Tensor()};
}
Tensors layer_norm_backward(const MetaArguments& a) {
  return norm_backward(tensor(a, 1), tensor(a, 5), sizes(a, 2), a[7].toBoolList());
}
Tensors batch_norm(const MetaArguments& a) {
  const at::Tensor input = tensor(a, 0);
  const at::ScalarType dtype = statistics_dtype(input, {tensor(a, 1), tensor(a, 2), tensor(a, 3), tensor(a, 4)});
  const Sizes statistics{a[5].toBool() ? input.size(1) : 0};
  return {at::empty_like(input), of(statistics, input, dtype), of(statistics, input, dtype)};
}
Tensors batch_norm_backward(const MetaArguments& a) {
  const at::Tensor input = tensor(a, 1);
  return norm_backward(input, tensor(a, 2), {input.size(1)}, a[9].toBoolList());
}
Tensors group_norm(const MetaArguments& a) {
  const at::Tensor input = tensor(a, 0);
  const at::ScalarType dtype = statistics_dtype(input, {tensor(a, 1), tensor(a, 2)});
  const Sizes statistics{a[3].toInt(), a[6].toInt()};
  return {at::empty_like(input), of(statistics, input, dtype), of(statistics, input, dtype)};
}
Tensors group_norm_backward(const MetaArguments& a) {
  return norm_backward(tensor(a, 1), tensor(a, 4), {a[6].toInt()}, a[9].toBoolList());
}

Tensors dropout(const MetaArguments& a) {
  const at::Tensor self = tensor(a, 0);
  return {at::empty_like(self), at::empty_like(self, self.options().dtype(at::kBool))};
}

Tensors index_select(const MetaArguments& a) {
  const at::Tensor self = tensor(a, 0);
  Sizes shape = self.sizes().vec();
  if (!shape.empty()) shape[static_cast<size_t>(c10::maybe_wrap_dim(a[1].toInt(), self.dim()))] = tensor(a, 2).numel();
  return {of(shape, self)};
}
Tensors embedding_backward(const MetaArguments& a) {
  const at::Tensor gradient = tensor(a, 0);
  return {of({a[2].toInt(), gradient.size(-1)}, gradient)};
}

Tensors attention(const MetaArguments& a) {
  const at::Tensor query = tensor(a, 0);
  const at::ScalarType dtype = query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return {at::empty_like(query), of({query.size(0), query.size(2), query.size(1)}, query, dtype).transpose(1, 2)};
}
Tensors attention_backward(const MetaArguments& a) {
  Tensors results;
  for (size_t i = 1; i <= 3; ++i) results.push_back(contiguous_like(tensor(a, i).transpose(1, 2)).transpose(1, 2));
  return results;
}

// A reduced loss keeps the memory of its unreduced terms, as in libtorch's kernels.
Tensors loss(const MetaArguments& a, size_t reduction) {
  const Sizes shape = at::infer_size(tensor(a, 0).sizes(), tensor(a, 1).sizes());
  const at::Tensor each = of(shape, tensor(a, 0));
  return {a[reduction].toInt() == at::Reduction::None ? each : each.resize_(at::IntArrayRef{})};
}

// `padding` and `stride` are the indices of these arguments.
Tensors convolution(const MetaArguments& a, size_t padding, size_t stride, const Sizes& dilation) {
  const at::Tensor input = tensor(a, 0), weight = tensor(a, 1);
  const Sizes paddings = sizes(a, padding), strides = sizes(a, stride);
  Sizes shape{input.size(0), weight.size(0)};
  for (int64_t i = 2; i < input.dim(); ++i) {
    const auto at = [&](const Sizes& list) { return list.size() == 1 ? list[0] : list[static_cast<size_t>(i - 2)]; };
    shape.push_back((input.size(i) + 2 * at(paddings) - at(dilation) * (weight.size(i) - 1) - 1) / at(strides) + 1);
  }
  return {at::empty(shape, input.options(), input.suggest_memory_format())};
}
// The rule of aten::_convolution, which computes transposed convolutions itself, and calls other operators otherwise.
Tensors transposed_convolution(const MetaArguments& a) {
  const at::Tensor input = tensor(a, 0), weight = tensor(a, 1);
  Sizes shape{input.size(0), weight.size(1) * a[8].toInt()};
  for (int64_t i = 2; i < input.dim(); ++i) {
    const auto at = [&](size_t argument) {
      const Sizes list = sizes(a, argument);
      return list.size() == 1 ? list[0] : list[static_cast<size_t>(i - 2)];
    };
    shape.push_back((input.size(i) - 1) * at(3) - 2 * at(4) + at(5) * (weight.size(i) - 1) + at(7) + 1);
  }
  return {at::empty(shape, input.options(), input.suggest_memory_format())};
}
Tensors convolution_backward(const MetaArguments& a) {
  const c10::List<bool> wanted = a[10].toBoolList();
  const at::Tensor gradient = tensor(a, 0), input = tensor(a, 1), weight = tensor(a, 2);
  return {wanted.get(0) ? at::empty_like(input) : at::Tensor(), wanted.get(1) ? at::empty_like(weight) : at::Tensor(),
          wanted.get(2) ? of({gradient.size(1)}, gradient) : at::Tensor()};
}

Tensors reduced(const MetaArguments& a, bool twice) {
  const at::Tensor self = tensor(a, 0);
  const at::OptionalIntArrayRef all = std::nullopt;
  const Sizes dims = a[1].isNone() ? Sizes() : sizes(a, 1);
  const at::Tensor result = at::sum(self, dims.empty() ? all : at::OptionalIntArrayRef(dims), a[3].toBool());
  return twice ? Tensors{result, at::empty_like(result)} : Tensors{result};
}

Tensors adaptive_pool(const MetaArguments& a) {
  Sizes shape = tensor(a, 0).sizes().vec();
  const Sizes last = sizes(a, 1);
  std::ranges::copy(last, shape.end() - static_cast<std::ptrdiff_t>(last.size()));
  return {at::empty(shape, tensor(a, 0).options(), tensor(a, 0).suggest_memory_format())};
}
Tensors pixel_shuffle(const MetaArguments& a) {
  Sizes shape = tensor(a, 0).sizes().vec();
  const int64_t factor = a[1].toInt();
  const size_t n = shape.size();
  shape[n - 3] /= factor * factor, shape[n - 2] *= factor, shape[n - 1] *= factor;
  return {of(shape, tensor(a, 0))};
}
Tensors reflection_pad2d(const MetaArguments& a) {
  Sizes shape = tensor(a, 0).sizes().vec();
  const Sizes padding = sizes(a, 1);
  shape[shape.size() - 1] += padding[0] + padding[1], shape[shape.size() - 2] += padding[2] + padding[3];
  return {of(shape, tensor(a, 0))};
}
Tensors nll_loss2d(const MetaArguments& a) {
  const at::Tensor self = tensor(a, 0);
  return {a[3].toInt() == 0 ? of(tensor(a, 1).sizes().vec(), self) : of({}, self), of({}, self)};
}

// Returns the shape rule of each operator. The key has the overload name if there is one. For overloads that write to
// an argument, such as "out", the rule returns the shape that this argument gets.
std::unordered_map<std::string, ShapeRule> make_rules() {
  std::unordered_map<std::string, ShapeRule> rules;
  const auto add = [&](const ShapeRule& rule, std::initializer_list<const char*> operators) {
    for (const char* name : operators) rules.emplace(name, rule);
  };
  add(like(0), {"aten::relu", "aten::hardswish", "aten::hardswish_backward", "aten::hardtanh",
                "aten::hardtanh_backward", "aten::mish_backward"});
  add(like(0), {"aten::_prelu_kernel", "aten::log_sigmoid_backward", "aten::native_dropout_backward", "aten::logit",
                "aten::angle"});
  add(like(0), {"aten::flip", "aten::roll", "aten::channel_shuffle"});
  add(like(0),
      {"aten::abs.out", "aten::angle.out", "aten::logical_not.out", "aten::nan_to_num.out", "aten::logit.out"});
  add(like(0), {"aten::hardtanh.out", "aten::hardswish.out"});
  add(like(1), {"aten::glu_backward", "aten::binary_cross_entropy_backward", "aten::_adaptive_avg_pool2d_backward",
                "aten::_adaptive_avg_pool3d_backward", "aten::reflection_pad2d_backward", "aten::nll_loss2d_backward",
                "aten::smooth_l1_loss_backward.grad_input", "aten::huber_loss_backward.out",
                "aten::mse_loss_backward.grad_input"});
  add(like(0, at::kBool), {"aten::isnan"});
  add(pair_like(0), {"aten::log_sigmoid_forward"});
  add(pair_like(1), {"aten::_prelu_kernel_backward"});
  add(both(0, 1), {"aten::rsub.Tensor", "aten::floor_divide", "aten::floor_divide.out", "aten::logical_and.out",
                   "aten::logical_or.out", "aten::logical_xor.out"});
  add(both(1, 2), {"aten::where.self", "aten::where.self_out", "aten::mse_loss_backward"});
  add(scalar, {"aten::max", "aten::min", "aten::median", "aten::prod", "aten::dot", "aten::trace"});
  add([](const MetaArguments& a) { return reduced(a, false); }, {"aten::var.correction", "aten::std.correction"});
  add([](const MetaArguments& a) { return reduced(a, true); },
      {"aten::var_mean.correction", "aten::std_mean.correction"});
  add(dropout, {"aten::native_dropout"});
  add(index_select, {"aten::index_select", "aten::index_select.out"});
  add(embedding_backward, {"aten::embedding_dense_backward"});
  add(layer_norm, {"aten::native_layer_norm"});
  add(layer_norm_backward, {"aten::native_layer_norm_backward"});
  add(batch_norm, {"aten::native_batch_norm"});
  add(batch_norm_backward, {"aten::native_batch_norm_backward"});
  add(group_norm, {"aten::native_group_norm"});
  add(group_norm_backward, {"aten::native_group_norm_backward"});
  add(attention, {"aten::_scaled_dot_product_flash_attention_for_cpu"});
  add(attention_backward, {"aten::_scaled_dot_product_flash_attention_for_cpu_backward"});
  add([](const MetaArguments& a) { return convolution(a, 3, 4, sizes(a, 5)); }, {"aten::mkldnn_convolution"});
  add([](const MetaArguments& a) { return convolution(a, 5, 4, {1}); },
      {"aten::_slow_conv2d_forward", "aten::slow_conv3d_forward"});
  add([](const MetaArguments& a) { return convolution(a, 5, 4, sizes(a, 6)); }, {"aten::slow_conv_dilated2d"});
  add(transposed_convolution, {"aten::_convolution"});
  add(convolution_backward, {"aten::convolution_backward"});
  add(loss(2), {"aten::huber_loss"});
  add([](const MetaArguments& a) { return loss(a, 2); },
      {"aten::mse_loss", "aten::smooth_l1_loss", "aten::soft_margin_loss"});
  add([](const MetaArguments& a) { return loss(a, 3); }, {"aten::binary_cross_entropy"});
  add(nll_loss2d, {"aten::nll_loss2d_forward"});
  add(adaptive_pool, {"aten::_adaptive_avg_pool2d", "aten::_adaptive_avg_pool3d", "aten::adaptive_avg_pool2d.out"});
  add(pixel_shuffle, {"aten::pixel_shuffle"});
  add(reflection_pad2d, {"aten::reflection_pad2d"});
  return rules;
}

}  // namespace

const ShapeRule* shape_rule_of(const std::string& name) {
  static const std::unordered_map<std::string, ShapeRule> rules = make_rules();
  const auto rule = rules.find(name);
  return rule == rules.end() ? nullptr : &rule->second;
}

at::Tensor meta_of(const at::Tensor& tensor) {
  at::Tensor meta = at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  return meta;
}

}  // namespace tessera::internal
