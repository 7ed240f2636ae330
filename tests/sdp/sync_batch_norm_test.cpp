// Batch norm over all ranks' batches, against one process with the whole.
#include "tests/support/reference.h"

namespace tessera::sync_batch_norm_test {
namespace {

using namespace testing_support;

constexpr int64_t kChannels = 3;

// Ranks have different numbers of rows, one has none.
int64_t rows(int rank) { return rank == 2 ? 0 : 2 + rank; }
at::Tensor part(int rank, const std::vector<int64_t>& rest, int step) {
  std::vector<int64_t> sizes{rows(rank), kChannels};
  sizes.insert(sizes.end(), rest.begin(), rest.end());
  return seeded(100 * step + rank, [&] { return torch::randn(sizes, at::kDouble) * 3 + 1; });
}
at::Tensor loss_of(const at::Tensor& y) { return (y * y.cos()).sum(); }

torch::nn::BatchNorm2d plain(const torch::nn::BatchNormOptions& options) {
  torch::nn::BatchNorm2d norm(options);
  norm->to(at::kDouble);
  return norm;
}

template <class Norm>
void set_weights(Norm& norm) {
  torch::NoGradGuard no_grad;
  if (!norm->weight.defined()) return;
  norm->weight.copy_(torch::tensor({0.5, 1.5, -2.0}));
  norm->bias.copy_(torch::tensor({0.1, 0.2, 0.3}));
}

TEST(SyncBatchNorm, IsBatchNormOfTheWholeBatch) {
  using Options = torch::nn::BatchNormOptions;
  const std::vector<Options> kinds{Options(kChannels), Options(kChannels).momentum(std::nullopt),
                                   Options(kChannels).affine(false), Options(kChannels).track_running_stats(false)};
  for (int world = 1; world <= 5; ++world) {
    for (const Options& options : kinds) {
      for (const std::vector<int64_t>& rest : {std::vector<int64_t>{}, {4, 5}}) {
        on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
          SyncBatchNorm own(options, *comm);
          own->to(at::kDouble);
          auto whole = plain(options);
          set_weights(own), set_weights(whole);
          for (int step = 0; step < 3; ++step) {
            std::vector<at::Tensor> parts;
            for (int rank = 0; rank < world; ++rank) parts.push_back(part(rank, rest, step));
            at::Tensor all = torch::cat(parts).set_requires_grad(true);
            at::Tensor x = parts[comm->rank()].clone().set_requires_grad(true);
            // BatchNorm2d wants 4 dimensions.
            const at::Tensor expected =
                rest.empty() ? whole(all.unsqueeze(2).unsqueeze(3)).squeeze(3).squeeze(2) : whole(all);
            const at::Tensor y = own(x);
            own->zero_grad(), whole->zero_grad();
            loss_of(y).backward();
            loss_of(expected).backward();
            int64_t begin = 0;
            for (int rank = 0; rank < comm->rank(); ++rank) begin += rows(rank);
            EXPECT_TRUE(torch::allclose(y, expected.narrow(0, begin, x.size(0)), 1e-9, 1e-9));
            EXPECT_TRUE(torch::allclose(x.grad(), all.grad().narrow(0, begin, x.size(0)), 1e-9, 1e-9));
            if (own->weight.defined()) {
              at::Tensor sums = torch::stack({own->weight.grad(), own->bias.grad()});
              comm->all_reduce(sums).wait();
              EXPECT_TRUE(torch::allclose(sums, torch::stack({whole->weight.grad(), whole->bias.grad()}), 1e-9, 1e-9));
            }
            if (own->running_mean.defined()) {
              EXPECT_TRUE(torch::allclose(own->running_mean, whole->running_mean, 1e-9, 1e-9));
              EXPECT_TRUE(torch::allclose(own->running_var, whole->running_var, 1e-9, 1e-9));
              EXPECT_EQ(own->num_batches_tracked.item<int64_t>(), step + 1);
            }
          }
          if (!own->running_mean.defined()) return;
          own->eval(), whole->eval();
          const at::Tensor x = torch::randn({2, kChannels, 4, 5}, at::kDouble);
          EXPECT_TRUE(torch::allclose(own(x), whole(x), 1e-9, 1e-9));
        });
      }
    }
  }
}

struct InnerImpl : torch::nn::Module {
  InnerImpl() {
    inner_ = register_module("inner", torch::nn::Sequential(torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 4, 3)),
                                                            torch::nn::BatchNorm2d(4)));
  }
  at::Tensor forward(at::Tensor x) { return inner_->forward(x); }

 private:
  torch::nn::Sequential inner_{nullptr};
};

// Converted, under a wrapper: the whole batch in one process, to rounding.
TEST(SyncBatchNorm, ConvertedModelsTrainAsOneProcess) {
  auto make = [] {
    return seeded(1, [] {
      return torch::nn::Sequential(std::make_shared<InnerImpl>(), torch::nn::ReLU(), torch::nn::Flatten(),
                                   torch::nn::Linear(16, 5), torch::nn::BatchNorm1d(5));
    });
  };
  auto batch = [](int rank, int step) { return seeded(10 * step + rank, [] { return torch::randn({6, 3, 4, 4}); }); };
  for (const int stage : {0, 2, 3}) {
    on_ranks(3, [&](std::shared_ptr<Communicator> comm) {
      auto reference = make(), net = make();
      EXPECT_EQ(convert_sync_batch_norm(*net, *comm), 2);
      torch::optim::SGD whole(reference->parameters(), 0.1);
      auto model = zero(net, torch::optim::SGDOptions(0.1), comm, {.stage = stage});
      for (int step = 0; step < 3; ++step) {
        model.zero_grad();
        whole.zero_grad();
        std::vector<at::Tensor> parts;
        for (int rank = 0; rank < 3; ++rank) parts.push_back(batch(rank, step));
        model(batch(comm->rank(), step)).sin().mean().backward();
        reference->forward(torch::cat(parts)).sin().mean().backward();
        model.step();
        whole.step();
      }
      auto state = model.full_state_dict();
      for (const auto& list : {reference->named_parameters(), reference->named_buffers()})
        for (const auto& item : list)
          EXPECT_TRUE(torch::allclose(state[item.key()], item.value(), 1e-4, 1e-5)) << stage << " " << item.key();
    });
  }
}

struct NetImpl : torch::nn::Module {
  NetImpl() { norm_ = register_module("norm", torch::nn::BatchNorm1d(4)); }
  at::Tensor forward(at::Tensor x) { return norm_(x); }

 private:
  torch::nn::BatchNorm1d norm_{nullptr};
};

TEST(SyncBatchNorm, MistakesAreNamed) {
  run_ranks(2, [](std::shared_ptr<Communicator> comm) {
    torch::nn::Sequential net(std::make_shared<NetImpl>(), torch::nn::BatchNorm1d(4));
    expect_contains(error_of<std::invalid_argument>([&] { convert_sync_batch_norm(*net, *comm); }),
                    "0.norm: a class calls its members");
    SyncBatchNorm norm(torch::nn::BatchNormOptions(4), *comm);
    expect_contains(error_of<std::invalid_argument>([&] { norm(torch::ones({2, 3})); }), "expected [N, 4, ...]");
    expect_contains(error_of<std::invalid_argument>([&] { norm(torch::ones({comm->rank() == 0 ? 1 : 0, 4})); }),
                    "1 values a channel");
    const at::Tensor x = torch::randn({3, 4}).set_requires_grad(true);
    const at::Tensor loss = norm(x).sin().sum();
    EXPECT_THROW(torch::autograd::grad({loss}, {x}, {}, std::nullopt, /*create_graph=*/true), std::logic_error);
  });
}

}  // namespace
}  // namespace tessera::sync_batch_norm_test
