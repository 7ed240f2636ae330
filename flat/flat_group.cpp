#include "tessera/flat/flat_group.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <stdexcept>

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
      layout_(numels_of(parameters_), comm.size(),
              kAlignmentBytes / std::min(bytes(1, dtype_), bytes(1, gather_dtype_))),
      rank_(comm.rank()),
      device_(comm.device()),
      shard_memory_(options.shard_memory),
      grad_memory_(options.grad_memory),
      narrow_memory_(options.narrow_memory ? options.narrow_memory : options.shard_memory) {
  at::NoGradGuard no_grad;
  make_shard(comm, sync, options.replicas);
  for (PlannedParameter& parameter : parameters_) parameter.values.reset();
  make_parameter_shards();
}

void FlatGroup::make_shard(Communicator& comm, bool sync, Communicator* replicas) {
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
    narrow_->version = shard_._version();
  }
  // Only fp32 shards have optimizers that write the copy, which holds 16 bit then.
  const bool is_written = narrow_ && dtype_ == at::kFloat && c10::elementSize(gather_dtype_) == 2;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    parameter_shards_.push_back(part_of(shard_, i).detach().set_requires_grad(parameters_[i].tensor.requires_grad()));
    mark_as_shard(parameter_shards_.back(),
                  is_written ? NarrowPart{part_of(narrow_->values, i), narrow_} : NarrowPart{});
  }
}

const at::Tensor& FlatGroup::link_source() {
  if (!narrow_) return shard_;
  if (narrow_->version != shard_._version()) {
    narrow_->values.copy_(shard_);
    narrow_->version = shard_._version();
  }
  return narrow_->values;
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
  if (full.scalar_type() == dtype_ && !shard_memory_) return comm.all_gather(full, shard_, {}, name_);
  const at::Tensor own = full.narrow(0, layout_.shard(rank_).begin, layout_.shard_numel());
  own.copy_(shard_);
  return comm.all_gather(full, own, {}, name_);
}

at::Tensor FlatGroup::gradient_destination(bool busy) {
  return reduce_dtype_ == dtype_ ? own_dtype_destination(busy) : fresh_gradient(reduce_dtype_);
}

// The shard may be in host memory and its gradient not, or the other way round.
at::Tensor FlatGroup::fresh_gradient(at::ScalarType dtype) const {
  return grad_memory_ ? grad_memory_(layout_.shard_numel(), dtype)
                      : at::empty({layout_.shard_numel()}, at::TensorOptions().dtype(dtype).device(device_));
}

at::Tensor FlatGroup::own_dtype_destination(bool busy) {
  const bool any_defined = std::any_of(parameter_shards_.begin(), parameter_shards_.end(),
                                       [](const at::Tensor& shard) { return shard.grad().defined(); });
  if (busy || any_defined) return fresh_gradient(dtype_);
  if (!grad_.defined() || !grads_are_ours_alone()) {
    grad_ = fresh_gradient(dtype_);
    grad_views_.clear();
    for (size_t i = 0; i < parameters_.size(); ++i)
      grad_views_.push_back(part_of(grad_, i).detach());  // zero_grad() refuses to detach views
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
  if (reduced.scalar_type() != dtype_) {
    const at::Tensor exact = own_dtype_destination(/*busy=*/false);
    exact.copy_(reduced);
    return accept_gradient(exact, used);
  }
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
