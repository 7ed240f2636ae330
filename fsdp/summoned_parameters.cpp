#include "fsdp/summoned_parameters.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>

#include "fsdp/checks/parameter_checks.h"
#include "fsdp/sharded_model.h"

namespace tessera::internal {
namespace {

// Returns the page for the full parameters in their own dtype, on the device or the host.
Page& page_for(PagedFlatParameter& paged, Summon where) {
  if (where == Summon::kOnHost) {
    const Page& page = *paged.page;
    if (!paged.host_page) paged.host_page = std::make_unique<Page>(page.pager(), page.id(), page.name(), at::kCPU);
    return *paged.host_page;
  }
  return paged.exact_page ? *paged.exact_page : *paged.page;
}

bool shows_shard(const PagedFlatParameter& paged) { return paged.page_in_use().buffer().is_same(paged.flat.shard()); }

}  // namespace

void SummonedParameters::show(Summon where, Changes changes, bool is_whole) {
  at::NoGradGuard no_grad;
  const bool on_host = where == Summon::kOnHost, are_copies = on_host || !is_whole;
  std::vector<at::Tensor> full;  // gathers all flat parameters before showing any, because a gather may fail
  for (auto& paged : flat_parameters_) {
    if (are_copies) full.push_back(on_host ? gather(*paged).cpu() : gather(*paged));
  }
  changes_ = changes;
  for (size_t i = 0; i < flat_parameters_.size(); ++i) {
    PagedFlatParameter& paged = *flat_parameters_[i];
    if (are_copies) {
      Page& page = page_for(paged, where);
      paged.page->accept_writes();
      page.attach(full[i]);
      if (&page != paged.page.get()) paged.point_parameters(page, paged.flat.dtype());
    } else if (changes == Changes::kLost) {
      saved_.push_back(paged.flat.shard().clone());
    }
    // Forbids steps that change the shard, because hide() may overwrite it with the full parameters or the saved copy.
    if (are_copies || changes == Changes::kLost) paged.flat.set_shard_writable(false);
    paged.page_in_use().set_writable(true);
    paged.writes_before = paged.page_in_use().writes();
  }
}

void SummonedParameters::hide(bool writeback) {
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < flat_parameters_.size(); ++i) {
    PagedFlatParameter& paged = *flat_parameters_[i];
    Page& page = paged.page_in_use();
    page.set_writable(false);
    paged.flat.set_shard_writable(true);
    // If no value has changed, keeps the shard's version, so that the backward of an earlier graph may still run.
    if (shows_shard(paged)) {
      if (!saved_.empty()) paged.flat.shard().data().copy_(saved_[i]);
      continue;
    }
    const bool is_written = page.writes() != paged.writes_before;
    if (writeback) copy_own_part(paged, is_written ? paged.flat.shard() : paged.flat.shard().data());
    page.detach();
    if (&page != paged.page.get()) paged.point_parameters(*paged.page, paged.flat.gather_dtype());
  }
  saved_.clear();
}

void SummonedParameters::write_back() {
  at::NoGradGuard no_grad;
  for (auto& paged : flat_parameters_) {
    const Page& page = paged->page_in_use();
    if (changes_ == Changes::kLost) {
      if (page.writes() == paged->writes_before) continue;
      throw std::logic_error("the parameters of " + paged->flat.name() + " on rank " + std::to_string(comm_.rank()) +
                             " were changed inside summon_full_params() with writeback = false, which loses that: "
                             "leave the scope before saving");
    }
    if (shows_shard(*paged)) continue;
    paged->flat.set_shard_writable(true);
    copy_own_part(*paged, paged->flat.shard().data());  // keeps the version, so that an earlier graph may run backward
    paged->flat.set_shard_writable(false);
  }
}

void SummonedParameters::copy_own_part(const PagedFlatParameter& paged, const at::Tensor& shard) const {
  const Range own = paged.flat.layout().shard(comm_.rank());
  shard.copy_(paged.page_in_use().buffer().narrow(0, own.begin, own.numel()));
}

at::Tensor SummonedParameters::gather(const PagedFlatParameter& paged) {
  const at::Tensor full = memory_.take(paged.flat.layout().full_numel(), paged.flat.dtype());
  log_.add("all-gather", paged.flat.name(), full.numel());
  comm_.all_gather(full, paged.flat.shard_for(full), {}, paged.flat.name()).wait();
  return full;
}

void Unit::summon(Summon where, SummonedParameters::Changes changes) {
  reshard();
  const bool is_whole = state_ == State::kWhole;
  if (where == Summon::kElsewhere) {
    for (auto& paged : flat_parameters_)
      if (!is_whole) full_values(*paged);
    return;
  }
  summoned_.show(where, changes, is_whole);
  uses_.begin(context_.comm.device());
  state_ = State::kSummoned;
}

void Unit::dismiss(bool writeback) {
  reattach(*this, /*may_change=*/true);
  uses_.join();
  uses_ = {};  // a kWhole unit has no gather for which other streams must wait
  summoned_.hide(writeback);
  // The pages of a unit are attached now only if the shard has all parameters.
  const bool is_whole = std::ranges::all_of(flat_parameters_, [](auto& paged) { return paged->page->is_attached(); });
  state_ = is_whole ? State::kWhole : State::kSharded;
}

void Unit::write_back() {
  reattach(*this, /*may_change=*/true);
  summoned_.write_back();
}

at::Tensor Unit::full_values(const PagedFlatParameter& paged) {
  return is_summoned() ? paged.page_in_use().buffer() : summoned_.gather(paged);
}

}  // namespace tessera::internal
