#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/StringUtil.h>

#include <optional>
#include <string>
#include <vector>

#include "core/layout/geometry.h"

// Whether a parameter is what it was when it was wrapped: asked by every wrapper, answered here alone.
namespace tessera::internal {

// What kind of tensor it was. Its values, and where they lie, may be others since.
struct WrappedKind {
  at::ScalarType dtype;
  std::vector<int64_t> sizes;
  std::optional<at::Device> device = {};  // empty: any

  static WrappedKind of(const at::Tensor& parameter) {
    return {parameter.scalar_type(), parameter.sizes().vec(), parameter.device()};
  }
  bool is_of(const at::Tensor& parameter) const {
    return parameter.layout() == at::kStrided && parameter.scalar_type() == dtype &&
           parameter.sizes() == at::IntArrayRef(sizes) && (!device || parameter.device() == *device);
  }
  // For errors, of one with a device: "is Half [3] on cpu now, but was Float [3] on cpu".
  std::string change_of(const at::Tensor& parameter) const {
    return c10::str("is ", parameter.scalar_type(), " ", parameter.sizes(), " on ", parameter.device(),
                    " now, but was ", dtype, " ", at::IntArrayRef(sizes), " on ", *device);
  }
};

// Whether it is that view of its storage which begins at element `offset`: with other sizes or strides it would show
// the same memory, but as other values.
inline bool is_view_at(const at::Tensor& parameter, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset) {
  return parameter.storage_offset() == offset && parameter.sizes() == sizes && parameter.strides() == strides;
}
inline bool is_view_at(const at::Tensor& parameter, const ParameterGeometry& geometry, int64_t offset) {
  return is_view_at(parameter, geometry.sizes, geometry.strides, offset);
}

}  // namespace tessera::internal
