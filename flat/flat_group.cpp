#include "tessera/flat/flat_group.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <stdexcept>

#include "tessera/flat/shard_mark.h"

namespace tessera {
namespace {

// What at::empty aligns to; a gathered parameter should not be worse off.
constexpr int64_t kAlignmentBytes = 64;

std::vector<int64_t> row_major(at::IntArrayRef sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (auto dim = static_cast<int64_t>(sizes.size()) - 2; dim >= 0; --dim)
    strides[dim] = strides[dim + 1] * std::max<int64_t>(sizes[dim + 1], 1);
  return strides;
}

std::vector<ParameterGeometry> geometries_of(const std::vector<PlannedParameter>& parameters) {
  std::vector<ParameterGeometry> geometries;
  for (const PlannedParameter& parameter : parameters) {
    const at::Tensor& tensor = parameter.tensor;
    const bool dense = tensor.is_non_overlapping_and_dense();
    geometries.push_back({tensor.sizes().vec(), dense ? tensor.strides().vec() : row_major(tensor.sizes())});
  }
  return geometries;
}

std::vector<int64_t> numels_of(const std::vector<PlannedParameter>& parameters) {
  std::vector<int64_t> numels;
  for (const PlannedParameter& parameter : parameters) numels.push_back(parameter.tensor.numel());
  return numels;
}

}  // namespace

FlatGroup::FlatGroup(std::string name, std::vector<PlannedParameter> parameters, Communicator& comm, bool sync)
    : name_(std::move(name)),
      parameters_(std::move(parameters)),
      geometries_(geometries_of(parameters_)),
      dtype_(parameters_.at(0).tensor.scalar_type()),
      layout_(numels_of(parameters_), comm.size(), kAlignmentBytes / static_cast<int64_t>(c10::elementSize(dtype_))),
      rank_(comm.rank()) {
  at::NoGradGuard no_grad;
  make_shard(comm, sync);
  make_parameter_shards();
}

void FlatGroup::make_shard(Communicator& comm, bool sync) {
  const auto options = at::TensorOptions().dtype(dtype_).device(comm.device());
  at::Tensor full;
  if (!sync || comm.rank() == 0) {
    full = at::zeros({layout_.full_numel()}, options);
    for (size_t i = 0; i < parameters_.size(); ++i) view_in(full, i).copy_(parameters_[i].tensor);
  }
  if (!sync) {
    shard_ = full.narrow(0, layout_.shard(comm.rank()).begin, layout_.shard_numel()).clone();
    return;
  }
  shard_ = at::empty({layout_.shard_numel()}, options);
  comm.scatter(shard_, full, 0, {}, name_).wait();
}

void FlatGroup::make_parameter_shards() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    parameter_shards_.push_back(part_of(shard_, i).detach().set_requires_grad(parameters_[i].tensor.requires_grad()));
    mark_as_shard(parameter_shards_.back());
  }
}

at::Tensor FlatGroup::part_of(const at::Tensor& shard, size_t parameter) const {
  const auto index = static_cast<int64_t>(parameter);
  return shard.narrow(0, layout_.offset_in_shard(index, rank_), layout_.owned(index, rank_).numel());
}

at::Tensor FlatGroup::view_in(const at::Tensor& full, size_t parameter) const {
  const ParameterGeometry& geometry = geometries_[parameter];
  return full.as_strided(geometry.sizes, geometry.strides,
                         full.storage_offset() + layout_.offset(static_cast<int64_t>(parameter)));
}

void FlatGroup::clear_padding(const at::Tensor& full) const {
  int64_t end = 0;
  auto clear_to = [&](int64_t begin_of_next) {
    if (begin_of_next > end) full.narrow(0, end, begin_of_next - end).zero_();
  };
  for (int64_t i = 0; i < layout_.parameter_count(); ++i) {
    clear_to(layout_.offset(i));
    end = layout_.offset(i) + layout_.numel(i);
  }
  clear_to(layout_.full_numel());
}

Pending FlatGroup::gather(const at::Tensor& full, Communicator& comm) const {
  return comm.all_gather(full, shard_, {}, name_);
}

at::Tensor FlatGroup::gradient_destination() {
  const bool any_defined = std::any_of(parameter_shards_.begin(), parameter_shards_.end(),
                                       [](const at::Tensor& shard) { return shard.grad().defined(); });
  if (any_defined) return at::empty_like(shard_);
  if (!grad_.defined() || !grads_are_ours_alone()) {
    grad_ = at::empty_like(shard_);
    grad_views_.clear();
    for (size_t i = 0; i < parameters_.size(); ++i) grad_views_.push_back(part_of(grad_, i).detach());  // zero_grad() refuses to detach views
  }
  return grad_;
}

// Whether nobody outside kept a gradient of the last step, so that the buffer may be written again.
bool FlatGroup::grads_are_ours_alone() const {
  for (const at::Tensor& view : grad_views_)
    if (view.use_count() > 1) return false;
  return grad_.storage().use_count() == grad_views_.size() + 1;
}

void FlatGroup::accept_gradient(const at::Tensor& reduced, const std::vector<bool>& used) {
  const bool in_place = reduced.is_same(grad_);
  if (!in_place && std::all_of(used.begin(), used.end(), [](bool is_used) { return is_used; }) &&
      whole_gradient().defined()) {
    grad_.add_(reduced);
    return;
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!used[i]) continue;
    at::Tensor& grad = parameter_shards_[i].mutable_grad();
    if (in_place) {
      grad = grad_views_[i];
    } else if (grad.defined()) {
      grad.add_(part_of(reduced, i));
    } else {
      grad = part_of(reduced, i).clone();
    }
  }
}

at::Tensor FlatGroup::whole_gradient() const {
  if (!grad_.defined()) return {};
  for (size_t i = 0; i < parameters_.size(); ++i)
    if (!parameter_shards_[i].grad().is_same(grad_views_[i])) return {};
  return grad_;
}

void FlatGroup::drop_unused_gradient() {
  for (const at::Tensor& shard : parameter_shards_)
    if (shard.grad().defined()) return;
  grad_views_.clear();
  grad_.reset();
}

std::vector<std::vector<PlannedParameter>> split_into_groups(const PlannedUnit& unit) {
  std::vector<std::vector<PlannedParameter>> groups;
  for (const PlannedParameter& parameter : unit.parameters) {
    auto alike = [&](const std::vector<PlannedParameter>& group) {
      return group[0].tensor.scalar_type() == parameter.tensor.scalar_type() &&
             group[0].tensor.requires_grad() == parameter.tensor.requires_grad();
    };
    auto group = std::find_if(groups.begin(), groups.end(), alike);
    if (group == groups.end()) group = groups.insert(groups.end(), std::vector<PlannedParameter>());
    group->push_back(parameter);
  }
  return groups;
}

}  // namespace tessera
