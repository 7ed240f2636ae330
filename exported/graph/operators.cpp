#include "exported/graph/operators.h"

#include <algorithm>
#include <string_view>

#include <tessera/errors.h>

namespace tessera::internal {
namespace {

constexpr std::string_view kPrefix = "torch.ops.";

// Returns whether to refuse an ATen operator. from_file maps any file; most others do not check sizes or indices.
bool is_refused(std::string_view name) {
  static constexpr std::string_view kNames[] = {"from_file",     "_print",      "_reshape_alias",
                                                "_dimI",         "_dimV",       "_coalesced_",
                                                "record_stream", "_dim_arange", "embedding_dense_backward"};
  static constexpr std::string_view kPrefixes[] = {
      "_nested_", "_test_", "_use_cudnn_", "_cudnn_", "_mkldnn_", "_symm_", "_sparse_coo_tensor_with_dims"};
  return std::ranges::find(kNames, name) != std::end(kNames) || name.ends_with("_unsafe") ||
         std::ranges::any_of(kPrefixes, [&](std::string_view prefix) { return name.starts_with(prefix); });
}

}  // namespace

c10::OperatorHandle find_operator(const std::string& target, const std::vector<std::string>& namespaces) {
  if (!target.starts_with(kPrefix)) throw ExportedError("is not an operator of torch.ops");
  const std::string path = target.substr(kPrefix.size());
  const size_t first = path.find('.'), last = path.rfind('.');
  if (first == std::string::npos || first == last) throw ExportedError("is not an operator of torch.ops");
  const std::string space = path.substr(0, first), name = path.substr(first + 1, last - first - 1);
  std::string overload = path.substr(last + 1);
  if (overload == "default") overload.clear();
  if (space != "aten" && std::ranges::find(namespaces, space) == namespaces.end())
    throw ExportedError("is of the namespace '" + space +
                        "', which the archive may not use: ExportedOptions::operator_namespaces allows it, in a "
                        "program that has its operators; or export with an implementation that does without it");
  if (space == "aten" && is_refused(name)) throw ExportedError("is an operator that an archive may not call");
  auto op = c10::Dispatcher::singleton().findSchema({space + "::" + name, overload});
  if (!op) throw ExportedError("is not in this libtorch, or not in a library of this program");
  return *op;
}

std::optional<TrainingArgument> training_argument(const c10::FunctionSchema& schema) {
  static constexpr std::string_view kFlags[] = {"aten::dropout",
                                                "aten::dropout_",
                                                "aten::feature_dropout",
                                                "aten::feature_dropout_",
                                                "aten::alpha_dropout",
                                                "aten::alpha_dropout_",
                                                "aten::feature_alpha_dropout",
                                                "aten::feature_alpha_dropout_",
                                                "aten::native_dropout",
                                                "aten::batch_norm",
                                                "aten::native_batch_norm",
                                                "aten::cudnn_batch_norm",
                                                "aten::miopen_batch_norm",
                                                "aten::_batch_norm_impl_index",
                                                "aten::_native_batch_norm_legit",
                                                "aten::_native_batch_norm_legit_functional",
                                                "aten::instance_norm",
                                                "aten::rrelu",
                                                "aten::rrelu_",
                                                "aten::rrelu_with_noise",
                                                "aten::rrelu_with_noise_",
                                                "aten::rrelu_with_noise_functional",
                                                "aten::lstm",
                                                "aten::gru",
                                                "aten::rnn_tanh",
                                                "aten::rnn_relu"};
  const std::string& name = schema.name();
  if (std::ranges::find(kFlags, name) != std::end(kFlags)) {
    for (const char* argument : {"train", "training", "use_input_stats"})
      if (const auto index = schema.argumentIndexWithName(argument)) return TrainingArgument{size_t(*index), false};
  }
  if (name.find("scaled_dot_product") != std::string::npos)
    if (const auto index = schema.argumentIndexWithName("dropout_p")) return TrainingArgument{size_t(*index), true};
  return std::nullopt;
}

bool evaluates_for_good(const c10::FunctionSchema& schema) {
  return schema.name() == "aten::_native_batch_norm_legit_no_training" ||
         schema.name() == "aten::_batch_norm_no_update";
}

}  // namespace tessera::internal
