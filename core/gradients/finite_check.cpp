#include "core/gradients/finite_check.h"

#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <limits>
#include <stdexcept>
#include <string>

#include <tessera/host_results.h>
#include "core/gradients/gradient_part.h"

namespace tessera::internal {
namespace {

void add_gradients(const GradientBucket& bucket, std::vector<at::Tensor>& gradients) {
  if (bucket.result == nullptr) return;
  for (const at::Tensor& leaf : bucket.result->leaves())
    if (leaf.grad().defined() && leaf.grad().numel() > 0) gradients.push_back(leaf.grad());
}

// Returns a tensor [1]: 1 if a gradient is infinite or NaN, else 0. Handles all gradients of one dtype and device at
// once, with few kernel launches.
at::Tensor flag_of(std::vector<at::Tensor> gradients, at::Device device) {
  at::Tensor flag = at::zeros({1}, at::TensorOptions().dtype(at::kByte).device(device));
  while (!gradients.empty()) {
    const at::Tensor first = gradients[0];
    const auto others = std::stable_partition(gradients.begin(), gradients.end(), [&](const at::Tensor& gradient) {
      return gradient.scalar_type() == first.scalar_type() && gradient.device() == first.device();
    });
    const std::vector<at::Tensor> alike(gradients.begin(), others);
    const at::Tensor largest = at::stack(at::_foreach_norm(alike, std::numeric_limits<double>::infinity()));
    flag = at::maximum(flag, at::isfinite(largest).all().logical_not().to(device, at::kByte));
    for (const at::Tensor& gradient : alike) forget_norm(gradient);  // this norm is not for clipping
    gradients.erase(gradients.begin(), others);
  }
  return flag;
}

constexpr char kGather[] = "the check for finite gradients";

}  // namespace

void require_finite(const std::vector<GradientBucket>& buckets, const std::vector<bool>& reduced, Communicator& comm) {
  if (buckets.empty()) return;
  std::vector<at::Tensor> gradients;
  for (size_t bucket = 0; bucket < buckets.size(); ++bucket)
    if (reduced[bucket]) add_gradients(buckets[bucket], gradients);
  if (!gather_to_host(comm, flag_of(std::move(gradients), comm.device()), kGather).any().item<bool>()) return;
  // Some rank has a gradient that is not finite. A second all-gather finds the buckets and ranks.
  std::vector<at::Tensor> flags;
  for (size_t bucket = 0; bucket < buckets.size(); ++bucket) {
    std::vector<at::Tensor> own;
    if (reduced[bucket]) add_gradients(buckets[bucket], own);
    flags.push_back(flag_of(std::move(own), comm.device()));
  }
  const at::Tensor all = gather_to_host(comm, at::stack(flags).view({-1}), kGather);
  std::string found;
  for (size_t bucket = 0; bucket < buckets.size(); ++bucket) {
    std::string ranks;
    for (int rank = 0; rank < comm.size(); ++rank)
      if (all.const_data_ptr<uint8_t>()[rank * buckets.size() + bucket] != 0)
        ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
    if (!ranks.empty()) found += (found.empty() ? "" : "; ") + buckets[bucket].name + " in the parts of ranks " + ranks;
  }
  throw std::runtime_error("reduced gradients are infinite or NaN (check_finite): " + found);
}

}  // namespace tessera::internal
