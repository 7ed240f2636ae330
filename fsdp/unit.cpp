#include "tessera/fsdp/unit.h"

#include <c10/core/GradMode.h>

#include <stdexcept>
#include <utility>

namespace tessera {
namespace {

std::string label_of(const PlannedUnit& plan) {
  return plan.name == "(root)" ? "the root unit" : "unit '" + plan.name + "'";
}

}  // namespace

Unit::Unit(int index, const PlannedUnit& plan, Communicator& comm, BufferPool& pool, Pager* pager, bool sync)
    : index_(index), name_(label_of(plan)), comm_(comm), pool_(pool), is_whole_(comm.size() == 1) {
  at::NoGradGuard no_grad;
  auto parts = split_into_groups(plan);
  for (auto& parameters : parts) {
    std::string name = name_;
    if (parts.size() > 1)
      name += std::string(" (") + c10::toString(parameters[0].tensor.scalar_type()) +
              (parameters[0].tensor.requires_grad() ? ", trainable)" : ", frozen)");
    auto group = std::make_unique<PagedGroup>(PagedGroup{FlatGroup(name, std::move(parameters), comm, sync)});
    group->page = std::make_unique<Page>(pager, index, name, comm.device());
    group->grad_page = std::make_unique<Page>(pager, -1, name, comm.device());
    adopt(*group);
    if (is_whole_) {
      group->page->lend(group->flat.shard());
    } else {
      group->page->watch_version(group->flat.shard());
    }
    groups_.push_back(std::move(group));
  }
  if (is_whole_) state_ = State::kResident;
}

Unit::~Unit() {
  for (auto& group : groups_) {
    group->page->detach();
    group->grad_page->detach();
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
    parameter.set_data(group.page->view(group.flat.dtype(), geometry.sizes, geometry.strides,
                                        group.flat.layout().offset(static_cast<int64_t>(i))));
    group.grad_guards.push_back(
        group.grad_page->view(group.flat.dtype(), geometry.sizes, geometry.strides, 0));
    parameter.mutable_grad() = group.grad_guards.back();
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

void Unit::start_gather() {
  if (state_ != State::kSharded) return;
  for (auto& group : groups_) {
    buffers_.push_back(pool_.take(group->flat.full_bytes()).view(group->flat.dtype()));
    group->page->accept_version();
    group->gathering = group->flat.gather(buffers_.back(), comm_);
  }
  state_ = State::kGathering;
}

void Unit::finish_gather() {
  if (state_ != State::kGathering) return;
  for (size_t i = 0; i < groups_.size(); ++i) {
    groups_[i]->gathering.wait();
    groups_[i]->page->lend(buffers_[i]);
  }
  state_ = State::kResident;
}

void Unit::release() {
  if (is_whole_) return set_current(Page::Use::kNone);
  finish_gather();
  if (state_ == State::kSharded) return;
  for (auto& group : groups_) group->page->take_back();
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
  for (auto& group : groups_) group->page->set_current(use);
}

void Unit::pin() {
  is_pinned_ = true;
  for (auto& group : groups_) group->page->set_writable(true);
}

void Unit::unpin(bool writeback) {
  at::NoGradGuard no_grad;
  for (auto& group : groups_) {
    group->page->set_writable(false);
    if (!writeback || is_whole_) continue;
    const Range own = group->flat.layout().shard(comm_.rank());
    group->flat.shard().copy_(group->page->buffer().narrow(0, own.begin, own.numel()));
  }
  is_pinned_ = false;
}

bool Unit::inspect_parameters() {
  bool hook_missing = false;
  for (auto& group : groups_) {
    for (size_t i = 0; i < group->grad_guards.size(); ++i) {
      const PlannedParameter& planned = group->flat.parameters()[i];
      at::Tensor parameter = planned.tensor;
      if (!group->page->holds(parameter))
        throw std::logic_error("parameter '" + planned.fqn + "' on rank " + std::to_string(comm_.rank()) +
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
