#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

namespace tessera {

// Gradients that travel together to the rank that owns their parameters.
struct ReduceBucket {
  int owner = 0;
  std::vector<size_t> members;   // parameters, in the order in which their gradients are expected
  std::vector<int64_t> offsets;  // of the members in the bucket, in elements
  int64_t numel = 0;
};

// What the plan wants to know of a parameter.
struct ReducedParameter {
  int64_t numel = 0;
  int owner = 0;
  at::ScalarType dtype = at::kFloat;
};

// Buckets for the parameters whose gradients come in this order, in the order in which the buckets
// will be full. Gradients of less than 1 MiB share buckets of at most buffer_numel elements, one
// owner and one dtype each; larger ones, and all if buffer_numel is 0, are a bucket of their own,
// and travel without being copied. Pure.
// Throws std::invalid_argument for buffer_numel < 0.
std::vector<ReduceBucket> plan_reduction(const std::vector<ReducedParameter>& parameters,
                                         const std::vector<size_t>& order, int64_t buffer_numel);

}  // namespace tessera
