#include "distributed.h"
#include "core/layout/unit_plan.h"

#include <optional>
#include <utility>

#include "optimizer.h"

namespace train_gpt {
namespace {

template <class Options>
tessera::ZeroOptions completed(tessera::ZeroOptions zero, const Gpt& model, const Options& options) {
  zero.groups = [matrices = matrix_names(*model), options](const tessera::ZeroOptions::Parameters& parameters) {
    return groups_of(parameters, matrices, options);
  };
  zero.fsdp.auto_wrap = tessera::wrap_modules<BlockImpl>();
  return zero;
}

}  // namespace

template <class Optimizer, class Options>
DistributedModel<Optimizer, Options>::DistributedModel(Gpt model, const Options& options,
                                                       std::shared_ptr<tessera::Communicator> comm,
                                                       tessera::ZeroOptions zero)
    : units_(tessera::internal::plan_units(*model, tessera::wrap_modules<BlockImpl>()).size()),
      zero_(model, options, std::move(comm), completed(std::move(zero), model, options)) {}

template <class Optimizer, class Options>
at::Tensor DistributedModel<Optimizer, Options>::forward(const at::Tensor& tokens) {
  return zero_(tokens);
}

template <class Optimizer, class Options>
at::Tensor DistributedModel<Optimizer, Options>::add_gradients(const Batch& batch, double scale, bool last_of_step) {
  std::optional<tessera::Scope> without_reduction;
  if (!last_of_step) without_reduction.emplace(zero_.no_sync());
  const auto loss = language_model_loss(zero_(batch.inputs), batch.targets);
  (loss * scale).backward();
  return loss.detach();
}

template <class Optimizer, class Options>
double DistributedModel<Optimizer, Options>::clip_grad_norm(double max_norm) {
  return zero_.clip_grad_norm_(max_norm);
}

template <class Optimizer, class Options>
void DistributedModel<Optimizer, Options>::step() {
  zero_.step();
}

template <class Optimizer, class Options>
void DistributedModel<Optimizer, Options>::zero_grad() {
  zero_.zero_grad();
}

template <class Optimizer, class Options>
MemoryUse DistributedModel<Optimizer, Options>::memory() const {
  const auto report = zero_.memory();
  return {.parameter_bytes = report.shard_bytes,
          .grad_bytes = report.grad_bytes,
          .optimizer_bytes = state_bytes(zero_.optimizer()),
          .peak_gathered_bytes = report.peak_gathered_bytes,
          .peak_bucket_bytes = report.peak_bucket_bytes};
}

template <class Optimizer, class Options>
std::optional<tessera::Scope> DistributedModel<Optimizer, Options>::averaged() {
  auto* averages = dynamic_cast<tessera::Averages*>(&zero_.optimizer());
  return averages != nullptr && averages->keeps_averages() ? std::optional<tessera::Scope>(averages->swap_in_averages())
                                                           : std::nullopt;
}

template <class Optimizer, class Options>
std::string DistributedModel<Optimizer, Options>::describe() const {
  const int ranks = zero_.comm()->size();
  const std::string over = std::to_string(ranks) + (ranks == 1 ? " rank" : " ranks");
  switch (zero_.stage()) {
    case 0:
      return "ddp: the whole state on each of " + over;
    case 1:
      return "oss: optimizer state split over " + over;
    case 2:
      return "sdp: optimizer state and gradients split over " + over;
    default:
      return "fsdp: " + std::to_string(units_) + " units, each split over " + over;
  }
}

template class DistributedModel<torch::optim::AdamW, torch::optim::AdamWOptions>;
template class DistributedModel<tessera::HostAdamW, torch::optim::AdamWOptions>;
template class DistributedModel<tessera::SGD, torch::optim::SGDOptions>;
template class DistributedModel<tessera::Lion, tessera::LionOptions>;
template class DistributedModel<tessera::Adafactor, tessera::AdafactorOptions>;
template class DistributedModel<tessera::Muon, tessera::MuonOptions>;
template class DistributedModel<tessera::AdamW8bit, tessera::AdamW8bitOptions>;
template class DistributedModel<tessera::ScheduleFreeAdamW, tessera::ScheduleFreeOptions>;
template class DistributedModel<tessera::Lamb, torch::optim::AdamWOptions>;

}  // namespace train_gpt
