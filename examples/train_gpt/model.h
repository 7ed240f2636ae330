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
  int64_t held_bytes = 0;           // current bytes of all tensors of the process; 0 without --tensorboard
  int64_t peak_held_bytes = 0;      // the peak of held_bytes
};

// A model with its optimizer: the interface between the training loop and a wrapper. All functions are collective,
// except for const functions, optimizer() and shards().
class Trainable {
 public:
  Trainable() = default;
  Trainable(const Trainable&) = delete;
  Trainable& operator=(const Trainable&) = delete;
  virtual ~Trainable() = default;

  virtual at::Tensor forward(const at::Tensor& tokens) = 0;

  // Adds the gradient of scale * loss to .grad. Returns this rank's loss, detached. Gradients must be read only after a
  // step's last micro-batch (`last_of_step`), which averages them over the ranks.
  virtual at::Tensor add_gradients(const Batch& batch, double scale, bool last_of_step) = 0;

  // Scales the gradients so that their norm is at most `max_norm`. Returns the norm before.
  virtual double clip_grad_norm(double max_norm) = 0;
  virtual void step() = 0;
  virtual void zero_grad() = 0;

  // Returns whether parameters change before step(), which is then a no-op. With --step-in-backward, they change in
  // backward and clip_grad_norm(). With --capture, they change in add_gradients(), which first clears the gradients.
  virtual bool steps_early() const { return false; }
  // With --step-in-backward, returns the value that StepInBackward suggests for --device-fraction.
  virtual std::optional<double> suggested_device_fraction() const { return std::nullopt; }

  // Swaps in averaged weights until the scope ends, if the model or its optimizer keeps averages.
  virtual std::optional<tessera::ScopeExit> averaged() { return std::nullopt; }

  virtual torch::optim::Optimizer& optimizer() = 0;
  // Returns the scaler of fp16 losses, whose state checkpoints save; null in other precisions.
  virtual tessera::ShardedGradScaler* scaler() { return nullptr; }
  virtual tessera::ModelShards& shards() = 0;                      // for checkpoints
  virtual tessera::ModelShards& own_shards() { return shards(); }  // without the average of weights
  virtual void restart_average() {}                                // sets the average, if any, to the current weights
  // Returns the model's parameters by name, unsharded on every rank and without averages. Must not be modified.
  using NamedTensors = torch::OrderedDict<std::string, at::Tensor>;
  virtual NamedTensors full_state() = 0;
  virtual MemoryUse memory() const = 0;
  virtual std::string describe() const = 0;  // "ddp: the whole state on each of 2 ranks"
};

// Returns a model with values drawn from --seed, unsharded and equal on all ranks. Is thread-safe, and not collective.
Gpt draw_model(const TrainOptions& options, at::Device device);

// Returns the model under the wrapper and optimizer that --wrapper, --offload and --optimizer select. Collective.
std::unique_ptr<Trainable> wrap(Gpt model, const TrainOptions& options, std::shared_ptr<tessera::Communicator> comm);

// Adds a moving average of the weights. Validation uses the average, and checkpoints save it.
std::unique_ptr<Trainable> with_ema(std::unique_ptr<Trainable> model, double decay);

// Finetuning with --lora: trains adapters of the linear layers of a frozen model. --quantize stores the frozen weights
// in 4 or 8 bits (quantize_linears.h).

// Loads the weights of --import-gpt2. `model` must not be wrapped yet, because quantizing needs unsharded weights: each
// rank temporarily holds all weights. Collective. Throws tessera::CheckpointError if a file does not match the model.
void load_base(Gpt& model, const TrainOptions& options, tessera::Communicator& comm);

// Freezes the model and adds adapters to the linear layers of its blocks, drawn from --seed. Thread-safe.
void draw_adapters(Gpt& model, const TrainOptions& options);

// Returns the number of elements of parameters that require gradients. `model` must not be wrapped yet.
int64_t trained_numel(const Gpt& model);

// Runs export_gpt2() on weights with merged adapters. `trained` must be the result of wrap(model, ...). Each rank
// temporarily holds the whole model, and rank 0 writes it. Collective. Throws tessera::CheckpointError.
void export_with_adapters(const std::filesystem::path& directory, Gpt& model, Trainable& trained,
                          tessera::Communicator& comm);

// Returns the names of parameters with two or more dimensions. Must be called before a wrapper flattens the parameters.
std::set<std::string> matrix_names(const torch::nn::Module& module);

// Get and set the weight decay of each parameter group.
std::vector<double> weight_decays(torch::optim::Optimizer& optimizer);
void set_weight_decays(torch::optim::Optimizer& optimizer, const std::vector<double>& decays);

void set_learning_rate(torch::optim::Optimizer& optimizer, double lr);

}  // namespace train_gpt
