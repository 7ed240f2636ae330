#include "tessera/sdp/distributed_data_parallel.h"

#include <torch/nn/utils/clip_grad.h>

#include <cmath>
#include <optional>
#include <sstream>
#include <stdexcept>

#include "tessera/sdp/replicated_gradients.h"

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

std::optional<at::ScalarType> wire_dtype(GradientCompression compression) {
  switch (compression) {
    case GradientCompression::kFp16:
      return at::kHalf;
    case GradientCompression::kBf16:
      return at::kBFloat16;
    case GradientCompression::kNone:
      break;
  }
  return std::nullopt;
}

int64_t bytes_of_mb(double mb) { return static_cast<int64_t>(std::llround(mb * 1024 * 1024)); }

}  // namespace

DdpModule::DdpModule(torch::nn::Module& module, std::shared_ptr<Communicator> comm, const DdpOptions& options)
    : ReplicatedModule(module, std::move(comm),
                       {"DistributedDataParallel", describe(checked(options)), options.sync_module_states,
                        options.broadcast_buffers}) {
  ReplicatedOptions replicated;
  replicated.limits = {.alone_bytes = BucketLimits::kNone,
                       .bucket_bytes = bytes_of_mb(options.bucket_cap_mb),
                       .first_bytes = bytes_of_mb(options.first_bucket_mb)};
  replicated.wire_dtype = wire_dtype(options.compression);
  replicated.gradients_are_views = options.gradient_as_bucket_view;
  replicated.must_use_all = !options.find_unused_parameters && !options.static_graph;
  replicated.reducer.backend_all_reduce = options.backend_all_reduce;
  replicated.reducer.is_static = options.static_graph;
  replicated.reducer.in_flight = 1;  // each holds room for what the peers send
  reduce_gradients(nullptr, replicated);
}

GradNorm DdpModule::clip_grad_norm_on_device_(double max_norm, double norm_type, bool error_if_nonfinite) {
  if (!(max_norm >= 0) || !(norm_type > 0))
    throw std::invalid_argument("clip_grad_norm_: max_norm is " + std::to_string(max_norm) + " and norm_type " +
                                std::to_string(norm_type) + ", expected max_norm >= 0 and norm_type > 0");
  gradients().require_averages();
  return torch::nn::utils::clip_grad_norm_(parameters(), max_norm, norm_type, error_if_nonfinite);
}

}  // namespace tessera
