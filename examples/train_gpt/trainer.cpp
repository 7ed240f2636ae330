#include "trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "batch.h"
#include "optimizer.h"

#include <tessera/host_results.h>

namespace train_gpt {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

}  // namespace

Trainer::Trainer(const TrainOptions& options, const Corpus& corpus, tessera::Communicator& comm, Trainable& model)
    : corpus_(corpus),
      comm_(comm),
      model_(model),
      context_(options.model.context),
      steps_(options.steps),
      val_interval_(options.validation_interval()),
      clip_(options.clip > 0.0 ? options.clip : std::numeric_limits<double>::infinity()),
      shape_{.ranks = comm.size(), .batch = options.batch, .accumulation = options.accumulate},
      sampler_(static_cast<int64_t>(corpus.train().size()), context_, options.seed, shape_),
      schedule_{.peak = options.lr,
                .warmup = options.warmup_steps(),
                .steps = options.steps,
                .is_constant = options.optimizer == OptimizerKind::kScheduleFree},
      validation_starts_(validation_starts(static_cast<int64_t>(corpus.validation().size()), context_,
                                           options.val_batches * shape_.global())),
      report_interval_(options.report_interval()) {}

void Trainer::run(int64_t first_step, const std::function<void()>& before_update,
                  const std::function<void(const StepReport&)>& on_step) {
  if (report_interval_ > 0) waits_.emplace(comm_);
  for (int64_t step = first_step; step < steps_; ++step) {
    auto report = train_step(step, before_update);
    if (!std::isfinite(report.loss)) {
      throw std::runtime_error("the loss of step " + std::to_string(report.step) +
                               " is not a finite number; a lower --lr or a --clip may help");
    }
    if (validates_after(report.step)) report.val_loss = validate();
    if (waits_ && report.step % report_interval_ == 0) {
      report.waits = waits_->report();
      report.memory_by_rank = memory_of_all_ranks(memory(), comm_);
    }
    on_step(report);
  }
}

StepReport Trainer::train_step(int64_t step, const std::function<void()>& before_update) {
  const auto start = Clock::now();
  StepReport report{.step = step + 1, .lr = schedule_.at(step)};
  model_.zero_grad();
  at::Tensor loss = torch::zeros({}, comm_.device());
  const double scale = 1.0 / static_cast<double>(shape_.accumulation);
  for (int64_t micro = 0; micro < shape_.accumulation; ++micro) {
    const auto starts = sampler_.starts(step, micro, comm_.rank());
    const auto batch = make_batch(corpus_.train(), starts, context_, comm_.device());
    loss += model_.add_gradients(batch, scale, micro + 1 == shape_.accumulation) * scale;
  }
  report.grad_norm = model_.clip_grad_norm(clip_);
  before_update();
  set_learning_rate(model_.optimizer(), report.lr);
  model_.step();
  report.loss = mean_over_ranks({loss.item<double>()}).front();
  report.tokens_per_s = static_cast<double>(tokens_per_step()) / seconds_since(start);
  grad_bytes_ = model_.memory().grad_bytes;
  report.memory = memory();
  return report;
}

bool Trainer::validates_after(int64_t step) const {
  return step == steps_ || (val_interval_ > 0 && step % val_interval_ == 0);
}

// Rank r takes every size()-th window from the r-th on. All ranks must run the model equally
// often, so one that has run out of windows repeats the first and does not count it.
double Trainer::validate() {
  const torch::NoGradGuard no_grad;
  const auto averaged = model_.averaged();
  const auto windows = static_cast<int64_t>(validation_starts_.size());
  const int64_t global_batch = shape_.batch * comm_.size();
  double loss = 0.0, counted = 0.0;
  for (int64_t first = 0; first < windows; first += global_batch) {
    std::vector<int64_t> starts;
    for (int64_t i = first + comm_.rank(); i < std::min(first + global_batch, windows); i += comm_.size()) {
      starts.push_back(validation_starts_[i]);
    }
    const auto own = static_cast<double>(starts.size());
    if (starts.empty()) starts.push_back(validation_starts_.front());
    const auto batch = make_batch(corpus_.validation(), starts, context_, comm_.device());
    const double mean = language_model_loss(model_.forward(batch.inputs), batch.targets).item<double>();
    if (own > 0.0) loss += own * mean;
    counted += own;
  }
  const auto means = mean_over_ranks({loss, counted});
  return means[0] / means[1];
}

double Trainer::unigram_loss() const {
  std::vector<uint16_t> targets;
  for (const int64_t start : validation_starts_) {
    const auto window = corpus_.validation().subspan(start + 1, context_);
    targets.insert(targets.end(), window.begin(), window.end());
  }
  return train_gpt::unigram_loss(corpus_.train(), targets, corpus_.vocabulary.size());
}

MemoryUse Trainer::memory() const {
  auto memory = model_.memory();
  memory.grad_bytes = grad_bytes_;
  if (held_ != nullptr) {
    memory.held_bytes = held_->current_bytes();
    memory.peak_held_bytes = held_->peak_bytes();
  }
  return memory;
}

std::vector<double> Trainer::mean_over_ranks(const std::vector<double>& values) {
  const auto means =
      tessera::reduce_to_host(comm_, torch::tensor(values, torch::kFloat64), tessera::ReduceOp::kAverage, "losses");
  return {means.data_ptr<double>(), means.data_ptr<double>() + means.numel()};
}

std::vector<MemoryUse> memory_of_all_ranks(const MemoryUse& own, tessera::Communicator& comm) {
  constexpr int64_t kFigures = 7;
  const auto shard = torch::tensor({own.parameter_bytes, own.grad_bytes, own.optimizer_bytes, own.peak_gathered_bytes,
                                    own.peak_bucket_bytes, own.held_bytes, own.peak_held_bytes},
                                   torch::kInt64);
  const auto full = tessera::gather_to_host(comm, shard, "memory figures");
  std::vector<MemoryUse> memory;
  for (const auto* f = full.data_ptr<int64_t>(); f != full.data_ptr<int64_t>() + full.numel(); f += kFigures) {
    memory.push_back({f[0], f[1], f[2], f[3], f[4], f[5], f[6]});
  }
  return memory;
}

}  // namespace train_gpt
