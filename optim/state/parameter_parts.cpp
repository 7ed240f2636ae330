#include <tessera/detail/parameter_parts.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/optim.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <typeindex>
#include <typeinfo>

#include <tessera/host_results.h>
#include "core/layout/shard_mark.h"
#include "core/memory/without_data.h"
#include "optim/state/optimizer_state.h"

namespace tessera::internal {

ParameterParts::ParameterParts(const ModelShards& model) : comm_(model.comm()) {
  at::NoGradGuard no_grad;
  const std::vector<NamedShard> shards = model.named_shards();
  const auto count = static_cast<int64_t>(shards.size());
  const int world = comm_->size();
  const at::Tensor own = at::empty({count, 3}, at::TensorOptions(at::kCPU).dtype(at::kLong));
  auto* numbers = own.mutable_data_ptr<int64_t>();
  for (const NamedShard& shard : shards) {
    *numbers++ = shard.held.begin;
    *numbers++ = shard.held.end;
    *numbers++ = shard.replica;
  }
  const at::Tensor all = gather_to_host(*comm_, own, "the parts of parameters");
  const auto parts = all.accessor<int64_t, 3>();
  for (int64_t i = 0; i < count; ++i) {
    const NamedShard& shard = shards[i];
    are_cut_ = are_cut_ || shard.replica_count != world;
    Known& known = known_[shard.tensor.unsafeGetTensorImpl()];
    known.shard = shard;
    for (int rank = 0; rank < world; ++rank)
      known.by_rank.push_back({{parts[rank][i][0], parts[rank][i][1]}, static_cast<int>(parts[rank][i][2])});
  }
  if (!is_without_data()) return;
  for (int rank = 0; rank < world; ++rank) {  // a dry run exchanges no data
    const std::vector<ModelShards::HeldPart> held = model.held_by(rank);
    for (int64_t i = 0; i < count; ++i)
      known_[shards[i].tensor.unsafeGetTensorImpl()].by_rank[rank] = {held[i].range, held[i].replica};
  }
}

void ParameterParts::require_known(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                                   const char* optimizer) const {
  if (comm_) {
    std::vector<std::string> lines;
    for (const auto& group : groups) {
      lines.push_back("a group of " + text_of(group.options()));
      for (const at::Tensor& parameter : group.params()) {
        const auto found = known_.find(parameter.unsafeGetTensorImpl());
        lines.push_back(found == known_.end() ? "none of the wrapper's parameters()"
                                              : "parameter '" + found->second.shard.fqn + "'");
      }
    }
    require_agreement(*comm_, std::string("the groups of ") + optimizer, lines);
  }
  for (const auto& group : groups) {
    for (const at::Tensor& parameter : group.params()) {
      if (comm_ ? known_.contains(parameter.unsafeGetTensorImpl()) : !is_shard(parameter)) continue;
      throw std::invalid_argument(
          comm_ ? c10::str(optimizer, " on rank ", comm_->rank(), ": a parameter of shape ", parameter.sizes(),
                           " is none of the wrapper's parameters()")
                : c10::str(optimizer, ": a parameter of shape ", parameter.sizes(),
                           " is a shard of FullyShardedDataParallel: give the wrapper as the first argument"));
    }
  }
}

// Throws std::invalid_argument for a parameter that was added to a group after require_known().
const ParameterParts::Known& ParameterParts::known(const at::Tensor& parameter) const {
  const auto found = known_.find(parameter.unsafeGetTensorImpl());
  if (found == known_.end())
    throw std::invalid_argument(c10::str("a parameter of shape ", parameter.sizes(), " on rank ", comm_->rank(),
                                         " is none of the wrapper's parameters()"));
  return found->second;
}

NamedShard ParameterParts::of(const at::Tensor& parameter) const {
  if (comm_) {
    NamedShard shard = known(parameter).shard;
    if (parameter.sizes() == at::IntArrayRef(shard.sizes)) shard.strides = parameter.strides().vec();
    return shard;
  }
  return {"", {}, parameter.sizes().vec(), parameter.strides().vec(), {0, parameter.numel()}, parameter};
}

const std::vector<ParameterParts::Held>& ParameterParts::by_rank(const at::Tensor& parameter) const {
  static const std::vector<Held> none;
  return comm_ ? known(parameter).by_rank : none;
}

std::vector<bool> ParameterParts::have_gradients(const std::vector<at::Tensor>& parameters) const {
  const auto count = static_cast<int64_t>(parameters.size());
  at::Tensor have = at::zeros({count}, at::TensorOptions(at::kCPU).dtype(at::kByte));
  auto* flags = have.mutable_data_ptr<uint8_t>();
  for (int64_t i = 0; i < count; ++i) {
    // If this rank has no part of a trained parameter, a dry run assumes that other ranks have its gradient.
    const bool is_elsewhere =
        is_without_data() && are_cut_ && parameters[i].requires_grad() && of(parameters[i]).held.numel() == 0;
    flags[i] = parameters[i].grad().defined() || is_elsewhere ? 1 : 0;
  }
  if (are_cut_ && count > 0) {
    have = reduce_to_host(*comm_, have, ReduceOp::kMax, "which parameters have gradients");
    flags = have.mutable_data_ptr<uint8_t>();
  }
  return std::vector<bool>(flags, flags + count);
}

void restore_options(std::vector<torch::optim::OptimizerParamGroup>& groups, size_t first,
                     const std::vector<torch::optim::OptimizerParamGroup>& added) {
  using namespace torch::optim;
  const std::array merged{std::type_index(typeid(AdagradOptions)), std::type_index(typeid(AdamOptions)),
                          std::type_index(typeid(AdamWOptions)),   std::type_index(typeid(LBFGSOptions)),
                          std::type_index(typeid(RMSpropOptions)), std::type_index(typeid(SGDOptions))};
  for (size_t i = 0; i < added.size(); ++i) {
    if (!added[i].has_options()) continue;
    const OptimizerOptions &given = added[i].options(), &now = groups[first + i].options();
    const std::type_index type = typeid(given);
    if (type == typeid(now) && std::ranges::find(merged, type) != merged.end()) continue;
    groups[first + i].set_options(given.clone());
  }
}

void list_once(std::vector<torch::optim::OptimizerParamGroup>& groups, const char* optimizer) {
  std::unordered_map<const c10::TensorImpl*, size_t> group_of;
  for (size_t group = 0; group < groups.size(); ++group)
    std::erase_if(groups[group].params(), [&](const at::Tensor& parameter) {
      const auto [known, is_new] = group_of.try_emplace(parameter.unsafeGetTensorImpl(), group);
      if (known->second != group)
        throw std::invalid_argument(c10::str(optimizer, ": a parameter of shape ", parameter.sizes(), " is in group ",
                                             known->second, " and in group ", group, ", expected one group"));
      return !is_new;
    });
}

at::Tensor in_strides(const at::Tensor& tensor, at::IntArrayRef strides) {
  if (tensor.strides() == strides) return tensor;
  return at::empty_strided(tensor.sizes(), strides, tensor.options().requires_grad(false)).copy_(tensor);
}

at::Tensor in_memory_order(const at::Tensor& dense) {
  return dense.dim() == 1 && dense.is_contiguous() ? dense : dense.as_strided({dense.numel()}, {1});
}

}  // namespace tessera::internal
