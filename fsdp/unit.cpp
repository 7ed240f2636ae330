#include "fsdp/unit.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace tessera::internal {
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
           CountedBuffers& buffers, CollectiveLog& log, bool sync_module_states, ShardSource source,
           SecondaryCopy secondary)
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
    auto paged = std::make_unique<PagedFlatParameter>(
        PagedFlatParameter{FlatParameter(name, std::move(parameters), comm, sync_module_states, options)});
    const FlatParameter& flat = paged->flat;
    paged->page = std::make_unique<Page>(options.pager, index, name, comm.device());
    if (flat.is_cast()) paged->exact_page = std::make_unique<Page>(options.pager, index, name, comm.device());
    if (is_exempt && options.gather_dtype && *options.gather_dtype != flat.dtype() && at::isFloatingType(flat.dtype()))
      paged->page->convert_activations(*options.gather_dtype);
    for (const PlannedParameter& parameter : paged->flat.parameters()) parameter.tensor.mutable_grad() = at::Tensor();
    paged->point_parameters(*paged->page, paged->flat.gather_dtype());
    flat_parameters_.push_back(std::move(paged));
  }
  is_whole_ = comm.size() == 1 && source_.engine == nullptr &&
              std::none_of(flat_parameters_.begin(), flat_parameters_.end(),
                           [](const auto& paged) { return paged->flat.is_cast(); });
  for (auto& paged : flat_parameters_) {
    if (is_whole_) {
      paged->page->attach(paged->flat.shard());
    } else {
      paged->page->watch_writes(paged->flat.shard_page());
    }
  }
  if (is_whole_) state_ = State::kResident;
}

Unit::~Unit() {
  for (auto& paged : flat_parameters_) {
    paged->page->detach_pager();
    for (const auto& page : {paged->exact_page.get(), paged->host_page.get()})
      if (page != nullptr) page->detach_pager();
  }
}

std::string Unit::parameter_at(const Page& page, const at::Tensor& view) const {
  for (const auto& paged : flat_parameters_)
    if (paged->page.get() == &page)
      if (std::string parameter = paged->parameter_at(view); !parameter.empty()) return parameter;
  return "a parameter";
}

bool Unit::is_shard_page(const Page& page) const {
  return std::any_of(flat_parameters_.begin(), flat_parameters_.end(),
                     [&](const auto& paged) { return &paged->flat.shard_page() == &page; });
}

int64_t Unit::full_bytes() const {
  int64_t bytes = 0;
  for (const auto& paged : flat_parameters_) bytes += paged->flat.full_bytes();
  return bytes;
}

void Unit::read_ahead() {
  if (state_ != State::kSharded || source_.engine == nullptr || has_secondary()) return;
  for (auto& paged : flat_parameters_)
    if (DiskPager* disk = DiskPager::of(paged->flat.shard()); disk != nullptr && !paged->flat.has_low_precision_copy())
      disk->read_ahead(paged->flat.shard());
}

// A copy needs a buffer of the shard only, 1/N of what a gather does, so that one more of them is on its
// way than gathers are. A rank alone has its shard copied to where it is used.
void Unit::start_fetch() {
  if (state_ != State::kSharded || source_.engine == nullptr || has_secondary()) return;
  const bool is_alone = comm_.size() == 1;
  for (auto& paged : flat_parameters_) {
    FlatParameter& flat = paged->flat;
    paged->page->accept_writes();
    CountedBuffers& memory = is_alone ? memory_ : *source_.staging;
    paged->staging = memory.take(flat.layout().full_numel() / comm_.size(), flat.gather_dtype());
    if (is_alone) buffers_.push_back(paged->staging);
    const at::Tensor& source = flat.link_source();
    DiskPager* disk = DiskPager::of(source);
    if (disk != nullptr) paged->held = disk->hold(source, /*writes=*/false);
    paged->fetching = source_.engine->to_device(paged->staging, disk != nullptr ? paged->held.values() : source);
  }
  state_ = State::kFetching;
}

// What was fetched has been gathered, or will not be: the staging is free for work that is ordered after.
void Unit::return_staging() {
  for (auto& paged : flat_parameters_) {
    if (!paged->staging.defined()) continue;
    paged->fetching = Copy();
    if (paged->held.values().defined()) source_.engine->wait_for_host_memory(paged->held.values());
    paged->held.release();
    paged->staging.reset();
  }
}

void Unit::start_gather() {
  start_fetch();
  if (state_ != State::kSharded && state_ != State::kFetching) return;
  if (state_ == State::kSharded && has_secondary()) return gather_secondary();
  for (size_t i = 0; i < flat_parameters_.size(); ++i) {
    PagedFlatParameter& paged = *flat_parameters_[i];
    paged.secondary.reset();
    if (buffers_.size() == i)
      buffers_.push_back(memory_.take(paged.flat.layout().full_numel(), paged.flat.gather_dtype()));
    log_.add("all-gather", paged.flat.name(), buffers_[i].numel());
    const bool is_fetched = state_ == State::kFetching;
    is_fetched ? paged.fetching.wait() : paged.page->accept_writes();
    if (const int64_t encoded_bytes = paged.flat.encoded_bytes(); encoded_bytes > 0) {
      paged.wire = memory_.take(encoded_bytes * comm_.size(), at::kByte);
      const at::Tensor& shard = is_fetched ? paged.staging : paged.flat.shard();
      paged.gathering = paged.flat.gather_encoded(paged.wire, shard, comm_);
    } else {
      paged.gathering = is_fetched ? comm_.all_gather(buffers_[i], paged.staging, {}, paged.flat.name())
                                   : paged.flat.gather(buffers_[i], comm_);
    }
  }
  state_ = State::kGathering;
}

// Else the peers that are not here yet would copy what they need no sooner, and the buffer is one too many meanwhile.
bool Unit::may_gather_ahead() const {
  const Communicator& comm = has_secondary() ? *secondary_.comm : comm_;
  return std::ranges::none_of(flat_parameters_,
                              [&](const auto& paged) { return comm.is_lazy(paged->flat.layout().full_numel()); });
}

void Unit::finish_gather() {
  if (state_ != State::kGathering) return;
  for (size_t i = 0; i < flat_parameters_.size(); ++i) {
    flat_parameters_[i]->gathering.wait();
    if (flat_parameters_[i]->wire.defined())
      flat_parameters_[i]->flat.decode(std::exchange(flat_parameters_[i]->wire, {}), buffers_[i]);
    flat_parameters_[i]->page->attach(buffers_[i]);
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
  for (auto& paged : flat_parameters_) {
    paged->fetching = Copy();
    paged->gathering.wait();
    paged->wire.reset();
  }
  return_staging();
  for (auto& paged : flat_parameters_)
    if (paged->page->is_attached()) paged->page->detach_pager();
  buffers_.clear();
  state_ = State::kSharded;
}

// ---- secondary copies ---------------------------------------------------------------------------

// All flat parameters of a unit are gathered, released and, by an optimizer, written to together.
bool Unit::has_secondary() const {
  return secondary_.comm != nullptr && !flat_parameters_.empty() && flat_parameters_[0]->secondary.defined() &&
         !is_stale();
}

// The pages remain as stale, or not, as they were when the parts were cut.
void Unit::gather_secondary() {
  for (auto& paged : flat_parameters_) {
    buffers_.push_back(memory_.take(paged->flat.layout().full_numel(), paged->flat.gather_dtype()));
    log_.add("all-gather from secondary shards", paged->flat.name(), buffers_.back().numel());
    paged->gathering = secondary_.comm->all_gather(buffers_.back(), paged->secondary, {}, paged->flat.name());
  }
  state_ = State::kGathering;
}

// What came from such parts is cut from no more: it would be the same.
void Unit::cut_secondary() {
  if (!keeps_secondary_ || state_ != State::kResident || buffers_.empty() || has_secondary() || is_stale()) return;
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < flat_parameters_.size(); ++i) {
    const int64_t part_numel = buffers_[i].numel() / secondary_.comm->size();
    flat_parameters_[i]->secondary = secondary_.memory->take(part_numel, buffers_[i].scalar_type());
    flat_parameters_[i]->secondary.copy_(buffers_[i].narrow(0, secondary_.comm->rank() * part_numel, part_numel));
  }
}

void Unit::drop_secondary() {
  keeps_secondary_ = false;
  for (auto& paged : flat_parameters_) {
    if (paged->secondary.defined()) paged->gathering.wait();  // it may be on its way to the others
    paged->secondary.reset();
  }
}

void Unit::wait_for_reads() {
  if (source_.engine == nullptr) return;
  for (auto& paged : flat_parameters_) {
    source_.engine->wait_for_host_memory(paged->flat.shard());
    if (const at::Tensor copy = paged->flat.low_precision_values(); copy.defined())
      source_.engine->wait_for_host_memory(copy);
  }
}

bool Unit::is_stale() const {
  for (const auto& paged : flat_parameters_)
    if (paged->page->is_stale()) return true;
  return false;
}

void Unit::set_current(Page::GradMode use) {
  for (auto& paged : flat_parameters_) {
    for (const auto& page : {paged->page.get(), paged->exact_page.get(), paged->host_page.get()})
      if (page != nullptr && page->is_attached()) page->set_current(use);
  }
}

uint32_t Unit::version() const {
  uint32_t version = 0;
  for (const auto& paged : flat_parameters_)
    version += paged->flat.shard().unsafeGetTensorImpl()->version_counter().current_version();
  return version;
}

// ---- pinned units -------------------------------------------------------------------------------

void Unit::pin(bool writeback, bool on_host) {
  at::NoGradGuard no_grad;
  release();
  on_host = on_host && !comm_.device().is_cpu();
  std::vector<at::Tensor> full;  // of all before any is lent: a gather may fail
  for (auto& paged : flat_parameters_)
    if (on_host || !is_whole_) full.push_back(on_host ? full_values(*paged).cpu() : full_values(*paged));
  for (size_t i = 0; i < flat_parameters_.size(); ++i) {
    auto& paged = flat_parameters_[i];
    if (on_host) {
      if (!paged->host_page) paged->host_page = std::make_unique<Page>(paged->page->pager(), index_, name_, at::kCPU);
      paged->page->accept_writes();
      paged->host_page->attach(full[i]);
      paged->point_parameters(*paged->host_page, paged->flat.dtype());
      paged->flat.set_shard_writable(false);
    } else if (!is_whole_) {
      Page& page = paged->exact_page ? *paged->exact_page : *paged->page;
      paged->page->accept_writes();
      buffers_.push_back(full[i]);
      page.attach(buffers_.back());
      if (paged->exact_page) paged->point_parameters(page, paged->flat.dtype());
      paged->flat.set_shard_writable(false);
    } else if (!writeback) {
      saved_.push_back(paged->flat.shard().clone());  // comes back: a step in between would be lost
      paged->flat.set_shard_writable(false);
    }
    paged->page_in_use().set_writable(true);
    paged->writes_before = paged->page_in_use().writes();
  }
  is_pinned_ = true;
  loses_writes_ = !writeback;
  state_ = State::kResident;
}

void Unit::help_to_pin() {
  release();
  if (is_whole_) return;
  for (auto& paged : flat_parameters_) full_values(*paged);
}

void Unit::unpin(bool writeback) {
  at::NoGradGuard no_grad;
  bring_home(/*may_change=*/true);
  for (size_t i = 0; i < flat_parameters_.size(); ++i) {
    PagedFlatParameter& paged = *flat_parameters_[i];
    Page& page = paged.page_in_use();
    page.set_writable(false);
    paged.flat.set_shard_writable(true);
    const bool is_apart = !is_shard_itself(page, paged);
    if (!writeback && !is_apart) paged.flat.shard().copy_(saved_[i]);
    // Where no operator has written, to a backward that comes the shards are what they were.
    const bool is_written = page.writes() != paged.writes_before;
    if (writeback && is_apart) copy_own_part(paged, is_written ? paged.flat.shard() : paged.flat.shard().data());
    if (&page == paged.page.get()) continue;
    page.detach();
    paged.point_parameters(*paged.page, paged.flat.gather_dtype());
  }
  saved_.clear();
  is_pinned_ = false;
}

void Unit::copy_own_part(const PagedFlatParameter& paged, const at::Tensor& shard) const {
  const Range own = paged.flat.layout().shard(comm_.rank());
  shard.copy_(paged.page_in_use().buffer().narrow(0, own.begin, own.numel()));
}

void Unit::write_back() {
  at::NoGradGuard no_grad;
  bring_home(/*may_change=*/true);
  for (auto& paged : flat_parameters_) {
    for (size_t i = 0; i < paged->flat.parameters().size(); ++i)  // which throws
      paged->require_shard_at_home(i, comm_.rank());
    const Page& page = paged->page_in_use();
    if (loses_writes_) {
      if (page.writes() == paged->writes_before) continue;
      throw std::logic_error("the parameters of " + paged->flat.name() + " on rank " + std::to_string(comm_.rank()) +
                             " were changed inside summon_full_params() with writeback = false, which loses that: "
                             "leave the scope before saving");
    }
    if (is_shard_itself(page, *paged)) continue;
    paged->flat.set_shard_writable(true);
    copy_own_part(*paged, paged->flat.shard().data());  // to a backward that comes the shards are what they were
    paged->flat.set_shard_writable(false);
  }
}

at::Tensor Unit::full_values(const PagedFlatParameter& paged) {
  if (is_pinned_) return paged.page_in_use().buffer();
  const at::Tensor full = memory_.take(paged.flat.layout().full_numel(), paged.flat.dtype());
  log_.add("all-gather", paged.flat.name(), full.numel());
  paged.flat.gather(full, comm_).wait();
  return full;
}

void Unit::require_write(const Page& page, const at::Tensor& view, const std::string& operation,
                         const std::string& rank) const {
  const std::string where = page.name() + " on rank " + rank;
  if (is_shard_page(page))
    throw std::logic_error(
        operation + " would change " + where +
        " inside summon_full_params(), whose full parameters would not follow: leave the scope first "
        "(before optimizer.step(), say)");
  if (operation == "aten::set_") return;  // torch::load(): bring_home() finds it, as it does set_data()
  throw std::logic_error(operation + " would change " + parameter_at(page, view) + " of " + where +
                         ", which is sharded: change it inside summon_full_params(), or change the shards, "
                         "fsdp.parameters(), of which optimizers are made after wrapping");
}

void Unit::require_attached(const Page& page, const std::string& rank) const {
  if (page.is_attached()) return;
  throw std::logic_error("a view of a parameter of " + name_ + " is used on rank " + rank +
                         (is_pinned_ ? " inside summon_full_params() that was made before it (in a graph that goes "
                                       "backward only now, say)"
                                     : " that was made inside summon_full_params(), and kept") +
                         ": parameters are in another dtype or on another device there, expected one made where it "
                         "is used");
}

void Unit::bring_home(bool may_change) {
  for (auto& paged : flat_parameters_) {
    for (size_t i = 0; i < paged->flat.parameters().size(); ++i) {
      paged->require_shard_at_home(i, comm_.rank());
      if (paged->is_at_home(i)) continue;
      const PlannedParameter& parameter = paged->flat.parameters()[i];
      if (paged->page_in_use().holds(parameter.tensor))
        throw std::logic_error("parameter '" + parameter.fqn + "' on rank " + std::to_string(comm_.rank()) +
                               " was given the data of another parameter of " + name_ +
                               ", or another shape (by set_data(), a swap): copy values inside summon_full_params()");
      const bool fits = paged->can_take(i);
      if (!fits || !may_change)
        throw std::logic_error("parameter '" + parameter.fqn + "' on rank " + std::to_string(comm_.rank()) +
                               " was replaced after wrapping (by module.to(), or set_data)" +
                               (fits ? " between a forward and its backward" : "") +
                               ": move and convert the module before it is wrapped, and change values between steps");
      paged->bring_home(i, is_pinned_, comm_.rank());
    }
  }
}

}  // namespace tessera::internal
