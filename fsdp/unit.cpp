#include "fsdp/sharded_model.h"

#include <algorithm>
#include <utility>

namespace tessera::internal {

Unit::Unit(int index, const PlannedUnit& plan, const UnitContext& context, const FlatParameterOptions& options,
           bool sync_module_states)
    : index_(index),
      name_(plan.is_root() ? "the root unit" : "unit '" + plan.name + "'"),
      plan_name_(plan.name),
      context_(context),
      flat_parameters_(make_flat_parameters(plan, name_, index, context.comm, sync_module_states, options)),
      secondary_(context.secondary, flat_parameters_),
      summoned_(flat_parameters_, context.comm, context.memory, context.log) {
  const bool is_whole = context.comm.size() == 1 && context.source.engine == nullptr &&
                        std::ranges::none_of(flat_parameters_, [](auto& paged) { return paged->flat.is_cast(); });
  for (auto& paged : flat_parameters_)
    is_whole ? paged->page->attach(paged->flat.shard()) : paged->page->watch_writes(paged->flat.shard_page());
  if (is_whole) state_ = State::kWhole;
}

Unit::~Unit() {
  for (auto& paged : flat_parameters_)
    for (Page* page : {paged->page.get(), paged->exact_page.get(), paged->host_page.get()})
      if (page != nullptr) page->detach_pager();
}

int64_t Unit::full_bytes() const {
  int64_t bytes = 0;
  for (const auto& paged : flat_parameters_) bytes += paged->flat.full_bytes();
  return bytes;
}

// ---- life cycle ---------------------------------------------------------------------------------

void Unit::read_ahead() {
  if (state_ != State::kSharded || context_.source.engine == nullptr || has_secondary()) return;
  for (auto& paged : flat_parameters_)
    if (DiskPager* disk = DiskPager::of(paged->flat.shard());
        disk != nullptr && !paged->flat.low_precision_values().defined())
      disk->read_ahead(paged->flat.shard());
}

// [Note: Overlapping host copies] A copy to the device needs 1/N of the memory of an all-gather. So copies run one unit
// further ahead than all-gathers, and overlap with the all-gather of the previous unit. A group of one rank copies
// directly into the full buffer.
void Unit::start_fetch() {
  if (state_ != State::kSharded || context_.source.engine == nullptr || has_secondary()) return;
  const bool is_alone = context_.comm.size() == 1;
  for (auto& paged : flat_parameters_) {
    FlatParameter& flat = paged->flat;
    paged->page->accept_writes();
    CountedBuffers& memory = is_alone ? context_.memory : *context_.source.staging;
    paged->staging = memory.take(flat.layout().full_numel() / context_.comm.size(), flat.gather_dtype());
    if (is_alone) buffers_.push_back(paged->staging);
    const at::Tensor& source = flat.link_source();
    DiskPager* disk = DiskPager::of(source);
    if (disk != nullptr) paged->held = disk->hold(source, /*writes=*/false);
    paged->fetching =
        context_.source.engine->to_device(paged->staging, disk != nullptr ? paged->held.values() : source);
  }
  state_ = State::kFetching;
}

void Unit::unshard() {
  start_fetch();
  if (state_ != State::kSharded && state_ != State::kFetching) return;
  const bool from_secondary = state_ == State::kSharded && has_secondary();
  if (!from_secondary) secondary_.evict();
  for (size_t i = 0; i < flat_parameters_.size(); ++i) {
    PagedFlatParameter& paged = *flat_parameters_[i];
    if (buffers_.size() == i)
      buffers_.push_back(context_.memory.take(paged.flat.layout().full_numel(), paged.flat.gather_dtype()));
    from_secondary ? secondary_.start_gather(i, buffers_[i], context_.log) : start_all_gather(paged, buffers_[i]);
  }
  state_ = State::kUnsharding;
}

void Unit::start_all_gather(PagedFlatParameter& paged, const at::Tensor& full) {
  const FlatParameter& flat = paged.flat;
  Communicator& comm = context_.comm;
  context_.log.add("all-gather", flat.name(), full.numel());
  const bool is_fetched = state_ == State::kFetching;
  is_fetched ? paged.fetching.wait() : paged.page->accept_writes();
  if (const int64_t encoded_bytes = flat.encoded_bytes(); encoded_bytes > 0) {
    paged.wire = context_.memory.take(encoded_bytes * comm.size(), at::kByte);
    paged.gathering = flat.gather_encoded(paged.wire, is_fetched ? paged.staging : flat.shard(), comm);
  } else {
    paged.gathering = comm.all_gather(full, is_fetched ? paged.staging : flat.shard_for(full), {}, flat.name());
  }
}

// A lazy all-gather copies from peer memory only in wait(). An early start would only hold its buffer longer.
bool Unit::can_unshard_ahead() const {
  const Communicator& comm = has_secondary() ? *secondary_.comm() : context_.comm;
  return std::ranges::none_of(flat_parameters_,
                              [&](const auto& paged) { return comm.is_lazy(paged->flat.layout().full_numel()); });
}

void Unit::wait_for_unshard() {
  if (state_ != State::kUnsharding) return uses_.use();
  for (size_t i = 0; i < flat_parameters_.size(); ++i) {
    PagedFlatParameter& paged = *flat_parameters_[i];
    paged.gathering.wait();
    if (paged.wire.defined()) paged.flat.decode(std::exchange(paged.wire, {}), buffers_[i]);
    paged.page->attach(buffers_[i]);
  }
  uses_.begin(context_.comm.device());
  free_staging();
  state_ = State::kUnsharded;
}

// Frees the staging buffers. The current stream may then reuse their memory.
void Unit::free_staging() {
  for (auto& paged : flat_parameters_) {
    if (!paged->staging.defined()) continue;
    paged->fetching = Copy();
    if (paged->held.values().defined()) context_.source.engine->wait_for_host_memory(paged->held.values());
    paged->held.release();
    paged->staging.reset();
  }
}

void Unit::reshard() {
  if (is_summoned()) return;
  if (state_ == State::kWhole) return set_current(Page::GradMode::kNone);
  if (state_ == State::kSharded) return;
  if (state_ == State::kUnsharding) wait_for_unshard();
  uses_.join();  // the next user of this memory must wait for all streams that read the memory
  if (state_ == State::kUnsharded && !is_stale()) secondary_.cut(buffers_);
  // If the state was kFetching, drops the copy in flight. No operator has waited for it, so its error is ignored.
  for (auto& paged : flat_parameters_) {
    paged->fetching = Copy();
    paged->gathering.wait();
    paged->wire.reset();
  }
  free_staging();
  for (auto& paged : flat_parameters_)
    if (paged->page->is_attached()) paged->page->detach();
  buffers_.clear();
  state_ = State::kSharded;
}

// ---- the shards ---------------------------------------------------------------------------------

void Unit::wait_for_reads() {
  CopyEngine* engine = context_.source.engine;
  if (engine == nullptr) return;
  for (auto& paged : flat_parameters_) {
    engine->wait_for_host_memory(paged->flat.shard());
    if (const at::Tensor copy = paged->flat.low_precision_values(); copy.defined()) engine->wait_for_host_memory(copy);
  }
}

bool Unit::is_stale() const {
  return std::ranges::any_of(flat_parameters_, [](const auto& paged) { return paged->page->is_stale(); });
}

uint32_t Unit::version() const {
  uint32_t version = 0;
  for (const auto& paged : flat_parameters_)
    version += paged->flat.shard().unsafeGetTensorImpl()->version_counter().current_version();
  return version;
}

void Unit::set_current(Page::GradMode mode) {
  for (auto& paged : flat_parameters_)
    for (Page* page : {paged->page.get(), paged->exact_page.get(), paged->host_page.get()})
      if (page != nullptr && page->is_attached()) page->set_current(mode);
}

}  // namespace tessera::internal
