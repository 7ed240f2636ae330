#include <unordered_map>

#include "plan/record/shape_rules.h"

namespace tessera::internal {
namespace {

using Arguments = MetaArguments;
using Tensors = std::vector<at::Tensor>;

at::Tensor at_index(const Arguments& arguments, size_t index) { return arguments[index].toTensor(); }

// Returns the FLOP of a matrix product, or of a batch of products. A multiply-add counts as 2 FLOP.
int64_t product(const at::Tensor& a, const at::Tensor& b) { return 2 * a.numel() * b.size(-1); }

// Counts 2 FLOP for each element of `rows` and each weight of a row. `rows` is the output, or the input if transposed.
int64_t flop_of_convolution(const at::Tensor& rows, const at::Tensor& weight) {
  return 2 * rows.numel() * (weight.numel() / std::max<int64_t>(weight.size(0), 1));
}

int64_t flop_of_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  return 2 * query.numel() * key.size(2) +
         2 * query.size(0) * query.size(1) * query.size(2) * key.size(2) * value.size(3);
}

int64_t flop_of_convolution_backward(const Arguments& a) {
  const auto wanted = a[10].toBoolList();
  const bool is_transposed = a[7].toBool();
  const int64_t each = flop_of_convolution(at_index(a, is_transposed ? 1 : 0), at_index(a, 2));
  return (wanted.get(0) ? each : 0) + (wanted.get(1) ? each : 0);
}

using FlopRule = int64_t (*)(const Arguments&, const Tensors&);
const std::unordered_map<std::string, FlopRule> kFlopRules = {
    {"aten::mm", [](const Arguments& a, const Tensors&) { return product(at_index(a, 0), at_index(a, 1)); }},
    {"aten::bmm", [](const Arguments& a, const Tensors&) { return product(at_index(a, 0), at_index(a, 1)); }},
    {"aten::addmm", [](const Arguments& a, const Tensors&) { return product(at_index(a, 1), at_index(a, 2)); }},
    {"aten::baddbmm", [](const Arguments& a, const Tensors&) { return product(at_index(a, 1), at_index(a, 2)); }},
    {"aten::mkldnn_convolution",
     [](const Arguments& a, const Tensors& made) { return flop_of_convolution(made.at(0), at_index(a, 1)); }},
    {"aten::_slow_conv2d_forward",
     [](const Arguments& a, const Tensors& made) { return flop_of_convolution(made.at(0), at_index(a, 1)); }},
    {"aten::slow_conv3d_forward",
     [](const Arguments& a, const Tensors& made) { return flop_of_convolution(made.at(0), at_index(a, 1)); }},
    {"aten::slow_conv_dilated2d",
     [](const Arguments& a, const Tensors& made) { return flop_of_convolution(made.at(0), at_index(a, 1)); }},
    {"aten::_convolution",  // recorded only for a transposed convolution
     [](const Arguments& a, const Tensors&) { return flop_of_convolution(at_index(a, 0), at_index(a, 1)); }},
    {"aten::convolution_backward", [](const Arguments& a, const Tensors&) { return flop_of_convolution_backward(a); }},
    {"aten::_scaled_dot_product_flash_attention_for_cpu",
     [](const Arguments& a, const Tensors&) {
       return flop_of_attention(at_index(a, 0), at_index(a, 1), at_index(a, 2));
     }},
    // Forward computes two products. Backward computes five: the scores again, and two for each product of forward.
    {"aten::_scaled_dot_product_flash_attention_for_cpu_backward",
     [](const Arguments& a, const Tensors&) {
       return flop_of_attention(at_index(a, 1), at_index(a, 2), at_index(a, 3)) * 5 / 2;
     }},
};

}  // namespace

bool has_flop(const std::string& name) { return kFlopRules.contains(name); }

int64_t flop_of(const std::string& name, const Arguments& arguments, const Tensors& results) {
  const auto rule = kFlopRules.find(name);
  return rule == kFlopRules.end() ? 0 : rule->second(arguments, results);
}

}  // namespace tessera::internal
