#include <tessera/model/data_parallel.h>

#include <ATen/ops/empty.h>

#include <stdexcept>

#include <tessera/host_results.h>
#include "core/gradients/backward_pass.h"

namespace tessera {
using namespace internal;

torch::OrderedDict<std::string, at::Tensor> defined_buffers(const torch::nn::Module& module) {
  torch::OrderedDict<std::string, at::Tensor> buffers;
  for (const auto& buffer : module.named_buffers())
    if (buffer.value().defined()) buffers.insert(buffer.key(), buffer.value());
  return buffers;
}

ScopeExit DataParallel::no_sync() { return backward_pass().no_sync(); }

void DataParallel::set_gradient_divide_factor(double factor) {
  require_outside_backward("set_gradient_divide_factor");
  if (!(factor > 0))
    throw std::invalid_argument("set_gradient_divide_factor: got " + std::to_string(factor) + ", expected more than 0");
  backward_pass().set_divisor(factor);
}

int64_t DataParallel::divide_gradients_by_sum(int64_t own) {
  require_outside_backward("divide_gradients_by_sum");
  // Also sums the number of ranks that passed a negative number, so that all ranks throw.
  const at::Tensor own_counts = at::empty({2}, at::TensorOptions(at::kCPU).dtype(at::kLong));
  own_counts[0].fill_(own);
  own_counts[1].fill_(own < 0 ? 1 : 0);
  const at::Tensor sums = reduce_to_host(*comm(), own_counts, ReduceOp::kSum, "what gradients are divided by");
  const int64_t total = sums[0].item<int64_t>();
  if (sums[1].item<int64_t>() > 0 || total == 0)
    throw std::invalid_argument("divide_gradients_by_sum on rank " + std::to_string(comm()->rank()) + ": got " +
                                std::to_string(own) + ", " + std::to_string(total) +
                                " over all ranks, expected 0 or more on each and more than 0 in all");
  set_gradient_divide_factor(static_cast<double>(total));
  return total;
}

}  // namespace tessera
