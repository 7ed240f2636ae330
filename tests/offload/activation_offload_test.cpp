// Inputs of checkpointed blocks in host memory: equal gradients, and freed device memory.
#include "tests/support/reference.h"

namespace tessera::activation_offload_test {
using namespace internal;
namespace {

using namespace testing_support;

torch::nn::ModuleList blocks(int count) {
  return seeded(3, [&] {
    torch::nn::ModuleList list;
    for (int i = 0; i < count; ++i) list->push_back(torch::nn::Linear(16, 16));
    return list;
  });
}

at::Tensor run(const torch::nn::ModuleList& list, at::Tensor x) {
  for (const auto& block : *list)
    x = checkpointed([block](const at::Tensor& in) { return torch::tanh(block->as<torch::nn::Linear>()->forward(in)); },
                     x);
  return x.t().contiguous().t().sum();
}

TEST(ActivationOffload, GivesTheSameGradients) {
  auto plain = blocks(6), own = blocks(6);
  ActivationOffload activations(at::kCPU, {.min_bytes = 0});
  const at::Tensor x = torch::randn({32, 16});
  for (int step = 0; step < 3; ++step) {
    at::Tensor expected = run(plain, x), loss;
    {
      ActivationOffload::Scope scope(activations);
      loss = run(own, x);
    }
    EXPECT_EQ(activations.host_bytes(), 6 * 32 * 16 * 4);
    expected.backward();
    loss.backward();
    EXPECT_TRUE(torch::equal(expected, loss));
    loss.reset();
    EXPECT_EQ(activations.host_bytes(), 0);
    for (int i = 0; i < 6; ++i)
      EXPECT_TRUE(torch::equal(plain[i]->parameters()[0].grad(), own[i]->parameters()[0].grad())) << i;
  }
  EXPECT_EQ(activations.traffic().to_host_bytes, 3 * 6 * 32 * 16 * 4);
  EXPECT_GT(activations.traffic().to_device_bytes, 3 * 3 * 32 * 16 * 4);
}

// After forward, at most the inputs of the last blocks are still on the device.
TEST(ActivationOffload, DeviceMemoryIsLetGoInForward) {
  auto list = blocks(8);
  ActivationOffload activations(at::kCPU, {.min_bytes = 0});
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> seen;
  at::Tensor x = torch::randn({32, 16}).set_requires_grad(true) * 1.0;
  {
    ActivationOffload::Scope scope(activations);
    for (const auto& block : *list) {
      seen.emplace_back(x.storage().getWeakStorageImpl());
      x = checkpointed([block](const at::Tensor& in) { return block->as<torch::nn::Linear>()->forward(in); }, x);
    }
  }
  int alive = 0;
  for (const auto& storage : seen) alive += storage.use_count() > 0 ? 1 : 0;
  EXPECT_LE(alive, 3);
  x.sum().backward();
}

TEST(ActivationOffload, KeepsStridesSmallTensorsAndRetainedGraphs) {
  torch::nn::Linear block(16, 16);
  ActivationOffload activations(at::kCPU, {.min_bytes = 1000});
  at::Tensor wide = torch::randn({16, 32}).set_requires_grad(true),
             narrow = torch::randn({1, 16}).set_requires_grad(true);
  auto loss_of = [&](const at::Tensor& a, const at::Tensor& b) {
    return checkpointed([&](const at::Tensor& one, const at::Tensor& two) { return block(one) * block(two); }, a, b)
        .sum();
  };
  at::Tensor loss, expected = loss_of((wide * 2).t(), narrow * 2);
  {
    ActivationOffload::Scope scope(activations);
    loss = loss_of((wide * 2).t(), narrow * 2);
  }
  EXPECT_EQ(activations.host_bytes(), 32 * 16 * 4);  // the wide one
  const auto want = torch::autograd::grad({expected}, {wide, narrow}, {}, true);
  for (int again = 0; again < 2; ++again) {
    wide.mutable_grad().reset();
    narrow.mutable_grad().reset();
    loss.backward({}, /*retain_graph=*/true);
    EXPECT_TRUE(torch::equal(want[0], wide.grad()));
    EXPECT_TRUE(torch::equal(want[1], narrow.grad()));
  }
}

// Like autograd for tensors that it saves; the error names the input.
TEST(ActivationOffload, AnInputThatIsChangedLaterIsNamedInBackward) {
  ActivationOffload activations(at::kCPU, {.min_bytes = 0});
  for (const bool is_offloaded : {false, true})
    for (const int changed : {0, 1, 2}) {  // 0: requires a gradient, 1: requires none, 2: a leaf
      SCOPED_TRACE(std::to_string(changed) + (is_offloaded ? " offloaded" : ""));
      at::Tensor leaf = torch::ones({4}).requires_grad_();
      std::vector<at::Tensor> inputs{torch::ones({4}).requires_grad_() * 2, torch::full({4}, 3.0f), leaf};
      std::optional<ActivationOffload::Scope> use;
      if (is_offloaded) use.emplace(activations);
      at::Tensor loss = checkpointed([](std::vector<at::Tensor> in) { return in[0] * in[1] * in[2]; }, inputs).sum();
      use.reset();
      {
        at::NoGradGuard no_grad;
        inputs[changed].add_(1);
      }
      expect_contains(error_of<std::invalid_argument>([&] { loss.backward(); }),
                      "tensor " + std::to_string(changed) +
                          " of a checkpointed function's inputs, which backward needs, has been modified by an inplace "
                          "operation: it is at version 1; expected version 0 instead");
    }
}

// Tensors made under InferenceMode have no versions, but are valid inputs.
// The memory of a conjugated tensor has other values than the tensor.
TEST(ActivationOffload, KeepsLazyValues) {
  ActivationOffload activations(at::kCPU, {.min_bytes = 1});
  const at::Tensor z = torch::tensor({1.0F, 2.0F, 3.0F, 4.0F}).view({2, 2});
  const at::Tensor complex = torch::view_as_complex(z).conj();
  ASSERT_TRUE(complex.is_conj());
  for (const at::Tensor& tensor : {complex, complex.expand({3, 2}), torch::imag(complex)}) {
    const auto fetch = activations.keep(tensor);
    ASSERT_TRUE(fetch);
    for (int i = 0; i < 5; ++i) (void)activations.keep(z);  // frees the device's copy
    EXPECT_TRUE(torch::equal(fetch(), tensor));
  }
}

// Such as a mask in host memory, an input of a block on a GPU.
TEST(ActivationOffload, LeavesTensorsOfOtherMemory) {
  ActivationOffload activations(at::kCPU, {.min_bytes = 1});
  EXPECT_FALSE(activations.keep(torch::ones({4}, at::kMeta)));
  EXPECT_TRUE(activations.keep(torch::ones({4}, at::kCPU)));
}

TEST(ActivationOffload, KeepsTensorsWithoutVersions) {
  ActivationOffload activations(at::kCPU, {.min_bytes = 0});
  at::Tensor fixed, weight = torch::ones({4}).requires_grad_();
  {
    c10::InferenceMode inference;
    fixed = torch::full({4}, 3.0f);
  }
  ActivationOffload::Scope scope(activations);
  checkpointed([&](const at::Tensor& a, const at::Tensor& b) { return (a.clone() * b).sum(); }, fixed, weight)
      .backward();
  EXPECT_TRUE(torch::equal(weight.grad(), torch::full({4}, 3.0f)));
}

TEST(ActivationOffload, UnderFsdpAndWithALimit) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    auto plain = blocks(4), own = blocks(4);
    FullyShardedDataParallel expected(plain, comm, {.auto_wrap = wrap_modules<torch::nn::LinearImpl>()});
    FullyShardedDataParallel fsdp(
        own, comm, {.auto_wrap = wrap_modules<torch::nn::LinearImpl>(), .offload = {.params = true, .grads = true}});
    ActivationOffload activations(comm->device(), {.min_bytes = 0});
    const at::Tensor x = seeded(comm->rank(), [] { return torch::randn({4, 16}); });
    run(plain, x).backward();
    {
      ActivationOffload::Scope scope(activations);
      run(own, x).backward();
    }
    for (size_t i = 0; i < fsdp.parameters().size(); ++i)
      EXPECT_TRUE(same_values(fsdp.parameters()[i].grad(), expected.parameters()[i].grad().cpu())) << i;
    ActivationOffload tight(comm->device(), {.host_limit_bytes = 300, .min_bytes = 0});
    ActivationOffload::Scope scope(tight);
    expect_contains(error_of<std::runtime_error>([&] { run(own, x); }), "an activation of shape [4, 16]");
  });
}

// FSDP reshards the memory of a parameter's view, so a copy in flight must not read it.
TEST(ActivationOffload, LeavesViewsOfShardedParameters) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    auto list = blocks(2);
    on_rank_device(list);
    FullyShardedDataParallel fsdp(list, comm, {.auto_wrap = wrap_modules<torch::nn::LinearImpl>()});
    ActivationOffload activations(comm->device(), {.min_bytes = 0});
    at::Tensor loss;
    {
      ActivationOffload::Scope scope(activations);
      const at::Tensor x = on_rank_device(torch::ones({4, 16}));
      loss = checkpointed([](const at::Tensor& h, const at::Tensor& w) { return h.matmul(w); }, x * 1,
                          list[0]->as<torch::nn::Linear>()->weight.t())
                 .sum();
    }
    EXPECT_EQ(activations.host_bytes(), 4 * 16 * 4);  // of x alone
    loss.backward();
  });
}

}  // namespace
}  // namespace tessera::activation_offload_test
