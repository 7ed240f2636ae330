// Parts of paging outside the fallback: lists of special operators, a probe of the dispatch key, and a check that
// refuses to pickle empty views.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/jit/serialization/pickler_helper.h>

#include <algorithm>
#include <stdexcept>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "core/paging/page_views.h"

namespace tessera::internal {
namespace {

// Operators that need no memory of a page. Of those that return views, lists only detach and alias: the others check
// the bounds of the storage, which must then be filled. The operators that _backward and set_data call reach the
// fallback.
using Names = std::unordered_set<std::string_view>;
const Names kMetadataOnly = {"aten::detach",
                             "aten::detach_",
                             "aten::alias",
                             "aten::requires_grad_",
                             "aten::retain_grad",
                             "aten::set_data",
                             "aten::_backward",
                             "aten::is_leaf",
                             "aten::output_nr",
                             "aten::_version",
                             "aten::data",
                             "aten::is_same_size",
                             "aten::_has_compatible_shallow_copy_type"};

// Called by the pickler for each tensor. Throws for a view of an empty page, because torch::save() would omit the data.
void refuse_to_pickle(const at::Tensor& tensor, std::unordered_map<std::string, bool>&) {
  const Page* page = page_of(tensor);
  if (page == nullptr || tensor.storage().nbytes() > 0 || tensor.numel() == 0) return;
  throw std::logic_error("torch::save of a parameter of " + page->name() +
                         ", which is sharded: its data are not here. Save inside summon_full_params(), or with "
                         "save_full() or save_checkpoint()");
}

void watch_pickling() {
  auto& watchers = torch::jit::GetBackendMetaSerialization();
  for (const at::DeviceType device : {at::kCPU, at::kCUDA}) {
    auto& watcher = watchers[static_cast<size_t>(device)];
    if (!watcher) watcher.emplace(&refuse_to_pickle, [](const at::Tensor&, std::unordered_map<std::string, bool>&) {});
  }
}

}  // namespace

bool is_metadata_only(const c10::FunctionSchema& schema) {
  // Of the listed operators, only data() returns a tensor without alias information. So most operators need no look-up.
  const auto& returns = schema.returns();
  const bool makes_tensor =
      !returns.empty() && returns[0].alias_info() == nullptr && returns[0].type()->kind() == c10::TypeKind::TensorType;
  return (!makes_tensor || schema.name() == "aten::data") && kMetadataOnly.contains(schema.name());
}

bool returns_views(const c10::FunctionSchema& schema) {
  return std::ranges::any_of(schema.returns(), [](const auto& result) { return result.alias_info() != nullptr; });
}

bool sets_another_dtype(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  static const c10::OperatorName set_to_tensor("aten::set_", "source_Tensor");
  if (op.operator_name() != set_to_tensor) return false;
  const at::Tensor& target = stack.end()[-2].toTensor();
  return is_paged(target) && target.scalar_type() != stack.back().toTensor().scalar_type();
}

void require_residency() {
  struct Probe : Pager {
    bool used = false;
    std::shared_ptr<void> use(const std::vector<Page*>&) override { return used = true, nullptr; }
    [[noreturn]] bool refuse(const Page& page, const at::Tensor&, const std::string&) override {
      throw std::logic_error(page.name());
    }
  };
  static const bool works = [] {
    watch_pickling();
    Probe probe;
    Page page(&probe, 0, "a probe", at::kCPU);
    page.attach(at::zeros({1}, at::kCPU));
    at::AutoDispatchBelowADInplaceOrView quiet;
    at::neg(page.view(at::kFloat, {1}, {1}, 0));
    return probe.used;
  }();
  if (!works)
    throw std::runtime_error(
        "Tessera's fallback for the dispatch key TESTING_ONLY_GenericWrapper is not called: another library in this "
        "process uses the key, or this libtorch dropped it");
}

}  // namespace tessera::internal
