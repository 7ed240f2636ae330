#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/util/strides.h>

#include <cstdint>
#include <vector>

namespace tessera::internal {

// The shape of a parameter, and the order of its elements in a flat buffer.
struct ParameterGeometry {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;  // the parameter's own strides if it is dense, else row-major strides
};

inline ParameterGeometry geometry_of(const at::Tensor& parameter) {
  if (parameter.is_non_overlapping_and_dense()) return {parameter.sizes().vec(), parameter.strides().vec()};
  const auto row_major = c10::contiguous_strides(parameter.sizes());
  return {parameter.sizes().vec(), {row_major.begin(), row_major.end()}};
}

// Returns a view of the 1-D buffer `flat`. The view has this geometry, and begins at element `offset` of the buffer.
inline at::Tensor view_in(const at::Tensor& flat, const ParameterGeometry& geometry, int64_t offset) {
  return flat.as_strided(geometry.sizes, geometry.strides, flat.storage_offset() + offset);
}

// Like view_in(), but autograd does not track the view, which has its own version counter. Takes half as long.
inline at::Tensor detached_view_in(const at::Tensor& flat, const ParameterGeometry& geometry, int64_t offset) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return view_in(flat, geometry, offset);
}

}  // namespace tessera::internal
