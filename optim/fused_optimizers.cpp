#include <tessera/optim/fused_optimizers.h>

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <typeinfo>
#include <utility>

#include <tessera/detail/listed_optimizer.h>
#include "core/paging/residency.h"
#include "core/runtime/graph_recorder.h"
#include "core/trace/trace.h"
#include "optim/host/adam_update.h"
#include "optim/host/fused_kernels.h"
#include "optim/state/optimizer_state.h"

namespace tessera {
using namespace internal;
namespace {

constexpr const char* kName = "a fused optimizer";
constexpr AdamPlacement kBesideTheParameter{kName, [](const at::Tensor&) { return std::string(); },
                                            [](const at::Tensor& parameter) { return at::zeros_like(parameter); },
                                            &laid_out_as};

[[noreturn]] void refuse_new_state(const at::Tensor& parameter) {
  throw std::invalid_argument(c10::str("CapturedStep on ", parameter.device(),
                                       ": since the last eager step the optimizer's state of a parameter of shape ",
                                       parameter.sizes(),
                                       " was removed or replaced, and a capture cannot create it: load a checkpoint "
                                       "before the first call or after the capture"));
}

at::Tensor in_place(const at::Tensor& state, const at::Tensor& parameter) {
  if (!laid_out_as(state, parameter).is_same(state)) refuse_new_state(parameter);
  return state;
}

// A recording must not create a state or copy a state to another layout, because each replay would do so again.
constexpr AdamPlacement kInRecording{kName, kBesideTheParameter.problem,
                                     [](const at::Tensor& parameter) -> at::Tensor { refuse_new_state(parameter); },
                                     &in_place};

// fp32 numbers in device memory that recorded kernels read. Between replays, the host writes the numbers with fill_(),
// which does not wait for the device.
class DeviceNumbers {
 public:
  // Must be called in a recording. Each replay adds `increment` to all numbers before the kernels read them.
  DeviceNumbers(CapturedWork& work, size_t count, float increment)
      : values_(work.take_numbers(static_cast<int64_t>(count))),
        on_device_(count, std::numeric_limits<float>::quiet_NaN()),
        increment_(increment) {
    if (increment != 0) values_.add_(increment);
  }

  at::Tensor number(size_t i) const { return values_.select(0, static_cast<int64_t>(i)); }

  // Must be called before each replay, with the numbers that the kernels of this replay must read.
  void write(const std::vector<float>& wanted) {
    std::vector<size_t> changed;
    for (size_t i = 0; i < wanted.size(); ++i)
      if (on_device_[i] + increment_ != wanted[i]) changed.push_back(i);
    if (changed.size() > 1 && std::ranges::count(wanted, wanted[0]) == std::ssize(wanted)) {
      values_.fill_(wanted[0] - increment_);
    } else {
      for (const size_t i : changed) number(i).fill_(wanted[i] - increment_);
    }
    on_device_ = wanted;
  }

 private:
  const at::Tensor values_;
  std::vector<float> on_device_;  // values after the replay that follows the last write()
  const float increment_;
};

// The parameter groups of an optimizer whose step is recorded. Only their learning rates may change between replays.
class RecordedGroups {
 public:
  RecordedGroups(CapturedWork& work, torch::optim::Optimizer& optimizer)
      : optimizer_(optimizer), rates_(work, optimizer.param_groups().size(), 0) {
    for (const auto& group : optimizer.param_groups()) options_.push_back(read_options(group.options()));
  }

  at::Tensor rate(size_t group) const { return rates_.number(group); }

  // Returns a message if the number of groups or an option other than "lr" has changed; else "". See RecordedStep.
  std::string change() const {
    if (const size_t count = optimizer_.param_groups().size(); count != options_.size())
      return c10::str("the optimizer's groups have become ", count, " instead of ", options_.size());
    for (size_t group = 0; group < options_.size(); ++group) {
      const OptionList now = read_options(optimizer_.param_groups()[group].options());
      for (size_t i = 0; i < now.size(); ++i)
        if (const auto& [name, value] = options_[group][i]; name != "lr" && now[i].second != value)
          return c10::str("the option ", name, " of the optimizer's group ", group, " has become ",
                          text_of(now[i].second), " instead of ", text_of(value));
    }
    return "";
  }

  void write_rates() {
    std::vector<float> rates;
    for (const auto& group : optimizer_.param_groups()) rates.push_back(static_cast<float>(group.options().get_lr()));
    rates_.write(rates);
  }

 private:
  torch::optim::Optimizer& optimizer_;
  std::vector<OptionList> options_;
  DeviceNumbers rates_;
};

struct RecordedAdam {
  RecordedAdam(CapturedWork& work, torch::optim::Optimizer& of, std::vector<AdamUpdate> all)
      : optimizer(of), groups(work, of), counts(work, all.size(), 1), updates(std::move(all)) {
    for (size_t i = 0; i < updates.size(); ++i) {
      updates[i].rate = groups.rate(updates[i].group);
      updates[i].count = counts.number(i);
    }
    fused_adam_update(updates);
  }

  void prepare_replay() {
    at::NoGradGuard no_grad;
    // The recording already incremented the step counts for the first replay.
    if (has_replayed)
      for (AdamUpdate& update : updates) prepare_adam_replay(optimizer, update, kBesideTheParameter);
    has_replayed = true;
    std::vector<float> steps;
    for (const AdamUpdate& update : updates) steps.push_back(static_cast<float>(update.step));
    counts.write(steps);
    groups.write_rates();
  }

  torch::optim::Optimizer& optimizer;
  RecordedGroups groups;
  DeviceNumbers counts;
  std::vector<AdamUpdate> updates;
  bool has_replayed = false;
};

at::Device device_of(const torch::optim::Optimizer& optimizer) {
  for (const auto& group : optimizer.param_groups())
    if (!group.params().empty()) return group.params()[0].device();
  return at::kCPU;
}

void require_inputs(torch::optim::Optimizer& optimizer) { require_steppable(optimizer, kBesideTheParameter); }

void fused_step(torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>* chosen) {
  CapturedWork* const work = CapturedWork::recording_on(device_of(optimizer));
  std::vector<AdamUpdate> updates;
  const auto run = [&] {
    if (work == nullptr || updates.empty()) return fused_adam_update(std::exchange(updates, {}));
    const auto recorded = std::make_shared<RecordedAdam>(*work, optimizer, std::exchange(updates, {}));
    work->add_step({[recorded] { return recorded->groups.change(); }, [recorded] { recorded->prepare_replay(); }});
  };
  for_each_adam_update(
      optimizer, chosen, work == nullptr ? kBesideTheParameter : kInRecording,
      [&](AdamUpdate update) { updates.push_back(std::move(update)); }, run);
}

void require_inputs(torch::optim::SGD& optimizer) {
  for_each_stepped(optimizer, nullptr, [](auto&, const at::Tensor& parameter) { require_dense(parameter, kName); });
}

struct SgdBatch {
  std::vector<at::Tensor> parameters, gradients, momenta;
  std::vector<torch::optim::SGDParamState*> states;  // the states of `momenta`, which own them after the step

  // `rate`: the learning rate as a device tensor in a recorded step; undefined in an eager step.
  void step(const torch::optim::SGDOptions& options, bool is_first, const at::Tensor& rate) const {
    if (!fused_sgd_is_right(parameters[0].scalar_type(), parameters[0].device().type()))
      return step_by_operators(options, is_first);
    const auto call = [&](const auto& lr) {
      at::_fused_sgd_(parameters, gradients, momenta, options.weight_decay(), options.momentum(), lr,
                      options.dampening(), options.nesterov(), /*maximize=*/false, is_first);
    };
    rate.defined() ? call(rate) : call(rate_of_kernels(options.lr(), parameters[0]));
    // Fused operators do not raise version counters. Tessera detects writes by these counters.
    for (const at::Tensor& parameter : parameters) parameter.unsafeGetTensorImpl()->bump_version();
  }

  // Runs the operations in the order of torch::optim::SGD, for bit-equal results.
  void step_by_operators(const torch::optim::SGDOptions& options, bool is_first) const {
    std::vector<at::Tensor> direction = gradients;
    if (options.weight_decay() != 0) direction = at::_foreach_add(gradients, parameters, options.weight_decay());
    if (options.momentum() != 0) {
      if (is_first) {
        at::_foreach_copy_(momenta, direction);
      } else {
        at::_foreach_mul_(momenta, options.momentum());
        at::_foreach_add_(momenta, direction, 1 - options.dampening());
      }
      direction = options.nesterov() ? at::_foreach_add(direction, momenta, options.momentum()) : momenta;
    }
    at::_foreach_add_(parameters, direction, -options.lr());
  }
};

// Each batch is one kernel call. The key consists of: group, dtype, device, whether momenta are new (one flag for the
// whole call), and a number that gives each parameter on disk its own call.
using SgdBatches =
    std::map<std::tuple<torch::optim::OptimizerParamGroup*, at::ScalarType, std::string, bool, size_t>, SgdBatch>;

void add_to(SgdBatches& batches, torch::optim::SGD& optimizer, torch::optim::OptimizerParamGroup& group,
            const at::Tensor& parameter) {
  if (note_write_if_empty(parameter)) return;
  torch::optim::SGDParamState* state = nullptr;
  if (static_cast<const torch::optim::SGDOptions&>(group.options()).momentum() != 0) {
    auto& slot = optimizer.state()[parameter.unsafeGetTensorImpl()];
    if (!slot) slot = std::make_unique<torch::optim::SGDParamState>();
    state = &static_cast<torch::optim::SGDParamState&>(*slot);
  }
  const at::Tensor momentum = state != nullptr ? state->momentum_buffer() : at::Tensor();
  const bool is_first = state != nullptr && !momentum.defined();
  const size_t alone = is_on_disk(parameter) ? batches.size() + 1 : 0;
  SgdBatch& batch = batches[{&group, parameter.scalar_type(), parameter.device().str(), is_first, alone}];
  batch.parameters.push_back(parameter);
  batch.gradients.push_back(laid_out_as(parameter.grad(), parameter));
  if (state == nullptr) return;
  batch.momenta.push_back(is_first ? at::zeros_like(parameter) : laid_out_as(momentum, parameter));
  batch.states.push_back(state);
}

struct RecordedSgd {
  RecordedSgd(CapturedWork& work, torch::optim::SGD& of, SgdBatches all)
      : optimizer(of), groups(work, of), batches(std::move(all)) {
    for (const auto& [key, batch] : batches) {
      const auto index = std::get<0>(key) - optimizer.param_groups().data();
      const auto& options = static_cast<const torch::optim::SGDOptions&>(std::get<0>(key)->options());
      for (size_t i = 0; i < batch.momenta.size(); ++i)
        if (!batch.momenta[i].is_same(batch.states[i]->momentum_buffer())) refuse_new_state(batch.parameters[i]);
      batch.step(options, /*is_first=*/false, groups.rate(static_cast<size_t>(index)));
    }
  }

  bool has_momentum(const at::Tensor& parameter) const {
    const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
    return found != optimizer.state().end() &&
           static_cast<const torch::optim::SGDParamState&>(*found->second).momentum_buffer().defined();
  }

  std::string change() const {
    for (const auto& [key, batch] : batches)
      for (size_t i = 0; i < batch.momenta.size(); ++i)
        if (!has_momentum(batch.parameters[i])) return "a momentum of the optimizer was removed";
    return groups.change();
  }

  void prepare_replay() {
    at::NoGradGuard no_grad;
    for (const auto& [key, batch] : batches)
      for (size_t i = 0; i < batch.momenta.size(); ++i) {
        const at::Tensor& parameter = batch.parameters[i];
        auto& state = static_cast<torch::optim::SGDParamState&>(*optimizer.state()[parameter.unsafeGetTensorImpl()]);
        state.momentum_buffer(in_recorded_memory(laid_out_as(state.momentum_buffer(), parameter), batch.momenta[i]));
      }
    groups.write_rates();
  }

  torch::optim::SGD& optimizer;
  RecordedGroups groups;
  SgdBatches batches;
};

void run_batches(torch::optim::SGD& optimizer, SgdBatches batches) {
  if (auto* const work = CapturedWork::recording_on(device_of(optimizer)); work != nullptr && !batches.empty()) {
    const auto recorded = std::make_shared<RecordedSgd>(*work, optimizer, std::move(batches));
    return work->add_step({[recorded] { return recorded->change(); }, [recorded] { recorded->prepare_replay(); }});
  }
  for (const auto& [key, batch] : batches) {
    const auto& options = static_cast<const torch::optim::SGDOptions&>(std::get<0>(key)->options());
    batch.step(options, std::get<3>(key), /*rate=*/{});
    for (size_t i = 0; i < batch.states.size(); ++i) batch.states[i]->momentum_buffer(batch.momenta[i]);
  }
}

void fused_step(torch::optim::SGD& optimizer, const std::vector<at::Tensor>* chosen) {
  std::vector<std::pair<torch::optim::OptimizerParamGroup*, at::Tensor>> stepped;
  for_each_stepped(optimizer, chosen, [&](torch::optim::OptimizerParamGroup& group, const at::Tensor& parameter) {
    require_dense(parameter, kName);
    stepped.emplace_back(&group, parameter);
  });
  SgdBatches batches;
  const auto listed_twice = parameters_listed_twice(optimizer);
  for (const auto& [group, parameter] : stepped) {
    if (std::ranges::binary_search(listed_twice, parameter.unsafeGetTensorImpl()))
      run_batches(optimizer, std::exchange(batches, {}));
    add_to(batches, optimizer, *group, parameter);
  }
  run_batches(optimizer, std::move(batches));
}

}  // namespace

bool internal::has_recordable_step(const torch::optim::Optimizer& optimizer) {
  return typeid(optimizer) == typeid(Adam) || typeid(optimizer) == typeid(AdamW) || typeid(optimizer) == typeid(SGD);
}

template <class Base>
at::Tensor FusedOptimizer<Base>::step(torch::optim::Optimizer::LossClosure closure) {
  at::Tensor loss = loss_of(closure);
  at::NoGradGuard no_grad;
  const TraceSpan span(SpanKind::kOptimizer, "a fused step");
  if (auto* const work = CapturedWork::running_on(device_of(*this)); work != nullptr && has_recordable_step(*this))
    work->note_recordable(this);
  fused_step(*this, nullptr);
  return loss;
}

template <class Base>
void FusedOptimizer<Base>::step_parameters(const std::vector<at::Tensor>& parameters) {
  at::NoGradGuard no_grad;
  fused_step(*this, &parameters);
}

template <class Base>
void FusedOptimizer<Base>::require_steppable() {
  require_inputs(*this);
}

template class internal::FusedOptimizer<torch::optim::Adam>;
template class internal::FusedOptimizer<torch::optim::AdamW>;
template class internal::FusedOptimizer<torch::optim::SGD>;

}  // namespace tessera
