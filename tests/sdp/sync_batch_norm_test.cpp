// Batch norm over all ranks' batches, against one process with the whole.
#include "tests/support/reference.h"

namespace tessera::sync_batch_norm_test {
using namespace internal;
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
            // BatchNorm2d needs 4 dimensions.
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

// As torchvision's ResNet in C++: batch norms are typed members; and in a ModuleList, and one that is used twice.
struct BlockImpl : torch::nn::Module {
  BlockImpl()
      : conv(register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 4, 3)))),
        bn1(register_module("bn1", torch::nn::BatchNorm2d(4))),
        bn2(register_module("bn2", torch::nn::BatchNorm2d(torch::nn::BatchNormOptions(4).track_running_stats(false)))),
        more(register_module("more", torch::nn::ModuleList(torch::nn::BatchNorm2d(
                                         torch::nn::BatchNormOptions(4).affine(false).momentum(std::nullopt))))) {}
  at::Tensor forward(at::Tensor x) {
    x = torch::relu(bn1(conv(x)));
    x = bn1(x.cos());
    return x + bn2(x).tanh() + more[0]->as<torch::nn::BatchNorm2dImpl>()->forward(x.sin());
  }
  torch::nn::Conv2d conv;
  torch::nn::BatchNorm2d bn1, bn2;
  torch::nn::ModuleList more;
};

struct HeadImpl : torch::nn::Module {
  HeadImpl(int64_t width, torch::nn::BatchNorm1d norm)
      : layers(register_module("layers", torch::nn::Sequential(torch::nn::Linear(width, 5), std::move(norm)))) {}
  at::Tensor forward(at::Tensor x) { return layers->forward(x); }
  torch::nn::Sequential layers;
};

// Converted, under a wrapper: the whole batch in one process, to rounding.
TEST(SyncBatchNorm, ConvertedModelsTrainAsOneProcess) {
  auto make = [] {
    return seeded(1, [] {
      torch::nn::BatchNorm1d shared(5);
      torch::nn::Sequential net(std::make_shared<BlockImpl>(), torch::nn::ReLU(), torch::nn::Flatten(),
                                std::make_shared<HeadImpl>(16, shared), std::make_shared<HeadImpl>(5, shared));
      net->to(at::kDouble);
      return net;
    });
  };
  auto batch = [](int rank, int step) {
    return seeded(10 * step + rank, [] { return torch::randn({6, 3, 4, 4}, at::kDouble); });
  };
  for (const int stage : {0, 2, 3}) {
    on_ranks(3, [&](std::shared_ptr<Communicator> comm) {
      auto reference = make(), net = make();
      EXPECT_EQ(convert_sync_batch_norm(*net, *comm), 4);
      EXPECT_EQ(convert_sync_batch_norm(*net, *comm), 0);  // all are converted
      EXPECT_EQ(net->parameters().size(), reference->parameters().size());
      torch::optim::SGD whole(unique_parameters(*reference), 0.1);
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
          EXPECT_TRUE(torch::allclose(state[item.key()], item.value(), 1e-9, 1e-9))
              << stage << " " << item.key() << " " << (state[item.key()] - item.value()).abs().max();
      reference->eval(), net->eval();
      at::NoGradGuard no_grad;
      EXPECT_TRUE(
          torch::allclose(model(batch(comm->rank(), 9)), reference->forward(batch(comm->rank(), 9)), 1e-9, 1e-9));
    });
  }
}

// Batch norms compute in fp32 beside bf16 layers, or in bf16 like them.
TEST(SyncBatchNorm, ConvertedModelsTrainInMixedPrecision) {
  auto make = [] {
    return seeded(1, [] {
      return torch::nn::Sequential(torch::nn::Linear(6, 8), torch::nn::BatchNorm1d(8), torch::nn::Tanh(),
                                   torch::nn::Linear(8, 2));
    });
  };
  auto batch = [](int rank, int step) { return seeded(10 * step + rank, [] { return torch::randn({16, 6}); }); };
  for (const bool in_bf16 : {false, true}) {
    on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      auto reference = make(), net = make();
      convert_sync_batch_norm(*net, *comm);
      torch::optim::SGD whole(reference->parameters(), 0.1);
      FsdpOptions options{.auto_wrap = wrap_modules<torch::nn::LinearImpl>()};
      options.mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
      if (in_bf16) options.mixed_precision.buffer_dtype = at::kBFloat16;
      FullyShardedDataParallel fsdp(net, comm, options);
      torch::optim::SGD optimizer(fsdp.parameters(), 0.1);
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        whole.zero_grad();
        fsdp(batch(comm->rank(), step)).to(at::kFloat).square().mean().backward();
        reference->forward(torch::cat({batch(0, step), batch(1, step)})).square().mean().backward();
        optimizer.step();
        whole.step();
      }
      auto state = fsdp.full_state_dict();
      for (const auto& list : {reference->named_parameters(), reference->named_buffers()})
        for (const auto& item : list)
          EXPECT_TRUE(torch::allclose(state[item.key()].to(at::kFloat), item.value().to(at::kFloat), 2e-2, 2e-2))
              << in_bf16 << " " << item.key() << state[item.key()] - item.value();
    });
  }
}

TEST(SyncBatchNorm, MistakesAreNamed) {
  run_ranks(2, [](std::shared_ptr<Communicator> comm) {
    using Options = torch::nn::BatchNormOptions;
    torch::nn::Sequential net(torch::nn::BatchNorm1d(4),
                              torch::nn::BatchNorm1d(Options(4).affine(false).track_running_stats(false)));
    expect_contains(error_of<std::invalid_argument>([&] { convert_sync_batch_norm(*net, *comm); }),
                    "convert_sync_batch_norm: 1: neither running statistics nor weights");
    torch::nn::BatchNorm1d converted(4);
    EXPECT_EQ(convert_sync_batch_norm(*converted, *comm), 1);
    EXPECT_TRUE(torch::equal(converted->running_mean + 1, torch::ones({4})));
    EXPECT_TRUE(torch::equal(converted->running_mean.t(), torch::zeros({4})));
    expect_contains(error_of<std::logic_error>([&] { converted->reset_running_stats(); }),
                    "'running_mean', which is a BatchNorm's over all ranks: only its values can be used");
    SyncBatchNorm norm(torch::nn::BatchNormOptions(4), *comm);
    expect_contains(error_of<std::invalid_argument>([&] { norm(torch::ones({2, 3})); }), "expected [N, 4, ...]");
    SyncBatchNorm alone(torch::nn::BatchNormOptions(4), std::shared_ptr<Communicator>());
    expect_contains(error_of<std::invalid_argument>([&] { alone(torch::ones({2, 4})); }), "the communicator is null");
    expect_contains(error_of<std::invalid_argument>([&] { norm(torch::ones({comm->rank() == 0 ? 1 : 0, 4})); }),
                    "1 values a channel");
    const at::Tensor x = torch::randn({3, 4}).set_requires_grad(true);
    const at::Tensor loss = norm(x).sin().sum();
    EXPECT_THROW(torch::autograd::grad({loss}, {x}, {}, std::nullopt, /*create_graph=*/true), std::logic_error);
  });
}

}  // namespace
}  // namespace tessera::sync_batch_norm_test
