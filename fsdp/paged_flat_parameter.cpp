#include "fsdp/paged_flat_parameter.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <stdexcept>

#include "core/layout/as_wrapped.h"
#include "core/layout/deferred.h"

namespace tessera::internal {
namespace {

void require_unheld(const PagedFlatParameter& paged, size_t index, const std::string& unit, int rank) {
  const auto& parameters = paged.flat.parameters();
  const Page& page = paged.page_in_use();
  const auto own = std::ranges::count_if(
      parameters, [&](const PlannedParameter& parameter) { return page.holds(parameter.tensor); });
  if (page.holders() == static_cast<size_t>(own) + 1) return;
  throw std::logic_error("parameter '" + parameters[index].fqn + "' on rank " + std::to_string(rank) +
                         " was given other data while another tensor still shares those of " + unit +
                         " (a network that it was swapped with, a view or detach() that was kept), and would follow: "
                         "copy values with copy_(), or let go of that tensor");
}

}  // namespace

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

bool PagedFlatParameter::is_attached(size_t index) const {
  const at::Tensor& parameter = flat.parameters()[index].tensor;
  return page_in_use().holds(parameter) &&
         is_view_at(parameter, flat.geometry(index), flat.layout().offset(static_cast<int64_t>(index)));
}

bool PagedFlatParameter::can_take(size_t index) const {
  const at::Tensor& given = flat.parameters()[index].tensor;
  const auto& sizes = flat.geometry(index).sizes;
  return page_of(given) == nullptr &&
         (WrappedKind{flat.dtype(), sizes}.is_of(given) || WrappedKind{flat.gather_dtype(), sizes}.is_of(given));
}

// All ranks are expected to have given it the same values; each takes its part, as when the module was wrapped.
void PagedFlatParameter::reattach(size_t index, bool is_summoned, const std::string& unit, int rank) {
  require_unheld(*this, index, unit, rank);
  at::NoGradGuard no_grad;
  const at::Tensor parameter = flat.parameters()[index].tensor;
  const int64_t offset = flat.layout().offset(static_cast<int64_t>(index));
  Page& in_use = page_in_use();
  const at::Tensor given = parameter.detach();
  if (is_summoned) {
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
      in_use.view(is_summoned ? flat.dtype() : flat.gather_dtype(), geometry.sizes, geometry.strides, offset));
}

void PagedFlatParameter::reattach_shard(size_t index, bool is_summoned, bool may_change, const std::string& unit,
                                        int rank) {
  if (flat.is_shard_attached(index)) return;
  const at::Tensor& given = flat.parameter_shards()[index];
  const std::string label = "parameter '" + flat.parameters()[index].fqn + "' on rank " + std::to_string(rank);
  if (flat.shard_page().holds(given))
    throw std::logic_error(
        label + " was given the data of another parameter of " + unit +
        ", or another shape (by set_data(), a swap, on fsdp.parameters()): copy values with copy_()");
  const int64_t numel = flat.layout().owned(static_cast<int64_t>(index), rank).numel();
  const bool fits = WrappedKind{flat.dtype(), {numel}, flat.shard().device()}.is_of(given);
  if (!fits || !may_change || is_summoned)
    throw std::logic_error(label + " was replaced after wrapping (by set_data() on fsdp.parameters())" +
                           (!fits         ? ", by what is no shard of it"
                            : is_summoned ? " inside summon_full_params()"
                                          : " between a forward and its backward") +
                           ": change values between steps");
  if (flat.is_shard_shared())
    throw std::logic_error(label + " was given other data while another tensor still shares those of " + unit +
                           " (one that it was swapped with, a view or detach() that was kept), and would follow: copy "
                           "values with copy_(), or let go of that tensor");
  flat.reattach_shard(index);
}

}  // namespace tessera::internal
