#include "tessera/flat/flat_group.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <stdexcept>

namespace tessera {
namespace {

std::vector<ParameterGeometry> geometries_of(const std::vector<PlannedParameter>& parameters) {
  std::vector<ParameterGeometry> geometries;
  for (const PlannedParameter& parameter : parameters) geometries.push_back(geometry_of(parameter.tensor));
  return geometries;
}

std::vector<int64_t> numels_of(const std::vector<PlannedParameter>& parameters) {
  std::vector<int64_t> numels;
  for (const PlannedParameter& parameter : parameters) numels.push_back(parameter.tensor.numel());
  return numels;
}

// What `chosen` comes to for these parameters, whose own dtype it leaves alone where a cast makes no sense.
at::ScalarType cast_of(const PlannedParameter& parameter, std::optional<at::ScalarType> chosen) {
  const at::ScalarType own = parameter.tensor.scalar_type();
  return parameter.full_precision || !at::isFloatingType(own) ? own : chosen.value_or(own);
}

}  // namespace

FlatGroup::FlatGroup(std::string name, std::vector<PlannedParameter> parameters, Communicator& comm, bool sync,
                     const FlatGroupOptions& options)
    : name_(std::move(name)),
      parameters_(std::move(parameters)),
      geometries_(geometries_of(parameters_)),
      dtype_(parameters_.at(0).tensor.scalar_type()),
      gather_dtype_(cast_of(parameters_[0], options.gather_dtype)),
      reduce_dtype_(cast_of(parameters_[0], options.reduce_dtype ? options.reduce_dtype : options.gather_dtype)),
      layout_(FlatLayout::evenly(numels_of(parameters_), comm.size(),
                                 FlatLayout::alignment_numel(std::min(bytes(1, dtype_), bytes(1, gather_dtype_))))),
      rank_(comm.rank()),
      device_(comm.device()),
      shard_memory_(options.shard_memory),
      grad_memory_(options.grad_memory),
      narrow_memory_(options.narrow_memory ? options.narrow_memory : options.shard_memory) {
  at::NoGradGuard no_grad;
  make_shard(comm, sync, options);
  for (PlannedParameter& parameter : parameters_) parameter.values.reset();
  make_parameter_shards();
}

void FlatGroup::make_shard(Communicator& comm, bool sync, const FlatGroupOptions& chosen) {
  Communicator* replicas = chosen.replicas;
  Pager* pager = chosen.pager;
  const int page_id = chosen.page_id;
  const auto options = at::TensorOptions().dtype(dtype_).device(comm.device());
  const bool first_copy = replicas == nullptr || replicas->rank() == 0;
  at::Tensor full;
  if (!sync || (comm.rank() == 0 && first_copy)) {
    full = at::zeros({layout_.full_numel()}, options);
    for (size_t i = 0; i < parameters_.size(); ++i)
      view_in(full, i).copy_(parameters_[i].values.defined() ? parameters_[i].values : parameters_[i].tensor);
  }
  auto settle = [&](const at::Tensor& values) {
    shard_ = shard_memory_ ? shard_memory_(layout_.shard_numel(), dtype_) : values;
    if (shard_memory_) shard_.copy_(values);
    if (pager == nullptr || is_paged(shard_)) return;
    shard_page_ = std::make_unique<Page>(pager, page_id, "the shard of " + name_, shard_.device());
    shard_page_->set_writable(true);
    shard_page_->give_away(shard_);
    shard_ = shard_page_->view(dtype_, {layout_.shard_numel()}, {1}, 0);
  };
  if (!sync) {
    const at::Tensor own = full.narrow(0, layout_.shard(comm.rank()).begin, layout_.shard_numel());
    return settle(shard_memory_ ? own : own.clone());
  }
  const at::Tensor own = at::empty({layout_.shard_numel()}, options);
  if (first_copy) comm.scatter(own, full, 0, {}, name_).wait();
  if (replicas != nullptr) replicas->broadcast(own, 0, name_).wait();
  settle(own);
}

void FlatGroup::make_parameter_shards() {
  if (shard_memory_ && is_cast()) {
    narrow_ = std::make_shared<NarrowCopy>(NarrowCopy{narrow_memory_(layout_.shard_numel(), gather_dtype_)});
    narrow_->values.copy_(shard_);
    narrow_->writes = shard_page().writes();
  }
  // Only fp32 shards have optimizers that write the copy, which holds 16 bit then.
  const bool is_written = narrow_ && dtype_ == at::kFloat && c10::elementSize(gather_dtype_) == 2;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    parameter_shards_.push_back(part_of(shard_, i).detach().set_requires_grad(parameters_[i].tensor.requires_grad()));
    mark_as_shard(parameter_shards_.back(),
                  is_written ? NarrowPart{part_of(narrow_->values, i), narrow_} : NarrowPart{});
  }
  std::vector<GradientBuffer::Member> members;
  for (size_t i = 0; i < parameters_.size(); ++i)
    members.push_back({parameter_shards_[i],
                       {{parameter_shards_[i].numel()}, {1}},
                       layout_.offset_in_shard(static_cast<int64_t>(i), rank_)});
  // The shard may be in host memory and its gradient not, or the other way round.
  auto memory = [device = device_, host = grad_memory_](int64_t numel, at::ScalarType dtype) {
    return host ? host(numel, dtype) : at::empty({numel}, at::TensorOptions().dtype(dtype).device(device));
  };
  gradient_ = std::make_unique<GradientBuffer>(std::move(members), layout_.shard_numel(), dtype_, std::move(memory));
}

const at::Tensor& FlatGroup::link_source() {
  if (!narrow_) return shard_;
  if (const uint32_t writes = shard_page().writes(); narrow_->writes != writes) {
    narrow_->values.copy_(shard_);
    narrow_->writes = writes;
  }
  return narrow_->values;
}

at::Tensor FlatGroup::part_of(const at::Tensor& shard, size_t parameter) const {
  const auto index = static_cast<int64_t>(parameter);
  return shard.narrow(0, layout_.offset_in_shard(index, rank_), layout_.owned(index, rank_).numel());
}

Pending FlatGroup::gather(const at::Tensor& full, Communicator& comm) const {
  if (full.scalar_type() == dtype_ && !shard_memory_) return comm.all_gather(full, shard_, {}, name_);
  const at::Tensor own = full.narrow(0, layout_.shard(rank_).begin, layout_.shard_numel());
  own.copy_(shard_);
  return comm.all_gather(full, own, {}, name_);
}

std::vector<std::vector<PlannedParameter>> split_into_groups(const PlannedUnit& unit) {
  std::vector<std::vector<PlannedParameter>> groups;
  for (const PlannedParameter& parameter : unit.parameters) {
    auto alike = [&](const std::vector<PlannedParameter>& group) {
      return group[0].tensor.scalar_type() == parameter.tensor.scalar_type() &&
             group[0].tensor.requires_grad() == parameter.tensor.requires_grad() &&
             group[0].full_precision == parameter.full_precision;
    };
    auto group = std::find_if(groups.begin(), groups.end(), alike);
    if (group == groups.end()) group = groups.insert(groups.end(), std::vector<PlannedParameter>());
    group->push_back(parameter);
  }
  return groups;
}

}  // namespace tessera
