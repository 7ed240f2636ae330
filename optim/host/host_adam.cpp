#include <tessera/optim/host_adam.h>

#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <functional>
#include <string>
#include <unordered_map>
#include <utility>

#include "core/layout/shard_mark.h"
#include "core/memory/without_data.h"
#include "core/paging/residency.h"
#include "core/runtime/parallel_over.h"
#include "offload/disk/disk_pager.h"
#include "optim/host/adam_kernel.h"
#include "optim/host/adam_update.h"

namespace tessera {
using namespace internal;
namespace {

// Number of elements in one task. Large enough to outweigh a call's cost, and small enough to balance the threads.
constexpr int64_t kPartNumel = 1 << 16;

std::string problem_of(const at::Tensor& parameter) {
  if (has_lost_its_pager(parameter)) return "lay on a disk with a wrapper that no longer exists";
  return "";
}

// Returns zeros for a parameter's state, on disk if the parameter is on disk.
at::Tensor zeros_beside(const at::Tensor& parameter, const char* what) {
  DiskPager* disk = DiskPager::of(parameter);
  if (disk == nullptr || parameter.numel() == 0) return at::zeros_like(parameter);
  return disk->make(parameter.sizes(), parameter.strides(), parameter.scalar_type(),
                    what + (" of " + page_of(parameter)->name()));
}
at::Tensor state_beside(const at::Tensor& parameter) { return zeros_beside(parameter, "the state"); }

at::Tensor placed_as(const at::Tensor& state, const at::Tensor& parameter) {
  if (parameter.numel() == 0 || DiskPager::of(parameter) == nullptr) return laid_out_as(state, parameter);
  if (DiskPager::of(state) == DiskPager::of(parameter)) return state;
  return state_beside(parameter).copy_(state);  // `state` may come from a checkpoint
}

constexpr AdamPlacement kInHostMemory{"a host optimizer", &problem_of, &state_beside, &placed_as};

// Previous values of a parameter and its state, for roll_back(). The tensors are allocated once. They have the
// parameter's sizes and strides, and are in memory or on disk like the parameter.
struct Before {
  at::Tensor parameter;
  at::Tensor values;                    // previous values of the parameter
  at::Tensor average, square, maximum;  // previous state
  int64_t step = 0;
  bool has_state = false, has_maximum = false;
  bool is_stepped = false;  // true from a step until keep() or roll_back()
  bool is_copied = false;   // the tensors hold the previous values
  // true: `values` holds the old parameter. The other tensors hold the new state, and after exchange() the old state.
  bool is_beside = false;

  void make_room(const AdamUpdate& update) {
    for (at::Tensor* copy : {&values, &average, &square, &maximum}) {
      if (copy == &maximum && !update.maximum.defined()) continue;
      const at::Tensor& like = update.parameter;
      if (!copy->defined() || copy->sizes() != like.sizes() || copy->strides() != like.strides() ||
          copy->dtype() != like.dtype())
        *copy = zeros_beside(like, "a copy");
    }
  }
  void copy(const AdamUpdate& update) {
    values.copy_(update.parameter);
    average.copy_(update.average);
    square.copy_(update.square);
    if (update.maximum.defined()) maximum.copy_(update.maximum);
    is_copied = true;
  }
};

// The work of one step() call: tensors that must stay alive until run() ends, and parts that threads process.
struct Pass {
  struct Part {
    AdamSpan span;
    AdamFactors factors;
    AdamSpan beside;  // if beside.parameter is null, the step is in place
  };
  std::vector<at::Tensor> kept;
  std::vector<Part> parts;
  std::vector<at::Tensor> written;
  std::vector<DiskPager::Hold> held;
  std::vector<Before*> beside;
  std::vector<AdamUpdate> on_device;

  // Adds an update, or runs it at once if the parameter is in host memory and not fp32. Stores old values in `before`,
  // unless it is null.
  void add(const AdamUpdate& update, Before* before) {
    const at::Tensor& parameter = update.parameter;
    if (note_write_if_empty(parameter)) return;
    const bool is_on_host = parameter.is_cpu(), in_pass = is_on_host && parameter.scalar_type() == at::kFloat;
    if (before != nullptr) before->make_room(update);
    if (before != nullptr && (!in_pass || DiskPager::of(parameter) != nullptr))
      std::exchange(before, nullptr)->copy(update);
    if (!is_on_host) return on_device.push_back(update);
    if (!in_pass) return fused_adam_update({update});
    before_write(parameter);
    kept.push_back(update.gradient);
    written.push_back(parameter);
    AdamSpan span{data_of(parameter), update.gradient.const_data_ptr<float>(), data_of(update.average),
                  data_of(update.square)};
    if (update.maximum.defined()) span.maximum = data_of(update.maximum);
    if (const LowPrecisionPart* copy = low_precision_copy_of(parameter)) {
      span.low_precision = static_cast<uint16_t*>(copy->values.mutable_data_ptr());
      span.low_precision_dtype =
          copy->values.scalar_type() == at::kBFloat16 ? LowPrecision::kBFloat16 : LowPrecision::kHalf;
    }
    span.numel = parameter.numel();
    add_parts(span, adam_factors(update.rule, update.step), before);
  }

  void add_parts(const AdamSpan& span, const AdamFactors& factors, Before* before) {
    AdamSpan other;
    if (before != nullptr) {
      beside.push_back(before);
      other = {before->values.mutable_data_ptr<float>(), span.gradient, before->average.mutable_data_ptr<float>(),
               before->square.mutable_data_ptr<float>()};
      if (span.maximum != nullptr) other.maximum = before->maximum.mutable_data_ptr<float>();
    }
    for (int64_t begin = 0; begin < span.numel; begin += kPartNumel) {
      const int64_t end = std::min(begin + kPartNumel, span.numel);
      parts.push_back({span.part(begin, end), factors, before != nullptr ? other.part(begin, end) : AdamSpan()});
    }
  }

  float* data_of(const at::Tensor& tensor) {
    DiskPager* disk = DiskPager::of(tensor);
    if (disk == nullptr) return tensor.mutable_data_ptr<float>();
    held.push_back(disk->hold(tensor, /*writes=*/true));
    return held.back().values().mutable_data_ptr<float>();
  }

  void run() const {
    fused_adam_update(on_device);
    const auto count = is_without_data() ? 0 : static_cast<int64_t>(parts.size());
    for (Before* before : beside) before->is_beside = true;
    parallel_over(0, count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const auto& [span, factors, other] = parts[i];
        other.parameter != nullptr ? adam_step_beside(span, other, factors) : adam_step(span, factors);
      }
    });
    // Raises the version counters, by which Tessera detects writes. Only operators raise them without such a call.
    for (const at::Tensor& parameter : written) {
      parameter.unsafeGetTensorImpl()->bump_version();
      if (DiskPager::of(parameter) == nullptr) note_write(parameter);  // for a parameter on disk, hold() did this
      if (const LowPrecisionPart* copy = low_precision_copy_of(parameter)) copy->note_write(parameter);
    }
  }
};

using BeforeOf = std::function<Before*(const at::Tensor& parameter)>;

void step_on_host(
    torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>* chosen,
    const BeforeOf& before_of = [](const at::Tensor&) { return nullptr; }) {
  at::NoGradGuard no_grad;
  Pass pass;
  const auto take = [&](const AdamUpdate& update) {
    Before* before = before_of(update.parameter);
    if (DiskPager::of(update.parameter) == nullptr) return pass.add(update, before);
    Pass alone;  // so that memory holds only one parameter on disk, its state and the read-ahead
    alone.add(update, before);
    alone.run();
  };
  for_each_adam_update(optimizer, chosen, kInHostMemory, take, [&] { std::exchange(pass, {}).run(); });
}

// Writes `values` to the parameter and, like a step, to its low-precision copy.
void write_back(const at::Tensor& parameter, const at::Tensor& values) {
  parameter.detach().copy_(values);
  const LowPrecisionPart* copy = low_precision_copy_of(parameter);
  if (copy == nullptr) return;
  copy->values.copy_(parameter);
  copy->note_write(parameter);
}

template <class State>
class RevocableHostSteps : public PartialStep::RevocableSteps {
 public:
  explicit RevocableHostSteps(torch::optim::Optimizer& optimizer) : optimizer_(optimizer) {}

  void step(const std::vector<at::Tensor>& parameters) override {
    for (const at::Tensor& parameter : parameters)
      if (parameter.grad().defined()) note(parameter);
    step_on_host(optimizer_, &parameters,
                 [&](const at::Tensor& parameter) { return &before_.at(parameter.unsafeGetTensorImpl()); });
    for (const at::Tensor& parameter : parameters) {
      const auto found = before_.find(parameter.unsafeGetTensorImpl());
      if (found != before_.end() && found->second.is_beside) exchange(found->second);
    }
  }

  void roll_back() override {
    at::NoGradGuard no_grad;
    for (auto& [key, before] : before_) {
      if (!before.is_stepped) continue;
      restore(key, before);
      before.is_stepped = false;
    }
  }

  void keep() override {
    for (auto& [key, before] : before_) before.is_stepped = false;
  }

 private:
  State* state_of(void* key) const {
    const auto found = optimizer_.state().find(key);
    return found == optimizer_.state().end() ? nullptr : static_cast<State*>(found->second.get());
  }

  void note(const at::Tensor& parameter) {
    Before& before = before_[parameter.unsafeGetTensorImpl()];
    const State* state = state_of(parameter.unsafeGetTensorImpl());
    before.parameter = parameter;
    before.has_state = state != nullptr;
    before.has_maximum = state != nullptr && state->max_exp_avg_sq().defined();
    before.step = state != nullptr ? state->step() : 0;
    before.is_stepped = true;
    before.is_copied = before.is_beside = false;
  }

  void exchange(Before& before) const {
    State& state = *state_of(before.parameter.unsafeGetTensorImpl());
    std::swap(state.exp_avg(), before.average);
    std::swap(state.exp_avg_sq(), before.square);
    if (state.max_exp_avg_sq().defined()) std::swap(state.max_exp_avg_sq(), before.maximum);
  }

  void restore(void* key, Before& before) {
    if (before.is_copied || before.is_beside) write_back(before.parameter, before.values);
    if (!before.has_state) {
      optimizer_.state().erase(key);
      return;
    }
    State& state = *state_of(key);
    state.step(before.step);
    if (before.is_beside) exchange(before);
    if (before.is_copied) {
      state.exp_avg().copy_(before.average);
      state.exp_avg_sq().copy_(before.square);
      if (before.has_maximum && state.max_exp_avg_sq().defined()) state.max_exp_avg_sq().copy_(before.maximum);
    }
    if (!before.has_maximum) state.max_exp_avg_sq(at::Tensor());
  }

  torch::optim::Optimizer& optimizer_;
  std::unordered_map<void*, Before> before_;  // by the parameter's TensorImpl, like optimizer.state()
};

at::Tensor step_all_on_host(torch::optim::Optimizer& optimizer, const torch::optim::Optimizer::LossClosure& closure) {
  at::Tensor loss = loss_of(closure);
  step_on_host(optimizer, nullptr);
  return loss;
}

}  // namespace

at::Tensor HostAdam::step(LossClosure closure) { return step_all_on_host(*this, closure); }
at::Tensor HostAdamW::step(LossClosure closure) { return step_all_on_host(*this, closure); }
void HostAdam::step_parameters(const std::vector<at::Tensor>& parameters) { step_on_host(*this, &parameters); }
void HostAdamW::step_parameters(const std::vector<at::Tensor>& parameters) { step_on_host(*this, &parameters); }
void HostAdam::require_steppable() { tessera::require_steppable(*this, kInHostMemory); }
void HostAdamW::require_steppable() { tessera::require_steppable(*this, kInHostMemory); }
std::unique_ptr<PartialStep::RevocableSteps> HostAdam::revocable_steps() {
  if (!parameters_listed_twice(*this).empty()) return nullptr;  // roll_back() could not undo two steps of one parameter
  return std::make_unique<RevocableHostSteps<torch::optim::AdamParamState>>(*this);
}
std::unique_ptr<PartialStep::RevocableSteps> HostAdamW::revocable_steps() {
  if (!parameters_listed_twice(*this).empty()) return nullptr;  // roll_back() could not undo two steps of one parameter
  return std::make_unique<RevocableHostSteps<torch::optim::AdamWParamState>>(*this);
}

}  // namespace tessera
