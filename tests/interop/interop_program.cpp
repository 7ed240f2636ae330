// Writes files for Python to read, and reads files that Python wrote, for `make interop`.
//
//   interop_program save DIR          a checkpoint of 3 ranks, and the same as one file DIR/whole.safetensors
//   interop_program load FROM FILE    loads a directory of another program on 2 ranks, writes FILE whole
//   interop_program export-gpt2 DIR   (or export-tied-gpt2) a GPT of 2 ranks, and its logits in DIR/logits.safetensors
//   interop_program import-gpt2 DIR FILE   loads DIR, writes its logits to FILE
//   interop_program train FOLDER RANKS STEPS   resumes from the newest checkpoint of a folder, if any, on any storage;
//                                 prints each step's loss, and saves after each but the last
//   interop_program continue DIR RANKS STEPS TO   resumes from a checkpoint of convert_test.py's model; prints each
//                                 step's loss, and saves to TO unless that is "-"

#include <torch/torch.h>

#include <cstdio>
#include <exception>
#include <string>

#include <tessera/tessera.h>
#include "checkpoint/load/find_checkpoints.h"
#include "gpt.h"

namespace {

using Comm = std::shared_ptr<tessera::Communicator>;

// A model with every relevant kind of parameter: matrices cut inside a row, 4 dimensions, none, no elements; and
// buffers.
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

void import_gpt2(const std::string& directory, const std::string& logits) {
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
  write_logits(whole, logits);
}

void train(const std::string& folder, int ranks, int steps) {
  tessera::run_ranks(ranks, [&](Comm comm) {
    // 55 MB with AdamW's state: one rank writes more than a part of an upload.
    torch::nn::Sequential net(torch::nn::Linear(1000, 2300), torch::nn::Tanh(), torch::nn::Linear(2300, 1000));
    {
      const at::NoGradGuard no_grad;
      for (auto& parameter : net->parameters())
        parameter.copy_(torch::linspace(-0.05, 0.05, parameter.numel()).sin().view(parameter.sizes()));
    }
    tessera::FullyShardedDataParallel fsdp(net, comm);
    torch::optim::AdamW optimizer(fsdp.parameters(), 1e-3);
    const auto loaded = tessera::load_newest_checkpoint(folder, fsdp, optimizer);
    if (loaded && comm->rank() == 0)
      for (const auto& error : loaded->damaged) std::printf("passed over: %s\n", error.c_str());
    const int begin = loaded ? loaded->extra["step"].get<int>() : 0;
    for (int step = begin + 1; step <= begin + steps; ++step) {
      const auto loss = (fsdp(torch::linspace(-1, 1, 2000).view({2, 1000})) - 1).square().mean();
      optimizer.zero_grad();
      loss.backward();
      optimizer.step();
      if (comm->rank() == 0) std::printf("step %d: loss %.6f\n", step, loss.item<double>());
      if (step == begin + steps) continue;
      const std::string name = folder + "/step-" + std::to_string(step);
      if (step % 2 == 0)
        tessera::save_checkpoint(name, fsdp, optimizer, {{"step", step}}, {.keep_last = 2});
      else
        tessera::save_checkpoint_async(name, fsdp, optimizer, {{"step", step}}, {.keep_last = 2}).wait();
    }
  });
}

void go_on(const std::string& from, int ranks, int steps, const std::string& to) {
  tessera::run_ranks(ranks, [&](Comm comm) {
    torch::nn::Sequential net(torch::nn::Linear(20, 33), torch::nn::Tanh(), torch::nn::Linear(33, 7),
                              torch::nn::BatchNorm1d(7));
    tessera::FullyShardedDataParallel fsdp(net, comm, {.auto_wrap = tessera::wrap_modules<torch::nn::LinearImpl>()});
    // One group, or matrices in the first and the rest in the second, as in the checkpoint.
    std::vector<torch::optim::OptimizerParamGroup> groups(
        tessera::internal::read_manifest(from).optimizers.at("").groups.size(),
        torch::optim::OptimizerParamGroup(std::vector<at::Tensor>()));
    for (const auto& shard : fsdp.named_shards())
      groups[shard.sizes.size() > 1 ? 0 : groups.size() - 1].params().push_back(shard.tensor);
    torch::optim::AdamW optimizer(groups, 0.5);  // replaced by the checkpoint's
    tessera::load_checkpoint(from, fsdp, optimizer);
    for (int step = 0; step < steps; ++step) {
      const auto loss = (fsdp(torch::linspace(-1, 1, 80).view({4, 20})) - 1).square().mean();
      optimizer.zero_grad();
      loss.backward();
      optimizer.step();
      if (comm->rank() == 0) std::printf("%.9g\n", loss.item<double>());
    }
    if (to != "-") tessera::save_checkpoint(to, fsdp, optimizer);
  });
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  try {
    if (words.size() == 2 && words[0] == "save") return save(words[1]), 0;
    if (words.size() == 3 && words[0] == "load") return load(words[1], words[2]), 0;
    if (words.size() == 2 && words[0] == "export-gpt2") return export_gpt2(words[1], false), 0;
    if (words.size() == 2 && words[0] == "export-tied-gpt2") return export_gpt2(words[1], true), 0;
    if (words.size() == 3 && words[0] == "import-gpt2") return import_gpt2(words[1], words[2]), 0;
    if (words.size() == 4 && words[0] == "train") return train(words[1], std::stoi(words[2]), std::stoi(words[3])), 0;
    if (words.size() == 5 && words[0] == "continue")
      return go_on(words[1], std::stoi(words[2]), std::stoi(words[3]), words[4]), 0;
    std::fprintf(stderr, "interop_program: see the first lines of its source\n");
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "interop_program: %s\n", error.what());
    return 1;
  }
}
