#include "tessera/fsdp/fully_sharded_data_parallel.h"

#include "tessera/fsdp/fsdp_runtime.h"

namespace tessera {

FullyShardedModule::FullyShardedModule(torch::nn::Module& module, std::shared_ptr<Communicator> comm,
                                       const FsdpOptions& options)
    : runtime_(FsdpRuntime::wrap(module, std::move(comm), options)) {}

void FullyShardedModule::begin_forward() { runtime_->begin_forward(); }

std::vector<at::Tensor> FullyShardedModule::parameters() const {
  std::vector<at::Tensor> shards;
  for (const NamedShard& shard : runtime_->named_shards()) shards.push_back(shard.tensor);
  return shards;
}

torch::OrderedDict<std::string, at::Tensor> FullyShardedModule::named_parameters() const {
  torch::OrderedDict<std::string, at::Tensor> shards;
  for (const NamedShard& shard : runtime_->named_shards()) shards.insert(shard.fqn, shard.tensor);
  return shards;
}

double FullyShardedModule::clip_grad_norm_(double max_norm, double norm_type, bool error_if_nonfinite) {
  return runtime_->clip_grad_norm(max_norm, norm_type, error_if_nonfinite);
}

Scope FullyShardedModule::no_sync() {
  const bool before = runtime_->sync();
  runtime_->set_sync(false);
  return Scope([runtime = runtime_, before] { runtime->set_sync(before); });
}

Scope FullyShardedModule::summon_full_params(SummonOptions options) {
  runtime_->summon();
  return Scope([runtime = runtime_, options] { runtime->dismiss(options.writeback); });
}

torch::OrderedDict<std::string, at::Tensor> FullyShardedModule::full_state_dict(StateDictOptions options) {
  return runtime_->full_state_dict(options.rank0_only);
}

void FullyShardedModule::zero_grad(bool set_to_none) {
  at::NoGradGuard no_grad;
  for (const NamedShard& shard : runtime_->named_shards()) {
    at::Tensor parameter = shard.tensor;
    if (!parameter.grad().defined()) continue;
    if (set_to_none) {
      parameter.mutable_grad().reset();
    } else {
      parameter.mutable_grad().zero_();
    }
  }
}

MemoryReport FullyShardedModule::memory() const { return runtime_->memory(); }
void FullyShardedModule::reset_peak_memory() { runtime_->reset_peak_memory(); }
std::string FullyShardedModule::describe() const { return runtime_->describe(); }
const std::shared_ptr<Communicator>& FullyShardedModule::comm() const { return runtime_->comm(); }
std::vector<NamedShard> FullyShardedModule::named_shards() const { return runtime_->named_shards(); }
torch::OrderedDict<std::string, at::Tensor> FullyShardedModule::named_buffers() const { return runtime_->named_buffers(); }

}  // namespace tessera
