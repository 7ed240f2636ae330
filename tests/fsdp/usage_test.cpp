// Uses of a wrapped module that FairScale and FSDP support, one in each test.
#include <tuple>

#include "tests/support/large_copies.h"
#include "tests/support/reference.h"

namespace tessera::usage_test {
using namespace internal;
namespace {

using namespace testing_support;

torch::nn::Sequential chain(int depth, int64_t width) {
  torch::nn::Sequential model;
  for (int i = 0; i < depth; ++i) {
    model->push_back(torch::nn::Linear(width, width));
    model->push_back(torch::nn::Tanh());
  }
  return on_rank_device(model);
}

at::Tensor input(int rank, int64_t rows = 4, int64_t width = 8) {
  return seeded(50 + rank, [&] { return torch::randn({rows, width}); });
}

// A unit for each Linear.
FsdpOptions per_linear() { return {.auto_wrap = wrap_modules<torch::nn::LinearImpl>()}; }

// ---- the surface

struct ManyImpl : torch::nn::Module {
  ManyImpl() { register_module("linear", linear); }
  std::tuple<at::Tensor, int> forward(const at::Tensor& x, int times, std::vector<at::Tensor>* seen) {
    at::Tensor y = x;
    for (int i = 0; i < times; ++i) y = linear(y);
    seen->push_back(y);
    return {y, times};
  }
  torch::nn::Linear linear{8, 8};
};
TORCH_MODULE(Many);

TEST(Usage, ForwardTakesAndReturnsWhatTheModuleDoes) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    auto model = seeded(1, [] { return Many(); });
    FullyShardedDataParallel fsdp(model, comm, per_linear());
    std::vector<at::Tensor> seen;
    const at::Tensor x = input(0);
    auto [y, times] = fsdp.forward(x, 3, &seen);
    static_assert(std::is_same_v<decltype(fsdp(x, 3, &seen)), std::tuple<at::Tensor, int>>);
    EXPECT_EQ(times, 3);
    EXPECT_TRUE(seen.at(0).is_same(y));
    EXPECT_EQ(fsdp.module().get(), model.get());
  });
}

TEST(Usage, ParametersAreEvenShardsByName) {
  for (int world : {1, 2, 3, 5}) {
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      auto model = seeded(1, [] { return chain(2, 5); });
      auto reference = seeded(1, [] { return chain(2, 5); });
      FullyShardedDataParallel fsdp(model, comm, per_linear());
      auto named = fsdp.named_parameters();
      auto listed = fsdp.parameters();
      ASSERT_EQ(named.size(), 4U);
      std::vector<std::string> names;
      int64_t own = 0;
      for (size_t i = 0; i < named.size(); ++i) {
        EXPECT_TRUE(named[i].value().is_same(listed[i]));
        EXPECT_EQ(named[i].key(), reference->named_parameters()[i].key());
        EXPECT_EQ(listed[i].dim(), 1);
        EXPECT_TRUE(listed[i].is_leaf() && listed[i].requires_grad());
        own += listed[i].numel();
      }
      at::Tensor total = on_rank_device(torch::tensor({own}));
      comm->all_reduce(total).wait();
      EXPECT_EQ(total.item<int64_t>(), 2 * (25 + 5));  // each element on one rank
    });
  }
}

TEST(Usage, AnUnusedWrapperCanBeDestroyedAndTheModuleSaysSo) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    auto model = chain(1, 8);
    { FullyShardedDataParallel fsdp(model, comm); }
    expect_contains(error_of<std::logic_error>([&] { model->forward(input(0)); }),
                    "no longer exists: keep the wrapper while the module is used, or take full_state_dict()");
  });
}

struct OnlyBias : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x + bias; }
  at::Tensor bias = register_parameter("bias", torch::zeros({4}));
};

// Backward uses no parameter, so only the arriving gradient finds that the wrapper has gone.
TEST(Usage, AGradientForADestroyedWrapperIsRefusedByName) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    const auto model = on_rank_device(std::make_shared<OnlyBias>());
    at::Tensor loss;
    {
      FullyShardedDataParallel fsdp(model, comm);
      loss = fsdp(on_rank_device(torch::ones({2, 4}))).sum();
    }
    expect_contains(error_of<std::logic_error>([&] { loss.backward(); }),
                    "parameter 'bias' on rank " + std::to_string(comm->rank()) +
                        " would get a gradient of a forward through a wrapper that no longer exists: keep the wrapper");
  });
}

// ---- modules used in unusual ways

TEST(Usage, TheModuleMayBeCalledWithoutTheWrapper) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    auto model = seeded(1, [] { return chain(3, 8); });
    auto reference = seeded(1, [] { return chain(3, 8); });
    FullyShardedDataParallel fsdp(model, comm, per_linear());
    torch::optim::SGD sharded(fsdp.parameters(), 0.1), whole(reference->parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      step_both(sharded, whole, [&] {
        model->forward(input(comm->rank())).square().mean().backward();
        reference_backward(reference, 2, [&](int rank) { return reference->forward(input(rank)).square().mean(); });
      });
    }
    expect_same_parameters(fsdp, *reference, "");
  });
}

TEST(Usage, ParametersMayBeReadAnywhere) {
  on_ranks(3, [](std::shared_ptr<Communicator> comm) {
    auto model = seeded(1, [] { return chain(2, 8); });
    auto reference = seeded(1, [] { return chain(2, 8); });
    FullyShardedDataParallel fsdp(model, comm, per_linear());
    torch::NoGradGuard no_grad;
    for (const auto& entry : reference->named_parameters())
      EXPECT_EQ(model->named_parameters()[entry.key()].norm().item<float>(), entry.value().norm().item<float>());
  });
}

TEST(Usage, SeveralForwardsBeforeOneBackward) {
  for (bool reshard : {true, false}) {
    on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      auto model = seeded(1, [] { return chain(3, 8); });
      auto reference = seeded(1, [] { return chain(3, 8); });
      FsdpOptions options = per_linear();
      options.reshard_after_forward = reshard;
      FullyShardedDataParallel fsdp(model, comm, options);
      auto run = [](auto& net, int rank) {
        return torch::mse_loss(call(net, input(rank)), call(net, input(rank + 7))) +
               call(net, input(rank + 9)).square().sum();
      };
      torch::optim::SGD sharded(fsdp.parameters(), 0.1), whole(reference->parameters(), 0.1);
      for (int step = 0; step < 3; ++step) {
        step_both(sharded, whole, [&] {
          run(fsdp, comm->rank()).backward();
          reference_backward(reference, 2, [&](int rank) { return run(reference, rank); });
        });
      }
      expect_same_parameters(fsdp, *reference, "");
    });
  }
}

// Two backwards without zero_grad() accumulate: to the sum of reduced gradients, and under no_sync to the reduction of
// the sum.
TEST(Usage, GradientsAccumulate) {
  for (bool sync_each : {true, false}) {
    for (int world : {1, 3}) {
      on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
        auto model = seeded(1, [] { return chain(3, 8); });
        auto reference = seeded(1, [] { return chain(3, 8); });
        FullyShardedDataParallel fsdp(model, comm, per_linear());
        torch::optim::SGD sharded(fsdp.parameters(), 0.1), whole(reference->parameters(), 0.1);
        for (int step = 0; step < 2; ++step) {
          sharded.zero_grad();
          whole.zero_grad();
          auto loss = [](auto& net, int part) { return call(net, input(part)).square().mean(); };
          for (int micro = 0; micro < 3; ++micro) {
            std::optional<ScopeExit> scope;
            if (!sync_each && micro < 2) scope.emplace(fsdp.no_sync());
            loss(fsdp, comm->rank() + 10 * micro).backward();
          }
          if (sync_each) {
            for (int micro = 0; micro < 3; ++micro)
              reference_backward(reference, world, [&](int rank) { return loss(reference, rank + 10 * micro); });
          } else {
            // The gradients of each rank are summed before the sum over ranks.
            std::vector<std::vector<at::Tensor>> by_part(world);
            for (int rank = 0; rank < world; ++rank) {
              reference->zero_grad();
              for (int micro = 0; micro < 3; ++micro) loss(reference, rank + 10 * micro).backward();
              for (auto& parameter : reference->parameters()) by_part[rank].push_back(parameter.grad().clone());
            }
            auto parameters = reference->parameters();
            for (size_t i = 0; i < parameters.size(); ++i) {
              at::Tensor sum = by_part[0][i];
              for (int rank = 1; rank < world; ++rank) sum = sum + by_part[rank][i];
              parameters[i].mutable_grad() = sum / world;
            }
          }
          sharded.step();
          whole.step();
        }
        expect_same_parameters(fsdp, *reference, sync_each ? "synchronised" : "no_sync");
        EXPECT_EQ(fsdp.memory().bucket_bytes, 0);
      });
    }
  }
}

TEST(Usage, NoSyncSendsNoGradients) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    FullyShardedDataParallel fsdp(chain(1, 64), comm, {.reshard_after_forward = false});
    auto sent = [&](bool sync) {
      const auto before = comm->traffic().sent_bytes;
      std::optional<ScopeExit> scope;
      if (!sync) scope.emplace(fsdp.no_sync());
      fsdp(input(0, 2, 64)).sum().backward();
      return comm->traffic().sent_bytes - before;
    };
    const auto half = fsdp.memory().shard_bytes;
    EXPECT_EQ(sent(false), half);           // the all-gather
    EXPECT_GE(sent(true), 2 * half);        // and the reduce-scatter
    EXPECT_LT(sent(true), 2 * half + 100);  // and the consistency check
    for (const auto& shard : fsdp.parameters()) EXPECT_TRUE(shard.grad().defined());
  });
}

struct BranchesImpl : torch::nn::Module {
  BranchesImpl() {
    register_module("a", a);
    register_module("b", b);
    register_module("tail", tail);
  }
  at::Tensor forward(at::Tensor x, bool use_a, bool use_b) {
    // Every rank uses both, so that all-gathers agree. A factor of 0 would still give gradients.
    at::Tensor ya = a(x), yb = b(x);
    if (use_a) x = x + ya;
    if (use_b) x = x + yb;
    return tail(x);
  }
  torch::nn::Linear a{8, 8}, b{8, 8}, tail{8, 8};
};
TORCH_MODULE(Branches);

TEST(Usage, ParametersWithoutGradientOnSomeRanksCountAsZeroThere) {
  on_ranks(3, [](std::shared_ptr<Communicator> comm) {
    auto model = seeded(1, [] { return Branches(); });
    auto reference = seeded(1, [] { return Branches(); });
    FullyShardedDataParallel fsdp(model, comm, per_linear());
    torch::optim::Adam sharded(fsdp.parameters(), 1e-2), whole(reference->parameters(), 1e-2);
    for (int step = 0; step < 4; ++step) {
      step_both(sharded, whole, [&] {
        auto loss = [&](auto& net, int rank) {
          return net(input(rank), (rank + step) % 2 == 0, rank == step).square().mean();
        };
        loss(fsdp, comm->rank()).backward();
        reference_backward(reference, 3, [&](int rank) { return loss(reference, rank); });
      });
    }
    expect_same_parameters(fsdp, *reference, "");
  });
}

// As in the unsharded loop: with a gradient of zeros Adam would step such a parameter.
TEST(Usage, ParametersThatNoRankUsedHaveNoGradient) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    auto model = seeded(1, [] { return Branches(); });
    FullyShardedDataParallel fsdp(model, comm, per_linear());
    fsdp(input(0), true, false).sum().backward();
    auto shards = fsdp.named_parameters();
    EXPECT_TRUE(shards["a.weight"].grad().defined());
    EXPECT_TRUE(shards["tail.bias"].grad().defined());
    EXPECT_FALSE(shards["b.weight"].grad().defined());
    EXPECT_FALSE(shards["b.bias"].grad().defined());
  });
}

TEST(Usage, FrozenParametersCostNoGradientMemoryAndMayThaw) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    auto build = [] {
      auto model = chain(3, 8);
      for (auto& parameter : model[2]->parameters()) parameter.requires_grad_(false);
      model[0]->named_parameters()["weight"].requires_grad_(false);
      return model;
    };
    auto model = seeded(1, build), reference = seeded(1, build);
    FullyShardedDataParallel fsdp(model, comm, per_linear());
    auto train = [&](int steps) {
      torch::optim::SGD sharded(fsdp.parameters(), 0.1), whole(reference->parameters(), 0.1);
      for (int step = 0; step < steps; ++step) {
        step_both(sharded, whole, [&] {
          fsdp(input(comm->rank())).square().mean().backward();
          reference_backward(reference, 2, [&](int rank) { return reference->forward(input(rank)).square().mean(); });
        });
      }
    };
    train(2);
    expect_same_parameters(fsdp, *reference, "frozen");
    // 0.bias, 4.weight and 4.bias train.
    EXPECT_EQ(fsdp.memory().grad_bytes, 4 * (8 + 64 + 8) / 2);
    for (auto* net : {&model, &reference})
      for (auto& parameter : (*net)->parameters()) parameter.requires_grad_(true);
    train(2);
    expect_same_parameters(fsdp, *reference, "thawed");
    for (auto* net : {&model, &reference})
      for (auto& parameter : (*net)[4]->parameters()) parameter.requires_grad_(false);
    train(2);
    expect_same_parameters(fsdp, *reference, "frozen again");
  });
}

struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    register_module("embedding", embedding);
    register_module("body", body);
    register_module("head", head);
    head->unregister_parameter_("weight");
    head->weight = head->register_parameter("weight", embedding->weight);
  }
  at::Tensor forward(at::Tensor tokens) { return head(torch::tanh(body(embedding(tokens)))); }
  struct HeadImpl : torch::nn::LinearImpl {
    using torch::nn::LinearImpl::LinearImpl;
    void unregister_parameter_(const std::string& name) { parameters_.erase(name); }
  };
  torch::nn::Embedding embedding{10, 8};
  torch::nn::Linear body{8, 8};
  std::shared_ptr<HeadImpl> head_impl = std::make_shared<HeadImpl>(torch::nn::LinearOptions(8, 10).bias(false));
  struct Head {
    std::shared_ptr<HeadImpl> impl;
    HeadImpl* operator->() const { return impl.get(); }
    at::Tensor operator()(at::Tensor x) const { return impl->forward(x); }
    operator std::shared_ptr<HeadImpl>() const { return impl; }
  } head{head_impl};
  template <class T>
  void register_module(const std::string& name, T holder) {
    if constexpr (std::is_same_v<T, Head>) {
      torch::nn::Module::register_module(name, holder.impl);
    } else {
      torch::nn::Module::register_module(name, holder);
    }
  }
};
TORCH_MODULE(Tied);

TEST(Usage, TiedWeightsStayTiedAcrossUnits) {
  for (int world : {1, 2, 3}) {
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      auto model = seeded(1, [] { return Tied(); });
      auto reference = seeded(1, [] { return Tied(); });
      FullyShardedDataParallel fsdp(model, comm, {.auto_wrap = wrap_by_size(1)});
      EXPECT_EQ(fsdp.parameters().size(), 3U);  // the tied weight, and two of the body
      torch::optim::Adam sharded(fsdp.parameters(), 1e-2), whole(unique_parameters(*reference), 1e-2);
      for (int step = 0; step < 4; ++step) {
        step_both(sharded, whole, [&] {
          auto loss = [&](auto& net, int rank) {
            const at::Tensor six = on_rank_device(torch::arange(6));
            return torch::nn::functional::cross_entropy(net((six + rank) % 10), (six * 3 + step) % 10);
          };
          loss(fsdp, comm->rank()).backward();
          reference_backward(reference, world, [&](int rank) { return loss(reference, rank); });
        });
      }
      expect_same_parameters(fsdp, *reference, "");
      EXPECT_TRUE(model->head->weight.is_same(model->embedding->weight));
      auto state = fsdp.full_state_dict();
      EXPECT_TRUE(state["head.weight"].is_same(state["embedding.weight"]));
    });
  }
}

TEST(Usage, ParametersOfSeveralDtypes) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    auto build = [] {
      auto model = chain(2, 8);
      model[2]->to(at::kDouble);
      return model;
    };
    auto model = seeded(1, build), reference = seeded(1, build);
    FullyShardedDataParallel fsdp(model, comm);  // one unit has both
    auto run = [](torch::nn::Sequential& net, const at::Tensor& x) {
      return net[2]
          ->as<torch::nn::Linear>()
          ->forward(net[0]->as<torch::nn::Linear>()->forward(x).to(at::kDouble))
          .sum();
    };
    torch::optim::SGD sharded(fsdp.parameters(), 0.1), whole(reference->parameters(), 0.1);
    for (int step = 0; step < 2; ++step) {
      step_both(sharded, whole, [&] {
        run(model, input(comm->rank())).backward();
        reference_backward(reference, 2, [&](int rank) { return run(reference, input(rank)); });
      });
    }
    expect_same_parameters(fsdp, *reference, "");
  });
}

// ---- evaluation, buffers, full parameters

TEST(Usage, EvaluationUnderNoGradAndInferenceModeBetweenSteps) {
  for (bool reshard : {true, false}) {
    on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      auto model = seeded(1, [] { return chain(3, 8); });
      auto reference = seeded(1, [] { return chain(3, 8); });
      FsdpOptions options = per_linear();
      options.reshard_after_forward = reshard;
      FullyShardedDataParallel fsdp(model, comm, options);
      torch::optim::Adam sharded(fsdp.parameters(), 1e-2), whole(reference->parameters(), 1e-2);
      for (int step = 0; step < 4; ++step) {
        {
          torch::NoGradGuard no_grad;
          EXPECT_TRUE(same_values(fsdp(input(5)), reference->forward(input(5))));
        }
        {
          c10::InferenceMode inference;
          EXPECT_TRUE(same_values(fsdp(input(6)), reference->forward(input(6))));
        }
        step_both(sharded, whole, [&] {
          fsdp(input(comm->rank())).square().mean().backward();
          reference_backward(reference, 2, [&](int rank) { return reference->forward(input(rank)).square().mean(); });
        });
      }
      expect_same_parameters(fsdp, *reference, "");
    });
  }
}

// Modules that are called directly begin no pass.
TEST(Usage, DirectEvaluationDoesNotLengthenTheDescription) {
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    auto model = seeded(1, [] { return chain(3, 8); });
    FullyShardedDataParallel fsdp(model, comm, per_linear());
    const auto length_after = [&](int evaluations, const std::vector<size_t>& layers) {
      torch::NoGradGuard no_grad;
      for (int i = 0; i < evaluations; ++i)
        for (const size_t layer : layers)
          for (const at::Tensor& parameter : model->ptr(layer)->parameters()) parameter.sum();
      return fsdp.describe().size();
    };
    for (const std::vector<size_t>& layers : {std::vector<size_t>{0, 1, 2}, {0, 2, 1, 2}, {2, 1}})
      EXPECT_EQ(length_after(50, layers), length_after(700, layers));
  });
}

TEST(Usage, AForwardSeesShardsThatWereWrittenTo) {
  for (bool through_wrapper : {true, false}) {
    on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      auto model = seeded(1, [] { return chain(1, 8); });
      FullyShardedDataParallel fsdp(model, comm, {.reshard_after_forward = false});
      torch::NoGradGuard no_grad;
      auto forward = [&] { return through_wrapper ? fsdp(input(1)) : model->forward(input(1)); };
      const at::Tensor before = forward();
      for (auto& shard : fsdp.parameters()) shard.zero_();
      const at::Tensor after = forward();
      EXPECT_GT(before.abs().sum().item<float>(), 0);
      EXPECT_EQ(after.abs().sum().item<float>(), 0);
    });
  }
}

TEST(Usage, BuffersComeFromRankZero) {
  for (bool sync : {true, false}) {
    on_ranks(3, [&](std::shared_ptr<Communicator> comm) {
      torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::BatchNorm1d(4));
      auto& norm = *model[1]->as<torch::nn::BatchNorm1d>();
      norm.running_mean.fill_(comm->rank() + 1.0);
      norm.num_batches_tracked.fill_(comm->rank() + 5);
      model[1]->register_buffer("mask", torch::full({3}, comm->rank() == 0, at::kBool));
      on_rank_device(model);
      FsdpOptions options;
      options.sync_module_states = sync;
      FullyShardedDataParallel fsdp(model, comm, options);
      const int source = sync ? 0 : comm->rank();
      EXPECT_TRUE(torch::equal(norm.running_mean.cpu(), torch::full({4}, source + 1.0f)));
      EXPECT_EQ(norm.num_batches_tracked.item<int64_t>(), source + 5);
      auto state = fsdp.full_state_dict();
      EXPECT_TRUE(torch::equal(state["1.running_mean"], norm.running_mean));
      EXPECT_TRUE(torch::equal(state["1.mask"].cpu(), torch::full({3}, source == 0, at::kBool)));
    });
  }
}

TEST(Usage, SummonedParametersAreFullAndWrittenBack) {
  for (int world : {1, 2, 3}) {
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      auto model = seeded(1, [] { return chain(2, 5); });
      auto reference = seeded(1, [] { return chain(2, 5); });
      FullyShardedDataParallel fsdp(model, comm, per_linear());
      torch::NoGradGuard no_grad;
      {
        auto scope = fsdp.summon_full_params();
        for (const auto& entry : reference->named_parameters()) {
          auto parameter = model->named_parameters()[entry.key()];
          // data_ptr() too.
          EXPECT_EQ(parameter.data_ptr<float>()[entry.value().numel() - 1],
                    entry.value().data_ptr<float>()[entry.value().numel() - 1]);
          parameter.mul_(2);
          entry.value().mul_(2);
        }
        EXPECT_TRUE(same_values(fsdp(input(0, 2, 5)), reference->forward(input(0, 2, 5))));
        expect_contains(error_of<std::logic_error>([&] { auto inner = fsdp.summon_full_params(); }), "inside another");
      }
      expect_same_parameters(fsdp, *reference, "written back");
      if (world > 1) {
        EXPECT_EQ(fsdp.memory().gathered_bytes, 0);
        auto scope = fsdp.summon_full_params({.writeback = false});
        for (auto& parameter : model->parameters()) parameter.zero_();
        scope.leave();
        expect_same_parameters(fsdp, *reference, "not written back");
      }
    });
  }
}

TEST(Usage, FullStateDictOnRankZeroOnly) {
  on_ranks(3, [](std::shared_ptr<Communicator> comm) {
    auto model = seeded(1, [] { return chain(2, 5); });
    FullyShardedDataParallel fsdp(model, comm, per_linear());
    auto state = fsdp.full_state_dict({.rank0_only = true});
    EXPECT_EQ(state.size(), comm->rank() == 0 ? 4U : 0U);
    EXPECT_EQ(fsdp.memory().gathered_bytes, 0);
  });
}

// ---- gradients

TEST(Usage, ClippingAgreesWithTorch) {
  for (double norm_type : {2.0, 1.0, 3.0, std::numeric_limits<double>::infinity()}) {
    for (int world : {1, 2, 3}) {
      on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
        auto model = seeded(1, [] { return chain(3, 7); });
        auto reference = seeded(1, [] { return chain(3, 7); });
        FullyShardedDataParallel fsdp(model, comm, per_linear());
        (fsdp(input(comm->rank(), 4, 7)).square().sum() * 100).backward();
        reference_backward(reference, world,
                           [&](int rank) { return reference->forward(input(rank, 4, 7)).square().sum() * 100; });
        const double norm = fsdp.clip_grad_norm_(0.5, norm_type);
        const double expected = torch::nn::utils::clip_grad_norm_(reference->parameters(), 0.5, norm_type);
        EXPECT_NEAR(norm, expected, 1e-4 * expected);
        // A norm below the limit: no change.
        const double again = fsdp.clip_grad_norm_(10, norm_type);
        EXPECT_NEAR(again, 0.5, 1e-3);
        torch::optim::SGD sharded(fsdp.parameters(), 1.0), whole(reference->parameters(), 1.0);
        sharded.step();
        whole.step();
        auto state = fsdp.full_state_dict();
        for (const auto& entry : reference->named_parameters())
          EXPECT_TRUE(torch::allclose(state[entry.key()], entry.value(), 1e-5, 1e-6)) << entry.key();
      });
    }
  }
}

TEST(Usage, ClippingReportsNonFiniteNorms) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    FullyShardedDataParallel fsdp(chain(1, 4), comm);
    (fsdp(input(0, 2, 4)).sum() * (comm->rank() == 0 ? 1.0 : INFINITY)).backward();
    expect_contains(error_of<std::runtime_error>([&] { fsdp.clip_grad_norm_(1, 2, true); }), "norm");
    expect_contains(error_of<std::invalid_argument>([&] { fsdp.clip_grad_norm_(-1); }), "max_norm is -1");
    expect_contains(error_of<std::invalid_argument>([&] { fsdp.clip_grad_norm_(1, 0); }), "norm_type 0");
  });
}

TEST(Usage, ZeroGradOfEveryKindStartsAnew) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    auto model = seeded(1, [] { return chain(2, 8); });
    FullyShardedDataParallel fsdp(model, comm, per_linear());
    torch::optim::SGD sgd(fsdp.parameters(), 0.1);
    auto gradients = [&] {
      fsdp(input(comm->rank())).square().sum().backward();
      std::vector<at::Tensor> copies;
      for (const auto& shard : fsdp.parameters()) copies.push_back(shard.grad().clone());
      return copies;
    };
    const auto first = gradients();
    const std::vector<std::function<void()>> clears = {[&] { sgd.zero_grad(); }, [&] { sgd.zero_grad(false); },
                                                       [&] { fsdp.zero_grad(); }, [&] { fsdp.zero_grad(false); },
                                                       [&] { model->zero_grad(); }};
    for (const auto& clear : clears) {
      clear();
      const auto again = gradients();
      for (size_t i = 0; i < first.size(); ++i) EXPECT_TRUE(torch::equal(first[i], again[i]));
    }
    const auto doubled = gradients();  // without zero_grad()
    for (size_t i = 0; i < first.size(); ++i) EXPECT_TRUE(torch::equal(first[i] * 2, doubled[i]));
    {
      const auto scope = fsdp.no_sync();
      fsdp(input(comm->rank())).square().sum().backward();
    }
    {
      const c10::InferenceMode mode;
      sgd.zero_grad(false);
    }
    const auto again = gradients();
    for (size_t i = 0; i < first.size(); ++i) EXPECT_TRUE(torch::equal(first[i], again[i]));
  });
}

TEST(Usage, AGradientThatTheUserKeepsIsNotOverwritten) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    FullyShardedDataParallel fsdp(seeded(1, [] { return chain(1, 8); }), comm);
    fsdp(input(0)).square().sum().backward();
    const at::Tensor kept = fsdp.parameters()[0].grad();
    const at::Tensor copy = kept.clone();
    fsdp.zero_grad();
    (fsdp(input(1)) * 5).square().sum().backward();
    EXPECT_TRUE(torch::equal(kept, copy));
    EXPECT_FALSE(torch::equal(fsdp.parameters()[0].grad(), copy));
  });
}

// A gradient is sent from autograd's own memory, even a transposed view, unless a hook keeps it.
TEST(Usage, AGradientThatNobodyElseHasTravelsWithoutACopy) {
  constexpr int64_t kWidth = 260;  // 264 KiB
  run_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    auto model = chain(3, kWidth);
    FullyShardedDataParallel fsdp(model, comm, per_linear());
    at::Tensor kept;
    bool keeps = false;
    model[2]->as<torch::nn::Linear>()->weight.register_hook([&](const at::Tensor& gradient) {
      if (keeps) kept = gradient;
    });
    for (int step = 0; step < 3; ++step) {
      keeps = step == 1;
      const at::Tensor loss = fsdp(input(0, 4, kWidth)).square().mean();
      EXPECT_EQ(large_copies(kWidth * kWidth, [&] { loss.backward(); }), keeps ? 1 : 0) << "step " << step;
      kept.reset();
      fsdp.zero_grad();
    }
  });
}

// A large gradient is sent from autograd's own memory, unless a hook keeps it. Then writes that bypass the version
// counter have no effect, as in one process.
TEST(Usage, AGradientThatIsOnItsWayIsNotWrittenTo) {
  constexpr int64_t kWidth = 260;  // 264 KiB
  run_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    auto model = seeded(1, [] { return chain(3, kWidth); });
    auto reference = seeded(1, [] { return chain(3, kWidth); });
    FullyShardedDataParallel fsdp(model, comm, per_linear());
    at::Tensor kept;
    bool writes = false;
    model[4]->as<torch::nn::Linear>()->weight.register_hook([&](const at::Tensor& gradient) { kept = gradient; });
    model[2]->as<torch::nn::Linear>()->weight.register_hook([&](const at::Tensor&) {
      if (writes) kept.data().mul_(2);
    });
    torch::optim::SGD optimizer(fsdp.parameters(), 0.1), expected(reference->parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      writes = step == 1;
      optimizer.zero_grad();
      const at::Tensor loss = fsdp(input(0, 4, kWidth)).square().mean();
      loss.backward();
      optimizer.step();
      expected.zero_grad();
      reference->forward(input(0, 4, kWidth)).square().mean().backward();
      expected.step();
    }
    const auto state = fsdp.full_state_dict();
    for (const auto& entry : reference->named_parameters())
      EXPECT_TRUE(same_values(state[entry.key()], entry.value())) << entry.key();
  });
}

// Writes have no effect either if the hook keeps a view of the gradient.
TEST(Usage, AGradientOfWhichAViewIsKeptTravelsAsItWas) {
  constexpr int64_t kWidth = 260;  // 264 KiB
  run_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    const auto gradients_of = [&](bool writes) {
      auto model = seeded(1, [] { return chain(3, kWidth); });
      FullyShardedDataParallel fsdp(model, comm, per_linear());
      at::Tensor view;
      model[4]->as<torch::nn::Linear>()->weight.register_hook(
          [&](const at::Tensor& gradient) { view = gradient.narrow(0, 0, 1); });
      model[2]->as<torch::nn::Linear>()->weight.register_hook([&](const at::Tensor&) {
        if (writes) view.data().fill_(7);
      });
      fsdp(input(0, 4, kWidth)).square().mean().backward();
      std::vector<at::Tensor> gradients;
      for (const at::Tensor& parameter : fsdp.parameters()) gradients.push_back(parameter.grad().clone());
      return gradients;
    };
    const auto expected = gradients_of(false), got = gradients_of(true);
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(torch::equal(got[i], expected[i])) << i;
  });
}

TEST(Usage, AutogradGradGivesFullGradients) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    auto model = seeded(1, [] { return chain(2, 8); });
    auto reference = seeded(1, [] { return chain(2, 8); });
    FullyShardedDataParallel fsdp(model, comm, per_linear());
    auto got = torch::autograd::grad({fsdp(input(0)).sum()}, {model->parameters()[0]});
    auto expected = torch::autograd::grad({reference->forward(input(0)).sum()}, {reference->parameters()[0]});
    EXPECT_TRUE(same_values(got[0], expected[0]));
  });
}

// parameters() returns shards whose requires_grad follows the module's parameters, before any forward.
TEST(Usage, ParametersThatAreFrozenInTheModuleAreFrozenInTheShards) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    auto model = seeded(1, [] { return chain(2, 8); });
    FullyShardedDataParallel fsdp(model, comm, per_linear());
    for (auto& parameter : model->parameters()) parameter.requires_grad_(false);
    for (auto& shard : fsdp.parameters()) EXPECT_FALSE(shard.requires_grad());
    for (auto& shard : fsdp.parameters()) shard.requires_grad_(true);  // unfreezes by way of the shards
    fsdp(input(0)).sum().backward();
    for (auto& shard : fsdp.parameters()) EXPECT_TRUE(shard.grad().defined());
    fsdp.zero_grad();
    auto shards = fsdp.parameters();
    for (auto& shard : shards) shard.requires_grad_(false);
    EXPECT_FALSE(fsdp.parameters()[0].requires_grad());
    for (auto& parameter : model->parameters()) {
      EXPECT_FALSE(parameter.requires_grad());  // parameters() has updated it
      parameter.requires_grad_(true);
    }
    fsdp(input(0)).sum().backward();
    for (auto& shard : shards) EXPECT_TRUE(shard.grad().defined());
  });
}

// ---- memory and traffic

TEST(Usage, AtMostTwoUnitsAndThePrefetchedAreGathered) {
  for (int prefetch : {0, 1, 2, 3}) {
    on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      FsdpOptions options = per_linear();
      options.prefetch = prefetch;
      FullyShardedDataParallel fsdp(chain(10, 32), comm, options);
      const int64_t unit_bytes = fsdp.memory().largest_unit_bytes;
      EXPECT_EQ(unit_bytes, 4 * (32 * 32 + 32));
      for (int step = 0; step < 3; ++step) fsdp(input(0, 2, 32)).sum().backward();
      EXPECT_EQ(fsdp.memory().peak_gathered_bytes, (2 + prefetch) * unit_bytes);
      EXPECT_EQ(fsdp.memory().gathered_bytes, 0);
      EXPECT_LE(fsdp.memory().peak_bucket_bytes, 3 * unit_bytes);
      EXPECT_EQ(fsdp.memory().shard_bytes, 10 * unit_bytes / 2);
      EXPECT_EQ(fsdp.memory().grad_bytes, 10 * unit_bytes / 2);
      {
        torch::NoGradGuard no_grad;
        fsdp.reset_peak_memory();
        fsdp(input(0, 2, 32));
        EXPECT_EQ(fsdp.memory().peak_gathered_bytes, (2 + prefetch) * unit_bytes);
      }
    });
  }
}

TEST(Usage, AGradientThatComesLaterThanItsUnitsOthersIsCounted) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    const auto model = chain(2, 32);
    FullyShardedDataParallel fsdp(model, comm);
    const auto backward = [&](bool trains) {
      model->parameters()[0].requires_grad_(trains);
      fsdp(input(0, 2, 32)).sum().backward();
    };
    backward(false);
    const int64_t before = fsdp.memory().grad_bytes;
    backward(true);
    EXPECT_EQ(fsdp.memory().grad_bytes, before + static_cast<int64_t>(fsdp.parameters()[0].grad().nbytes()));
  });
}

// If an all-gather moves data only in wait(), a prefetch would only cost memory.
TEST(Usage, LargeUnitsWaitWhereRanksReadEachOthersMemory) {
  for (const bool in_memory : {true, false}) {
    SCOPED_TRACE(in_memory ? "in memory" : "by TCP");
    const auto body = [&](std::shared_ptr<Communicator> comm) {
      FsdpOptions options = per_linear();
      options.prefetch = 2;
      FullyShardedDataParallel fsdp(chain(8, 260), comm, options);
      const int64_t unit_bytes = fsdp.memory().largest_unit_bytes;
      EXPECT_EQ(comm->is_lazy(unit_bytes / 4), in_memory);
      for (int step = 0; step < 2; ++step) {
        fsdp.reset_peak_memory();
        fsdp(input(0, 2, 260)).sum().backward();
        const int most_units = in_memory ? 2 : 3 + step;
        EXPECT_EQ(fsdp.memory().peak_gathered_bytes, most_units * unit_bytes);
        EXPECT_EQ(fsdp.memory().peak_bucket_bytes < 3 * unit_bytes / 2, in_memory);
      }
    };
    run_ranks(2, body, {.peer_memory = in_memory});
  }
}

// As backward begins, a large unit is evicted if there are many units. Ranks may use two units in turn different
// numbers of times.
TEST(Usage, LargeUnitsThatAreUsedInTurnStayGathered) {
  // Backward does not use the first layer's weight.
  for (const auto& [units, gathers] : std::vector<std::pair<int, int>>{{2, 2}, {7, 7 + 4}, {8, 8 + 6}}) {
    SCOPED_TRACE(units);
    const auto body = [units = units, gathers = gathers](std::shared_ptr<Communicator> comm) {
      std::vector<torch::nn::Linear> layers;
      torch::nn::Sequential model;
      for (int i = 0; i < units; ++i) {
        layers.emplace_back(260, 260);
        model->push_back(layers.back());
      }
      FullyShardedDataParallel fsdp(on_rank_device(model), comm, per_linear());
      const int turns = 1 + comm->rank();
      const auto gathers_of_step = [&] {
        const auto before = comm->traffic().sent_bytes;
        at::Tensor x = fsdp(input(0, 2, 260));
        for (int turn = 0; turn < turns; ++turn) x = layers[units - 1](layers[units - 2](x));
        x.sum().backward();
        return (comm->traffic().sent_bytes - before) / (fsdp.memory().largest_unit_bytes / 2) - units;  // reductions
      };
      for (int step = 0; step < 3; ++step) EXPECT_EQ(gathers_of_step(), gathers);
    };
    run_ranks(2, body);
  }
}

TEST(Usage, EachUnitIsGatheredOnceInForwardAndOnceInBackward) {
  for (bool reshard : {true, false}) {
    on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      FsdpOptions options = per_linear();
      options.reshard_after_forward = reshard;
      FullyShardedDataParallel fsdp(chain(10, 32), comm, options);
      for (int step = 0; step < 2; ++step) {
        const auto before = comm->traffic().sent_bytes;
        fsdp(input(0, 2, 32)).sum().backward();
        const auto sent = comm->traffic().sent_bytes - before;
        // Two units are still unsharded when backward begins; on a device, one. Backward does not use the first layer's
        // weight, but the first backward prefetches it.
        const auto gathers = reshard ? 10 + (comm->device().is_cpu() ? 8 : 9) - step : 10;
        EXPECT_EQ(sent / (fsdp.memory().largest_unit_bytes / 2), gathers + 10);
      }
    });
  }
}

TEST(Usage, AUsersParameterHookSeesTheFullGradient) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    auto model = seeded(1, [] { return chain(1, 8); });
    FullyShardedDataParallel fsdp(model, comm);
    std::vector<int64_t> seen;
    auto weight = model->parameters()[0];
    weight.register_hook([&](const at::Tensor& gradient) { seen = gradient.sizes().vec(); });
    fsdp(input(0)).sum().backward();
    EXPECT_EQ(seen, (std::vector<int64_t>{8, 8}));
  });
}

}  // namespace
}  // namespace tessera::usage_test
