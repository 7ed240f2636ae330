#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include <tessera/communicator.h>
#include <tessera/model/grad_norm.h>

namespace tessera::internal {

// Of a large shard on the host the norm is taken of so many elements at a time, on all threads (a test makes it small).
inline int64_t norm_row_numel = 1 << 16;

// Throws std::invalid_argument unless max_norm >= 0 and norm_type > 0, infinity included.
void require_clip_arguments(double max_norm, double norm_type);

// Scales `shards` (this rank's parts of a set of tensors, each element on exactly one rank) in place so that the norm
// of the whole set is at most max_norm, and returns the norm before: torch::nn::utils::clip_grad_norm_ over ranks.
// Collective: one all-reduce of one number, which the host waits for only with
// error_if_nonfinite, or when the result is looked at. An empty list is fine, on some ranks or
// all. Throws as require_clip_arguments(), and std::runtime_error if error_if_nonfinite and the norm is infinite or
// NaN, with the shards as they were. `also` is scaled alike and does not count.
GradNorm clip_shards_by_norm(const std::vector<at::Tensor>& shards, double max_norm, double norm_type,
                             bool error_if_nonfinite, Communicator& comm, const std::vector<at::Tensor>& also = {});

// Whether a set of that norm is changed for this max_norm; also for a norm that is infinite or NaN. (It is scaled by
// max_norm / (norm + 1e-6) if that is less than 1, as torch does; times 1 leaves the bits.)
bool clips_gradients(double norm, double max_norm);

// The 2-norm of each of a list of tensors of which this rank holds parts: what layer-wise optimizers (LAMB, LARS,
// Adafactor) need of whole parameters. An undefined or empty part counts as 0. All norms travel in one all-reduce,
// summed in double. Collective, the same number of parts on all ranks; null for tensors that are whole.
std::vector<double> norms_over_ranks(const std::vector<at::Tensor>& parts, Communicator* comm);

}  // namespace tessera::internal
