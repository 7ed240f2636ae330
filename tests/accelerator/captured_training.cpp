#include "tests/accelerator/captured_training.h"

#include <optional>

#include "tests/support/reference.h"

namespace tessera::captured_training {
namespace {

using accelerator_training::State;
using testing_support::seeded;

constexpr int kSteps = 12;

// A user's optimizer. Replays must not bypass its step().
struct OwnStep : tessera::AdamW {
  using tessera::AdamW::FusedOptimizer;
  at::Tensor step(LossClosure closure = nullptr) override {
    for (const auto& group : param_groups())
      for (const at::Tensor& parameter : group.params())
        if (parameter.grad().defined()) parameter.mutable_grad().mul_(1.0 / static_cast<double>(++steps));
    return FusedOptimizer::step(std::move(closure));
  }
  int64_t steps = 0;
};

// Replaces the optimizer's state tensors and step counts by others, as loading a state does.
void replace_states(torch::optim::Optimizer& optimizer) {
  at::NoGradGuard no_grad;
  const auto of_adam = [](auto& state) {
    state.step(state.step() + 5);
    state.exp_avg(state.exp_avg() * 0.5);
    state.exp_avg_sq(state.exp_avg_sq() * 2);
    if (state.max_exp_avg_sq().defined()) state.max_exp_avg_sq(state.max_exp_avg_sq() * 2);
  };
  for (auto& [parameter, state] : optimizer.state()) {
    if (auto* decoupled = dynamic_cast<torch::optim::AdamWParamState*>(state.get())) of_adam(*decoupled);
    if (auto* adam = dynamic_cast<torch::optim::AdamParamState*>(state.get())) of_adam(*adam);
    if (auto* sgd = dynamic_cast<torch::optim::SGDParamState*>(state.get()))
      sgd->momentum_buffer(sgd->momentum_buffer() * 0.5);
  }
}

// Trains by a CapturedStep if `captures`, otherwise by an eager loop. Returns the state and the losses.
template <class Wrapper, class Optimizer>
State train_steps(const Case& of, bool captures, Wrapper& wrapper, Optimizer& optimizer, Communicator& comm,
                  const std::filesystem::path& folder) {
  const at::Device device = comm.device();
  std::vector<std::pair<at::Tensor, at::Tensor>> batches;
  for (int step = 0; step < kSteps; ++step)
    batches.push_back(seeded(100 * step + comm.rank(), [&] {
      const auto dtype = of.is_fp64 ? at::kDouble : at::kFloat;
      const int64_t rows = 4 - step % of.shapes;
      return std::pair(torch::randn({rows, kFeatures}, dtype), torch::randn({rows, kFeatures}, dtype));
    }));
  comm.barrier("batches");  // drawing batches seeds the generators of all devices, so must end on all ranks first
  at::Generator generator = at::globalContext().defaultGenerator(device);
  generator.set_current_seed(7);
  const std::optional<double> max_norm = of.clips ? std::optional(0.5) : std::nullopt;
  auto loss_of = [&](const std::vector<at::Tensor>& in) { return (wrapper(in[0]) - in[1]).square().mean(); };
  std::vector<std::unique_ptr<CapturedStep>> captured;
  for (int i = 0; captures && i < of.shapes; ++i)
    captured.push_back(std::make_unique<CapturedStep>(wrapper, optimizer, loss_of, max_norm));
  std::optional<LambdaLR> schedule;
  if (of.schedules) schedule.emplace(optimizer, [](int64_t step) { return 1.0 / static_cast<double>(1 + step); });
  std::vector<at::Tensor> losses;
  for (size_t number = 0; number < batches.size(); ++number) {
    const auto& [x, y] = batches[number];
    if (of.interrupts && number == 6) save_checkpoint(folder, wrapper, optimizer);
    if (of.interrupts && number == 8) load_checkpoint(folder, wrapper, optimizer);
    if (of.interrupts && number == 10) replace_states(optimizer);
    if (of.loads && number == kSteps - 2) {
      at::NoGradGuard no_grad;
      for (at::Tensor& parameter : wrapper.module()->parameters())
        parameter.set_data(torch::full(parameter.sizes(), 0.25, parameter.options()));
    }
    if (captures && !(of.interrupts && number == 5)) {
      losses.push_back((*captured[number % captured.size()])({x.to(device), y.to(device)}));
    } else {
      optimizer.zero_grad();
      at::Tensor loss = loss_of({x.to(device), y.to(device)});
      loss.backward();
      if (max_norm) wrapper.clip_grad_norm_on_device_(*max_norm);
      optimizer.step();
      losses.push_back(loss.detach());
    }
    if (schedule) schedule->step();
    if (of.evaluates) {
      at::NoGradGuard no_grad;
      losses.push_back(wrapper(x.to(device)).mean());
    }
  }
  for (const auto& step : captured) TORCH_CHECK(step->is_captured(), "the step is not captured");
  State state;
  for (auto& entry : wrapper.full_state_dict()) state[entry.key()] = entry.value().cpu();
  for (size_t i = 0; i < losses.size(); ++i) state["loss " + std::to_string(i)] = losses[i].cpu();
  return state;
}

template <class Optimizer, class Options>
State train_with(const Case& of, bool captures, const std::filesystem::path& folder,
                 const std::shared_ptr<Communicator>& comm, Options options_of_optimizer) {
  Net net = seeded(5, [&] { return Net(of.dropout); });
  if (of.is_fp64) net->to(at::kDouble);
  net->to(comm->device());
  // The first parameter has another learning rate.
  const auto groups = [&](const std::vector<at::Tensor>& parameters) {
    std::vector<torch::optim::OptimizerParamGroup> made;
    const auto middle = parameters.begin() + 1;
    made.emplace_back(std::vector<at::Tensor>(parameters.begin(), middle));
    made.emplace_back(std::vector<at::Tensor>(middle, parameters.end()));
    made[0].set_options(std::make_unique<Options>(Options(options_of_optimizer).lr(3e-2)));
    made[1].set_options(std::make_unique<Options>(options_of_optimizer));
    return made;
  };
  if (of.wrapper == Case::kFsdp) {
    FsdpOptions options = of.fsdp;
    options.auto_wrap = wrap_modules<torch::nn::LinearImpl>();
    FullyShardedDataParallel fsdp(net, comm, options);
    Optimizer optimizer(groups(fsdp.parameters()), options_of_optimizer);
    return train_steps(of, captures, fsdp, optimizer, *comm, folder);
  }
  if (of.wrapper == Case::kDdp) {
    DistributedDataParallel ddp(net, comm, of.ddp);
    Optimizer optimizer(groups(net->parameters()), options_of_optimizer);
    return train_steps(of, captures, ddp, optimizer, *comm, folder);
  }
  OSS<Optimizer> optimizer(groups(net->parameters()), options_of_optimizer, comm);
  ShardedDataParallel sdp(net, optimizer, comm);
  return train_steps(of, captures, sdp, optimizer, *comm, folder);
}

}  // namespace

State train(const Case& of, bool captures, const std::filesystem::path& folder,
            const std::shared_ptr<Communicator>& comm) {
  const auto train_by = [&]<class Optimizer>(const auto& options) {
    return train_with<Optimizer>(of, captures, folder, comm, options);
  };
  const auto adamw = torch::optim::AdamWOptions(1e-2).weight_decay(0.1);
  const auto sgd = torch::optim::SGDOptions(1e-1).weight_decay(0.01);
  switch (of.optimizer) {
    case Case::kTorchAdamW:
      return train_by.template operator()<torch::optim::AdamW>(adamw);
    case Case::kAdamW:
      return train_by.template operator()<AdamW>(adamw);
    case Case::kOwnStep:
      return train_by.template operator()<OwnStep>(adamw);
    case Case::kAdam:
      return train_by.template operator()<Adam>(torch::optim::AdamOptions(1e-2).weight_decay(0.1).amsgrad(true));
    case Case::kSgd:
      return train_by.template operator()<SGD>(sgd);
    case Case::kSgdMomentum:
      return train_by.template operator()<SGD>(torch::optim::SGDOptions(sgd).momentum(0.9).dampening(0.2));
  }
  return {};
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (int world = 1; world <= 3; ++world) {
    const std::string at = "_" + std::to_string(world);
    all.push_back({.name = "fsdp" + at, .wrapper = Case::kFsdp, .world = world, .evaluates = world == 2});
    all.push_back({.name = "sdp" + at, .wrapper = Case::kSdp, .world = world, .evaluates = world == 3});
    all.push_back({.name = "ddp" + at, .wrapper = Case::kDdp, .world = world, .evaluates = world == 2});
    all.push_back({.name = "dropout" + at,
                   .wrapper = static_cast<Case::Wrapper>(world - 1),
                   .world = world,
                   .dropout = 0.3,
                   .clips = false});
  }
  const MixedPrecision bf16{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  all.push_back({.name = "fsdp_bf16", .fsdp = {.mixed_precision = bf16}, .optimizer = Case::kAdamW});
  all.push_back({.name = "fsdp_bf16_alone", .world = 1, .fsdp = {.mixed_precision = bf16}, .optimizer = Case::kAdamW});
  all.push_back({.name = "fsdp_kept_gathered",
                 .fsdp = {.reshard_after_forward = false, .prefetch = 2},
                 .optimizer = Case::kAdamW});
  // A replayed step makes units stale that an evaluation has left unsharded.
  all.push_back({.name = "fsdp_kept_evaluates",
                 .fsdp = {.reshard_after_forward = false},
                 .evaluates = true,
                 .optimizer = Case::kAdamW});
  all.push_back(
      {.name = "fsdp_recent_evaluates", .fsdp = {.keep_recent = 8}, .evaluates = true, .optimizer = Case::kSgd});
  all.push_back({.name = "fsdp_int8", .fsdp = {.wire = {WireFormat::kInt8Blocks, WireFormat::kInt8Blocks}}});
  all.push_back({.name = "fsdp_hybrid", .world = 4, .fsdp = {.hybrid = {.ranks_per_copy = 2}}});
  all.push_back({.name = "fsdp_secondary", .world = 4, .fsdp = {.hybrid = {.ranks_per_secondary_copy = 2}}});
  all.push_back({.name = "fsdp_rank_order", .world = 3, .rank_order_sums = true});
  all.push_back(
      {.name = "ddp_static", .wrapper = Case::kDdp, .ddp = {.static_graph = true}, .optimizer = Case::kAdamW});
  all.push_back({.name = "fsdp_loads", .loads = true});
  const std::pair<std::string, Case::Wrapper> wrappers[] = {
      {"fsdp", Case::kFsdp}, {"sdp", Case::kSdp}, {"ddp", Case::kDdp}};
  const std::pair<std::string, Case::Stepper> optimizers[] = {{"adamw", Case::kAdamW},
                                                              {"adam", Case::kAdam},
                                                              {"sgd", Case::kSgd},
                                                              {"sgd_momentum", Case::kSgdMomentum},
                                                              {"own_step", Case::kOwnStep}};
  for (const auto& [wrapper, kind] : wrappers)
    for (const auto& [optimizer, steps] : optimizers)
      all.push_back({.name = wrapper + "_" + optimizer,
                     .wrapper = kind,
                     .world = steps == Case::kAdamW ? 3 : 2,
                     .evaluates = steps == Case::kAdam,
                     .optimizer = steps,
                     .interrupts = true});
  for (const auto& [wrapper, kind] : wrappers)
    for (const Case::Stepper steps : {Case::kTorchAdamW, Case::kAdamW, Case::kSgdMomentum})
      all.push_back(
          {.name = wrapper + "_two_shapes_" + std::to_string(steps), .wrapper = kind, .optimizer = steps, .shapes = 2});
  all.push_back({.name = "sdp_adamw_alone", .wrapper = Case::kSdp, .world = 1, .optimizer = Case::kAdamW});
  all.push_back({.name = "ddp_adamw_fp64", .wrapper = Case::kDdp, .optimizer = Case::kAdamW, .is_fp64 = true});
  all.push_back({.name = "ddp_bf16_wire", .wrapper = Case::kDdp, .ddp = {.compression = GradientCompression::kBf16}});
  return all;
}

}  // namespace tessera::captured_training
