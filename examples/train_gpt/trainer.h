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

// The measured values of one optimizer step.
struct StepReport {
  int64_t step = 0;           // number of the step, from 1
  double loss = 0.0;          // mean over all ranks, in nats per token
  double tokens_per_s = 0.0;  // sum over all ranks; excludes validation
  double lr = 0.0;
  double grad_norm = 0.0;          // before clipping
  std::optional<double> val_loss;  // if the step was validated
  MemoryUse memory;                // memory of this rank
  // Every --report-every steps: the waits since the previous such report, and the memory of each rank.
  std::optional<tessera::WaitReport> waits;
  std::vector<MemoryUse> memory_by_rank;
};

// Returns the number of sequences in a step. `ranks` is the world size of the first group.
int64_t sequences_of_step(const TrainOptions& options, int ranks);

// Runs the training loop, which is the same for every wrapper. All ranks must construct it with the same options, and
// call the same functions.
class Trainer {
 public:
  // `corpus`, `comm` and `model` must outlive the trainer. `first_ranks` is the world size of the first group, which
  // may differ from the current one in an elastic run; 0: the current world size.
  Trainer(const TrainOptions& options, const Corpus& corpus, tessera::Communicator& comm, Trainable& model,
          int first_ranks = 0);

  // Makes memory() also report `held`, the memory of all tensors. `held` must outlive the trainer.
  void count_memory(const tessera::PeakMemory& held) { held_ = &held; }

  // Sets the number of warm-up steps, for example to that of a resumed run.
  void set_warmup(int64_t steps);

  // Runs all steps except for the first `first_step`. Calls before_update() before a step changes the parameters, and
  // on_step() after each step. Returns early if on_step() returns false. Throws std::runtime_error if a loss is not
  // finite.
  void run(int64_t first_step, const std::function<void()>& before_update,
           const std::function<bool(const StepReport&)>& on_step);

  // Runs one step. `step` is its index, from 0.
  StepReport train_step(int64_t step, const std::function<void()>& before_update);

  // Returns the loss on the validation windows, as the mean over all ranks.
  double validate();

  // Returns the loss on the validation windows of a unigram model of the training part.
  double unigram_loss() const;

  WindowSampler& sampler() { return sampler_; }
  int64_t tokens_per_step() const { return shape_.global() * context_; }

  // Returns this rank's memory. The bytes of gradients are those before the last optimizer step.
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
  bool has_schedule_;  // false for schedule-free AdamW, which warms up itself and needs no decay
  std::unique_ptr<tessera::LambdaLR> schedule_;
  std::vector<int64_t> validation_starts_;
  int64_t report_interval_;
  std::optional<tessera::WaitReporter> waits_;  // has a value with --report-every
  int64_t grad_bytes_ = 0;
  const tessera::PeakMemory* held_ = nullptr;
};

// Returns the memory of every rank, in rank order. Collective.
std::vector<MemoryUse> memory_of_all_ranks(const MemoryUse& own, tessera::Communicator& comm);

// Returns the folder of a run's checkpoints.
std::filesystem::path checkpoints_of(const TrainOptions& options);

// Saves and loads the checkpoints of a run, <out>/checkpoints/step-000200. Keeps the newest --keep checkpoints. All
// functions are collective.
class Checkpoints {
 public:
  // Checkpoints include the position of `sampler` in the data. If `elastic` is not null, it restores and copies the
  // state. `first_ranks` is the world size of the first group. All references must outlive this object.
  Checkpoints(const TrainOptions& options, const Corpus& corpus, WindowSampler& sampler, int first_ranks,
              Trainable& model, tessera::ElasticRun* elastic);

  // Throws std::invalid_argument, with the first difference, if ranks differ in an option that affects results or
  // collectives. Must be called before resume(). Collective.
  void require_equal_options(tessera::Communicator& comm) const;

  struct Resumed {
    int64_t step = 0;  // steps that are done: 0 without a checkpoint
    int64_t warmup = 0;
    std::vector<std::string> notes;  // for the user: changed settings, damaged checkpoints
  };
  // Loads the checkpoint of --resume (`auto`: the newest intact one), or restores the elastic run. Throws OptionsError
  // if the checkpoint's run had other data or batches, which would break the loss curve. Without --allow-changes, also
  // throws for other settings.
  Resumed resume();

  // Waits until the save in flight has copied the parameters. Must be called before parameters change.
  void before_update();

  // Commits the step of an elastic run. Starts a background save every --save-every steps, and if `stops` (before the
  // run stops early). Throws the error of the previous save.
  void after_step(int64_t step, bool stops);

  // Waits until the last save is complete.
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
  int64_t length = 400;      // number of tokens to generate
  int64_t context = 128;     // tokens that the model sees at once
  double temperature = 0.8;  // 0: always the most probable token
  int64_t top_k = 20;        // draws from this number of most probable tokens; 0: from all
  uint64_t seed = 1;
};

// Continues `prompt`, which must not be empty. Returns prompt and continuation, equal on all ranks. Collective.
std::vector<uint16_t> generate(Trainable& model, std::vector<uint16_t> prompt, const SampleOptions& options,
                               at::Device device);

}  // namespace train_gpt
