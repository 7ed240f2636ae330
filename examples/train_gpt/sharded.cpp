#include "sharded.h"

#include <optional>
#include <utility>

namespace train_gpt {
namespace {

tessera::FsdpOptions with_block_units(tessera::FsdpOptions options) {
  options.auto_wrap = tessera::wrap_modules<BlockImpl>();
  return options;
}

}  // namespace

ShardedModel::ShardedModel(Gpt model, std::shared_ptr<tessera::Communicator> comm,
                           tessera::FsdpOptions options)
    : units_(tessera::plan_units(*model, tessera::wrap_modules<BlockImpl>()).size()),
      fsdp_(std::move(model), std::move(comm), with_block_units(std::move(options))) {}

at::Tensor ShardedModel::forward(const at::Tensor& tokens) { return fsdp_(tokens); }

at::Tensor ShardedModel::add_gradients(const Batch& batch, double scale, bool last_of_step) {
  std::optional<tessera::Scope> without_reduction;
  if (!last_of_step) without_reduction.emplace(fsdp_.no_sync());
  const auto loss = language_model_loss(fsdp_(batch.inputs), batch.targets);
  (loss * scale).backward();
  return loss.detach();
}

torch::OrderedDict<std::string, at::Tensor> ShardedModel::named_parameters() const {
  return fsdp_.named_parameters();
}

double ShardedModel::clip_grad_norm(double max_norm) { return fsdp_.clip_grad_norm_(max_norm); }

void ShardedModel::zero_grad() { fsdp_.zero_grad(); }

MemoryUse ShardedModel::memory() const {
  const auto report = fsdp_.memory();
  return {.parameter_bytes = report.shard_bytes,
          .grad_bytes = report.grad_bytes,
          .peak_gathered_bytes = report.peak_gathered_bytes,
          .peak_bucket_bytes = report.peak_bucket_bytes};
}

std::string ShardedModel::describe() const {
  return "fsdp: " + std::to_string(units_) + " units, each split over " +
         std::to_string(fsdp_.comm()->size()) + (fsdp_.comm()->size() == 1 ? " rank" : " ranks");
}

}  // namespace train_gpt
