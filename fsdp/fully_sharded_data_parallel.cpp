#include "tessera/fsdp/fully_sharded_data_parallel.h"

#include <stdexcept>

#include "tessera/fsdp/fsdp_runtime.h"

namespace tessera {

FullyShardedModule::FullyShardedModule(torch::nn::Module& module, std::shared_ptr<Communicator> comm,
                                       const FsdpOptions& options)
    : runtime_(FsdpRuntime::wrap(module, std::move(comm), options)) {}

void FullyShardedModule::begin_forward() { runtime_->begin_forward(); }

std::optional<at::ScalarType> FullyShardedModule::input_dtype() const {
  const MixedPrecision& precision = runtime_->precision();
  return precision.cast_forward_inputs ? precision.param_dtype : std::nullopt;
}

std::optional<at::ScalarType> FullyShardedModule::output_dtype() const { return runtime_->precision().output_dtype; }

void FullyShardedModule::refuse_output_dtype() {
  throw std::invalid_argument(
      "FsdpOptions::mixed_precision.output_dtype is set, but what the module's forward() returns is of a type in which "
      "no tensors are looked for: expected a tensor, or vectors, tuples, optionals or maps of tensors");
}

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

Scope FullyShardedModule::on_gradients(Arrived arrived) {
  runtime_->observe_gradients(std::move(arrived));
  return Scope([runtime = runtime_] { runtime->observe_gradients(nullptr); });
}

Scope FullyShardedModule::no_sync() {
  const bool before = runtime_->sync();
  runtime_->set_sync(false);
  return Scope([runtime = runtime_, before] { runtime->set_sync(before); });
}

Scope FullyShardedModule::summon_full_params(SummonOptions options) {
  runtime_->summon(options);
  return Scope([runtime = runtime_, writeback = options.writeback] { runtime->dismiss(writeback); });
}

torch::OrderedDict<std::string, at::Tensor> FullyShardedModule::full_state_dict(StateDictOptions options) {
  return runtime_->full_state_dict(options);
}

void FullyShardedModule::visit_full_state(const std::function<void(const std::string&, const at::Tensor&)>& visit,
                                          StateDictOptions options) {
  runtime_->visit_full_state(
      [&](const std::string& name, const std::vector<std::string>& aliases, const at::Tensor& tensor) {
        visit(name, tensor);
        for (const std::string& alias : aliases) visit(alias, tensor);
      },
      options);
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
torch::OrderedDict<std::string, at::Tensor> FullyShardedModule::named_buffers() const {
  return runtime_->named_buffers();
}

}  // namespace tessera
