#include "tests/accelerator/process_elastic.h"

#include <signal.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <vector>

#include <tessera/elastic.h>
#include <tessera/optim/fused_optimizers.h>
#include "checkpoint/format/checksum.h"
#include "tests/accelerator/training.h"
#include "tests/support/accelerator/accelerator.h"
#include "tests/support/accelerator/ranks.h"

namespace tessera::process_ranks {
using namespace internal;
namespace {

using accelerator_training::State;
using std::chrono::seconds;
using std::chrono::steady_clock;
using testing_support::seeded;

constexpr int64_t kSteps = 12, kKilledAfter = 7, kCopyEvery = 2;
// commit() starts the copy of step 6 when that of step 4 is complete on all ranks. The death may interrupt the former.
constexpr int64_t kFirstRestored = 4, kLastRestored = 6;
// Exact in fp32, to which devices round the rate. On GPUs, where products are rounded differently than on CPUs, Adam
// has a large epsilon, so that a step does not amplify the difference.
constexpr double kLearningRate = 0x1p-7;

int rank_that_dies(const ElasticDeath& death, int world) { return death.is_of_rank_0 ? 0 : world - 1; }

// One rank's model and optimizer. A step depends on their state, the step's number, the rank and the world size.
class Trainer {
 public:
  explicit Trainer(std::shared_ptr<Communicator> comm)
      : comm_(std::move(comm)),
        fsdp_(net(comm_->device()), comm_, {.auto_wrap = wrap_modules<torch::nn::LinearImpl>()}),
        optimizer_(fsdp_.parameters(),
                   torch::optim::AdamWOptions(kLearningRate).eps(accelerator::on_gpus() ? 1 : 1e-8)) {}

  TrainingState state() { return {fsdp_, optimizer_}; }
  void train(int64_t step) {
    const at::Tensor x = seeded(100 * step + comm_->rank(), [] { return torch::randn({4, 24}); }).to(comm_->device());
    optimizer_.zero_grad();
    fsdp_(x).square().sum().backward();
    optimizer_.step();
  }
  State parameters() {
    State state;
    for (auto& entry : fsdp_.full_state_dict()) state[entry.key()] = entry.value().cpu();
    return state;
  }

 private:
  // The first layer is frozen, so its copy is shared by all steps.
  static torch::nn::Sequential net(at::Device device) {
    return seeded(5, [&] {
      torch::nn::Linear frozen(24, 24);
      for (at::Tensor& parameter : frozen->parameters()) parameter.requires_grad_(false);
      torch::nn::Sequential layers(frozen, torch::nn::Tanh(), torch::nn::Linear(24, 17), torch::nn::Tanh(),
                                   torch::nn::Linear(17, 5));
      layers->to(device);
      return layers;
    });
  }

  const std::shared_ptr<Communicator> comm_;
  FullyShardedDataParallel<torch::nn::Sequential> fsdp_;
  AdamW optimizer_;
};

// Returns the parameters of a run on CPUs that continues from a checkpoint of `step` with world - 1 ranks.
State reference(int world, int64_t step) {
  const testing_support::TemporaryFolder folder;
  run_ranks(world, [&](std::shared_ptr<Communicator> comm) {
    Trainer trainer(std::move(comm));
    for (int64_t i = 0; i < step; ++i) trainer.train(i);
    save_checkpoint(folder / "saved", trainer.state());
  });
  State result;
  run_ranks(world - 1, [&](std::shared_ptr<Communicator> comm) {
    Trainer trainer(comm);
    load_checkpoint(folder / "saved", trainer.state());
    for (int64_t i = step; i < kSteps; ++i) trainer.train(i);
    State own = trainer.parameters();
    if (comm->rank() == 0) result = std::move(own);
  });
  return result;
}

void require_survivors_group(const ElasticDeath& death, const ElasticRun& run, int64_t step_of_extra) {
  const auto& change = run.change();
  TORCH_CHECK(change && change->lost == std::vector<int>{rank_that_dies(death, change->world_before)} &&
                  change->joined.empty() && run.comm()->size() == change->world_before - 1 && run.generation() == 1,
              "generation ", run.generation(), " has ", run.comm()->size(), " ranks; expected all but the killed one");
  TORCH_CHECK(run.step() == step_of_extra && run.step() >= kFirstRestored && run.step() <= kLastRestored,
              "restored step ", run.step(), " with extra of step ", step_of_extra, "; expected ", kFirstRestored,
              " to ", kLastRestored);
}

// Throws if a tensor differs from the reference. Returns the largest difference.
double compare(const State& got, const State& expected) {
  const std::string difference = accelerator_training::difference(expected, got, accelerator::on_gpus() ? 1e-4 : 0);
  TORCH_CHECK(difference.empty(), "the final parameters differ from a run continued from a checkpoint:", difference);
  double largest = 0;
  for (const auto& [name, value] : expected)
    largest = std::max(largest, (got.at(name) - value).abs().max().item<double>());
  return largest;
}

std::string checksum_of(const State& state) {
  std::string bytes;
  for (const auto& [name, value] : state)
    bytes.append(static_cast<const char*>(value.contiguous().data_ptr()), value.nbytes());
  return to_hex(checksum(bytes));
}

}  // namespace

int train_elastically(const ElasticDeath& death) {
  ElasticOptions options;
  options.copy_every = kCopyEvery;
  options.regroup_timeout = seconds(30);
  options.group.device = accelerator::share_device();
  options.process.cache_memory = false;
  Elastic elastic(options);
  int first_world = 0;
  int64_t restored = 0;
  steady_clock::time_point last_begun;
  double pause_s = 0;
  State parameters;
  elastic.run([&](ElasticRun& run) {
    Trainer trainer(run.comm());
    const auto extra = run.restore(trainer.state());
    if (run.generation() > 0) require_survivors_group(death, run, extra.value("step", int64_t{0}));
    first_world = run.first_world();
    restored = run.step();
    while (run.step() < kSteps) {
      // Overwritten in each step, because a survivor may be a step behind the rank that dies.
      if (run.generation() == 0) last_begun = steady_clock::now();
      if (run.generation() == 0 && run.step() == kKilledAfter &&
          run.comm()->rank() == rank_that_dies(death, first_world))
        ::raise(SIGKILL);
      trainer.train(run.step());
      run.commit({{"step", run.step() + 1}});
      if (run.generation() > 0 && run.step() == restored + 1) pause_s = seconds_since(last_begun);
    }
    parameters = trainer.parameters();
  });
  TORCH_CHECK(pause_s > 0, "the run ended without the loss of a rank");
  for (const std::string& finding : accelerator::Simulation::findings()) TORCH_CHECK(false, finding);
  const double difference = compare(parameters, reference(first_world, restored));
  std::printf("went on from step %d after %.1f s, difference %g, parameters %s\n", static_cast<int>(restored), pause_s,
              difference, checksum_of(parameters).c_str());
  return 0;
}

bool check_elastic_survivors(const ElasticDeath& death, RankProcesses& ranks, seconds limit) {
  int right = 0, step = -1;
  double longest_s = 0, largest = 0;
  std::set<std::string> results;  // a survivor's step and checksum of parameters; must be equal on all survivors
  std::string wrong;
  for (int rank = 0; rank < ranks.size(); ++rank) {
    if (rank == rank_that_dies(death, ranks.size())) continue;
    const int code = ranks.wait(rank, limit);
    const std::string output = ranks.output(rank);
    double after_s = 0, difference = 0;
    char sum[32] = "";
    const auto at = output.find("went on from step");
    const bool is_right =
        code == 0 && at != std::string::npos &&
        std::sscanf(output.c_str() + at, "went on from step %d after %lf s, difference %lf, parameters %31s", &step,
                    &after_s, &difference, sum) == 4;
    if (is_right) {
      ++right;
      longest_s = std::max(longest_s, after_s);
      largest = std::max(largest, difference);
      results.insert(std::to_string(step) + " " + sum);
    } else {
      wrong += c10::str("FAILED: rank ", rank, " ended with code ", code, "; expected it to go on:\n",
                        last_lines(output), "\n");
    }
  }
  if (results.size() > 1) wrong += "FAILED: the survivors' steps or parameters differ\n";
  std::printf("%d ranks, one %s: %d of %d go on from step %d, after %.1f s at most, the largest difference is %g\n%s",
              ranks.size(), death.name, right, ranks.size() - 1, step, longest_s, largest, wrong.c_str());
  return wrong.empty();
}

}  // namespace tessera::process_ranks
