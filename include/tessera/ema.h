#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <tessera/model_shards.h>
#include <tessera/scope.h>

namespace tessera {

// How fast averages follow.
struct EmaOptions {
  // average <- decay * average + (1 - decay) * parameter, in each update. 0 or more and below 1.
  double decay = 0.9999;
  // In update n (the first is 0) the decay is at most (1 + n) / (10 + n), so that the first values are soon forgotten.
  bool warmup = false;
};

// The exponential moving average of a model's parameters (Polyak averaging; torch.optim.swa_utils.AveragedModel), in
// fp32 (fp64 for fp64), split over the ranks whatever the wrapper splits: each rank averages its own part and nothing
// is exchanged but to evaluate. Where ranks hold the same (DistributedDataParallel, OSS, ShardedDataParallel, copies of
// hybrid sharding) each averages 1/N of it.
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
// As ModelShards it shows the averages, under the parameters' names. Floating-point parameters only; buffers stay the
// module's. With OssOptions::broadcast_dtype it averages what ranks were sent, rounded. Used by one thread.
class Ema : public ModelShards {
 public:
  // Averages begin as the parameters are. `model` outlives this. Collective. Throws std::invalid_argument for a decay
  // out of range or that ranks disagree about, and for parameters that are not dense.
  explicit Ema(ModelShards& model, EmaOptions options = {});

  // After each step of the optimizer. Not collective: one foreach call (a tensor at a time from a disk). Throws
  // std::logic_error while averages are swapped in.
  void update();
  int64_t updates() const { return updates_.item<int64_t>(); }  // how many there were

  // While the scope lives, the parameters have the averages' values; then their own again. Takes the memory of what
  // the rank holds of the parameters. Collective where ranks hold the same: an all-gather a parameter; ending the scope
  // is not. Throws std::logic_error for a second scope at a time.
  Scope swap_in();

  // The model with the averages beside it: "ema.<name>" for each, and the buffer "ema.updates". As long as this lives.
  // For checkpoints the same as the list {model, ema}.
  ModelShards& with_model();
  // Whose with_model() this is; null: nobody's.
  static Ema* of(ModelShards& with_model);

  ModelShards& model() const { return model_; }          // whose parameters are averaged
  bool is_swapped_in() const { return is_swapped_in_; }  // while a scope of swap_in() lives

  const std::shared_ptr<Communicator>& comm() const override { return model_.comm(); }
  std::vector<NamedShard> named_shards() const override;
  torch::OrderedDict<std::string, at::Tensor> named_buffers() const override {
    return torch::OrderedDict<std::string, at::Tensor>();
  }

 private:
  class WithModel;
  struct Average {
    NamedShard shard;                 // of the parameter, with the strides that it had at first
    Range part;                       // of `shard.held`, in its elements, that this rank averages
    std::vector<int64_t> part_numel;  // by rank of replicas_; empty without
    at::Tensor values;                // [part.numel()]
  };
  static bool is_whole(const Average& average);
  static at::Tensor elements(const Average& average);
  static at::Tensor source(const Average& average);

  ModelShards& model_;
  const EmaOptions options_;
  std::shared_ptr<Communicator> replicas_;  // who hold the same parts; null: nobody else
  std::vector<Average> averages_;
  at::Tensor updates_;  // [], int64
  std::unique_ptr<ModelShards> with_model_;
  bool is_swapped_in_ = false;
};

}  // namespace tessera
