#include "tests/support/reference.h"

// A program's own type, and its visitor.
namespace program {

struct Heads {
  at::Tensor chosen;
  std::optional<at::Tensor> hidden;
};
template <class Visit>
void tessera_visit_tensors(Heads& heads, Visit&& visit) {
  visit(heads.chosen, heads.hidden);
}

}  // namespace program

namespace tessera::ddp_test {
using namespace internal;
namespace {

using namespace testing_support;

at::Tensor mlp_input(int seed) {
  return seeded(500 + seed, [] { return torch::randn({3, 6}); });
}

torch::nn::Sequential make_mlp() {
  return seeded(1, [] {
    return torch::nn::Sequential(torch::nn::Linear(6, 9), torch::nn::Tanh(), torch::nn::Linear(9, 9), torch::nn::Tanh(),
                                 torch::nn::Linear(9, 2));
  });
}

// Compares the gradients of three steps with the reference's, to `tolerance` (0: bit for bit).
void expect_gradients(int world, DdpOptions options, double tolerance) {
  on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
    auto reference = make_mlp();
    DistributedDataParallel ddp(make_mlp(), comm, options);
    for (int step = 0; step < 3; ++step) {
      ddp.zero_grad();
      reference->zero_grad();
      call(ddp, mlp_input(10 * step + comm->rank())).square().mean().backward();
      reference_backward(reference, world,
                         [&](int part) { return reference->forward(mlp_input(10 * step + part)).square().mean(); });
      const auto expected = reference->parameters();
      const auto got = ddp.parameters();
      for (size_t i = 0; i < got.size(); ++i) {
        if (tolerance == 0) {
          EXPECT_TRUE(same_values(got[i].grad(), expected[i].grad())) << "parameter " << i << " step " << step;
        } else {
          EXPECT_TRUE(torch::allclose(got[i].grad(), expected[i].grad(), tolerance, tolerance)) << "parameter " << i;
        }
      }
    }
  });
}

TEST(Ddp, GradientsAreAveragesInRankOrderWithAnyOptions) {
  for (int world : {1, 2, 3, 5}) {
    expect_gradients(world, {}, 0);
    expect_gradients(world, {.bucket_bytes = 105, .first_bucket_bytes = 10}, 0);
    expect_gradients(world, {.find_unused_parameters = true}, 0);
    expect_gradients(world, {.gradient_as_bucket_view = false}, 0);
    expect_gradients(world, {.bucket_bytes = 105, .static_graph = true}, 0);
    expect_gradients(world, {.backend_all_reduce = true}, 1e-5);
    expect_gradients(world, {.compression = GradientCompression::kBf16}, 1e-2);
    expect_gradients(world, {.bucket_bytes = 105, .compression = GradientCompression::kFp16}, 2e-3);
  }
}

// A large gradient is copied only if another tensor shares it.
TEST(Ddp, ReducesALargeGradientWhereAutogradLeftIt) {
  for (bool keeps : {false, true}) {
    on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      const auto linear = [] { return torch::nn::Linear(1024, 1024); };
      auto reference = seeded(2, linear), model = seeded(2, linear);
      DistributedDataParallel ddp(model, comm);
      const bool adopts = !keeps && comm->device().is_cpu();
      at::Tensor kept, own;
      const void* memory = nullptr;
      model->weight.register_hook([&](const at::Tensor& gradient) {
        at::Tensor returned = gradient.clone();
        memory = returned.const_data_ptr();
        own = gradient.clone();
        if (keeps) kept = returned;
        return returned;
      });
      const auto input = [](int seed) { return seeded(seed, [] { return torch::randn({2, 1024}); }); };
      for (int step = 0; step < 3; ++step) {
        const at::Tensor before = model->weight.grad();  // a handle, whose values stay
        const at::Tensor values = before.defined() ? before.clone() : at::Tensor();
        ddp.zero_grad();
        call(ddp, input(10 * step + comm->rank())).square().mean().backward();
        reference->zero_grad();
        reference_backward(reference, 2,
                           [&](int part) { return reference->forward(input(10 * step + part)).square().mean(); });
        EXPECT_TRUE(same_values(model->weight.grad(), reference->weight.grad()));
        EXPECT_TRUE(same_values(model->bias.grad(), reference->bias.grad()));
        EXPECT_EQ(model->weight.grad().const_data_ptr() == memory, adopts);
        if (keeps) {
          EXPECT_TRUE(same_values(kept, own));
        }
        if (adopts) {
          EXPECT_EQ(model->weight.grad().storage().use_count(), 1);  // the wrapper does not keep it
        }
        if (before.defined()) {
          EXPECT_TRUE(same_values(before, values));
        }
      }
      // Backward adds to an existing gradient.
      const at::Tensor first = model->weight.grad();
      call(ddp, input(20 + comm->rank())).square().mean().backward();
      EXPECT_TRUE(first.is_same(model->weight.grad()));
      EXPECT_TRUE(same_values(first, reference->weight.grad() * 2));
    });
  }
}

// Also with one rank, where DDP leaves gradients to autograd until a divisor is set.
TEST(Ddp, ADivisorCountsForEarlierMicroBatchesAndForNoAverage) {
  for (int world : {1, 2}) {
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      auto reference = make_mlp();
      DistributedDataParallel ddp(make_mlp(), comm);
      auto backward = [&](int step) {
        call(ddp, mlp_input(10 * step + comm->rank())).square().mean().backward();
        reference_backward(reference, world,
                           [&](int part) { return reference->forward(mlp_input(10 * step + part)).square().mean(); });
      };
      {
        const ScopeExit scope = ddp.no_sync();
        backward(0);
      }
      ddp.set_gradient_divide_factor(6);
      backward(1);
      const auto expected = reference->parameters(), got = ddp.parameters();
      for (size_t i = 0; i < got.size(); ++i)
        EXPECT_TRUE(torch::allclose(got[i].grad(), expected[i].grad() * world / 6)) << world << " parameter " << i;
      {
        const ScopeExit scope = ddp.no_sync();
        backward(2);
      }
      backward(3);
      for (size_t i = 0; i < got.size(); ++i)
        EXPECT_TRUE(torch::allclose(got[i].grad(), expected[i].grad() * world / 6)) << world << " parameter " << i;
    });
  }
}

TEST(Ddp, CompressionHalvesTheBytes) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    int64_t bytes[2];
    for (bool compressed : {false, true}) {
      const auto linear = on_rank_device(torch::nn::Linear(200, 200));
      DistributedDataParallel ddp(
          linear, comm, {.compression = compressed ? GradientCompression::kFp16 : GradientCompression::kNone});
      for (int step = 0; step < 3; ++step) {
        const int64_t before = comm->traffic().sent_bytes;
        ddp(on_rank_device(torch::ones({2, 200}))).sum().backward();
        bytes[compressed] = comm->traffic().sent_bytes - before;
      }
    }
    // The rest is padding, and the flags of used parameters.
    EXPECT_GE(bytes[0], 200 * 201 * 4);
    EXPECT_LT(bytes[0], 200 * 201 * 4 + 128);
    EXPECT_GE(bytes[1], 200 * 201 * 2);
    EXPECT_LT(bytes[1], 200 * 201 * 2 + 128);
  });
}

struct TwoHeadsImpl : torch::nn::Module {
  TwoHeadsImpl() {
    trunk = register_module("trunk", torch::nn::Linear(6, 4));
    left = register_module("left", torch::nn::Linear(4, 2));
    right = register_module("right", torch::nn::Linear(4, 2));
    norm = register_module("norm", torch::nn::BatchNorm1d(4));
  }
  std::tuple<at::Tensor, std::vector<at::Tensor>> forward(const at::Tensor& x, bool use_left) {
    const auto h = norm(trunk(x));
    return {use_left ? left(h) : right(h), {h}};
  }
  torch::nn::Linear trunk = nullptr, left = nullptr, right = nullptr;
  torch::nn::BatchNorm1d norm = nullptr;
};
TORCH_MODULE(TwoHeads);

TEST(Ddp, UnusedParametersCountAsZeroWhereOthersUsedThemAndBuffersFollowRankZero) {
  on_ranks(3, [](std::shared_ptr<Communicator> comm) {
    auto model = seeded(2, [] { return TwoHeads(); });
    DistributedDataParallel ddp(model, comm, {.find_unused_parameters = true});
    const auto [y, hidden] = ddp(mlp_input(comm->rank()), comm->rank() == 0);
    y.sum().backward();
    EXPECT_TRUE(model->left->bias.grad().defined());
    EXPECT_TRUE(torch::allclose(model->left->bias.grad().cpu(), torch::full({2}, 1.0f)));
    EXPECT_TRUE(torch::allclose(model->right->bias.grad().cpu(), torch::full({2}, 2.0f)));
    at::NoGradGuard no_grad;
    model->eval();
    ddp(mlp_input(7), true);  // the ranks' own statistics give way to rank 0's
    const auto means = model->norm->running_mean.clone();
    auto all = torch::empty({3 * 4}, comm->device());
    comm->all_gather(all, means.contiguous()).wait();
    EXPECT_TRUE(torch::equal(all.narrow(0, 0, 4), all.narrow(0, 4, 4)));
    EXPECT_TRUE(torch::equal(all.narrow(0, 0, 4), all.narrow(0, 8, 4)));
  });
}

TEST(Ddp, AnUnusedParameterIsAnErrorWithoutTheOption) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    DistributedDataParallel ddp(on_rank_device(TwoHeads()), comm);
    std::get<0>(ddp(mlp_input(1), true)).sum().backward();
    EXPECT_ANY_THROW(ddp(mlp_input(1), true));
  });
}

struct Opaque {
  at::Tensor hidden_somewhere;
};
struct OpaqueNetImpl : torch::nn::Module {
  OpaqueNetImpl() { linear = register_module("linear", torch::nn::Linear(6, 2)); }
  Opaque forward(const at::Tensor& x) { return {linear(x)}; }
  torch::nn::Linear linear = nullptr;
};
TORCH_MODULE(OpaqueNet);

TEST(Ddp, OutputsMayHideTheirTensors) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    for (bool find_unused : {false, true}) {
      const auto model = on_rank_device(OpaqueNet());
      DistributedDataParallel ddp(model, comm, {.find_unused_parameters = find_unused});
      ddp(mlp_input(comm->rank())).hidden_somewhere.sum().backward();
      for (const at::Tensor& parameter : model->parameters()) {
        at::Tensor sum = parameter.grad().clone();
        comm->all_reduce(sum).wait();
        EXPECT_TRUE(torch::allclose(sum, parameter.grad() * comm->size()));
      }
    }
  });
}

struct TaughtNetImpl : TwoHeadsImpl {
  program::Heads forward(const at::Tensor& x, bool use_left) {
    auto [chosen, hidden] = TwoHeadsImpl::forward(x, use_left);
    return {chosen, hidden[0]};
  }
};
TORCH_MODULE(TaughtNet);

TEST(Ddp, FindsUnusedParametersThroughATypeThatTheProgramTeaches) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    const auto model = on_rank_device(TaughtNet());
    DistributedDataParallel ddp(model, comm, {.find_unused_parameters = true});
    for (int step = 0; step < 2; ++step) {
      ddp.zero_grad();
      ddp(mlp_input(comm->rank()), comm->rank() == 0).chosen.sum().backward();
      EXPECT_TRUE(torch::allclose(model->left->bias.grad().cpu(), torch::full({2}, 1.5f)));
      EXPECT_TRUE(torch::allclose(model->right->bias.grad().cpu(), torch::full({2}, 1.5f)));
    }
  });
}

TEST(Ddp, GoesOnAfterAnUnusedParameterWasNamedAndFrozen) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    const auto model = on_rank_device(TaughtNet());
    DistributedDataParallel ddp(model, comm);
    ddp(mlp_input(comm->rank()), true).chosen.sum().backward();
    expect_contains(error_of<std::runtime_error>([&] { ddp(mlp_input(comm->rank()), true); }), "'right.weight'");
    for (at::Tensor& parameter : model->right->parameters()) parameter.set_requires_grad(false);
    for (int step = 0; step < 2; ++step) ddp(mlp_input(comm->rank()), true).chosen.sum().backward();
  });
}

TEST(Ddp, TakesNoMemoryForBucketsBeforeTheFirstForwardAndRefusesWhatDiffers) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    PeakMemory memory;
    torch::nn::Linear linear(500, 500);
    const int64_t model_bytes = memory.current_bytes();
    DistributedDataParallel ddp(linear, comm);
    EXPECT_LT(memory.current_bytes(), model_bytes + 10000);
    ddp(torch::ones({1, 500})).sum().backward();
    EXPECT_EQ(ddp.memory().grad_bytes, 500 * 501 * 4);
    for (int step = 0; step < 2; ++step) {
      ddp.zero_grad();
      ddp(torch::ones({1, 500})).sum().backward();
    }
    ddp.zero_grad();
    EXPECT_EQ(ddp.memory().grad_bytes, 0);
    EXPECT_LT(memory.current_bytes(), model_bytes + 10000);
    torch::nn::Linear other(4, 4 + comm->rank());
    expect_contains(error_of<std::invalid_argument>([&] { DistributedDataParallel bad(other, comm); }),
                    "the module given to DistributedDataParallel");
    EXPECT_THROW(DistributedDataParallel(linear, comm, {.bucket_bytes = 0}), std::invalid_argument);
    torch::nn::Linear sharded(4, 4);
    FullyShardedDataParallel fsdp(sharded, comm);
    expect_contains(error_of<std::invalid_argument>([&] { DistributedDataParallel bad(sharded, comm); }),
                    "sharded already");
  });
}

// A hook destroys the wrapper: before, between and after the wrapper's own hooks.
TEST(Ddp, DestroyedInsideItsOwnBackwardIsAnError) {
  for (const int world : {1, 3})
    for (const size_t layer : {0, 2, 4}) {
      on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
        auto model = make_mlp();
        std::optional<DistributedDataParallel<torch::nn::Sequential>> ddp;
        ddp.emplace(model, comm);
        const at::Tensor loss = call(*ddp, mlp_input(1)).sum();
        model[layer]->as<torch::nn::Linear>()->bias.register_hook([&](const at::Tensor&) { ddp.reset(); });
        const std::string error = error_of<std::logic_error>([&] { loss.backward(); });
        EXPECT_EQ(error, world == 1 ? ""
                                    : c10::str("DistributedDataParallel on rank ", comm->rank(),
                                               " was destroyed inside its own backward pass, so gradients are not "
                                               "reduced over the ranks: keep it until backward() has returned"))
            << layer;
      });
    }
}

struct GivesItsScale : torch::nn::Module {
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x) { return {layer(x), scale}; }
  torch::nn::Linear layer = register_module("layer", torch::nn::Linear(4, 4));
  at::Tensor scale = register_parameter("scale", torch::ones({4}));
};

TEST(Ddp, AParameterThatForwardReturnsKeepsNoHook) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    auto model = seeded(4, [] { return std::make_shared<GivesItsScale>(); });
    on_rank_device(*model);
    for (int wrapper = 0; wrapper < 2; ++wrapper) {
      DistributedDataParallel ddp(model, comm);
      for (int step = 0; step < 2; ++step) {
        ddp.zero_grad();
        const auto [y, scale] = ddp(on_rank_device(torch::full({2, 4}, 1.0 + comm->rank())));
        (y.sum() + (scale * (1.0 + comm->rank())).sum()).backward();
        EXPECT_TRUE(torch::equal(model->scale.grad().cpu(), torch::full({4}, 1.5)));
      }
    }
    (model->scale * 2).sum().backward();  // without a wrapper
  });
}

TEST(Ddp, ARankThatFailsEndsTheOthersBackward) {
  const std::string text = error_of<std::runtime_error>([] {
    on_ranks(3, [](std::shared_ptr<Communicator> comm) {
      DistributedDataParallel ddp(make_mlp(), comm);
      call(ddp, mlp_input(1)).sum().backward();
      if (comm->rank() == 1) throw std::runtime_error("rank 1 has had enough");
      call(ddp, mlp_input(1)).sum().backward();
      call(ddp, mlp_input(1)).sum().backward();
    });
  });
  expect_contains(text, "rank 1 has had enough");
}

}  // namespace
}  // namespace tessera::ddp_test
