#include "core/model/module_state.h"

#include <ATen/ops/cat.h>

#include <map>
#include <utility>

#include "core/layout/shardable.h"
#include "core/model/replica_comparison.h"
#include "core/paging/residency.h"
#include "core/runtime/lazy_values.h"
#include "core/runtime/no_grad_no_inference_guard.h"

namespace tessera::internal {
namespace {

// Tensors below this size are sent together, because the cost of a small message does not depend on its length.
constexpr int64_t kSmallBytes = 1 << 20;

bool is_expanded(const at::Tensor& tensor, int64_t dim) { return tensor.stride(dim) == 0 && tensor.size(dim) > 1; }

// Returns a view without the repeated elements of expanded dimensions, because an expanded tensor cannot be written.
at::Tensor distinct_elements(at::Tensor tensor) {
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    if (is_expanded(tensor, dim)) tensor = tensor.narrow(dim, 0, 1);
  return tensor;
}

}  // namespace

torch::OrderedDict<std::string, at::Tensor> parameters_by_name(const torch::nn::Module& module) {
  torch::OrderedDict<std::string, at::Tensor> parameters;
  for (const PlannedParameter& parameter : registered_parameters(module))
    parameters.insert(parameter.fqn, parameter.tensor);
  return parameters;
}

void broadcast_tensors(const std::vector<at::Tensor>& tensors, Communicator& comm, std::string_view what) {
  if (comm.size() == 1) return;
  const NoGradNoInferenceGuard quiet;
  std::map<at::ScalarType, std::vector<at::Tensor>> small;
  std::vector<Pending> pending;
  for (const at::Tensor& given : tensors) {
    if (!given.defined() || given.numel() == 0) continue;
    const at::Tensor tensor = distinct_elements(given.data());  // writes to data() keep autograd's saved tensors valid
    if (static_cast<int64_t>(tensor.nbytes()) >= kSmallBytes && tensor.is_contiguous() && !has_lazy_values(tensor) &&
        tensor.device() == comm.device()) {
      pending.push_back(comm.broadcast(tensor.view({-1}).view(at::kByte), 0, what));  // as bytes: any dtype can be sent
    } else {
      small[tensor.scalar_type()].push_back(tensor);
    }
  }
  for (auto& [dtype, members] : small) {
    std::vector<at::Tensor> pieces;
    for (const at::Tensor& member : members)
      pieces.push_back(member.reshape({-1}).to(comm.device()).resolve_conj().resolve_neg());
    const at::Tensor flat = at::cat(pieces);
    comm.broadcast(flat.view(at::kByte), 0, what).wait();
    int64_t offset = 0;
    for (at::Tensor& member : members) {
      const WritesTo scope(member);
      member.copy_(flat.narrow(0, offset, member.numel()).view(member.sizes()));
      offset += member.numel();
    }
  }
  for (Pending& operation : pending) operation.wait();
}

std::vector<PlannedParameter> registered_parameters(const torch::nn::Module& module) {
  auto units = plan_units(module, {});
  return units.empty() ? std::vector<PlannedParameter>() : std::move(units[0].parameters);
}

std::vector<std::string> describe_parameters(const std::vector<PlannedParameter>& parameters) {
  std::vector<std::string> lines;
  for (const PlannedParameter& parameter : parameters) {
    const at::Tensor& tensor = parameter.tensor;
    lines.push_back(c10::str("parameter '", parameter.fqn, "' ", tensor.scalar_type(), " ", tensor.sizes(),
                             tensor.is_contiguous() ? "" : " not contiguous", tensor.requires_grad() ? "" : " frozen",
                             parameter.full_precision ? " full precision" : ""));
    for (const std::string& alias : parameter.aliases) lines.back() += " = '" + alias + "'";
  }
  return lines;
}

std::vector<std::string> describe_buffers(const torch::nn::Module& module) {
  std::vector<std::string> lines;
  for (const auto& buffer : module.named_buffers()) {
    lines.push_back("buffer '" + buffer.key() + "' ");
    if (!buffer.value().defined()) continue;
    require_strided("buffer '" + buffer.key() + "'", buffer.value());
    lines.back() += c10::str(buffer.value().scalar_type(), " ", buffer.value().sizes());
    for (int64_t dim = 0; dim < buffer.value().dim(); ++dim)
      if (is_expanded(buffer.value(), dim)) lines.back() += c10::str(" expanded in dimension ", dim);
  }
  return lines;
}

bool is_earlier_gradient(const at::Tensor& grad) { return grad.defined() && !is_paged(grad); }  // excludes placeholders

std::vector<std::string> describe_earlier_gradients(const std::vector<PlannedParameter>& parameters) {
  const NoGradNoInferenceGuard quiet;
  std::vector<std::string> lines;
  for (const PlannedParameter& parameter : parameters) {
    const at::Tensor& grad = parameter.tensor.grad();
    if (!is_earlier_gradient(grad)) continue;
    const auto sum = checksum(grad.is_sparse() ? grad.to_dense() : grad).item<int64_t>();
    lines.push_back("a gradient of '" + parameter.fqn + "' with the checksum " + std::to_string(sum));
  }
  return lines;
}

}  // namespace tessera::internal
