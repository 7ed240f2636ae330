#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include <tessera/communicator.h>
#include <tessera/model/grad_norm.h>

namespace tessera::internal {

// Throws std::invalid_argument unless max_norm >= 0 and norm_type > 0. Infinity is valid.
void require_clip_arguments(double max_norm, double norm_type);
// Throws std::runtime_error, naming `rank`, if `norm` is infinite or NaN.
void require_finite_norm(double norm, int rank);

// Computes torch::nn::utils::clip_grad_norm_ over ranks. Scales `shards` in place so that the norm of the whole set of
// tensors is at most max_norm. Returns the norm before scaling. `shards` are this rank's parts of the tensors, and may
// be empty. Each element must be on exactly one rank. If `scaled` is given, scales its tensors instead of `shards`. If
// the norm is NaN, all elements become NaN.
//
// Collective: an all-reduce of one number. On a device, the host blocks only if error_if_nonfinite is set or a tensor
// is in host memory, or when the returned norm is read. Throws the errors of require_clip_arguments(). Throws
// std::runtime_error, before scaling, if error_if_nonfinite is set and the norm is not finite. On the host, the norm of
// a large shard is computed in rows of `row_numel` elements, on all intra-operator threads.
GradNorm clip_shards_by_norm(const std::vector<at::Tensor>& shards, double max_norm, double norm_type,
                             bool error_if_nonfinite, Communicator& comm,
                             const std::vector<at::Tensor>* scaled = nullptr, int64_t row_numel = int64_t{1} << 16);

// Whether clipping changes gradients whose norm is `norm`. True if the norm is infinite or NaN. As in torch, the factor
// is max_norm / (norm + 1e-6), but at most 1. A factor of 1 changes no bits.
bool clips_gradients(double norm, double max_norm);

// Returns the 2-norm of each whole tensor, for layer-wise optimizers (LAMB, LARS, Adafactor). `parts` are this rank's
// parts of the tensors. An undefined or empty part counts as 0. Sums in double. Collective: one all-reduce. All ranks
// must pass parts of the same tensors, in one order. If `comm` is null, parts are whole tensors, and the call is local.
std::vector<double> norms_over_ranks(const std::vector<at::Tensor>& parts, Communicator* comm);

}  // namespace tessera::internal
