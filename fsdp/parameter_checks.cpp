#include "fsdp/parameter_checks.h"

#include <algorithm>
#include <stdexcept>

namespace tessera::internal {
namespace {

std::string name_at(const Unit& unit, const Page& page, const at::Tensor& view) {
  for (const auto& paged : unit.flat_parameters())
    if (paged->page.get() == &page)
      if (std::string parameter = paged->parameter_at(view); !parameter.empty()) return parameter;
  return "a parameter";
}

void reattach_parameter(Unit& unit, PagedFlatParameter& paged, size_t index, bool may_change) {
  if (paged.is_attached(index)) return;
  const PlannedParameter& parameter = paged.flat.parameters()[index];
  const std::string label = "parameter '" + parameter.fqn + "' on rank " + std::to_string(paged.flat.rank());
  if (paged.page_in_use().holds(parameter.tensor))
    throw std::logic_error(label + " was given the data of another parameter of " + unit.name() +
                           ", or another shape (by set_data(), a swap): copy values inside summon_full_params()");
  const bool fits = paged.can_take(index);
  if (!fits || !may_change)
    throw std::logic_error(label + " was replaced after wrapping (by module.to(), or set_data)" +
                           (fits ? " between a forward and its backward" : "") +
                           ": move and convert the module before it is wrapped, and change values between steps");
  paged.reattach(index, unit.is_summoned(), unit.name(), paged.flat.rank());
}

}  // namespace

void reattach(Unit& unit, bool may_change) {
  for (auto& paged : unit.flat_parameters()) {
    for (size_t i = 0; i < paged->flat.parameters().size(); ++i) {
      if (!unit.is_summoned())
        paged->reattach_shard(i, /*is_summoned=*/false, may_change, unit.name(), paged->flat.rank());
      reattach_parameter(unit, *paged, i, may_change);
    }
  }
}

void require_shards_attached(Unit& unit) {
  for (auto& paged : unit.flat_parameters())
    for (size_t i = 0; i < paged->flat.parameters().size(); ++i)
      paged->reattach_shard(i, /*is_summoned=*/true, /*may_change=*/true, unit.name(), paged->flat.rank());
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
  if (operation == "aten::set_") return;  // torch::load(): reattach() finds it, as it does set_data()
  throw std::logic_error(operation + " would change " + name_at(unit, page, view) + " of " + where +
                         ", which is sharded: change it inside summon_full_params(), or change the shards, "
                         "fsdp.parameters(), of which optimizers are made after wrapping");
}

void require_lent(const Unit& unit, const Page& page, const std::string& rank) {
  if (page.is_lent()) return;
  throw std::logic_error("a view of a parameter of " + unit.name() + " is used on rank " + rank +
                         (unit.is_summoned() ? " inside summon_full_params() that was made before it (in a graph that "
                                               "goes backward only now, say)"
                                             : " that was made inside summon_full_params(), and kept") +
                         ": parameters are in another dtype or on another device there, expected one made where it "
                         "is used");
}

}  // namespace tessera::internal
