#include "tessera/fsdp/unit.h"

#include <ATen/ops/empty.h>
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

Unit::Unit(int index, const PlannedUnit& plan, Communicator& comm, const FlatParameterOptions& options,
           CountedBuffers& buffers, OrderLog& log, bool sync_module_states, ShardSource source, SecondaryCopy secondary)
    : index_(index),
      name_(label_of(plan)),
      plan_name_(plan.name),
      comm_(comm),
      memory_(buffers),
      log_(log),
      source_(source),
      secondary_(secondary) {
  at::NoGradGuard no_grad;
  auto parts = split_into_flat_parameters(plan);
  for (auto& parameters : parts) {
    const std::string name = parts.size() > 1 ? name_ + traits_of(parameters[0]) : name_;
    const bool is_exempt = parameters[0].full_precision;
    auto group = std::make_unique<PagedFlatParameter>(
        PagedFlatParameter{FlatParameter(name, std::move(parameters), comm, sync_module_states, options)});
    const FlatParameter& flat = group->flat;
    group->page = std::make_unique<Page>(options.pager, index, name, comm.device());
    if (flat.is_cast()) group->exact_page = std::make_unique<Page>(options.pager, index, name, comm.device());
    if (is_exempt && options.gather_dtype && *options.gather_dtype != flat.dtype() && at::isFloatingType(flat.dtype()))
      group->page->convert_activations(*options.gather_dtype);
    for (const PlannedParameter& parameter : group->flat.parameters()) parameter.tensor.mutable_grad() = at::Tensor();
    point_parameters(*group, *group->page, group->flat.gather_dtype());
    groups_.push_back(std::move(group));
  }
  is_whole_ = comm.size() == 1 && source_.engine == nullptr &&
              std::none_of(groups_.begin(), groups_.end(), [](const auto& group) { return group->flat.is_cast(); });
  for (auto& group : groups_) {
    if (is_whole_) {
      group->page->lend(group->flat.shard());
    } else {
      group->page->watch_writes(group->flat.shard_page());
    }
  }
  if (is_whole_) state_ = State::kResident;
}

Unit::~Unit() {
  for (auto& group : groups_) {
    group->page->detach();
    for (const auto& page : {group->exact_page.get(), group->host_page.get()})
      if (page != nullptr) page->detach();
  }
}

// The module's members, ties and requires_grad stay; the data is now where the page says.
void Unit::point_parameters(PagedFlatParameter& group, const Page& page, at::ScalarType dtype) {
  const auto& parameters = group.flat.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const ParameterGeometry& geometry = group.flat.geometry(i);
    at::Tensor parameter = parameters[i].tensor;
    const at::Tensor view =
        page.view(dtype, geometry.sizes, geometry.strides, group.flat.layout().offset(static_cast<int64_t>(i)));
    is_deferred(parameter) ? fill_deferred(parameter, view) : parameter.set_data(view);
  }
}

std::string Unit::parameter_at(const Page& page, const at::Tensor& view) const {
  for (const auto& group : groups_) {
    if (group->page.get() != &page) continue;
    for (size_t i = 0; i < group->flat.parameters().size(); ++i) {
      const auto begin = group->flat.layout().offset(static_cast<int64_t>(i));
      const auto end = begin + std::max<int64_t>(group->flat.layout().numel(static_cast<int64_t>(i)), 1);
      if (view.storage_offset() >= begin && view.storage_offset() < end)
        return "parameter '" + group->flat.parameters()[i].fqn + "'";
    }
  }
  return "a parameter";
}

bool Unit::is_shard_page(const Page& page) const {
  return std::any_of(groups_.begin(), groups_.end(),
                     [&](const auto& group) { return &group->flat.shard_page() == &page; });
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
  if (state_ != State::kSharded || source_.engine == nullptr || has_secondary()) return;
  for (auto& group : groups_)
    if (DiskPager* disk = DiskPager::of(group->flat.shard()); disk != nullptr && !group->flat.has_low_precision_copy())
      disk->read_ahead(group->flat.shard());
}

// A copy needs a buffer of the shard only, 1/N of what a gather does, so that one more of them is on its
// way than gathers are. A rank alone has its shard copied to where it is used.
void Unit::start_fetch() {
  if (state_ != State::kSharded || source_.engine == nullptr || has_secondary()) return;
  const bool is_alone = comm_.size() == 1;
  for (auto& group : groups_) {
    FlatParameter& flat = group->flat;
    group->page->accept_writes();
    CountedBuffers& memory = is_alone ? memory_ : *source_.staging;
    group->staging = memory.take(flat.layout().full_numel() / comm_.size(), flat.gather_dtype());
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
    group->fetching = Copy();
    if (group->held.values().defined()) source_.engine->wait_for_host_memory(group->held.values());
    group->held.release();
    group->staging.reset();
  }
}

void Unit::start_gather() {
  start_fetch();
  if (state_ != State::kSharded && state_ != State::kFetching) return;
  if (state_ == State::kSharded && has_secondary()) return gather_secondary();
  for (size_t i = 0; i < groups_.size(); ++i) {
    PagedFlatParameter& group = *groups_[i];
    group.secondary.reset();
    if (buffers_.size() == i)
      buffers_.push_back(memory_.take(group.flat.layout().full_numel(), group.flat.gather_dtype()));
    log_.add("all-gather", group.flat.name(), buffers_[i].numel());
    const bool is_fetched = state_ == State::kFetching;
    is_fetched ? group.fetching.wait() : group.page->accept_writes();
    if (const int64_t encoded_bytes = group.flat.encoded_bytes(); encoded_bytes > 0) {
      group.wire = memory_.take(encoded_bytes * comm_.size(), at::kByte);
      const at::Tensor& shard = is_fetched ? group.staging : group.flat.shard();
      group.gathering = group.flat.gather_encoded(group.wire, shard, comm_);
    } else {
      group.gathering = is_fetched ? comm_.all_gather(buffers_[i], group.staging, {}, group.flat.name())
                                   : group.flat.gather(buffers_[i], comm_);
    }
  }
  state_ = State::kGathering;
}

void Unit::finish_gather() {
  if (state_ != State::kGathering) return;
  for (size_t i = 0; i < groups_.size(); ++i) {
    groups_[i]->gathering.wait();
    if (groups_[i]->wire.defined()) groups_[i]->flat.decode(std::exchange(groups_[i]->wire, {}), buffers_[i]);
    groups_[i]->page->lend(buffers_[i]);
  }
  uses_.begin(comm_.device());
  return_staging();
  state_ = State::kResident;
}

void Unit::release() {
  if (is_whole_) return set_current(Page::GradMode::kNone);
  finish_gather();
  if (state_ == State::kSharded) return;
  uses_.join();  // the buffers go
  cut_secondary();
  // What a copy that was never waited for has to say is of no interest.
  for (auto& group : groups_) {
    group->fetching = Copy();
    group->gathering.wait();
    group->wire.reset();
  }
  return_staging();
  for (auto& group : groups_)
    if (group->page->is_lent()) group->page->take_back();
  buffers_.clear();
  state_ = State::kSharded;
}

// ---- secondary copies ---------------------------------------------------------------------------

// All groups of a unit are gathered, released and, by an optimizer, written to together.
bool Unit::has_secondary() const {
  return secondary_.comm != nullptr && !groups_.empty() && groups_[0]->secondary.defined() && !is_stale();
}

// The pages remain as stale, or not, as they were when the parts were cut.
void Unit::gather_secondary() {
  for (auto& group : groups_) {
    buffers_.push_back(memory_.take(group->flat.layout().full_numel(), group->flat.gather_dtype()));
    log_.add("all-gather from secondary shards", group->flat.name(), buffers_.back().numel());
    group->gathering = secondary_.comm->all_gather(buffers_.back(), group->secondary, {}, group->flat.name());
  }
  state_ = State::kGathering;
}

// What came from such parts is cut from no more: it would be the same.
void Unit::cut_secondary() {
  if (!keeps_secondary_ || state_ != State::kResident || buffers_.empty() || has_secondary() || is_stale()) return;
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < groups_.size(); ++i) {
    const int64_t part_numel = buffers_[i].numel() / secondary_.comm->size();
    groups_[i]->secondary = secondary_.memory->take(part_numel, buffers_[i].scalar_type());
    groups_[i]->secondary.copy_(buffers_[i].narrow(0, secondary_.comm->rank() * part_numel, part_numel));
  }
}

void Unit::drop_secondary() {
  keeps_secondary_ = false;
  for (auto& group : groups_) {
    if (group->secondary.defined()) group->gathering.wait();  // it may be on its way to the others
    group->secondary.reset();
  }
}

void Unit::wait_for_reads() {
  if (source_.engine == nullptr) return;
  for (auto& group : groups_) {
    source_.engine->wait_for_host_memory(group->flat.shard());
    if (const at::Tensor copy = group->flat.low_precision_values(); copy.defined())
      source_.engine->wait_for_host_memory(copy);
  }
}

bool Unit::is_stale() const {
  for (const auto& group : groups_)
    if (group->page->is_stale()) return true;
  return false;
}

void Unit::set_current(Page::GradMode use) {
  for (auto& group : groups_) {
    group->page->set_current(use);
    for (const auto& page : {group->exact_page.get(), group->host_page.get()})
      if (page != nullptr) page->set_current(use);
  }
}

uint32_t Unit::version() const {
  uint32_t version = 0;
  for (const auto& group : groups_)
    version += group->flat.shard().unsafeGetTensorImpl()->version_counter().current_version();
  return version;
}

// ---- pinned units -------------------------------------------------------------------------------

void Unit::pin(bool writeback, bool on_host) {
  at::NoGradGuard no_grad;
  release();
  on_host = on_host && !comm_.device().is_cpu();
  std::vector<at::Tensor> full;  // of all groups before any is lent: a gather may fail
  for (auto& group : groups_)
    if (on_host || !is_whole_) full.push_back(on_host ? full_values(*group).cpu() : full_values(*group));
  for (size_t i = 0; i < groups_.size(); ++i) {
    auto& group = groups_[i];
    if (on_host) {
      if (!group->host_page) group->host_page = std::make_unique<Page>(group->page->pager(), index_, name_, at::kCPU);
      group->page->accept_writes();
      group->host_page->lend(full[i]);
      point_parameters(*group, *group->host_page, group->flat.dtype());
      group->flat.set_shard_writable(false);
    } else if (!is_whole_) {
      Page& page = group->exact_page ? *group->exact_page : *group->page;
      group->page->accept_writes();
      buffers_.push_back(full[i]);
      page.lend(buffers_.back());
      if (group->exact_page) point_parameters(*group, page, group->flat.dtype());
      group->flat.set_shard_writable(false);
    } else if (!writeback) {
      saved_.push_back(group->flat.shard().clone());  // comes back: a step in between would be lost
      group->flat.set_shard_writable(false);
    }
    page_in_use(*group).set_writable(true);
    group->writes_before = page_in_use(*group).writes();
  }
  is_pinned_ = true;
  loses_writes_ = !writeback;
  state_ = State::kResident;
}

void Unit::help_to_pin() {
  release();
  if (is_whole_) return;
  for (auto& group : groups_) full_values(*group);
}

void Unit::unpin(bool writeback) {
  at::NoGradGuard no_grad;
  bring_home(/*may_change=*/true);
  for (size_t i = 0; i < groups_.size(); ++i) {
    PagedFlatParameter& group = *groups_[i];
    Page& page = page_in_use(group);
    page.set_writable(false);
    group.flat.set_shard_writable(true);
    const bool is_apart = !is_shard_itself(page, group);
    if (!writeback && !is_apart) group.flat.shard().copy_(saved_[i]);
    // Where no operator has written, to a backward that comes the shards are what they were.
    const bool is_written = page.writes() != group.writes_before;
    if (writeback && is_apart) copy_own_part(group, is_written ? group.flat.shard() : group.flat.shard().data());
    if (&page == group.page.get()) continue;
    page.take_back();
    point_parameters(group, *group.page, group.flat.gather_dtype());
  }
  saved_.clear();
  is_pinned_ = false;
}

void Unit::copy_own_part(const PagedFlatParameter& group, const at::Tensor& shard) const {
  const Range own = group.flat.layout().shard(comm_.rank());
  shard.copy_(page_in_use(group).buffer().narrow(0, own.begin, own.numel()));
}

void Unit::write_back() {
  at::NoGradGuard no_grad;
  bring_home(/*may_change=*/true);
  for (auto& group : groups_) {
    const Page& page = page_in_use(*group);
    if (loses_writes_) {
      if (page.writes() == group->writes_before) continue;
      throw std::logic_error("the parameters of " + group->flat.name() + " on rank " + std::to_string(comm_.rank()) +
                             " were changed inside summon_full_params() with writeback = false, which loses that: "
                             "leave the scope before saving");
    }
    if (is_shard_itself(page, *group)) continue;
    group->flat.set_shard_writable(true);
    copy_own_part(*group, group->flat.shard().data());  // to a backward that comes the shards are what they were
    group->flat.set_shard_writable(false);
  }
}

at::Tensor Unit::full_values(const PagedFlatParameter& group) {
  if (is_pinned_) return page_in_use(group).buffer();
  const at::Tensor full = memory_.take(group.flat.layout().full_numel(), group.flat.dtype());
  log_.add("all-gather", group.flat.name(), full.numel());
  group.flat.gather(full, comm_).wait();
  return full;
}

void Unit::bring_home(bool may_change) {
  for (auto& group : groups_) {
    for (size_t i = 0; i < group->flat.parameters().size(); ++i) {
      const PlannedParameter& parameter = group->flat.parameters()[i];
      if (is_at_home(*group, i)) continue;
      if (page_in_use(*group).holds(parameter.tensor))
        throw std::logic_error("parameter '" + parameter.fqn + "' on rank " + std::to_string(comm_.rank()) +
                               " was given the data of another parameter of " + name_ +
                               ", or another shape (by set_data(), a swap): copy values inside summon_full_params()");
      const at::ScalarType dtype = parameter.tensor.scalar_type();
      const bool fits = parameter.tensor.layout() == at::kStrided && page_of(parameter.tensor) == nullptr &&
                        parameter.tensor.sizes() == at::IntArrayRef(group->flat.geometry(i).sizes) &&
                        (dtype == group->flat.dtype() || dtype == group->flat.gather_dtype());
      if (!fits || !may_change)
        throw std::logic_error("parameter '" + parameter.fqn + "' on rank " + std::to_string(comm_.rank()) +
                               " was replaced after wrapping (by module.to(), or set_data)" +
                               (fits ? " between a forward and its backward" : "") +
                               ": move and convert the module before it is wrapped, and change values between steps");
      bring_home(*group, i);
    }
  }
}

bool Unit::is_at_home(const PagedFlatParameter& group, size_t index) const {
  const at::Tensor& parameter = group.flat.parameters()[index].tensor;
  const ParameterGeometry& geometry = group.flat.geometry(index);
  return page_in_use(group).holds(parameter) &&
         parameter.storage_offset() == group.flat.layout().offset(static_cast<int64_t>(index)) &&
         parameter.sizes() == at::IntArrayRef(geometry.sizes) &&
         parameter.strides() == at::IntArrayRef(geometry.strides);
}

// What the user has given a parameter in place of its data shall be its data. Whoever still has those, a target network
// that swapped with it or a view, would see the new values, too.
void Unit::require_unheld(const PagedFlatParameter& group, size_t index) const {
  const auto& parameters = group.flat.parameters();
  const Page& page = page_in_use(group);
  const auto own = std::ranges::count_if(
      parameters, [&](const PlannedParameter& parameter) { return page.holds(parameter.tensor); });
  const at::Tensor view = page.view(group.flat.gather_dtype(), {0}, {1}, 0);
  if (view.storage().use_count() == static_cast<size_t>(own) + 2) return;  // and the page, and the view
  throw std::logic_error("parameter '" + parameters[index].fqn + "' on rank " + std::to_string(comm_.rank()) +
                         " was given other data while another tensor still shares those of " + name_ +
                         " (a network that it was swapped with, a view or detach() that was kept), and would follow: "
                         "copy values with copy_(), or let go of that tensor");
}

// All ranks are expected to have given it the same values; each takes its part, as when the module was wrapped.
void Unit::bring_home(PagedFlatParameter& group, size_t index) {
  require_unheld(group, index);
  at::NoGradGuard no_grad;
  FlatParameter& flat = group.flat;
  const at::Tensor parameter = flat.parameters()[index].tensor;
  const int64_t offset = flat.layout().offset(static_cast<int64_t>(index));
  Page& page = page_in_use(group);
  const at::Tensor given = parameter.detach();
  if (is_pinned_) {
    flat.view_in(page.buffer(), index).copy_(given);
    page.note_write();
  } else {
    const at::Tensor ordered = at::empty({parameter.numel()}, given.options().dtype(flat.dtype()));
    view_in(ordered, flat.geometry(index), 0).copy_(given);
    const Range own = flat.layout().owned(static_cast<int64_t>(index), comm_.rank());
    flat.parameter_shards()[index].copy_(ordered.narrow(0, own.begin, own.numel()));
  }
  const ParameterGeometry& geometry = flat.geometry(index);
  parameter.set_data(
      page.view(is_pinned_ ? flat.dtype() : flat.gather_dtype(), geometry.sizes, geometry.strides, offset));
}

}  // namespace tessera
