// Gradients from before wrapping or without a reduction, sparse or complex: every stage treats them as one process.
#include <limits>

#include "tests/support/reference.h"

namespace tessera::stage_gradients_test {
using namespace internal;
namespace {

using namespace testing_support;

template <class Body>
void in_every_stage(Body body) {
  for (const int world : {1, 2, 3})
    for (int stage = 0; stage <= 3; ++stage)
      on_ranks(world, [&](std::shared_ptr<Communicator> comm) { body(comm, stage); });
}

struct ScaleImpl : torch::nn::Module {
  explicit ScaleImpl(const at::Tensor& start) : weight(register_parameter("weight", start)) {}
  at::Tensor forward(at::Tensor x) { return (weight * x).sum(); }
  at::Tensor weight;
};
TORCH_MODULE(Scale);

TEST(StageGradients, ThoseFromBeforeWrappingStay) {
  in_every_stage([](const std::shared_ptr<Communicator>& comm, int stage) {
    for (const bool sparse : {false, true}) {
      Scale net(torch::ones({1}));
      net->weight.mutable_grad() = sparse ? torch::full({1}, 10.0).to_sparse() : torch::full({1}, 10.0);
      auto model = zero(net, torch::optim::SGDOptions(0.01), comm, {.stage = stage});
      model(torch::ones({1})).backward();
      model.step();
      EXPECT_NEAR(model.full_state_dict()["weight"].item<double>(), 0.89, 1e-6) << comm->size() << " " << stage;
    }
  });
}

TEST(StageGradients, SparseOnesFromBeforeWrappingAreClippedAndSteppedAtOnce) {
  in_every_stage([](const std::shared_ptr<Communicator>& comm, int stage) {
    for (const double type : {2.0, std::numeric_limits<double>::infinity()}) {
      Scale net(torch::ones({1}));
      net->weight.mutable_grad() = torch::full({1}, 10.0).to_sparse();
      auto model = zero(net, torch::optim::SGDOptions(0.1).momentum(0.5), comm, {.stage = stage});
      EXPECT_NEAR(model.clip_grad_norm_(1.0, type), 10, 1e-5);
      model.step();
      model.zero_grad();
      model(torch::ones({1})).backward();
      model.step();
      EXPECT_NEAR(model.full_state_dict()["weight"].item<double>(), 1 - 0.1 - 0.15, 1e-5)
          << comm->size() << " " << stage;
    }
  });
}

// torch's optimizers step a frozen parameter as long as it has a gradient.
TEST(StageGradients, OfAFrozenParameterFromBeforeWrappingAreSteppedOnAllRanks) {
  in_every_stage([](const std::shared_ptr<Communicator>& comm, int stage) {
    Scale net(torch::ones({1}));
    net->register_parameter("frozen", torch::ones({3}), false).mutable_grad() = torch::full({3}, 10.0);
    auto model = zero(net, torch::optim::SGDOptions(0.01), comm, {.stage = stage});
    model(torch::ones({1})).backward();
    model.step();
    EXPECT_TRUE(torch::allclose(model.full_state_dict()["frozen"], torch::full({3}, 0.9)))
        << comm->size() << " " << stage;
  });
}

TEST(StageGradients, RanksWithOthersFromBeforeWrappingAreRefused) {
  for (const int stage : {0, 3})
    on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      for (const bool only_one : {false, true}) {
        Scale net(torch::ones({1}));
        if (!only_one || comm->rank() == 0) net->weight.mutable_grad() = torch::full({1}, 10.0 + comm->rank());
        expect_contains(error_of<std::invalid_argument>(
                            [&] { auto model = zero(net, torch::optim::SGDOptions(0.01), comm, {.stage = stage}); }),
                        "a gradient of 'weight' with the checksum");
      }
    });
}

TEST(StageGradients, SparseOnesArriveDenseAlsoUnderNoSync) {
  in_every_stage([](const std::shared_ptr<Communicator>& comm, int stage) {
    const int world = comm->size();
    auto make = [] {
      return seeded(3, [] { return torch::nn::Embedding(torch::nn::EmbeddingOptions(6, 4).sparse(true)); });
    };
    auto ids = [](int rank, int step) { return torch::tensor({rank % 6, (rank + step) % 6, 5}); };
    auto net = make(), reference = make();
    auto model = zero<tessera::SGD>(net, torch::optim::SGDOptions(0.1), comm, {.stage = stage});
    auto loss_of = [](const at::Tensor& rows) { return rows.square().sum(); };
    torch::optim::SGD whole(reference->parameters(), 0.1);
    for (int step = 0; step < 2; ++step) {
      model.zero_grad();
      whole.zero_grad();
      {
        auto scope = model.no_sync();
        loss_of(model(ids(comm->rank(), 1))).backward();
      }
      loss_of(model(ids(comm->rank(), 2))).backward();
      for (const at::Tensor& parameter : model.parameters())
        EXPECT_TRUE(!parameter.grad().defined() || parameter.grad().layout() == at::kStrided);
      model.step();
      at::Tensor sum;
      for (int rank = 0; rank < world; ++rank)
        for (const int part : {1, 2}) {
          const at::Tensor loss = loss_of(reference(ids(rank, part))) / world;
          sum = sum.defined() ? sum + loss : loss;
        }
      sum.backward();
      whole.step();
    }
    EXPECT_TRUE(torch::allclose(model.full_state_dict()["weight"], reference->weight, 1e-6, 1e-6))
        << world << " " << stage;
  });
}

struct UnevenImpl : ScaleImpl {
  UnevenImpl() : ScaleImpl(torch::ones({1})), other(register_parameter("other", torch::ones({1}))) {}
  at::Tensor forward(at::Tensor x, bool uses_other) {
    const at::Tensor sum = ScaleImpl::forward(x);
    return uses_other ? sum + (other * x).sum() : sum;
  }
  at::Tensor other;
};
TORCH_MODULE(Uneven);

// A letter is a backward: (n) under no_sync(), (b) with a reduction, upper case if the last rank uses all parameters.
TEST(StageGradients, OfAParameterThatOneRankUsesAddUpWithAverages) {
  in_every_stage([](const std::shared_ptr<Communicator>& comm, int stage) {
    const int world = comm->size();
    for (const std::string passes : {"BNB", "BNb", "Bnb", "bNb", "BbNNb", "BNbNB"}) {
      ZeroOptions options{.stage = stage};
      options.ddp.find_unused_parameters = true;
      auto model = zero(Uneven(), torch::optim::SGDOptions(1), comm, options);
      double uses = 0;
      for (const char pass : passes) {
        const bool uses_other = pass < 'a';
        auto backward = [&] {
          model(torch::full({1}, 0.5 * world), uses_other && comm->rank() == world - 1).backward();
        };
        if (pass == 'n' || pass == 'N') {
          auto scope = model.no_sync();
          backward();
        } else {
          backward();
        }
        uses += uses_other ? 0.5 : 0;
      }
      model.step();
      EXPECT_NEAR(model.full_state_dict()["other"].item<double>(), 1 - uses, 1e-6)
          << passes << " " << world << " " << stage;
      EXPECT_NEAR(model.full_state_dict()["weight"].item<double>(), 1 - 0.5 * world * passes.size(), 1e-5);
    }
  });
}

TEST(StageGradients, ComplexOnesAreUnscaledAndClipped) {
  in_every_stage([](const std::shared_ptr<Communicator>& comm, int stage) {
    const auto options = at::TensorOptions(at::kComplexDouble);
    const at::Tensor slopes = seeded(4, [&] { return torch::randn({7}, options); });
    struct RealImpl : ScaleImpl {
      using ScaleImpl::ScaleImpl;
      at::Tensor forward(at::Tensor x) { return at::real(ScaleImpl::forward(x)); }
    };
    using Real = torch::nn::ModuleHolder<RealImpl>;
    for (const bool is_finite : {true, false}) {
      auto model = zero(Real(torch::ones({7}, options)), torch::optim::SGDOptions(1), comm, {.stage = stage});
      ShardedGradScaler scaler(comm, {.initial_scale = 8});
      at::Tensor given = slopes.clone();
      if (!is_finite) given[6] = c10::complex<double>(0, INFINITY);
      scaler.scale(model(given)).backward();
      scaler.unscale_(model.optimizer());
      const double norm = model.clip_grad_norm_(1.0);
      EXPECT_TRUE(!is_finite || std::abs(norm - slopes.norm().item<double>()) < 1e-9) << norm;
      EXPECT_EQ(scaler.step(model.optimizer()), is_finite);
      const at::Tensor expected = 1 - (is_finite ? slopes.conj() / slopes.norm() : torch::zeros_like(slopes));
      EXPECT_TRUE(torch::allclose(model.full_state_dict()["weight"], expected, 1e-5, 1e-6)) << stage;
    }
  });
}

}  // namespace
}  // namespace tessera::stage_gradients_test
