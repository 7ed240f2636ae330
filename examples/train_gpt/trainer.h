#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include <tessera/communicator.h>
#include <tessera/peak_memory.h>
#include <tessera/wait_report.h>
#include "corpus.h"
#include "options.h"
#include "sampler.h"
#include "schedule.h"
#include "step_report.h"
#include "trainable.h"

namespace train_gpt {

// The training loop: the same for every way of laying out the model on the ranks.
//
// All ranks make one with the same arguments and call the same functions.
class Trainer {
 public:
  // The corpus, communicator and model must outlive the trainer.
  Trainer(const TrainOptions& options, const Corpus& corpus, tessera::Communicator& comm, Trainable& model);

  // What counts the process's tensors from now on, for memory(); outlives the trainer.
  void count_memory(const tessera::PeakMemory& held) { held_ = &held; }

  // How long the warm-up is, where a run goes on that began with another one.
  void set_warmup(int64_t steps) { schedule_.warmup = steps; }

  // The steps after the first `first_step`; `before_update` is called before each changes the parameters, `on_step`
  // after it. Throws std::runtime_error when the loss is no longer finite.
  void run(int64_t first_step, const std::function<void()>& before_update,
           const std::function<void(const StepReport&)>& on_step);

  // One step, the first being 0.
  StepReport train_step(int64_t step, const std::function<void()>& before_update);

  // The loss on the windows that validate: the mean over all ranks.
  double validate();

  // The loss of a unigram model of the training part, on the windows that validate.
  double unigram_loss() const;

  int64_t windows_per_epoch() const { return sampler_.windows_per_epoch(); }
  int64_t tokens_per_step() const { return shape_.global() * context_; }

  // This rank's, with the gradients as they were before the last step.
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
  Schedule schedule_;
  std::vector<int64_t> validation_starts_;
  int64_t report_interval_;
  std::optional<tessera::WaitReporter> waits_;  // where there are such reports
  int64_t grad_bytes_ = 0;
  const tessera::PeakMemory* held_ = nullptr;
};

// The figures of every rank, in rank order. Collective.
std::vector<MemoryUse> memory_of_all_ranks(const MemoryUse& own, tessera::Communicator& comm);

}  // namespace train_gpt
