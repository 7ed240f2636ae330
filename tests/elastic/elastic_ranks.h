#pragma once

#include <c10/util/StringUtil.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iomanip>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <vector>

#include <tessera/elastic.h>
#include <tessera/tessera.h>
#include "checkpoint/format/checksum.h"
#include "tests/support/temporary_folder.h"

namespace tessera::testing_support {

// Ranks of an elastic run as forked processes, each of which trains a small model. The forking process must not start
// threads.

using std::chrono::milliseconds;

enum class Wrapper { kDdp, kOss, kFsdp };

struct Training {
  Wrapper wrapper = Wrapper::kFsdp;
  int64_t steps = 12;
  int64_t save_every = 0;  // steps between two checkpoints on disk; 0: none
  // From then on, stopped ranks are continued.
  milliseconds wake_after = std::chrono::hours(1);
  milliseconds pause{0};  // in each step
  int joiners = 0;        // processes beside the first ranks, which join
  int64_t join_in = 0;    // joiners wait until a group of this generation trains; 0: they do not wait
  int restarts = 0;       // first ranks that are started again when they have failed: each one is a further process
  // Joining takes time: training continues beyond the last step until the group has this generation and size.
  int64_t least_generation = 0;
  int least_world = 0;
};

// The part of a step, or of a change of the group, that a process reaches.
enum class Place { kGather, kReduction, kStep, kCopy, kCommit, kRegroup, kJoin, kSave };

// A model, its optimizer and its sampler on one rank. A step depends on the state and on the sampler's items alone.
class Trainer {
 public:
  Trainer(std::shared_ptr<Communicator> comm, const Training& training) : comm_(std::move(comm)) {
    static std::mutex drawing;  // ranks of the reference are threads, which share the generator
    std::unique_lock lock(drawing);
    torch::manual_seed(1);
    net_ = torch::nn::Sequential(torch::nn::Linear(8, 33), torch::nn::Tanh(), torch::nn::Linear(33, 8));
    lock.unlock();
    sampler_.emplace(40, comm_->rank(), comm_->size(), DistributedSamplerOptions{.batch_numel = 2, .seed = 3});
    if (training.wrapper == Wrapper::kFsdp) {
      fsdp_.emplace(net_, comm_, FsdpOptions{.auto_wrap = wrap_modules<torch::nn::LinearImpl>()});
      adam_ = std::make_unique<torch::optim::Adam>(fsdp_->parameters(), 1e-2);
    } else {
      ddp_.emplace(net_, comm_);
      if (training.wrapper == Wrapper::kOss)
        adam_ = std::make_unique<OSS<torch::optim::Adam>>(net_->parameters(), torch::optim::AdamOptions(1e-2), comm_);
      else
        adam_ = std::make_unique<torch::optim::Adam>(net_->parameters(), 1e-2);
    }
  }

  TrainingState state() {
    return fsdp_ ? TrainingState{*fsdp_, *adam_, *sampler_} : TrainingState{*ddp_, *adam_, *sampler_};
  }

  void step(const std::function<void(Place)>& at = [](Place) {}) {
    std::vector<float> items;
    for (const int64_t item : sampler_->next()) items.push_back(static_cast<float>(item));
    const auto x = torch::tensor(items).unsqueeze(1) * torch::linspace(0.01, 0.08, 8);
    adam_->zero_grad();
    at(Place::kGather);
    const auto y = fsdp_ ? (*fsdp_)(x) : (*ddp_)(x);
    at(Place::kReduction);
    torch::mse_loss(y, x.sin()).backward();
    at(Place::kStep);
    adam_->step();
  }

  // A checksum of all parameters, and their norm, which shows how far two runs differ. Collective.
  std::string parameters() {
    std::string bytes;
    double squares = 0;
    const auto add = [&](const at::Tensor& tensor) {
      const auto whole = tensor.detach().contiguous();
      squares += whole.to(at::kDouble).square().sum().item<double>();
      bytes.append(static_cast<const char*>(whole.data_ptr()), whole.nbytes());
    };
    if (!fsdp_) {
      for (const auto& parameter : net_->parameters()) add(parameter);
    } else {
      const auto scope = fsdp_->summon_full_params();
      for (const auto& parameter : net_->parameters()) add(parameter);
    }
    return c10::str(internal::to_hex(internal::checksum(bytes)), ", norm ", std::setprecision(17), std::sqrt(squares));
  }

 private:
  const std::shared_ptr<Communicator> comm_;
  torch::nn::Sequential net_ = nullptr;
  std::optional<DistributedSampler> sampler_;
  std::optional<FullyShardedDataParallel<torch::nn::Sequential>> fsdp_;
  std::optional<DistributedDataParallel<torch::nn::Sequential>> ddp_;
  std::unique_ptr<torch::optim::Optimizer> adam_;
};

// A line of a rank's file for each group in which it has trained.
struct Segment {
  int64_t generation = 0;
  int world = 0;
  int64_t step = 0;           // that it restored
  int64_t made_by = 0;        // the generation that trained this step: several may have, at different worlds
  int64_t last_before = 0;    // the last step of the rank's previous group
  bool is_unchanged = false;  // same members: a joining process was silent when the others decided on the group
};

inline void add_segment(const TemporaryFolder& folder, int process, ElasticRun& run, int64_t last_before,
                        int64_t made_by = 0) {
  std::ofstream(folder / ("segments-" + std::to_string(process)), std::ios::app)
      << run.generation() << " " << run.comm()->size() << " " << run.step() << " " << made_by << " " << last_before
      << " " << (run.change() && run.change()->lost.empty() && run.change()->joined.empty()) << "\n";
}

// Called by each rank after a step, and with step 0 when a group begins.
using Fault = std::function<void(int rank, int64_t generation, int64_t step)>;
using FaultAt = std::function<void(int process, Place place)>;
// Called first by each process.
using Prepare = std::function<void(int process)>;

// A process above the world joins.
inline void be_rank(const TemporaryFolder& folder, int process, int world, const Training& training,
                    ElasticOptions options, const Fault& fault, const FaultAt& fault_at) {
  at::set_num_threads(1);
  const std::string name = std::to_string(process);
  const auto at = [&](Place place) {
    if (fault_at) fault_at(process, place);
  };
  set_warning_handler(
      [&](const std::string& text) { std::ofstream(folder / ("warnings-" + name), std::ios::app) << text << "\n"; });
  std::optional<Elastic> elastic;
  if (process >= world) {
    const auto first_member = folder / ("member-" + std::to_string(training.join_in) + "-0");
    while (process < world + training.joiners && training.join_in > 0 && !std::filesystem::exists(first_member))
      std::this_thread::sleep_for(milliseconds(5));
    ::setenv("TESSERA_ELASTIC_JOIN", "1", 1);
    elastic.emplace(options);
    at(Place::kJoin);
  } else {
    elastic.emplace(c10::make_intrusive<c10d::FileStore>((folder / "store").string(), world), process, world, options);
  }
  int64_t last = 0;
  const auto train = [&](ElasticRun& run) {
    Trainer trainer(run.comm(), training);
    if (process >= world && last == 0) at(Place::kJoin);
    const auto extra = run.restore(trainer.state());
    add_segment(folder, process, run, last, extra.value("generation", int64_t{0}));
    std::ofstream(folder / ("member-" + std::to_string(run.generation()) + "-" + std::to_string(run.comm()->rank())),
                  std::ios::app)
        << "x";
    last = run.step();
    if (fault) fault(process, run.generation(), 0);  // when the group begins
    while (run.step() < training.steps || run.generation() < training.least_generation ||
           run.comm()->size() < training.least_world) {
      if (run.step() >= training.steps) std::this_thread::sleep_for(milliseconds(5));
      std::this_thread::sleep_for(training.pause);
      trainer.step(at);
      last = run.step() + 1;
      at(Place::kCommit);
      run.commit({{"of_step", run.step() + 1}, {"generation", run.generation()}});
      if (run.step() % options.copy_every == 0) at(Place::kCopy);
      if (training.save_every > 0 && run.step() % training.save_every == 0) {
        at(Place::kSave);
        save_checkpoint((folder / "saved" / ("step-" + std::to_string(run.step()))).string(), trainer.state(),
                        {{"step", run.step()}, {"generation", run.generation()}}, {.keep_last = 2});
      }
      if (fault) fault(process, run.generation(), run.step());
    }
    const std::string parameters = trainer.parameters();
    std::ofstream(folder / ("parameters-" + name), std::ios::binary | std::ios::trunc) << parameters;
    std::ofstream(folder / "last-step") << run.step();
  };
  elastic->run([&](ElasticRun& run) {
    try {
      train(run);
    } catch (const CommError& error) {
      at(std::string(error.what()).starts_with("a process joins") ? Place::kJoin : Place::kRegroup);
      throw;
    }
  });
}

inline pid_t run_in_child(const std::function<void()>& body) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  int code = 0;
  try {
    body();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank: %s\n", error.what());
    code = 1;
  }
  std::fflush(nullptr);
  ::_exit(code);
}

// Returns the exit codes: of the first ranks, of those that join, and of those that are started again. A process that
// throws leaves its text in error-<process>.
inline std::vector<int> run_ranks_as_processes(const TemporaryFolder& folder, int world, const Training& training,
                                               const ElasticOptions& options, const Fault& fault,
                                               const FaultAt& fault_at = nullptr, const Prepare& prepare = nullptr) {
  constexpr int kRuns = -1;
  std::vector<pid_t> pids;
  std::vector<int> codes;
  const auto start_process = [&] {
    const int process = static_cast<int>(pids.size());
    pids.push_back(run_in_child([&] {
      try {
        if (prepare) prepare(process);
        be_rank(folder, process, world, training, options, fault, fault_at);
      } catch (const std::exception& error) {
        std::ofstream(folder / ("error-" + std::to_string(process))) << error.what();
        throw;
      }
    }));
    codes.push_back(kRuns);
  };
  for (int process = 0; process < world + training.joiners; ++process) start_process();
  const auto start = std::chrono::steady_clock::now();
  int restarts = training.restarts;
  while (std::ranges::count(codes, kRuns) > 0) {
    const auto elapsed = std::chrono::steady_clock::now() - start;
    for (size_t process = 0; process < pids.size(); ++process) {
      int status = 0;
      if (codes[process] != kRuns) continue;
      if (elapsed >= training.wake_after) ::kill(pids[process], SIGCONT);
      if (::waitpid(pids[process], &status, WNOHANG) == 0) {
        if (elapsed < std::chrono::seconds(60)) continue;
        ADD_FAILURE() << "process " << process << " hangs";
        ::kill(pids[process], SIGKILL);
        ::waitpid(pids[process], &status, 0);
      }
      codes[process] = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
      if (codes[process] != 0 && static_cast<int>(process) < world && restarts-- > 0) start_process();
    }
    std::this_thread::sleep_for(milliseconds(5));
  }
  return codes;
}

inline std::vector<Segment> segments_of(const TemporaryFolder& folder, int rank) {
  std::vector<Segment> segments;
  std::ifstream file(folder / ("segments-" + std::to_string(rank)));
  for (Segment one;
       file >> one.generation >> one.world >> one.step >> one.made_by >> one.last_before >> one.is_unchanged;)
    segments.push_back(one);
  return segments;
}

// The parameters of a run without deaths that changes its world at the same steps, by checkpoints on disk.
inline std::string reference(const TemporaryFolder& folder, const std::vector<Segment>& segments,
                             const Training& training) {
  const auto result = folder / "reference";
  const int64_t last_step = std::stoll(file_bytes(folder / "last-step"));
  const pid_t child = run_in_child([&] {
    at::set_num_threads(1);
    for (size_t i = 0; i < segments.size(); ++i) {
      const bool is_last = i + 1 == segments.size();
      const int64_t end = is_last ? last_step : segments[i + 1].last_before;
      run_ranks(segments[i].world, [&](std::shared_ptr<Communicator> comm) {
        Trainer trainer(comm, training);
        const auto name_of = [&](int64_t step, int64_t generation) {
          return (folder / ("step-" + std::to_string(step) + "-" + std::to_string(generation))).string();
        };
        if (i > 0 && segments[i].step > 0)
          load_checkpoint(name_of(segments[i].step, segments[i].made_by), trainer.state());
        for (int64_t step = segments[i].step; step < end;) {
          trainer.step();
          ++step;
          const int64_t generation = segments[i].generation;
          if (std::ranges::any_of(
                  segments, [&](const Segment& later) { return later.step == step && later.made_by == generation; }))
            save_checkpoint(name_of(step, generation), trainer.state());
        }
        const std::string parameters = trainer.parameters();
        if (comm->rank() == 0) std::ofstream(result, std::ios::binary | std::ios::trunc) << parameters;
      });
    }
  });
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  return file_bytes(result);
}

inline std::string warnings_of(const TemporaryFolder& folder, int world) {
  std::string all;
  for (int rank = 0; rank < world; ++rank) all += file_bytes(folder / ("warnings-" + std::to_string(rank)));
  return all;
}

inline ElasticOptions quick_options() {
  ElasticOptions options;
  options.copy_every = 3;
  options.stopped_after = milliseconds(3000);
  options.regroup_timeout = milliseconds(20000);
  options.group.timeout = milliseconds(10000);
  return options;
}

}  // namespace tessera::testing_support
