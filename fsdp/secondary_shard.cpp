#include "fsdp/secondary_shard.h"

#include <c10/core/GradMode.h>

namespace tessera::internal {

void SecondaryShard::keep() {
  if (group_.comm != nullptr && state_ == State::kNone) state_ = State::kWanted;
}

void SecondaryShard::cut(const std::vector<at::Tensor>& full) {
  if (state_ != State::kWanted) return;
  at::NoGradGuard no_grad;
  for (const at::Tensor& buffer : full) {
    const int64_t part_numel = buffer.numel() / group_.comm->size();
    parts_.push_back(group_.memory->take(part_numel, buffer.scalar_type()));
    parts_.back().copy_(buffer.narrow(0, group_.comm->rank() * part_numel, part_numel));
  }
  state_ = State::kHeld;
}

void SecondaryShard::start_gather(size_t flat_parameter, const at::Tensor& full, CollectiveLog& log) {
  PagedFlatParameter& paged = *flat_parameters_[flat_parameter];
  log.add("all-gather from secondary shards", paged.flat.name(), full.numel());
  paged.gathering = group_.comm->all_gather(full, parts_[flat_parameter], {}, paged.flat.name());
}

void SecondaryShard::evict() {
  if (state_ != State::kHeld) return;
  parts_.clear();
  state_ = State::kWanted;
}

void SecondaryShard::drop() {
  if (state_ == State::kHeld)
    for (auto& paged : flat_parameters_) paged->gathering.wait();
  parts_.clear();
  state_ = State::kNone;
}

}  // namespace tessera::internal
