#include "models.h"

#include <cmath>

#include <tessera/exported.h>
#include "gpt.h"

namespace train_step {
namespace {

constexpr int64_t kDataStream = 1 << 20;  // hashed() streams from this number on are data, lower ones are parameters

class GptModelImpl : public ModelImpl {
 public:
  explicit GptModelImpl(const Options& options)
      : gpt_(register_module("gpt", train_gpt::Gpt(train_gpt::GptOptions{.vocabulary = options.vocabulary,
                                                                         .layers = options.layers,
                                                                         .width = options.width,
                                                                         .heads = options.heads,
                                                                         .context = options.context}))) {}
  at::Tensor forward(const at::Tensor& inputs, const at::Tensor& targets) override {
    const auto logits = gpt_->forward(inputs);
    return torch::nn::functional::cross_entropy(logits.flatten(0, 1), targets.flatten());
  }

 private:
  train_gpt::Gpt gpt_{nullptr};
};

// A model exported by Python, with its loss.
class ArchiveModelImpl : public ModelImpl {
 public:
  explicit ArchiveModelImpl(const std::string& archive)
      : exported_(register_module("exported", tessera::load_exported(archive))) {}
  at::Tensor forward(const at::Tensor& inputs, const at::Tensor& targets) override {
    return exported_->forward(inputs, targets).tensor();
  }

 private:
  std::shared_ptr<tessera::ExportedModule> exported_;
};

// A chain of linear layers, with or without ReLU between them.
class ChainImpl : public ModelImpl {
 public:
  enum class Loss { kMeanSquares, kCrossEntropy };
  ChainImpl(const std::vector<int64_t>& widths, bool relu, Loss loss) : relu_(relu), loss_(loss) {
    layers_ = register_module("layers", torch::nn::ModuleList());
    for (size_t i = 0; i + 1 < widths.size(); ++i) layers_->push_back(torch::nn::Linear(widths[i], widths[i + 1]));
  }
  at::Tensor forward(const at::Tensor& inputs, const at::Tensor& targets) override {
    auto x = inputs;
    for (size_t i = 0; i < layers_->size(); ++i) {
      x = layers_[i]->as<torch::nn::Linear>()->forward(x);
      if (relu_) x = x.relu();
    }
    return loss_ == Loss::kMeanSquares ? torch::mse_loss(x, targets) : torch::nn::functional::cross_entropy(x, targets);
  }

 private:
  const bool relu_;
  const Loss loss_;
  torch::nn::ModuleList layers_{nullptr};
};

Model construct(const Options& options) {
  if (options.model == "gpt") return std::make_shared<GptModelImpl>(options);
  if (options.model == "archive") return std::make_shared<ArchiveModelImpl>(options.archive);
  if (options.model == "mlp")
    return std::make_shared<ChainImpl>(std::vector<int64_t>{256, 128, 10}, true, ChainImpl::Loss::kCrossEntropy);
  return std::make_shared<ChainImpl>(std::vector<int64_t>(options.layers + 1, options.width), options.model == "deep",
                                     ChainImpl::Loss::kMeanSquares);
}

at::Tensor values(at::IntArrayRef sizes, int64_t stream, double scale) {
  const auto tensor = torch::empty(sizes, torch::kFloat);
  auto* element = tensor.mutable_data_ptr<float>();
  for (int64_t i = 0; i < tensor.numel(); ++i) element[i] = static_cast<float>(hashed(stream, i) * scale);
  return tensor;
}

// Returns hashed integers from 0 to `count` - 1.
at::Tensor choices(at::IntArrayRef sizes, int64_t stream, int64_t count) {
  const auto tensor = torch::empty(sizes, torch::kInt64);
  auto* element = tensor.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < tensor.numel(); ++i)
    element[i] = static_cast<int64_t>((hashed(stream, i) + 1) / 2 * static_cast<double>(count));
  return tensor;
}

}  // namespace

double hashed(int64_t stream, int64_t index) {
  auto x = static_cast<uint32_t>(index) + static_cast<uint32_t>(stream) * 0x9E3779B1U;
  x = (x ^ (x >> 16)) * 0x85EBCA6BU;
  x = (x ^ (x >> 13)) * 0xC2B2AE35U;
  x ^= x >> 16;
  return static_cast<double>(x) / 2147483648.0 - 1.0;
}

Model make_model(const Options& options) {
  const auto before = torch::get_default_dtype();
  torch::set_default_dtype(c10::scalarTypeToTypeMeta(options.dtype));
  Model model = construct(options);
  torch::set_default_dtype(before);
  return model;
}

void set_values(const Options& options, const std::vector<tessera::NamedShard>& shards) {
  const torch::NoGradGuard no_grad;
  int64_t stream = 0;
  for (const tessera::NamedShard& shard : shards) {
    // Matrices preserve the variance of activations. Scales of norms are near 1, and biases are small.
    const bool is_matrix = shard.sizes.size() == 2;
    const double scale =
        is_matrix ? std::sqrt((options.model == "deep" ? 6.0 : 3.0) / static_cast<double>(shard.sizes[1])) : 0.02;
    const double shift = !is_matrix && shard.fqn.ends_with("weight") ? 1.0 : 0.0;
    const auto held = torch::empty({shard.held.numel()}, torch::kFloat);
    auto* element = held.mutable_data_ptr<float>();
    for (int64_t i = shard.held.begin; i < shard.held.end; ++i)
      *element++ = static_cast<float>(hashed(stream, i) * scale + shift);
    at::Tensor(shard.tensor).copy_(held.view(shard.tensor.sizes()));
    ++stream;
  }
}

Batch make_batch(const Options& options, int rank) {
  const int64_t stream = kDataStream + 2 * rank, rows = options.batch;
  if (options.model == "gpt" || options.model == "archive") {
    const auto tokens = choices({rows, options.context + 1}, stream, options.vocabulary);
    return {tokens.narrow(1, 0, options.context), tokens.narrow(1, 1, options.context)};
  }
  const auto inputs = values({rows, options.width}, stream, std::sqrt(3.0)).to(options.dtype);
  if (options.model == "mlp") return {inputs, choices({rows}, stream + 1, 10)};
  return {inputs, values({rows, options.width}, stream + 1, std::sqrt(3.0)).to(options.dtype)};
}

tessera::WrapPolicy units_of(const Options& options) {
  if (options.model == "archive") return tessera::wrap_classes({options.unit});
  return options.model == "gpt" ? tessera::wrap_modules<train_gpt::BlockImpl>()
                                : tessera::wrap_modules<torch::nn::LinearImpl>();
}

}  // namespace train_step
