#include <tessera/detail/replicated_module.h>

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>

#include <map>
#include <stdexcept>

#include <tessera/host_results.h>
#include "core/layout/shardable.h"
#include "core/model/module_state.h"
#include "core/paging/residency.h"
#include "core/trace/ranges.h"
#include "core/trace/trace.h"
#include "sdp/replicated/replicated_gradients.h"

namespace tessera {
using namespace internal;
ReplicatedModule::ReplicatedModule(torch::nn::Module& module, std::shared_ptr<Communicator> comm, Setup setup)
    : module_(module.shared_from_this()),
      comm_(std::move(comm)),
      setup_(std::move(setup)),
      parameters_(registered_parameters(module)) {
  if (!comm_) throw std::invalid_argument(setup_.wrapper + ": the communicator is null");
  require_shardable(parameters_, *comm_, setup_.wrapper);
  std::vector<std::string> lines{"options: " + setup_.options};
  for (auto& line : describe_parameters(parameters_)) lines.push_back(std::move(line));
  for (auto& line : describe_buffers(module)) lines.push_back(std::move(line));
  if (setup_.compares_gradients)
    for (auto& line : describe_earlier_gradients(parameters_)) lines.push_back(std::move(line));
  require_agreement(*comm_, "the module given to " + setup_.wrapper, lines);
  if (!setup_.sync_module_states) return;
  broadcast_tensors(parameters(), *comm_, "the module's parameters");
  broadcast_buffers();
}

ReplicatedModule::~ReplicatedModule() = default;

void ReplicatedModule::reduce_gradients(std::function<int(const PlannedParameter&)> owner_of,
                                        const ReplicatedOptions& options) {
  gradients_ = ReplicatedGradients::make(module_, parameters_, comm_, setup_.wrapper, std::move(owner_of), options);
}

BackwardPass& ReplicatedModule::backward_pass() const { return *gradients_; }

// ---- forward ------------------------------------------------------------------------------------

ScopeExit ReplicatedModule::begin_forward() {
  auto call = std::make_shared<BackwardPass::UserCall>(*gradients_, "forward()");
  if (Trace::active() != nullptr) forward_since_ = Trace::Clock::now();
  if (gradients_->begin_forward() && setup_.broadcast_buffers && named_buffers().size() > 0) broadcast_buffers();
  if (RangeSink::active() == nullptr) return ScopeExit([call] {});
  auto range = std::make_shared<OpenRange>();
  range->begin([] { return std::string("forward"); });
  return ScopeExit([call, range] { range->end(); });
}

void ReplicatedModule::end_forward(const std::vector<at::Tensor>& outputs) {
  if (Trace::active() != nullptr || RangeSink::active() != nullptr) trace_passes(outputs);
  gradients_->end_forward(outputs);
  if (!c10::GradMode::is_enabled()) comm_->throw_if_aborted("forward()");
}

// ---- calls by the user ---------------------------------------------------------------------------

torch::OrderedDict<std::string, at::Tensor> ReplicatedModule::named_buffers() const {
  return defined_buffers(*module_);
}

void ReplicatedModule::broadcast_buffers() {
  std::vector<at::Tensor> tensors;
  for (const auto& buffer : named_buffers()) tensors.push_back(buffer.value());
  broadcast_tensors(tensors, *comm_, "the module's buffers");
}

torch::OrderedDict<std::string, at::Tensor> ReplicatedModule::full_state_dict() const {
  at::NoGradGuard no_grad;
  comm_->throw_if_aborted("full_state_dict");           // throws if the last step's collectives were aborted
  std::map<const c10::TensorImpl*, at::Tensor> copies;  // one copy of each tensor, so that tied parameters stay tied
  torch::OrderedDict<std::string, at::Tensor> state;
  for (const auto& parameter : module_->named_parameters()) {
    if (!parameter.value().defined()) continue;
    at::Tensor& copy = copies[parameter.value().unsafeGetTensorImpl()];
    if (!copy.defined()) copy = parameter.value().detach().clone();
    state.insert(parameter.key(), copy);
  }
  for (const auto& buffer : named_buffers()) state.insert(buffer.key(), buffer.value().detach().clone());
  return state;
}

std::vector<NamedShard> ReplicatedModule::named_shards() const {
  std::vector<NamedShard> shards;
  for (const PlannedParameter& parameter : parameters_) {
    const at::Tensor& tensor = parameter.tensor;
    shards.push_back({parameter.fqn, parameter.aliases, tensor.sizes().vec(), tensor.strides().vec(),
                      Range{0, tensor.numel()}, tensor, comm_->rank(), comm_->size()});
  }
  return shards;
}

std::vector<NamedShard> ReplicatedModule::shards_to_save() const {
  gradients_->require_nothing_new();
  return named_shards();
}

MemoryReport ReplicatedModule::memory() const {
  MemoryReport report;
  for (const PlannedParameter& parameter : parameters_) {
    report.shard_bytes += static_cast<int64_t>(parameter.tensor.nbytes());
    if (const at::Tensor gradient = parameter.tensor.grad();
        gradient.defined() && !is_paged(gradient))  // excludes placeholders
      report.grad_bytes += static_cast<int64_t>(gradient.nbytes());
  }
  report.unsharded_bytes = report.shard_bytes;
  gradients_->report(report);
  report.device_bytes = report.shard_bytes + report.grad_bytes + report.bucket_bytes;
  return report;
}

void ReplicatedModule::reset_peak_memory() { gradients_->reset_peak(); }

void ReplicatedModule::trace_passes(const std::vector<at::Tensor>& outputs) const {
  Trace* const trace = Trace::active();
  if (trace != nullptr) trace->add(SpanKind::kCompute, "forward", nullptr, forward_since_, Trace::Clock::now());
  if (!c10::GradMode::is_enabled()) return;
  // The range of a running backward, which the engine's callbacks own: if backward fails, they are destroyed.
  auto running = std::make_shared<std::weak_ptr<OpenRange>>();
  for (const at::Tensor& output : outputs) {
    if (!output.requires_grad() || output.is_leaf()) continue;
    output.register_hook([trace, running](const at::Tensor&) {
      if (!running->expired()) return;
      auto range = std::make_shared<OpenRange>();
      range->begin([] { return std::string("backward"); });
      *running = range;
      // The span must include other code's callbacks. So this callback queues a second one, which runs after them.
      auto& engine = torch::autograd::Engine::get_default_engine();
      engine.queue_callback([&engine, trace, range, since = Trace::Clock::now()] {
        engine.queue_callback([trace, range, since] {
          range->end();
          if (trace != nullptr) trace->add(SpanKind::kCompute, "backward", nullptr, since, Trace::Clock::now());
        });
      });
    });
  }
}

}  // namespace tessera
