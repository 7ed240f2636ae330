#include "run_rank.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <limits>
#include <optional>
#include <system_error>

#include <tessera/peak_memory.h>
#include "adapters.h"
#include "checkpoints.h"
#include "core/memory/container_limits.h"
#include "gpt2_files.h"
#include "loss_plot.h"
#include "metrics_log.h"
#include "model.h"
#include "progress.h"
#include "report.h"
#include "sample.h"
#include "tensorboard_log.h"
#include "trainer.h"
#include "with_ema.h"

namespace train_gpt {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kMetricsFile = "metrics.jsonl";
constexpr const char* kFormerMetricsFile = "metrics.before.jsonl";
constexpr const char* kPlotFile = "losses.svg";

// How many ranks share this machine, as far as the launcher says.
int ranks_of_this_machine(int world) {
  for (const char* name : {"LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"}) {
    if (const char* value = std::getenv(name)) return std::clamp(std::atoi(value), 1, world);
  }
  return world;
}

int threads_per_rank(const TrainOptions& options, int world) {
  if (options.threads > 0) return options.threads;
  return std::max(1, tessera::internal::available_cores() / ranks_of_this_machine(world));
}

void check_world(const TrainOptions& options, int world) {
  if (options.ranks && *options.ranks != world) {
    throw OptionsError("--ranks is " + std::to_string(*options.ranks) + ", but the launcher started " +
                       std::to_string(world));
  }
  if (options.wrapper == Wrapper::kLocal && world > 1) {
    throw OptionsError("--wrapper local is one process, but the launcher started " + std::to_string(world));
  }
}

// What rank 0 shows and writes while it trains.
class Recorder {
 public:
  // `first_step`: how many steps were done before; their metrics stay.
  Recorder(const TrainOptions& options, double unigram_loss, int64_t first_step)
      : plot_path_(options.out / kPlotFile),
        metrics_(options.out / kMetricsFile, first_step),
        progress_(make_progress(std::cout, standard_output_is_terminal(), options.steps)) {
    if (!options.tensorboard.empty()) tensorboard_.emplace(options.tensorboard);
    curves_.unigram_loss = unigram_loss;
    for (const auto& report : metrics_.kept()) add_to_curves(report);
  }

  void record(const StepReport& report) {
    add_to_curves(report);
    metrics_.write(report);
    if (tensorboard_) tensorboard_->write(report);
    progress_->show(report);
  }

  // Whatever happened: the terminal is left in order.
  ~Recorder() { progress_->finish(); }

  RunResult finish(double train_s) {
    write_loss_plot(plot_path_, curves_);
    const auto last = std::min<size_t>(curves_.train.size(), std::max<size_t>(1, curves_.train.size() / 20));
    double sum = 0.0;
    for (auto point = curves_.train.end() - static_cast<std::ptrdiff_t>(last); point != curves_.train.end(); ++point) {
      sum += point->loss;
    }
    // Of a run that was over before it was resumed, and whose metrics are gone, nothing is known.
    constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();
    return {.train_loss = last > 0 ? sum / static_cast<double>(last) : kUnknown,
            .val_loss = curves_.validation.empty() ? kUnknown : curves_.validation.back().loss,
            .unigram_loss = curves_.unigram_loss,
            .train_s = train_s};
  }

 private:
  void add_to_curves(const StepReport& report) {
    const auto step = static_cast<double>(report.step);
    curves_.train.push_back({step, report.loss});
    if (report.val_loss) curves_.validation.push_back({step, *report.val_loss});
  }

  std::filesystem::path plot_path_;
  MetricsLog metrics_;
  std::optional<TensorboardLog> tensorboard_;
  std::unique_ptr<Progress> progress_;
  LossCurves curves_;
};

// Trains, and returns rank 0's result; an empty one on the others.
RunResult train(Trainer& trainer, Checkpoints& checkpoints, const TrainOptions& options, bool shows) {
  const auto resumed = checkpoints.resume();
  const int64_t first_step = resumed.step;
  trainer.set_warmup(resumed.warmup);
  for (size_t i = 0; shows && i < resumed.notes.size(); ++i) std::cout << "  note        " << resumed.notes[i] << "\n";
  const auto start = Clock::now();
  std::optional<Recorder> recorder;
  if (shows) recorder.emplace(options, trainer.unigram_loss(), first_step);
  trainer.run(
      first_step, [&] { checkpoints.before_update(); },
      [&](const StepReport& report) {
        if (shows) recorder->record(report);
        checkpoints.after_step(report.step);
      });
  checkpoints.finish();
  if (!shows) return {};
  return recorder->finish(std::chrono::duration<double>(Clock::now() - start).count());
}

}  // namespace

Job prepare(TrainOptions options) {
  Job job{.options = std::move(options), .corpus = {}, .prompt = {}};
  job.corpus = read_corpus(job.options.data);
  check_length(job.corpus, job.options.model.context);
  job.options.model.vocabulary = job.corpus.vocabulary.size();
  if (!job.options.import_gpt2.empty()) {
    const auto theirs = read_gpt2_options(job.options.import_gpt2);
    job.options.model.norm_epsilon = theirs.norm_epsilon;
    job.options.model.scale_attention = theirs.scale_attention;
    job.options.model.scale_attention_by_layer = theirs.scale_attention_by_layer;
  }
  try {
    job.prompt = job.corpus.vocabulary.encode(job.options.prompt);
  } catch (const std::invalid_argument& error) {
    throw OptionsError(std::string("--prompt: ") + error.what());
  }
  if (job.prompt.empty()) job.prompt.push_back(job.corpus.vocabulary.start_token());
  return job;
}

tessera::FolderLock prepare_output(const TrainOptions& options) try {
  tessera::FolderLock lock(options.out);
  // A run that goes on keeps its metrics; another one does not lose those of the run before.
  const auto metrics = options.out / kMetricsFile;
  std::error_code none;  // there is no such file
  if (options.resume.empty() && std::filesystem::file_size(metrics, none) > 0 && !none) {
    std::filesystem::rename(metrics, options.out / kFormerMetricsFile);
    std::cout << "the metrics that were in " << options.out.string() << " are in " << kFormerMetricsFile << " now"
              << std::endl;
  }
  const MetricsLog writable(metrics, options.resume.empty() ? 0 : std::numeric_limits<int64_t>::max());
  return lock;
} catch (const tessera::CheckpointError& error) {
  throw std::runtime_error(std::string("--out: ") + error.what());
} catch (const std::filesystem::filesystem_error& error) {
  throw std::runtime_error(std::string("--out: ") + error.what());
}

void run_rank(const Job& job, std::shared_ptr<tessera::Communicator> comm) {
  const auto& options = job.options;
  const bool shows = comm->rank() == 0;
  check_world(options, comm->size());
  std::optional<tessera::FolderLock> lock;
  if (shows) lock.emplace(prepare_output(options));
  const int threads = threads_per_rank(options, comm->size());
  at::set_num_threads(threads);

  std::optional<tessera::PeakMemory> tensors;  // before the first of them
  if (!options.tensorboard.empty()) tensors.emplace(comm->device());
  const bool adapts = options.lora_rank > 0;
  Gpt model = draw_model(options, comm->device());
  int64_t parameters_numel = 0;
  for (const auto& parameter : model->parameters()) parameters_numel += parameter.numel();
  if (adapts) {
    load_base(model, options, *comm);
    draw_adapters(model, options);
  }
  const int64_t adapters_numel = adapts ? trained_numel(model) : 0;

  if (options.offload == Offload::kDisk) std::filesystem::create_directories(options.offload_directory);
  auto wrapped = wrap(model, options, comm);
  // Before averages begin.
  if (!options.import_gpt2.empty() && !adapts) import_gpt2(options.import_gpt2, wrapped->shards(), options.model);
  if (options.ema > 0) wrapped = std::make_unique<WithEma>(std::move(wrapped), options.ema);
  Trainer trainer(options, job.corpus, *comm, *wrapped);
  if (tensors) trainer.count_memory(*tensors);
  Checkpoints checkpoints(options, job.corpus, trainer.windows_per_epoch(), *comm, *wrapped);
  if (shows) {
    print_header(std::cout, options, job.corpus,
                 {.layout = wrapped->describe(),
                  .ranks = comm->size(),
                  .threads = threads,
                  .parameters_numel = parameters_numel,
                  .adapters_numel = adapters_numel,
                  .tokens_per_step = trainer.tokens_per_step(),
                  .unigram_loss = trainer.unigram_loss()});
  }
  const auto result = train(trainer, checkpoints, options, shows);
  const auto memory = memory_of_all_ranks(trainer.memory(), *comm);
  if (shows) {
    std::cout << "\n";
    print_memory_table(std::cout, memory, parameters_numel * static_cast<int64_t>(sizeof(float)));
    print_result(std::cout, result);
  }
  const auto averaged = wrapped->averaged();
  if (!options.export_gpt2.empty()) {
    if (adapts)
      export_with_adapters(options.export_gpt2, model, *wrapped, *comm);
    else
      export_gpt2(options.export_gpt2, wrapped->own_shards(), options.model);
  }
  if (options.sample == 0) return;
  const auto tokens = generate(*wrapped, job.prompt,
                               {.length = options.sample,
                                .context = options.model.context,
                                .temperature = options.temperature,
                                .top_k = options.top_k,
                                .seed = static_cast<uint64_t>(options.seed)},
                               comm->device());
  if (shows) print_sample(std::cout, job.corpus.vocabulary.decode(tokens));
}

}  // namespace train_gpt
