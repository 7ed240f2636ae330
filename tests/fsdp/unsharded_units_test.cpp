// Prefetch and eviction, on one rank: units that are cast are sharded there, too.
#include "fsdp/scheduler.h"

#include "tests/fsdp/linear_chain.h"

namespace tessera::unsharded_units_test {
using namespace internal;
namespace {

using namespace testing_support;
using State = Unit::State;

struct FreePager : Pager {  // allows every use
  std::shared_ptr<void> use(const std::vector<Page*>&) override { return nullptr; }
  bool refuse(const Page& page, const at::Tensor&, const std::string&) override { throw std::logic_error(page.name()); }
};

struct Chain {
  Chain(const std::shared_ptr<Communicator>& comm, FsdpOptions options, int depth = 4) {
    options.auto_wrap = wrap_modules<torch::nn::LinearImpl>();
    options.mixed_precision.param_dtype = at::kBFloat16;
    module = chain(depth, 8);
    model.emplace(*module, comm, options, &pager);
    units.emplace(*model);
  }
  void use(int index, bool backward) {
    units->use({model->units()[index].get()}, Page::GradMode::kNone, backward);
    EXPECT_EQ(state(index), State::kUnsharded);
  }
  void forward() {
    units->pre_forward();
    for (int i = 0; i < static_cast<int>(model->units().size()); ++i) use(i, false);
  }
  State state(int index) const { return model->units()[index]->state(); }
  std::vector<int> in(State wanted) const {
    std::vector<int> found;
    for (int i = 0; i < static_cast<int>(model->units().size()); ++i)
      if (state(i) == wanted) found.push_back(i);
    return found;
  }

  FreePager pager;
  torch::nn::Sequential module{nullptr};
  std::optional<ShardedModel> model;
  std::optional<UnshardedUnits> units;
};

using Indices = std::vector<int>;

TEST(UnshardedUnitsTest, KeepsTheMostRecentOnes) {
  on_ranks(1, [](std::shared_ptr<Communicator> comm) {
    for (const int keep : {1, 2, 3}) {
      Chain chain(comm, {.prefetch = 0, .keep_recent = keep});
      chain.forward();
      const Indices kept[] = {{3}, {2, 3}, {1, 2, 3}};
      EXPECT_EQ(chain.in(State::kUnsharded), kept[keep - 1]);
      chain.use(3, true);  // again
      chain.units->reshard_all();
      EXPECT_EQ(chain.in(State::kSharded), (Indices{0, 1, 2, 3}));
    }
  });
}

TEST(UnshardedUnitsTest, OneOfManyIsLeftAfterForward) {
  on_ranks(1, [](std::shared_ptr<Communicator> comm) {
    for (const int depth : {7, 8}) {
      Chain chain(comm, {.keep_recent = 3}, depth);
      chain.forward();
      chain.units->post_forward();
      EXPECT_EQ(chain.in(State::kUnsharded), depth == 7 ? (Indices{4, 5, 6}) : Indices{7});
    }
  });
}

TEST(UnshardedUnitsTest, KeepsAllWithoutReshardAfterForward) {
  on_ranks(1, [](std::shared_ptr<Communicator> comm) {
    Chain chain(comm, {.reshard_after_forward = false});
    chain.forward();
    EXPECT_EQ(chain.in(State::kUnsharded), (Indices{0, 1, 2, 3}));
    chain.units->reshard(*chain.model->units()[1]);
    EXPECT_EQ(chain.in(State::kSharded), Indices{1});
  });
}

TEST(UnshardedUnitsTest, PrefetchesInTheOrderOfTheLastPass) {
  on_ranks(1, [](std::shared_ptr<Communicator> comm) {
    Chain chain(comm, {.prefetch = 1, .keep_recent = 1});
    chain.forward();  // the order is not known yet
    EXPECT_EQ(chain.in(State::kUnsharded), Indices{3});
    chain.units->pre_backward();  // expects the reverse of forward
    chain.use(3, true);
    EXPECT_EQ(chain.in(State::kUnsharding), Indices{2});
    chain.use(2, true);
    EXPECT_EQ(chain.in(State::kUnsharding), Indices{1});
    chain.use(0, true);  // skips unit 1, whose prefetch stays in flight
    EXPECT_EQ(chain.in(State::kUnsharding), Indices{1});
    chain.units->post_backward(/*accumulates=*/false);
    chain.units->reshard_all();
    EXPECT_EQ(chain.in(State::kSharded), (Indices{0, 1, 2, 3}));
    chain.units->pre_forward();
    chain.use(0, false);
    EXPECT_EQ(chain.in(State::kUnsharding), Indices{1});
    chain.units->pre_forward();  // another forward reshards an unused prefetch
    EXPECT_EQ(chain.in(State::kUnsharding), Indices{});
  });
}

TEST(UnshardedUnitsTest, ReshardsAStaleUnitBeforeItsUse) {
  on_ranks(1, [](std::shared_ptr<Communicator> comm) {
    Chain chain(comm, {});
    chain.forward();
    torch::NoGradGuard no_grad;
    for (auto& paged : chain.model->units()[3]->flat_parameters()) paged->flat.shard().fill_(2);
    chain.use(3, false);
    const auto weight = chain.module->parameters()[6];
    EXPECT_TRUE((weight + 0).eq(2).all().item<bool>());
  });
}

}  // namespace
}  // namespace tessera::unsharded_units_test
