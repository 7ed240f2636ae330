#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/StringUtil.h>

#include <optional>
#include <string>
#include <vector>

#include "core/layout/geometry.h"

// Checks that a parameter still has the properties that it had when it was wrapped. Used by every wrapper.
namespace tessera::internal {

// The dtype, sizes and device of a tensor.
struct TensorSignature {
  at::ScalarType dtype;
  std::vector<int64_t> sizes;
  std::optional<at::Device> device = {};  // empty: any device

  static TensorSignature of(const at::Tensor& parameter) {
    return {parameter.scalar_type(), parameter.sizes().vec(), parameter.device()};
  }
  bool is_of(const at::Tensor& parameter) const {
    return parameter.layout() == at::kStrided && parameter.scalar_type() == dtype &&
           parameter.sizes() == at::IntArrayRef(sizes) && (!device || parameter.device() == *device);
  }
  // Describes a change, for errors: "is Half [3] on cpu now, but was Float [3] on cpu". `device` must be set.
  std::string change_of(const at::Tensor& parameter) const {
    return c10::str("is ", parameter.scalar_type(), " ", parameter.sizes(), " on ", parameter.device(),
                    " now, but was ", dtype, " ", at::IntArrayRef(sizes), " on ", *device);
  }
};

// Returns whether the parameter is the view of its storage with these sizes, strides and offset. A view with other
// strides would have the values in another order.
inline bool is_view_at(const at::Tensor& parameter, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset) {
  return parameter.storage_offset() == offset && parameter.sizes() == sizes && parameter.strides() == strides;
}
inline bool is_view_at(const at::Tensor& parameter, const ParameterGeometry& geometry, int64_t offset) {
  return is_view_at(parameter, geometry.sizes, geometry.strides, offset);
}

}  // namespace tessera::internal
