// Measures elastic training on this machine.
//
//   elastic_bench --kills 5 [--ranks 3]    the time from a rank's death to the end of the survivors' next step: a model
//                                          of 100 MB, FSDP and Adam. Kills another rank each time, also rank 0.
//   elastic_bench --model gpt [--rounds 31] the cost of copies: the ratio of step times with a copy every 10 steps and
//                                          without, in alternating blocks of 10 steps, on 2 ranks. Or --model recipe.
//
// bench/elastic_hosts.py measures the time after a death between network namespaces.
#include <torch/torch.h>

#include <signal.h>
#include <unistd.h>

#include <boost/program_options.hpp>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <tessera/elastic.h>
#include <tessera/optim/fused_optimizers.h>
#include <tessera/tessera.h>
#include "bench/median.h"
#include "measure.h"
#include "models.h"
#include "options.h"

namespace {

using namespace tessera;
using Seconds = std::chrono::duration<double>;

// Returns the time in seconds of a clock that all processes of the machine share.
double now() { return Seconds(std::chrono::steady_clock::now().time_since_epoch()).count(); }

constexpr int kCopyEvery = 10;

struct Arguments {
  int kills = 0, ranks = 0, rounds = 31, victim = -1, layers = 0;
  std::string model = "recipe", file;
};

// A model of train_step under FullyShardedDataParallel.
class Training {
 public:
  Training(const train_step::Options& options, const std::shared_ptr<Communicator>& comm)
      : fsdp_(train_step::make_model(options), comm, {.auto_wrap = train_step::units_of(options)}),
        adam_(fsdp_.parameters(), torch::optim::AdamOptions(1e-4)),
        batch_(train_step::make_batch(options, comm->rank())) {
    train_step::set_values(options, fsdp_.named_shards());
  }
  TrainingState state() { return {fsdp_, adam_}; }
  void step() {
    adam_.zero_grad();
    fsdp_(batch_.inputs, batch_.targets).backward();
    adam_.step();
  }

 private:
  FullyShardedDataParallel<train_step::Model> fsdp_;
  Adam adam_;
  train_step::Batch batch_;
};

// Kills the victim in step 18, when the copy of step 10 has completed. The new rank 0 appends the seconds to a file.
void die_and_resume(const Arguments& arguments, const train_step::Options& options) {
  const int launched_as = std::atoi(std::getenv("RANK"));
  const auto death_file = arguments.file + ".death";
  Elastic elastic({.copy_every = kCopyEvery});
  elastic.run([&](ElasticRun& run) {
    Training training(options, run.comm());
    run.restore(training.state());
    while (run.step() < (run.generation() == 0 ? 25 : 30)) {
      if (run.generation() == 0 && run.step() == 18 && launched_as == arguments.victim)
        std::thread([&] {
          std::this_thread::sleep_for(std::chrono::milliseconds(30));
          std::ofstream(death_file) << std::to_string(now()) << std::flush;
          ::kill(::getpid(), SIGKILL);
        }).detach();
      training.step();
      run.commit();
      if (run.generation() == 0) continue;
      double death = 0;
      std::ifstream(death_file) >> death;
      if (run.comm()->rank() == 0)
        std::ofstream(arguments.file, std::ios::app) << std::to_string(now() - death) << std::endl;
      break;
    }
  });
}

// Waits until copies have completed: until 300 ms pass without a copied byte.
void wait_for_copy(const ElasticRun& run) {
  for (int64_t bytes = -1; bytes != run.copied_bytes();) {
    bytes = run.copied_bytes();
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
  }
  run.comm()->barrier();
}

void compare_costs(const Arguments& arguments, const train_step::Options& options) {
  constexpr int kSteps = kCopyEvery;  // with one copy
  Elastic elastic({.copy_every = kCopyEvery});
  elastic.run([&](ElasticRun& run) {
    Training training(options, run.comm());
    run.restore(training.state());
    for (int i = 0; i < kCopyEvery; ++i) {
      training.step();
      run.commit();
    }
    std::vector<double> with_s, without_s, ratios, cpu_ratios;
    for (int round = 0; round < arguments.rounds; ++round) {
      double seconds[2], cpu[2];
      for (int turn = 0; turn < 2; ++turn) {
        const bool copies = (turn + round) % 2 == 0;
        wait_for_copy(run);
        const double start = now(), cpu_start = train_step::cpu_seconds();
        for (int i = 0; i < kSteps; ++i) {
          training.step();
          if (copies) run.commit();
        }
        run.comm()->barrier();
        seconds[copies] = now() - start;
        if (copies) wait_for_copy(run);
        cpu[copies] = train_step::cpu_seconds() - cpu_start;
      }
      with_s.push_back(seconds[1] / kSteps);
      without_s.push_back(seconds[0] / kSteps);
      ratios.push_back(seconds[1] / seconds[0]);
      cpu_ratios.push_back(cpu[1] / cpu[0]);
    }
    if (run.comm()->rank() != 0) return;
    std::printf(
        "%s, fsdp, %d ranks, a copy every %d steps: median step %.1f ms with copies, %.1f ms without; ratio %.3f (%.3f "
        "to %.3f over %d rounds); processor time %.3f; %.1f MiB of copies a rank\n",
        options.model.c_str(), run.comm()->size(), kCopyEvery, median(with_s) * 1e3, median(without_s) * 1e3,
        median(ratios), *std::ranges::min_element(ratios), *std::ranges::max_element(ratios), arguments.rounds,
        median(cpu_ratios), static_cast<double>(run.copied_bytes()) / (1 << 20));
  });
}

// Returns act(argc, argv) with `words` as the arguments.
template <class Act>
auto with_arguments(std::vector<std::string> words, Act act) {
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  return act(static_cast<int>(argv.size()), argv.data());
}

train_step::Options model_of(const Arguments& arguments) {
  std::vector<std::string> words{"elastic_bench", "--model", arguments.model};
  if (arguments.layers > 0) words.insert(words.end(), {"--layers", std::to_string(arguments.layers)});
  return with_arguments(std::move(words), [](int argc, char** argv) { return train_step::parse(argc, argv).value(); });
}

int spawn(int ranks, std::vector<std::string> words) {
  return with_arguments(std::move(words),
                        [&](int argc, char** argv) { return spawn_elastic(ranks, argc, argv, {.restarts = 0}); });
}

// Starts ranks, once for each kill, or once to compare costs. Returns the exit code.
int start(const Arguments& arguments, char* program) {
  if (arguments.kills == 0) {
    return spawn(arguments.ranks > 0 ? arguments.ranks : 2,
                 {program, "--model", arguments.model, "--rounds", std::to_string(arguments.rounds)});
  }
  const int ranks = arguments.ranks > 0 ? arguments.ranks : 3;
  const std::string file =
      (std::filesystem::temp_directory_path() / ("elastic_bench-" + std::to_string(::getpid()))).string();
  for (int kill = 0; kill < arguments.kills; ++kill) {
    const int code = spawn(ranks, {program, "--victim", std::to_string(kill % ranks), "--file", file});
    if (code != 0) return code;
  }
  std::vector<double> seconds;
  std::ifstream lines(file);
  for (double one = 0; lines >> one;) seconds.push_back(one);
  std::remove(file.c_str());
  std::remove((file + ".death").c_str());
  std::printf(
      "%d ranks of one host: from a death to the end of the next step, median %.2f s (%.2f to %.2f, %zu kills)\n",
      ranks, median(seconds), *std::ranges::min_element(seconds), *std::ranges::max_element(seconds), seconds.size());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  namespace po = boost::program_options;
  Arguments arguments;
  po::options_description description("elastic_bench");
  description.add_options()("kills", po::value(&arguments.kills), "runs, in each of which a rank dies")(
      "ranks", po::value(&arguments.ranks), "processes; default: 3 with --kills, else 2")(
      "model", po::value(&arguments.model), "of the costs: gpt or recipe")("rounds", po::value(&arguments.rounds),
                                                                           "of the costs")(
      "victim", po::value(&arguments.victim), "for ranks: the one that dies")("file", po::value(&arguments.file),
                                                                              "for ranks: receives the seconds");
  try {
    po::variables_map values;
    po::store(po::parse_command_line(argc, argv, description), values);
    po::notify(values);
    if (!launched()) return start(arguments, argv[0]);
    at::set_num_threads(1);
    if (arguments.victim < 0) {
      compare_costs(arguments, model_of(arguments));
    } else {
      arguments.layers = 6;  // each layer has 16 MB
      die_and_resume(arguments, model_of(arguments));
    }
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "elastic_bench: " << error.what() << "\n";
    return 1;
  }
}
