#include <tessera/model/data_parallel.h>

#include <ATen/ops/tensor.h>

#include <tessera/host_results.h>
#include "core/gradients/backward_pass.h"
#include "core/runtime/require.h"

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
  require(factor > 0, "set_gradient_divide_factor: got ", factor, ", expected more than 0");
  backward_pass().set_divisor(factor);
}

int64_t DataParallel::divide_gradients_by_sum(int64_t own) {
  require_outside_backward("divide_gradients_by_sum");
  // Also sums the number of ranks that passed a negative number, so that all ranks throw.
  const at::Tensor own_counts = at::tensor({own, int64_t{own < 0}}, at::TensorOptions(at::kCPU).dtype(at::kLong));
  const at::Tensor sums = reduce_to_host(*comm(), own_counts, ReduceOp::kSum, "what gradients are divided by");
  const int64_t total = sums[0].item<int64_t>();
  require(sums[1].item<int64_t>() == 0 && total != 0, "divide_gradients_by_sum on rank ", comm()->rank(), ": got ", own,
          ", ", total, " over all ranks, expected 0 or more on each and more than 0 in all");
  set_gradient_divide_factor(static_cast<double>(total));
  return total;
}

}  // namespace tessera
