#include "core/model/shard_norm.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include <tessera/host_results.h>
#include "core/gradients/gradient_part.h"
#include "core/runtime/lazy_values.h"
#include "core/runtime/require.h"

namespace tessera::internal {
namespace {

constexpr double kNormMargin = 1e-6;  // added to the norm, as in torch
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Returns a CPU tensor's norm. Combines norms of rows, because libtorch computes a single norm on only one thread.
at::Tensor norm_by_rows(const at::Tensor& shard, double norm_type, int64_t row_numel) {
  const at::Tensor flat = shard.view({-1});
  const int64_t rows = flat.numel() / row_numel, in_rows = rows * row_numel;
  const at::Tensor all_rows = flat.narrow(0, 0, in_rows).view({rows, row_numel});
  at::Tensor norms = at::linalg_vector_norm(all_rows, norm_type, {1});
  if (in_rows < flat.numel()) {  // the maximum of an empty tensor is an error
    const at::Tensor rest = at::linalg_vector_norm(flat.narrow(0, in_rows, flat.numel() - in_rows), norm_type);
    norms = at::cat({norms, rest.view({1})});
  }
  return at::linalg_vector_norm(norms, norm_type);
}

// Groups tensors by dtype and device, in order of first occurrence, and calls `call` once for each group. With mixed
// dtypes or devices, foreach operators would launch a kernel for each tensor.
template <class Call>
void for_each_kind(std::vector<at::Tensor> tensors, Call call) {
  for (auto begin = tensors.begin(); begin != tensors.end();) {
    const auto end = std::stable_partition(begin, tensors.end(), [first = *begin](const at::Tensor& tensor) {
      return tensor.scalar_type() == first.scalar_type() && tensor.device() == first.device();
    });
    call(std::vector<at::Tensor>(begin, end));
    begin = end;
  }
}

// Returns this rank's norm, [1] double on `device`. Keeps NaN.
at::Tensor local_norm(const std::vector<at::Tensor>& shards, double norm_type, at::Device device, int64_t row_numel) {
  std::vector<at::Tensor> others, norms, stacks;
  for (const at::Tensor& shard : shards) {
    if (shard.is_cpu() && shard.layout() == at::kStrided && shard.is_contiguous() && shard.numel() >= 2 * row_numel)
      norms.push_back(norm_by_rows(shard, norm_type, row_numel));
    else if (shard.numel() > 0)
      others.push_back(shard);
  }
  const auto add = [&](const std::vector<at::Tensor>& alike) {
    const at::Tensor stack = at::stack(alike);
    stacks.push_back(at::linalg_vector_norm(stack, norm_type, {}, false, at::kDouble)
                         .to(stacks.empty() ? stack.device() : stacks[0].device()));
  };
  for_each_kind(std::move(norms), add);
  for_each_kind(std::move(others), [&](const auto& alike) { add(at::_foreach_norm(alike, norm_type)); });
  if (stacks.empty()) return at::zeros({1}, at::TensorOptions().dtype(at::kDouble).device(device));
  const at::Tensor norm = stacks.size() == 1 ? stacks[0] : at::linalg_vector_norm(at::stack(stacks), norm_type);
  return norm.view({1}).to(device);
}

// Returns the norm over all ranks; may overwrite `own`. For the infinity norm, a NaN on any rank must make the result
// NaN, but NCCL's maximum ignores NaN. So absolute values are compared by their bits: NaN's exceed infinity's.
at::Tensor norm_over_ranks(const at::Tensor& own, double norm_type, Communicator& comm, const std::string& what) {
  if (norm_type == kInfinity) {
    const at::Tensor bits = own.abs().view(at::kLong);
    comm.all_reduce(bits, ReduceOp::kMax, what).wait();
    return bits.view(at::kDouble);
  }
  if (comm.size() > 1) own.pow_(norm_type);
  comm.all_reduce(own, ReduceOp::kSum, what).wait();
  return comm.size() > 1 ? own.pow_(1.0 / norm_type) : own;
}

// Scales in place. Scales lazy tensors singly, because foreach operators cannot write to them. Skips lazy zeros.
void scale(const std::vector<at::Tensor>& shards, const at::Tensor& factor) {
  std::vector<at::Tensor> rest;
  for (const at::Tensor& shard : shards) {
    if (!has_lazy_values(shard))
      rest.push_back(shard);
    else if (!shard._is_zerotensor())
      shard.mul_(factor.to(shard.device()).squeeze());
  }
  for_each_kind(std::move(rest), [&](const std::vector<at::Tensor>& alike) {
    const at::ScalarType dtype = at::toOpMathType(alike[0].scalar_type());
    const at::Tensor there = factor.to(alike[0].device(), dtype).squeeze();
    // If the factor is 1, skips offloaded gradients. item() does not block, because `there` is on the host.
    const bool is_one = !factor.is_cpu() && there.is_cpu() && there.item<double>() == 1;
    if (!is_one) at::_foreach_mul_(alike, there);
  });
}

}  // namespace

void require_clip_arguments(double max_norm, double norm_type) {
  require(max_norm >= 0 && norm_type > 0, "clip_grad_norm_: max_norm is ", max_norm, " and norm_type ", norm_type,
          ", expected max_norm >= 0 and norm_type > 0");
}

void require_finite_norm(double norm, int rank) {
  require<std::runtime_error>(std::isfinite(norm), "clip_grad_norm_ on rank ", rank, ": the norm of the gradients is ",
                              norm);
}

GradNorm clip_shards_by_norm(const std::vector<at::Tensor>& shards, double max_norm, double norm_type,
                             bool error_if_nonfinite, Communicator& comm, const std::vector<at::Tensor>* scaled,
                             int64_t row_numel) {
  require_clip_arguments(max_norm, norm_type);
  if (scaled == nullptr) scaled = &shards;
  const at::Tensor own = local_norm(shards, norm_type, comm.device(), row_numel);
  for (const auto* list : {&shards, scaled})
    for (const at::Tensor& shard : *list) forget_norm(shard);  // the norm over all ranks is computed next
  // The operation's name has max_norm and norm_type, so that ranks with different values throw instead of diverging.
  const at::Tensor norm = norm_over_ranks(own, norm_type, comm,
                                          c10::str("the gradient norm of type ", norm_type, ", clipped to ", max_norm));
  if (error_if_nonfinite) require_finite_norm(comm.to_host(norm, "the gradient norm").item<double>(), comm.rank());
  // The factor is NaN if the norm is NaN, as in torch.
  const at::Tensor most = at::full({}, max_norm, at::TensorOptions(at::kCPU).dtype(at::kDouble));
  scale(*scaled, most.div(norm + kNormMargin).clamp_max_(1.0));
  return norm.is_cpu() ? GradNorm(norm.item<double>()) : GradNorm(norm);
}

bool clips_gradients(double norm, double max_norm) { return !(max_norm / (norm + kNormMargin) >= 1); }

std::vector<double> norms_over_ranks(const std::vector<at::Tensor>& parts, Communicator* comm) {
  if (parts.empty()) return {};
  const auto any = std::ranges::find_if(parts, [](const at::Tensor& part) { return part.defined(); });
  const at::Device device = comm != nullptr      ? comm->device()
                            : any != parts.end() ? any->device()
                                                 : at::Device(at::kCPU);
  const at::Tensor none = at::zeros({}, at::TensorOptions().dtype(at::kDouble).device(device));
  std::vector<at::Tensor> norms;  // stay on the device, so that the host blocks once for all of them
  for (const at::Tensor& part : parts)
    norms.push_back(
        part.defined() && part.numel() > 0 ? at::linalg_vector_norm(part, 2, {}, false, at::kDouble).to(device) : none);
  at::Tensor squares = at::stack(norms).square_();
  squares = comm != nullptr ? reduce_to_host(*comm, squares, ReduceOp::kSum, "the norms of parameters") : squares.cpu();
  squares.sqrt_();
  return {squares.const_data_ptr<double>(), squares.const_data_ptr<double>() + squares.numel()};
}

}  // namespace tessera::internal
