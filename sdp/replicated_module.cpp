#include "tessera/sdp/replicated_module.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>

#include <map>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "tessera/comm/agreement.h"
#include "tessera/flat/module_sync.h"

namespace tessera {
namespace {

void check_parameter(const PlannedParameter& parameter, const Communicator& comm, const std::string& wrapper) {
  std::ostringstream problem;
  const at::Tensor& tensor = parameter.tensor;
  if (tensor.layout() != at::kStrided) {
    problem << "has layout " << tensor.layout() << ", expected a dense one";
  } else if (tensor.device() != comm.device()) {
    problem << "is on " << tensor.device() << ", expected the communicator's device, " << comm.device();
  } else if (!tensor.is_leaf()) {
    problem << "is the result of an operation, expected a leaf";
  } else if (tensor.numel() > 0 && tensor.storage().nbytes() == 0) {
    problem << "has no data: it is sharded by another wrapper";
  }
  if (!problem.str().empty())
    throw std::invalid_argument(wrapper + ": parameter '" + parameter.fqn + "' on rank " + std::to_string(comm.rank()) +
                                " " + problem.str());
}

}  // namespace

ReplicatedModule::ReplicatedModule(torch::nn::Module& module, std::shared_ptr<Communicator> comm,
                                   const std::string& wrapper, const std::string& options, bool sync)
    : module_(module.shared_from_this()), comm_(std::move(comm)), parameters_(registered_parameters(module)) {
  if (!comm_) throw std::invalid_argument(wrapper + ": the communicator is null");
  for (const PlannedParameter& parameter : parameters_) check_parameter(parameter, *comm_, wrapper);
  std::vector<std::string> lines{"options: " + options};
  for (auto& line : describe_parameters(parameters_)) lines.push_back(std::move(line));
  for (auto& line : describe_buffers(module)) lines.push_back(std::move(line));
  require_agreement(*comm_, "the module given to " + wrapper, lines);
  if (!sync) return;
  broadcast_tensors(parameters(), *comm_, "the module's parameters");
  broadcast_buffers();
}

std::vector<at::Tensor> ReplicatedModule::parameters() const {
  std::vector<at::Tensor> tensors;
  for (const PlannedParameter& parameter : parameters_) tensors.push_back(parameter.tensor);
  return tensors;
}

torch::OrderedDict<std::string, at::Tensor> ReplicatedModule::named_parameters() const {
  torch::OrderedDict<std::string, at::Tensor> tensors;
  for (const PlannedParameter& parameter : parameters_) tensors.insert(parameter.fqn, parameter.tensor);
  return tensors;
}

torch::OrderedDict<std::string, at::Tensor> ReplicatedModule::named_buffers() const {
  torch::OrderedDict<std::string, at::Tensor> buffers;
  for (const auto& buffer : module_->named_buffers())
    if (buffer.value().defined()) buffers.insert(buffer.key(), buffer.value());
  return buffers;
}

bool ReplicatedModule::has_buffers() const { return named_buffers().size() > 0; }

void ReplicatedModule::broadcast_buffers() {
  std::vector<at::Tensor> tensors;
  for (const auto& buffer : named_buffers()) tensors.push_back(buffer.value());
  broadcast_tensors(tensors, *comm_, "the module's buffers");
}

torch::OrderedDict<std::string, at::Tensor> ReplicatedModule::full_state_dict() const {
  at::NoGradGuard no_grad;
  std::map<const c10::TensorImpl*, at::Tensor> copies;  // tied parameters stay one tensor
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

void ReplicatedModule::zero_grad(bool set_to_none) {
  at::NoGradGuard no_grad;
  for (at::Tensor parameter : parameters()) {
    if (!parameter.grad().defined()) continue;
    if (set_to_none) {
      parameter.mutable_grad().reset();
    } else {
      parameter.mutable_grad().zero_();
    }
  }
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

MemoryReport ReplicatedModule::memory_of_replica() const {
  MemoryReport report;
  for (const PlannedParameter& parameter : parameters_) {
    report.shard_bytes += static_cast<int64_t>(parameter.tensor.nbytes());
    if (parameter.tensor.grad().defined()) report.grad_bytes += static_cast<int64_t>(parameter.tensor.grad().nbytes());
  }
  report.unsharded_bytes = report.shard_bytes;
  report.device_bytes = report.shard_bytes + report.grad_bytes;
  return report;
}

void ReplicatedModule::trace_passes(const std::vector<at::Tensor>& outputs) const {
  Trace::active()->add(SpanKind::kCompute, "forward", nullptr, forward_since_, Trace::Clock::now());
  if (!c10::GradMode::is_enabled()) return;
  auto begun = std::make_shared<bool>(false);
  for (const at::Tensor& output : outputs) {
    if (!output.requires_grad()) continue;
    output.register_hook([begun](const at::Tensor&) {
      if (std::exchange(*begun, true)) return;
      // What others have queued for the end of backward belongs to it: so this queues up once more, last.
      auto& engine = torch::autograd::Engine::get_default_engine();
      engine.queue_callback([&engine, since = Trace::Clock::now()] {
        engine.queue_callback(
            [since] { Trace::active()->add(SpanKind::kCompute, "backward", nullptr, since, Trace::Clock::now()); });
      });
    });
  }
}

}  // namespace tessera
