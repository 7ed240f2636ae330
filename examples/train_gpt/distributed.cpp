#include "distributed.h"

#include <optional>
#include <utility>

#include "optimizer.h"

namespace train_gpt {
namespace {

tessera::ZeroOptions completed(tessera::ZeroOptions zero, const Gpt& model, const torch::optim::AdamWOptions& options) {
  zero.groups = [matrices = matrix_names(*model), options](const tessera::ZeroOptions::Parameters& parameters) {
    return adamw_groups(parameters, matrices, options);
  };
  zero.fsdp.auto_wrap = tessera::wrap_modules<BlockImpl>();
  return zero;
}

}  // namespace

template <class AdamW>
DistributedModel<AdamW>::DistributedModel(Gpt model, const torch::optim::AdamWOptions& options,
                                          std::shared_ptr<tessera::Communicator> comm, tessera::ZeroOptions zero)
    : units_(tessera::plan_units(*model, tessera::wrap_modules<BlockImpl>()).size()),
      zero_(model, options, std::move(comm), completed(std::move(zero), model, options)) {}

template <class AdamW>
at::Tensor DistributedModel<AdamW>::forward(const at::Tensor& tokens) {
  return zero_(tokens);
}

template <class AdamW>
at::Tensor DistributedModel<AdamW>::add_gradients(const Batch& batch, double scale, bool last_of_step) {
  std::optional<tessera::Scope> without_reduction;
  if (!last_of_step) without_reduction.emplace(zero_.no_sync());
  const auto loss = language_model_loss(zero_(batch.inputs), batch.targets);
  (loss * scale).backward();
  return loss.detach();
}

template <class AdamW>
double DistributedModel<AdamW>::clip_grad_norm(double max_norm) {
  return zero_.clip_grad_norm_(max_norm);
}

template <class AdamW>
void DistributedModel<AdamW>::step() {
  zero_.step();
}

template <class AdamW>
void DistributedModel<AdamW>::zero_grad() {
  zero_.zero_grad();
}

template <class AdamW>
MemoryUse DistributedModel<AdamW>::memory() const {
  const auto report = zero_.memory();
  return {.parameter_bytes = report.shard_bytes,
          .grad_bytes = report.grad_bytes,
          .optimizer_bytes = state_bytes(zero_.optimizer()),
          .peak_gathered_bytes = report.peak_gathered_bytes,
          .peak_bucket_bytes = report.peak_bucket_bytes};
}

template <class AdamW>
std::string DistributedModel<AdamW>::describe() const {
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

template class DistributedModel<torch::optim::AdamW>;
template class DistributedModel<tessera::HostAdamW>;

}  // namespace train_gpt
