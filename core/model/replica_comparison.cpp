#include "core/model/replica_comparison.h"

#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_real.h>

#include <charconv>
#include <cstdlib>
#include <stdexcept>
#include <string_view>

#include <tessera/host_results.h>
#include "core/runtime/dtypes.h"
#include "core/runtime/no_grad_no_inference_guard.h"

namespace tessera::internal {
namespace {

constexpr int64_t kDefaultSteps = 100;
constexpr char kWhat[] = "checksums of replicated parameters";

int64_t steps_between(int64_t every) {
  if (every < 0)
    throw std::invalid_argument("compare_replicas_every is " + std::to_string(every) + ", expected 0 (off) or more");
  return every > 0 ? every : steps_between_comparisons(std::getenv("TESSERA_DEBUG"));
}

}  // namespace

at::Tensor checksum(const at::Tensor& tensor) {
  const at::Tensor own = tensor.detach().resolve_conj().resolve_neg();
  const at::Tensor values = own.is_complex() ? at::view_as_real(own) : own;
  return values.view(bits_dtype(values.element_size())).sum(at::kLong);
}

ReplicaComparison::ReplicaComparison(int64_t every) : every_(steps_between(every)) {}

void ReplicaComparison::count_step(const std::vector<PlannedParameter>& parameters, Communicator& comm) {
  if (every_ == 0 || comm.size() == 1 || parameters.empty() || ++steps_ % every_ != 0) return;
  NoGradNoInferenceGuard quiet;
  std::vector<at::Tensor> sums;
  for (const PlannedParameter& parameter : parameters) sums.push_back(checksum(parameter.tensor));
  const at::Tensor all = gather_to_host(comm, at::stack(sums), kWhat);  // [ranks, parameters]
  const auto* values = all.const_data_ptr<int64_t>();
  const size_t count = parameters.size();
  for (size_t i = 0; i < count; ++i) {
    std::string ranks;
    for (size_t rank = 1; rank < static_cast<size_t>(comm.size()); ++rank)
      if (values[rank * count + i] != values[i]) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
    if (ranks.empty()) continue;
    throw std::runtime_error("replicas have drifted apart: in step " + std::to_string(steps_) + " parameter '" +
                             parameters[i].fqn + "' has other values on rank " + ranks +
                             " than on rank 0: change parameters alike on all ranks, with averaged gradients");
  }
}

int64_t steps_between_comparisons(const char* debug) {
  const std::string_view text = debug == nullptr ? "" : debug;
  constexpr std::string_view kReplicas = "replicas", kEvery = "replicas:";
  if (text.empty()) return 0;
  if (text == kReplicas) return kDefaultSteps;
  int64_t steps = 0;
  if (text.starts_with(kEvery)) {
    const auto [end, error] = std::from_chars(text.data() + kEvery.size(), text.data() + text.size(), steps);
    if (error == std::errc() && end == text.data() + text.size() && steps > 0) return steps;
  }
  throw std::invalid_argument("TESSERA_DEBUG is '" + std::string(text) +
                              "', expected 'replicas' or 'replicas:N', N steps from one comparison to the next");
}

}  // namespace tessera::internal
