#include <tessera/optim/fused_optimizers.h>

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <tessera/detail/listed_optimizer.h>
#include "core/paging/residency.h"
#include "core/trace/trace.h"
#include "optim/host/adam_update.h"
#include "optim/host/fused_kernels.h"

namespace tessera {
using namespace internal;
namespace {

constexpr const char* kName = "a fused optimizer";
constexpr AdamPlacement kBesideTheParameter{kName, [](const at::Tensor&) { return std::string(); },
                                            [](const at::Tensor& parameter) { return at::zeros_like(parameter); },
                                            &laid_out_as};

// For Adam and AdamW.
void require_inputs(torch::optim::Optimizer& optimizer) { require_steppable(optimizer, kBesideTheParameter); }

void fused_step(torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>* chosen) {
  std::vector<AdamUpdate> updates;
  for_each_adam_update(optimizer, chosen, kBesideTheParameter,
                       [&](AdamUpdate update) { updates.push_back(std::move(update)); });
  fused_adam_update(updates);
}

void require_inputs(torch::optim::SGD& optimizer) {
  for (const auto& group : optimizer.param_groups())
    for (const at::Tensor& parameter : group.params())
      if (parameter.grad().defined()) require_dense(parameter, kName);
}

struct SgdBatch {
  std::vector<at::Tensor> parameters, gradients, momenta;
  std::vector<torch::optim::SGDParamState*> states;  // owners of the momenta

  void step(const torch::optim::SGDOptions& options, bool is_first) const {
    if (!fused_sgd_is_right(parameters[0].scalar_type(), parameters[0].device().type()))
      return step_by_operators(options, is_first);
    at::_fused_sgd_(parameters, gradients, momenta, options.weight_decay(), options.momentum(), options.lr(),
                    options.dampening(), options.nesterov(), /*maximize=*/false, is_first);
    // The fused operators do not bump versions, by which writes are detected.
    for (const at::Tensor& parameter : parameters) parameter.unsafeGetTensorImpl()->bump_version();
  }

  // In the order of torch::optim::SGD, so that results are bit-equal.
  void step_by_operators(const torch::optim::SGDOptions& options, bool is_first) const {
    std::vector<at::Tensor> direction = gradients;
    if (options.weight_decay() != 0) direction = at::_foreach_add(gradients, parameters, options.weight_decay());
    if (options.momentum() != 0) {
      if (is_first) {
        at::_foreach_copy_(momenta, direction);
      } else {
        at::_foreach_mul_(momenta, options.momentum());
        at::_foreach_add_(momenta, direction, 1 - options.dampening());
      }
      direction = options.nesterov() ? at::_foreach_add(direction, momenta, options.momentum()) : momenta;
    }
    at::_foreach_add_(parameters, direction, -options.lr());
  }
};

// Keys: group, dtype, device, and whether this is the first momentum (a copy of the gradient), which the kernel takes
// as one flag for all parameters of a call. The last key gives each parameter on disk its own call.
using SgdBatches =
    std::map<std::tuple<torch::optim::OptimizerParamGroup*, at::ScalarType, std::string, bool, size_t>, SgdBatch>;

void add_to(SgdBatches& batches, torch::optim::SGD& optimizer, torch::optim::OptimizerParamGroup& group,
            const at::Tensor& parameter) {
  if (note_write_if_empty(parameter)) return;
  torch::optim::SGDParamState* state = nullptr;
  if (static_cast<const torch::optim::SGDOptions&>(group.options()).momentum() != 0) {
    auto& slot = optimizer.state()[parameter.unsafeGetTensorImpl()];
    if (!slot) slot = std::make_unique<torch::optim::SGDParamState>();
    state = &static_cast<torch::optim::SGDParamState&>(*slot);
  }
  const at::Tensor momentum = state != nullptr ? state->momentum_buffer() : at::Tensor();
  const bool is_first = state != nullptr && !momentum.defined();
  const size_t alone = is_on_disk(parameter) ? batches.size() + 1 : 0;
  SgdBatch& batch = batches[{&group, parameter.scalar_type(), parameter.device().str(), is_first, alone}];
  batch.parameters.push_back(parameter);
  batch.gradients.push_back(laid_out_as(parameter.grad(), parameter));
  if (state == nullptr) return;
  batch.momenta.push_back(is_first ? at::zeros_like(parameter) : laid_out_as(momentum, parameter));
  batch.states.push_back(state);
}

void fused_step(torch::optim::SGD& optimizer, const std::vector<at::Tensor>* chosen) {
  std::vector<std::pair<torch::optim::OptimizerParamGroup*, at::Tensor>> stepped;
  for_each_stepped(optimizer, chosen, [&](torch::optim::OptimizerParamGroup& group, const at::Tensor& parameter) {
    require_dense(parameter, kName);
    stepped.emplace_back(&group, parameter);
  });
  SgdBatches batches;
  for (const auto& [group, parameter] : stepped) add_to(batches, optimizer, *group, parameter);
  for (const auto& [key, batch] : batches) {
    const auto& options = static_cast<const torch::optim::SGDOptions&>(std::get<0>(key)->options());
    batch.step(options, std::get<3>(key));
    for (size_t i = 0; i < batch.states.size(); ++i) batch.states[i]->momentum_buffer(batch.momenta[i]);
  }
}

}  // namespace

template <class Base>
at::Tensor FusedOptimizer<Base>::step(torch::optim::Optimizer::LossClosure closure) {
  at::Tensor loss = loss_of(closure);
  at::NoGradGuard no_grad;
  const TraceSpan span(SpanKind::kOptimizer, "a fused step");
  fused_step(*this, nullptr);
  return loss;
}

template <class Base>
void FusedOptimizer<Base>::step_parameters(const std::vector<at::Tensor>& parameters) {
  at::NoGradGuard no_grad;
  fused_step(*this, &parameters);
}

template <class Base>
void FusedOptimizer<Base>::require_steppable() {
  require_inputs(*this);
}

template class internal::FusedOptimizer<torch::optim::Adam>;
template class internal::FusedOptimizer<torch::optim::AdamW>;
template class internal::FusedOptimizer<torch::optim::SGD>;

}  // namespace tessera
