// Operators of models besides linear layers and convolutions, each separately: a dry run takes the memory of a run with
// data, forward and backward.
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <tessera/plan.h>
#include "tests/plan/same_record.h"
#include "tests/support/reference.h"

namespace tessera::plan_tests {
using namespace internal;
namespace {

using namespace testing_support;
namespace nn = torch::nn;

constexpr int64_t kItems = 24, kLength = 10, kChannels = 12;

// Creates a module, and the function from inputs to its loss.
struct Part {
  std::string name;
  std::function<std::shared_ptr<nn::Module>()> make;
  std::function<at::Tensor(nn::Module&)> loss;
};

// From a function of values [6, 10, 12] that require a gradient.
struct ScaleImpl : nn::Module {
  ScaleImpl() : weight(register_parameter("weight", torch::randn({kItems, kLength, kChannels}))) {}
  at::Tensor weight;
};
Part of(const std::string& name, const std::function<at::Tensor(at::Tensor)>& function) {
  return {name, [] { return std::make_shared<ScaleImpl>(); },
          [function](nn::Module& module) {
            at::Tensor y = function(torch::randn({kItems, kLength, kChannels}) * module.as<ScaleImpl>()->weight);
            return y.sum();
          }};
}
template <class Holder, class Options, class Call>
Part module(const std::string& name, const Options& options, Call call) {
  using Impl = typename Holder::ContainedType;
  return {name, [options] { return std::make_shared<Impl>(options); },
          [call](nn::Module& module) { return call(*module.as<Impl>()); }};
}

at::Tensor sequence() { return torch::randn({kItems, kLength, kChannels}); }
at::Tensor image() { return torch::randn({kItems, kChannels, 9, 11}); }

std::vector<Part> functions() {
  std::vector<Part> all;
  const auto add = [&](const std::string& name, const std::function<at::Tensor(at::Tensor)>& function) {
    all.push_back(of(name, function));
  };
  using T = at::Tensor;
  add("softmax", [](T x) { return x.softmax(-1).square(); });
  add("log_softmax", [](T x) { return x.log_softmax(1); });
  add("gelu tanh",
      [](T x) { return torch::nn::functional::gelu(x, nn::functional::GELUFuncOptions().approximate("tanh")); });
  add("silu, mish, elu, selu, celu",
      [](T x) { return at::silu(x) + at::mish(x) + at::elu(x) + at::selu(x) + at::celu(x); });
  add("leaky_relu, hardtanh, hardswish, hardsigmoid, softplus, softsign", [](T x) {
    return at::leaky_relu(x) + at::hardtanh(x) + at::hardswish(x) + at::hardsigmoid(x) + at::softplus(x) +
           nn::functional::softsign(x);
  });
  add("relu6, rrelu, logsigmoid, glu",
      [](T x) { return at::glu(at::relu6(x) + at::rrelu(x, 0.1, 0.3, true) + at::log_sigmoid(x), -1); });
  add("exp, log, sqrt, rsqrt, pow, reciprocal", [](T x) {
    const T y = x.abs() + 1;
    return y.exp() + y.log() + y.sqrt() + y.rsqrt() + y.pow(3) + y.pow(0.5) + y.reciprocal();
  });
  add("sin, cos, tan, atan, erf, sign, floor",
      [](T x) { return x.sin() + x.cos() + x.tan() + x.atan() + x.erf() + x.sign() + x.floor(); });
  add("clamp, where, masked_fill, maximum, minimum", [](T x) {
    const T y = torch::where(x > 0, x, x * 0.1).masked_fill(x < -1, 0.0);
    return y.clamp(-1, 1) + at::maximum(x, y) + at::minimum(x, y);
  });
  add("mean, var, std, norm, amax, logsumexp",
      [](T x) { return x.mean(-1) + x.var(-1) + x.std(-1) + x.norm(2, -1) + x.amax(-1) + x.logsumexp(-1); });
  add("max and min with indices", [](T x) { return std::get<0>(x.max(-1)) + std::get<0>(x.min(-1)); });
  add("median, kthvalue", [](T x) { return std::get<0>(x.median(-1)) + std::get<0>(x.kthvalue(2, -1)); });
  add("topk, sort", [](T x) { return std::get<0>(x.topk(3, -1)).sum() + std::get<0>(x.sort(-1)).square().sum(); });
  add("prod, cumsum, cumprod", [](T x) { return x.prod(-1).sum() + x.cumsum(1).sum() + x.cumprod(1).sum(); });
  add("cat, stack, chunk, split, unbind", [](T x) {
    const auto parts = x.chunk(2, -1);
    const auto others = x.split(3, 1);
    return at::cat({parts[0], parts[1]}, 1).sum() + at::stack(others[0].unbind(0)).sum() + others[3].sum();
  });
  add("index_select, gather, take_along_dim", [](T x) {
    const T index = torch::arange(5);
    return x.index_select(1, index).sum() + x.gather(1, index.view({1, 5, 1}).expand({kItems, 5, kChannels})).sum() +
           x.take_along_dim(index.view({1, 5, 1}), 1).sum();
  });
  add("index, slices and a mask of numbers", [](T x) {
    using namespace torch::indexing;
    return x.index({Slice(), Slice(1, None, 2), Ellipsis}).sum() + x.index({torch::tensor({0, 2, 2})}).sum();
  });
  add("scatter, scatter_add, index_add", [](T x) {
    const T index = torch::arange(5).view({1, 5, 1}).expand({kItems, 5, kChannels});
    return torch::zeros({kItems, 7, kChannels}).scatter(1, index, x.narrow(1, 0, 5)).square().sum() +
           torch::zeros({kItems, 7, kChannels}).scatter_add(1, index, x.narrow(1, 0, 5)).square().sum() +
           torch::zeros({4, kLength, kChannels}).index_add(0, torch::arange(kItems) % 4, x).square().sum();
  });
  add("roll, flip, pad, repeat, repeat_interleave, tile", [](T x) {
    return x.roll(2, 1).sum() + x.flip(1).sum() + at::constant_pad_nd(x, {1, 2}).square().sum() +
           x.repeat({2, 1, 1}).square().sum() + x.repeat_interleave(2, 1).square().sum() +
           x.tile({1, 2, 1}).square().sum();
  });
  add("tril, triu, diagonal, transpose, permute, unfold", [](T x) {
    return x.tril().sum() + x.triu().sum() + x.diagonal(0, 1, 2).sum() + x.permute({2, 0, 1}).contiguous().sum() +
           x.unfold(1, 3, 2).square().sum();
  });
  add("bmm, baddbmm, matmul, einsum, outer", [](T x) {
    const T y = x.transpose(1, 2);
    return at::bmm(x, y).sum() + at::baddbmm(torch::zeros({kLength, kLength}), x, y).sum() +
           at::matmul(x, x.select(0, 0).t()).sum() + at::einsum("bij,bkj->bik", {x, x}).sum() +
           at::outer(x.select(0, 0).select(0, 0), x.select(0, 1).select(0, 1)).sum();
  });
  add("mv, dot, addmm, addmv, addr", [](T x) {
    const T m = x.select(0, 0), v = x.select(0, 1).select(0, 0);
    return at::mv(m, v).sum() + at::dot(v, v) + at::addmm(torch::zeros({kLength}), m, m.t()).sum() +
           at::addmv(torch::zeros({kLength}), m, v).sum();
  });
  add("attention with a mask", [](T x) {
    const T q = x.view({kItems, 1, kLength, kChannels});
    return at::scaled_dot_product_attention(q, q, q, torch::ones({kLength, kLength}, torch::kBool).tril());
  });
  add("attention with a bias and dropout", [](T x) {
    const T q = x.view({kItems, 2, kLength, kChannels / 2});
    return at::scaled_dot_product_attention(q, q, q, torch::zeros({kLength, kLength}), 0.1);
  });
  add("attention of grouped queries", [](T x) {
    const T q = x.view({kItems, 4, kLength, 3}), k = q.narrow(1, 0, 2);
    return at::scaled_dot_product_attention(q, k, k, {}, 0.0, true, std::nullopt, /*enable_gqa=*/true);
  });
  add("dropout, alpha_dropout, feature_dropout", [](T x) {
    return at::dropout(x, 0.2, true) + at::alpha_dropout(x, 0.2, true) + at::feature_dropout(x, 0.2, true);
  });
  add("in place", [](T x) { return ((x * 2).relu_() * x).add_(x).neg_().exp_(); });
  add("to half and back",
      [](T x) { return (x.to(torch::kBFloat16) * 2).to(torch::kFloat) + x.to(torch::kDouble).to(torch::kFloat); });
  add("lerp, addcmul, addcdiv, hypot, atan2, fmod, remainder", [](T x) {
    const T y = x.abs() + 1;
    return at::lerp(x, y, 0.3) + at::addcmul(x, y, y) + at::addcdiv(x, x, y) + at::hypot(x, y) + at::atan2(x, y) +
           x.fmod(2) + x.remainder(2);
  });
  add("normalize, cosine_similarity, cdist", [](T x) {
    return nn::functional::normalize(x).sum() + at::cosine_similarity(x, x.roll(1, 0), -1).sum() +
           at::cdist(x, x.roll(1, 1)).sum();
  });
  add("fft", [](T x) { return at::fft_irfft(at::fft_rfft(x) * 2); });
  add("complex", [](T x) { return at::real(at::complex(x, x) * at::complex(x, -x)); });
  add("layer_norm, rms_norm without weights",
      [](T x) { return at::layer_norm(x, {kChannels}) + at::rms_norm(x, {kChannels}); });
  add("expand, broadcast",
      [](T x) { return x.select(0, 0).expand({4, kLength, kChannels}).square() + x.select(0, 1); });
  add("one_hot, argmax", [](T x) {
    return (at::one_hot(torch::arange(kChannels) % 4, 4).to(torch::kFloat).t().matmul(x.transpose(1, 2))) +
           x.argmax(-1).sum();
  });
  add("linalg", [](T x) {
    const T m = at::bmm(x, x.transpose(1, 2)) + torch::eye(kLength) * 5;
    return at::linalg_inv(m).sum() + at::linalg_norm(m).sum() + at::linalg_solve(m, x).sum();
  });
  add("cholesky", [](T x) { return at::linalg_cholesky(at::bmm(x, x.transpose(1, 2)) + torch::eye(kLength) * 50); });
  add("nan_to_num, logaddexp, xlogy, log1p, expm1", [](T x) {
    const T y = x.abs() + 1;
    return x.nan_to_num() + at::logaddexp(x, y) + at::xlogy(y, y) + y.log1p() + x.expm1();
  });
  add("sigmoid, tanh, square, neg, abs", [](T x) { return x.sigmoid() + x.tanh() + x.square() - x.neg() + x.abs(); });
  add("prelu", [](T x) { return at::prelu(x, x.select(0, 0).select(0, 0).narrow(0, 0, 1)); });
  add("checkpointed", [](T x) { return checkpointed([](const T& y) { return y.exp().tanh().square(); }, x); });
  return all;
}

std::vector<Part> losses() {
  std::vector<Part> all;
  const auto add = [&](const std::string& name, const std::function<at::Tensor(at::Tensor)>& function) {
    all.push_back(of(name, [function](const at::Tensor& x) { return function(x); }));
  };
  using T = at::Tensor;
  const auto classes = [] { return torch::arange(kItems * kLength) % kChannels; };
  const auto flat = [](const T& x) { return x.flatten(0, 1); };
  add("cross_entropy with smoothing and ignored ones",
      [=](T x) { return at::cross_entropy_loss(flat(x), classes(), {}, at::Reduction::Mean, 3, 0.1); });
  add("cross_entropy of probabilities",
      [=](T x) { return at::cross_entropy_loss(flat(x), torch::rand({kItems * kLength, kChannels}).softmax(-1)); });
  add("nll_loss", [=](T x) { return at::nll_loss(flat(x).log_softmax(-1), classes()); });
  add("cross_entropy of images",
      [=](T x) { return at::cross_entropy_loss(x, torch::ones({kItems, kChannels}, torch::kLong)); });
  add("l1_loss, none",
      [](T x) { return at::l1_loss(x, torch::randn({kItems, kLength, kChannels}), at::Reduction::None); });
  add("l1_loss, mse_loss, sums", [](T x) {
    return at::l1_loss(x, torch::zeros_like(x)) + at::mse_loss(x, torch::zeros_like(x), at::Reduction::Sum);
  });
  add("kl_div", [](T x) {
    return at::kl_div(x.log_softmax(-1), torch::randn({kItems, kLength, kChannels}).softmax(-1), at::Reduction::Mean);
  });
  add("binary_cross_entropy_with_logits",
      [](T x) { return at::binary_cross_entropy_with_logits(x, torch::zeros_like(x)); });
  add("cosine_embedding, margin_ranking, hinge_embedding", [=](T x) {
    const T y = flat(x), sign = torch::ones({kItems * kLength});
    return at::cosine_embedding_loss(y, y.roll(1, 0), sign) +
           at::margin_ranking_loss(y.select(1, 0), y.select(1, 1), sign) +
           at::hinge_embedding_loss(y.select(1, 0), sign);
  });
  add("triplet_margin, poisson_nll", [=](T x) {
    const T y = flat(x);
    return at::triplet_margin_loss(y, y.roll(1, 0), y.roll(2, 0)) +
           at::poisson_nll_loss(y, torch::ones_like(y), true, false, 1e-8, at::Reduction::Mean);
  });
  add("multi_margin, multilabel_margin", [=](T x) {
    return at::multi_margin_loss(flat(x), classes()) +
           at::multilabel_margin_loss(flat(x), torch::zeros({kItems * kLength, kChannels}, torch::kLong));
  });
  add("ctc_loss", [](T x) {
    return at::ctc_loss(x.transpose(0, 1).log_softmax(-1), torch::ones({kItems, 3}, torch::kLong),
                        std::vector<int64_t>(kItems, kLength), std::vector<int64_t>(kItems, 3));
  });
  return all;
}

std::vector<Part> modules() {
  const auto plain = [](auto input) {
    return [input](auto& module) { return module.forward(input()).square().sum(); };
  };
  const auto first = [](auto input) {
    return [input](auto& module) { return std::get<0>(module.forward(input())).square().sum(); };
  };
  std::vector<Part> all{
      module<nn::LSTM>("LSTM", nn::LSTMOptions(kChannels, 7).num_layers(2).batch_first(true).dropout(0.1),
                       first(sequence)),
      module<nn::LSTM>("LSTM, both ways", nn::LSTMOptions(kChannels, 7).bidirectional(true), first(sequence)),
      module<nn::GRU>("GRU", nn::GRUOptions(kChannels, 7).num_layers(2), first(sequence)),
      module<nn::RNN>("RNN", nn::RNNOptions(kChannels, 7).nonlinearity(torch::kReLU), first(sequence)),
      module<nn::LSTMCell>("LSTMCell", nn::LSTMCellOptions(kChannels, 7),
                           first([] { return sequence().select(1, 0); })),
      module<nn::GRUCell>("GRUCell", nn::GRUCellOptions(kChannels, 7), plain([] { return sequence().select(1, 0); })),
      module<nn::MultiheadAttention>("MultiheadAttention", nn::MultiheadAttentionOptions(kChannels, 3).dropout(0.1),
                                     [](auto& module) {
                                       const auto x = sequence();
                                       return std::get<0>(module.forward(x, x, x)).sum();
                                     }),
      module<nn::TransformerEncoderLayer>("TransformerEncoderLayer", nn::TransformerEncoderLayerOptions(kChannels, 3),
                                          plain(sequence)),
      module<nn::TransformerDecoderLayer>("TransformerDecoderLayer", nn::TransformerDecoderLayerOptions(kChannels, 3),
                                          [](auto& module) {
                                            const auto x = sequence();
                                            return module.forward(x, x.roll(1, 0)).sum();
                                          }),
      module<nn::Transformer>("Transformer", nn::TransformerOptions(kChannels, 3, 2, 2).dim_feedforward(20),
                              [](auto& module) {
                                const auto x = sequence();
                                return module.forward(x, x.roll(1, 0)).sum();
                              }),
      module<nn::Embedding>("Embedding with padding", nn::EmbeddingOptions(17, 5).padding_idx(0),
                            plain([] { return torch::arange(12) % 17; })),
      module<nn::EmbeddingBag>("EmbeddingBag", nn::EmbeddingBagOptions(17, 5).mode(torch::kMean),
                               plain([] { return torch::arange(12).view({3, 4}); })),
      module<nn::EmbeddingBag>("EmbeddingBag, sums", nn::EmbeddingBagOptions(17, 5).mode(torch::kSum),
                               plain([] { return torch::arange(12).view({3, 4}); })),
      module<nn::Conv1d>("Conv1d", nn::Conv1dOptions(kLength, 8, 3).dilation(2), plain(sequence)),
      module<nn::Conv1d>("Conv1d, circular", nn::Conv1dOptions(kLength, 8, 3).padding(1).padding_mode(torch::kCircular),
                         plain(sequence)),
      module<nn::Conv2d>("Conv2d, depthwise", nn::Conv2dOptions(kChannels, 2 * kChannels, 3).groups(kChannels),
                         plain(image)),
      module<nn::Conv2d>("Conv2d of 1", nn::Conv2dOptions(kChannels, 5, 1), plain(image)),
      module<nn::Conv3d>("Conv3d", nn::Conv3dOptions(kChannels, 4, 2),
                         plain([] { return torch::randn({2, kChannels, 5, 6, 7}); })),
      module<nn::ConvTranspose1d>("ConvTranspose1d", nn::ConvTranspose1dOptions(kLength, 8, 3).stride(2),
                                  plain(sequence)),
      module<nn::ConvTranspose2d>("ConvTranspose2d", nn::ConvTranspose2dOptions(kChannels, 8, 3).stride(2),
                                  plain(image)),
      module<nn::Bilinear>("Bilinear", nn::BilinearOptions(kChannels, kChannels, 3),
                           [](auto& module) {
                             const auto x = sequence().flatten(0, 1);
                             return module.forward(x, x).sum();
                           }),
      module<nn::LayerNorm>("LayerNorm", nn::LayerNormOptions({kLength, kChannels}), plain(sequence)),
      module<nn::GroupNorm>("GroupNorm", nn::GroupNormOptions(3, kChannels), plain(image)),
      module<nn::InstanceNorm2d>(
          "InstanceNorm2d", nn::InstanceNorm2dOptions(kChannels).affine(true).track_running_stats(true), plain(image)),
      module<nn::BatchNorm1d>("BatchNorm1d", nn::BatchNorm1dOptions(kLength), plain(sequence)),
      module<nn::BatchNorm2d>("BatchNorm2d", nn::BatchNorm2dOptions(kChannels), plain(image)),
      module<nn::BatchNorm3d>("BatchNorm3d", nn::BatchNorm3dOptions(kChannels),
                              plain([] { return torch::randn({2, kChannels, 3, 4, 5}); })),
      module<nn::PReLU>("PReLU", nn::PReLUOptions().num_parameters(kLength), plain(sequence)),
      module<nn::CrossMapLRN2d>("CrossMapLRN2d", nn::CrossMapLRN2dOptions(3),
                                [](auto& module) { return module.forward(image().requires_grad_()).sum(); }),
  };
  const auto on_image = [&](const std::string& name, const std::function<at::Tensor(at::Tensor)>& function) {
    all.push_back(module<nn::Conv2d>(name, nn::Conv2dOptions(kChannels, 8, 3), [function](auto& module) {
      return function(module.forward(image())).square().sum();
    }));
  };
  using T = at::Tensor;
  namespace F = nn::functional;
  on_image("max_pool2d with indices, unpool", [](T x) {
    const auto [y, indices] = at::max_pool2d_with_indices(x, {2, 2});
    return at::max_unpool2d(y, indices, {x.size(2), x.size(3)});
  });
  on_image("avg_pool2d, lp_pool2d",
           [](T x) { return at::avg_pool2d(x, {2, 2}) + F::lp_pool2d(x, F::LPPool2dFuncOptions(2, 2)); });
  on_image("adaptive pools",
           [](T x) { return at::adaptive_avg_pool2d(x, {3, 2}) + std::get<0>(at::adaptive_max_pool2d(x, {3, 2})); });
  on_image("fractional_max_pool2d",
           [](T x) { return std::get<0>(at::fractional_max_pool2d(x, {2, 2}, {3, 3}, torch::rand({kItems, 8, 2}))); });
  on_image("interpolate, nearest", [](T x) { return at::upsample_nearest2d(x, {13, 17}); });
  on_image("interpolate, bilinear", [](T x) { return at::upsample_bilinear2d(x, {13, 17}, false); });
  on_image("interpolate, bicubic", [](T x) { return at::upsample_bicubic2d(x, {13, 17}, true); });
  on_image("pixel_shuffle, channel_shuffle", [](T x) { return at::pixel_shuffle(at::channel_shuffle(x, 2), 2); });
  on_image("unfold, fold", [](T x) {
    return at::col2im(at::im2col(x, {2, 2}, {1, 1}, {0, 0}, {1, 1}), {7, 9}, {2, 2}, {1, 1}, {0, 0}, {1, 1});
  });
  on_image("grid_sample", [](T x) { return at::grid_sampler(x, torch::rand({kItems, 4, 5, 2}), 0, 0, false); });
  on_image("affine_grid", [](T x) {
    return at::grid_sampler(
        x, at::affine_grid_generator(x.mean({1, 2, 3}).view({kItems, 1, 1}).expand({kItems, 2, 3}), x.sizes(), false),
        0, 0, false);
  });
  on_image("reflection and replication pads",
           [](T x) { return at::reflection_pad2d(x, {1, 1, 1, 1}) + at::replication_pad2d(x, {1, 1, 1, 1}); });
  on_image("channels last", [](T x) { return x.contiguous(at::MemoryFormat::ChannelsLast).relu(); });
  on_image("dropout2d", [](T x) { return at::feature_dropout(x, 0.5, true); });
  return all;
}

void expect_alike(const std::vector<Part>& parts, int stage, int world) {
  for (const Part& part : parts) {
    SCOPED_TRACE(part.name);
    const auto make = [&](std::shared_ptr<Communicator> comm) {
      return zero(seeded(1, part.make), torch::optim::SGDOptions(0.1), std::move(comm), {.stage = stage});
    };
    const auto train = [&](auto& model) {
      model.optimizer().zero_grad();
      part.loss(*model.module()).backward();
      model.step();
    };
    std::vector<RunRecord> real(static_cast<size_t>(world));
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      real[static_cast<size_t>(comm->rank())] = record_run(make, train, comm);
    });
    for (int rank = 0; rank < world; ++rank)
      expect_same(dry_run(make, train, {.world_size = world, .rank = rank}), real[static_cast<size_t>(rank)],
                  part.name);
  }
}

TEST(DryRun, TakesWhatFunctionsTake) { expect_alike(functions(), /*stage=*/1, /*world=*/1); }
TEST(DryRun, TakesWhatAnyLossTakes) { expect_alike(losses(), /*stage=*/1, /*world=*/1); }
TEST(DryRun, TakesWhatModulesTake) { expect_alike(modules(), /*stage=*/3, /*world=*/2); }

}  // namespace
}  // namespace tessera::plan_tests
