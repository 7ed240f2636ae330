#include "run.h"

#include <tessera/tessera.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <exception>
#include <filesystem>
#include <iostream>
#include <limits>
#include <optional>
#include <string>
#include <system_error>

#include "report.h"
#include "trainer.h"

namespace train_gpt {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kMetricsFile = "metrics.jsonl";
constexpr const char* kPlotFile = "losses.svg";
constexpr int kMostRanksOfACore = 4;

void check_world(const TrainOptions& options, int world) {
  if (options.ranks && *options.ranks != world) {
    throw OptionsError("--ranks is " + std::to_string(*options.ranks) + ", but the launcher started " +
                       std::to_string(world));
  }
  if (options.wrapper == Wrapper::kLocal && world > 1) {
    throw OptionsError("--wrapper local is one process, but the launcher started " + std::to_string(world));
  }
}

// Writes rank 0's output during training: metrics, plot, TensorBoard files and progress.
class Recorder {
 public:
  // Keeps the metrics of the first `first_step` steps. `elastic` may be null.
  Recorder(const TrainOptions& options, double unigram_loss, int64_t first_step, const tessera::ElasticRun* elastic)
      : plot_path_(options.out / kPlotFile),
        metrics_(options.out / kMetricsFile, first_step),
        progress_(make_progress(std::cout, standard_output_is_terminal(), options.steps)),
        elastic_(elastic) {
    if (!options.tensorboard.empty()) tensorboard_.emplace(options.tensorboard);
    curves_.unigram_loss = unigram_loss;
    for (const auto& report : metrics_.kept()) add_to_curves(report);
    if (elastic_ == nullptr || !elastic_->change()) return;
    const auto& change = *elastic_->change();
    // Records a loss also if no rank is lost: a step that failed on all ranks changes the group, too.
    if (!change.lost.empty() || change.joined.empty()) record_event(ElasticEvent::Kind::kLost, first_step);
    if (!change.joined.empty()) record_event(ElasticEvent::Kind::kJoined, first_step);
  }

  void record(const StepReport& report) {
    add_to_curves(report);
    metrics_.write(report);
    if (tensorboard_) tensorboard_->write(report);
    progress_->show(report);
    // Ends the progress lines, because commit() of the first step after a change prints a line.
    if (elastic_ != nullptr && elastic_->change() && !has_resumed_) progress_->finish();
  }
  // Must be called after the commit of each step.
  void record_commit(int64_t step) {
    const bool resumes = elastic_ != nullptr && elastic_->change() && elastic_->change()->seconds > 0;
    if (resumes && !std::exchange(has_resumed_, true)) record_event(ElasticEvent::Kind::kResumed, step);
  }

  ~Recorder() { progress_->finish(); }

  RunResult finish(double train_s) {
    if (!curves_.train.empty()) write_loss_plot(plot_path_, curves_);
    const auto last = std::min<size_t>(curves_.train.size(), std::max<size_t>(1, curves_.train.size() / 20));
    double sum = 0.0;
    for (auto point = curves_.train.end() - static_cast<std::ptrdiff_t>(last); point != curves_.train.end(); ++point) {
      sum += point->loss;
    }
    constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();  // if a finished run's metrics are missing
    return {.train_loss = last > 0 ? sum / static_cast<double>(last) : kUnknown,
            .val_loss = curves_.validation.empty() ? kUnknown : curves_.validation.back().loss,
            .unigram_loss = curves_.unigram_loss,
            .train_s = train_s};
  }

 private:
  void record_event(ElasticEvent::Kind kind, int64_t step) {
    const ElasticEvent event{
        .kind = kind, .step = step, .world = elastic_->comm()->size(), .change = *elastic_->change()};
    metrics_.write(event);
    if (tensorboard_) tensorboard_->write(event);
  }

  void add_to_curves(const StepReport& report) {
    const auto step = static_cast<double>(report.step);
    curves_.train.push_back({step, report.loss});
    if (report.val_loss) curves_.validation.push_back({step, *report.val_loss});
  }

  std::filesystem::path plot_path_;
  MetricsLog metrics_;
  std::optional<TensorboardLog> tensorboard_;
  std::unique_ptr<Progress> progress_;
  const tessera::ElasticRun* const elastic_;
  bool has_resumed_ = false;
  LossCurves curves_;
};

struct Training {
  RunResult result;  // of rank 0; empty on the other ranks
  int signal = 0;    // the signal that stopped the run after a save; 0: all steps are done
};

Training train(Trainer& trainer, Checkpoints& checkpoints, const TrainOptions& options, tessera::Communicator& comm,
               const tessera::ElasticRun* elastic) {
  const bool shows = comm.rank() == 0;
  checkpoints.require_equal_options(comm);
  const auto resumed = checkpoints.resume();
  const int64_t first_step = resumed.step;
  trainer.set_warmup(resumed.warmup);
  for (size_t i = 0; shows && i < resumed.notes.size(); ++i) std::cout << "  note        " << resumed.notes[i] << "\n";
  const auto start = Clock::now();
  std::optional<Recorder> recorder;
  if (shows) recorder.emplace(options, trainer.unigram_loss(), first_step, elastic);
  int signal = 0;
  int64_t last_step = first_step;
  try {
    trainer.run(
        first_step, [&] { checkpoints.before_update(); },
        [&](const StepReport& report) {
          if (shows) recorder->record(report);
          last_step = report.step;
          signal = last_step == options.steps ? 0 : tessera::stop_requested(comm);
          checkpoints.after_step(last_step, signal != 0);
          if (shows) recorder->record_commit(last_step);
          return signal == 0;
        });
    checkpoints.finish();
  } catch (...) {
    if (recorder) recorder->record_commit(last_step);  // a commit throws if the group changes again
    recorder.reset();                                  // ends the progress lines before the error is printed
    throw;
  }
  if (!shows) return {.result = {}, .signal = signal};
  const auto result = recorder->finish(std::chrono::duration<double>(Clock::now() - start).count());
  recorder.reset();
  if (signal != 0)
    std::cout << "stopped by signal " << signal << " (" << ::strsignal(signal) << ") after step " << last_step
              << ", which is saved; --resume auto goes on" << std::endl;
  return {.result = result, .signal = signal};
}

// Renames a file or folder to the first free name: metrics.before.jsonl, metrics.before-2.jsonl, ...
void set_aside(const std::filesystem::path& path) {
  for (int number = 1;; ++number) {
    const std::string suffix = number == 1 ? ".before" : ".before-" + std::to_string(number);
    const auto name = path.stem().string() + suffix + path.extension().string();
    if (std::filesystem::exists(path.parent_path() / name)) continue;
    std::filesystem::rename(path, path.parent_path() / name);
    std::cout << "the " << path.stem().string() << " of an earlier run in " << path.parent_path().string() << " are in "
              << name << " now" << std::endl;
    return;
  }
}

// Returns whether --resume selects an existing checkpoint.
bool resumes(const TrainOptions& options) {
  if (options.resume != "auto") return !options.resume.empty();
  return tessera::latest_checkpoint(checkpoints_of(options)).has_value();
}

// Creates `folder`, unless its name is empty, and checks that files can be created in it.
void make_writable(const char* option, const std::filesystem::path& folder) try {
  if (folder.empty()) return;
  std::filesystem::create_directories(folder);
  if (::access(folder.c_str(), W_OK | X_OK) != 0)
    throw std::filesystem::filesystem_error("cannot be written", folder,
                                            std::error_code(errno, std::generic_category()));
} catch (const std::filesystem::filesystem_error& error) {
  throw std::runtime_error(std::string(option) + ": " + error.what());
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

tessera::FolderLock prepare_output(const TrainOptions& options, bool continues) try {
  tessera::FolderLock lock(options.out);
  make_writable("--tensorboard", options.tensorboard);
  make_writable("--export-gpt2", options.export_gpt2);
  if (options.offload == Offload::kDisk) make_writable("--offload-directory", options.offload_directory);
  // A run that does not resume must not destroy the metrics or delete the checkpoints of an earlier run.
  const auto metrics = options.out / kMetricsFile;
  std::error_code none;  // set if there is no such file
  if (!continues && std::filesystem::file_size(metrics, none) > 0 && !none) set_aside(metrics);
  if (!continues && tessera::latest_checkpoint(checkpoints_of(options))) set_aside(checkpoints_of(options));
  const MetricsLog writable(metrics, continues ? std::numeric_limits<int64_t>::max() : 0);
  return lock;
} catch (const tessera::CheckpointError& error) {
  throw std::runtime_error(std::string("--out: ") + error.what());
} catch (const std::filesystem::filesystem_error& error) {
  throw std::runtime_error(std::string("--out: ") + error.what());
}

int run_rank(const Job& job, std::shared_ptr<tessera::Communicator> comm, tessera::ElasticRun* elastic) {
  const auto& options = job.options;
  const bool shows = comm->rank() == 0;
  const bool goes_on = elastic != nullptr && elastic->generation() > 0;
  const int first_ranks = elastic != nullptr ? elastic->first_world() : comm->size();
  check_world(options, first_ranks);
  std::optional<tessera::FolderLock> lock;
  try {
    if (shows) lock.emplace(prepare_output(options, goes_on || resumes(options)));
  } catch (const std::runtime_error&) {
    if (!goes_on) throw;  // after a change of the group, a stopped process of the lost rank 0 may still hold the lock
  }
  if (options.threads > 0) at::set_num_threads(options.threads);

  std::optional<tessera::PeakMemory> tensors;  // must be created before the first tensor, to count all tensors
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
  // Imports weights before with_ema(), because the average starts with the current weights.
  if (!options.import_gpt2.empty() && !adapts) import_gpt2(options.import_gpt2, wrapped->shards(), options.model);
  if (options.ema > 0) wrapped = with_ema(std::move(wrapped), options.ema);
  Trainer trainer(options, job.corpus, *comm, *wrapped, first_ranks);
  if (tensors) trainer.count_memory(*tensors);
  Checkpoints checkpoints(options, job.corpus, trainer.sampler(), first_ranks, *wrapped, elastic);
  if (shows && !goes_on) {
    print_header(std::cout, options, job.corpus,
                 {.layout = wrapped->describe(),
                  .device = comm->device().str(),
                  .precision = options.compute.precision_on(comm->device()),
                  .ranks = comm->size(),
                  .threads = at::get_num_threads(),
                  .parameters_numel = parameters_numel,
                  .adapters_numel = adapters_numel,
                  .tokens_per_step = trainer.tokens_per_step(),
                  .unigram_loss = trainer.unigram_loss()});
  }
  const auto [result, signal] = train(trainer, checkpoints, options, *comm, elastic);
  if (signal != 0) {
    comm->barrier("the end of a stopped run");  // a launcher may kill all other ranks when the first one exits
    return 128 + signal;
  }
  const auto memory = memory_of_all_ranks(trainer.memory(), *comm);
  if (shows) {
    std::cout << "\n";
    print_memory_table(std::cout, memory, parameters_numel * static_cast<int64_t>(sizeof(float)));
    print_result(std::cout, result);
    if (const auto fraction = wrapped->suggested_device_fraction())
      std::cout << "in the last step --device-fraction " << std::ceil(100 * *fraction) / 100
                << " would have hidden the host's steps of rank 0 behind backward\n";
  }
  const auto averaged = wrapped->averaged();
  if (!options.export_gpt2.empty()) {
    if (adapts)
      export_with_adapters(options.export_gpt2, model, *wrapped, *comm);
    else
      export_gpt2(options.export_gpt2, wrapped->own_shards(), options.model);
  }
  if (options.sample == 0) return 0;
  const auto tokens = generate(*wrapped, job.prompt,
                               {.length = options.sample,
                                .context = options.model.context,
                                .temperature = options.temperature,
                                .top_k = options.top_k,
                                .seed = static_cast<uint64_t>(options.seed)},
                               comm->device());
  if (shows) print_sample(std::cout, job.corpus.vocabulary.decode(tokens));
  return 0;
}

namespace {

int start_ranks(const TrainOptions& options, int argc, char** argv) {
  const int cores = tessera::available_cores();
  if (*options.ranks > kMostRanksOfACore * cores && !options.oversubscribe)
    throw OptionsError("--ranks " + std::to_string(*options.ranks) + " would start more than " +
                       std::to_string(kMostRanksOfACore) + " processes a core on " + std::to_string(cores) +
                       " cores; --oversubscribe allows it");
  if (!options.rendezvous.empty())
    throw OptionsError("--rendezvous is for ranks of a launcher; with --ranks, train_gpt restarts failed ranks itself");
  prepare(options);  // reports mistakes here, so that the started ranks do not each report them
  static_cast<void>(prepare_output(options, resumes(options)));
  if (options.elastic) return tessera::spawn_elastic(*options.ranks, argc, argv, {.restarts = options.restarts});
  return tessera::spawn_local(*options.ranks, argc, argv);
}

int report_mistake(const OptionsError& error) {
  std::cerr << "train_gpt: " << error.what() << "\n(train_gpt --help lists the options)\n";
  return 2;
}

// Returns the prepared job. If some ranks find a mistake in the options, the first of these ranks prints it, and all
// ranks return nullopt. Collective.
std::optional<Job> prepare_on_ranks(const TrainOptions& options, tessera::Communicator& comm) {
  std::optional<Job> job;
  std::optional<OptionsError> mistake;
  try {
    job = prepare(options);
  } catch (const OptionsError& error) {
    mistake = error;
  }
  const auto own = torch::full({}, job ? comm.size() : comm.rank(), torch::dtype(torch::kLong).device(comm.device()));
  const auto first_to_fail =
      tessera::reduce_to_host(comm, own, tessera::ReduceOp::kMin, "the options of train_gpt").item<int64_t>();
  if (first_to_fail == comm.rank()) report_mistake(*mistake);
  return first_to_fail == comm.size() ? std::move(job) : std::nullopt;
}

int run_launched(const TrainOptions& options) {
  tessera::InitOptions init;
  init.device = options.compute.device_of_ranks();
  return tessera::run_main([&] {
    const auto comm = tessera::init(init);
    const auto job = prepare_on_ranks(options, *comm);
    if (!job) return 2;
    try {
      return run_rank(*job, comm);
    } catch (const OptionsError& error) {
      comm->abort(error.what());  // rank 0 prints the mistake of another rank
      return comm->rank() == 0 ? report_mistake(error) : 2;
    }
  });
}

int run_elastic(const TrainOptions& options) {
  tessera::ElasticOptions elastic_options{.copy_every = static_cast<int>(options.copy_every),
                                          .batch = options.elastic_batch == ElasticBatch::kKeep
                                                       ? tessera::ElasticBatch::kKeep
                                                       : tessera::ElasticBatch::kFollow};
  if (!options.resume.empty()) elastic_options.checkpoints = checkpoints_of(options);
  elastic_options.rendezvous = options.rendezvous;
  elastic_options.group.device = options.compute.device_of_ranks();
  return tessera::run_main([&] {
    const Job job = prepare(options);
    tessera::Elastic elastic(elastic_options);
    int code = 0;
    try {
      elastic.run([&](tessera::ElasticRun& run) { code = run_rank(job, run.comm(), &run); });
    } catch (const OptionsError& error) {
      return report_mistake(error);  // exit code 2 tells a launcher that a restart would fail again
    }
    return code;
  });
}

// Executes train_gpt_plan, which is in the same folder. Keeps the planning libraries out of the build of train_gpt.
int start_planner(char** argv) {
  const std::string planner = std::filesystem::read_symlink("/proc/self/exe").string() + "_plan";
  ::execv(planner.c_str(), argv);
  throw OptionsError("--plan cannot start " + planner + " (" + std::strerror(errno) +
                     "): cmake --build --preset release --target train_gpt_plan builds it");
}

}  // namespace

int program(int argc, char** argv, Planner plans) {
  std::optional<TrainOptions> options;
  try {
    options = parse_options(argc, argv, std::cout);
    if (!options) return 0;
    if (plans != nullptr) {
      plans(*options);
      return 0;
    }
    if (options->plan) return start_planner(argv);
    if (options->ranks.value_or(1) > 1 && !tessera::launched()) return start_ranks(*options, argc, argv);
  } catch (const OptionsError& error) {
    return report_mistake(error);
  } catch (const c10::Error& error) {
    std::cerr << "train_gpt: " << error.what_without_backtrace() << "\n";
    return 1;
  } catch (const std::exception& error) {
    std::cerr << "train_gpt: " << error.what() << "\n";
    return 1;
  }
  return options->elastic ? run_elastic(*options) : run_launched(*options);
}

}  // namespace train_gpt
