#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace tessera {

// A parameter's place in memory: its shape, and the order of its elements in a flat buffer.
struct ParameterGeometry {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;  // the parameter's own where it is dense, else row-major
};

inline ParameterGeometry geometry_of(const at::Tensor& parameter) {
  ParameterGeometry geometry{parameter.sizes().vec(), parameter.strides().vec()};
  if (parameter.is_non_overlapping_and_dense()) return geometry;
  int64_t stride = 1;
  for (size_t dim = geometry.sizes.size(); dim-- > 0;) {
    geometry.strides[dim] = stride;
    stride *= std::max<int64_t>(geometry.sizes[dim], 1);
  }
  return geometry;
}

// The view of a parameter that begins at element `offset` of a 1-D flat buffer.
inline at::Tensor view_in(const at::Tensor& flat, const ParameterGeometry& geometry, int64_t offset) {
  return flat.as_strided(geometry.sizes, geometry.strides, flat.storage_offset() + offset);
}

}  // namespace tessera
