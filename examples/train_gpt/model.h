#pragma once

#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "data.h"
#include "gpt.h"
#include "options.h"

namespace train_gpt {

// The training state of one rank, in bytes.
struct MemoryUse {
  int64_t parameter_bytes = 0;
  int64_t grad_bytes = 0;
  int64_t optimizer_bytes = 0;
  int64_t peak_gathered_bytes = 0;  // peak of the full parameters of unsharded units
  int64_t peak_bucket_bytes = 0;    // peak of the full gradients that wait for their reduction
  int64_t held_bytes = 0;           // all tensors of the process now; counted with --tensorboard only, else 0
  int64_t peak_held_bytes = 0;      // the peak of held_bytes
};

// A model with its optimizer: the interface between the training loop and a wrapper. Every function is collective, but
// for the const ones, optimizer() and shards().
class Trainable {
 public:
  Trainable() = default;
  Trainable(const Trainable&) = delete;
  Trainable& operator=(const Trainable&) = delete;
  virtual ~Trainable() = default;

  virtual at::Tensor forward(const at::Tensor& tokens) = 0;

  // Adds the gradient of scale * loss to .grad, and returns this rank's loss, detached. After the last micro-batch of a
  // step the gradients are averages over the ranks; before it they must not be read.
  virtual at::Tensor add_gradients(const Batch& batch, double scale, bool last_of_step) = 0;

  // Scales the gradients down to at most this norm; returns the norm before.
  virtual double clip_grad_norm(double max_norm) = 0;
  virtual void step() = 0;
  virtual void zero_grad() = 0;

  // Whether parameters change before step(), which then does nothing: with --step-in-backward in backward and in
  // clip_grad_norm(), with --capture in add_gradients(), which also clears the gradients first.
  virtual bool steps_early() const { return false; }
  // With --step-in-backward: what StepInBackward suggests for --device-fraction.
  virtual std::optional<double> suggested_device_fraction() const { return std::nullopt; }

  // Swaps in averaged weights until the scope ends, if the model or its optimizer keeps averages.
  virtual std::optional<tessera::ScopeExit> averaged() { return std::nullopt; }

  virtual torch::optim::Optimizer& optimizer() = 0;
  // The scale of losses in fp16, which checkpoints keep; null in other precisions.
  virtual tessera::ShardedGradScaler* scaler() { return nullptr; }
  virtual tessera::ModelShards& shards() = 0;                      // for checkpoints
  virtual tessera::ModelShards& own_shards() { return shards(); }  // without the average of weights
  virtual void restart_average() {}                                // from the weights, if there is one
  // The model's own parameters by name, whole on every rank; read only.
  using NamedTensors = torch::OrderedDict<std::string, at::Tensor>;
  virtual NamedTensors full_state() = 0;
  virtual MemoryUse memory() const = 0;
  virtual std::string describe() const = 0;  // "ddp: the whole state on each of 2 ranks"
};

// The model with values drawn from --seed, whole and equal on every rank. Not collective. Thread-safe.
Gpt draw_model(const TrainOptions& options, at::Device device);

// The model with its optimizer, as --wrapper, --offload and --optimizer say. Collective.
std::unique_ptr<Trainable> wrap(Gpt model, const TrainOptions& options, std::shared_ptr<tessera::Communicator> comm);

// Adds a moving average of the weights, which validation takes and checkpoints hold.
std::unique_ptr<Trainable> with_ema(std::unique_ptr<Trainable> model, double decay);

// Finetuning with --lora: trains adapters beside the linear layers of a frozen model, whose weights --quantize packs in
// 4 or 8 bit (quantize_linears.h).

// Loads the weights of --import-gpt2 into a model that is not wrapped: quantizing needs whole weights, so each rank
// holds all of them meanwhile. Collective. Throws tessera::CheckpointError for files that do not fit.
void load_base(Gpt& model, const TrainOptions& options, tessera::Communicator& comm);

// Freezes the model and adds adapters to the linear layers of its blocks, drawn from --seed. Thread-safe.
void draw_adapters(Gpt& model, const TrainOptions& options);

// Elements of the parameters that require gradients. The model must not be wrapped yet.
int64_t trained_numel(const Gpt& model);

// export_gpt2() with the adapters merged into the weights. `model` is the module that was wrapped. Every rank holds the
// whole model meanwhile, and rank 0 writes it. Collective. Throws tessera::CheckpointError.
void export_with_adapters(const std::filesystem::path& directory, Gpt& model, Trainable& trained,
                          tessera::Communicator& comm);

// The names of the parameters with two or more dimensions. Must be called before a wrapper flattens the parameters.
std::set<std::string> matrix_names(const torch::nn::Module& module);

// The weight decay of each of the optimizer's groups.
std::vector<double> weight_decays(torch::optim::Optimizer& optimizer);
void set_weight_decays(torch::optim::Optimizer& optimizer, const std::vector<double>& decays);

void set_learning_rate(torch::optim::Optimizer& optimizer, double lr);

}  // namespace train_gpt
