// L-BFGS against torch's, also on shards.
#include "tests/support/reference.h"
#include "tests/support/temporary_folder.h"

namespace tessera::lbfgs_test {
using namespace internal;
namespace {

using namespace testing_support;

torch::nn::Sequential model() {
  auto net = seeded(
      3, [] { return torch::nn::Sequential(torch::nn::Linear(4, 7), torch::nn::Tanh(), torch::nn::Linear(7, 3)); });
  net->to(at::kDouble);
  return net;
}

template <class Net>
at::Tensor loss_of_part(Net& net, int rank) {
  const at::Tensor x = seeded(50 + rank, [] { return torch::randn({12, 4}, at::kDouble); });
  return (call(net, x) - x.narrow(1, 0, 3).sin()).square().mean();
}

struct Rule {
  bool strong_wolfe;
  double lr;
  int64_t history;
};
const std::vector<Rule> kRules{{true, 1, 100}, {true, 1, 3}, {false, 0.1, 5}};

// torch's LBFGS in one process, on the whole batch.
std::map<std::string, at::Tensor> reference(int world, const Rule& rule, int steps) {
  auto net = model();
  auto options = torch::optim::LBFGSOptions(rule.lr).max_iter(6).history_size(rule.history);
  if (rule.strong_wolfe) options.line_search_fn("strong_wolfe");
  torch::optim::LBFGS optimizer(net->parameters(), options);
  for (int step = 0; step < steps; ++step)
    optimizer.step([&] {
      optimizer.zero_grad();
      at::Tensor sum;
      for (int rank = 0; rank < world; ++rank) {
        const at::Tensor loss = loss_of_part(net, rank) / world;
        sum = rank == 0 ? loss : sum + loss;
      }
      sum.backward();
      return sum;
    });
  std::map<std::string, at::Tensor> values;
  for (const auto& item : net->named_parameters()) values[item.key()] = item.value().detach();
  return values;
}

template <class Wrapped>
void train(Wrapped& wrapped, torch::optim::Optimizer& optimizer, int steps) {
  for (int step = 0; step < steps; ++step)
    optimizer.step([&] {
      wrapped.zero_grad();
      at::Tensor loss = loss_of_part(wrapped, wrapped.comm()->rank());
      loss.backward();
      return loss;
    });
}

template <class Wrapped>
void expect_near(Wrapped& wrapped, const std::map<std::string, at::Tensor>& expected, const std::string& where) {
  auto state = wrapped.full_state_dict();
  for (const auto& [name, value] : expected)
    EXPECT_TRUE(torch::allclose(state[name], value, 1e-5, 1e-7))
        << where << " " << name << " " << (state[name] - value).abs().max().template item<double>();
}

LbfgsOptions options_of(const Rule& rule) {
  return LbfgsOptions(rule.lr).max_iter(6).history_size(rule.history).strong_wolfe(rule.strong_wolfe);
}

TEST(Lbfgs, IsTorchsOnShardsAndOnCopies) {
  for (const Rule& rule : kRules) {
    for (int world = 1; world <= 5; world += rule.strong_wolfe && rule.history == 100 ? 1 : 2) {
      const auto expected = reference(world, rule, 4);
      on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
        const std::string where = "world " + std::to_string(world) + " history " + std::to_string(rule.history);
        FullyShardedDataParallel fsdp(model(), comm, {.auto_wrap = wrap_modules<torch::nn::LinearImpl>()});
        Lbfgs sharded(fsdp, options_of(rule));
        train(fsdp, sharded, 4);
        expect_near(fsdp, expected, where + " FSDP");
        DistributedDataParallel ddp(model(), comm);
        Lbfgs copied(ddp, options_of(rule));
        train(ddp, copied, 4);
        expect_near(ddp, expected, where + " DDP");
        auto net = model();
        OSS<Lbfgs> owned(net->parameters(), options_of(rule), comm);
        ShardedDataParallel sdp(net, owned, comm);
        train(sdp, owned, 4);
        expect_near(sdp, expected, where + " OSS and SDP");
        for (const at::Tensor& parameter : net->parameters())
          EXPECT_EQ(owned.state().count(parameter.unsafeGetTensorImpl()) > 0, owned.owns(parameter)) << where;
      });
    }
  }
  const auto expected = reference(4, kRules[0], 4);
  on_ranks(4, [&](std::shared_ptr<Communicator> comm) {
    FullyShardedDataParallel fsdp(model(), comm, {.hybrid = {.ranks_per_copy = 2}});
    Lbfgs sharded(fsdp, options_of(kRules[0]));
    train(fsdp, sharded, 4);
    expect_near(fsdp, expected, "copies of 2");
  });
}

// Each world computes the batch of 2 ranks. A parameter is frozen in the first step; its owner, and a rank that owns
// nothing, receive the number of iterations from the others.
TEST(Lbfgs, CheckpointsGoOnAtAnyWorldSizeInAnyStage) {
  const TemporaryFolder folder;
  const Rule rule = kRules[1];
  auto net_loss = [](auto& net) { return (loss_of_part(net, 0) + loss_of_part(net, 1)) / 2; };
  auto steps = [&](int world, int stage, int first, int last, const std::string& load, const std::string& save) {
    std::map<std::string, at::Tensor> result;
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      ZeroOptions options{.stage = stage};
      options.fsdp.auto_wrap = wrap_modules<torch::nn::LinearImpl>();
      auto net = model();
      auto wrapped = zero(net, options_of(rule), comm, options);
      if (!load.empty()) load_checkpoint(folder / load, wrapped, wrapped.optimizer());
      for (int step = first; step < last; ++step) {
        net->parameters()[0].set_requires_grad(step > 0);
        wrapped.parameters()[0].set_requires_grad(step > 0);
        wrapped.step([&] {
          wrapped.zero_grad();
          at::Tensor loss = net_loss(wrapped);
          loss.backward();
          return loss;
        });
      }
      if (!save.empty()) save_checkpoint(folder / save, wrapped, wrapped.optimizer());
      auto state = wrapped.full_state_dict();
      if (comm->rank() == 0)
        for (const auto& item : state) result[item.key()] = item.value();
    });
    return result;
  };
  const auto expected = steps(1, 0, 0, 5, "", "");
  steps(3, 3, 0, 1, "", "a");
  steps(2, 2, 1, 2, "a", "b");
  steps(1, 0, 2, 3, "b", "c");
  steps(5, 1, 3, 4, "c", "d");
  for (const auto& [name, value] : steps(2, 3, 4, 5, "d", ""))
    EXPECT_TRUE(torch::allclose(value, expected.at(name), 1e-5, 1e-7))
        << name << (value - expected.at(name)).abs().max().item<double>();
  for (const int stage : {2, 3})
    for (const auto& [name, value] : steps(5, stage, 0, 5, "", ""))
      EXPECT_TRUE(torch::allclose(value, expected.at(name), 1e-5, 1e-7)) << stage << name;
}

// If a closure throws during a search, the parameters stay at the search's point, in one process too.
// A layer is frozen and thawed through the module between two steps: shards learn of it in the closure's forward.
TEST(Lbfgs, FollowsTheModulesFreezingBetweenSteps) {
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    auto train_in_turns = [](auto& wrapped) {
      Lbfgs optimizer(wrapped, options_of(kRules[2]));
      for (const bool trains : {true, false, true}) {
        for (at::Tensor& parameter : wrapped.module()[0]->parameters()) parameter.set_requires_grad(trains);
        train(wrapped, optimizer, 2);
      }
    };
    DistributedDataParallel ddp(model(), comm);
    train_in_turns(ddp);
    std::map<std::string, at::Tensor> expected;
    for (const auto& item : ddp.full_state_dict()) expected[item.key()] = item.value();
    FullyShardedDataParallel fsdp(model(), comm, {.auto_wrap = wrap_modules<torch::nn::LinearImpl>()});
    train_in_turns(fsdp);
    expect_near(fsdp, expected, "FSDP");
  });
}

TEST(Lbfgs, GoesOnAfterAClosureThatThrew) {
  auto trained = [](int world, int stage) {
    std::map<std::string, at::Tensor> result;
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      ZeroOptions options{.stage = stage};
      options.fsdp.auto_wrap = wrap_modules<torch::nn::LinearImpl>();
      auto wrapped = zero(model(), options_of(kRules[0]), comm, options);
      auto loss = [&] { return (loss_of_part(wrapped, 0) + loss_of_part(wrapped, 1)) / 2; };
      int calls = 0;
      auto closure = [&] {
        wrapped.zero_grad();
        if (++calls == 10) throw std::runtime_error("the user's own");
        at::Tensor value = loss();
        value.backward();
        return value;
      };
      int caught = 0;
      for (int step = 0; step < 4; ++step) {
        try {
          wrapped.step(closure);
        } catch (const std::exception& error) {
          expect_contains(error.what(), "the user's own");
          ++caught;
        }
        const torch::NoGradGuard no_grad;
        EXPECT_TRUE(std::isfinite(loss().template item<double>()));
      }
      EXPECT_EQ(caught, 1);
      auto state = wrapped.full_state_dict();
      if (comm->rank() == 0)
        for (const auto& item : state) result[item.key()] = item.value();
    });
    return result;
  };
  const auto expected = trained(1, 0);
  for (const int stage : {0, 1, 2, 3})
    for (const auto& [name, value] : trained(3, stage))
      EXPECT_TRUE(torch::allclose(value, expected.at(name), 1e-5, 1e-7)) << stage << name;
}

// Through zero(), with gradients of two micro-batches, and offloaded parameters.
TEST(Lbfgs, StepsThroughZeroWithAccumulationAndOffload) {
  const auto expected = reference(2, kRules[0], 3);
  for (const bool offload : {false, true})
    for (const int stage : {0, 1, 2, 3}) {
      if (offload && stage < 3) continue;
      on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
        ZeroOptions options{.stage = stage};
        options.fsdp = {.auto_wrap = wrap_modules<torch::nn::LinearImpl>()};
        options.fsdp.offload = {.params = offload, .grads = offload};
        auto wrapped = zero(model(), options_of(kRules[0]), comm, options);
        for (int step = 0; step < 3; ++step)
          wrapped.step([&] {
            wrapped.zero_grad();
            {
              auto accumulating = wrapped.no_sync();
              (loss_of_part(wrapped, comm->rank()) / 2).backward();
            }
            (loss_of_part(wrapped, comm->rank()) / 2).backward();
            at::NoGradGuard no_grad;
            return loss_of_part(wrapped, comm->rank());
          });
        expect_near(wrapped, expected, "stage " + std::to_string(stage));
      });
    }
}

// fp32 masters of a bf16 computation: losses and gradients are rounded, and ranks still take equal steps.
TEST(Lbfgs, KeepsRanksTogetherInMixedPrecision) {
  on_ranks(3, [&](std::shared_ptr<Communicator> comm) {
    auto net = model();
    net->to(at::kFloat);
    FullyShardedDataParallel fsdp(net, comm,
                                  {.auto_wrap = wrap_modules<torch::nn::LinearImpl>(),
                                   .mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
    Lbfgs optimizer(fsdp, options_of(kRules[0]));
    int calls = 0;
    double first = 0, last = 0;
    for (int step = 0; step < 4; ++step)
      optimizer.step([&] {
        ++calls;
        fsdp.zero_grad();
        const at::Tensor x = seeded(50 + comm->rank(), [] { return torch::randn({12, 4}); });
        at::Tensor loss = (fsdp(x).to(at::kFloat) - x.narrow(1, 0, 3).sin()).square().mean();
        loss.backward();
        if (calls == 1) first = loss.item<double>();
        last = loss.item<double>();
        return loss;
      });
    EXPECT_LT(last, first);
    at::Tensor most = torch::tensor({calls, -calls});
    comm->all_reduce(most, ReduceOp::kMax).wait();
    EXPECT_EQ(most[0].item<int>(), -most[1].item<int>());
  });
}

TEST(Lbfgs, TorchsIsRefusedByZero) {
  run_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    for (const int stage : {0, 1, 2, 3})
      expect_contains(error_of<std::invalid_argument>([&] {
                        zero<torch::optim::LBFGS>(model(), torch::optim::LBFGSOptions(1), comm, {.stage = stage});
                      }),
                      "LBFGS>: its line searches follow this rank's loss");
  });
}

TEST(Lbfgs, MistakesAreNamed) {
  auto weight = torch::ones({3}).set_requires_grad(true);
  Lbfgs lbfgs({weight});
  expect_contains(error_of<std::invalid_argument>([&] { lbfgs.step(); }), "expected a closure");
  expect_contains(error_of<std::invalid_argument>([&] { lbfgs.step([] { return at::Tensor(); }); }), "no loss");
  expect_contains(error_of<std::invalid_argument>([&] { Lbfgs other({weight}, LbfgsOptions(1).history_size(101)); }),
                  "Lbfgs: history_size is 101, expected 1 to 100");
  run_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    for (const OssOptions& options :
         {OssOptions{.broadcast_dtype = at::kBFloat16}, OssOptions{.offload = {.params = true}}})
      expect_contains(
          error_of<std::invalid_argument>([&] { OSS<Lbfgs> oss({weight}, LbfgsOptions(1), comm, options); }),
          "OSS<Lbfgs> with OssOptions::broadcast_dtype or offload");
    auto own = torch::ones({3}).set_requires_grad(true), other = torch::ones({2}, at::kDouble).set_requires_grad(true);
    OSS<Lbfgs> oss({own, other}, LbfgsOptions(1), comm);
    expect_contains(error_of<std::invalid_argument>([&] { oss.step(); }), "expected a closure");
    expect_contains(error_of<std::invalid_argument>([&] { oss.step([&] { return own.sum(); }); }), "several dtypes");
  });
}

}  // namespace
}  // namespace tessera::lbfgs_test
