#include <tessera/fsdp.h>

#include <stdexcept>
#include <unordered_map>

#include "fsdp/scheduler.h"

namespace tessera {
using namespace internal;

FullyShardedModule::FullyShardedModule(torch::nn::Module& module, std::shared_ptr<Communicator> comm,
                                       const FsdpOptions& options)
    : scheduler_(Scheduler::wrap(module, std::move(comm), options)) {}

ScopeExit FullyShardedModule::begin_forward() { return scheduler_->pre_forward(); }

void FullyShardedModule::end_forward() { scheduler_->post_forward(); }

std::optional<at::ScalarType> FullyShardedModule::input_dtype() const {
  const MixedPrecision& precision = scheduler_->model().options().mixed_precision;
  return precision.cast_forward_inputs && !scheduler_->shows_exact_values() ? precision.param_dtype : std::nullopt;
}

std::optional<at::ScalarType> FullyShardedModule::output_dtype() const {
  return scheduler_->model().options().mixed_precision.output_dtype;
}

void FullyShardedModule::refuse_output_dtype() {
  throw std::invalid_argument(
      "FsdpOptions::mixed_precision.output_dtype is set, but what the module's forward() returns is of a type in which "
      "no tensors are looked for: expected a tensor, or vectors, tuples, optionals or maps of tensors");
}

GradNorm FullyShardedModule::clip_grad_norm_on_device_(double max_norm, double norm_type, bool error_if_nonfinite) {
  return scheduler_->clip_grad_norm(max_norm, norm_type, error_if_nonfinite);
}

ScopeExit FullyShardedModule::on_gradients(Arrived arrived, Failed failed) {
  scheduler_->observe_gradients(std::move(arrived), std::move(failed));
  return ScopeExit([scheduler = scheduler_] { scheduler->observe_gradients(nullptr, nullptr); });
}

std::vector<at::Tensor> FullyShardedModule::parameters_with_gradients() const {
  std::vector<at::Tensor> parameters = this->parameters();
  std::erase_if(parameters, [](const at::Tensor& parameter) { return !parameter.grad().defined(); });
  return parameters;
}

ScopeExit FullyShardedModule::refuse_use(std::string reason) {
  scheduler_->refuse_use(std::move(reason));
  return ScopeExit([scheduler = scheduler_] { scheduler->refuse_use({}); });
}

BackwardPass& FullyShardedModule::backward_pass() const { return *scheduler_; }

ScopeExit FullyShardedModule::summon_full_params(SummonOptions options) {
  scheduler_->summon(options);
  return ScopeExit([scheduler = scheduler_, writeback = options.writeback] { scheduler->dismiss(writeback); });
}

torch::OrderedDict<std::string, at::Tensor> FullyShardedModule::full_state_dict(StateDictOptions options) {
  std::unordered_map<std::string, at::Tensor> by_name;
  scheduler_->visit_full_state(
      [&](const std::string& name, const std::vector<std::string>& aliases, const at::Tensor& tensor) {
        by_name[name] = tensor.clone();
        for (const std::string& alias : aliases) by_name[alias] = by_name[name];
      },
      options);
  torch::OrderedDict<std::string, at::Tensor> state;
  if (by_name.empty()) return state;
  // Inserts entries in the order of the module's own state dictionary.
  const torch::nn::Module& module = *scheduler_->model().module();
  for (const auto& entry : module.named_parameters()) state.insert(entry.key(), by_name.at(entry.key()));
  for (const auto& entry : defined_buffers(module)) state.insert(entry.key(), by_name.at(entry.key()));
  return state;
}

void FullyShardedModule::visit_full_state(const std::function<void(const std::string&, const at::Tensor&)>& visit,
                                          StateDictOptions options) {
  scheduler_->visit_full_state(
      [&](const std::string& name, const std::vector<std::string>& aliases, const at::Tensor& tensor) {
        visit(name, tensor);
        for (const std::string& alias : aliases) visit(alias, tensor);
      },
      options);
}

MemoryReport FullyShardedModule::memory() const { return scheduler_->memory(); }
void FullyShardedModule::reset_peak_memory() { scheduler_->reset_peak_memory(); }
std::string FullyShardedModule::describe() const { return scheduler_->describe(); }
const std::shared_ptr<Communicator>& FullyShardedModule::comm() const { return scheduler_->model().mesh().world; }
std::vector<NamedShard> FullyShardedModule::named_shards() const { return scheduler_->named_shards(); }
std::vector<ModelShards::HeldPart> FullyShardedModule::held_by(int rank) const {
  return scheduler_->model().held_by(rank);
}
std::vector<NamedShard> FullyShardedModule::shards_to_save() const {
  scheduler_->show_in_shards();
  return named_shards();
}
torch::OrderedDict<std::string, at::Tensor> FullyShardedModule::named_buffers() const {
  auto whole = defined_buffers(*scheduler_->model().module());
  for (const auto& parameter : scheduler_->model().ignored_parameters())
    whole.insert(parameter.key(), parameter.value());
  return whole;
}

}  // namespace tessera
