#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <tessera/model/model_shards.h>
#include <tessera/scope_exit.h>

namespace tessera {

// Options of Ema.
struct EmaOptions {
  // Each update sets average <- decay * average + (1 - decay) * parameter. Must be in [0, 1).
  double decay = 0.9999;
  // true: limits the decay in update n (from 0) to (1 + n) / (10 + n), so that the initial values soon lose weight.
  bool warmup = false;
};

// The exponential moving average of a model's parameters (Polyak averaging; torch.optim.swa_utils.AveragedModel), in
// fp32, or in fp64 for fp64 parameters. Averages of complex parameters are complex. Each rank averages its own part,
// and update() does not communicate. If N ranks hold equal parameters, each of them averages 1/N of the parameters.
// This is the case for DistributedDataParallel, OSS, ShardedDataParallel and replicas of hybrid sharding.
//
//   tessera::Ema ema(fsdp, {.decay = 0.999});
//   for (...) {
//     optimizer.step();
//     ema.update();
//   }
//   {
//     auto averaged = ema.swap_in();  // the parameters are the averages
//     evaluate(fsdp);
//   }                                 // the parameters are the model's own again, bit for bit
//   save_checkpoint(dir, {fsdp, optimizer, ema});  // load_checkpoint() accepts this list, also without `ema`
//   save_full("ema.safetensors", ema);             // saves the averages under the module's names
//
// The ModelShards functions of an Ema return the averages, under the parameters' names. Integer parameters and buffers
// are not averaged. With OssOptions::broadcast_dtype, a rank averages the rounded values that it receives from the
// owners. Must be used by one thread.
class Ema : public ModelShards {
 public:
  // Sets the averages to the parameters. `model` must outlive this object. Is collective. Throws std::invalid_argument
  // if the decay is out of range, if options differ between ranks, or if a parameter is not dense.
  explicit Ema(ModelShards& model, EmaOptions options = {});

  // Updates the averages, with one foreach call. Must be called after each optimizer step. Is not collective.
  // Parameters on disk are read one at a time. Throws std::logic_error while averages are swapped in.
  void update();
  int64_t updates() const { return updates_.item<int64_t>(); }  // number of updates

  // Replaces the parameters by their averages until the scope ends, then restores them. This object must outlive the
  // scope. Allocates a copy of this rank's parameters. If ranks hold equal parameters, this call is collective: one
  // all-gather for each parameter. The end of the scope is not collective. Throws std::logic_error if a scope is open.
  ScopeExit swap_in();

  // Returns an object with the model's tensors, an average "ema.<name>" for each parameter, and the buffer
  // "ema.updates". The object is valid as long as this Ema. For checkpoints it is equivalent to the list {model, ema}.
  ModelShards& with_model();
  // Returns the Ema whose with_model() returned the object `with_model`, or null for any other object.
  static Ema* of(ModelShards& with_model);

  ModelShards& model() const { return model_; }          // the averaged model
  bool is_swapped_in() const { return is_swapped_in_; }  // whether a scope of swap_in() is open

  const std::shared_ptr<Communicator>& comm() const override { return model_.comm(); }
  std::vector<NamedShard> named_shards() const override;
  torch::OrderedDict<std::string, at::Tensor> named_buffers() const override {
    return torch::OrderedDict<std::string, at::Tensor>();
  }

 private:
  class WithModel;
  struct Average {
    NamedShard shard;                 // the parameter, with its strides at construction
    Range part;                       // elements of `shard.held` that this rank averages
    std::vector<int64_t> part_numel;  // size of `part` on each rank of replicas_; empty without replicas
    at::Tensor values;                // averages of these elements: [part.numel()]
  };
  static bool is_whole(const Average& average);
  static at::Tensor elements(const Average& average);
  static at::Tensor source(const Average& average);

  ModelShards& model_;
  const EmaOptions options_;
  std::shared_ptr<Communicator> replicas_;  // ranks that hold the same elements; null if only this rank does
  std::vector<Average> averages_;
  at::Tensor updates_;  // number of updates: [], int64
  std::unique_ptr<ModelShards> with_model_;
  bool is_swapped_in_ = false;
};

}  // namespace tessera
