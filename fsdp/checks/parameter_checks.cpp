#include "fsdp/checks/parameter_checks.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <stdexcept>

#include "core/layout/tensor_signature.h"

namespace tessera::internal {
namespace {

// Returns the name of the parameter at the beginning of `view`; "a parameter" if there is none.
std::string name_at(const Unit& unit, const Page& page, const at::Tensor& view) {
  for (const auto& paged : unit.flat_parameters()) {
    if (paged->page.get() != &page) continue;
    const FlatParameter& flat = paged->flat;
    for (size_t i = 0; i < flat.parameters().size(); ++i) {
      const auto index = static_cast<int64_t>(i);
      const int64_t begin = flat.layout().offset(index), end = begin + std::max<int64_t>(flat.layout().numel(index), 1);
      if (view.storage_offset() >= begin && view.storage_offset() < end)
        return "parameter '" + flat.parameters()[i].fqn + "'";
    }
  }
  return "a parameter";
}

bool is_attached(const PagedFlatParameter& paged, size_t index) {
  const at::Tensor& parameter = paged.flat.parameters()[index].tensor;
  return paged.page_in_use().holds(parameter) &&
         is_view_at(parameter, paged.flat.geometry(index), paged.flat.layout().offset(static_cast<int64_t>(index)));
}

// Whether `given` can replace the parameter: not paged, equal sizes, and the flat parameter's dtype or gather_dtype().
bool fits(const FlatParameter& flat, size_t index, const at::Tensor& given) {
  const auto& sizes = flat.geometry(index).sizes;
  return page_of(given) == nullptr && (TensorSignature{flat.dtype(), sizes}.is_of(given) ||
                                       TensorSignature{flat.gather_dtype(), sizes}.is_of(given));
}

void require_may_reattach(const Unit& unit, const PagedFlatParameter& paged, size_t index, bool may_change) {
  const at::Tensor& given = paged.flat.parameters()[index].tensor;
  const std::string label = paged.flat.shard_label(index);
  if (paged.page_in_use().holds(given))
    throw std::logic_error(label + " was given the data of another parameter of " + unit.name() +
                           ", or another shape (by set_data(), a swap): copy values inside summon_full_params()");
  const bool is_fitting = fits(paged.flat, index, given);
  if (!is_fitting || !may_change)
    throw std::logic_error(label + " was replaced after wrapping (by module.to(), or set_data)" +
                           (is_fitting ? " between a forward and its backward" : "") +
                           ": move and convert the module before it is wrapped, and change values between steps");
}

// Copies a replaced parameter's new values: if the unit is summoned, all to the full parameter, otherwise this rank's
// part to the shard. Then makes the parameter a view of the page again.
void take_values(PagedFlatParameter& paged, size_t index, bool is_summoned) {
  at::NoGradGuard no_grad;
  FlatParameter& flat = paged.flat;
  const at::Tensor parameter = flat.parameters()[index].tensor;
  const at::Tensor given = parameter.detach();
  Page& page = paged.page_in_use();
  if (is_summoned) {
    flat.view_in(page.buffer(), index).copy_(given);
    page.note_write();
  } else {
    const at::Tensor ordered = at::empty({parameter.numel()}, given.options().dtype(flat.dtype()));
    view_in(ordered, flat.geometry(index), 0).copy_(given);
    const Range own = flat.layout().owned(static_cast<int64_t>(index), flat.rank());
    flat.parameter_shards()[index].copy_(ordered.narrow(0, own.begin, own.numel()));
  }
  const ParameterGeometry& geometry = flat.geometry(index);
  parameter.set_data(page.view(is_summoned ? flat.dtype() : flat.gather_dtype(), geometry.sizes, geometry.strides,
                               flat.layout().offset(static_cast<int64_t>(index))));
}

}  // namespace

void reattach(Unit& unit, bool may_change) {
  for (auto& paged : unit.flat_parameters()) {
    for (size_t i = 0; i < paged->flat.parameters().size(); ++i) {
      if (!paged->flat.is_shard_attached(i))
        throw std::logic_error(paged->flat.shard_label(i) +
                               " was replaced after wrapping (by set_data() on fsdp.parameters()): change values with "
                               "copy_()");
      if (is_attached(*paged, i)) continue;
      require_may_reattach(unit, *paged, i, may_change);
      take_values(*paged, i, unit.is_summoned());
    }
  }
}

void require_write(const Unit& unit, const Page& page, const at::Tensor& view, const std::string& operation,
                   const std::string& rank) {
  const std::string where = page.name() + " on rank " + rank;
  const bool is_shard = std::ranges::any_of(unit.flat_parameters(),
                                            [&](const auto& paged) { return &paged->flat.shard_page() == &page; });
  if (is_shard)
    throw std::logic_error(
        operation + " would change " + where +
        " inside summon_full_params(), whose full parameters would not follow: leave the scope first "
        "(before optimizer.step(), say)");
  if (operation == "aten::set_") return;  // torch::load() calls set_(); reattach() detects the change later
  throw std::logic_error(operation + " would change " + name_at(unit, page, view) + " of " + where +
                         ", which is sharded: change it inside summon_full_params(), or change the shards, "
                         "fsdp.parameters(), of which optimizers are made after wrapping");
}

void require_attached(const Unit& unit, const Page& page, const std::string& rank) {
  if (page.is_attached()) return;
  throw std::logic_error("a view of a parameter of " + unit.name() + " is used on rank " + rank +
                         (unit.is_summoned() ? " inside summon_full_params() that was made before it (in a graph that "
                                               "goes backward only now, say)"
                                             : " that was made inside summon_full_params(), and kept") +
                         ": parameters are in another dtype or on another device there, expected one made where it "
                         "is used");
}

}  // namespace tessera::internal
