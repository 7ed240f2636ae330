#include "fsdp/paged_flat_parameter.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <stdexcept>

#include "core/layout/deferred.h"
#include "core/layout/tensor_signature.h"

namespace tessera::internal {

void PagedFlatParameter::point_parameters(const Page& to, at::ScalarType dtype) const {
  for (size_t i = 0; i < flat.parameters().size(); ++i) {
    const ParameterGeometry& geometry = flat.geometry(i);
    at::Tensor parameter = flat.parameters()[i].tensor;
    const at::Tensor view =
        to.view(dtype, geometry.sizes, geometry.strides, flat.layout().offset(static_cast<int64_t>(i)));
    is_deferred(parameter) ? fill_deferred(parameter, view) : parameter.set_data(view);
  }
}

std::string PagedFlatParameter::parameter_at(const at::Tensor& view) const {
  for (size_t i = 0; i < flat.parameters().size(); ++i) {
    const auto begin = flat.layout().offset(static_cast<int64_t>(i));
    const auto end = begin + std::max<int64_t>(flat.layout().numel(static_cast<int64_t>(i)), 1);
    if (view.storage_offset() >= begin && view.storage_offset() < end)
      return "parameter '" + flat.parameters()[i].fqn + "'";
  }
  return "";
}

bool PagedFlatParameter::is_at_home(size_t index) const {
  const at::Tensor& parameter = flat.parameters()[index].tensor;
  return page_in_use().holds(parameter) &&
         is_view_at(parameter, flat.geometry(index), flat.layout().offset(static_cast<int64_t>(index)));
}

bool PagedFlatParameter::can_take(size_t index) const {
  const at::Tensor& given = flat.parameters()[index].tensor;
  const auto& sizes = flat.geometry(index).sizes;
  return page_of(given) == nullptr && (TensorSignature{flat.dtype(), sizes}.is_of(given) ||
                                       TensorSignature{flat.gather_dtype(), sizes}.is_of(given));
}

// All ranks are expected to have given it the same values; each takes its part, as when the module was wrapped.
void PagedFlatParameter::bring_home(size_t index, bool is_pinned, int rank) {
  at::NoGradGuard no_grad;
  const at::Tensor parameter = flat.parameters()[index].tensor;
  const int64_t offset = flat.layout().offset(static_cast<int64_t>(index));
  Page& in_use = page_in_use();
  const at::Tensor given = parameter.detach();
  if (is_pinned) {
    flat.view_in(in_use.buffer(), index).copy_(given);
    in_use.note_write();
  } else {
    const at::Tensor ordered = at::empty({parameter.numel()}, given.options().dtype(flat.dtype()));
    view_in(ordered, flat.geometry(index), 0).copy_(given);
    const Range own = flat.layout().owned(static_cast<int64_t>(index), rank);
    flat.parameter_shards()[index].copy_(ordered.narrow(0, own.begin, own.numel()));
  }
  const ParameterGeometry& geometry = flat.geometry(index);
  parameter.set_data(
      in_use.view(is_pinned ? flat.dtype() : flat.gather_dtype(), geometry.sizes, geometry.strides, offset));
}

void PagedFlatParameter::require_shard_at_home(size_t index, int rank) const {
  if (flat.is_shard_home(index)) return;
  throw std::logic_error(
      "parameter '" + flat.parameters()[index].fqn + "' on rank " + std::to_string(rank) +
      " was replaced after wrapping (by set_data() on fsdp.parameters()): change values with copy_()");
}

}  // namespace tessera::internal
