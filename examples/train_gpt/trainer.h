#pragma once

#include <tessera/elastic.h>
#include <tessera/tessera.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "data.h"
#include "model.h"
#include "options.h"

namespace train_gpt {

// The figures of one optimizer step.
struct StepReport {
  int64_t step = 0;           // 1 for the first
  double loss = 0.0;          // nats a token, the mean over all ranks
  double tokens_per_s = 0.0;  // of all ranks together, without validation
  double lr = 0.0;
  double grad_norm = 0.0;          // before clipping
  std::optional<double> val_loss;  // if the step was validated
  MemoryUse memory;                // this rank's
  // Every --report-every steps: the waits since the last report, and the memory of each rank.
  std::optional<tessera::WaitReport> waits;
  std::vector<MemoryUse> memory_by_rank;
};

// The sequences of a step of the ranks that the launcher has started.
int64_t sequences_of_step(const TrainOptions& options, int ranks);

// The training loop, the same for every wrapper. All ranks construct one with the same arguments and call the same
// functions.
class Trainer {
 public:
  // The corpus, communicator and model must outlive the trainer. `first_ranks`: the world that the launcher started, if
  // an elastic run has another one now.
  Trainer(const TrainOptions& options, const Corpus& corpus, tessera::Communicator& comm, Trainable& model,
          int first_ranks = 0);

  // memory() reports this count of the process's tensors, too. `held` must outlive the trainer.
  void count_memory(const tessera::PeakMemory& held) { held_ = &held; }

  // Replaces the warm-up by that of the run that is resumed.
  void set_warmup(int64_t steps);

  // Trains all steps but the first `first_step`. Calls `before_update` before each step changes the parameters and
  // `on_step` after it, and returns early when `on_step` returns false. Throws std::runtime_error if the loss is not
  // finite.
  void run(int64_t first_step, const std::function<void()>& before_update,
           const std::function<bool(const StepReport&)>& on_step);

  // One step; the first is 0.
  StepReport train_step(int64_t step, const std::function<void()>& before_update);

  // The loss on the validation windows: the mean over all ranks.
  double validate();

  // The loss of a unigram model of the training part, on the validation windows.
  double unigram_loss() const;

  WindowSampler& sampler() { return sampler_; }
  int64_t tokens_per_step() const { return shape_.global() * context_; }

  // This rank's memory. Gradients are counted as they were before the last optimizer step.
  MemoryUse memory() const;

 private:
  bool validates_after(int64_t step) const;
  std::vector<double> mean_over_ranks(const std::vector<double>& values);

  const Corpus& corpus_;
  tessera::Communicator& comm_;
  Trainable& model_;
  int64_t context_;
  int64_t steps_;
  int64_t val_interval_;
  double clip_;
  BatchShape shape_;
  WindowSampler sampler_;
  double peak_lr_;
  bool has_schedule_;  // not for optimizers that warm up themselves and need no decay
  std::unique_ptr<tessera::LambdaLR> schedule_;
  std::vector<int64_t> validation_starts_;
  int64_t report_interval_;
  std::optional<tessera::WaitReporter> waits_;  // with --report-every
  int64_t grad_bytes_ = 0;
  const tessera::PeakMemory* held_ = nullptr;
};

// The figures of every rank, in rank order. Collective.
std::vector<MemoryUse> memory_of_all_ranks(const MemoryUse& own, tessera::Communicator& comm);

// The folder of a run's checkpoints.
std::filesystem::path checkpoints_of(const TrainOptions& options);

// The checkpoints of a run: <out>/checkpoints/step-000200, the newest --keep of them. All ranks construct one and call
// the same functions; all are collective.
class Checkpoints {
 public:
  // The windows of the sampler and the seed decide the order of the data. `elastic` is null, or the run that restores
  // and copies the state, of `first_ranks` ranks at first. All references must outlive this object.
  Checkpoints(const TrainOptions& options, const Corpus& corpus, WindowSampler& sampler, int first_ranks,
              Trainable& model, tessera::ElasticRun* elastic);

  // Throws std::invalid_argument, with the first differing option, if ranks have different ones that decide what they
  // compute. Must be called before resume(). Collective.
  void require_equal_options(tessera::Communicator& comm) const;

  struct Resumed {
    int64_t step = 0;  // steps that are done: 0 without a checkpoint
    int64_t warmup = 0;
    std::vector<std::string> notes;  // for the user: changed settings, damaged checkpoints
  };
  // Loads the checkpoint of --resume, or restores the elastic run; `auto` is the newest that is sound. Throws
  // OptionsError if its run had other data or batches, since the loss curve would break, or other settings without
  // --allow-changes.
  Resumed resume();

  // Waits until the save in flight has copied the parameters. Must be called before they change.
  void before_update();

  // Saves in the background every --save-every steps, and before the run stops early. Ends the step of an elastic run.
  // Throws the error of the save before.
  void after_step(int64_t step, bool stops);

  // Returns when the last save is complete.
  void finish();

 private:
  nlohmann::json description() const;
  nlohmann::json extra_of(int64_t step) const;
  Resumed resume_elastically();
  void continue_from(const nlohmann::json& extra, const Resumed& resumed, const std::vector<double>& decays);
  Resumed compare(const std::string& path, const nlohmann::json& extra) const;

  const TrainOptions& options_;
  WindowSampler& sampler_;
  const int first_ranks_;
  const std::string data_;  // a checksum of the tokens
  int64_t warmup_;
  Trainable& model_;
  tessera::ElasticRun* const elastic_;
  std::optional<tessera::PendingSave> pending_;
};

struct SampleOptions {
  int64_t length = 400;      // tokens to generate
  int64_t context = 128;     // tokens that the model sees at once
  double temperature = 0.8;  // 0: always the likeliest token
  int64_t top_k = 20;        // 0: all
  uint64_t seed = 1;
};

// Continues `prompt`, which must not be empty; returns prompt and continuation, the same on all ranks. Collective.
std::vector<uint16_t> generate(Trainable& model, std::vector<uint16_t> prompt, const SampleOptions& options,
                               at::Device device);

}  // namespace train_gpt
