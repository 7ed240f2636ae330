#include <tessera/optim/sharded_grad_scaler.h>

#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <stdexcept>
#include <unordered_set>
#include <utility>
#include <vector>

#include <tessera/detail/listed_optimizer.h>
#include <tessera/host_results.h>
#include "core/runtime/graph_recorder.h"
#include "core/runtime/lazy_values.h"

namespace tessera {
using namespace internal;
namespace {

// Returns a writable view of the values of the parameter's gradient, in a real dtype. If no such view exists (for
// example, because the gradient is conjugated), first replaces the gradient by a copy.
at::Tensor writable_values(const at::Tensor& parameter) {
  at::Tensor& gradient = parameter.mutable_grad();
  if (gradient.is_sparse() && !gradient.is_coalesced()) gradient = gradient.coalesce();
  if (has_lazy_values(gradient)) gradient = gradient.clone();
  const at::Tensor values = gradient.is_sparse() ? gradient._values() : gradient;
  return values.is_complex() ? at::view_as_real(values) : values;
}

// Gradients are scaled and unscaled in fp32, so the scale and its reciprocal must be finite there.
constexpr const char* kUsable = "more than 0, and finite in fp32 like its reciprocal";
bool is_usable(double scale) {
  return scale > 0 && std::isfinite(static_cast<float>(scale)) && std::isfinite(static_cast<float>(1 / scale));
}

}  // namespace

ShardedGradScaler::ShardedGradScaler(std::shared_ptr<Communicator> comm, GradScalerOptions options)
    : comm_(std::move(comm)), options_(options), scale_(options.initial_scale) {
  if (!comm_) throw std::invalid_argument("ShardedGradScaler: the communicator is null");
  const auto require = [](bool holds, const char* field, double value, const char* expected) {
    require_option(holds, "GradScalerOptions", field, value, expected);
  };
  require(is_usable(options.initial_scale), "initial_scale", options.initial_scale, kUsable);
  require(options.growth_factor >= 1, "growth_factor", options.growth_factor, "1 or more");
  require(options.backoff_factor > 0 && options.backoff_factor < 1, "backoff_factor", options.backoff_factor,
          "between 0 and 1");
  require(options.growth_interval >= 1, "growth_interval", static_cast<double>(options.growth_interval), "1 or more");
}

at::Tensor ShardedGradScaler::scale(const at::Tensor& loss) const {
  CapturedWork::refuse(loss.device(), "ShardedGradScaler, whose scale and steps the host decides",
                       "train in bfloat16, or by an eager loop");
  return loss * scale_;
}

void ShardedGradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  const auto [entry, is_new] = seen_.try_emplace(&optimizer);
  if (!is_new) throw std::logic_error("ShardedGradScaler::unscale_ twice for one optimizer without update() between");
  at::NoGradGuard no_grad;
  // Groups gradients by dtype and device, because all gradients of one operator call must agree in both.
  std::map<std::pair<at::ScalarType, at::DeviceIndex>, std::vector<at::Tensor>> kinds;
  std::unordered_set<const c10::TensorImpl*> seen;  // the groups may list a tied parameter twice
  for (auto& group : optimizer.param_groups())
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.grad().defined() || parameter.grad().numel() == 0) continue;
      if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
      const at::Tensor values = writable_values(parameter);
      kinds[{values.scalar_type(), values.device().index()}].push_back(values);
    }
  at::Tensor found = at::zeros({1}, at::TensorOptions().dtype(at::kFloat).device(comm_->device()));
  for (auto& [kind, gradients] : kinds) {
    const auto on_device = at::TensorOptions().dtype(at::kFloat).device(gradients[0].device());
    at::Tensor found_here = at::zeros({1}, on_device);
    at::_amp_foreach_non_finite_check_and_unscale_(gradients, found_here, at::full({1}, 1.0 / scale_, on_device));
    found.add_(found_here.to(comm_->device()));
  }
  // The description contains the scale. Ranks compare descriptions, so the reduction throws if scales differ.
  found =
      reduce_to_host(*comm_, found, ReduceOp::kSum, c10::str("whether gradients scaled by ", scale_, " are finite"));
  entry->second.is_finite = found.item<float>() == 0;
}

bool ShardedGradScaler::step(torch::optim::Optimizer& optimizer) {
  if (!seen_.contains(&optimizer)) unscale_(optimizer);
  Seen& seen = seen_.at(&optimizer);
  if (std::exchange(seen.has_stepped, true))
    throw std::logic_error("ShardedGradScaler::step twice for one optimizer without update() between");
  if (seen.is_finite) optimizer.step();
  return seen.is_finite;
}

void ShardedGradScaler::update() {
  if (seen_.empty()) throw std::logic_error("ShardedGradScaler::update without a step before it");
  const bool all_finite = std::ranges::all_of(seen_, [](const auto& entry) { return entry.second.is_finite; });
  seen_.clear();
  if (all_finite && ++finite_steps_ < options_.growth_interval) return;
  const double next = scale_ * (all_finite ? options_.growth_factor : options_.backoff_factor);
  if (is_usable(next)) scale_ = next;
  finite_steps_ = 0;
}

void ShardedGradScaler::load_state(State state) {
  require_option(is_usable(state.scale), "ShardedGradScaler::load_state", "scale", state.scale, kUsable);
  require_option(state.finite_steps >= 0, "ShardedGradScaler::load_state", "finite_steps",
                 static_cast<double>(state.finite_steps), "0 or more");
  scale_ = state.scale;
  finite_steps_ = state.finite_steps;
  seen_.clear();
}

}  // namespace tessera
