// Clipping by norms of all kinds, finite or not: every stage as torch::nn::utils::clip_grad_norm_.
#include <limits>

#include "tests/support/reference.h"

namespace tessera::clip_norm_test {
using namespace internal;
namespace {

using namespace testing_support;

constexpr double kInfinity = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();

// The gradient of each parameter is `slopes`. The parts of ranks have padding, and one parameter is empty.
struct SlopesImpl : torch::nn::Module {
  explicit SlopesImpl(at::ScalarType dtype) {
    for (const auto& sizes : {std::vector<int64_t>{7, 5}, {3}, {0, 4}, {1}}) {
      const std::string name = "p" + std::to_string(slopes.size());
      slopes.push_back(torch::zeros(sizes, dtype));
      register_parameter(name, torch::ones(sizes, dtype));
    }
  }
  at::Tensor forward(at::Tensor x) {
    const auto own = parameters();
    for (size_t i = 0; i < own.size(); ++i) x = x + (own[i] * slopes[i]).sum();
    return x;
  }
  std::vector<at::Tensor> slopes;
};
TORCH_MODULE(Slopes);

struct Case {
  const char* name;
  double scale;                // of all slopes
  std::optional<double> last;  // one slope of the last parameter
};
const Case kCases[] = {{"finite", 1, {}},       {"small", 1e-3, {}},        {"zero", 0, {}},
                       {"denormal", 1e-41, {}}, {"infinite", 1, kInfinity}, {"negative", 1, -kInfinity},
                       {"NaN", 1, kNan}};

struct Setting {
  int world, stage, ranks_per_copy = 0;
  bool offload = false;
  std::string name() const { return c10::str("world ", world, " stage ", stage, " ", ranks_per_copy, " ", offload); }
};

void set_slopes(const Slopes& net, const Case& of) {
  for (size_t i = 0; i < net->slopes.size(); ++i)
    net->slopes[i].copy_(seeded(i, [&] { return torch::randn(net->slopes[i].sizes(), at::kDouble); }) * of.scale);
  if (of.last) net->slopes.back().fill_(*of.last);
}

struct Clip {
  double max_norm, type;
};

template <class Model>
void expect_as_torchs(Model& model, const Slopes& net, const Case& of, const Clip& clip, const std::string& where) {
  set_slopes(net, of);
  std::vector<at::Tensor> expected, without_empty;
  for (const at::Tensor& slopes : net->slopes) {
    expected.push_back(torch::zeros_like(slopes).set_requires_grad(true));
    expected.back().mutable_grad() = slopes.clone();
    if (slopes.numel() > 0) without_empty.push_back(expected.back());  // torch has no maximum of no elements
  }
  model.zero_grad(/*set_to_none=*/clip.type == 2);
  model(torch::zeros({}, expected[0].options())).backward();
  const double norm = model.clip_grad_norm_(clip.max_norm, clip.type);
  const double torchs = torch::nn::utils::clip_grad_norm_(without_empty, clip.max_norm, clip.type);
  EXPECT_TRUE(norm == torchs || (std::isnan(norm) && std::isnan(torchs)) || std::abs(norm / torchs - 1) < 1e-5 ||
              std::max(norm, torchs) < 1e-30)
      << where << ": " << norm << ", expected " << torchs;
  for (const NamedShard& shard : model.named_shards()) {
    if (!shard.tensor.grad().defined()) continue;  // of another owner
    const at::Tensor whole = expected[shard.fqn.back() - '0'].grad();
    const at::Tensor part = whole.view({-1}).narrow(0, shard.held.begin, shard.held.numel());
    EXPECT_TRUE(torch::allclose(shard.tensor.grad().view({-1}), part, 1e-5, 1e-44, /*equal_nan=*/true))
        << where << ": " << shard.fqn << " " << shard.tensor.grad() << " expected " << part;
  }
}

TEST(ClipNorm, IsTorchsForEveryNormUnderEveryWrapper) {
  for (const Setting& setting : {Setting{2, 0}, Setting{2, 1}, Setting{3, 2}, Setting{2, 3}, Setting{3, 3},
                                 Setting{4, 3, 2}, Setting{2, 3, 0, true}, Setting{2, 1, 0, true}, Setting{1, 3}})
    on_ranks(setting.world, [&](std::shared_ptr<Communicator> comm) {
      for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
        Slopes net(dtype);
        ZeroOptions options{.stage = setting.stage};
        options.fsdp.hybrid.ranks_per_copy = setting.ranks_per_copy;
        options.fsdp.offload = {.params = setting.offload, .grads = setting.offload};
        options.oss.offload = {.params = setting.offload, .grads = false};
        auto model = zero<SGD>(net, torch::optim::SGDOptions(0.1), comm, options);
        for (const Case& of : kCases)
          for (const double type : {2.0, 1.0, 3.5, kInfinity})
            for (const double max_norm : {0.5, 0.0, kInfinity})
              expect_as_torchs(model, net, of, {max_norm, type},
                               c10::str(setting.name(), " ", dtype, " ", of.name, " type ", type, " to ", max_norm));
        // Refused before anything is scaled.
        for (const double last : {kNan, kInfinity}) {
          set_slopes(net, {"", 1, last});
          model.zero_grad();
          model(torch::zeros({}, net->slopes[0].options())).backward();
          EXPECT_THROW(model.clip_grad_norm_(0.5, 2, /*error_if_nonfinite=*/true), std::runtime_error);
          for (const NamedShard& shard : model.named_shards()) {
            if (shard.fqn != "p0" || !shard.tensor.grad().defined()) continue;
            const at::Tensor part = net->slopes[0].view({-1}).narrow(0, shard.held.begin, shard.held.numel());
            EXPECT_TRUE(torch::allclose(shard.tensor.grad().view({-1}), part, 1e-6));
          }
        }
      }
    });
}

// A loss of which one bias is NaN makes all gradients NaN, and the next finite step clips as ever.
TEST(ClipNorm, OneNanBiasMakesAllGradientsNan) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    torch::nn::Linear last{nullptr};
    auto net = seeded(1, [&] {
      last = torch::nn::Linear(5, 3);
      return torch::nn::Sequential(torch::nn::Linear(4, 5), last);
    });
    FullyShardedDataParallel fsdp(net, comm);
    fsdp(torch::ones({2, 4})).sum().backward();
    const double finite = fsdp.clip_grad_norm_(kInfinity);
    for (const bool set_to_none : {true, false}) {
      fsdp.zero_grad(set_to_none);
      (fsdp(torch::ones({2, 4})).sum() + last->bias.sum() * kNan).backward();
      EXPECT_TRUE(std::isnan(fsdp.clip_grad_norm_(1.0)));
      for (const at::Tensor& shard : fsdp.parameters())
        EXPECT_TRUE(shard.numel() == 0 || shard.grad().isnan().all().item<bool>());
      fsdp.zero_grad(set_to_none);
      fsdp(torch::ones({2, 4})).sum().backward();
      EXPECT_EQ(fsdp.clip_grad_norm_(kInfinity), finite);
    }
  });
}

}  // namespace
}  // namespace tessera::clip_norm_test
