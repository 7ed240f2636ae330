// Tests of CapturedStep, which records and replays forward, backward, clipping and optimizer: results equal those of an
// eager loop bitwise, replays do not stop the host, and unsupported uses are refused.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <thread>

#include "core/runtime/graph_recorder.h"
#include "tests/accelerator/captured_training.h"
#include "tests/accelerator/simulated_training.h"
#include "tests/support/temporary_folder.h"

namespace tessera::captured_step_test {
using namespace internal;
namespace {

using accelerator::Simulation;
using accelerator_training::difference;
using accelerator_training::State;
using captured_training::Case;
using captured_training::kFeatures;
using captured_training::Net;
using captured_training::train;
using testing_support::error_of;
using testing_support::expect_contains;
using testing_support::seeded;

State train_on_devices(const Case& of, bool captures) {
  const testing_support::TemporaryFolder folder;
  State state;
  accelerator::on_devices(of.world,
                          [&](std::shared_ptr<Communicator> comm) {
                            State own = train(of, captures, folder.path() / "saved", comm);
                            if (comm->rank() == 0) state = std::move(own);
                          },
                          {.timeout = std::chrono::seconds(60), .rank_order_sums = of.rank_order_sums});
  return state;
}

class CapturedStepBits : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Cases, CapturedStepBits, testing::ValuesIn(captured_training::cases()),
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

// Expects that a replay is one launch of a graph, and does not stop the host.
template <class Wrapper>
void expect_one_launch(Wrapper& wrapper, torch::optim::Optimizer& optimizer, Communicator& comm) {
  CapturedStep step(wrapper, optimizer, [&](const Inputs& in) { return wrapper(in[0]).square().mean(); }, 0.5);
  const Inputs inputs = batch_on(comm);
  // With a schedule, the write of the learning rate is one more launch.
  for (const bool schedules : {false, true}) {
    for (int i = 0; i < 4; ++i) step(inputs);
    const accelerator::Counts before = Simulation::counts(comm.rank());
    for (int i = 0; i < 10; ++i) {
      if (schedules) optimizer.param_groups()[0].options().set_lr(1e-3 * (i + 1));
      step(inputs);
    }
    const accelerator::Counts after = Simulation::counts(comm.rank());
    EXPECT_EQ(after.host_waits, before.host_waits);
    // Expects three launches per step: the copy of the input, the graph, and the copy of the loss.
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

// A zero_grad() between replays does not change results, and losses may be read later: replays have their own memory.
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

// ---- loops between replays -------------------------------------------------------------------------

// Runs loop(comm, captures) on two devices with an eager loop, then with captured steps. Expects equal bits, no races.
using Loop = std::function<State(const std::shared_ptr<Communicator>& comm, bool captures)>;
void expect_equal_bits(const Loop& loop) {
  const Simulation simulation;
  std::map<bool, State> states;
  for (const bool captures : {false, true})
    accelerator::on_devices(std::min(2, accelerator::device_count()), [&](std::shared_ptr<Communicator> comm) {
      State own = loop(comm, captures);
      if (comm->rank() == comm->size() - 1) states[captures] = std::move(own);
    });
  EXPECT_EQ(difference(states[false], states[true]), "");
  for (const std::string& finding : Simulation::findings()) ADD_FAILURE() << finding;
}

// Returns a function that trains one step, captured or not.
template <class Wrapper>
std::function<at::Tensor(const Inputs&)> step_of(Wrapper& wrapper, torch::optim::Optimizer& optimizer,
                                                 const CapturedStep::Body& body, bool captures) {
  if (captures)
    return [step = std::make_shared<CapturedStep>(wrapper, optimizer, body)](const Inputs& in) { return (*step)(in); };
  return [&optimizer, body](const Inputs& in) {
    optimizer.zero_grad();
    at::Tensor loss = body(in);
    loss.backward();
    optimizer.step();
    return loss.detach();
  };
}

at::Tensor rows_of(const Communicator& comm, int step) {
  return torch::full({4, kFeatures}, 0.1 * (step + 1) * (comm.rank() + 1), comm.device()).tril();
}

// Each evaluation has the running statistics of rank 0's last training forward, also if that was a replay.
TEST(CapturedStep, AnEvaluationAfterReplaysHasTheBuffersOfRankZero) {
  expect_equal_bits([](const std::shared_ptr<Communicator>& comm, bool captures) {
    torch::nn::Sequential net = seeded(5, [] {
      return torch::nn::Sequential(torch::nn::Linear(kFeatures, kFeatures), torch::nn::BatchNorm1d(kFeatures));
    });
    net->to(comm->device());
    DistributedDataParallel ddp(net, comm);
    SGD optimizer(net->parameters(), 1e-2);
    const auto step = step_of(ddp, optimizer, [&](const Inputs& in) { return ddp(in[0]).square().mean(); }, captures);
    State state;
    for (int i = 0; i < 8; ++i) {
      step({rows_of(*comm, i)});
      if (i == 3) continue;  // the next replay, not an evaluation, follows this one
      const at::NoGradGuard no_grad;
      net->eval();
      state["evaluation " + std::to_string(i)] = ddp(rows_of(*comm, 3)).cpu();
      net->train();
    }
    return state;
  });
}

// After an exception of the body, the caller may write to tensors that the begun step still reads.
TEST(CapturedStep, AnExceptionOfTheFirstCallLeavesNoRace) {
  expect_equal_bits([](const std::shared_ptr<Communicator>& comm, bool captures) {
    Net net = net_on(*comm);
    FullyShardedDataParallel fsdp(net, comm, in_units());
    SGD optimizer(fsdp.parameters(), 1e-2);
    int calls = 0;
    const auto body = [&](const Inputs& in) {
      const at::Tensor y = fsdp(in[0]);
      if (++calls == 1) throw std::runtime_error("the body's own");
      return y.square().mean();
    };
    const auto step = step_of(fsdp, optimizer, body, captures);
    EXPECT_EQ(error_of<std::runtime_error>([&] { step({rows_of(*comm, 0)}); }), "the body's own");
    for (at::Tensor parameter : fsdp.parameters()) {
      const at::NoGradGuard no_grad;
      parameter.mul_(0.5);
    }
    State state;
    for (int i = 0; i < 6; ++i) state["loss " + std::to_string(i)] = step({rows_of(*comm, i)}).cpu();
    return state;
  });
}

// A GAN, whose two steps are captured. The judge is frozen in the generator's steps.
template <class Wrap>
void expect_equal_gan(const Wrap& wrap) {
  expect_equal_bits([&](const std::shared_ptr<Communicator>& comm, bool captures) {
    Net net = net_on(*comm), judging = net_on(*comm);
    auto generator = wrap(net, comm), judge = wrap(judging, comm);
    SGD of_generator(generator->parameters(), 1e-2), of_judge(judge->parameters(), 1e-2);
    const auto judge_step = step_of(
        *judge, of_judge,
        [&](const Inputs& in) {
          at::Tensor made;
          {
            const at::NoGradGuard no_grad;
            made = (*generator)(in[0]);
          }
          return ((*judge)(made) - (*judge)(in[1])).square().mean();
        },
        captures);
    const auto generator_step = step_of(
        *generator, of_generator, [&](const Inputs& in) { return (*judge)((*generator)(in[0])).square().mean(); },
        captures);
    State state;
    for (int i = 0; i < 7; ++i) {
      for (at::Tensor parameter : judging->parameters()) parameter.requires_grad_(true);
      state["judge " + std::to_string(i)] = judge_step({rows_of(*comm, i), rows_of(*comm, i + 1)}).cpu();
      for (at::Tensor parameter : judging->parameters()) parameter.requires_grad_(false);
      state["generator " + std::to_string(i)] = generator_step({rows_of(*comm, i)}).cpu();
    }
    return state;
  });
}

TEST(CapturedStep, OfAGanThatFreezesItsJudge) {
  expect_equal_gan([](Net net, const std::shared_ptr<Communicator>& comm) {
    return std::make_unique<FullyShardedDataParallel<Net>>(net, comm, in_units());
  });
  expect_equal_gan([](Net net, const std::shared_ptr<Communicator>& comm) {
    return std::make_unique<DistributedDataParallel<Net>>(net, comm);
  });
}

TEST(CapturedStep, FullParametersMayBeWrittenBetweenReplays) {
  expect_equal_bits([](const std::shared_ptr<Communicator>& comm, bool captures) {
    Net net = net_on(*comm);
    FullyShardedDataParallel fsdp(net, comm, in_units());
    SGD optimizer(fsdp.parameters(), 1e-2);
    const auto step = step_of(fsdp, optimizer, [&](const Inputs& in) { return fsdp(in[0]).square().mean(); }, captures);
    State state;
    for (int i = 0; i < 8; ++i) {
      state["loss " + std::to_string(i)] = step({rows_of(*comm, i)}).cpu();
      const auto scope = fsdp.summon_full_params();
      const at::NoGradGuard no_grad;
      for (at::Tensor parameter : net->parameters()) parameter.mul_(0.9);
    }
    return state;
  });
}

// The program itself trains ignored modules. Each call clears their gradients and sets them, as those of the wrapper.
TEST(CapturedStep, GradientsOfIgnoredModulesAreThoseOfTheStep) {
  expect_equal_bits([](const std::shared_ptr<Communicator>& comm, bool captures) {
    Net net = net_on(*comm);
    const auto is_own = [](const std::string& name, const torch::nn::Module&) { return name == "norm"; };
    FullyShardedDataParallel fsdp(net, comm, in_units({.ignored_modules = wrap_if(is_own)}));
    SGD optimizer(fsdp.parameters(), 1e-2), own(net->norm->parameters(), 1e-2);
    const auto step = step_of(fsdp, optimizer, [&](const Inputs& in) { return fsdp(in[0]).square().mean(); }, captures);
    State state;
    for (int i = 0; i < 8; ++i) {
      if (!captures) own.zero_grad();
      state["loss " + std::to_string(i)] = step({rows_of(*comm, i)}).cpu();
      own.step();
    }
    return state;
  });
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

// Runs captured steps of a net under DDP until one throws. loss() gets the input and the output. Returns the error.
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
    expect_contains(error_of_steps<std::invalid_argument>(*comm, comm,
                                                          [](const at::Tensor&, const at::Tensor& y) {
                                                            const auto at_random_depth = [](const at::Tensor& in) {
                                                              return torch::rand({}).item<float>() < 0.5 ? in.square()
                                                                                                         : in.abs();
                                                            };
                                                            return checkpointed(at_random_depth, y).mean();
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

// The read fails with the device's error, which ends the group. Afterwards, the device draws random numbers as before.
TEST(CapturedStep, AReadOfTheHostFailsTheCapture) {
  const Simulation simulation;
  accelerator::on_devices(std::min(2, accelerator::device_count()), [](std::shared_ptr<Communicator> comm) {
    const std::string error = error_of_steps<std::exception>(*comm, comm, [](const at::Tensor&, const at::Tensor& y) {
      const at::Tensor loss = torch::dropout(y, 0.5, true).square().mean();
      return loss * (1 + loss.item<double>());
    });
    if (!accelerator::on_gpus()) expect_contains(error, "not recorded: item");
    if (comm->size() > 1)
      expect_contains(error_of<CommError>([&] { comm->throw_if_aborted("afterwards"); }), "the capture failed");
    EXPECT_LT(torch::rand({8}, comm->device()).max().item<float>(), 1);
  });
}

TEST(CapturedStep, AnExceptionOfAnyTypeFailsTheCapture) {
  const Simulation simulation;
  accelerator::on_devices(std::min(2, accelerator::device_count()), [](std::shared_ptr<Communicator> comm) {
    const auto step = [&](const at::Tensor&, const at::Tensor& y) {
      if (CapturedWork::recording_on(comm->device()) != nullptr) throw 7;
      return y.square().mean();
    };
    EXPECT_THROW(error_of_steps<std::exception>(*comm, comm, step), int);
    if (comm->size() > 1)
      expect_contains(error_of<CommError>([&] { comm->throw_if_aborted("afterwards"); }), "the capture failed");
  });
}

// The graph's memory replaces that of eager steps, which is freed, because a graph cannot use cached memory.
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

TEST(CapturedStep, InputsAfterAFirstCallWithoutAnyAreRefused) {
  const Simulation simulation;
  accelerator::on_devices(1, [](std::shared_ptr<Communicator> comm) {
    Net net = net_on(*comm);
    DistributedDataParallel ddp(net, comm);
    torch::optim::SGD optimizer(net->parameters(), 1e-2);
    const at::Tensor x = batch_on(*comm)[0];
    CapturedStep step(ddp, optimizer, [&](const Inputs&) { return ddp(x).square().mean(); });
    step({});
    expect_contains(error_of<std::invalid_argument>([&] { step({x}); }), "got 1 inputs, expected 0");
    for (int i = 0; i < 5; ++i) step({});
    EXPECT_TRUE(step.is_captured());
  });
}

TEST(CapturedStep, ASecondThreadIsRefused) {
  const Simulation simulation;
  accelerator::on_devices(1, [](std::shared_ptr<Communicator> comm) {
    Net net = net_on(*comm);
    FullyShardedDataParallel fsdp(net, comm, in_units());
    AdamW optimizer(fsdp.parameters(), torch::optim::AdamWOptions(1e-2));
    std::function<void()> in_step;
    CapturedStep step(fsdp, optimizer, [&](const Inputs& in) {
      if (const auto once = std::exchange(in_step, nullptr)) once();
      return fsdp(in[0]).square().mean();
    });
    in_step = [&] {
      std::thread([&] {
        expect_contains(error_of<std::logic_error>([&] { step(batch_on(*comm)); }),
                        "a second thread calls a captured step while another thread is in a captured step");
        expect_contains(error_of<std::logic_error>([&] { fsdp(batch_on(*comm)[0]); }),
                        "a second thread calls forward() while another thread is in a captured step");
      }).join();
    };
    for (int i = 0; i < 6; ++i) step(batch_on(*comm));
    EXPECT_TRUE(step.is_captured());
  });
}

// (FSDP copies the values of such memory into its shards.)
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

// After a refusal, undoes the change, except for the last one, and expects that the next step succeeds.
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
    expect_contains(refusal(), "parameters were added to the optimizer or removed from it since the capture");
    optimizer.param_groups().pop_back();
    step(batch_on(*comm));

    ddp.set_gradient_divide_factor(3.0);
    expect_contains(refusal(), "the divisor of gradients was changed since the capture");
  });
}

// After each refusal, undoes the change, and expects that the next step succeeds.
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
    torch::nn::Linear outside(2, 2);
    outside->to(comm->device());
    optimizer.add_param_group({outside->parameters()});
    expect_contains(error_of<std::logic_error>([&] { step(batch_on(*comm)); }),
                    "parameters were added to the optimizer or removed from it since the capture");
    optimizer.param_groups().pop_back();
    step(batch_on(*comm));
  });
}

// Removes states just before the capture, which must be refused: a recorded step would reset them in each replay.
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

// The error of a rank that waits in a replay names the rank that has left.
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

// A replay runs collectives of subgroups without a call, so the survivors must detect the loss of the rank otherwise.
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

// Inputs may be slices of a longer batch, as in language models, although the graph's own inputs have other strides.
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
