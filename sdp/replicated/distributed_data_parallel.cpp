#include <tessera/ddp.h>

#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/stack.h>
#include <c10/core/GradMode.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "core/comm/library_collectives.h"
#include "core/model/shard_norm.h"
#include "core/runtime/lazy_values.h"
#include "core/runtime/require.h"
#include "sdp/replicated/replicated_gradients.h"

namespace tessera::internal {
namespace {

std::string describe(const DdpOptions& options) {
  return c10::str("bucket_bytes=", options.bucket_bytes, " first_bucket_bytes=", options.first_bucket_bytes,
                  " find_unused_parameters=", options.find_unused_parameters, " static_graph=", options.static_graph,
                  " broadcast_buffers=", options.broadcast_buffers, " sync_module_states=", options.sync_module_states,
                  " compression=", static_cast<int>(options.compression),
                  " backend_all_reduce=", options.backend_all_reduce, " zero_copy_bytes=", options.zero_copy_bytes,
                  " compare_replicas_every=", ReplicaComparison(options.compare_replicas_every).every());
}

// Clips like torch::nn::utils::clip_grad_norm_. On CPUs, calls the same operators, for bit-equal results. On CUDA,
// launches a few kernels for all gradients, and leaves the norm on the device. If error_if_nonfinite, throws as
// require_finite_norm() does. `gradients` must have at least one tensor, and no tensor without elements.
GradNorm clip(const std::vector<at::Tensor>& gradients, double max_norm, double norm_type, bool error_if_nonfinite,
              int rank) {
  const bool is_largest = norm_type == std::numeric_limits<double>::infinity();
  const bool are_together = gradients[0].is_cuda() && std::ranges::all_of(gradients, [&](const at::Tensor& gradient) {
                              return gradient.device() == gradients[0].device() && !has_lazy_values(gradient);
                            });
  std::vector<at::Tensor> norms;
  if (are_together) {
    norms = at::_foreach_norm(gradients, norm_type);
  } else {
    for (const at::Tensor& gradient : gradients)
      norms.push_back(is_largest ? gradient.abs().max() : gradient.norm(norm_type));
  }
  at::Tensor norm = norms[0];
  if (norms.size() > 1) norm = is_largest ? at::stack(norms).max() : at::stack(norms).norm(norm_type);
  if (error_if_nonfinite) require_finite_norm(norm.item<double>(), rank);
  const at::Tensor factor = at::clamp(max_norm / (norm + 1e-6), std::nullopt, 1.0);
  if (are_together) {
    at::_foreach_mul_(gradients, factor);
    return GradNorm(norm);
  }
  for (const at::Tensor& gradient : gradients) gradient.mul_(factor);
  return {norm.item<double>()};
}

const DdpOptions& checked(const DdpOptions& options) {
  require(options.bucket_bytes > 0 && options.first_bucket_bytes > 0, "DdpOptions: bucket_bytes is ",
          options.bucket_bytes, " and first_bucket_bytes ", options.first_bucket_bytes, ", expected more than 0");
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

// A gradient that is reduced in autograd's memory needs its own bucket. If it has fewer bytes than this, the additional
// message costs more than the avoided copy.
constexpr int64_t kLeastAdoptedBytes = int64_t{2} << 20;

}  // namespace

DdpModule::DdpModule(torch::nn::Module& module, std::shared_ptr<Communicator> comm, const DdpOptions& options)
    : ReplicatedModule(module, std::move(comm),
                       {"DistributedDataParallel", describe(checked(options)), options.sync_module_states,
                        options.broadcast_buffers, /*compares_gradients=*/true}) {
  ReplicatedOptions replicated;
  replicated.wire_dtype = wire_dtype(options.compression);
  const bool adopts_gradients = !replicated.wire_dtype && !options.backend_all_reduce &&
                                this->comm()->device().is_cpu() && exchanges_pieces(*this->comm());
  replicated.limits = {.alone_bytes = adopts_gradients ? kLeastAdoptedBytes : BucketLimits::kNone,
                       .bucket_bytes = options.bucket_bytes,
                       .first_bytes = options.first_bucket_bytes};
  replicated.compare_replicas_every = options.compare_replicas_every;
  replicated.gradients_are_views = options.gradient_as_bucket_view;
  replicated.must_use_all = !options.find_unused_parameters && !options.static_graph;
  replicated.reducer.backend_all_reduce = options.backend_all_reduce;
  replicated.reducer.is_static = options.static_graph;
  replicated.reducer.zero_copy_bytes = options.zero_copy_bytes;
  replicated.reducer.in_flight = 1;  // each further reduction in flight would hold a buffer for the peers' data
  reduce_gradients(nullptr, replicated);
}

GradNorm DdpModule::clip_grad_norm_on_device_(double max_norm, double norm_type, bool error_if_nonfinite) {
  require_clip_arguments(max_norm, norm_type);
  gradients().require_averages();
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> present;
  for (const at::Tensor& parameter : parameters())
    if (parameter.grad().defined() && parameter.grad().numel() > 0) present.push_back(parameter.grad().detach());
  return present.empty() ? GradNorm(0.0) : clip(present, max_norm, norm_type, error_if_nonfinite, comm()->rank());
}

}  // namespace tessera::internal
