// Mixed kinds of parameters, full parameters, and checks that are off by default.
#include "tests/fsdp/linear_chain.h"
#include "tests/support/reference.h"

namespace tessera::parameters_test {
using namespace internal;
namespace {

using namespace testing_support;

FsdpOptions per_linear() { return {.auto_wrap = wrap_modules<torch::nn::LinearImpl>()}; }

// ---- kinds of parameters

TEST(Parameters, IgnoredModulesStayWhole) {
  for (int world : {1, 2, 3}) {
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      auto model = seeded(1, [] { return chain(3, 8); }), reference = seeded(1, [] { return chain(3, 8); });
      FsdpOptions options = per_linear();
      options.ignored_modules = wrap_if([](const std::string& fqn, const torch::nn::Module&) { return fqn == "1"; });
      FullyShardedDataParallel fsdp(model, comm, options);
      EXPECT_EQ(fsdp.named_parameters().keys(), (std::vector<std::string>{"0.weight", "0.bias", "2.weight", "2.bias"}));
      const at::Tensor ignored = model->named_parameters()["1.weight"];
      EXPECT_EQ(ignored.numel(), 64);
      EXPECT_EQ(ignored.storage().nbytes(), 64U * 4);
      fsdp(input(comm->rank())).square().mean().backward();
      // The gradient of an ignored parameter is not reduced.
      reference->forward(input(comm->rank())).square().mean().backward();
      EXPECT_TRUE(same_values(ignored.grad(), reference->named_parameters()["1.weight"].grad()));
      expect_same_parameters(fsdp, *reference, "");  // the state dictionary includes ignored parameters
    });
  }
}

TEST(Parameters, OfAnIgnoredModuleThatAreAViewOfOneOfAUnitAreRefused) {
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    auto model = chain(2, 8);
    model[1]->named_parameters()["bias"].set_data(model[0]->named_parameters()["weight"].detach()[3]);
    FsdpOptions options = per_linear();
    options.ignored_modules = wrap_if([](const std::string& fqn, const torch::nn::Module&) { return fqn == "1"; });
    const std::string error = error_of<std::invalid_argument>([&] { FullyShardedDataParallel(model, comm, options); });
    expect_contains(error, "parameter of an ignored module '1.bias' on rank " + std::to_string(comm->rank()) +
                               " shares memory with parameter '0.weight'");
  });
}

struct BranchesImpl : torch::nn::Module {
  BranchesImpl() {
    register_module("a", a);
    register_module("tail", tail);
  }
  at::Tensor forward(at::Tensor x, bool use_a) {
    at::Tensor ya = a(x);
    return tail(use_a ? x + ya : x);
  }
  torch::nn::Linear a{8, 8}, tail{8, 8};
};
TORCH_MODULE(Branches);

TEST(Parameters, UnevenUseIsRefusedIfAskedAndNamed) {
  on_ranks(3, [](std::shared_ptr<Communicator> comm) {
    FsdpOptions options = per_linear();
    options.refuse_uneven_use = true;
    FullyShardedDataParallel fsdp(seeded(1, [] { return Branches(); }), comm, options);
    fsdp(input(0), true).sum().backward();
    fsdp(input(0), false).sum().backward();  // a parameter that no rank used is no error
    const std::string error =
        error_of<std::invalid_argument>([&] { fsdp(input(0), comm->rank() != 1).sum().backward(); });
    expect_contains(error, "parameter 'a.weight' of unit 'a' had no gradient on rank 1");
    fsdp.zero_grad();
    fsdp(input(0), true).sum().backward();  // still works
    EXPECT_EQ(fsdp.memory().gathered_bytes, 0);
  });
}

struct DtypesImpl : torch::nn::Module {
  DtypesImpl() {
    a = register_parameter("a", torch::randn({8, 8}));
    b = register_parameter("b", torch::randn({8, 8}, at::kDouble));
    c = register_parameter("c", torch::randn({8}, at::kBFloat16));
    ids = register_parameter("ids", torch::arange(8), /*requires_grad=*/false);
    frozen = register_parameter("frozen", torch::randn({8}, at::kDouble), /*requires_grad=*/false);
  }
  at::Tensor forward(const at::Tensor& x) {
    return (torch::matmul(x, a) + c).to(at::kDouble).matmul(b).index_select(1, ids) * frozen;
  }
  at::Tensor a, b, c, ids, frozen;
};
TORCH_MODULE(Dtypes);

TEST(Parameters, OfSeveralDtypesInOneUnit) {
  for (int world : {1, 2, 3, 4}) {
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      auto reference = seeded(1, [] { return Dtypes(); });
      FullyShardedDataParallel fsdp(seeded(1, [] { return Dtypes(); }), comm);
      torch::optim::SGD sharded(fsdp.parameters(), 0.1), whole(reference->parameters(), 0.1);
      for (int step = 0; step < 2; ++step) {
        auto loss = [](auto& net, int rank) { return call(net, input(rank)).square().mean(); };
        step_both(sharded, whole, [&] {
          loss(fsdp, comm->rank()).backward();
          reference_backward(reference, world, [&](int rank) { return loss(reference, rank); });
        });
      }
      auto state = fsdp.full_state_dict();
      for (const auto& entry : reference->named_parameters()) {
        // bf16 gradients are summed in fp32 here, and rounded after each addition there.
        const double tolerance = entry.value().scalar_type() == at::kBFloat16 ? 2e-2 : 0;
        EXPECT_EQ(state[entry.key()].scalar_type(), entry.value().scalar_type());
        EXPECT_TRUE(torch::allclose(state[entry.key()], entry.value().detach(), tolerance + 1e-3, tolerance + 1e-3))
            << entry.key();
      }
    });
  }
}

TEST(Parameters, GroupsByNameAndShape) {
  on_ranks(3, [](std::shared_ptr<Communicator> comm) {
    using torch::optim::AdamWOptions;
    FullyShardedDataParallel fsdp(chain(3, 8), comm, per_linear());
    auto groups = group_parameters<AdamWOptions>(
        fsdp,
        {{[](const NamedShard& shard) { return shard.fqn.starts_with("0."); }, AdamWOptions(0.5)},
         {[](const NamedShard& shard) { return shard.sizes.size() < 2; }, AdamWOptions(1e-3).weight_decay(0)}},
        AdamWOptions(1e-3).weight_decay(0.1));
    ASSERT_EQ(groups.size(), 3U);
    EXPECT_EQ(groups[0].params().size(), 2U);
    EXPECT_EQ(groups[1].params().size(), 2U);
    EXPECT_TRUE(groups[1].params()[0].is_same(fsdp.named_parameters()["1.bias"]));
    EXPECT_EQ(static_cast<AdamWOptions&>(groups[2].options()).weight_decay(), 0.1);
    AdamW optimizer(std::move(groups), AdamWOptions());
    fsdp(input(0)).sum().backward();
    optimizer.step();
  });
}

// ---- accumulation and clipping

// Accumulation that reduces each time, under no_sync, and mixed: the clipped gradients are those of the loop.
TEST(Accumulation, ClippingAfterAnyMixture) {
  for (int world : {1, 2, 3}) {
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      for (const std::vector<bool>& synchronised :
           {std::vector{true, true, true}, {false, false, true}, {true, false, true}, {false, true, true}}) {
        for (const double norm_type : {2.0, 1.0, std::numeric_limits<double>::infinity()}) {
          auto reference = seeded(1, [] { return chain(3, 8); });
          FullyShardedDataParallel fsdp(seeded(1, [] { return chain(3, 8); }), comm, per_linear());
          auto loss = [](auto& net, int part) { return call(net, input(part)).square().sum(); };
          for (int micro = 0; micro < 3; ++micro) {
            std::optional<ScopeExit> scope;
            if (!synchronised[micro]) scope.emplace(fsdp.no_sync());
            loss(fsdp, comm->rank() + 10 * micro).backward();
            reference_backward(reference, world, [&](int rank) { return loss(reference, rank + 10 * micro); });
          }
          const double norm = fsdp.clip_grad_norm_(0.5, norm_type);
          const double expected = torch::nn::utils::clip_grad_norm_(reference->parameters(), 0.5, norm_type);
          EXPECT_NEAR(norm, expected, 1e-5 * expected);
          EXPECT_NEAR(fsdp.clip_grad_norm_(1e9, norm_type), 0.5, 1e-4);
          torch::optim::SGD sharded(fsdp.parameters(), 0.1), whole(reference->parameters(), 0.1);
          sharded.step();
          whole.step();
          auto state = fsdp.full_state_dict();
          for (const auto& entry : reference->named_parameters())
            EXPECT_TRUE(torch::allclose(state[entry.key()], entry.value().detach(), 1e-5, 1e-6)) << entry.key();
          EXPECT_EQ(fsdp.memory().bucket_bytes, 0);
        }
      }
    });
  }
}

// On the host norms are computed by rows, on all threads.
TEST(Accumulation, ClippingLargeShards) {
  constexpr int64_t kWidth = 700;  // 490,000 elements: full rows and a remainder
  for (int world : {1, 2}) {
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      for (const double norm_type : {2.0, 1.0, 3.0, std::numeric_limits<double>::infinity()}) {
        auto reference = seeded(1, [] { return chain(2, kWidth); });
        FullyShardedDataParallel fsdp(seeded(1, [] { return chain(2, kWidth); }), comm, per_linear());
        const at::Tensor x = seeded(3, [] { return torch::randn({4, kWidth}); });
        fsdp(x).square().sum().backward();
        reference->forward(x).square().sum().backward();
        std::vector<at::Tensor> gradients;
        for (const auto& parameter : reference->parameters()) gradients.push_back(parameter.grad().flatten());
        const double expected =
            torch::linalg_vector_norm(torch::cat(gradients).to(at::kDouble), norm_type).item<double>();
        const at::Tensor before = fsdp.parameters()[0].grad().clone();
        EXPECT_NEAR(fsdp.clip_grad_norm_(2 * expected, norm_type), expected, 1e-5 * expected);
        EXPECT_TRUE(same_values(fsdp.parameters()[0].grad(), before));
        EXPECT_NEAR(fsdp.clip_grad_norm_(0.5, norm_type), expected, 1e-5 * expected);
        EXPECT_NEAR(fsdp.clip_grad_norm_(0.5, norm_type), 0.5, 1e-5);
      }
    });
  }
}

// ---- full parameters

TEST(FullParameters, OnRankZeroOnly) {
  on_ranks(3, [](std::shared_ptr<Communicator> comm) {
    auto model = seeded(1, [] { return chain(2, 8); }), reference = seeded(1, [] { return chain(2, 8); });
    FullyShardedDataParallel fsdp(model, comm, per_linear());
    {
      auto guard = fsdp.summon_full_params({.writeback = false, .rank0_only = true, .offload_to_cpu = true});
      if (comm->rank() == 0) {
        EXPECT_TRUE(torch::equal(model->parameters()[2], reference->parameters()[2].cpu()));
        EXPECT_EQ(model->parameters()[2].storage().nbytes(), (64 + 8) * 4U);
      } else {
        EXPECT_EQ(fsdp.memory().gathered_bytes, 0);
        expect_contains(error_of<std::logic_error>([&] { (model->parameters()[2] + 1).sum(); }), "rank 0 only");
        expect_contains(error_of<std::logic_error>([&] { fsdp.full_state_dict(); }), "rank 0 only");
      }
    }
    expect_same_parameters(fsdp, *reference, "after");
    expect_contains(
        error_of<std::invalid_argument>([&] { auto guard = fsdp.summon_full_params({.rank0_only = true}); }),
        "writeback");
  });
}

TEST(FullParameters, OfSomeUnits) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    auto model = seeded(1, [] { return chain(3, 8); }), reference = seeded(1, [] { return chain(3, 8); });
    FullyShardedDataParallel fsdp(model, comm, per_linear());
    {
      auto guard = fsdp.summon_full_params({.units = {"1"}});
      EXPECT_EQ(fsdp.memory().gathered_bytes, fsdp.memory().largest_unit_bytes);
      torch::NoGradGuard no_grad;
      model->named_parameters()["1.bias"].fill_(3);
      reference->named_parameters()["1.bias"].fill_(3);
      EXPECT_TRUE(same_values(fsdp(input(0)), reference->forward(input(0))));  // the other units are gathered for use
      EXPECT_THROW(model->named_parameters()["2.bias"].fill_(3), std::logic_error);
    }
    expect_same_parameters(fsdp, *reference, "after");
    expect_contains(
        error_of<std::invalid_argument>([&] { auto guard = fsdp.summon_full_params({.units = {"1", "7"}}); }),
        "SummonOptions::units: there is no unit '7'; the units are '0', '1', '2'");
  });
}

TEST(FullParameters, StreamOneUnitAtATime) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    auto reference = seeded(1, [] { return chain(6, 16); });
    FullyShardedDataParallel fsdp(seeded(1, [] { return chain(6, 16); }), comm, per_linear());
    fsdp.reset_peak_memory();
    int seen = 0;
    fsdp.visit_full_state(
        [&](const std::string& name, const at::Tensor& tensor) {
          ++seen;
          EXPECT_TRUE(torch::equal(tensor, reference->named_parameters()[name])) << name;
        },
        {.rank0_only = true});
    EXPECT_EQ(seen, comm->rank() == 0 ? 12 : 0);
    EXPECT_EQ(fsdp.memory().peak_gathered_bytes, fsdp.memory().largest_unit_bytes);
    EXPECT_EQ(fsdp.full_state_dict({.rank0_only = true, .offload_to_cpu = true}).size(), comm->rank() == 0 ? 12U : 0U);
  });
}

// ---- checks

TEST(Checks, InfiniteGradientsAreNamedByUnitAndRank) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    FsdpOptions options = per_linear();
    options.check_finite = true;
    FullyShardedDataParallel fsdp(seeded(1, [] { return chain(3, 8); }), comm, options);
    fsdp(input(0)).sum().backward();
    at::Tensor x = input(0);
    if (comm->rank() == 1) x[0][3] = INFINITY;  // column 3 of the first weight's gradient, and later layers
    const std::string error = error_of<std::runtime_error>([&] { fsdp(x).sum().backward(); });
    expect_contains(error, "unit '0' in the parts of ranks 0, 1");
    fsdp.zero_grad();
    fsdp(input(0)).sum().backward();
  });
}

struct SkippingImpl : torch::nn::Module {
  SkippingImpl() {
    for (int i = 0; i < 3; ++i) layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(8, 8)));
  }
  at::Tensor forward(at::Tensor x, bool swap) {
    return layers[2](swap ? layers[1](layers[0](x)) : layers[0](layers[1](x)));
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Skipping);

TEST(Checks, ASwapOfUnitsOfOneSizeIsNamed) {
  const std::string error = error_of<CommError>([] {
    on_ranks(2, [](std::shared_ptr<Communicator> comm) {
      FullyShardedDataParallel fsdp(on_rank_device(Skipping()), comm, per_linear());
      fsdp(input(0), comm->rank() == 1).sum().backward();
    });
  });
  expect_contains(error, "diverged");
  expect_contains(error, "unit 'layer");
}

TEST(Checks, DescribeTellsDtypesAndTheOrderSeen) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    FsdpOptions options = per_linear();
    options.mixed_precision.param_dtype = at::kBFloat16;
    FullyShardedDataParallel fsdp(chain(2, 8), comm, options);
    expect_contains(fsdp.describe(), "2 units over 2 ranks");
    fsdp(input(0)).sum().backward();
    expect_contains(fsdp.describe(), "unit '1': 2 parameters, 72 elements of Float, 144 bytes gathered as BFloat16");
    expect_contains(fsdp.describe(), "order seen in forward: unit '0', unit '1'");
    expect_contains(fsdp.describe(), "order seen in backward: unit '1'");
    auto twice = chain(2, 8);
    FullyShardedDataParallel again(twice, comm, options);
    again(again(input(0))).sum().backward();
    expect_contains(again.describe(), "order seen in backward: unit '1', unit '0', unit '1'");
  });
}

// ---- parts of unequal length

TEST(UnevenData, ARankThatRunsOutEndsTheOthersSoon) {
  const std::string error = error_of<CommError>([] {
    on_ranks(2, [](std::shared_ptr<Communicator> comm) {
      FullyShardedDataParallel fsdp(chain(2, 8), comm, per_linear());
      for (int step = 0; step < 4 - comm->rank(); ++step) fsdp(input(0)).sum().backward();
    });
  });
  expect_contains(error, "rank 1");
}

// Each row counts the same on all ranks.
TEST(UnevenData, JoinedRanksTrainOnAllOfIt) {
  on_ranks(3, [](std::shared_ptr<Communicator> comm) {
    auto reference = seeded(1, [] { return chain(2, 8); });
    FullyShardedDataParallel fsdp(seeded(1, [] { return chain(2, 8); }), comm, per_linear());
    torch::optim::SGD sharded(fsdp.parameters(), 0.1), whole(reference->parameters(), 0.1);
    const int own_steps = 2 + comm->rank();  // 2, 3 and 4
    int step = 0;
    for (; int active = ranks_with_data(*comm, step < own_steps); ++step) {
      const double factor = step < own_steps ? 3.0 / active : 0.0;
      step_both(sharded, whole, [&] {
        (fsdp(input(comm->rank() + 10 * step)).square().mean() * factor).backward();
        int first = 3 - active;  // the last ranks still have data
        reference_backward(reference, active, [&](int part) {
          return reference->forward(input(first + part + 10 * step)).square().mean();
        });
      });
    }
    EXPECT_EQ(step, 4);
    auto state = fsdp.full_state_dict();
    for (const auto& entry : reference->named_parameters())
      EXPECT_TRUE(torch::allclose(state[entry.key()], entry.value().detach(), 1e-5, 1e-6)) << entry.key();
  });
}

}  // namespace
}  // namespace tessera::parameters_test
