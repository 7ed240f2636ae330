#pragma once

// Defines the names that the documentation's snippets use without a declaration: a small model, its data, wrappers and
// optimizers. Each snippet is a member function of its own struct that derives from Names, and runs in processes of its
// own. So no snippet sees another's changes.

#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <tessera/elastic.h>
#include <tessera/exported.h>
#ifdef TESSERA_SNIPPETS_OF_MPI
#include <tessera/mpi.h>
#endif
#include <tessera/plan.h>
#include <tessera/tessera.h>

namespace in_documentation {

struct Config {
  int64_t vocabulary = 64, width = 512, layers = 2;
};

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const Config& config = {}) {
    norm_ = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({config.width})));
    linear_ = register_module("linear", torch::nn::Linear(config.width, config.width));
  }
  at::Tensor forward(const at::Tensor& x) { return x + torch::gelu(linear_(norm_(x))); }

 private:
  torch::nn::LayerNorm norm_ = nullptr;
  torch::nn::Linear linear_ = nullptr;
};
TORCH_MODULE(Block);

// Takes tokens, or rows of `width` numbers in the place of their embeddings.
struct GptImpl : torch::nn::Module {
  explicit GptImpl(const Config& config = {}) {
    embedding_ = register_module("embedding", torch::nn::Embedding(config.vocabulary, config.width));
    blocks_ = register_module("blocks", torch::nn::ModuleList());
    for (int64_t i = 0; i < config.layers; ++i) blocks_->push_back(Block(config));
  }
  at::Tensor forward(const at::Tensor& x) {
    const bool is_rows = x.is_floating_point();
    at::Tensor hidden = embedding_(is_rows ? torch::arange(x.size(0), x.options().dtype(at::kLong)) : x);
    if (is_rows) hidden = hidden + x;
    for (const auto& block : *blocks_) hidden = block->as<Block>()->forward(hidden);
    return hidden;
  }

 private:
  torch::nn::Embedding embedding_ = nullptr;
  torch::nn::ModuleList blocks_ = nullptr;
};
TORCH_MODULE(Gpt);

struct Batch {
  at::Tensor x, y;
  int64_t token_count() const { return x.size(0); }
};

constexpr int64_t kImages = 640;  // 100 steps in 10 epochs of two ranks

struct Images : torch::data::datasets::Dataset<Images> {
  torch::data::Example<> get(size_t index) override {
    const auto label = static_cast<int64_t>(index % 10);
    return {torch::full({Config().width}, 0.1 * static_cast<double>(label)), torch::tensor(label)};
  }
  std::optional<size_t> size() const override { return kImages; }
};

inline at::Tensor rows_of_step(int64_t step, const tessera::Communicator& comm) {
  torch::manual_seed(100 * step + comm.rank());
  return torch::randn({8, Config().width});
}
inline void evaluate(tessera::FullyShardedDataParallel<Gpt>& wrapped) {
  const torch::NoGradGuard no_grad;
  wrapped(torch::zeros({8, Config().width}));
}
inline double accuracy_of(tessera::FullyShardedDataParallel<Gpt>& wrapped) {
  evaluate(wrapped);
  return 0.5;
}
inline at::Tensor loss_of(const at::Tensor& outputs) { return outputs.square().mean(); }
inline at::Tensor sum_of_losses(const at::Tensor& outputs, const at::Tensor& targets) {
  return torch::mse_loss(outputs, targets, at::Reduction::Sum);
}
inline void print_loss(int64_t step, const at::Tensor& loss, tessera::Communicator& comm) {
  const at::Tensor mean = tessera::reduce_to_host(comm, loss.detach().clone(), tessera::ReduceOp::kAverage, "the loss");
  if (comm.rank() == 0) std::cout << "step " << step << ": loss " << mean.item<double>() << "\n";
}
inline Gpt make_model() { return Gpt(); }
inline void train_step() {}
// Called by a snippet's main().
inline void train(const std::shared_ptr<tessera::Communicator>& comm) { comm->barrier(); }

using torch::optim::AdamWOptions;

using Wrapped = tessera::FullyShardedDataParallel<Gpt>;

inline std::vector<torch::optim::OptimizerParamGroup> matrices_of(const Gpt& model) {
  std::vector<at::Tensor> matrices;
  for (const at::Tensor& parameter : model->parameters())
    if (parameter.dim() == 2) matrices.push_back(parameter);
  return {torch::optim::OptimizerParamGroup(matrices)};
}
// The parameters of a wrapped model that are matrices, or those that are not.
inline std::vector<at::Tensor> shards_of(Wrapped& wrapped, bool are_matrices) {
  std::vector<at::Tensor> tensors;
  for (const tessera::NamedShard& shard : wrapped.named_shards())
    if ((shard.sizes.size() == 2) == are_matrices) tensors.push_back(shard.tensor);
  return tensors;
}

// The arguments of Names.
struct Setting {
  int rank = 0, world_size = 1;
  bool wraps_model = false;  // whether the snippet wraps `model`; otherwise `fsdp` has it
};

struct Names {
  explicit Names(const Setting& setting)
      : comm(tessera::communicator_from(c10::make_intrusive<c10d::FileStore>("store", setting.world_size), setting.rank,
                                        setting.world_size, {.timeout = std::chrono::seconds(60)})),
        fsdp(setting.wraps_model ? Gpt() : model, comm, options) {
    for (int i = 0; i < 2; ++i) {
      loader.emplace_back(rows_of_step(i, *comm), torch::randn({8, config.width}));
      const at::Tensor tokens = torch::randint(3, 32, {2, 6}, at::kLong);
      batches.emplace_back(tokens, torch::ones_like(tokens));
    }
    x = loader[0].first, y = loader[0].second;
    batch = {x, y};
    ids = batches[0].first;
    loss = torch::mse_loss(fsdp(x), y);
  }

  Config config;
  Gpt model, net, surrogate;
  Block block;
  torch::nn::ModuleList blocks{Block(), Block()};
  torch::nn::Sequential sequential{Block(), Block()};
  std::shared_ptr<tessera::Communicator> comm;
  tessera::FsdpOptions options{.auto_wrap = tessera::wrap_modules<BlockImpl>()};
  Wrapped fsdp;
  Wrapped g{Gpt(), comm, options}, c{Gpt(), comm, options};
  torch::optim::AdamW optimizer{fsdp.parameters(), 1e-3};
  torch::optim::AdamW g_adam{g.parameters(), 1e-3}, c_adam{c.parameters(), 1e-3};
  tessera::Muon muon{fsdp, {torch::optim::OptimizerParamGroup(shards_of(fsdp, true))}, tessera::MuonOptions(2e-2)};
  torch::optim::AdamW adamw{shards_of(fsdp, false), 1e-3};
  tessera::ShardedGradScaler scaler{comm};
  at::Tensor x, y, ids, loss, mean = torch::ones({}), result = torch::ones({});
  Batch batch;
  std::vector<std::pair<at::Tensor, at::Tensor>> loader, batches;
  std::vector<torch::optim::OptimizerParamGroup> groups = matrices_of(model);
  int64_t step = 0, steps = 20, items_numel = kImages, tokens_of_this_rank = 8;
  tessera::DistributedSampler sampler{kImages, comm->rank(), comm->size(), {.batch_numel = 8, .seed = 1}};
  std::string dir = "checkpoint", folder = "run", host = "127.0.0.1";
  c10d::TCPStoreOptions tcp_options{.port = 0, .isServer = true};
  int rank = 0, size = 1;
  int argc = 0, level = 0;
  char** argv = nullptr;
};

// A snippet of a page. `run` and `main` are null if the snippet is only compiled: a type or a template.
struct Snippet {
  std::string page, text;
  int (*run)(const Setting&) = nullptr;
  int (*main)(int argc, char** argv) = nullptr;  // of a snippet that is a whole program
};

template <class Member>
int run_member(const Setting& setting) {
  return Member(setting).run();
}

extern const std::vector<Snippet> kSnippets;  // in the file that snippets.cmake writes

}  // namespace in_documentation
