#include "exported/graph/operators.h"

#include <algorithm>
#include <string_view>

#include <tessera/errors.h>

namespace tessera::internal {
namespace {

constexpr std::string_view kPrefix = "torch.ops.", kAten = "aten::";

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
  // Without the suffixes of functional and in-place variants.
  static constexpr std::string_view kFlags[] = {
      "dropout",       "native_dropout",          "alpha_dropout", "feature_dropout",
      "gru",           "feature_alpha_dropout",   "lstm",          "rrelu_with_noise",
      "rrelu",         "native_batch_norm",       "rnn_tanh",      "cudnn_batch_norm",
      "rnn_relu",      "miopen_batch_norm",       "batch_norm",    "_batch_norm_impl_index",
      "instance_norm", "_native_batch_norm_legit"};
  std::string_view name = schema.name();
  if (name.starts_with(kAten)) name.remove_prefix(kAten.size());
  for (const std::string_view suffix : {"_functional", "_"})
    if (name.ends_with(suffix)) name.remove_suffix(suffix.size());
  if (std::ranges::find(kFlags, name) != std::end(kFlags)) {
    for (const char* argument : {"train", "training", "use_input_stats"})
      if (const auto index = schema.argumentIndexWithName(argument)) return TrainingArgument{size_t(*index), false};
  }
  if (name.find("scaled_dot_product") != std::string_view::npos)
    if (const auto index = schema.argumentIndexWithName("dropout_p")) return TrainingArgument{size_t(*index), true};
  return std::nullopt;
}

bool evaluates_for_good(const c10::FunctionSchema& schema) {
  return schema.name() == "aten::_native_batch_norm_legit_no_training" ||
         schema.name() == "aten::_batch_norm_no_update";
}

}  // namespace tessera::internal
