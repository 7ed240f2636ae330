#pragma once

// Declares the names that the documentation's snippets use without a declaration. Snippets are uncalled inline
// functions, so they are compiled and not linked. Only train() is defined: a snippet's main() calls it.

#include <torch/torch.h>

#include <iostream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <tessera/exported.h>
#include <tessera/plan.h>
#include <tessera/tessera.h>

namespace in_documentation {

struct Config {};
struct BlockImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x);
};
TORCH_MODULE(Block);
struct GptImpl : torch::nn::Module {
  explicit GptImpl(const Config& config);
  at::Tensor forward(const at::Tensor& x);
};
TORCH_MODULE(Gpt);
struct Batch {
  at::Tensor x, y;
  int64_t token_count() const;
};
struct Images : torch::data::datasets::Dataset<Images> {
  torch::data::Example<> get(size_t index) override;
  std::optional<size_t> size() const override;
};
double accuracy_of(tessera::FullyShardedDataParallel<Gpt>& wrapped);
void evaluate(tessera::FullyShardedDataParallel<Gpt>& wrapped);
at::Tensor loss_of(const at::Tensor& outputs);
at::Tensor rows_of_step(int64_t step, const tessera::Communicator& comm);
void print_loss(int64_t step, const at::Tensor& loss, tessera::Communicator& comm);
inline void train(const std::shared_ptr<tessera::Communicator>& /*comm*/) {}
at::Tensor sum_of_losses(const at::Tensor& outputs, const at::Tensor& targets);

extern Config config;
extern Gpt model, net;
extern Block block;
extern torch::nn::ModuleList blocks;
extern torch::nn::Sequential sequential;
extern std::shared_ptr<tessera::Communicator> comm;
extern tessera::FullyShardedDataParallel<Gpt> fsdp, g, c;
extern tessera::FsdpOptions options;
extern torch::optim::AdamW optimizer, g_adam, c_adam, adamw;
extern tessera::Muon muon;
extern tessera::ShardedGradScaler scaler;
extern at::Tensor x, y, loss;
extern Batch batch;
extern std::vector<std::pair<at::Tensor, at::Tensor>> loader, batches;
extern std::vector<torch::optim::OptimizerParamGroup> groups;
extern int64_t step, steps, items_numel, tokens_of_this_rank;
extern std::string dir, folder;
using torch::optim::AdamWOptions;

}  // namespace in_documentation
