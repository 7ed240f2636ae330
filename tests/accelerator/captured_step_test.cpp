// A step whose forward, backward and clipping are recorded and replayed: bits as in the loop without, no host wait,
// refusals.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <optional>

#include "tests/accelerator/simulated_training.h"

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
constexpr int kSteps = 8;

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
  bool fused = false;  // tessera::AdamW
  bool rank_order_sums = false;
};

// Trains, and returns the state. `captures`: by a CapturedStep.
template <class Wrapper, class Optimizer>
State train(const Case& of, bool captures, Wrapper& wrapper, Optimizer& optimizer, Communicator& comm) {
  const at::Device device = comm.device();
  std::vector<std::pair<at::Tensor, at::Tensor>> batches;
  for (int step = 0; step < kSteps; ++step)
    batches.push_back(seeded(100 * step + comm.rank(),
                             [] { return std::pair(torch::randn({4, kFeatures}), torch::randn({4, kFeatures})); }));
  comm.barrier("batches");  // drawing them seeds the generators of all devices
  at::Generator generator = at::globalContext().defaultGenerator(device);
  generator.set_current_seed(7);
  const std::optional<double> max_norm = of.clips ? std::optional(0.5) : std::nullopt;
  auto loss_of = [&](const std::vector<at::Tensor>& in) { return (wrapper(in[0]) - in[1]).square().mean(); };
  std::optional<CapturedStep> captured;
  if (captures) captured.emplace(wrapper, optimizer, loss_of, max_norm);
  std::optional<LambdaLR> schedule;
  if (of.schedules) schedule.emplace(optimizer, [](int64_t step) { return 1.0 / static_cast<double>(1 + step); });
  std::vector<at::Tensor> losses;
  for (const auto& [x, y] : batches) {
    if (of.loads && losses.size() == kSteps - 2) {
      at::NoGradGuard no_grad;
      for (at::Tensor& parameter : wrapper.module()->parameters())
        parameter.set_data(torch::full(parameter.sizes(), 0.25, parameter.options()));
    }
    if (captured) {
      losses.push_back((*captured)({x.to(device), y.to(device)}));
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
  EXPECT_EQ(captured && captured->is_captured(), captures);
  State state;
  for (auto& entry : wrapper.full_state_dict()) state[entry.key()] = entry.value().cpu();
  for (size_t i = 0; i < losses.size(); ++i) state["loss " + std::to_string(i)] = losses[i].cpu();
  return state;
}

template <class Optimizer, class Options>
State train_with(const Case& of, bool captures, Options adam, std::shared_ptr<Communicator> comm) {
  Net net = seeded(5, [&] { return Net(of.dropout); });
  net->to(comm->device());
  if (of.wrapper == Case::kFsdp) {
    FsdpOptions options = of.fsdp;
    options.auto_wrap = wrap_modules<torch::nn::LinearImpl>();
    FullyShardedDataParallel fsdp(net, comm, options);
    Optimizer optimizer(fsdp.parameters(), adam);
    return train(of, captures, fsdp, optimizer, *comm);
  }
  if (of.wrapper == Case::kDdp) {
    DistributedDataParallel ddp(net, comm, of.ddp);
    Optimizer optimizer(net->parameters(), adam);
    return train(of, captures, ddp, optimizer, *comm);
  }
  OSS<Optimizer> optimizer(net->parameters(), adam, comm);
  ShardedDataParallel sdp(net, optimizer, comm);
  return train(of, captures, sdp, optimizer, *comm);
}

State train_on_devices(const Case& of, bool captures) {
  State state;
  accelerator::on_devices(of.world,
                          [&](std::shared_ptr<Communicator> comm) {
                            const auto adam = torch::optim::AdamWOptions(1e-2);
                            State own = of.fused ? train_with<AdamW>(of, captures, adam, comm)
                                                 : train_with<torch::optim::AdamW>(of, captures, adam, comm);
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
  all.push_back({.name = "fsdp_bf16", .fsdp = {.mixed_precision = bf16}, .fused = true});
  all.push_back({.name = "fsdp_bf16_alone", .world = 1, .fsdp = {.mixed_precision = bf16}, .fused = true});
  all.push_back({.name = "fsdp_kept_gathered", .fsdp = {.reshard_after_forward = false, .prefetch = 2}, .fused = true});
  all.push_back({.name = "fsdp_int8", .fsdp = {.wire = {WireFormat::kInt8Blocks, WireFormat::kInt8Blocks}}});
  all.push_back({.name = "fsdp_hybrid", .world = 4, .fsdp = {.hybrid = {.ranks_per_copy = 2}}});
  all.push_back({.name = "fsdp_secondary", .world = 4, .fsdp = {.hybrid = {.ranks_per_secondary_copy = 2}}});
  all.push_back({.name = "fsdp_rank_order", .world = 3, .rank_order_sums = true});
  all.push_back({.name = "ddp_static", .wrapper = Case::kDdp, .ddp = {.static_graph = true}, .fused = true});
  all.push_back({.name = "fsdp_loads", .loads = true});
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
TEST(CapturedStep, ReplaysAreOneLaunchAndDoNotStopTheHost) {
  const Simulation simulation;
  accelerator::on_devices(std::min(2, accelerator::device_count()), [](std::shared_ptr<Communicator> comm) {
    Net net = net_on(*comm);
    FullyShardedDataParallel fsdp(net, comm, in_units());
    SGD optimizer(fsdp.parameters(), 1e-2);
    CapturedStep step(fsdp, optimizer, [&](const Inputs& in) { return fsdp(in[0]).square().mean(); }, 0.5);
    const Inputs inputs = batch_on(*comm);
    for (int i = 0; i < 4; ++i) step(inputs);
    const accelerator::Counts before = Simulation::counts(comm->rank());
    for (int i = 0; i < 10; ++i) step(inputs);
    const accelerator::Counts after = Simulation::counts(comm->rank());
    EXPECT_EQ(after.host_waits, before.host_waits);
    // Of a step: the copy of the input, the graph, the optimizer's step, the copy of the loss.
    EXPECT_LE(after.launches - before.launches, accelerator::on_gpus() ? 0 : 10 * 5);
    EXPECT_TRUE(std::isfinite(step.norm()));
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

// The device's own error; the group then ends with it, by name.
TEST(CapturedStep, AReadOfTheHostFailsTheCapture) {
  accelerator::needs_simulation("CUDA's error has another text");
  const Simulation simulation;
  accelerator::on_devices(2, [](std::shared_ptr<Communicator> comm) {
    expect_contains(error_of_steps<std::exception>(*comm, comm,
                                                   [](const at::Tensor&, const at::Tensor& y) {
                                                     const at::Tensor loss = y.square().mean();
                                                     return loss * (1 + loss.item<double>());
                                                   }),
                    "not recorded: item");
    expect_contains(error_of<CommError>([&] { comm->throw_if_aborted("afterwards"); }), "the capture failed");
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

}  // namespace
}  // namespace tessera::captured_step_test
