// The optimizer's step unit by unit in backward: the same bits as after it.
#include <condition_variable>

#include "tests/support/random_net.h"
#include "tests/support/reference.h"

namespace tessera::step_in_backward_test {
namespace {

using namespace testing_support;

at::Tensor batch(int seed) {
  return seeded(1000 + seed, [] { return torch::randn({4, kWidth}); });
}

struct Setting {
  std::optional<double> max_norm;
  bool accumulate = false;
  CpuOffload offload;
};

torch::OrderedDict<std::string, at::Tensor> train(std::shared_ptr<Communicator> comm, int tree, bool in_backward,
                                                  const Setting& setting) {
  auto model = seeded(7, [&] { return RandomNet(tree); });
  FullyShardedDataParallel fsdp(model, comm, {.auto_wrap = wrap_by_size(40), .offload = setting.offload});
  HostAdamW optimizer(fsdp.parameters(), torch::optim::AdamWOptions(1e-2));
  std::optional<StepInBackward> step;
  if (in_backward) step.emplace(fsdp, optimizer, StepInBackwardOptions{.max_norm = setting.max_norm});
  for (int i = 0; i < 6; ++i) {
    optimizer.zero_grad();
    auto backward = [&](int part) {
      at::Tensor loss = torch::mse_loss(fsdp(batch(100 * i + 10 * part + comm->rank())), batch(7 * i + part));
      if (loss.requires_grad()) loss.backward();
    };
    if (setting.accumulate) {
      auto guard = fsdp.no_sync();
      backward(1);
    }
    backward(0);
    if (in_backward) {
      const auto norm = step->finish();
      EXPECT_EQ(norm.has_value(), setting.max_norm.has_value());
    } else {
      if (setting.max_norm) fsdp.clip_grad_norm_(*setting.max_norm);
      optimizer.step();
    }
  }
  return fsdp.full_state_dict();
}

TEST(StepInBackward, IsTheStepAfterBackwardBitForBit) {
  for (const int world : {1, 2, 3}) {
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      for (int kind = 0; kind < 6; ++kind) {
        const Setting setting{kind % 3 == 1 ? std::optional(0.1) : std::nullopt, kind % 3 == 2,
                              kind % 2 == 0 ? CpuOffload{.params = true, .grads = true} : CpuOffload{}};
        const auto expected = train(comm, 500 + kind, false, setting), own = train(comm, 500 + kind, true, setting);
        for (const auto& entry : expected)
          EXPECT_TRUE(torch::equal(entry.value(), own[entry.key()])) << kind << " " << entry.key();
      }
    });
  }
}

// An optimizer that tells when it steps, and can hold backward up until it has.
struct Observed : PartialStep {
  explicit Observed(PartialStep& inner) : optimizer(inner) {}
  void step_parameters(const std::vector<at::Tensor>& parameters) override {
    optimizer.step_parameters(parameters);
    std::lock_guard lock(mutex);
    ++steps;
    changed.notify_all();
  }
  bool wait_for_a_step() {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, std::chrono::seconds(60), [&] { return steps > 0; });
  }
  PartialStep& optimizer;
  std::mutex mutex;
  std::condition_variable changed;
  int steps = 0;
};

struct CallInBackward : torch::autograd::Function<CallInBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, int64_t call) {
    context->saved_data["call"] = call;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    (*reinterpret_cast<std::function<void()>*>(context->saved_data["call"].toInt()))();
    return {gradients[0], at::Tensor()};
  }
};

// Backward of the first layers waits for a step of the last: there would be none if steps waited for backward.
TEST(StepInBackward, StepsWhileBackwardGoesOn) {
  run_ranks(1, [](std::shared_ptr<Communicator> comm) {
    torch::nn::Sequential model;
    for (int i = 0; i < 8; ++i) model->push_back(torch::nn::Linear(8, 8));
    FullyShardedDataParallel fsdp(
        model, comm, {.auto_wrap = wrap_modules<torch::nn::LinearImpl>(), .offload = {.params = true, .grads = true}});
    HostAdam optimizer(fsdp.parameters(), torch::optim::AdamOptions(1e-2));
    Observed observed(optimizer);
    StepInBackward step(fsdp, observed);
    std::function<void()> wait = [&] { EXPECT_TRUE(observed.wait_for_a_step()); };
    at::Tensor x = torch::ones({2, 8});
    for (int i = 0; i < 8; ++i) {
      x = model[i]->as<torch::nn::Linear>()->forward(x);
      if (i == 0) x = CallInBackward::apply(x, reinterpret_cast<int64_t>(&wait));
    }
    x.sum().backward();
    step.finish();
    EXPECT_EQ(observed.steps, 8);
  });
}

TEST(StepInBackward, MistakesAreNamed) {
  run_ranks(1, [](std::shared_ptr<Communicator> comm) {
    torch::nn::Linear shared(8, 8);
    FullyShardedDataParallel fsdp(shared, comm);
    HostAdam optimizer(fsdp.parameters(), torch::optim::AdamOptions(1e-2));
    auto twice = [&] {
      at::Tensor x = torch::ones({2, 8}).set_requires_grad(true);
      x = checkpointed(shared, checkpointed(shared, x));  // whose gradients come in two parts
      x.sum().backward();
    };
    {
      StepInBackward step(fsdp, optimizer);
      expect_contains(error_of<std::logic_error>([&] { StepInBackward second(fsdp, optimizer); }), "already");
      expect_contains(error_of<std::logic_error>(twice), "several parts");
      step.finish();
    }
    fsdp.zero_grad();
    twice();  // as ever, without it
    FullyShardedDataParallel checked(torch::nn::Linear(2, 2), comm, {.check_finite = true});
    expect_contains(error_of<std::invalid_argument>([&] { StepInBackward step(checked, optimizer); }), "check_finite");
  });
}

struct Failing : PartialStep {
  void step_parameters(const std::vector<at::Tensor>&) override { throw std::runtime_error("no step today"); }
};

TEST(StepInBackward, AFailedStepReachesFinish) {
  run_ranks(1, [](std::shared_ptr<Communicator> comm) {
    FullyShardedDataParallel fsdp(torch::nn::Linear(8, 8), comm, {.offload = {.params = true, .grads = true}});
    Failing optimizer;
    StepInBackward step(fsdp, optimizer);
    fsdp(torch::ones({2, 8})).sum().backward();
    EXPECT_EQ(error_of<std::runtime_error>([&] { step.finish(); }), "no step today");
    step.finish();
  });
}

}  // namespace
}  // namespace tessera::step_in_backward_test
