#pragma once

#include "tests/support/reference.h"

namespace tessera::testing_support {
using namespace internal;

// Linear layers alone, so that each is a unit and its number its name.
inline torch::nn::Sequential chain(int depth, int64_t width) {
  torch::nn::Sequential model;
  for (int i = 0; i < depth; ++i) model->push_back(torch::nn::Linear(width, width));
  return on_rank_device(model);
}

// A rank's batch of four rows.
inline at::Tensor input(int rank, int64_t width = 8) {
  return seeded(50 + rank, [&] { return torch::randn({4, width}); });
}

}  // namespace tessera::testing_support
