#include "tessera/fsdp/unit.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "tessera/flat/deferred.h"

namespace tessera {
namespace {

std::string label_of(const PlannedUnit& plan) {
  return plan.name == "(root)" ? "the root unit" : "unit '" + plan.name + "'";
}

std::string traits_of(const PlannedParameter& parameter) {
  return std::string(" (") + c10::toString(parameter.tensor.scalar_type()) +
         (parameter.full_precision ? ", full precision" : "") +
         (parameter.tensor.requires_grad() ? ", trainable)" : ", frozen)");
}

}  // namespace

Unit::Unit(int index, const PlannedUnit& plan, Communicator& comm, const FlatGroupOptions& options, BufferPool& pool,
           Pager* pager, OrderLog& log, bool sync, ShardSource source)
    : index_(index),
      name_(label_of(plan)),
      plan_name_(plan.name),
      comm_(comm),
      pool_(pool),
      log_(log),
      source_(source) {
  at::NoGradGuard no_grad;
  auto parts = split_into_groups(plan);
  for (auto& parameters : parts) {
    const std::string name = parts.size() > 1 ? name_ + traits_of(parameters[0]) : name_;
    const bool is_exempt = parameters[0].full_precision;
    auto group = std::make_unique<PagedGroup>(PagedGroup{FlatGroup(name, std::move(parameters), comm, sync, options)});
    const FlatGroup& flat = group->flat;
    group->page = std::make_unique<Page>(pager, index, name, comm.device());
    group->grad_page = std::make_unique<Page>(pager, -1, name, comm.device());
    if (flat.is_cast()) group->exact_page = std::make_unique<Page>(pager, index, name, comm.device());
    if (is_exempt && options.gather_dtype && *options.gather_dtype != flat.dtype() && at::isFloatingType(flat.dtype()))
      group->page->convert_activations(*options.gather_dtype);
    adopt(*group);
    groups_.push_back(std::move(group));
  }
  is_whole_ = comm.size() == 1 && source_.engine == nullptr &&
              std::none_of(groups_.begin(), groups_.end(), [](const auto& group) { return group->flat.is_cast(); });
  for (auto& group : groups_) {
    if (is_whole_) {
      group->page->lend(group->flat.shard());
    } else {
      group->page->watch_version(group->flat.shard());
    }
  }
  if (is_whole_) state_ = State::kResident;
}

Unit::~Unit() {
  for (auto& group : groups_) {
    group->page->detach();
    group->grad_page->detach();
    if (group->exact_page) group->exact_page->detach();
  }
}

// The module's members, ties and requires_grad stay; the data is now where the page says.
void Unit::adopt(PagedGroup& group) {
  const auto& parameters = group.flat.parameters();
  group.accumulators.resize(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    const ParameterGeometry& geometry = group.flat.geometry(i);
    at::Tensor parameter = parameters[i].tensor;
    parameter.mutable_grad() = at::Tensor();
    group.grad_guards.push_back(group.grad_page->view(group.flat.gather_dtype(), geometry.sizes, geometry.strides, 0));
  }
  point_parameters(group, *group.page, group.flat.gather_dtype());
  for (size_t i = 0; i < parameters.size(); ++i) at::Tensor(parameters[i].tensor).mutable_grad() = group.grad_guards[i];
}

// A change of dtype makes autograd forget a parameter's accumulator, and with it our hook.
void Unit::point_parameters(PagedGroup& group, const Page& page, at::ScalarType dtype) {
  const auto& parameters = group.flat.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const ParameterGeometry& geometry = group.flat.geometry(i);
    at::Tensor parameter = parameters[i].tensor;
    if (parameter.scalar_type() != dtype) group.accumulators[i].reset();
    const at::Tensor view =
        page.view(dtype, geometry.sizes, geometry.strides, group.flat.layout().offset(static_cast<int64_t>(i)));
    is_deferred(parameter) ? fill_deferred(parameter, view) : parameter.set_data(view);
  }
}

int64_t Unit::full_bytes() const {
  int64_t bytes = 0;
  for (const auto& group : groups_) bytes += group->flat.full_bytes();
  return bytes;
}

int64_t Unit::trainable_count() const {
  int64_t count = 0;
  for (const auto& group : groups_)
    for (const auto& parameter : group->flat.parameters()) count += parameter.tensor.requires_grad() ? 1 : 0;
  return count;
}

void Unit::read_ahead() {
  if (state_ != State::kSharded || source_.engine == nullptr) return;
  for (auto& group : groups_)
    if (DiskPager* disk = DiskPager::of(group->flat.shard()); disk != nullptr && !group->flat.has_narrow_copy())
      disk->read_ahead(group->flat.shard());
}

// A copy needs a buffer of the shard only, 1/N of what a gather does, so that one more of them is on its
// way than gathers are. A rank alone has its shard copied to where it is used.
void Unit::start_fetch() {
  if (state_ != State::kSharded || source_.engine == nullptr) return;
  const bool is_alone = comm_.size() == 1;
  for (auto& group : groups_) {
    FlatGroup& flat = group->flat;
    group->page->accept_version();
    BufferPool& pool = is_alone ? pool_ : *source_.staging;
    group->staging = pool.take(flat.full_bytes() / comm_.size()).view(flat.gather_dtype());
    if (is_alone) buffers_.push_back(group->staging);
    const at::Tensor& source = flat.link_source();
    DiskPager* disk = DiskPager::of(source);
    if (disk != nullptr) group->held = disk->hold(source, /*writes=*/false);
    group->fetching = source_.engine->to_device(group->staging, disk != nullptr ? group->held.values() : source);
  }
  state_ = State::kFetching;
}

// What was fetched has been gathered, or will not be: the staging is free for work that is ordered after.
void Unit::return_staging() {
  for (auto& group : groups_) {
    if (!group->staging.defined()) continue;
    if (group->held.values().defined()) {
      group->fetching = Copy();
      group->held.release();
    }
    if (comm_.size() > 1) source_.staging->give(group->staging.view(at::kByte));
    group->staging.reset();
  }
}

void Unit::start_gather() {
  start_fetch();
  if (state_ != State::kSharded && state_ != State::kFetching) return;
  for (size_t i = 0; i < groups_.size(); ++i) {
    PagedGroup& group = *groups_[i];
    if (buffers_.size() == i) buffers_.push_back(pool_.take(group.flat.full_bytes()).view(group.flat.gather_dtype()));
    log_.add("all-gather", group.flat.name(), buffers_[i].numel());
    if (state_ == State::kFetching) {
      group.fetching.wait();
      group.gathering = comm_.all_gather(buffers_[i], group.staging, {}, group.flat.name());
    } else {
      group.page->accept_version();
      group.gathering = group.flat.gather(buffers_[i], comm_);
    }
  }
  state_ = State::kGathering;
}

void Unit::finish_gather() {
  if (state_ != State::kGathering) return;
  for (size_t i = 0; i < groups_.size(); ++i) {
    groups_[i]->gathering.wait();
    groups_[i]->page->lend(buffers_[i]);
  }
  return_staging();
  state_ = State::kResident;
}

void Unit::release() {
  if (is_whole_) return set_current(Page::Use::kNone);
  finish_gather();
  if (state_ == State::kSharded) return;
  // The shards may be written to from now on, so that nothing may read them any more. (What a copy that
  // was never waited for has to say is of no interest.)
  for (auto& group : groups_) {
    group->fetching = Copy();
    group->gathering.wait();
  }
  return_staging();
  for (auto& group : groups_)
    if (group->page->is_lent()) group->page->take_back();
  for (at::Tensor& buffer : buffers_) pool_.give(buffer.view(at::kByte));
  buffers_.clear();
  state_ = State::kSharded;
}

bool Unit::is_stale() const {
  for (const auto& group : groups_)
    if (group->page->is_stale()) return true;
  return false;
}

void Unit::set_current(Page::Use use) {
  for (auto& group : groups_) {
    group->page->set_current(use);
    if (group->exact_page) group->exact_page->set_current(use);
  }
}

void Unit::pin() {
  at::NoGradGuard no_grad;
  release();
  is_pinned_ = true;
  for (auto& group : groups_) {
    if (!is_whole_) {
      Page& page = group->exact_page ? *group->exact_page : *group->page;
      buffers_.push_back(pool_.take(group->flat.exact_full_bytes()).view(group->flat.dtype()));
      log_.add("all-gather", group->flat.name(), buffers_.back().numel());
      group->page->accept_version();
      group->flat.gather(buffers_.back(), comm_).wait();
      page.lend(buffers_.back());
      if (group->exact_page) point_parameters(*group, page, group->flat.dtype());
    }
    page_in_use(*group).set_writable(true);
  }
  state_ = State::kResident;
}

void Unit::help_to_pin() {
  release();
  if (is_whole_) return;
  for (auto& group : groups_) {
    const FlatGroup& flat = group->flat;
    at::Tensor bytes = pool_.take(flat.exact_full_bytes());
    log_.add("all-gather", flat.name(), flat.layout().full_numel());
    flat.gather(bytes.view(flat.dtype()), comm_).wait();
    pool_.give(std::move(bytes));
  }
}

void Unit::unpin(bool writeback) {
  at::NoGradGuard no_grad;
  for (auto& group : groups_) {
    Page& page = page_in_use(*group);
    page.set_writable(false);
    if (writeback && !is_whole_) {
      const Range own = group->flat.layout().shard(comm_.rank());
      group->flat.shard().copy_(page.buffer().narrow(0, own.begin, own.numel()));
    }
    if (!group->exact_page) continue;
    page.take_back();
    point_parameters(*group, *group->page, group->flat.gather_dtype());
  }
  is_pinned_ = false;
}

bool Unit::inspect_parameters() {
  bool hook_missing = false;
  for (auto& group : groups_) {
    for (size_t i = 0; i < group->grad_guards.size(); ++i) {
      const PlannedParameter& planned = group->flat.parameters()[i];
      at::Tensor parameter = planned.tensor;
      if (!page_in_use(*group).holds(parameter))
        throw std::logic_error(
            "parameter '" + planned.fqn + "' on rank " + std::to_string(comm_.rank()) +
            " was replaced after wrapping (by module.to(), or set_data): move and convert the module "
            "before it is wrapped");
      at::Tensor& shard = group->flat.parameter_shards()[i];
      if (!parameter.grad().is_same(group->grad_guards[i])) {
        shard.mutable_grad() = at::Tensor();
        parameter.mutable_grad() = group->grad_guards[i];
      }
      if (parameter.requires_grad() != shard.requires_grad()) shard.set_requires_grad(parameter.requires_grad());
      if (parameter.requires_grad() && !group->accumulators[i]) hook_missing = true;
    }
  }
  return hook_missing;
}

}  // namespace tessera
