// Modules whose operators save weights for backward, against the unsharded module, bit for bit.
#include "tests/support/reference.h"

namespace tessera::modules_test {
using namespace internal;
namespace {

using namespace testing_support;

// Trains a sharded and an unsharded module of one seed for three steps, with a unit for each child, and compares them.
// `run` maps (module, rank) to a scalar loss.
template <class Build, class Run>
void expect_parity(Build build, Run run) {
  for (int world : {1, 2, 3}) {
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      auto model = seeded(11, build);
      auto reference = seeded(11, build);
      FullyShardedDataParallel fsdp(model, comm, {.auto_wrap = wrap_by_size(1)});
      torch::optim::Adam sharded(fsdp.parameters(), 1e-2), whole(unique_parameters(*reference), 1e-2);
      for (int step = 0; step < 3; ++step) {
        step_both(sharded, whole, [&] {
          run(fsdp, comm->rank()).backward();
          reference_backward(reference, world, [&](int rank) { return run(reference, rank); });
        });
      }
      expect_same_parameters(fsdp, *reference, "world " + std::to_string(world));
    });
  }
}

at::Tensor input(int rank, std::vector<int64_t> shape) {
  return seeded(50 + rank, [&] { return torch::randn(shape); });
}

// Tensor-to-tensor modules.
#define EXPECT_MODULE_PARITY(holder, ...) \
  expect_parity([] { return holder; },    \
                [](auto& net, int rank) { return call(net, input(rank, __VA_ARGS__)).square().mean(); })

TEST(Modules, Linear) { EXPECT_MODULE_PARITY(torch::nn::Linear(5, 7), {3, 5}); }
TEST(Modules, LinearWithoutBias) {
  EXPECT_MODULE_PARITY(torch::nn::Linear(torch::nn::LinearOptions(5, 7).bias(false)), {3, 5});
}
TEST(Modules, Conv1d) { EXPECT_MODULE_PARITY(torch::nn::Conv1d(torch::nn::Conv1dOptions(3, 4, 3)), {2, 3, 9}); }
TEST(Modules, Conv2d) {
  EXPECT_MODULE_PARITY(torch::nn::Conv2d(torch::nn::Conv2dOptions(4, 6, 3).padding(1).groups(2)), {2, 4, 7, 7});
}
TEST(Modules, ConvTranspose2d) {
  EXPECT_MODULE_PARITY(torch::nn::ConvTranspose2d(torch::nn::ConvTranspose2dOptions(3, 2, 3).stride(2)), {2, 3, 5, 5});
}
TEST(Modules, BatchNorm2d) { EXPECT_MODULE_PARITY(torch::nn::BatchNorm2d(3), {4, 3, 5, 5}); }
TEST(Modules, GroupNorm) { EXPECT_MODULE_PARITY(torch::nn::GroupNorm(2, 4), {2, 4, 5}); }
TEST(Modules, LayerNorm) { EXPECT_MODULE_PARITY(torch::nn::LayerNorm(torch::nn::LayerNormOptions({4, 5})), {3, 4, 5}); }
TEST(Modules, PReLU) { EXPECT_MODULE_PARITY(torch::nn::PReLU(), {3, 4}); }
TEST(Modules, Sequential) {
  EXPECT_MODULE_PARITY(torch::nn::Sequential(torch::nn::Linear(6, 12), torch::nn::ReLU(), torch::nn::Linear(12, 3)),
                       {4, 6});
}

TEST(Modules, ChannelsLastConvolution) {
  expect_parity(
      [] {
        torch::nn::Conv2d conv(torch::nn::Conv2dOptions(4, 6, 3));
        conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
        return conv;
      },
      [](auto& net, int rank) {
        return net(input(rank, {2, 4, 7, 7}).contiguous(at::MemoryFormat::ChannelsLast)).square().mean();
      });
}

TEST(Modules, Embedding) {
  expect_parity([] { return torch::nn::Embedding(torch::nn::EmbeddingOptions(11, 3).padding_idx(0)); },
                [](auto& net, int rank) { return net(torch::arange(4) + rank).square().mean(); });
}

TEST(Modules, SparseEmbedding) {
  expect_parity([] { return torch::nn::Embedding(torch::nn::EmbeddingOptions(11, 3)); },
                [](auto& net, int rank) { return net((torch::arange(4) * rank).view({2, 2})).sum(); });
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    auto model = seeded(1, [] { return torch::nn::Embedding(torch::nn::EmbeddingOptions(6, 2).sparse(true)); });
    FullyShardedDataParallel fsdp(model, comm);
    fsdp(torch::full({2}, comm->rank())).sum().backward();
    auto shards = fsdp.parameters();
    // Row 0 twice on rank 0, row 1 twice on rank 1, averaged.
    at::Tensor full = torch::empty({12});
    comm->all_gather(full, shards[0].grad()).wait();
    EXPECT_TRUE(torch::equal(full, torch::tensor({1., 1., 1., 1., 0., 0., 0., 0., 0., 0., 0., 0.}).to(at::kFloat)));
  });
}

TEST(Modules, Lstm) {
  expect_parity([] { return torch::nn::LSTM(torch::nn::LSTMOptions(4, 5).num_layers(2).bidirectional(true)); },
                [](auto& net, int rank) { return std::get<0>(net(input(rank, {6, 2, 4}))).square().mean(); });
}

TEST(Modules, LstmCellInALoop) {
  expect_parity([] { return torch::nn::LSTMCell(4, 5); },
                [](auto& net, int rank) {
                  auto state = std::make_tuple(torch::zeros({2, 5}), torch::zeros({2, 5}));
                  for (int t = 0; t < 4; ++t) state = net(input(rank + t, {2, 4}), state);
                  return std::get<0>(state).square().mean();
                });
}

TEST(Modules, MultiheadAttention) {
  expect_parity([] { return torch::nn::MultiheadAttention(8, 2); },
                [](auto& net, int rank) {
                  at::Tensor x = input(rank, {5, 2, 8});
                  return std::get<0>(net(x, x, x)).square().mean();
                });
}

TEST(Modules, TransformerEncoderLayer) {
  expect_parity(
      [] {
        return torch::nn::TransformerEncoderLayer(
            torch::nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(16).dropout(0));
      },
      [](auto& net, int rank) { return net(input(rank, {5, 2, 8})).square().mean(); });
}

TEST(Modules, ModuleList) {
  struct StackImpl : torch::nn::Module {
    StackImpl() {
      register_module("layers", layers);
      for (int i = 0; i < 3; ++i) layers->push_back(torch::nn::Linear(4, 4));
    }
    at::Tensor forward(at::Tensor x) {
      for (const auto& layer : *layers) x = torch::tanh(layer->as<torch::nn::Linear>()->forward(x));
      return x;
    }
    torch::nn::ModuleList layers;
  };
  expect_parity([] { return std::make_shared<StackImpl>(); },
                [](auto& net, int rank) { return call(net, input(rank, {3, 4})).square().mean(); });
}

}  // namespace
}  // namespace tessera::modules_test
