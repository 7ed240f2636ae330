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
  // Limits the decay in update n (from 0) to (1 + n) / (10 + n), so that the initial values soon lose their weight.
  bool warmup = false;
};

// The exponential moving average of a model's parameters (Polyak averaging; torch.optim.swa_utils.AveragedModel), in
// fp32 (fp64 for fp64 parameters; complex parameters likewise). Averages are split over the ranks: each rank averages
// its own part, and only evaluation communicates. Ranks with equal parameters (DistributedDataParallel, OSS,
// ShardedDataParallel, replicas of hybrid sharding) average 1/N of them each.
//
//   tessera::Ema ema(fsdp, {.decay = 0.999});
//   for (...) {
//     optimizer.step();
//     ema.update();
//   }
//   {
//     auto averaged = ema.swap_in();  // the model has the averages
//     evaluate(fsdp);
//   }                                 // and its own parameters again, bit for bit
//   save_checkpoint(dir, {fsdp, optimizer, ema});  // load_checkpoint() likewise, or without the averages
//   save_full("ema.safetensors", ema);                  // the averages under the module's names
//
// Its ModelShards are the averages, under the parameters' names. Integer parameters have no averages; buffers
// stay the module's. With OssOptions::broadcast_dtype it averages the rounded values that ranks receive. Must be used
// by one thread.
class Ema : public ModelShards {
 public:
  // Sets the averages to the parameters. `model` must outlive this object. Is collective. Throws std::invalid_argument
  // if the decay is out of range or differs between ranks, and for parameters that are not dense.
  explicit Ema(ModelShards& model, EmaOptions options = {});

  // Must be called after each optimizer step. Is not collective. One foreach call; parameters on disk are read one at a
  // time. Throws std::logic_error while averages are swapped in.
  void update();
  int64_t updates() const { return updates_.item<int64_t>(); }  // number of updates

  // Replaces the parameters by their averages until the scope ends, then restores them. This object must outlive the
  // scope. Allocates a copy of the parameters that this rank holds. Is collective if ranks hold equal parameters: one
  // all-gather for each parameter; the end of the scope is not. Throws std::logic_error if a scope is already open.
  ScopeExit swap_in();

  // Returns the model and its averages as one: "ema.<name>" for each average, and the buffer "ema.updates". Valid as
  // long as this object. For checkpoints it is equivalent to the list {model, ema}.
  ModelShards& with_model();
  // Returns the Ema whose with_model() this is, or null.
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
    std::vector<int64_t> part_numel;  // by rank of replicas_; empty without replicas
    at::Tensor values;                // [part.numel()]
  };
  static bool is_whole(const Average& average);
  static at::Tensor elements(const Average& average);
  static at::Tensor source(const Average& average);

  ModelShards& model_;
  const EmaOptions options_;
  std::shared_ptr<Communicator> replicas_;  // ranks with equal parts; null: none
  std::vector<Average> averages_;
  at::Tensor updates_;  // [], int64
  std::unique_ptr<ModelShards> with_model_;
  bool is_swapped_in_ = false;
};

}  // namespace tessera
