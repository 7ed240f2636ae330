#include "fsdp/flat_parameter.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "core/layout/deferred.h"
#include "core/layout/tensor_signature.h"
#include "core/memory/memory_kind_scope.h"

namespace tessera::internal {
namespace {

// What of(tensor) is for each of the parameters.
template <class Of>
auto each(const std::vector<PlannedParameter>& parameters, Of of) {
  std::vector<decltype(of(parameters[0].tensor))> values;
  for (const PlannedParameter& parameter : parameters) values.push_back(of(parameter.tensor));
  return values;
}

// What `chosen` comes to for these parameters, whose own dtype it leaves alone where a cast makes no sense.
at::ScalarType cast_of(const PlannedParameter& parameter, std::optional<at::ScalarType> chosen) {
  const at::ScalarType own = parameter.tensor.scalar_type();
  return parameter.full_precision || !at::isFloatingType(own) ? own : chosen.value_or(own);
}

bool is_read(const PlannedParameter& parameter) { return reader_of(parameter.tensor) != nullptr; }

}  // namespace

FlatParameter::FlatParameter(std::string name, std::vector<PlannedParameter> parameters, Communicator& comm,
                             bool sync_module_states, const FlatParameterOptions& options)
    : name_(std::move(name)),
      parameters_(std::move(parameters)),
      geometries_(each(parameters_, &geometry_of)),
      dtype_(parameters_.at(0).tensor.scalar_type()),
      gather_dtype_(cast_of(parameters_[0], options.gather_dtype)),
      reduce_dtype_(cast_of(parameters_[0], options.reduce_dtype ? options.reduce_dtype : options.gather_dtype)),
      layout_(FlatLayout::evenly(each(parameters_, [](const at::Tensor& tensor) { return tensor.numel(); }),
                                 comm.size(),
                                 FlatLayout::alignment_numel(std::min(bytes(1, dtype_), bytes(1, gather_dtype_))))),
      rank_(comm.rank()),
      is_on_host_(options.shard_memory != nullptr),
      codec_(make_wire_codec(parameters_[0].full_precision || comm.size() == 1 ? WireFormat::kDtype : options.wire,
                             dtype_)),
      encoded_bytes_(codec_->is_identity() ? 0 : codec_->encoded_bytes(layout_.shard_numel())) {
  at::NoGradGuard no_grad;
  make_shard(comm, sync_module_states, options);
  for (PlannedParameter& parameter : parameters_) parameter.values.reset();
  if (is_on_host_ && is_cast()) {
    const auto& memory = options.low_precision_memory ? options.low_precision_memory : options.shard_memory;
    low_precision_ = std::make_shared<LowPrecisionCopy>(
        LowPrecisionCopy{memory(layout_.shard_numel(), gather_dtype_), shard_page().writes()});
    low_precision_->values.copy_(shard_);
  }
  make_parameter_shards(comm.device(), options.grad_memory);
}

void FlatParameter::make_shard(Communicator& comm, bool sync_module_states, const FlatParameterOptions& chosen) {
  const auto options = at::TensorOptions().dtype(dtype_).device(comm.device());
  const bool is_first_copy = chosen.replicas == nullptr || chosen.replicas->rank() == 0;
  const bool all_are_read = std::ranges::all_of(parameters_, &is_read);
  at::Tensor full;
  if (!all_are_read && (!sync_module_states || (comm.rank() == 0 && is_first_copy))) {
    full = at::zeros({layout_.full_numel()}, options);
    for (size_t i = 0; i < parameters_.size(); ++i)
      if (!is_read(parameters_[i]))
        view_in(full, i).copy_(parameters_[i].values.defined() ? parameters_[i].values : parameters_[i].tensor);
  }
  const MemoryKindScope kind(MemoryKind::kParameters);
  at::Tensor own;
  if (all_are_read) {
    own = at::zeros({layout_.shard_numel()}, options);
  } else if (sync_module_states) {
    own = at::empty({layout_.shard_numel()}, options);
    if (is_first_copy) comm.scatter(own, full, 0, {}, name_).wait();
    if (chosen.replicas != nullptr) chosen.replicas->broadcast(own, 0, name_).wait();
  } else {
    own = own_part_of(full);
  }
  read_own_parts(own);
  if (is_on_host_) {
    shard_ = chosen.shard_memory(layout_.shard_numel(), dtype_).copy_(own);
  } else {
    shard_ = sync_module_states || all_are_read ? own : own.clone();
  }
  if (chosen.pager == nullptr) return;
  if (is_paged(shard_)) return page_of(shard_)->tell_of_writes(*chosen.pager, chosen.page_id);
  shard_page_ = std::make_unique<Page>(chosen.pager, chosen.page_id, "the shard of " + name_, shard_.device());
  shard_page_->set_writable(true);
  shard_page_->attach_permanently(shard_);
  shard_ = shard_page_->view(dtype_, {layout_.shard_numel()}, {1}, 0);
}

// Of parameters that are read from somewhere, this rank's part and no more.
void FlatParameter::read_own_parts(const at::Tensor& shard) const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const ReadElements* read = reader_of(parameters_[i].tensor);
    const Range owned = layout_.owned(static_cast<int64_t>(i), rank_);
    if (read == nullptr || owned.numel() == 0) continue;
    const at::Tensor part = part_of(shard, i);
    const at::Tensor on_host =
        part.is_cpu() ? part : at::empty({owned.numel()}, at::TensorOptions(at::kCPU).dtype(dtype_));
    (*read)(owned, on_host.mutable_data_ptr());
    if (!part.is_cpu()) part.copy_(on_host);
  }
}

void FlatParameter::make_parameter_shards(at::Device device, const FlatParameterOptions::Memory& grad_memory) {
  std::vector<GradientBuffer::Member> members;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor shard = part_of(shard_, i).detach().set_requires_grad(parameters_[i].tensor.requires_grad());
    mark_as_shard(shard, shard_label(i), low_precision_part(i));
    parameter_shards_.push_back(shard);
    members.push_back({shard, {{shard.numel()}, {1}}, layout_.offset_in_shard(static_cast<int64_t>(i), rank_)});
    if (layout_.world_size() > 1) members.back().part_label = shard_label(i);
  }
  // The shard may be in host memory and its gradient not, or the other way round.
  auto memory = [device, grad_memory](int64_t numel, at::ScalarType dtype) {
    const MemoryKindScope kind(MemoryKind::kGradients);
    return grad_memory ? grad_memory(numel, dtype)
                       : at::empty({numel}, at::TensorOptions().dtype(dtype).device(device));
  };
  gradient_ = std::make_unique<GradientBuffer>(std::move(members), layout_.shard_numel(), dtype_, std::move(memory));
}

std::string FlatParameter::shard_label(size_t parameter) const {
  return c10::str("parameter '", parameters_[parameter].fqn, "' on rank ", rank_);
}

// Only fp32 shards have optimizers that write the copy, which holds 16 bit then.
LowPrecisionPart FlatParameter::low_precision_part(size_t parameter) const {
  const bool is_written = low_precision_ && dtype_ == at::kFloat && c10::elementSize(gather_dtype_) == 2;
  return is_written ? LowPrecisionPart{part_of(low_precision_->values, parameter), low_precision_} : LowPrecisionPart{};
}

bool FlatParameter::is_shard_home(size_t parameter) const {
  const at::Tensor& own = parameter_shards_[parameter];
  const auto index = static_cast<int64_t>(parameter);
  return shard_page().holds(own) &&
         is_view_at(own, {layout_.owned(index, rank_).numel()}, {1}, layout_.offset_in_shard(index, rank_));
}

const at::Tensor& FlatParameter::link_source() {
  if (!low_precision_) return shard_;
  if (const uint32_t writes = shard_page().writes(); low_precision_->writes != writes) {
    low_precision_->values.copy_(shard_);
    low_precision_->writes = writes;
  }
  return low_precision_->values;
}

at::Tensor FlatParameter::part_of(const at::Tensor& shard, size_t parameter) const {
  const auto index = static_cast<int64_t>(parameter);
  return shard.narrow(0, layout_.offset_in_shard(index, rank_), layout_.owned(index, rank_).numel());
}

Pending FlatParameter::gather(const at::Tensor& full, Communicator& comm) const {
  if (full.scalar_type() == dtype_ && !is_on_host_) return comm.all_gather(full, shard_, {}, name_);
  return comm.all_gather(full, own_part_of(full).copy_(shard_), {}, name_);
}

Pending FlatParameter::gather_encoded(const at::Tensor& wire, const at::Tensor& shard, Communicator& comm) const {
  const at::Tensor own = wire.narrow(0, rank_ * encoded_bytes_, encoded_bytes_);
  codec_->encode(shard, own);
  return comm.all_gather(wire, own, {}, name_);
}

void FlatParameter::decode(const at::Tensor& wire, const at::Tensor& full) const {
  for (int rank = 0; rank * encoded_bytes_ < wire.numel(); ++rank)
    codec_->decode(wire.narrow(0, rank * encoded_bytes_, encoded_bytes_),
                   full.narrow(0, layout_.shard(rank).begin, layout_.shard_numel()));
}

std::vector<std::vector<PlannedParameter>> split_into_flat_parameters(const PlannedUnit& unit) {
  std::vector<std::vector<PlannedParameter>> groups;
  for (const PlannedParameter& parameter : unit.parameters) {
    auto alike = [&](const std::vector<PlannedParameter>& group) {
      return group[0].tensor.scalar_type() == parameter.tensor.scalar_type() &&
             group[0].tensor.requires_grad() == parameter.tensor.requires_grad() &&
             group[0].full_precision == parameter.full_precision;
    };
    auto group = std::ranges::find_if(groups, alike);
    if (group == groups.end()) group = groups.emplace(group);
    group->push_back(parameter);
  }
  return groups;
}

}  // namespace tessera::internal
