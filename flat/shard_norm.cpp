#include "tessera/flat/shard_norm.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>

namespace tessera {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The p-th power of this rank's norm, or the largest absolute value. NaN stays NaN.
double local_contribution(const std::vector<at::Tensor>& shards, double norm_type) {
  double total = 0;
  for (const at::Tensor& shard : shards) {
    if (shard.numel() == 0) continue;
    const double norm = at::linalg_vector_norm(shard, norm_type).item<double>();
    if (norm_type == kInfinity) {
      total = norm > total || std::isnan(norm) ? norm : total;
    } else {
      total += std::pow(norm, norm_type);
    }
  }
  return total;
}

}  // namespace

double clip_shards_by_norm(const std::vector<at::Tensor>& shards, double max_norm, double norm_type,
                           bool error_if_nonfinite, Communicator& comm) {
  if (!(max_norm >= 0) || !(norm_type > 0)) {
    std::ostringstream text;
    text << "clip_grad_norm_: max_norm is " << max_norm << " and norm_type " << norm_type
         << ", expected max_norm >= 0 and norm_type > 0";
    throw std::invalid_argument(text.str());
  }
  const auto op = norm_type == kInfinity ? ReduceOp::kMax : ReduceOp::kSum;
  at::Tensor total = at::full({1}, local_contribution(shards, norm_type),
                              at::TensorOptions().dtype(at::kDouble).device(comm.device()));
  comm.all_reduce(total, op, "the gradient norm").wait();
  const double sum = total.item<double>();
  const double norm = norm_type == kInfinity ? sum : std::pow(sum, 1.0 / norm_type);
  if (error_if_nonfinite && !std::isfinite(norm))
    throw std::runtime_error("clip_grad_norm_ on rank " + std::to_string(comm.rank()) +
                             ": the norm of the gradients is " + std::to_string(norm));
  const double scale = max_norm / (norm + 1e-6);
  if (scale < 1.0)  // false for NaN, as torch's clamp
    for (const at::Tensor& shard : shards) shard.mul_(scale);
  return norm;
}

std::vector<double> norms_over_ranks(const std::vector<at::Tensor>& parts, Communicator* comm) {
  if (parts.empty()) return {};
  const auto any = std::find_if(parts.begin(), parts.end(), [](const at::Tensor& part) { return part.defined(); });
  const at::Device device = comm != nullptr      ? comm->device()
                            : any != parts.end() ? any->device()
                                                 : at::Device(at::kCPU);
  const at::Tensor none = at::zeros({}, at::TensorOptions().dtype(at::kDouble).device(device));
  std::vector<at::Tensor> norms;  // on the device until all are known: one synchronisation with the host
  for (const at::Tensor& part : parts)
    norms.push_back(
        part.defined() && part.numel() > 0 ? at::linalg_vector_norm(part, 2, {}, false, at::kDouble).to(device) : none);
  at::Tensor squares = at::stack(norms).square_();
  if (comm != nullptr) comm->all_reduce(squares, ReduceOp::kSum, "the norms of parameters").wait();
  squares = squares.sqrt_().cpu();
  return {squares.const_data_ptr<double>(), squares.const_data_ptr<double>() + squares.numel()};
}

}  // namespace tessera
