// Archives under every wrapper: loops are bit-identical to those of one process.
#include <gtest/gtest.h>

#include "tests/exported/expected.h"
#include "tests/support/reference.h"
#include "tests/support/temporary_folder.h"
#ifdef TESSERA_HAS_ACCELERATOR
#include <tessera/exported.h>
#include "tests/support/accelerator/ranks.h"
#endif

namespace tessera::exported_test {
using namespace internal;
namespace {

using namespace testing_support;
using Model = std::shared_ptr<ExportedModule>;

constexpr int kSteps = 3;

// A separate batch for each rank.
NamedInputs batch(const std::string& name, int rank, int step) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(100 * rank + step));
  auto text = [&] { return at::randint(23, {3, 5}, generator, at::kLong); };
  if (name.starts_with("decoder")) return {{"ids", text()}, {"labels", text()}};
  if (name == "energy") return {{"positions", at::randn({2, 4, 2}, generator)}};
  return {{"x", at::randn({3, 6}, generator)}};
}

std::vector<std::string> units_of(const std::string& name) {
  return name.starts_with("decoder") ? std::vector<std::string>{"Block"} : std::vector<std::string>{"Linear"};
}

template <class Net>
at::Tensor loss_with(Net& net, const std::string& name, int rank, int step) {
  return loss_of(call(net, batch(name, rank, step)));
}

// Trains with the wrapper that `wrap` returns and in one process, and compares.
template <class Wrap>
void expect_same_loop(const std::string& name, int world, Wrap wrap, ExportedOptions load_options = {}) {
  on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
    const Model reference = load(name);
    auto wrapped = wrap(load(name, load_options), comm);
    torch::optim::AdamW sharded(wrapped.parameters(), torch::optim::AdamWOptions(1e-2));
    torch::optim::AdamW whole(unique_parameters(*reference), torch::optim::AdamWOptions(1e-2));
    for (int step = 0; step < kSteps; ++step) {
      step_both(sharded, whole, [&] {
        const at::Tensor loss = loss_with(wrapped, name, comm->rank(), step);
        EXPECT_TRUE(at::equal(loss, loss_with(reference, name, comm->rank(), step))) << name << ", step " << step;
        loss.backward();
        reference_backward(reference, world, [&](int rank) { return loss_with(reference, name, rank, step); });
      });
    }
    for (const NamedShard& shard : wrapped.named_shards()) {
      const at::Tensor own = reference->named_parameters()[shard.fqn].detach();
      const at::Tensor expected = own.as_strided({own.numel()}, {1}).narrow(0, shard.held.begin, shard.held.numel());
      EXPECT_TRUE(at::equal(shard.tensor.detach().flatten(), expected)) << name << ": " << shard.fqn;
    }
  });
}

class Sharded : public testing::TestWithParam<const char*> {};

TEST_P(Sharded, LoopsAreThoseOfOneProcess) {
  const std::string name = GetParam();
  for (const int world : {1, 2, 3})
    expect_same_loop(name, world, [&](Model model, std::shared_ptr<Communicator> comm) {
      return FullyShardedDataParallel(model, comm, {.auto_wrap = wrap_classes(units_of(name))});
    });
}

TEST_P(Sharded, ActivationsMayBeComputedAgain) {
  const std::string name = GetParam();
  if (name == "energy") return;  // no wrapper supports create_graph through checkpointed functions
  expect_same_loop(name, 2,
                   [&](Model model, std::shared_ptr<Communicator> comm) {
                     return FullyShardedDataParallel(model, comm, {.auto_wrap = wrap_classes(units_of(name))});
                   },
                   {.checkpointed = wrap_classes(units_of(name))});
}

INSTANTIATE_TEST_SUITE_P(All, Sharded, testing::Values("decoder_meta", "energy", "adapted"),
                         [](const auto& param) { return std::string(param.param); });

TEST(ExportedWrappers, UnitsAreModulesOfAClass) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    FullyShardedDataParallel fsdp(load("decoder_meta"), comm, {.auto_wrap = wrap_classes({"Block"})});
    expect_contains(fsdp.describe(), "3 units over 2 ranks");
    expect_contains(fsdp.describe(), "unit 'blocks.1': 12 parameters");
  });
  EXPECT_THROW(wrap_classes({}), std::invalid_argument);
}

TEST(ExportedWrappers, OffloadHybridAndLateReleaseComputeTheSame) {
  for (const int variant : {0, 1, 2})
    expect_same_loop("decoder_meta", variant == 1 ? 4 : 2, [&](Model model, std::shared_ptr<Communicator> comm) {
      FsdpOptions options{.auto_wrap = wrap_classes({"Block"})};
      if (variant == 0) options.offload = {.params = true, .grads = true, .pin_memory = false};
      if (variant == 1) options.hybrid.ranks_per_copy = 4;
      if (variant == 2) options.reshard_after_forward = false;
      return FullyShardedDataParallel(model, comm, options);
    });
}

// Linear nodes with frozen 4-bit weights and adapters: equals the loop of one process, sharded, checkpointed or not.
TEST(ExportedWrappers, AdaptersTrainBesideQuantizedWeights) {
  auto quantized = [](const ExportedOptions& options = {}) {
    const Model model = load("decoder_meta", options);
    const auto names = seeded(5, [&] { return quantize_linears(*model, {.lora = {.rank = 2}}); });
    EXPECT_EQ(names.size(), 8U);  // not the head, whose weight the embedding uses too
    EXPECT_EQ(model->named_parameters()[names[0] + ".weight"].scalar_type(), at::kByte);
    return model;
  };
  // As for a model too large for one rank: quantized inside deferred(), or after it.
  auto quantized_later = [&](const ExportedOptions& options, bool inside) {
    return seeded(5, [&] {
      const auto quantize = [](const Model& model) { quantize_linears(*model, {.lora = {.rank = 2}}); };
      const Model model = deferred([&] {
        const Model loaded = load("decoder_meta", options);
        if (inside) quantize(loaded);
        return loaded;
      });
      if (!inside) quantize(model);
      return model;
    });
  };
  const Model exact = load("decoder_meta");
  const at::Tensor before = loss_with(exact, "decoder_meta", 0, 0);
  for (const int how : {0, 1, 2}) {
    on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      const Model reference = quantized();
      ExportedOptions options;
      if (how != 0) options.checkpointed = wrap_classes({"Block"});
      const Model model = how == 0 ? quantized(options) : quantized_later(options, how == 1);
      FullyShardedDataParallel fsdp(model, comm, {.auto_wrap = wrap_classes({"Block"})});
      torch::optim::AdamW sharded(fsdp.parameters(), 1e-2);
      torch::optim::AdamW whole(reference->parameters(), 1e-2);
      for (int step = 0; step < kSteps; ++step) {
        step_both(sharded, whole, [&] {
          const at::Tensor loss = loss_with(fsdp, "decoder_meta", comm->rank(), step);
          EXPECT_TRUE(at::equal(loss, loss_with(reference, "decoder_meta", comm->rank(), step))) << "step " << step;
          if (step == 0 && comm->rank() == 0) {
            EXPECT_NEAR(loss.item<double>(), before.item<double>(), 0.3);
          }
          loss.backward();
          reference_backward(reference, 2, [&](int rank) { return loss_with(reference, "decoder_meta", rank, step); });
        });
      }
      expect_same_parameters(fsdp, *reference, "quantized");
    });
  }
}

// The loop clears gradients through the module, validates between backward and step, and continues after a batch that
// the archive refuses.
TEST(ExportedWrappers, ALoopWithAllItsHabitsIsTheSameInEveryStage) {
  const std::string name = "decoder_meta";
  const NamedInputs wrong{{"ids", at::zeros({3, 5, 2}, at::kLong)}, {"labels", at::zeros({3, 5}, at::kLong)}};
  auto loop = [&](int stage, std::shared_ptr<Communicator> comm) {
    const Model reference = load(name);
    ZeroOptions options{.stage = stage};
    options.fsdp.auto_wrap = wrap_classes(units_of(name));
    auto model = zero(load(name), torch::optim::AdamWOptions(1e-2), comm, options);
    torch::optim::AdamW whole(unique_parameters(*reference), torch::optim::AdamWOptions(1e-2));
    auto validate = [&](auto& net, auto& module) {
      const at::NoGradGuard no_grad;
      module.eval();
      const at::Tensor loss = loss_with(net, name, 7, 7);
      module.train();
      return loss;
    };
    for (int step = 0; step < kSteps; ++step) {
      model.module()->zero_grad();
      reference->zero_grad();
      const at::Tensor loss = loss_with(model, name, comm->rank(), step);
      EXPECT_TRUE(at::equal(loss, loss_with(reference, name, comm->rank(), step))) << "step " << step;
      loss.backward();
      reference_backward(reference, 2, [&](int rank) { return loss_with(reference, name, rank, step); });
      EXPECT_TRUE(at::equal(validate(model, *model.module()), validate(reference, *reference))) << "step " << step;
      EXPECT_THROW(call(model, wrong), std::exception);
      model.step();
      whole.step();
    }
    expect_same_parameters(model, *reference, "stage " + std::to_string(stage));
  };
  for (const int stage : {0, 1, 2, 3}) on_ranks(2, [&](std::shared_ptr<Communicator> comm) { loop(stage, comm); });
}

// The graph computes in 16 bit, the optimizer in 32.
TEST(ExportedWrappers, MixedPrecisionTrains) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    FsdpOptions options{.auto_wrap = wrap_classes({"Linear"})};
    options.mixed_precision.param_dtype = at::kBFloat16;
    options.mixed_precision.output_dtype = at::kFloat;
    const Model model = load("adapted");
    FullyShardedDataParallel fsdp(model, comm, options);
    const at::Tensor x = at::ones({3, 6});
    const ExportedValue out = fsdp(x);
    EXPECT_EQ(out.tensor().scalar_type(), at::kFloat);
    EXPECT_TRUE(at::allclose(out.tensor(), load("adapted")->forward(x).tensor(), 5e-2, 5e-2));
    out.tensor().sum().backward();
    for (const auto& parameter : fsdp.named_parameters())
      if (parameter.value().requires_grad()) {
        EXPECT_EQ(parameter.value().grad().scalar_type(), at::kFloat);
      }
  });
}

// Exported in 16 bit: the graph computes as in Python, parameters and gradients have 32 bit.
TEST(ExportedWrappers, GraphsOf16BitTrainParametersOf32) {
  const Expected expected("adapted_bf16");
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    FsdpOptions options{.auto_wrap = wrap_classes({"Linear"})};
    options.mixed_precision.param_dtype = at::kBFloat16;
    FullyShardedDataParallel fsdp(load("adapted_bf16", {.parameter_dtype = at::kFloat}), comm, options);
    const ExportedValue out = fsdp(expected.at("input.x").to(at::kFloat));
    expect_close(out.tensor(), expected.at("output.0"), "output");
    loss_of(out).backward();
    for (const NamedShard& shard : fsdp.named_shards()) {
      EXPECT_EQ(shard.tensor.scalar_type(), at::kFloat) << shard.fqn;
      if (shard.held.numel() == 0 || !shard.tensor.requires_grad()) continue;
      const at::Tensor whole = expected.at("grad." + shard.fqn).flatten().to(at::kFloat);
      EXPECT_TRUE(at::allclose(shard.tensor.grad(), whole.narrow(0, shard.held.begin, shard.held.numel()), 2e-2, 1e-3));
    }
  });
}

TEST(ExportedWrappers, SecondOrderThroughInputsGoesThroughEveryWrapper) {
  const Expected expected("energy");
  auto penalty = [&](auto& net) {
    at::Tensor positions = expected.at("input.positions").clone().set_requires_grad(true);
    const at::Tensor energy = call(net, positions).tensor();
    const at::Tensor forces =
        torch::autograd::grad({energy.sum()}, {positions}, {}, std::nullopt, /*create_graph=*/true)[0];
    return energy.mean() + forces.pow(2).mean();
  };
  for (const auto& [world, stage] : {std::pair(2, 3), {3, 3}, {2, 0}, {2, 1}, {3, 2}})
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      const Model reference = load("energy");
      ZeroOptions options{.stage = stage};
      options.fsdp.auto_wrap = wrap_classes({"Linear"});
      auto wrapped = zero(load("energy"), torch::optim::AdamWOptions(1e-2), comm, options);
      torch::optim::AdamW whole(unique_parameters(*reference), 1e-2);
      for (int step = 0; step < kSteps; ++step) {
        wrapped.zero_grad();
        whole.zero_grad();
        penalty(wrapped).backward();
        reference_backward(reference, world, [&](int) { return penalty(reference); });
        wrapped.step();
        whole.step();
      }
      expect_same_parameters(wrapped, *reference, "second order, stage " + std::to_string(stage));
    });
}

#ifdef TESSERA_HAS_ACCELERATOR
// Tensors that the archive has on the CPU, its constants and those that its graph creates, move to the communicator's
// device.
TEST(ExportedWrappers, TrainsOnTheDeviceOfTheCommunicator) {
  const accelerator::Simulation simulation;
  accelerator::on_devices(2, [&](std::shared_ptr<Communicator> comm) {
    const Model reference = load("decoder_meta");
    const auto build = [&] { return load("decoder_meta", {.device = comm->device()}); };
    FullyShardedDataParallel fsdp(deferred(build), comm, {.auto_wrap = wrap_classes({"Block"})});
    torch::optim::AdamW sharded(fsdp.parameters(), 1e-2), whole(unique_parameters(*reference), 1e-2);
    for (int step = 0; step < kSteps; ++step) {
      const NamedInputs inputs = batch("decoder_meta", 0, step);
      NamedInputs moved;
      for (const auto& [name, value] : inputs.inputs()) moved.add(name, value.tensor().to(comm->device()));
      const at::Tensor loss = loss_of(fsdp(moved)), expected = loss_of(reference->forward(inputs));
      EXPECT_EQ(loss.device(), comm->device());
      EXPECT_NEAR(loss.item<float>(), expected.item<float>(), 1e-5) << step;
      step_both(sharded, whole, [&] {
        loss.backward();
        expected.backward();
      });
    }
    if (comm->rank() == 0)
      expect_contains(error_of<std::invalid_argument>([&] {
                        reference->forward(at::zeros({2, 3}, at::TensorOptions(comm->device()).dtype(at::kLong)), 1);
                      }),
                      "expected the model's device, cpu");
  });
  EXPECT_TRUE(accelerator::Simulation::findings().empty()) << accelerator::Simulation::findings()[0];
}
#endif

TEST(ExportedWrappers, CheckpointsAndFullFilesHavePythonsNames) {
  const TemporaryFolder folder;
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    FullyShardedDataParallel fsdp(load("decoder_meta"), comm, {.auto_wrap = wrap_classes({"Block"})});
    torch::optim::AdamW optimizer(fsdp.parameters(), 1e-2);
    auto step = [&](auto& net, auto& own, int number) {
      own.zero_grad();
      const at::Tensor loss = loss_with(net, "decoder_meta", comm->rank(), number);
      loss.backward();
      own.step();
      return loss.template item<float>();
    };
    step(fsdp, optimizer, 0);
    save_checkpoint(folder / "checkpoint", fsdp, optimizer);
    save_full(folder / "model.safetensors", fsdp);
    const float expected = step(fsdp, optimizer, 1);
    FullyShardedDataParallel again(load("decoder_meta"), comm, {.auto_wrap = wrap_classes({"Block"})});
    torch::optim::AdamW other(again.parameters(), 1e-2);
    load_checkpoint(folder / "checkpoint", again, other);
    EXPECT_EQ(step(again, other, 1), expected);
  });
  // A saved model is loaded like any weights.
  const Model trained = load_exported(data_file("decoder_meta.pt2"), {.weights = folder / "model.safetensors"});
  EXPECT_FALSE(
      at::equal(trained->named_parameters()["embed.weight"], load("decoder_meta")->named_parameters()["embed.weight"]));
}

}  // namespace
}  // namespace tessera::exported_test
