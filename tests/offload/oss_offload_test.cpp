// OSS with its step in host memory: bit-equal to the step on the device.
#include "optim/host/host_step.h"
#include "tests/support/random_net.h"
#include "tests/support/reference.h"

namespace tessera::oss_offload_test {
using namespace internal;
namespace {

using namespace testing_support;

at::Tensor input(int seed) {
  return seeded(1000 + seed, [] { return torch::randn({4, kWidth}); });
}

template <class Optimizer, class Options>
std::vector<at::Tensor> train(std::shared_ptr<Communicator> comm, Options options, OssOptions oss, bool with_sdp) {
  auto model = seeded(7, [] { return RandomNet(23); });
  OSS<Optimizer> optimizer(unique_parameters(*model), options, comm, oss);
  std::optional<ShardedDataParallel<RandomNet>> sdp;
  std::optional<DistributedDataParallel<RandomNet>> ddp;
  if (with_sdp)
    sdp.emplace(model, optimizer, comm);
  else
    ddp.emplace(model, comm, DdpOptions{.find_unused_parameters = true});
  for (int step = 0; step < 6; ++step) {
    with_sdp ? sdp->zero_grad() : ddp->zero_grad();
    const at::Tensor x = input(10 * step + comm->rank());
    torch::mse_loss(with_sdp ? (*sdp)(x) : (*ddp)(x), input(step)).backward();
    optimizer.clip_grad_norm_(0.5);
    optimizer.step();
    if (step == 2) {  // a write to the parameters; the copies must follow
      torch::NoGradGuard no_grad;
      for (auto& parameter : unique_parameters(*model)) parameter.mul_(0.99);
    }
    if (step == 4)  // a write that bypasses the version, like libtorch's SGD
      for (auto& parameter : unique_parameters(*model)) parameter.data().mul_(0.99);
    if (step == 3) {  // states are saved and loaded under the parameters' own names
      optimizer.consolidate_state_dict(-1);
      const OptimizerStateDict dict = optimizer.state_dict();
      optimizer.load_state_dict(dict);
    }
  }
  for (const auto& parameter : unique_parameters(*model)) {
    if (!oss.offload.grads || !optimizer.owns(parameter)) continue;
    expect_contains(error_of<std::logic_error>([&] { parameter.grad().sum(); }),
                    "was dropped when a step had taken it");
  }
  return unique_parameters(*model);
}

TEST(OssOffload, IsTheStepOnTheDeviceBitForBit) {
  for (const int world : fewer_on_devices<std::vector<int>>({1, 2, 3}, {3})) {
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      for (const bool with_sdp : {false, true}) {
        auto compare = [&](const auto& expected, const auto& own, const char* what) {
          for (size_t i = 0; i < expected.size(); ++i)
            EXPECT_TRUE(same_values(expected[i], own[i])) << what << " " << i << " of " << world;
        };
        const OssOptions offloaded{.offload = {.params = true, .grads = true}}, by_grads{.offload = {.grads = true}};
        const auto adam = torch::optim::AdamOptions(1e-2);
        compare(train<torch::optim::Adam>(comm, adam, {}, with_sdp),
                train<torch::optim::Adam>(comm, adam, by_grads, with_sdp), "torch's Adam");
        if (comm->device().is_cpu())  // only there may it step without offload
          compare(train<HostAdam>(comm, adam, {}, with_sdp), train<HostAdam>(comm, adam, offloaded, with_sdp),
                  "HostAdam");
        const auto sgd = torch::optim::SGDOptions(1e-2).momentum(0.9);
        compare(train<torch::optim::SGD>(comm, sgd, {}, with_sdp),
                train<torch::optim::SGD>(comm, sgd, {.offload = {.params = true}}, with_sdp), "SGD");
      }
    });
  }
}

// The zeros that take a dropped gradient's place must not be inference tensors, to which no backward could add.
TEST(OssOffload, GradientsAreZeroedUnderInferenceMode) {
  for (const int world : {1, 2})
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      const auto trained = [&](bool with_sdp, bool infers, const OssOptions& options) {
        auto model = seeded(7, [] { return torch::nn::Linear(kWidth, kWidth); });
        OSS<torch::optim::SGD> optimizer(model->parameters(), torch::optim::SGDOptions(1e-2).momentum(0.9), comm,
                                         options);
        std::optional<ShardedDataParallel<torch::nn::Linear>> sdp;
        std::optional<DistributedDataParallel<torch::nn::Linear>> ddp;
        with_sdp ? static_cast<void>(sdp.emplace(model, optimizer, comm)) : static_cast<void>(ddp.emplace(model, comm));
        for (int step = 0; step < 6; ++step) {
          {
            const c10::InferenceMode mode(infers);
            if (step % 3 == 0) optimizer.zero_grad(/*set_to_none=*/false);
            if (step % 3 == 1) model->zero_grad(/*set_to_none=*/false);
            if (step % 3 == 2) with_sdp ? sdp->zero_grad(false) : ddp->zero_grad(false);
          }
          const at::Tensor x = input(10 * step + comm->rank());
          (with_sdp ? (*sdp)(x) : (*ddp)(x)).square().mean().backward();
          optimizer.clip_grad_norm_(0.5);
          optimizer.step();
        }
        return model->weight.detach().clone();
      };
      for (const bool with_sdp : {false, true}) {
        const at::Tensor expected = trained(with_sdp, /*infers=*/false, {});
        for (const bool infers : {false, true})
          for (const bool drops : {false, true})
            EXPECT_TRUE(same_values(trained(with_sdp, infers, {.offload = {.params = true, .grads = drops}}), expected))
                << world << with_sdp << infers << drops;
      }
    });
}

// Memory and operators see different values: at 1 rank the step writes to memory, at more the publication does.
TEST(OssOffload, ParametersWithANegativeBitAreSteppedByTheirValues) {
  for (const int world : {1, 2})
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      const auto stepped = [&](bool is_negative, const OssOptions& options) {
        const at::Tensor values = torch::full({3}, 2.0);
        const at::Tensor weight = (is_negative ? at::_neg_view(values.neg()) : values).requires_grad_();
        EXPECT_EQ(weight.is_neg(), is_negative);
        OSS<torch::optim::SGD> optimizer(std::vector<at::Tensor>{weight}, torch::optim::SGDOptions(0.25), comm,
                                         options);
        for (int step = 0; step < 3; ++step) {
          optimizer.zero_grad();
          weight.square().sum().backward();
          optimizer.step();
        }
        return weight.detach().clone();
      };
      for (const bool is_offloaded : {false, true}) {
        const OssOptions options{.offload = {.params = is_offloaded}};
        EXPECT_TRUE(torch::equal(stepped(true, options), stepped(false, options))) << world << is_offloaded;
        EXPECT_TRUE(stepped(true, options).eq(0.25).all().item<bool>());
      }
    });
}

TEST(OssOffload, HostMemoryIsThatOfWhatARankOwns) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    torch::nn::Sequential model;
    for (int i = 0; i < 4; ++i) model->push_back(torch::nn::Linear(torch::nn::LinearOptions(64, 64).bias(false)));
    on_rank_device(model);
    OSS<HostAdamW> optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2), comm,
                             {.offload = {.grads = true}});  // params must be set as well
    ShardedDataParallel sdp(model, optimizer, comm);
    EXPECT_EQ(sdp.memory().host_bytes, 0);
    sdp(on_rank_device(torch::ones({2, 64}))).sum().backward();
    optimizer.step();
    EXPECT_EQ(sdp.memory().host_bytes, 2 * 64 * 64 * 4);
    EXPECT_EQ(sdp.memory().pinned_bytes, 2 * 64 * 64 * 4);
  });
}

template <class Optimizer>
void expect_no_step_beyond_the_limit() {
  run_ranks(1, [](std::shared_ptr<Communicator> comm) {
    std::vector<at::Tensor> parameters;
    for (const int64_t numel : {4, 4, 4, 100}) parameters.push_back(torch::ones({numel}).requires_grad_());
    // The last gradient does not fit beside another one.
    OSS<Optimizer> optimizer(parameters, torch::optim::AdamWOptions(1e-2), comm,
                             {.offload = {.params = true, .pin_memory = false, .host_limit_bytes = (112 + 100) * 4}});
    for (const at::Tensor& parameter : parameters) parameter.mutable_grad() = torch::ones_like(parameter);
    expect_contains(error_of<std::runtime_error>([&] { optimizer.step(); }), "a gradient of shape [100]");
    for (const at::Tensor& parameter : parameters) EXPECT_TRUE(torch::equal(parameter, torch::ones_like(parameter)));
    for (size_t i = 0; i < 3; ++i) parameters[i].mutable_grad().reset();
    optimizer.step();
    EXPECT_LT(parameters[3].max().item<float>(), 1);
  });
}

TEST(OssOffload, AStepBeyondTheLimitChangesNoParameter) {
  expect_no_step_beyond_the_limit<AdamW>();
  expect_no_step_beyond_the_limit<HostAdamW>();  // steps one parameter at a time
}

TEST(OssOffload, AnAddedGroupBeyondTheLimitLosesNoCopy) {
  const at::Tensor small = torch::ones({4}).requires_grad_(), large = torch::ones({100}).requires_grad_();
  HostStep step(
      [](HostStep::Groups groups) {
        return std::make_unique<torch::optim::SGD>(std::move(groups), torch::optim::SGDOptions(0.25));
      },
      {.memory = {.limit_bytes = 64}});
  torch::optim::SGD sgd(std::vector<at::Tensor>{small}, torch::optim::SGDOptions(0.25));
  small.mutable_grad() = torch::ones({4});
  step.step(sgd);
  sgd.add_param_group(torch::optim::OptimizerParamGroup(std::vector<at::Tensor>{large}));
  expect_contains(error_of<std::runtime_error>([&] { step.step(sgd); }), "a copy of a parameter of shape [100]");
  sgd.param_groups().pop_back();
  step.step(sgd);
  EXPECT_TRUE(torch::equal(small, torch::full({4}, 0.5)));
}

TEST(OssOffload, MistakesAreNamed) {
  run_ranks(1, [](std::shared_ptr<Communicator> comm) {
    torch::nn::Linear linear(2, 2);
    auto make = [&](OffloadOptions offload) {
      return OSS<torch::optim::Adam>(linear->parameters(), torch::optim::AdamOptions(1e-2), comm, {.offload = offload});
    };
    linear(torch::ones({1, 2})).sum().backward();
    auto tight = make({.params = true, .host_limit_bytes = 20});  // the weight takes 16, the bias 8
    const at::Tensor before = linear->weight.detach().clone();
    expect_contains(error_of<std::runtime_error>([&] { tight.step(); }), "a copy of a parameter of shape [2]");
    EXPECT_TRUE(torch::equal(linear->weight, before));
    auto pageable = make({.params = true, .pin_memory = false});
    pageable.step();
    EXPECT_EQ(pageable.pinned_bytes(), 0);
    EXPECT_EQ(pageable.host_bytes(), 24);
    expect_contains(
        error_of<std::invalid_argument>([&] { make({.params = true, .directory = "a/folder"}); }),
        "OssOptions::offload.directory is 'a/folder' or disk_units is set, but only FullyShardedDataParallel");
    expect_contains(
        error_of<std::invalid_argument>([&] { make({.params = true, .disk_units = [](auto&) { return true; }}); }),
        "disk_units is set");
    expect_contains(error_of<std::invalid_argument>([&] { make({.params = true, .host_limit_bytes = -1}); }),
                    "host_limit_bytes is -1, expected 0 or more");
    expect_contains(error_of<std::invalid_argument>([&] { make({.params = true, .device_fraction = 0.5}); }),
                    "OssOptions::offload.device_fraction is 0.5");
  });
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    const auto linear = on_rank_device(torch::nn::Linear(2, 2));
    const OssOptions others{.offload = {.params = true, .grads = comm->rank() == 1}};
    expect_contains(error_of<std::invalid_argument>([&] {
                      OSS<torch::optim::Adam> optimizer(linear->parameters(), torch::optim::AdamOptions(1e-2), comm,
                                                        others);
                    }),
                    "offload.grads=");
  });
}

}  // namespace
}  // namespace tessera::oss_offload_test
