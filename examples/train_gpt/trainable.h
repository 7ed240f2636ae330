#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <optional>
#include <string>

#include <tessera/model_shards.h>
#include <tessera/scope.h>
#include "batch.h"

namespace train_gpt {

// What one rank holds of the training state, in bytes.
struct MemoryUse {
  int64_t parameter_bytes = 0;
  int64_t grad_bytes = 0;
  int64_t optimizer_bytes = 0;
  int64_t peak_gathered_bytes = 0;  // full parameters of units in use, at most
  int64_t peak_bucket_bytes = 0;    // full gradients on their way to be reduced, at most
  int64_t held_bytes = 0;           // by all tensors of the process now, and
  int64_t peak_held_bytes = 0;      // at most: where they are counted (--tensorboard), else 0
};

// A model with its optimizer, in whichever way the training state lies on the ranks: all that the
// training loop knows of it. Every function but the const ones, optimizer() and shards() is collective.
class Trainable {
 public:
  Trainable() = default;
  Trainable(const Trainable&) = delete;
  Trainable& operator=(const Trainable&) = delete;
  virtual ~Trainable() = default;

  virtual at::Tensor forward(const at::Tensor& tokens) = 0;

  // Adds the gradient of scale * loss to what is there, and returns this rank's loss, detached.
  // After the step's last micro-batch the gradients are averages over the ranks; before it they
  // are of no use.
  virtual at::Tensor add_gradients(const Batch& batch, double scale, bool last_of_step) = 0;

  // Scales the gradients down to at most this norm; returns the norm before.
  virtual double clip_grad_norm(double max_norm) = 0;
  virtual void step() = 0;
  virtual void zero_grad() = 0;

  // While the scope lives, the model has the weights that are evaluated: averages, where it keeps any.
  virtual std::optional<tessera::Scope> averaged() { return std::nullopt; }

  virtual torch::optim::Optimizer& optimizer() = 0;
  virtual tessera::ModelShards& shards() = 0;                      // for checkpoints
  virtual tessera::ModelShards& own_shards() { return shards(); }  // the model's alone
  // The model's own parameters by name, whole on every rank; not to be written to.
  using NamedTensors = torch::OrderedDict<std::string, at::Tensor>;
  virtual NamedTensors full_state() = 0;
  virtual MemoryUse memory() const = 0;
  virtual std::string describe() const = 0;  // "ddp: the whole state on each of 2 ranks"
};

}  // namespace train_gpt
