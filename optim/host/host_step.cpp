#include "optim/host/host_step.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/GradMode.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <deque>
#include <utility>

#include "core/runtime/dtypes.h"
#include "core/runtime/lazy_values.h"
#include "core/runtime/stream_uses.h"
#include "optim/state/optimizer_state.h"

namespace tessera::internal {
namespace {

// In step_one_by_one(): maximum number of gradients in flight to the host, and of parameters in flight to the device.
constexpr size_t kUnderWay = 2;

// Returns the elements in memory order, or an undefined tensor if `tensor` is not dense.
at::Tensor flat(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() ? tensor.detach().as_strided({tensor.numel()}, {1}) : at::Tensor();
}

constexpr int64_t kColumns = 61, kSums = kColumns + 1;
// Returns checksums of the values' bits: [kSums] kLong on the parameter's device. Sums the columns of [rows, kColumns]
// values, then the remaining values. A sum changes if a value changes or moves to another column; changes may cancel.
at::Tensor value_sums(const at::Tensor& parameter) {
  at::Tensor values = flat(parameter);
  if (!values.defined()) values = parameter.detach().reshape({-1});
  values = values.resolve_conj().resolve_neg();
  if (values.is_complex()) values = at::view_as_real(values).view({-1});
  values = values.view(bits_dtype(values.element_size()));
  const int64_t rows = values.numel() / kColumns, in_rows = rows * kColumns;
  return at::cat({values.narrow(0, 0, in_rows).view({rows, kColumns}).sum(0, /*keepdim=*/false, at::kLong),
                  values.narrow(0, in_rows, values.numel() - in_rows).sum(at::kLong).view({1})});
}

// Moves a state to the host. A state that was loaded from a checkpoint may be on the parameter's device.
void move_to_host(torch::optim::Optimizer& optimizer, void* key) {
  const auto found = optimizer.state().find(key);
  if (found == optimizer.state().end()) return;
  ParameterState values = read_state(*found->second);
  if (std::ranges::all_of(values.tensors, [](const auto& entry) { return entry.second.device().is_cpu(); })) return;
  for (auto& [name, tensor] : values.tensors) tensor = tensor.cpu();
  found->second = make_state(optimizer_kind(optimizer), values);
}

}  // namespace

HostStep::HostStep(Factory make, HostStepOptions options)
    : make_(std::move(make)),
      label_(std::move(options.label)),
      is_limited_(options.memory.limit_bytes > 0),
      pool_(options.memory),
      engine_(CopyEngine::make(options.memory.device)) {
  if (!options.drops_gradients) return;
  require_residency();
  dropped_ = std::make_shared<GradPlaceholder>(GradPlaceholder::Events{
      [this](size_t number) {
        return "the gradient of " + label_(parameters_[number]) +
               " was dropped when a step had taken it, as offload.grads says: call zero_grad() "
               "before the next backward or step";
      },
      [](size_t) {},
      [this](size_t number) { parameters_[number].mutable_grad() = at::zeros_like(parameters_[number].detach()); }});
}

HostStep::~HostStep() {
  for (size_t i = 0; i < parameters_.size() && dropped_; ++i) dropped_->take_out(i, parameters_[i]);
}

// Updates the host copies and the host optimizer to match the groups of `optimizer`. The user may have added groups.
void HostStep::rebuild(torch::optim::Optimizer& optimizer) {
  size_t count = 0;
  for (const auto& group : optimizer.param_groups()) count += group.params().size();
  // Also compares the number of groups, because this rank may own no parameter of an added group.
  if (host_optimizer_ && count == host_copies_.size() &&
      host_optimizer_->param_groups().size() == optimizer.param_groups().size()) {
    for (size_t i = 0; i < optimizer.param_groups().size(); ++i)
      host_optimizer_->param_groups()[i].set_options(optimizer.param_groups()[i].options().clone());
    return;
  }
  host_optimizer_.reset();  // if a copy exceeds the limit, the next step makes all copies again
  std::vector<HostCopy> copies;
  Groups groups;
  for (const auto& group : optimizer.param_groups()) {
    std::vector<at::Tensor> hosts;
    for (const at::Tensor& parameter : group.params()) {
      const auto known =
          std::ranges::find_if(host_copies_, [&](const HostCopy& copy) { return copy.parameter.is_same(parameter); });
      copies.push_back(known != host_copies_.end() ? std::move(*known) : copy_of(parameter));
      hosts.push_back(copies.back().host);
    }
    groups.emplace_back(std::move(hosts), group.options().clone());
  }
  host_copies_ = std::move(copies);
  host_optimizer_ = make_(std::move(groups));
}

HostStep::HostCopy HostStep::copy_of(const at::Tensor& parameter) {
  const at::Tensor memory = pool_.take(parameter.numel(), parameter.scalar_type(),
                                       "a copy of a parameter of shape " + c10::str(parameter.sizes()));
  at::Tensor host = parameter.is_non_overlapping_and_dense() ? memory.as_strided(parameter.sizes(), parameter.strides())
                                                             : memory.view(parameter.sizes());
  host.copy_(parameter.detach());
  parameters_.push_back(parameter);
  return {parameter,
          host.detach(),
          static_cast<uint32_t>(parameter._version()),
          parameter.const_data_ptr(),
          parameter.is_cpu() ? at::Tensor() : value_sums(parameter),
          parameters_.size() - 1};
}

void HostStep::renew(HostCopy& copy) {
  const at::Tensor& parameter = copy.parameter;
  if (parameter._version() == copy.seen_version && parameter.const_data_ptr() == copy.seen_memory &&
      !parameter.is_cpu())
    return;
  copy.host.copy_(parameter.detach());
  copy.seen_memory = parameter.const_data_ptr();
}

// Sets `written_`, which is valid once the first gradient's copy has ended. Must be called before that copy starts.
void HostStep::look_for_writes(const std::vector<HostCopy*>& work) {
  written_ = at::Tensor();
  if (work.empty() || work[0]->parameter.is_cpu()) return;
  const auto stream = current_stream(work[0]->parameter.device());
  std::vector<at::Tensor> now, seen;
  for (HostCopy* copy : work) {
    copy->place = now.size();
    now.push_back(value_sums(copy->parameter));
    seen.push_back(copy->seen_sums);
    copy->seen_sums.record_stream(stream);
  }
  const auto count = static_cast<int64_t>(work.size());
  written_ = at::empty({count}, at::TensorOptions(at::kCPU).dtype(at::kBool).pinned_memory(true));
  written_.copy_(at::cat(now).ne(at::cat(seen)).view({count, kSums}).any(1), /*non_blocking=*/true);
}

void HostStep::renew_if_written(HostCopy& copy) {
  if (written_.defined() && written_.const_data_ptr<bool>()[copy.place]) copy.host.copy_(copy.parameter.detach());
}

at::Tensor HostStep::memory_of_gradient(const HostCopy& copy) {
  const at::Tensor& gradient = copy.parameter.grad();
  if (gradient.layout() != at::kStrided || has_lazy_values(gradient) || gradient.strides() != copy.host.strides() ||
      !flat(copy.host).defined())
    return {};
  return pool_.take(gradient.numel(), gradient.scalar_type(), "a gradient of shape " + c10::str(gradient.sizes()));
}

void HostStep::start_gradient(HostCopy& copy) {
  renew(copy);
  const at::Tensor gradient = copy.parameter.grad(), memory = memory_of_gradient(copy);
  if (!memory.defined()) {
    copy.host.mutable_grad() = gradient.cpu().clone();
  } else {
    copy.host.mutable_grad() = memory.as_strided(gradient.sizes(), gradient.strides());
    copy.arriving = engine_->to_host(memory, flat(gradient));
  }
}

void HostStep::finish_gradient(HostCopy& copy) {
  copy.arriving.wait_on_host();
  renew_if_written(copy);
  if (dropped_) dropped_->put(copy.number, "a dropped gradient", copy.parameter);
}

// Starts a copy of the new values in memory order if strides are equal and the parameter has no conjugate or negative
// bit. Otherwise copies them with an operator, because set_data() may have changed the parameter's layout.
void HostStep::start_return(HostCopy& copy) {
  copy.host.mutable_grad().reset();
  const at::Tensor to = has_lazy_values(copy.parameter) ? at::Tensor() : flat(copy.parameter);
  if (to.defined() && copy.parameter.strides() == copy.host.strides()) {
    copy.leaving = engine_->to_device(to, flat(copy.host));
  } else {
    copy.parameter.detach().copy_(copy.host);
  }
}

// Raises the version, because the copy engine writes without an operator. Autograd then refuses stale saved values.
void HostStep::finish_return(HostCopy& copy) {
  copy.leaving.wait_on_host();
  copy.parameter.unsafeGetTensorImpl()->bump_version();
  copy.seen_version = static_cast<uint32_t>(copy.parameter._version());
  if (!copy.parameter.is_cpu()) copy.seen_sums = value_sums(copy.parameter);
}

void HostStep::step_all(const std::vector<HostCopy*>& work) {
  for (HostCopy* copy : work) start_gradient(*copy);
  for (HostCopy* copy : work) finish_gradient(*copy);
  host_optimizer_->step();
  for (HostCopy* copy : work) start_return(*copy);
  for (HostCopy* copy : work) finish_return(*copy);
}

// Note [Three at once]. While parameter i is stepped, two later gradients are in flight to the host, and the values of
// the two previous parameters are in flight to the device.
void HostStep::step_one_by_one(const std::vector<HostCopy*>& work, PartialStep& partial) {
  if (is_limited_) {  // if the step exceeds the limit, it must throw before a parameter changes
    std::deque<at::Tensor> in_flight;
    for (const HostCopy* copy : work) {
      in_flight.push_back(memory_of_gradient(*copy));
      if (in_flight.size() > kUnderWay) in_flight.pop_front();
    }
  }
  const size_t ahead = std::min(kUnderWay, work.size());
  for (size_t i = 0; i < ahead; ++i) start_gradient(*work[i]);
  for (size_t i = 0; i < work.size(); ++i) {
    finish_gradient(*work[i]);
    if (i + kUnderWay < work.size()) start_gradient(*work[i + kUnderWay]);
    partial.step_parameters({work[i]->host});
    start_return(*work[i]);
    if (i >= kUnderWay) finish_return(*work[i - kUnderWay]);
  }
  for (size_t i = work.size() - ahead; i < work.size(); ++i) finish_return(*work[i]);
}

void HostStep::step(torch::optim::Optimizer& optimizer) {
  at::NoGradGuard no_grad;
  rebuild(optimizer);
  std::vector<HostCopy*> work;
  for (HostCopy& copy : host_copies_) {
    // If the last step failed, the host copy may still have a gradient, and the gradient's copy may be in flight.
    copy.arriving.wait_on_host();
    copy.arriving = {};
    copy.host.mutable_grad().reset();
    if (!copy.parameter.grad().defined()) continue;
    if (dropped_ && dropped_->is_in(copy.number, copy.parameter)) dropped_->refuse_step(copy.number);
    work.push_back(&copy);
  }

  look_for_writes(work);

  // Moves each state between a parameter and its host copy.
  auto hand_states = [&](torch::optim::Optimizer& from, torch::optim::Optimizer& to, bool to_host) {
    for (const HostCopy& copy : host_copies_) {
      const auto found = from.state().find((to_host ? copy.parameter : copy.host).unsafeGetTensorImpl());
      if (found == from.state().end()) continue;
      to.state()[(to_host ? copy.host : copy.parameter).unsafeGetTensorImpl()] = std::move(found->second);
      from.state().erase(found);
      if (to_host) move_to_host(to, copy.host.unsafeGetTensorImpl());
    }
  };
  const auto return_states = c10::make_scope_exit([&] { hand_states(*host_optimizer_, optimizer, /*to_host=*/false); });
  hand_states(optimizer, *host_optimizer_, /*to_host=*/true);
  auto* partial = dynamic_cast<PartialStep*>(chosen_step_of(*host_optimizer_));
  partial != nullptr ? step_one_by_one(work, *partial) : step_all(work);
}

}  // namespace tessera::internal
