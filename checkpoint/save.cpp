#include "tessera/checkpoint/checkpoint.h"

#include <ATen/core/grad_mode.h>

#include <exception>

#include "tessera/checkpoint/commit.h"
#include "tessera/checkpoint/save_job.h"

namespace tessera {
namespace {

SavePlan plan_save(ModelShards& model, torch::optim::Optimizer* optimizer, const nlohmann::json& extra,
                   const SaveOptions& options) {
  const at::NoGradGuard no_grad;
  const auto shards = model.named_shards();
  const Communicator& comm = *model.comm();
  SavePlan plan{.extra = extra};
  std::optional<NamedOptimizer> named;
  if (optimizer != nullptr) {
    named.emplace(shards, *optimizer);
    plan.optimizer = local_optimizer(shards, *named);
  }
  plan.pieces = pieces_of(local_tensors(model, shards, named ? &*named : nullptr), comm.rank());
  if (options.rng) plan.rng = generator_states(comm.device());
  return plan;
}

void save(const std::filesystem::path& dir, ModelShards& model, torch::optim::Optimizer* optimizer,
          const nlohmann::json& extra, const SaveOptions& options) {
  SaveJob::begin(dir, model.comm(), options)->run([&] { return plan_save(model, optimizer, extra, options); });
}

PendingSave save_async(const std::filesystem::path& dir, ModelShards& model, torch::optim::Optimizer* optimizer,
                       const nlohmann::json& extra, const SaveOptions& options) {
  auto job = SaveJob::begin(dir, model.comm(), options);
  job->start([&] { return plan_save(model, optimizer, extra, options); });
  return PendingSave(std::move(job));
}

}  // namespace

void save_checkpoint(const std::filesystem::path& dir, ModelShards& model, torch::optim::Optimizer& optimizer,
                     const nlohmann::json& extra, const SaveOptions& options) {
  save(dir, model, &optimizer, extra, options);
}

void save_checkpoint(const std::filesystem::path& dir, ModelShards& model, const nlohmann::json& extra,
                     const SaveOptions& options) {
  save(dir, model, nullptr, extra, options);
}

PendingSave save_checkpoint_async(const std::filesystem::path& dir, ModelShards& model,
                                  torch::optim::Optimizer& optimizer, const nlohmann::json& extra,
                                  const SaveOptions& options) {
  return save_async(dir, model, &optimizer, extra, options);
}

PendingSave save_checkpoint_async(const std::filesystem::path& dir, ModelShards& model, const nlohmann::json& extra,
                                  const SaveOptions& options) {
  return save_async(dir, model, nullptr, extra, options);
}

PendingSave::PendingSave(std::shared_ptr<SaveJob> job) : job_(std::move(job)) {}
PendingSave::PendingSave(PendingSave&&) noexcept = default;
PendingSave& PendingSave::operator=(PendingSave&&) noexcept = default;
PendingSave::~PendingSave() {
  if (job_ && std::uncaught_exceptions() > 0) job_->cancel();
}
bool PendingSave::done() const { return !job_ || job_->done(); }
void PendingSave::wait() {
  if (job_) job_->wait();
}

std::optional<std::filesystem::path> latest_checkpoint(const std::filesystem::path& folder) {
  const auto all = complete_checkpoints(folder);
  if (all.empty()) return std::nullopt;
  return all.back();
}

}  // namespace tessera
