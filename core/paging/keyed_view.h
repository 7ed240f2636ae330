#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <utility>

namespace tessera::internal {

// Returns a tensor on `storage` with the dtype and dispatch keys of `like`, and the additional dispatch key `key`.
inline at::Tensor keyed_view(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like, int64_t storage_offset,
                             at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), like.key_set() | c10::DispatchKeySet(key),
                                                       like.dtype());
  view.unsafeGetTensorImpl()->set_storage_offset(storage_offset);
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return view;
}

}  // namespace tessera::internal
