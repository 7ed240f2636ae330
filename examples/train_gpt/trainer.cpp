#include "trainer.h"

#include <ATen/CPUGeneratorImpl.h>
#include <tessera/host_results.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <limits>
#include <span>
#include <stdexcept>

namespace train_gpt {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

}  // namespace

int64_t sequences_of_step(const TrainOptions& options, int ranks) { return ranks * options.batch * options.accumulate; }

namespace {

// With kKeep, fewer ranks than `first_ranks` run more micro-batches, so that a step has at least as many sequences.
BatchShape shape_of(const TrainOptions& options, int ranks, int first_ranks) {
  const bool keeps = options.elastic && options.elastic_batch == ElasticBatch::kKeep;
  const int64_t passes = keeps ? (first_ranks * options.accumulate + ranks - 1) / ranks : options.accumulate;
  return {.ranks = ranks, .batch = options.batch, .accumulation = passes};
}

}  // namespace

Trainer::Trainer(const TrainOptions& options, const Corpus& corpus, tessera::Communicator& comm, Trainable& model,
                 int first_ranks)
    : corpus_(corpus),
      comm_(comm),
      model_(model),
      context_(options.model.context),
      steps_(options.steps),
      val_interval_(options.validation_interval()),
      clip_(options.clip > 0.0 ? options.clip : std::numeric_limits<double>::infinity()),
      shape_(shape_of(options, comm.size(), first_ranks > 0 ? first_ranks : comm.size())),
      sampler_(static_cast<int64_t>(corpus.train().size()), context_, options.seed, shape_),
      peak_lr_(options.lr),
      has_schedule_(options.optimizer != OptimizerKind::kScheduleFree),
      validation_starts_(validation_starts(
          static_cast<int64_t>(corpus.validation().size()), context_,
          options.val_batches * sequences_of_step(options, first_ranks > 0 ? first_ranks : comm.size()))),
      report_interval_(options.report_interval()) {
  set_warmup(options.warmup_steps());
}

void Trainer::set_warmup(int64_t steps) {
  constexpr double kFinalFraction = 0.1;
  set_learning_rate(model_.optimizer(), peak_lr_);  // a loaded checkpoint has set the rate of its step
  if (has_schedule_)
    schedule_ =
        std::make_unique<tessera::WarmupCosineLR>(model_.optimizer(), steps, std::max(steps, steps_), kFinalFraction);
}

void Trainer::run(int64_t first_step, const std::function<void()>& before_update,
                  const std::function<bool(const StepReport&)>& on_step) {
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
    if (!on_step(report)) return;
  }
}

StepReport Trainer::train_step(int64_t step, const std::function<void()>& before_update) {
  const auto start = Clock::now();
  StepReport report{.step = step + 1};
  model_.zero_grad();
  if (schedule_ != nullptr) schedule_->set_step(step);  // must precede add_gradients(), which may step early
  if (model_.steps_early()) before_update();
  at::Tensor loss = torch::zeros({}, comm_.device());
  const double scale = 1.0 / static_cast<double>(shape_.accumulation);
  for (int64_t micro = 0; micro < shape_.accumulation; ++micro) {
    const auto starts = sampler_.starts(step, micro, comm_.rank());
    const auto batch = make_batch(corpus_.train(), starts, context_, comm_.device());
    loss += model_.add_gradients(batch, scale, micro + 1 == shape_.accumulation) * scale;
  }
  report.grad_norm = model_.clip_grad_norm(clip_);
  if (!model_.steps_early()) before_update();
  report.lr = model_.optimizer().param_groups().front().options().get_lr();
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

// Rank r takes every size()-th window, starting at window r. All ranks must run the model equally often. So a rank
// without a further window runs the first window again, and ignores its loss.
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

namespace {

std::string name_of_step(int64_t step) {
  char name[32];
  std::snprintf(name, sizeof name, "step-%06lld", static_cast<long long>(step));
  return name;
}

// Returns the FNV-1a hash of the tokens, to recognize the data of a resumed run.
std::string hash_of(const std::vector<uint16_t>& tokens) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const uint16_t token : tokens) hash = (hash ^ token) * 0x100000001b3;
  return std::to_string(hash);
}

}  // namespace

std::filesystem::path checkpoints_of(const TrainOptions& options) { return options.out / "checkpoints"; }

Checkpoints::Checkpoints(const TrainOptions& options, const Corpus& corpus, WindowSampler& sampler, int first_ranks,
                         Trainable& model, tessera::ElasticRun* elastic)
    : options_(options),
      sampler_(sampler),
      first_ranks_(first_ranks),
      data_(hash_of(corpus.tokens)),
      warmup_(options.warmup_steps()),
      model_(model),
      elastic_(elastic) {}

// A resumed run must have the same "run" values, so that each step has the same sequences and model. "settings" may
// change with --allow-changes.
nlohmann::json Checkpoints::description() const {
  const auto& model = options_.model;
  return {{"run",
           {{"seed", options_.seed},
            {"sequences_per_step", sequences_of_step(options_, first_ranks_)},
            {"context", model.context},
            {"windows", sampler_.windows_per_epoch()},
            {"data", data_},
            {"heads", model.heads},
            {"norm_epsilon", model.norm_epsilon},
            {"scale_attention", model.scale_attention},
            {"scale_attention_by_layer", model.scale_attention_by_layer}}},
          {"settings",
           {{"lr", options_.lr},
            {"warmup", warmup_},
            {"weight-decay", options_.weight_decay},
            {"clip", options_.clip},
            {"ema", options_.ema},
            {"steps", options_.steps}}}};
}

void Checkpoints::require_equal_options(tessera::Communicator& comm) const {
  auto all = description();
  all["intervals"] = {{"val-every", options_.validation_interval()},
                      {"val-batches", options_.val_batches},
                      {"save-every", options_.save_every},
                      {"report-every", options_.report_interval()}};
  std::vector<std::string> lines;
  for (const auto& group : all)
    for (const auto& [name, value] : group.items()) lines.push_back(name + " " + value.dump());
  tessera::require_agreement(comm, "the options of train_gpt", lines);
}

Checkpoints::Resumed Checkpoints::compare(const std::string& path, const nlohmann::json& extra) const {
  if (!extra.contains("run") || !extra.contains("settings") || !extra.contains("step"))
    throw OptionsError("--resume: " + path + " is not of a run of train_gpt, or of an older one");
  Resumed resumed{.step = extra["step"].get<int64_t>(), .warmup = extra["settings"].value("warmup", int64_t{0})};
  const auto own = description();
  for (const auto& [name, value] : own["run"].items())
    if (const auto saved = extra["run"].value(name, nlohmann::json()); saved != value)
      throw OptionsError("--resume: " + path + " is of a run with " + name + " " + saved.dump() + ", this has " +
                         value.dump() +
                         " (sequences_per_step is ranks * batch * accumulate, data a checksum of the text)");
  for (const auto& [name, value] : own["settings"].items()) {
    // Old checkpoints have no "ema", which was always 0.
    const auto saved = extra["settings"].value(name, name == "ema" ? nlohmann::json(0.0) : nlohmann::json());
    if (saved == value || (name == "warmup" && !options_.warmup)) continue;
    const std::string change = name + " is " + value.dump() + ", was " + saved.dump();
    if (name != "steps" && !options_.allow_changes)
      throw OptionsError("--resume: " + path + ": " + change + "; --allow-changes goes on with the new one");
    resumed.notes.push_back(change + (name == "steps" ? ": the learning rate follows that length from here on"
                                      : name == "ema" && saved == 0.0 ? ": the average begins with the loaded weights"
                                                                      : ""));
  }
  if (options_.warmup) resumed.warmup = *options_.warmup;
  if (options_.steps < resumed.step)
    throw OptionsError("--resume: " + path + " has done " + std::to_string(resumed.step) + " steps; --steps is " +
                       std::to_string(options_.steps));
  if (options_.steps < resumed.warmup)
    throw OptionsError("--resume: " + path + " has a warm-up of " + std::to_string(resumed.warmup) +
                       " steps; --steps is " + std::to_string(options_.steps) +
                       ": a shorter one is --warmup with --allow-changes");
  return resumed;
}

namespace {

// Calls load() with the model and its average of weights. If the checkpoint has no average, loads only the model, and
// starts the average with the loaded weights. Returns the result of load().
template <class Load>
auto load_with_average(Trainable& model, bool averages, Load load) {
  try {
    return load(model.shards());
  } catch (const tessera::CheckpointMismatch&) {
    if (!averages) throw;
  }
  auto loaded = load(model.own_shards());
  model.restart_average();
  return loaded;
}

}  // namespace

Checkpoints::Resumed Checkpoints::resume_elastically() try {
  Resumed resumed{.warmup = warmup_};
  const auto decays = weight_decays(model_.optimizer());
  const auto extra = elastic_->restore({model_.shards(), model_.optimizer()});
  if (elastic_->step() > 0) resumed = compare(checkpoints_of(options_).string(), extra);
  continue_from(extra, resumed, decays);
  return resumed;
} catch (const tessera::CheckpointMismatch& error) {
  if (options_.ema == 0) throw;
  throw OptionsError(std::string(error.what()) +
                     "\nif --ema is new, begin it in a run without --elastic, with --resume and --allow-changes");
}

// Restores the state that is not in tensors.
void Checkpoints::continue_from(const nlohmann::json& extra, const Resumed& resumed,
                                const std::vector<double>& decays) {
  warmup_ = resumed.warmup;
  // Old checkpoints have no "sequences"; all their steps had the same number of sequences.
  if (extra.contains("sequences")) sampler_.set_origin(resumed.step, extra["sequences"].get<int64_t>());
  if (extra.contains("grad_scaler") && model_.scaler() != nullptr)
    model_.scaler()->load_state({extra["grad_scaler"]["scale"], extra["grad_scaler"]["steps"]});
  set_weight_decays(model_.optimizer(), decays);
}

Checkpoints::Resumed Checkpoints::resume() try {
  if (elastic_ != nullptr) return resume_elastically();
  Resumed resumed{.warmup = warmup_};
  if (options_.resume.empty()) return resumed;
  const auto decays = weight_decays(model_.optimizer());  // loading overwrites them with the saved ones
  nlohmann::json extra;
  if (options_.resume == "auto") {
    auto loaded = load_with_average(model_, options_.ema > 0, [&](tessera::ModelShards& shards) {
      return tessera::load_newest_checkpoint(checkpoints_of(options_), shards, model_.optimizer());
    });
    if (!loaded) return resumed;
    extra = loaded->extra;
    resumed = compare(loaded->path.string(), extra);
    for (const auto& error : loaded->damaged) resumed.notes.push_back("passed over: " + error);
    if (!loaded->damaged.empty()) resumed.notes.push_back("goes on from " + loaded->path.string());
  } else {
    extra = load_with_average(model_, options_.ema > 0, [&](tessera::ModelShards& shards) {
      return tessera::load_checkpoint(options_.resume, shards, model_.optimizer());
    });
    resumed = compare(options_.resume, extra);
  }
  continue_from(extra, resumed, decays);
  return resumed;
} catch (const tessera::CheckpointMismatch&) {
  throw;
} catch (const tessera::CheckpointError& error) {
  throw OptionsError(std::string("--resume: ") + error.what() +
                     "\n(--resume auto continues from the newest whole one in " + checkpoints_of(options_).string() +
                     ", if there is one)");
}

nlohmann::json Checkpoints::extra_of(int64_t step) const {
  nlohmann::json extra = description();
  extra["step"] = step;
  extra["sequences"] = sampler_.position(step);
  if (const auto* scaler = model_.scaler())
    extra["grad_scaler"] = {{"scale", scaler->state().scale}, {"steps", scaler->state().finite_steps}};
  return extra;
}

void Checkpoints::before_update() {
  if (pending_) pending_->copied();
}

void Checkpoints::after_step(int64_t step, bool stops) {
  if (elastic_ != nullptr) elastic_->commit(extra_of(step));
  const bool is_due = options_.save_every > 0 && (step % options_.save_every == 0 || step == options_.steps);
  if (!is_due && !stops) return;
  pending_ = tessera::save_checkpoint_async(checkpoints_of(options_) / name_of_step(step), model_.shards(),
                                            model_.optimizer(), extra_of(step),
                                            {.keep_last = static_cast<int>(options_.keep), .copy_in_background = true});
}

void Checkpoints::finish() {
  if (pending_) pending_->wait();
}

namespace {

at::Tensor last_tokens(std::span<const uint16_t> tokens, int64_t context, at::Device device) {
  const auto seen = tokens.last(std::min<size_t>(tokens.size(), context));
  const std::vector<int64_t> ids(seen.begin(), seen.end());
  return torch::tensor(ids, torch::kInt64).unsqueeze(0).to(device);
}

// Draws a token. `logits` must be [vocabulary], on the CPU.
uint16_t draw(at::Tensor logits, const SampleOptions& options, const at::Generator& random) {
  if (options.temperature == 0.0) return static_cast<uint16_t>(logits.argmax().item<int64_t>());
  logits = logits / options.temperature;
  if (options.top_k > 0 && options.top_k < logits.numel()) {
    const auto threshold = std::get<0>(logits.topk(options.top_k)).min();
    logits = logits.masked_fill(logits < threshold, -std::numeric_limits<double>::infinity());
  }
  return static_cast<uint16_t>(at::multinomial(logits.softmax(0), 1, false, random).item<int64_t>());
}

}  // namespace

std::vector<uint16_t> generate(Trainable& model, std::vector<uint16_t> prompt, const SampleOptions& options,
                               at::Device device) {
  const torch::NoGradGuard no_grad;
  const auto random = at::detail::createCPUGenerator(options.seed);
  auto tokens = std::move(prompt);
  for (int64_t i = 0; i < options.length; ++i) {
    const auto logits = model.forward(last_tokens(tokens, options.context, device));
    tokens.push_back(draw(logits[0][-1].to(torch::kCPU, torch::kFloat64), options, random));
  }
  return tokens;
}

}  // namespace train_gpt
