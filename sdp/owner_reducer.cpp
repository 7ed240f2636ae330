#include "tessera/sdp/owner_reducer.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "tessera/flat/gradient_hook.h"

namespace tessera {
namespace {

// Reduces under way at a time. Each holds a bucket on the ranks that send, so this bounds memory.
constexpr size_t kMaxInFlight = 2;

// What a rank had of a parameter in a backward pass; the most over ranks counts.
constexpr uint8_t kUnused = 0, kUsed = 1, kLate = 2;

struct Quiet {
  c10::InferenceMode ordinary{false};
  at::NoGradGuard no_grad;
};

bool inside_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

// The elements of `gradient` in the order in which `parameter` has its own, without a copy; undefined
// if they lie otherwise.
at::Tensor flattened(const at::Tensor& gradient, const at::Tensor& parameter) {
  if (gradient.layout() != at::kStrided || gradient.scalar_type() != parameter.scalar_type()) return {};
  const bool alike =
      parameter.is_non_overlapping_and_dense() ? gradient.strides() == parameter.strides() : gradient.is_contiguous();
  if (!alike) return {};
  return gradient.as_strided({gradient.numel()}, {1}, gradient.storage_offset());
}

}  // namespace

// ---- plan --------------------------------------------------------------------------------------

OwnerReducer::OwnerReducer(std::vector<PlannedParameter> parameters, OwnerOf owner_of,
                           std::shared_ptr<Communicator> comm, Options options)
    : parameters_(std::move(parameters)),
      owner_of_(std::move(owner_of)),
      comm_(std::move(comm)),
      options_(options),
      pool_(comm_->device()),
      states_(parameters_.size()) {}

void OwnerReducer::refresh_trainable() {
  if (inside_backward()) throw std::logic_error("refresh_trainable inside a backward pass");
  bool changed = false;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const bool trainable = parameters_[i].tensor.requires_grad();
    if (std::exchange(states_[i].trainable, trainable) != trainable) changed = true;
    if (trainable && !states_[i].accumulator) install_hook(i);
  }
  if (!changed) return;
  std::vector<size_t> order;  // backward meets the last parameters first
  for (size_t i = parameters_.size(); i-- > 0;)
    if (states_[i].trainable) order.push_back(i);
  plan(order);
  order_agreed_ = false;
}

void OwnerReducer::install_hook(size_t parameter) {
  at::AutoGradMode recording(true);
  auto accumulator = torch::autograd::impl::grad_accumulator(parameters_[parameter].tensor);
  accumulator->add_pre_hook(
      std::make_unique<GradientHook>([weak = weak_from_this(), parameter](const at::Tensor& gradient) {
        const auto reducer = weak.lock();
        return reducer ? reducer->gradient_arrived(parameter, gradient) : gradient;  // the wrapper is gone
      }));
  states_[parameter].accumulator = std::move(accumulator);
}

void OwnerReducer::plan(const std::vector<size_t>& order) {
  std::vector<ReducedParameter> parameters(parameters_.size());
  for (size_t i : order)
    parameters[i] = {parameters_[i].tensor.numel(), owner_of_(parameters_[i]), parameters_[i].tensor.scalar_type()};
  buckets_ = plan_reduction(parameters, order, options_.buffer_numel);
  contents_.assign(buckets_.size(), {});
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket)
    for (size_t member = 0; member < buckets_[bucket].members.size(); ++member) {
      states_[buckets_[bucket].members[member]].bucket = bucket;
      states_[buckets_[bucket].members[member]].member = member;
    }
}

std::string OwnerReducer::label(size_t bucket) const {
  const auto& members = buckets_[bucket].members;
  std::string text = "the gradient of '" + parameters_[members.front()].fqn + "'";
  if (members.size() > 1)
    text = "gradients of " + std::to_string(members.size()) + " parameters from '" + parameters_[members.front()].fqn +
           "' to '" + parameters_[members.back()].fqn + "'";
  return text;
}

// ---- gradients ---------------------------------------------------------------------------------

at::Tensor OwnerReducer::gradient_arrived(size_t parameter, const at::Tensor& gradient) {
  if (comm_->size() == 1) return gradient;
  std::lock_guard lock(mutex_);
  if (c10::GradMode::is_enabled())
    throw std::logic_error("backward with create_graph=true reached parameter '" + parameters_[parameter].fqn +
                           "': gradients that are reduced to their owners cannot be differentiated again");
  Quiet quiet;
  if (!sync_) return keep_own_sum(parameter, gradient);
  enter_backward();
  deposit(parameter, gradient);
  return {};
}

// autograd goes on to add the gradient to what is there: this rank's own sum.
at::Tensor OwnerReducer::keep_own_sum(size_t parameter, const at::Tensor& gradient) {
  at::Tensor tensor = parameters_[parameter].tensor;
  ParameterState& state = states_[parameter];
  // An average is on one rank only; in an average to come it must count size() times.
  if (tensor.grad().defined() && state.holds == Holds::kAverage) tensor.mutable_grad() = tensor.grad() * comm_->size();
  if (gradient.defined()) state.holds = Holds::kOwnSum;
  return gradient;
}

at::Tensor OwnerReducer::part_of(const at::Tensor& flat, size_t bucket, size_t member) const {
  const at::Tensor& parameter = parameters_[buckets_[bucket].members[member]].tensor;
  const at::Tensor part = flat.narrow(0, buckets_[bucket].offsets[member], parameter.numel());
  return parameter.is_non_overlapping_and_dense()
             ? part.as_strided(parameter.sizes(), parameter.strides(), part.storage_offset())
             : part.view(parameter.sizes());
}

at::Tensor OwnerReducer::place_of(const at::Tensor& flat, size_t parameter) const {
  return part_of(flat, states_[parameter].bucket, states_[parameter].member);
}

// Where a bucket's gradients are collected: on the owner, straight in what will be the parameters'
// gradients, unless they have some already, to which the sum is then added.
void OwnerReducer::make_room(size_t bucket) {
  const ReduceBucket& plan = buckets_[bucket];
  BucketState& state = contents_[bucket];
  if (becomes_gradient(bucket)) {
    if (!state.gradient.defined() || !is_ours_alone(state)) make_gradient(bucket);
    state.flat = state.gradient;
    state.is_gradient = true;
    return;
  }
  const at::Tensor& first = parameters_[plan.members[0]].tensor;
  state.flat = pool_.take(plan.numel * static_cast<int64_t>(first.element_size())).view(first.scalar_type());
  state.is_borrowed = true;
  note_bytes();
}

bool OwnerReducer::becomes_gradient(size_t bucket) const {
  const ReduceBucket& plan = buckets_[bucket];
  return plan.owner == comm_->rank() && std::none_of(plan.members.begin(), plan.members.end(), [&](size_t parameter) {
           return parameters_[parameter].tensor.grad().defined() && states_[parameter].holds != Holds::kOwnSum;
         });
}

void OwnerReducer::make_gradient(size_t bucket) {
  const ReduceBucket& plan = buckets_[bucket];
  BucketState& state = contents_[bucket];
  const at::Tensor& first = parameters_[plan.members[0]].tensor;
  state.gradient = at::empty({plan.numel}, first.options().requires_grad(false));
  state.views.clear();
  for (size_t member = 0; member < plan.members.size(); ++member)
    state.views.push_back(part_of(state.gradient, bucket, member).detach());
}

// Whether nobody outside kept a gradient of an earlier step, so that the memory may be written again.
bool OwnerReducer::is_ours_alone(const BucketState& state) const {
  for (const at::Tensor& view : state.views)
    if (view.use_count() > 1) return false;
  return state.gradient.storage().use_count() == state.views.size() + 1;
}

void OwnerReducer::deposit(size_t parameter, at::Tensor gradient) {
  ParameterState& state = states_[parameter];
  BucketState& bucket = contents_[state.bucket];
  at::Tensor tensor = parameters_[parameter].tensor;
  if (state.holds == Holds::kOwnSum && tensor.grad().defined()) {  // of backward passes under no_sync
    at::Tensor sum = std::exchange(tensor.mutable_grad(), at::Tensor());
    gradient = gradient.defined() ? sum.add_(gradient) : sum;
  }
  if (state.holds == Holds::kOwnSum) state.holds = Holds::kNothing;
  if (gradient.defined()) add(parameter, gradient.is_sparse() ? gradient.to_dense() : gradient);
  if (bucket.arrived[state.member]) return;
  bucket.arrived[state.member] = true;
  if (!order_agreed_) seen_.push_back(parameter);
  if (--bucket.missing == 0) start_full_ones();
}

void OwnerReducer::add(size_t parameter, const at::Tensor& gradient) {
  ParameterState& state = states_[parameter];
  BucketState& bucket = contents_[state.bucket];
  const ReduceBucket& plan = buckets_[state.bucket];
  if (bucket.started) {
    state.late = state.late.defined() ? state.late + gradient : gradient.clone();
    return;
  }
  const bool is_first = !std::exchange(state.used, true);
  const bool sends_alone = plan.members.size() == 1 && plan.owner != comm_->rank();
  const at::Tensor as_it_is = sends_alone ? flattened(gradient, parameters_[parameter].tensor) : at::Tensor();
  if (is_first && as_it_is.defined()) {
    bucket.flat = as_it_is;
    held_bytes_ += static_cast<int64_t>(as_it_is.nbytes());
    note_bytes();
    return;
  }
  if (!bucket.flat.defined()) make_room(state.bucket);
  at::Tensor place = place_of(bucket.flat, parameter);
  if (is_first) {
    place.copy_(gradient);
  } else if (bucket.is_borrowed || bucket.is_gradient) {
    place.add_(gradient);
  } else {
    bucket.flat = bucket.flat +
                  flattened(gradient.clone(), parameters_[parameter].tensor);  // it is autograd's: not to be changed
  }
}

// ---- reduces -----------------------------------------------------------------------------------

void OwnerReducer::start_full_ones() {
  while (started_ < buckets_.size() && contents_[started_].missing == 0) start(started_++);
}

void OwnerReducer::start(size_t bucket) {
  const ReduceBucket& plan = buckets_[bucket];
  BucketState& state = contents_[bucket];
  state.started = true;
  if (!state.flat.defined()) make_room(bucket);
  Flight flight{bucket, {}, {}, {}, {}};
  for (size_t parameter : plan.members) {
    flight.used.push_back(states_[parameter].used);
    if (!states_[parameter].used) place_of(state.flat, parameter).zero_();
  }
  flight.content = std::move(state);
  state = {};
  state.started = true;
  state.gradient = flight.content.gradient;
  state.views = std::move(flight.content.views);
  flight.wire = flight.content.flat;
  if (options_.reduce_dtype && at::isFloatingType(flight.wire.scalar_type()))
    flight.wire = flight.wire.to(*options_.reduce_dtype);
  flight.pending = comm_->reduce(flight.wire, plan.owner, ReduceOp::kAverage, label(bucket));
  in_flight_.push_back(std::move(flight));
  while (in_flight_.size() > kMaxInFlight) finish_oldest();
}

void OwnerReducer::finish_oldest() {
  Flight flight = std::move(in_flight_.front());
  in_flight_.erase(in_flight_.begin());
  flight.pending.wait();
  if (buckets_[flight.bucket].owner != comm_->rank()) {
    if (flight.content.is_borrowed) {
      pool_.give(flight.content.flat.view(at::kByte));
    } else {
      held_bytes_ -= static_cast<int64_t>(flight.content.flat.nbytes());
    }
    return;
  }
  if (!flight.wire.is_same(flight.content.flat)) flight.content.flat.copy_(flight.wire);
  flight.wire.reset();
  if (std::all_of(flight.used.begin(), flight.used.end(), [](bool used) { return used; })) {
    accept(flight, flight.used);
  } else {
    undecided_.push_back(std::move(flight));
  }
}

// Makes what was reduced the gradient of the parameters that `used` names, or adds it.
void OwnerReducer::accept(Flight& flight, const std::vector<bool>& used) {
  BucketState& state = contents_[flight.bucket];
  for (size_t member = 0; member < used.size(); ++member) {
    if (!used[member]) continue;
    const size_t parameter = buckets_[flight.bucket].members[member];
    at::Tensor tensor = parameters_[parameter].tensor;
    if (tensor.grad().defined()) {
      tensor.mutable_grad().add_(part_of(flight.content.flat, flight.bucket, member));
    } else if (flight.content.is_gradient) {
      tensor.mutable_grad() = state.views[member];
    } else {
      tensor.mutable_grad() = part_of(flight.content.flat, flight.bucket, member).clone();
    }
    states_[parameter].holds = Holds::kAverage;
  }
  if (flight.content.is_borrowed) pool_.give(flight.content.flat.view(at::kByte));
}

void OwnerReducer::note_bytes() { peak_bytes_ = std::max(peak_bytes_, bucket_bytes()); }

// ---- passes ------------------------------------------------------------------------------------

void OwnerReducer::begin_forward() {
  std::lock_guard lock(mutex_);
  if (inside_backward()) return;  // a checkpointed part is computed again
  Quiet quiet;
  if (in_backward_) abandon_backward();
  refresh_trainable();
}

// The callback at the end must belong to the outermost pass: one that starts within it, to compute
// a checkpointed part again, must not end it.
void OwnerReducer::expect_backward_of(const std::vector<at::Tensor>& outputs) {
  if (comm_->size() == 1 || !sync_ || inside_backward()) return;
  for (const at::Tensor& output : outputs) {
    if (!output.requires_grad()) continue;
    output.register_hook([weak = weak_from_this()](const at::Tensor&) {
      const auto reducer = weak.lock();
      if (!reducer) return;
      std::lock_guard lock(reducer->mutex_);
      if (reducer->sync_) reducer->enter_backward();
    });
  }
}

void OwnerReducer::enter_backward() {
  if (std::exchange(in_backward_, true)) return;
  started_ = 0;
  seen_.clear();
  for (ParameterState& state : states_) {
    state.used = false;
    state.late.reset();
  }
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    contents_[bucket].arrived.assign(buckets_[bucket].members.size(), false);
    contents_[bucket].missing = buckets_[bucket].members.size();
    contents_[bucket].started = false;
  }
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
    if (const auto reducer = weak.lock()) reducer->end_backward();
  });
}

void OwnerReducer::end_backward() {
  std::lock_guard lock(mutex_);
  Quiet quiet;
  // Own sums of parameters that this backward did not reach are due now, too.
  for (size_t i = 0; i < parameters_.size(); ++i)
    if (states_[i].trainable && states_[i].holds == Holds::kOwnSum &&
        !contents_[states_[i].bucket].arrived[states_[i].member])
      deposit(i, {});
  while (started_ < buckets_.size()) start(started_++);
  const auto marks = exchange_marks();
  agree_on_used(marks);
  reduce_late_ones(marks);
  const bool any_used = std::any_of(marks.begin(), marks.end(), [](uint8_t mark) { return mark != kUnused; });
  if (!order_agreed_ && any_used) agree_on_order();
  in_backward_ = false;
  if (std::exchange(first_backward_, false)) pool_.trim();  // before the optimizer makes its state
}

std::vector<uint8_t> OwnerReducer::exchange_marks() {
  at::Tensor marks = at::zeros({static_cast<int64_t>(states_.size())}, at::kByte);
  auto* bytes = marks.mutable_data_ptr<uint8_t>();
  for (size_t i = 0; i < states_.size(); ++i)
    bytes[i] = states_[i].late.defined() ? kLate : states_[i].used ? kUsed : kUnused;
  marks = marks.to(comm_->device());
  Pending exchange = comm_->all_reduce(marks, ReduceOp::kMax, "the end of backward");
  while (!in_flight_.empty()) finish_oldest();
  exchange.wait();
  marks = marks.cpu();
  return {marks.const_data_ptr<uint8_t>(), marks.const_data_ptr<uint8_t>() + marks.numel()};
}

void OwnerReducer::agree_on_used(const std::vector<uint8_t>& marks) {
  for (Flight& flight : undecided_) {
    std::vector<bool> used;
    for (size_t parameter : buckets_[flight.bucket].members) used.push_back(marks[parameter] != kUnused);
    accept(flight, used);
  }
  undecided_.clear();
}

// Rare, so one after the other.
void OwnerReducer::reduce_late_ones(const std::vector<uint8_t>& marks) {
  for (size_t i = 0; i < states_.size(); ++i) {
    const at::Tensor late = std::exchange(states_[i].late, at::Tensor());
    if (marks[i] != kLate) continue;
    at::Tensor tensor = parameters_[i].tensor;
    const int owner = buckets_[states_[i].bucket].owner;
    const at::Tensor wire = at::zeros(tensor.sizes(), tensor.options().requires_grad(false));
    if (late.defined()) wire.copy_(late);
    comm_->reduce(wire, owner, ReduceOp::kAverage, "a late gradient of '" + parameters_[i].fqn + "'").wait();
    if (owner == comm_->rank()) tensor.mutable_grad().add_(wire);
  }
}

// From now on buckets are made for the order in which rank 0 saw the gradients come.
void OwnerReducer::agree_on_order() {
  std::vector<size_t> order = seen_;
  for (const ReduceBucket& bucket : buckets_)
    for (size_t parameter : bucket.members)
      if (std::find(order.begin(), order.end(), parameter) == order.end()) order.push_back(parameter);
  at::Tensor numbers = at::empty({static_cast<int64_t>(order.size())}, at::kLong);
  std::copy(order.begin(), order.end(), numbers.mutable_data_ptr<int64_t>());
  numbers = numbers.to(comm_->device());
  comm_->broadcast(numbers, 0, "the order of gradients").wait();
  numbers = numbers.cpu();
  const auto* begin = numbers.const_data_ptr<int64_t>();
  plan({begin, begin + numbers.numel()});
  order_agreed_ = true;
}

// The last backward ended in an exception, so that the engine did not call end_backward().
void OwnerReducer::abandon_backward() {
  while (!in_flight_.empty()) {
    Flight flight = std::move(in_flight_.front());
    in_flight_.erase(in_flight_.begin());
    flight.pending.wait();
    if (flight.content.is_borrowed) pool_.give(flight.content.flat.view(at::kByte));
  }
  for (Flight& flight : undecided_)
    if (flight.content.is_borrowed) pool_.give(flight.content.flat.view(at::kByte));
  undecided_.clear();
  for (BucketState& state : contents_) {
    if (state.is_borrowed) pool_.give(state.flat.view(at::kByte));
    state.flat.reset();
    state.is_borrowed = state.is_gradient = false;
  }
  held_bytes_ = 0;
  in_backward_ = false;
}

void OwnerReducer::require_reduced() const {
  std::lock_guard lock(mutex_);
  if (comm_->size() == 1) return;
  if (in_backward_)
    throw std::logic_error(
        "a step on rank " + std::to_string(comm_->rank()) +
        " after a backward pass that failed: its gradients are incomplete; run forward and backward again");
  for (size_t i = 0; i < parameters_.size(); ++i)
    if (states_[i].holds == Holds::kOwnSum && parameters_[i].tensor.grad().defined())
      throw std::logic_error(
          "a step on rank " + std::to_string(comm_->rank()) + " while the gradient of parameter '" +
          parameters_[i].fqn +
          "' is this rank's own sum, made under no_sync(): run the last backward before a step outside it");
}

}  // namespace tessera
