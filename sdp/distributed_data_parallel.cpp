#include "tessera/sdp/distributed_data_parallel.h"

#include <c10/core/GradMode.h>
#include <torch/nn/utils/clip_grad.h>

#include <algorithm>
#include <sstream>
#include <stdexcept>

#include "tessera/sdp/ddp_reducer.h"

namespace tessera {
namespace {

std::string describe(const DdpOptions& options) {
  std::ostringstream text;
  text << "bucket_cap_mb=" << options.bucket_cap_mb << " first_bucket_mb=" << options.first_bucket_mb
       << " find_unused_parameters=" << options.find_unused_parameters << " static_graph=" << options.static_graph
       << " broadcast_buffers=" << options.broadcast_buffers << " sync_module_states=" << options.sync_module_states
       << " compression=" << static_cast<int>(options.compression)
       << " backend_all_reduce=" << options.backend_all_reduce;
  return text.str();
}

const DdpOptions& checked(const DdpOptions& options) {
  if (!(options.bucket_cap_mb > 0) || !(options.first_bucket_mb > 0))
    throw std::invalid_argument("DdpOptions: bucket_cap_mb is " + std::to_string(options.bucket_cap_mb) +
                                " and first_bucket_mb " + std::to_string(options.first_bucket_mb) +
                                ", expected more than 0");
  return options;
}

}  // namespace

DdpModule::DdpModule(torch::nn::Module& module, std::shared_ptr<Communicator> comm, const DdpOptions& options)
    : ReplicatedModule(module, std::move(comm), "DistributedDataParallel", describe(checked(options)),
                       options.sync_module_states),
      options_(options) {}

DdpModule::~DdpModule() = default;

Scope DdpModule::no_sync() {
  const bool before = std::exchange(*sync_, false);
  return Scope([sync = sync_, before] { *sync = before; });
}

double DdpModule::clip_grad_norm_(double max_norm, double norm_type, bool error_if_nonfinite) {
  if (!(max_norm >= 0) || !(norm_type > 0))
    throw std::invalid_argument("clip_grad_norm_: max_norm is " + std::to_string(max_norm) + " and norm_type " +
                                std::to_string(norm_type) + ", expected max_norm >= 0 and norm_type > 0");
  return torch::nn::utils::clip_grad_norm_(parameters(), max_norm, norm_type, error_if_nonfinite);
}

MemoryReport DdpModule::memory() const {
  MemoryReport report = memory_of_replica();
  if (reducer_ && !options_.gradient_as_bucket_view)
    for (const PlannedParameter& parameter : planned_parameters())
      if (parameter.tensor.requires_grad()) report.bucket_bytes += static_cast<int64_t>(parameter.tensor.nbytes());
  report.peak_bucket_bytes = report.bucket_bytes;
  report.device_bytes += report.bucket_bytes;
  return report;
}

void DdpModule::begin_forward() {
  trace_forward_begins();
  const bool trains = c10::GradMode::is_enabled() && *sync_ &&
                      std::any_of(planned_parameters().begin(), planned_parameters().end(),
                                  [](const PlannedParameter& parameter) { return parameter.tensor.requires_grad(); });
  if (trains && !reducer_) reducer_ = std::make_unique<DdpReducer>(planned_parameters(), comm(), options_);
  if (trains) reducer_->begin_forward();
  if (last_forward_synced_ && options_.broadcast_buffers && has_buffers()) broadcast_buffers();
}

void DdpModule::end_forward(const std::vector<at::Tensor>& tensors, bool complete) {
  trace_forward_ends(tensors);
  last_forward_synced_ = c10::GradMode::is_enabled() && *sync_ && reducer_;
  if (!last_forward_synced_) return;
  if (!complete && (options_.find_unused_parameters || options_.static_graph))
    throw std::invalid_argument(
        "DistributedDataParallel with find_unused_parameters or static_graph: what the module's forward returns is of "
        "a type whose tensors cannot be found; return a tensor, or tuples, vectors or maps of them, or teach the type "
        "(tessera/flat/visit_tensors.h)");
  reducer_->expect_backward(tensors);
}

}  // namespace tessera
