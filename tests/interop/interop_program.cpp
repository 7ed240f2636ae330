// The C++ side of `make interop`: writes what Python is to read, and reads what Python wrote.
//
//   interop_program save DIR          a checkpoint of 3 ranks, and the same whole in DIR/whole.safetensors
//   interop_program load FROM FILE    loads a directory of another program on 2 ranks, writes FILE whole
//   interop_program export-gpt2 DIR   (or export-tied-gpt2) a GPT of 2 ranks, and its logits in DIR/logits.safetensors
//   interop_program import-gpt2 DIR   loads DIR, writes its logits to DIR/imported.safetensors

#include <torch/torch.h>

#include <cstdio>
#include <exception>
#include <string>

#include "gpt2_files.h"
#include "tessera/tessera.h"

namespace {

using Comm = std::shared_ptr<tessera::Communicator>;

// A model with a parameter of each kind that matters: matrices that are cut inside a row, 4
// dimensions, none, no elements; and buffers.
struct SampleImpl : torch::nn::Module {
  SampleImpl() {
    register_module("first", torch::nn::Linear(7, 11));
    register_module("conv", torch::nn::Conv2d(3, 5, 3));
    register_module("norm", torch::nn::BatchNorm1d(11));
    register_parameter("scale", torch::full({}, 2.5));
    register_parameter("nothing", torch::empty({0, 4}));
    register_parameter("half", torch::arange(13, torch::kFloat).to(torch::kBFloat16));
    register_parameter("permuted", torch::randn({5, 6, 4}).permute({2, 0, 1}));
  }
  at::Tensor forward(const at::Tensor& x) { return x; }
};
TORCH_MODULE(Sample);

void save(const std::string& directory) {
  torch::manual_seed(1);
  const Sample original;
  tessera::run_ranks(3, [&](Comm comm) {
    Sample sample;
    {
      const at::NoGradGuard no_grad;
      auto source = original->named_parameters();
      for (auto& item : sample->named_parameters()) item.value().copy_(source[item.key()]);
    }
    tessera::FullyShardedDataParallel fsdp(sample, comm);
    torch::optim::Adam optimizer(fsdp.parameters(), 0.1);
    for (auto& shard : fsdp.parameters()) shard.mutable_grad() = torch::ones_like(shard) * (comm->rank() + 1);
    optimizer.step();
    tessera::save_checkpoint(directory + "/checkpoint", fsdp, optimizer, {{"step", 3}});
    tessera::save_full(directory + "/whole.safetensors", fsdp);
  });
}

void load(const std::string& from, const std::string& to) {
  tessera::run_ranks(2, [&](Comm comm) {
    tessera::FullyShardedDataParallel fsdp(Sample(), comm);
    tessera::load_full(from, fsdp);
    tessera::save_full(to, fsdp);
  });
}

void write_logits(train_gpt::Gpt model, const std::string& file) {
  const at::NoGradGuard no_grad;
  const auto tokens = torch::arange(24).view({2, 12}) * 5 % model->options().vocabulary;
  const at::Tensor logits = model->forward(tokens).contiguous();
  tessera::write_full(
      file,
      {{"tokens", tokens.scalar_type(), tokens.sizes().vec(), {}}, {"logits", at::kFloat, logits.sizes().vec(), {}}},
      [&](const tessera::FullTensor& tensor) { return tensor.name == "tokens" ? tokens : logits; });
}

void export_gpt2(const std::string& directory, bool tie) {
  const train_gpt::GptOptions options{
      .vocabulary = 61, .layers = 3, .width = 24, .heads = 4, .context = 16, .tie = tie};
  torch::manual_seed(5);
  train_gpt::Gpt reference(options);
  write_logits(reference, directory + "/logits.safetensors");
  tessera::run_ranks(2, [&](Comm comm) {
    train_gpt::Gpt model(options);
    {
      const at::NoGradGuard no_grad;
      auto source = reference->named_parameters();
      for (auto& item : model->named_parameters()) item.value().copy_(source[item.key()]);
    }
    tessera::FullyShardedDataParallel fsdp(model, comm, {.auto_wrap = tessera::wrap_modules<train_gpt::BlockImpl>()});
    train_gpt::export_gpt2(directory, fsdp, options);
  });
}

void import_gpt2(const std::string& directory) {
  const auto options = train_gpt::read_gpt2_options(directory);
  train_gpt::Gpt whole(options);
  tessera::run_ranks(2, [&](Comm comm) {
    tessera::FullyShardedDataParallel fsdp(train_gpt::Gpt(options), comm,
                                           {.auto_wrap = tessera::wrap_modules<train_gpt::BlockImpl>()});
    train_gpt::import_gpt2(directory, fsdp, options);
    auto state = fsdp.full_state_dict();
    if (comm->rank() != 0) return;
    const at::NoGradGuard no_grad;
    for (auto& item : whole->named_parameters()) item.value().copy_(state[item.key()]);
  });
  write_logits(whole, directory + "/imported.safetensors");
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  try {
    if (words.size() == 2 && words[0] == "save") return save(words[1]), 0;
    if (words.size() == 3 && words[0] == "load") return load(words[1], words[2]), 0;
    if (words.size() == 2 && words[0] == "export-gpt2") return export_gpt2(words[1], false), 0;
    if (words.size() == 2 && words[0] == "export-tied-gpt2") return export_gpt2(words[1], true), 0;
    if (words.size() == 2 && words[0] == "import-gpt2") return import_gpt2(words[1]), 0;
    std::fprintf(stderr, "interop_program: see the first lines of its source\n");
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "interop_program: %s\n", error.what());
    return 1;
  }
}
