#include "tessera/optim/host_adam.h"

#include <ATen/Parallel.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <unordered_set>

#include "tessera/flat/shard_mark.h"
#include "tessera/optim/adam_kernel.h"
#include "tessera/paging/disk_pager.h"

namespace tessera {
namespace {

// What one thread takes at a time: enough to be worth a call, little enough to share evenly.
constexpr int64_t kPartNumel = 1 << 16;

struct Part {
  AdamSpan span;
  AdamFactors factors;
};

void check(const at::Tensor& parameter) {
  std::ostringstream problem;
  if (is_paged(parameter) && DiskPager::of(parameter) == nullptr)
    problem << "lay on a disk with a wrapper that no longer exists";
  else if (!parameter.device().is_cpu())
    problem << "is on " << parameter.device() << ", expected host memory";
  else if (!at::isFloatingType(parameter.scalar_type()))
    problem << "is " << parameter.scalar_type() << ", expected a floating-point type";
  else if (parameter.grad().layout() != at::kStrided)
    problem << "has a gradient of layout " << parameter.grad().layout() << ", expected a dense one";
  else if (!parameter.is_non_overlapping_and_dense())
    problem << "has strides " << parameter.strides() << ", expected dense ones";
  if (!problem.str().empty())
    throw std::invalid_argument("a host optimizer: a parameter of shape " + c10::str(parameter.sizes()) + " " +
                                problem.str());
}

// The pass walks through memory: all tensors of a parameter must have its strides.
at::Tensor laid_out_as(const at::Tensor& tensor, const at::Tensor& parameter) {
  if (tensor.strides() == parameter.strides() && tensor.scalar_type() == parameter.scalar_type() &&
      tensor.device().is_cpu())
    return tensor;
  at::Tensor copy = at::empty_like(parameter);
  copy.copy_(tensor);
  return copy;
}

// The state of a parameter on a disk lies there, too.
at::Tensor zeros_beside(const at::Tensor& parameter) {
  DiskPager* disk = DiskPager::of(parameter);
  if (disk == nullptr || parameter.numel() == 0) return at::zeros_like(parameter);
  return disk->make(parameter.sizes(), parameter.strides(), parameter.scalar_type(),
                    "the state of " + page_of(parameter)->name());
}

at::Tensor placed_as(const at::Tensor& state, const at::Tensor& parameter) {
  if (parameter.numel() == 0 || DiskPager::of(parameter) == nullptr) return laid_out_as(state, parameter);
  if (DiskPager::of(state) == DiskPager::of(parameter)) return state;
  at::Tensor moved = zeros_beside(parameter);  // from a checkpoint, say
  moved.copy_(state);
  return moved;
}

template <class State>
State& state_of(torch::optim::Optimizer& optimizer, const at::Tensor& parameter, bool amsgrad) {
  auto& slot = optimizer.state()[parameter.unsafeGetTensorImpl()];
  if (!slot) {
    auto fresh = std::make_unique<State>();
    fresh->step(0);
    fresh->exp_avg(zeros_beside(parameter));
    fresh->exp_avg_sq(zeros_beside(parameter));
    slot = std::move(fresh);
  }
  auto& state = static_cast<State&>(*slot);
  state.exp_avg(placed_as(state.exp_avg(), parameter));
  state.exp_avg_sq(placed_as(state.exp_avg_sq(), parameter));
  if (!amsgrad) return state;
  state.max_exp_avg_sq(state.max_exp_avg_sq().defined() ? placed_as(state.max_exp_avg_sq(), parameter)
                                                        : zeros_beside(parameter));
  return state;
}

template <class State, class Options>
void other_dtype_step(const at::Tensor& parameter, const at::Tensor& gradient, State& state, const Options& options,
                      bool is_decoupled) {
  const std::vector<at::Tensor> maxima =
      options.amsgrad() ? std::vector<at::Tensor>{state.max_exp_avg_sq()} : std::vector<at::Tensor>{};
  const std::vector<at::Tensor> steps{at::full({}, state.step(), at::TensorOptions().dtype(at::kFloat))};
  if (is_decoupled) {
    at::_fused_adamw_({parameter}, {gradient}, {state.exp_avg()}, {state.exp_avg_sq()}, maxima, steps, options.lr(),
                      std::get<0>(options.betas()), std::get<1>(options.betas()), options.weight_decay(), options.eps(),
                      options.amsgrad(), /*maximize=*/false);
  } else {
    at::_fused_adam_({parameter}, {gradient}, {state.exp_avg()}, {state.exp_avg_sq()}, maxima, steps, options.lr(),
                     std::get<0>(options.betas()), std::get<1>(options.betas()), options.weight_decay(), options.eps(),
                     options.amsgrad(), /*maximize=*/false);
  }
  parameter.unsafeGetTensorImpl()->bump_version();  // which the fused operators do not
}

// One call's work: what must stay alive for it, and the parts that threads share.
struct Pass {
  std::vector<at::Tensor> kept;
  std::vector<Part> parts;
  std::vector<at::Tensor> written;
  std::vector<DiskPager::Hold> held;

  template <class State, class Options>
  void add(const at::Tensor& parameter, State& state, const Options& options, bool is_decoupled) {
    state.step(state.step() + 1);
    if (parameter.numel() == 0) return;  // nothing of it is on this rank
    const at::Tensor gradient = laid_out_as(parameter.grad(), parameter);
    if (parameter.scalar_type() != at::kFloat)
      return other_dtype_step(parameter, gradient, state, options, is_decoupled);
    kept.push_back(gradient);
    written.push_back(parameter);
    AdamSpan span{data_of(parameter), gradient.const_data_ptr<float>(), data_of(state.exp_avg()),
                  data_of(state.exp_avg_sq())};
    if (options.amsgrad()) span.maximum = data_of(state.max_exp_avg_sq());
    if (const NarrowPart* copy = narrow_copy_of(parameter); copy != nullptr) {
      span.narrow = static_cast<uint16_t*>(copy->values.mutable_data_ptr());
      span.narrow_kind = copy->values.scalar_type() == at::kBFloat16 ? NarrowKind::kBFloat16 : NarrowKind::kHalf;
    }
    span.numel = parameter.numel();
    const AdamFactors factors = adam_factors(options.lr(), std::get<0>(options.betas()), std::get<1>(options.betas()),
                                             options.eps(), options.weight_decay(), is_decoupled, state.step());
    for (int64_t begin = 0; begin < span.numel; begin += kPartNumel)
      parts.push_back({span.part(begin, std::min(begin + kPartNumel, span.numel)), factors});
  }

  float* data_of(const at::Tensor& tensor) {
    DiskPager* disk = DiskPager::of(tensor);
    if (disk == nullptr) return tensor.mutable_data_ptr<float>();
    held.push_back(disk->hold(tensor, /*writes=*/true));
    return held.back().values().mutable_data_ptr<float>();
  }

  void run() const {
    at::parallel_for(0, static_cast<int64_t>(parts.size()), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) adam_step(parts[i].span, parts[i].factors);
    });
    // Behind the dispatcher's back: whoever watches the version shall notice.
    for (const at::Tensor& parameter : written) {
      parameter.unsafeGetTensorImpl()->bump_version();
      note_write(parameter);
      if (const NarrowPart* copy = narrow_copy_of(parameter); copy != nullptr) copy->note_write(parameter);
    }
  }
};

template <class State, class Options>
void host_step(torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>* chosen, bool is_decoupled) {
  at::NoGradGuard no_grad;
  std::unordered_set<const c10::TensorImpl*> wanted;
  if (chosen != nullptr)
    for (const at::Tensor& parameter : *chosen) wanted.insert(parameter.unsafeGetTensorImpl());
  std::vector<std::pair<at::Tensor, const Options*>> work;
  for (auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (chosen != nullptr && wanted.erase(parameter.unsafeGetTensorImpl()) == 0) continue;
      if (!parameter.grad().defined()) continue;
      check(parameter);  // before any is changed
      work.emplace_back(parameter, &static_cast<const Options&>(group.options()));
    }
  }
  if (!wanted.empty())
    throw std::invalid_argument("step_parameters: " + std::to_string(wanted.size()) + " of " +
                                std::to_string(chosen->size()) + " tensors are no parameters of the optimizer");
  Pass pass;
  for (const auto& [parameter, options] : work) {
    State& state = state_of<State>(optimizer, parameter, options->amsgrad());
    if (DiskPager::of(parameter) == nullptr) {
      pass.add(parameter, state, *options, is_decoupled);
    } else {  // by itself, so that memory holds one such parameter and its state, and what is read ahead
      Pass alone;
      alone.add(parameter, state, *options, is_decoupled);
      alone.run();
    }
  }
  pass.run();
}

at::Tensor loss_of(const torch::optim::Optimizer::LossClosure& closure) {
  if (!closure) return {};
  at::AutoGradMode recording(true);
  return closure();
}

}  // namespace

at::Tensor HostAdam::step(LossClosure closure) {
  at::Tensor loss = loss_of(closure);
  host_step<torch::optim::AdamParamState, torch::optim::AdamOptions>(*this, nullptr, /*is_decoupled=*/false);
  return loss;
}

void HostAdam::step_parameters(const std::vector<at::Tensor>& parameters) {
  host_step<torch::optim::AdamParamState, torch::optim::AdamOptions>(*this, &parameters, /*is_decoupled=*/false);
}

at::Tensor HostAdamW::step(LossClosure closure) {
  at::Tensor loss = loss_of(closure);
  host_step<torch::optim::AdamWParamState, torch::optim::AdamWOptions>(*this, nullptr, /*is_decoupled=*/true);
  return loss;
}

void HostAdamW::step_parameters(const std::vector<at::Tensor>& parameters) {
  host_step<torch::optim::AdamWParamState, torch::optim::AdamWOptions>(*this, &parameters, /*is_decoupled=*/true);
}

}  // namespace tessera
