#include <unordered_map>

#include "plan/record/shape_rules.h"

namespace tessera::internal {
namespace {

using Arguments = MetaArguments;
using Tensors = std::vector<at::Tensor>;

at::Tensor at_index(const Arguments& arguments, size_t index) { return arguments[index].toTensor(); }

// Returns the FLOP of a matrix product, or batch of products, of two arguments. A multiply-add counts as 2 FLOP.
template <size_t first, size_t second>
int64_t product_flop(const Arguments& a, const Tensors&) {
  return 2 * at_index(a, first).numel() * at_index(a, second).size(-1);
}

// Returns the FLOP of a convolution: 2 for each element of `rows` and each weight in weight[0]. `rows` is the output,
// or the input of a transposed convolution.
int64_t flop_of_rows(const at::Tensor& rows, const at::Tensor& weight) {
  return 2 * rows.numel() * (weight.numel() / std::max<int64_t>(weight.size(0), 1));
}
int64_t convolution_flop(const Arguments& a, const Tensors& made) { return flop_of_rows(made.at(0), at_index(a, 1)); }
int64_t transposed_convolution_flop(const Arguments& a, const Tensors&) {
  return flop_of_rows(at_index(a, 0), at_index(a, 1));
}
int64_t convolution_backward_flop(const Arguments& a, const Tensors&) {
  const auto wanted = a[10].toBoolList();
  const bool is_transposed = a[7].toBool();
  const int64_t each = flop_of_rows(at_index(a, is_transposed ? 1 : 0), at_index(a, 2));
  return (wanted.get(0) ? each : 0) + (wanted.get(1) ? each : 0);
}

// Returns the FLOP of attention's two products. The arguments from `first` on are query, key and value.
int64_t flop_of_two_products(const Arguments& a, size_t first) {
  const at::Tensor query = at_index(a, first), key = at_index(a, first + 1), value = at_index(a, first + 2);
  return 2 * query.numel() * key.size(2) +
         2 * query.size(0) * query.size(1) * query.size(2) * key.size(2) * value.size(3);
}
int64_t attention_flop(const Arguments& a, const Tensors&) { return flop_of_two_products(a, 0); }
// Backward computes five products: the scores again, and two for each product of forward.
int64_t attention_backward_flop(const Arguments& a, const Tensors&) { return flop_of_two_products(a, 1) * 5 / 2; }

using FlopRule = int64_t (*)(const Arguments&, const Tensors&);
const std::unordered_map<std::string, FlopRule> kFlopRules = {
    {"aten::mm", product_flop<0, 1>},
    {"aten::bmm", product_flop<0, 1>},
    {"aten::addmm", product_flop<1, 2>},
    {"aten::baddbmm", product_flop<1, 2>},
    {"aten::mkldnn_convolution", convolution_flop},
    {"aten::_slow_conv2d_forward", convolution_flop},
    {"aten::slow_conv3d_forward", convolution_flop},
    {"aten::slow_conv_dilated2d", convolution_flop},
    {"aten::_convolution", transposed_convolution_flop},  // recorded only for a transposed convolution
    {"aten::convolution_backward", convolution_backward_flop},
    {"aten::_scaled_dot_product_flash_attention_for_cpu", attention_flop},
    {"aten::_scaled_dot_product_flash_attention_for_cpu_backward", attention_backward_flop},
};

}  // namespace

bool has_flop(const std::string& name) { return kFlopRules.contains(name); }

int64_t flop_of(const std::string& name, const Arguments& arguments, const Tensors& results) {
  const auto rule = kFlopRules.find(name);
  return rule == kFlopRules.end() ? 0 : rule->second(arguments, results);
}

}  // namespace tessera::internal
