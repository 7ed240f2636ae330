#include "tessera/flat/finite_check.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <stdexcept>
#include <string>

namespace tessera {

void require_finite(const std::vector<GradientBucket>& buckets, const std::vector<bool>& reduced, Communicator& comm) {
  if (buckets.empty()) return;
  std::vector<at::Tensor> flags;  // where gradients are, until all are known
  const at::Tensor none = at::zeros({}, at::TensorOptions().dtype(at::kByte).device(comm.device()));
  for (size_t bucket = 0; bucket < buckets.size(); ++bucket) {
    at::Tensor flag = none;
    if (reduced[bucket] && buckets[bucket].result != nullptr)
      for (const at::Tensor& leaf : buckets[bucket].result->leaves())
        if (leaf.grad().defined())
          flag = at::maximum(flag, at::isfinite(leaf.grad()).all().logical_not().to(none.device(), at::kByte));
    flags.push_back(flag);
  }
  const at::Tensor own = at::stack(flags);
  at::Tensor all = at::empty({comm.size(), own.numel()}, own.options());
  comm.all_gather(all, own, {}, "the check for finite gradients").wait();
  all = all.cpu();
  std::string found;
  for (size_t bucket = 0; bucket < buckets.size(); ++bucket) {
    std::string ranks;
    for (int rank = 0; rank < comm.size(); ++rank)
      if (all.const_data_ptr<uint8_t>()[rank * buckets.size() + bucket] != 0)
        ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
    if (!ranks.empty()) found += (found.empty() ? "" : "; ") + buckets[bucket].name + " in the parts of ranks " + ranks;
  }
  if (!found.empty()) throw std::runtime_error("reduced gradients are infinite or NaN (check_finite): " + found);
}

}  // namespace tessera
