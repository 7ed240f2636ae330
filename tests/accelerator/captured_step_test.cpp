// A step whose forward, backward, clipping and optimizer are recorded and replayed: bits as in the loop without, no
// host wait, refusals.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <memory>
#include <optional>

#include "tests/accelerator/simulated_training.h"
#include "tests/support/temporary_folder.h"

namespace tessera::captured_step_test {
using namespace internal;
namespace {

using accelerator::Simulation;
using accelerator_training::difference;
using accelerator_training::State;
using testing_support::error_of;
using testing_support::expect_contains;
using testing_support::seeded;

constexpr int64_t kFeatures = 16;
constexpr int kSteps = 12;

struct NetImpl : torch::nn::Module {
  explicit NetImpl(double dropout) : dropout_(dropout) {
    for (int i = 0; i < 4; ++i) blocks->push_back(torch::nn::Linear(kFeatures, kFeatures));
    register_module("blocks", blocks);
    register_module("norm", norm);
  }
  at::Tensor forward(at::Tensor x) {
    for (int i = 0; i < 4; ++i) {
      x = torch::tanh(blocks->ptr<torch::nn::LinearImpl>(i)->forward(x));
      if (dropout_ > 0) x = torch::dropout(x, dropout_, is_training());
    }
    return norm(x);
  }
  torch::nn::ModuleList blocks;
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({kFeatures})};

 private:
  const double dropout_;
};
TORCH_MODULE(Net);

struct Case {
  std::string name;
  enum Wrapper { kFsdp, kSdp, kDdp } wrapper = kFsdp;
  int world = 2;
  FsdpOptions fsdp{};
  DdpOptions ddp{};
  double dropout = 0;
  bool clips = true;
  bool schedules = true;  // the learning rate changes from step to step
  bool evaluates = false;
  bool loads = false;  // gives the module's parameters other data, as torch::load() does, when steps are replayed
  // Those of torch and of a derived class cannot be recorded, nor can any with fp64 parameters.
  enum Stepper { kTorchAdamW, kAdamW, kAdam, kSgd, kSgdMomentum, kOwnStep } optimizer = kTorchAdamW;
  bool interrupts = false;  // between replays: an eager step, a checkpoint saved and loaded, states replaced
  bool is_fp64 = false;
  bool rank_order_sums = false;
  int shapes = 1;  // of batches, in turn, each with a CapturedStep of its own
};

// A program's own optimizer, whose step() replays must not bypass.
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

// Gives the optimizer other state tensors with other values, and other step counts, as a load does.
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

// Trains, and returns the state. `captures`: by a CapturedStep.
template <class Wrapper, class Optimizer>
State train(const Case& of, bool captures, Wrapper& wrapper, Optimizer& optimizer, Communicator& comm,
            const std::filesystem::path& folder) {
  const at::Device device = comm.device();
  std::vector<std::pair<at::Tensor, at::Tensor>> batches;
  for (int step = 0; step < kSteps; ++step)
    batches.push_back(seeded(100 * step + comm.rank(), [&] {
      const auto dtype = of.is_fp64 ? at::kDouble : at::kFloat;
      const int64_t rows = 4 - step % of.shapes;
      return std::pair(torch::randn({rows, kFeatures}, dtype), torch::randn({rows, kFeatures}, dtype));
    }));
  comm.barrier("batches");  // drawing them seeds the generators of all devices
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
  for (const auto& step : captured) EXPECT_TRUE(step->is_captured());
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
  // The first parameters have a learning rate of their own.
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
    return train(of, captures, fsdp, optimizer, *comm, folder);
  }
  if (of.wrapper == Case::kDdp) {
    DistributedDataParallel ddp(net, comm, of.ddp);
    Optimizer optimizer(groups(net->parameters()), options_of_optimizer);
    return train(of, captures, ddp, optimizer, *comm, folder);
  }
  OSS<Optimizer> optimizer(groups(net->parameters()), options_of_optimizer, comm);
  ShardedDataParallel sdp(net, optimizer, comm);
  return train(of, captures, sdp, optimizer, *comm, folder);
}

State train_with(const Case& of, bool captures, const std::filesystem::path& folder,
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

State train_on_devices(const Case& of, bool captures) {
  const testing_support::TemporaryFolder folder;
  State state;
  accelerator::on_devices(of.world,
                          [&](std::shared_ptr<Communicator> comm) {
                            State own = train_with(of, captures, folder.path() / "saved", comm);
                            if (comm->rank() == 0) state = std::move(own);
                          },
                          {.timeout = std::chrono::seconds(60), .rank_order_sums = of.rank_order_sums});
  return state;
}

void PrintTo(const Case& of, std::ostream* out) { *out << of.name; }

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
  // A replayed step makes the units stale that an evaluation has left gathered.
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

class CapturedStepBits : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Cases, CapturedStepBits, testing::ValuesIn(cases()),
                         [](const auto& instance) { return instance.param.name; });

TEST_P(CapturedStepBits, AreThoseOfTheLoopWithoutACapture) {
  const Case& of = GetParam();
  accelerator::needs_devices(of.world);
  const Simulation simulation;
  const State expected = train_on_devices(of, /*captures=*/false);
  EXPECT_EQ(difference(expected, train_on_devices(of, /*captures=*/true)), "");
  for (const std::string& finding : Simulation::findings()) ADD_FAILURE() << finding;
}

// ---- costs -----------------------------------------------------------------------------------------

using Inputs = std::vector<at::Tensor>;

Net net_on(const Communicator& comm) {
  Net net = seeded(5, [] { return Net(0.0); });
  net->to(comm.device());
  return net;
}

FsdpOptions in_units(FsdpOptions options = {}) {
  options.auto_wrap = wrap_modules<torch::nn::LinearImpl>();
  return options;
}

Inputs batch_on(const Communicator& comm) { return {torch::ones({4, kFeatures}, comm.device())}; }

// The first capture synchronises once, and compares the ranks' collectives. Replays are one launch.
template <class Wrapper>
void expect_one_launch(Wrapper& wrapper, torch::optim::Optimizer& optimizer, Communicator& comm) {
  CapturedStep step(wrapper, optimizer, [&](const Inputs& in) { return wrapper(in[0]).square().mean(); }, 0.5);
  const Inputs inputs = batch_on(comm);
  // A schedule's write of the learning rate is one launch more.
  for (const bool schedules : {false, true}) {
    for (int i = 0; i < 4; ++i) step(inputs);
    const accelerator::Counts before = Simulation::counts(comm.rank());
    for (int i = 0; i < 10; ++i) {
      if (schedules) optimizer.param_groups()[0].options().set_lr(1e-3 * (i + 1));
      step(inputs);
    }
    const accelerator::Counts after = Simulation::counts(comm.rank());
    EXPECT_EQ(after.host_waits, before.host_waits);
    // The copy of the input, the graph, the copy of the loss.
    EXPECT_EQ(after.launches - before.launches, accelerator::on_gpus() ? 0 : 10 * (schedules ? 4 : 3));
  }
  EXPECT_TRUE(std::isfinite(step.norm()));
}

TEST(CapturedStep, ReplaysAreOneLaunchAndDoNotStopTheHost) {
  const Simulation simulation;
  accelerator::on_devices(std::min(2, accelerator::device_count()), [](std::shared_ptr<Communicator> comm) {
    const auto adam = torch::optim::AdamWOptions(1e-2);
    {
      Net net = net_on(*comm);
      FullyShardedDataParallel fsdp(net, comm, in_units());
      AdamW optimizer(fsdp.parameters(), adam);
      expect_one_launch(fsdp, optimizer, *comm);
    }
    {
      Net net = net_on(*comm);
      OSS<AdamW> optimizer(net->parameters(), adam, comm);
      ShardedDataParallel sdp(net, optimizer, comm);
      expect_one_launch(sdp, optimizer, *comm);
    }
    Net net = net_on(*comm);
    DistributedDataParallel ddp(net, comm);
    SGD optimizer(net->parameters(), torch::optim::SGDOptions(1e-2).momentum(0.9));
    expect_one_launch(ddp, optimizer, *comm);
  });
}

// zero_grad() between steps, and a loss that is read later, change nothing: replays write to memory of their own.
TEST(CapturedStep, KeepsGradientsAndLossesApartFromTheUsers) {
  const Simulation simulation;
  accelerator::on_devices(std::min(2, accelerator::device_count()), [](std::shared_ptr<Communicator> comm) {
    std::vector<std::vector<double>> losses;
    for (const bool clears : {false, true}) {
      Net net = net_on(*comm);
      FullyShardedDataParallel fsdp(net, comm, in_units());
      AdamW optimizer(fsdp.parameters(), torch::optim::AdamWOptions(1e-2));
      CapturedStep step(fsdp, optimizer, [&](const Inputs& in) { return fsdp(in[0]).square().mean(); });
      std::vector<at::Tensor> of_steps;
      for (int i = 0; i < 8; ++i) {
        of_steps.push_back(step(batch_on(*comm)));
        if (clears) optimizer.zero_grad();
        const at::Tensor other = torch::full({1024}, 7.0, comm->device());  // reuses freed memory
      }
      losses.emplace_back();
      for (const at::Tensor& loss : of_steps) losses.back().push_back(loss.item<double>());
    }
    EXPECT_EQ(losses[0], losses[1]);
    EXPECT_LT(losses[0].back(), losses[0].front());
    EXPECT_NE(losses[0][5], losses[0][6]);
  });
  for (const std::string& finding : Simulation::findings()) ADD_FAILURE() << finding;
}

// ---- refusals --------------------------------------------------------------------------------------

template <class Wrapper>
std::string refusal_of(Wrapper& wrapper, torch::optim::Optimizer& optimizer) {
  return error_of<std::invalid_argument>([&] { CapturedStep(wrapper, optimizer, nullptr); });
}

TEST(CapturedStep, OptionsThatNeedTheHostAreRefused) {
  const Simulation simulation;
  accelerator::on_devices(std::min(2, accelerator::device_count()), [](std::shared_ptr<Communicator> comm) {
    const std::vector<std::pair<FsdpOptions, std::string>> refused = {
        {{.offload = {.params = true, .grads = true}}, "FsdpOptions::offload"},
        {{.refuse_uneven_use = true}, "refuse_uneven_use"},
        {{.check_finite = true}, "check_finite"}};
    for (const auto& [options, name] : refused) {
      Net net = net_on(*comm);
      FullyShardedDataParallel fsdp(net, comm, in_units(options));
      torch::optim::SGD optimizer(fsdp.parameters(), 1e-2);
      expect_contains(refusal_of(fsdp, optimizer), name);
    }
    Net net = net_on(*comm);
    DistributedDataParallel ddp(net, comm, DdpOptions{.compare_replicas_every = 5});
    torch::optim::SGD optimizer(net->parameters(), 1e-2);
    expect_contains(refusal_of(ddp, optimizer), "compare_replicas_every");
  });
}

TEST(CapturedStep, CpusAreRefused) {
  testing_support::on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    torch::nn::Linear net = seeded(5, [] { return torch::nn::Linear(4, 4); });
    DistributedDataParallel ddp(net, comm);
    torch::optim::SGD optimizer(net->parameters(), 1e-2);
    expect_contains(refusal_of(ddp, optimizer), "the wrapper's group is on the CPU, expected an accelerator");
  });
}

TEST(CapturedStep, RegisteredMemoryIsRefused) {
  accelerator::needs_simulation("it needs two devices and registered memory");
  const Simulation simulation;
  accelerator::on_devices(2,
                          [](std::shared_ptr<Communicator> comm) {
                            Net net = net_on(*comm);
                            FullyShardedDataParallel fsdp(net, comm, in_units());
                            torch::optim::SGD optimizer(fsdp.parameters(), 1e-2);
                            expect_contains(refusal_of(fsdp, optimizer), "InitOptions::registered_memory");
                          },
                          {.timeout = std::chrono::seconds(60), .registered_memory = true});
}

// Runs steps of a body, which refers to a net under DDP, until one throws.
template <class Error>
std::string error_of_steps(Communicator& comm, const std::shared_ptr<Communicator>& group,
                           const std::function<at::Tensor(const at::Tensor& x, const at::Tensor& y)>& loss) {
  Net net = net_on(comm);
  DistributedDataParallel ddp(net, group);
  torch::optim::SGD optimizer(net->parameters(), 1e-2);
  CapturedStep step(ddp, optimizer, [&](const Inputs& in) { return loss(in[0], ddp(in[0])); });
  return error_of<Error>([&] {
    for (int i = 0; i < 6; ++i) step(batch_on(comm));
  });
}

TEST(CapturedStep, PartsThatTheHostTakesPartInAreRefusedInEagerSteps) {
  const Simulation simulation;
  accelerator::on_devices(1, [](std::shared_ptr<Communicator> comm) {
    expect_contains(error_of_steps<std::invalid_argument>(
                        *comm, comm,
                        [](const at::Tensor&, const at::Tensor& y) {
                          return checkpointed([](const at::Tensor& in) { return torch::dropout(in, 0.5, true); }, y)
                              .square()
                              .mean();
                        }),
                    "a checkpointed function that draws random numbers");
    const ShardedGradScaler scaler(comm);
    expect_contains(
        error_of_steps<std::invalid_argument>(
            *comm, comm, [&](const at::Tensor&, const at::Tensor& y) { return scaler.scale(y.square().mean()); }),
        "ShardedGradScaler, whose scale and steps the host decides");
    ActivationOffload activations(comm->device(), {.min_bytes = 0});
    expect_contains(error_of_steps<std::invalid_argument>(
                        *comm, comm,
                        [&](const at::Tensor&, const at::Tensor& y) {
                          const ActivationOffload::Scope scope(activations);
                          return checkpointed([](const at::Tensor& in) { return in.square(); }, y).mean();
                        }),
                    "ActivationOffload");
  });
}

// The error is the device's, and the reason of the group's end. Afterwards the device draws random numbers as before.
TEST(CapturedStep, AReadOfTheHostFailsTheCapture) {
  const Simulation simulation;
  accelerator::on_devices(std::min(2, accelerator::device_count()), [](std::shared_ptr<Communicator> comm) {
    const std::string error = error_of_steps<std::exception>(*comm, comm, [](const at::Tensor&, const at::Tensor& y) {
      const at::Tensor loss = torch::dropout(y, 0.5, true).square().mean();
      return loss * (1 + loss.item<double>());
    });
    if (!accelerator::on_gpus()) expect_contains(error, "not recorded: item");
    expect_contains(error_of<CommError>([&] { comm->throw_if_aborted("afterwards"); }), "the capture failed");
    EXPECT_LT(torch::rand({8}, comm->device()).max().item<float>(), 1);
  });
}

// The allocator cannot give memory that it has cached for eager steps to a graph.
TEST(CapturedStep, TheGraphTakesThePlaceOfTheMemoryOfEagerSteps) {
  accelerator::needs_simulation("CUDA's allocator takes 2 MiB at a time");
  const Simulation simulation;
  accelerator::on_devices(1, [](std::shared_ptr<Communicator> comm) {
    Net net = net_on(*comm);
    DistributedDataParallel ddp(net, comm);
    torch::optim::SGD optimizer(net->parameters(), 1e-2);
    CapturedStep step(ddp, optimizer, [&](const Inputs& in) { return ddp(in[0]).square().mean(); });
    const at::Tensor x = torch::ones({2048, kFeatures}, comm->device());
    for (int i = 0; i < 3; ++i) step({x});
    const int64_t before = accelerator::reserved_bytes(comm->rank());
    for (int i = 0; i < 3; ++i) step({x});
    EXPECT_TRUE(step.is_captured());
    EXPECT_LT(accelerator::reserved_bytes(comm->rank()), before * 5 / 4);
  });
}

TEST(CapturedStep, OtherInputsAndFrozenParametersAreRefused) {
  const Simulation simulation;
  accelerator::on_devices(1, [](std::shared_ptr<Communicator> comm) {
    Net net = net_on(*comm);
    DistributedDataParallel ddp(net, comm);
    torch::optim::SGD optimizer(net->parameters(), 1e-2);
    CapturedStep step(ddp, optimizer, [&](const Inputs& in) { return ddp(in[0]).square().mean(); });
    for (int i = 0; i < 5; ++i) step(batch_on(*comm));
    const std::string other = error_of<std::invalid_argument>([&] { step({torch::ones({5, kFeatures})}); });
    expect_contains(other, "input 0 is Float of shape [5, 16]");
    expect_contains(other, "make another CapturedStep");
    expect_contains(error_of<std::invalid_argument>([&] { step({}); }), "got 0 inputs, expected 1");
    net->norm->bias.requires_grad_(false);
    expect_contains(error_of<std::logic_error>([&] { step(batch_on(*comm)); }), "parameter 'norm.bias' was frozen");
  });
}

// FSDP copies such values into its shards.
TEST(CapturedStep, OtherMemoryOfParametersIsRefusedWhereTheyAreWhole) {
  const Simulation simulation;
  accelerator::on_devices(std::min(2, accelerator::device_count()), [](std::shared_ptr<Communicator> comm) {
    const auto expect_refusal = [&](auto& wrapper, torch::optim::Optimizer& optimizer, Net net) {
      CapturedStep step(wrapper, optimizer, [&](const Inputs& in) { return wrapper(in[0]).square().mean(); });
      for (int i = 0; i < 5; ++i) step(batch_on(*comm));
      at::Tensor weight = net->blocks->ptr<torch::nn::LinearImpl>(1)->weight;
      const at::Tensor before = weight.detach();
      weight.set_data(before.clone());
      expect_contains(error_of<std::logic_error>([&] { step(batch_on(*comm)); }),
                      "parameter 'blocks.1.weight' was given other memory");
      weight.set_data(before);
      step(batch_on(*comm));
    };
    Net net = net_on(*comm);
    DistributedDataParallel ddp(net, comm);
    torch::optim::SGD sgd(net->parameters(), 1e-2);
    expect_refusal(ddp, sgd, net);
    Net other = net_on(*comm);
    OSS<torch::optim::SGD> oss(other->parameters(), torch::optim::SGDOptions(1e-2), comm);
    ShardedDataParallel sdp(other, oss, comm);
    expect_refusal(sdp, oss, other);
  });
}

// The test undoes each change but the last one, and the next step succeeds.
TEST(CapturedStep, ChangesThatReplaysWouldIgnoreAreRefused) {
  const Simulation simulation;
  accelerator::on_devices(1, [](std::shared_ptr<Communicator> comm) {
    torch::nn::BatchNorm1d norm(8);
    torch::nn::Sequential net(torch::nn::Linear(kFeatures, 8), norm, torch::nn::Dropout(0.5));
    net->to(comm->device());
    torch::nn::Linear outside(2, 2);
    outside->to(comm->device());
    DistributedDataParallel ddp(net, comm);
    torch::optim::SGD optimizer(net->parameters(), 1e-2);
    CapturedStep step(ddp, optimizer, [&](const Inputs& in) { return ddp(in[0]).square().mean(); });
    for (int i = 0; i < 5; ++i) step(batch_on(*comm));
    const auto refusal = [&] { return error_of<std::logic_error>([&] { step(batch_on(*comm)); }); };

    net->eval();
    expect_contains(refusal(), "was put into evaluation mode since the capture");
    net->train();
    step(batch_on(*comm));

    at::Tensor mean = norm->running_mean;
    const at::Tensor before = mean.detach();
    mean.set_data(before.clone());
    expect_contains(refusal(), "buffer '1.running_mean' was given other memory");
    mean.set_data(before);
    step(batch_on(*comm));

    {
      const auto scope = ddp.no_sync();
      expect_contains(error_of<std::invalid_argument>([&] { step(batch_on(*comm)); }), "no_sync");
    }
    step(batch_on(*comm));

    optimizer.add_param_group({outside->parameters()});
    expect_contains(refusal(), "the optimizer's parameters have become 6 instead of 4");
    optimizer.param_groups().pop_back();
    step(batch_on(*comm));

    ddp.set_gradient_divide_factor(3.0);
    expect_contains(refusal(), "the divisor of gradients was changed since the capture");
  });
}

// The test undoes each change, and the next step succeeds.
TEST(CapturedStep, OptionsAndStatesOfTheOptimizerThatReplaysCannotFollowAreRefused) {
  const Simulation simulation;
  accelerator::on_devices(std::min(2, accelerator::device_count()), [](std::shared_ptr<Communicator> comm) {
    const auto expect_refusals = [&](auto& wrapper, auto& optimizer, auto& options) {
      CapturedStep step(wrapper, optimizer, [&](const Inputs& in) { return wrapper(in[0]).square().mean(); });
      for (int i = 0; i < 5; ++i) step(batch_on(*comm));
      const double decay = options.weight_decay();
      options.weight_decay(0.5);
      expect_contains(error_of<std::logic_error>([&] { step(batch_on(*comm)); }),
                      "the option weight_decay of the optimizer's group 0 has become 0.5 instead of");
      options.weight_decay(decay);
      step(batch_on(*comm));
      return step(batch_on(*comm));
    };
    const auto options_of = [](torch::optim::Optimizer& optimizer) -> auto& {
      return optimizer.param_groups()[0].options();
    };
    {
      Net net = net_on(*comm);
      OSS<AdamW> optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2), comm);
      ShardedDataParallel sdp(net, optimizer, comm);
      expect_refusals(sdp, optimizer, static_cast<torch::optim::AdamWOptions&>(options_of(optimizer)));
    }
    Net net = net_on(*comm);
    DistributedDataParallel ddp(net, comm);
    SGD optimizer(net->parameters(), torch::optim::SGDOptions(1e-2).momentum(0.9));
    expect_refusals(ddp, optimizer, static_cast<torch::optim::SGDOptions&>(options_of(optimizer)));
    CapturedStep step(ddp, optimizer, [&](const Inputs& in) { return ddp(in[0]).square().mean(); });
    for (int i = 0; i < 5; ++i) step(batch_on(*comm));
    auto states = std::exchange(optimizer.state(), {});
    expect_contains(error_of<std::logic_error>([&] { step(batch_on(*comm)); }),
                    "a momentum of the optimizer was removed since the capture");
    optimizer.state() = std::move(states);
    step(batch_on(*comm));
  });
}

// A recorded step would clear the state in each replay.
template <class Optimizer, class Options>
void expect_refusal_without_states(const Options& options) {
  accelerator::on_devices(1, [&](std::shared_ptr<Communicator> comm) {
    Net net = net_on(*comm);
    DistributedDataParallel ddp(net, comm);
    Optimizer optimizer(net->parameters(), options);
    CapturedStep step(ddp, optimizer, [&](const Inputs& in) { return ddp(in[0]).square().mean(); });
    for (int i = 0; i < 3; ++i) step(batch_on(*comm));
    optimizer.state().clear();
    expect_contains(error_of<std::invalid_argument>([&] { step(batch_on(*comm)); }),
                    "the optimizer's state of a parameter of shape [16, 16] was removed or replaced");
  });
}

TEST(CapturedStep, AStateThatIsRemovedJustBeforeTheCaptureIsRefused) {
  const Simulation simulation;
  expect_refusal_without_states<AdamW>(torch::optim::AdamWOptions(1e-2));
  expect_refusal_without_states<SGD>(torch::optim::SGDOptions(1e-2).momentum(0.9));
}

TEST(CapturedStep, AutocastAroundTheCallThatReplaysWouldIgnoreIsRefused) {
  const Simulation simulation;
  accelerator::on_devices(1, [](std::shared_ptr<Communicator> comm) {
    Net net = net_on(*comm);
    DistributedDataParallel ddp(net, comm);
    SGD optimizer(net->parameters(), 1e-2);
    CapturedStep step(ddp, optimizer, [&](const Inputs& in) { return ddp(in[0]).square().mean(); });
    const auto device = comm->device().type();
    const auto autocast = [&](at::ScalarType dtype) { return std::make_unique<Autocast>(device, dtype); };
    {
      const auto scope = autocast(at::kBFloat16);
      for (int i = 0; i < 5; ++i) step(batch_on(*comm));
    }
    expect_contains(error_of<std::logic_error>([&] { step(batch_on(*comm)); }),
                    "autocast around the call was switched off since the capture");
    {
      const auto scope = autocast(at::kHalf);
      expect_contains(error_of<std::logic_error>([&] { step(batch_on(*comm)); }),
                      "autocast's dtype has become Half instead of BFloat16 since the capture");
    }
    const auto scope = autocast(at::kBFloat16);
    step(batch_on(*comm));
  });
}

TEST(CapturedStep, AScopeOfFullParametersIsRefusedAroundReplays) {
  const Simulation simulation;
  accelerator::on_devices(1, [](std::shared_ptr<Communicator> comm) {
    Net net = net_on(*comm);
    FullyShardedDataParallel fsdp(net, comm, in_units());
    SGD optimizer(fsdp.parameters(), 1e-2);
    CapturedStep step(fsdp, optimizer, [&](const Inputs& in) { return fsdp(in[0]).square().mean(); });
    for (int i = 0; i < 5; ++i) step(batch_on(*comm));
    {
      const auto scope = fsdp.summon_full_params();
      expect_contains(error_of<std::invalid_argument>([&] { step(batch_on(*comm)); }), "summon_full_params");
    }
    step(batch_on(*comm));
  });
}

// A rank that waits for a replay is told which rank has left.
TEST(CapturedStep, ARankThatReplaysLessIsNamed) {
  accelerator::needs_simulation("it needs two devices");
  const Simulation simulation;
  std::string error;
  try {
    accelerator::on_devices(
        2,
        [&](std::shared_ptr<Communicator> comm) {
          Net net = net_on(*comm);
          FullyShardedDataParallel fsdp(net, comm, in_units());
          SGD optimizer(fsdp.parameters(), 1e-2);
          CapturedStep step(fsdp, optimizer, [&](const Inputs& in) { return fsdp(in[0]).square().mean(); });
          for (int i = 0; i < 6; ++i) {
            if (i == 5 && comm->rank() == 1) throw std::runtime_error("rank 1 stops");
            step(batch_on(*comm));
          }
          comm->throw_if_aborted("the loop");
        },
        std::chrono::seconds(20));
  } catch (const std::exception& thrown) {
    error = thrown.what();
  }
  expect_contains(error, "rank 1 stops");
}

// A replay runs collectives of the group's parts, which no call of the survivors starts.
TEST(CapturedStep, ARankThatIsLostInReplaysOfAHybridGroupEndsTheOthers) {
  accelerator::needs_simulation("it needs four devices");
  const Simulation simulation;
  const std::string error = error_of<std::exception>([] {
    accelerator::on_devices(
        4,
        [](std::shared_ptr<Communicator> comm) {
          Net net = net_on(*comm);
          FullyShardedDataParallel fsdp(net, comm, in_units({.hybrid = {.ranks_per_copy = 2}}));
          SGD optimizer(fsdp.parameters(), 1e-2);
          CapturedStep step(fsdp, optimizer, [&](const Inputs& in) { return fsdp(in[0]).square().mean(); });
          for (int i = 0; i < 8; ++i) {
            if (i == 5 && comm->rank() == 3) throw std::runtime_error("rank 3 stops");
            static_cast<void>(step(batch_on(*comm)).item<float>());
          }
          comm->throw_if_aborted("the loop");
        },
        std::chrono::seconds(20));
  });
  expect_contains(error, "rank 3 stops");
}

// Slices of a longer batch, as language models take them. Memory that replays read has other strides.
TEST(CapturedStep, SlicedInputsOfOneLayoutAreAccepted) {
  const Simulation simulation;
  accelerator::on_devices(1, [](std::shared_ptr<Communicator> comm) {
    Net net = net_on(*comm);
    DistributedDataParallel ddp(net, comm);
    torch::optim::SGD optimizer(net->parameters(), 1e-2);
    for (const at::Device device : {at::Device(at::kCPU), comm->device()}) {
      CapturedStep step(ddp, optimizer, [&](const Inputs& in) { return ddp(in[0]).square().mean(); });
      for (int i = 0; i < 6; ++i)
        EXPECT_NO_THROW(step({torch::ones({4, kFeatures + 1}, device).narrow(1, 0, kFeatures)})) << device << i;
      expect_contains(error_of<std::invalid_argument>([&] { step({torch::ones({4, kFeatures})}); }),
                      "with strides [16, 1], expected Float of shape [4, 16] with strides [17, 1]");
    }
  });
}

}  // namespace
}  // namespace tessera::captured_step_test
