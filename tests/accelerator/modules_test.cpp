// Tests libtorch's modules under FullyShardedDataParallel on the accelerator. Results equal those of training on CPUs:
// bitwise in the simulation, and up to rounding on GPUs.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <map>
#include <ostream>
#include <string>
#include <vector>

#include "tests/support/accelerator/ranks.h"
#include "tests/support/reference.h"

namespace tessera::accelerator_modules_test {
using namespace internal;
namespace {

using accelerator::Simulation;
using testing_support::seeded;
namespace nn = torch::nn;

using Call = std::function<at::Tensor(const at::Tensor&)>;

struct NetImpl : nn::Module {
  explicit NetImpl(const std::function<Call(NetImpl&)>& build) : call(build(*this)) {}
  at::Tensor forward(const at::Tensor& x) { return call(x); }
  template <class Holder>
  Holder own(Holder module) {
    return register_module("part" + std::to_string(children().size()), module);
  }
  Call call;
};
TORCH_MODULE(Net);

struct Case {
  std::string name;
  std::function<Call(NetImpl&)> build;
  std::vector<int64_t> input = {4, 6};
  // Used in the simulation. Above 0 if a module's kernel for devices differs from that for CPUs.
  double tolerance = 0;
  bool takes_indices = false;
};
void PrintTo(const Case& of, std::ostream* out) { *out << of.name; }

using State = std::map<std::string, at::Tensor>;

State train(const Case& of, std::shared_ptr<Communicator> comm) {
  constexpr int kSteps = 3;
  const at::Device device = comm->device();
  Net net = seeded(7, [&] { return Net(of.build); });
  net->to(device);
  const auto is_leaf = [](const std::string&, const nn::Module& module) { return module.children().empty(); };
  FullyShardedDataParallel fsdp(net, comm, {.auto_wrap = wrap_if(is_leaf)});
  torch::optim::SGD optimizer(fsdp.parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  for (int step = 0; step < kSteps; ++step) {
    const at::Tensor batch = seeded(10 * step + comm->rank(), [&] {
      return of.takes_indices ? torch::randint(0, 10, of.input, torch::kLong) : torch::randn(of.input);
    });
    optimizer.zero_grad();
    fsdp(batch.to(device)).square().mean().backward();
    optimizer.step();
  }
  State state;
  for (auto& entry : fsdp.full_state_dict()) state[entry.key()] = entry.value().cpu();
  return state;
}

// Returns a builder of a net that only calls one module's forward.
template <class Holder>
std::function<Call(NetImpl&)> only(Holder (*make)()) {
  return [make](NetImpl& net) -> Call {
    auto module = net.own(make());
    return [module](const at::Tensor& x) mutable { return module(x); };
  };
}

template <class Holder>
std::function<Call(NetImpl&)> recurrent(Holder (*make)()) {
  return [make](NetImpl& net) -> Call {
    auto module = net.own(make());
    return [module](const at::Tensor& x) mutable { return std::get<0>(module(x)); };
  };
}

template <class Holder, class Options>
std::function<Call(NetImpl&)> norm_behind_conv(Options options) {
  return [options](NetImpl& net) -> Call {
    auto conv = net.own(nn::Conv2d(nn::Conv2dOptions(3, 4, 3).padding(1)));
    auto norm = net.own(Holder(options));
    return [conv, norm](const at::Tensor& x) mutable { return torch::relu(norm(conv(x))); };
  };
}

Call attention(NetImpl& net) {
  auto module = net.own(nn::MultiheadAttention(nn::MultiheadAttentionOptions(8, 2)));
  return [module](const at::Tensor& x) mutable { return std::get<0>(module(x, x, x)); };
}

Call scaled_dot_product(NetImpl& net) {
  auto projection = net.own(nn::Linear(8, 24));
  return [projection](const at::Tensor& x) mutable {
    const auto heads = projection(x).view({x.size(0), x.size(1), 3, 2, 4}).permute({2, 0, 3, 1, 4});
    return torch::scaled_dot_product_attention(heads[0], heads[1], heads[2], {}, 0.0, /*is_causal=*/true);
  };
}

Call embedding_bag(NetImpl& net) {
  auto module = net.own(nn::EmbeddingBag(nn::EmbeddingBagOptions(10, 4).mode(torch::kMean)));
  return [module](const at::Tensor& x) mutable { return module(x); };
}

Call pools(NetImpl& net) {
  auto conv = net.own(nn::Conv2d(nn::Conv2dOptions(3, 4, 3).padding(1)));
  return [conv](const at::Tensor& x) mutable {
    const at::Tensor y = conv(x);
    const at::Tensor largest = torch::max_pool2d(y, {2, 2}), mean = torch::avg_pool2d(y, {2, 2});
    const at::Tensor up =
        nn::functional::interpolate(torch::adaptive_avg_pool2d(y, {2, 2}), nn::functional::InterpolateFuncOptions()
                                                                               .size(std::vector<int64_t>{3, 3})
                                                                               .mode(torch::kBilinear)
                                                                               .align_corners(false));
    return torch::cat({largest.flatten(1), mean.flatten(1), up.flatten(1)}, 1);
  };
}

Call activations(NetImpl& net) {
  auto linear = net.own(nn::Linear(6, 12));
  auto prelu = net.own(nn::PReLU());
  return [linear, prelu](const at::Tensor& x) mutable {
    const at::Tensor y = linear(x);
    return prelu(torch::gelu(y) + torch::silu(y) + torch::softplus(y) + torch::elu(y) + torch::leaky_relu(y)) *
           torch::cat({torch::glu(y), torch::log_sigmoid(torch::glu(y))}, 1);
  };
}

Call losses(NetImpl& net) {
  auto linear = net.own(nn::Linear(6, 5));
  return [linear](const at::Tensor& x) mutable {
    const at::Tensor y = linear(x), target = torch::arange(x.size(0), x.options().dtype(torch::kLong));
    return torch::cross_entropy_loss(y, target) + torch::nll_loss(y.log_softmax(1), target) +
           torch::smooth_l1_loss(y, torch::zeros_like(y)) +
           torch::binary_cross_entropy_with_logits(y, torch::ones_like(y)) + torch::huber_loss(y, torch::ones_like(y));
  };
}

Call ctc(NetImpl& net) {
  auto linear = net.own(nn::Linear(6, 5));
  return [linear](const at::Tensor& x) mutable {
    const at::Tensor targets = torch::ones({x.size(1), 2}, x.options().dtype(torch::kLong)).cumsum(1);
    const std::vector<int64_t> lengths(x.size(1), x.size(0)), target_lengths(x.size(1), 2);
    return torch::ctc_loss(linear(x).log_softmax(2), targets, lengths, target_lengths);
  };
}

const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {"lstm",
       recurrent(+[] { return nn::LSTM(nn::LSTMOptions(6, 5).num_layers(2).bidirectional(true)); }),
       {3, 4, 6},
       1e-5},
      {"gru", recurrent(+[] { return nn::GRU(nn::GRUOptions(6, 5).num_layers(2)); }), {3, 4, 6}, 1e-5},
      {"rnn", recurrent(+[] { return nn::RNN(nn::RNNOptions(6, 5)); }), {3, 4, 6}, 1e-5},
      {"lstm_cell",
       [](NetImpl& net) -> Call {
         auto cell = net.own(nn::LSTMCell(6, 5));
         return [cell](const at::Tensor& x) mutable { return std::get<1>(cell(x, cell(x))); };
       },
       {4, 6},
       1e-5},
      {"conv1d", only(+[] { return nn::Conv1d(nn::Conv1dOptions(3, 4, 3)); }), {2, 3, 9}},
      {"conv2d", only(+[] { return nn::Conv2d(nn::Conv2dOptions(3, 4, 3).stride(2)); }), {2, 3, 7, 7}},
      {"conv2d_depthwise", only(+[] { return nn::Conv2d(nn::Conv2dOptions(3, 6, 3).groups(3)); }), {2, 3, 7, 7}},
      {"conv2d_dilated", only(+[] { return nn::Conv2d(nn::Conv2dOptions(3, 4, 2).dilation(2)); }), {2, 3, 7, 7}},
      {"conv3d", only(+[] { return nn::Conv3d(nn::Conv3dOptions(2, 3, 2)); }), {2, 2, 4, 4, 4}},
      {"conv_transpose1d", only(+[] { return nn::ConvTranspose1d(nn::ConvTranspose1dOptions(3, 4, 3)); }), {2, 3, 5}},
      {"conv_transpose2d",
       only(+[] { return nn::ConvTranspose2d(nn::ConvTranspose2dOptions(3, 4, 3).stride(2).output_padding(1)); }),
       {2, 3, 4, 4}},
      {"conv_transpose3d",
       only(+[] { return nn::ConvTranspose3d(nn::ConvTranspose3dOptions(2, 3, 2)); }),
       {2, 2, 3, 3, 3}},
      {"multihead_attention", &attention, {3, 4, 8}},
      {"scaled_dot_product_attention", &scaled_dot_product, {2, 5, 8}, 1e-5},
      {"transformer_encoder",
       only(+[] {
         return nn::TransformerEncoder(nn::TransformerEncoderOptions(
             nn::TransformerEncoderLayer(nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(16).dropout(0)), 2));
       }),
       {3, 4, 8}},
      {"embedding", only(+[] { return nn::Embedding(10, 4); }), {3, 5}, 0, true},
      {"embedding_bag", &embedding_bag, {3, 5}, 0, true},
      {"batch_norm", norm_behind_conv<nn::BatchNorm2d>(nn::BatchNorm2dOptions(4)), {2, 3, 5, 5}},
      {"group_norm", norm_behind_conv<nn::GroupNorm>(nn::GroupNormOptions(2, 4)), {2, 3, 5, 5}},
      {"instance_norm", norm_behind_conv<nn::InstanceNorm2d>(nn::InstanceNorm2dOptions(4).affine(true)), {2, 3, 5, 5}},
      {"pools", &pools, {2, 3, 6, 6}},
      {"activations", &activations},
      {"losses", &losses},
      {"ctc_loss", &ctc, {6, 2, 6}},
  };
  return all;
}

class AcceleratorModules : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Cases, AcceleratorModules, testing::ValuesIn(cases()),
                         [](const auto& instance) { return instance.param.name; });

TEST_P(AcceleratorModules, TrainAsOnCpus) {
  constexpr double kOfGpus = 1e-3;  // tolerance on GPUs, whose kernels differ from those of CPUs
  const Simulation simulation;
  const Case& of = GetParam();
  const int world = std::min(2, accelerator::device_count());
  const double tolerance = accelerator::on_gpus() ? kOfGpus : of.tolerance;
  State expected, got;
  const auto train_into = [&of](State& state) {
    return [&of, &state](std::shared_ptr<Communicator> comm) {
      State own = train(of, comm);
      if (comm->rank() == 0) state = std::move(own);
    };
  };
  testing_support::on_ranks(world, train_into(expected));
  accelerator::on_devices(world, train_into(got));
  EXPECT_EQ(got.size(), expected.size());
  for (const auto& [name, value] : expected)
    EXPECT_TRUE(tolerance > 0 ? torch::allclose(got[name], value, tolerance, tolerance)
                              : torch::equal(got[name], value))
        << name << " differs by " << (got[name] - value).abs().max().item<double>();
  for (const std::string& finding : Simulation::findings()) ADD_FAILURE() << finding;
}

struct NoiseImpl : nn::Module {
  explicit NoiseImpl(at::Device device)
      : drawn(register_parameter("drawn", torch::empty({4, 3}, device))),
        made(register_parameter("made", torch::randn({5}, device))),
        of_host(register_parameter("of_host", torch::randn({5}))) {
    const at::NoGradGuard no_grad;
    drawn.uniform_(1, 2);
  }
  at::Tensor drawn, made, of_host;
};
TORCH_MODULE(Noise);

// A deferred constructor must draw on its device with that device's generator: kernels accept no generator of the host.
TEST(AcceleratorDeferred, ConstructorsDrawOnTheDeviceThatTheyName) {
  const Simulation simulation;
  accelerator::on_devices(1, [](std::shared_ptr<Communicator> comm) {
    auto build = [&] { return Noise(comm->device()); };
    torch::manual_seed(3);
    const at::Tensor expected = build()->of_host;
    torch::manual_seed(3);
    auto noise = deferred(build);
    materialize(*noise);
    EXPECT_EQ(noise->drawn.device(), comm->device());
    const at::Tensor drawn = noise->drawn.cpu();
    EXPECT_TRUE(drawn.ge(1).logical_and(drawn.lt(2)).all().item<bool>());
    EXPECT_EQ(noise->made.device(), comm->device());
    EXPECT_TRUE(torch::equal(noise->of_host, expected));
  });
  for (const std::string& finding : Simulation::findings()) ADD_FAILURE() << finding;
}

}  // namespace
}  // namespace tessera::accelerator_modules_test
