// Construction of flat parameters. Their use in training steps is in other files.
#include "fsdp/flat_parameter.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "core/layout/deferred.h"
#include "core/layout/tensor_signature.h"
#include "core/memory/memory_kind_scope.h"
#include "core/model/module_state.h"
#include "core/runtime/no_grad_no_inference_guard.h"

namespace tessera::internal {
namespace {

// Returns of(tensor) for each parameter's tensor.
template <class Of>
auto each(const std::vector<PlannedParameter>& parameters, Of of) {
  std::vector<decltype(of(parameters[0].tensor))> values;
  for (const PlannedParameter& parameter : parameters) values.push_back(of(parameter.tensor));
  return values;
}

// Returns `chosen`, or the parameter's own dtype if `chosen` is empty or the parameter must not be cast.
at::ScalarType cast_of(const PlannedParameter& parameter, std::optional<at::ScalarType> chosen) {
  const at::ScalarType own = parameter.tensor.scalar_type();
  return parameter.full_precision || !at::isFloatingType(own) ? own : chosen.value_or(own);
}

std::string traits_of(const PlannedParameter& parameter) {
  return std::string(" (") + c10::toString(parameter.tensor.scalar_type()) +
         (parameter.full_precision ? ", full precision" : "") +
         (parameter.tensor.requires_grad() ? ", trainable)" : ", frozen)");
}

// Moves this rank's part of gradients from before wrapping into the shards' `.grad`. Clears the parameters' `.grad`.
// Not collective: require_same_plan() has compared the gradients over ranks.
void take_earlier_gradients(FlatParameter& flat) {
  const NoGradNoInferenceGuard quiet;
  std::vector<bool> has(flat.parameters().size());
  at::Tensor full;
  for (size_t i = 0; i < has.size(); ++i) {
    const at::Tensor grad = std::exchange(flat.parameters()[i].tensor.mutable_grad(), at::Tensor());
    has[i] = is_earlier_gradient(grad);
    if (!has[i]) continue;
    if (!full.defined())
      full = at::zeros({flat.layout().full_numel()}, at::TensorOptions().dtype(flat.dtype()).device(grad.device()));
    flat.view_in(full, i).copy_(grad.is_sparse() ? grad.to_dense() : grad);
  }
  if (!full.defined()) return;
  const at::Tensor own = flat.gradient().room(flat.dtype());
  own.copy_(flat.own_part_of(full));
  flat.gradient().accept(own, has);
}

std::unique_ptr<PagedFlatParameter> make_paged(std::string name, std::vector<PlannedParameter> parameters, int index,
                                               Communicator& comm, bool sync_module_states,
                                               const FlatParameterOptions& options) {
  auto paged = std::make_unique<PagedFlatParameter>(
      PagedFlatParameter{FlatParameter(std::move(name), std::move(parameters), comm, sync_module_states, options)});
  const FlatParameter& own = paged->flat;
  const bool is_exempt = own.parameters()[0].full_precision;
  paged->page = std::make_unique<Page>(options.pager, index, own.name(), comm.device());
  if (own.is_cast()) paged->exact_page = std::make_unique<Page>(options.pager, index, own.name(), comm.device());
  if (is_exempt && options.gather_dtype && *options.gather_dtype != own.dtype() && at::isFloatingType(own.dtype()))
    paged->page->convert_activations(*options.gather_dtype);
  take_earlier_gradients(paged->flat);
  paged->point_parameters(*paged->page, own.gather_dtype());
  return paged;
}

bool is_read(const PlannedParameter& parameter) { return reader_of(parameter.tensor) != nullptr; }

}  // namespace

FlatSpec::FlatSpec(std::string name, std::vector<PlannedParameter> parameters, int rank, int world_size,
                   std::optional<at::ScalarType> gather_dtype, std::optional<at::ScalarType> reduce_dtype)
    : parameters_(std::move(parameters)),
      name_(std::move(name)),
      geometries_(each(parameters_, &geometry_of)),
      dtype_(parameters_.at(0).tensor.scalar_type()),
      gather_dtype_(cast_of(parameters_[0], gather_dtype)),
      reduce_dtype_(cast_of(parameters_[0], reduce_dtype ? reduce_dtype : gather_dtype)),
      rank_(rank),
      layout_(FlatLayout::evenly(each(parameters_, [](const at::Tensor& tensor) { return tensor.numel(); }), world_size,
                                 FlatLayout::alignment_numel(std::min(bytes(1, dtype_), bytes(1, gather_dtype_))))) {}

at::Tensor FlatSpec::part_of(const at::Tensor& shard, size_t parameter) const {
  const auto index = static_cast<int64_t>(parameter);
  return shard.narrow(0, layout_.offset_in_shard(index, rank_), layout_.owned(index, rank_).numel());
}

std::string FlatSpec::shard_label(size_t parameter) const {
  return c10::str("parameter '", parameters_[parameter].fqn, "' on rank ", rank_);
}

FlatParameter::FlatParameter(std::string name, std::vector<PlannedParameter> parameters, Communicator& comm,
                             bool sync_module_states, const FlatParameterOptions& options)
    : FlatSpec(std::move(name), std::move(parameters), comm.rank(), comm.size(), options.gather_dtype,
               options.reduce_dtype),
      is_on_host_(options.shard_memory != nullptr),
      codec_(make_wire_codec(parameters_[0].full_precision || comm.size() == 1 ? WireFormat::kDtype : options.wire,
                             dtype())),
      encoded_bytes_(codec_->is_identity() ? 0 : codec_->encoded_bytes(layout().shard_numel())) {
  at::NoGradGuard no_grad;
  make_shard(comm, sync_module_states, options);
  for (PlannedParameter& parameter : parameters_) parameter.values.reset();
  if (is_on_host_ && is_cast()) {
    const auto& memory = options.low_precision_memory ? options.low_precision_memory : options.shard_memory;
    low_precision_ = std::make_shared<LowPrecisionCopy>(
        LowPrecisionCopy{memory(layout().shard_numel(), gather_dtype()), shard_page().writes()});
    low_precision_->values.copy_(shard_);
  }
  make_parameter_shards(comm.device(), options.grad_memory);
}

void FlatParameter::make_shard(Communicator& comm, bool sync_module_states, const FlatParameterOptions& chosen) {
  const auto options = at::TensorOptions().dtype(dtype()).device(comm.device());
  const bool is_first_copy = chosen.replicas == nullptr || chosen.replicas->rank() == 0;
  const bool all_are_read = std::ranges::all_of(parameters_, &is_read);
  at::Tensor full;
  if (!all_are_read && (!sync_module_states || (comm.rank() == 0 && is_first_copy))) {
    full = at::zeros({layout().full_numel()}, options);
    for (size_t i = 0; i < parameters_.size(); ++i)
      if (!is_read(parameters_[i]))
        view_in(full, i).copy_(parameters_[i].values.defined() ? parameters_[i].values : parameters_[i].tensor);
  }
  const MemoryKindScope kind(MemoryKind::kParameters);
  at::Tensor own;
  if (all_are_read) {
    own = at::zeros({layout().shard_numel()}, options);
  } else if (sync_module_states) {
    own = at::empty({layout().shard_numel()}, options);
    if (is_first_copy) comm.scatter(own, full, 0, {}, name()).wait();
    if (chosen.replicas != nullptr) chosen.replicas->broadcast(own, 0, name()).wait();
  } else {
    own = own_part_of(full);
  }
  read_own_parts(own);
  if (is_on_host_) {
    shard_ = chosen.shard_memory(layout().shard_numel(), dtype()).copy_(own);
  } else {
    shard_ = sync_module_states || all_are_read ? own : own.clone();
  }
  if (chosen.pager == nullptr) return;
  if (is_paged(shard_)) {
    shard_page_ = page_of(shard_);
    return shard_page_->tell_of_writes(*chosen.pager, chosen.page_id);
  }
  own_page_ = std::make_unique<Page>(chosen.pager, chosen.page_id, "the shard of " + name(), shard_.device());
  shard_page_ = own_page_.get();
  shard_page_->set_writable(true);
  shard_page_->attach_permanently(shard_);
  shard_ = shard_page_->view(dtype(), {layout().shard_numel()}, {1}, 0);
}

// Reads this rank's part of each deferred parameter that has a reader (deferred_from()), for example from a checkpoint.
void FlatParameter::read_own_parts(const at::Tensor& shard) const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const ReadElements* read = reader_of(parameters_[i].tensor);
    const Range owned = layout().owned(static_cast<int64_t>(i), rank());
    if (read == nullptr || owned.numel() == 0) continue;
    const at::Tensor part = part_of(shard, i);
    const at::Tensor on_host =
        part.is_cpu() ? part : at::empty({owned.numel()}, at::TensorOptions(at::kCPU).dtype(dtype()));
    (*read)(owned, on_host.mutable_data_ptr());
    if (!part.is_cpu()) part.copy_(on_host);
  }
}

void FlatParameter::make_parameter_shards(at::Device device, const FlatParameterOptions::Memory& grad_memory) {
  std::vector<GradientBuffer::Member> members;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor shard = part_of(shard_, i).detach().set_requires_grad(parameters_[i].tensor.requires_grad());
    mark_as_shard(shard, shard_label(i), geometry(i).sizes, low_precision_part(i));
    parameter_shards_.push_back(shard);
    members.push_back({shard, {{shard.numel()}, {1}}, layout().offset_in_shard(static_cast<int64_t>(i), rank())});
    if (layout().world_size() > 1) members.back().part_label = shard_label(i);
  }
  // Allocates on `device`, not on the shard's device: the shard may be in host memory while its gradient is not.
  auto memory = [device, grad_memory](int64_t numel, at::ScalarType dtype) {
    const MemoryKindScope kind(MemoryKind::kGradients);
    return grad_memory ? grad_memory(numel, dtype)
                       : at::empty({numel}, at::TensorOptions().dtype(dtype).device(device));
  };
  gradient_ = std::make_unique<GradientBuffer>(std::move(members), layout().shard_numel(), dtype(), std::move(memory));
}

// Returns the part of the low-precision copy that optimizers write; empty unless the shard is fp32 and the copy 16-bit.
LowPrecisionPart FlatParameter::low_precision_part(size_t parameter) const {
  const bool is_written = low_precision_ && dtype() == at::kFloat && c10::elementSize(gather_dtype()) == 2;
  return is_written ? LowPrecisionPart{part_of(low_precision_->values, parameter), low_precision_} : LowPrecisionPart{};
}

bool FlatParameter::is_shard_attached(size_t parameter) const {
  const at::Tensor& own = parameter_shards_[parameter];
  const auto index = static_cast<int64_t>(parameter);
  return shard_page().holds(own) &&
         is_view_at(own, {layout().owned(index, rank()).numel()}, {1}, layout().offset_in_shard(index, rank()));
}

void PagedFlatParameter::point_parameters(const Page& to, at::ScalarType dtype) const {
  for (size_t i = 0; i < flat.parameters().size(); ++i) {
    const ParameterGeometry& geometry = flat.geometry(i);
    at::Tensor parameter = flat.parameters()[i].tensor;
    const at::Tensor view =
        to.view(dtype, geometry.sizes, geometry.strides, flat.layout().offset(static_cast<int64_t>(i)));
    is_deferred(parameter) ? fill_deferred(parameter, view) : parameter.set_data(view);
  }
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

FlatParameters make_flat_parameters(const PlannedUnit& unit, const std::string& name, int index, Communicator& comm,
                                    bool sync_module_states, const FlatParameterOptions& options) {
  at::NoGradGuard no_grad;
  FlatParameters made;
  auto parts = split_into_flat_parameters(unit);
  for (auto& parameters : parts) {
    std::string own_name = parts.size() > 1 ? name + traits_of(parameters[0]) : name;
    made.push_back(make_paged(std::move(own_name), std::move(parameters), index, comm, sync_module_states, options));
  }
  return made;
}

}  // namespace tessera::internal
