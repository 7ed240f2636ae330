// Loops as users write them, in the body of an elastic run: a rank is killed, and the final values must have the bits
// of a run that loads a checkpoint of the same step at the same worlds.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <tessera/exported.h>
#include <tessera/optim/fused_optimizers.h>
#include <tessera/plan/dry_run.h>
#include <tessera/plan/memory_plan.h>
#include <tessera/zero.h>
#include "tests/elastic/elastic_ranks.h"
#include "tests/support/built.h"

namespace tessera::wrappers_test {
namespace {

using namespace testing_support;
using Comm = std::shared_ptr<Communicator>;

// A user's training on one rank: the objects of one body, and one step.
class Loop {
 public:
  Loop() = default;
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;
  virtual ~Loop() = default;
  virtual TrainingState state() = 0;
  virtual void step() = 0;
  virtual std::string result() = 0;  // the bits that must be equal; collective
  std::vector<int64_t> items;        // of this rank's last step, if it has a sampler
};
using MakeLoop = std::function<std::unique_ptr<Loop>(const Comm& comm, int accumulation)>;

std::string bytes_of(const std::vector<at::Tensor>& tensors) {
  std::string bytes;
  for (const auto& tensor : tensors) {
    const auto whole = tensor.detach().contiguous();
    bytes.append(static_cast<const char*>(whole.data_ptr()), whole.nbytes());
  }
  return bytes;
}
std::string sum_of(const std::vector<at::Tensor>& tensors) {
  return internal::to_hex(internal::checksum(bytes_of(tensors)));
}

template <class Fsdp>
std::string sum_of_whole(Fsdp& fsdp, torch::nn::Module& module) {
  const auto scope = fsdp.summon_full_params();
  return sum_of(module.parameters());
}

torch::nn::Sequential draw_net(int64_t seed = 1) {
  torch::manual_seed(seed);
  return torch::nn::Sequential(torch::nn::Linear(8, 33), torch::nn::Tanh(), torch::nn::Linear(33, 8));
}

at::Tensor inputs_of(const std::vector<int64_t>& items) {
  std::vector<float> values(items.begin(), items.end());
  return torch::tensor(values).unsqueeze(1) * torch::linspace(0.01, 0.08, 8);
}

void expect_all_end_well(const std::vector<pid_t>& pids) {
  for (const pid_t pid : pids) {
    int status = 0;
    ::waitpid(pid, &status, 0);
    EXPECT_EQ(status, 0);
  }
}

FsdpOptions by_linear() { return {.auto_wrap = wrap_modules<torch::nn::LinearImpl>()}; }

struct Scenario {
  MakeLoop make;
  int world = 3;
  std::vector<int> victims = {1};
  int64_t steps = 12, kill_after = 8;
  ElasticOptions options = quick_options();
  bool catches = false;  // the loop catches exceptions of its steps
};

void train_elastically(const TemporaryFolder& folder, int rank, const Scenario& scenario) {
  at::set_num_threads(1);
  const std::string name = std::to_string(rank);
  set_warning_handler(
      [&](const std::string& text) { std::ofstream(folder / ("warnings-" + name), std::ios::app) << text << "\n"; });
  Elastic elastic(c10::make_intrusive<c10d::FileStore>((folder / "store").string(), scenario.world), rank,
                  scenario.world, scenario.options);
  int64_t last = 0;
  elastic.run([&](ElasticRun& run) {
    const auto loop = scenario.make(run.comm(), run.accumulation());
    run.restore(loop->state());
    add_segment(folder, rank, run, last);
    while (run.step() < scenario.steps) {
      try {
        loop->step();
      } catch (const std::exception& error) {
        if (!scenario.catches) throw;
      }
      last = run.step() + 1;
      std::ofstream items(folder / ("items-" + name), std::ios::app);
      items << run.generation() << " " << run.step();
      for (const int64_t item : loop->items) items << " " << item;
      items << std::endl;
      run.commit();
      if (run.generation() == 0 && run.step() == scenario.kill_after && std::ranges::count(scenario.victims, rank))
        ::kill(::getpid(), SIGKILL);
    }
    const std::string result = loop->result();
    std::ofstream(folder / ("result-" + name), std::ios::trunc | std::ios::binary) << result;
  });
}

// The result of a run that changes its world at the same steps, by checkpoints on disk. Ranks are processes, as each
// has its own random numbers.
std::string result_of_restarts(const TemporaryFolder& folder, const std::vector<Segment>& segments,
                               const Scenario& scenario) {
  const int first_world = segments[0].world;
  std::string result;
  for (size_t i = 0; i < segments.size(); ++i) {
    const Segment& now = segments[i];
    const int64_t end = i + 1 == segments.size() ? scenario.steps : segments[i + 1].step;
    std::vector<pid_t> pids;
    for (int rank = 0; rank < now.world; ++rank)
      pids.push_back(run_in_child([&] {
        at::set_num_threads(1);
        const auto store =
            c10::make_intrusive<c10d::FileStore>((folder / ("store-" + std::to_string(i))).string(), now.world);
        const auto comm = communicator_from(store, rank, now.world);
        const int accumulation =
            scenario.options.batch == ElasticBatch::kFollow ? 1 : (first_world + now.world - 1) / now.world;
        const auto loop = scenario.make(comm, accumulation);
        const auto name_of = [&](int64_t step) { return (folder / ("step-" + std::to_string(step))).string(); };
        if (now.step > 0) load_checkpoint(name_of(now.step), loop->state());
        for (int64_t step = now.step; step < end; ++step) loop->step();
        if (i + 1 < segments.size()) {
          if (end > 0) save_checkpoint(name_of(end), loop->state());
          return;
        }
        const std::string own = loop->result();
        if (rank == 0) std::ofstream(folder / "reference", std::ios::trunc) << own;
      }));
    for (const pid_t pid : pids) {
      int status = 0;
      ::waitpid(pid, &status, 0);
      EXPECT_EQ(status, 0) << "reference, group " << i;
    }
  }
  return file_bytes(folder / "reference");
}

// Runs a scenario, compares the survivors with the reference, and returns their segments.
std::vector<Segment> expect_same(const TemporaryFolder& folder, const Scenario& scenario) {
  std::vector<pid_t> pids;
  for (int rank = 0; rank < scenario.world; ++rank)
    pids.push_back(run_in_child([&] { train_elastically(folder, rank, scenario); }));
  std::vector<Segment> segments;
  std::string result;
  for (int rank = 0; rank < scenario.world; ++rank) {
    int status = 0;
    const auto start = std::chrono::steady_clock::now();
    while (::waitpid(pids[static_cast<size_t>(rank)], &status, WNOHANG) == 0) {
      std::this_thread::sleep_for(milliseconds(5));
      if (std::chrono::steady_clock::now() - start < std::chrono::seconds(60)) continue;
      ADD_FAILURE() << "rank " << rank << " hangs";
      ::kill(pids[static_cast<size_t>(rank)], SIGKILL);
    }
    if (std::ranges::count(scenario.victims, rank)) continue;
    EXPECT_EQ(status, 0) << "rank " << rank << "\n" << warnings_of(folder, scenario.world);
    const std::string own = file_bytes(folder / ("result-" + std::to_string(rank)));
    if (segments.empty()) {
      segments = segments_of(folder, rank);
      result = own;
    }
    EXPECT_TRUE(own == result) << "rank " << rank;
  }
  if (testing::Test::HasFailure()) return segments;
  EXPECT_EQ(segments.size(), 2U) << warnings_of(folder, scenario.world);
  if (segments.size() != 2) return segments;
  EXPECT_EQ(segments[1].world, scenario.world - static_cast<int>(scenario.victims.size()));
  EXPECT_FALSE(result.empty());
  EXPECT_TRUE(result == result_of_restarts(folder, segments, scenario)) << warnings_of(folder, scenario.world);
  return segments;
}

std::vector<Segment> expect_same(const Scenario& scenario) {
  const TemporaryFolder folder;
  return expect_same(folder, scenario);
}

// The items of committed steps, over all groups.
std::map<int64_t, int> committed_items(const TemporaryFolder& folder, const std::vector<Segment>& segments, int world) {
  std::map<int64_t, int> counts;
  for (int rank = 0; rank < world; ++rank) {
    std::ifstream file(folder / ("items-" + std::to_string(rank)));
    for (std::string line; std::getline(file, line);) {
      std::istringstream words(line);
      int64_t generation = 0, step = 0;
      words >> generation >> step;
      const auto group = static_cast<size_t>(generation);
      if (group + 1 < segments.size() && step >= segments[group + 1].step) continue;  // lost
      for (int64_t item = 0; words >> item;) ++counts[item];
    }
  }
  return counts;
}

// FSDP of the small net with any optimizer.
template <class Optimizer, class Options>
class FsdpLoop : public Loop {
 public:
  FsdpLoop(const Comm& comm, const FsdpOptions& options, Options optimizer_options)
      : net_(draw_net()),
        fsdp_(net_, comm, options),
        optimizer_(fsdp_.parameters(), optimizer_options),
        sampler_(40, comm->rank(), comm->size(), {.batch_numel = 2, .seed = 3}) {}
  TrainingState state() override { return {fsdp_, optimizer_, sampler_}; }
  void step() override {
    const auto x = inputs_of(items = sampler_.next());
    optimizer_.zero_grad();
    torch::mse_loss(fsdp_(x), x.sin()).backward();
    optimizer_.step();
  }
  std::string result() override { return sum_of_whole(fsdp_, *net_); }

 protected:
  torch::nn::Sequential net_;
  FullyShardedDataParallel<torch::nn::Sequential> fsdp_;
  Optimizer optimizer_;
  DistributedSampler sampler_;
};

TEST(ElasticWrappers, OffloadedShards) {
  const TemporaryFolder disk;
  for (const std::string& directory : {std::string(), disk.path().string()})
    expect_same({.make = [&](const Comm& comm, int) {
      FsdpOptions options = by_linear();
      options.offload = {.params = true, .grads = true, .directory = directory};
      return std::make_unique<FsdpLoop<HostAdamW, torch::optim::AdamWOptions>>(comm, options, 1e-2);
    }});
}

TEST(ElasticWrappers, HybridSharding) {
  // Of copies {0, 1} and {2, 3}, one rank of each is lost, or a whole copy.
  for (const auto& victims : {std::vector{0, 3}, std::vector{2, 3}}) {
    Scenario scenario{.make =
                          [](const Comm& comm, int) {
                            FsdpOptions options = by_linear();
                            options.hybrid.ranks_per_copy = 2;
                            return std::make_unique<FsdpLoop<torch::optim::Adam, torch::optim::AdamOptions>>(
                                comm, options, 1e-2);
                          },
                      .world = 4,
                      .victims = victims};
    scenario.options.copies = 2;
    expect_same(scenario);
  }
}

// Overflows in some steps.
class ScaledLoop : public FsdpLoop<torch::optim::Adam, torch::optim::AdamOptions> {
 public:
  explicit ScaledLoop(const Comm& comm)
      : FsdpLoop(comm, by_linear(), 1e-2), scaler_(comm, {.initial_scale = 1024, .growth_interval = 2}) {}
  TrainingState state() override { return {fsdp_, optimizer_, sampler_, scaler_}; }
  void step() override {
    const auto x = inputs_of(items = sampler_.next());
    optimizer_.zero_grad();
    auto loss = torch::mse_loss(fsdp_(x), x.sin());
    if (std::ranges::count(items, 7)) loss = loss * INFINITY;
    scaler_.scale(loss).backward();
    scaler_.step(optimizer_);
    scaler_.update();
  }
  std::string result() override { return FsdpLoop::result() + " " + std::to_string(scaler_.get_scale()); }

 private:
  ShardedGradScaler scaler_;
};

TEST(ElasticWrappers, GradScaler) {
  expect_same({.make = [](const Comm& comm, int) { return std::make_unique<ScaledLoop>(comm); }});
}

// DDP's copies average parts of their own.
class EmaLoop : public Loop {
 public:
  explicit EmaLoop(const Comm& comm)
      : ddp_(net_, comm),
        optimizer_(net_->parameters(), torch::optim::AdamOptions(1e-2)),
        ema_(ddp_, {.decay = 0.9, .warmup = true}),
        schedule_(optimizer_, 4, 0.5),
        sampler_(40, comm->rank(), comm->size(), {.batch_numel = 2, .seed = 3}) {}
  TrainingState state() override { return {ddp_, optimizer_, ema_, schedule_, sampler_}; }
  void step() override {
    const auto x = inputs_of(items = sampler_.next());
    optimizer_.zero_grad();
    torch::mse_loss(ddp_(x), x.sin()).backward();
    optimizer_.step();
    ema_.update();
    schedule_.step();
  }
  std::string result() override {
    const std::string own = sum_of(net_->parameters());
    const auto averaged = ema_.swap_in();
    return own + " " + sum_of(net_->parameters()) + " " +
           std::to_string(optimizer_.param_groups()[0].options().get_lr());
  }

 private:
  torch::nn::Sequential net_ = draw_net();
  DistributedDataParallel<torch::nn::Sequential> ddp_;
  torch::optim::Adam optimizer_;
  Ema ema_;
  torch::optim::StepLR schedule_;
  DistributedSampler sampler_;
};

TEST(ElasticWrappers, AveragesAndLearningRates) {
  expect_same({.make = [](const Comm& comm, int) { return std::make_unique<EmaLoop>(comm); }, .victims = {0}});
}

// SDP, whose passes accumulate as the run says. The mean is over all items of a step.
class AccumulatingLoop : public Loop {
 public:
  AccumulatingLoop(const Comm& comm, int accumulation)
      : accumulation_(accumulation),
        oss_(net_->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9), comm),
        sdp_(net_, oss_, comm),
        sampler_(48, comm->rank(), comm->size(), {.batch_numel = 2, .accumulation = accumulation, .seed = 3}) {}
  TrainingState state() override { return {sdp_, oss_, sampler_}; }
  void step() override {
    items.clear();
    oss_.zero_grad();
    for (int pass = 0; pass < accumulation_; ++pass) {
      const auto own = sampler_.next();
      items.insert(items.end(), own.begin(), own.end());
      const auto x = inputs_of(own);
      const auto run = [&] { (torch::mse_loss(sdp_(x), x.sin()) / accumulation_).backward(); };
      if (pass + 1 == accumulation_) {
        run();
      } else {
        const auto local = sdp_.no_sync();
        run();
      }
    }
    oss_.step();
  }
  std::string result() override { return bytes_of(net_->parameters()); }

 private:
  const int accumulation_;
  torch::nn::Sequential net_ = draw_net();
  OSS<torch::optim::SGD> oss_;
  ShardedDataParallel<torch::nn::Sequential> sdp_;
  DistributedSampler sampler_;
};

TEST(ElasticWrappers, TheBatchIsKeptByAccumulationOrFollowsTheWorld) {
  for (const auto batch : {ElasticBatch::kKeep, ElasticBatch::kFollow}) {
    const TemporaryFolder folder;
    Scenario scenario{.make = [](const Comm& comm,
                                 int accumulation) { return std::make_unique<AccumulatingLoop>(comm, accumulation); },
                      .world = 4,
                      .victims = {1, 3},
                      .steps = 12};
    scenario.options.batch = batch;
    const auto segments = expect_same(folder, scenario);
    ASSERT_EQ(segments.size(), 2U);
    const auto counts = committed_items(folder, segments, 4);
    if (batch == ElasticBatch::kFollow) continue;
    // Each step has 8 of 48 items: the run is two epochs, and each item occurs twice.
    ASSERT_EQ(counts.size(), 48U);
    for (const auto& [item, count] : counts) EXPECT_EQ(count, 2) << item;
    // One process that takes all items of a step at once has the same means, to rounding.
    const pid_t alone = run_in_child([&] {
      const auto net = draw_net();
      torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
      DistributedSampler sampler(48, 0, 1, {.batch_numel = 8, .seed = 3});
      for (int step = 0; step < 12; ++step) {
        auto module = net;
        const auto x = inputs_of(sampler.next());
        sgd.zero_grad();
        torch::mse_loss(module->forward(x), x.sin()).backward();
        sgd.step();
      }
      std::ofstream(folder / "alone", std::ios::trunc) << bytes_of(net->parameters());
    });
    int status = 0;
    ::waitpid(alone, &status, 0);
    const std::string expected = file_bytes(folder / "alone"), result = file_bytes(folder / "result-0");
    ASSERT_EQ(expected.size(), result.size());
    ASSERT_GT(result.size(), 1000U);
    for (size_t at = 0; at + sizeof(float) <= result.size(); at += sizeof(float)) {
      float own = 0, alone_value = 0;
      std::memcpy(&own, result.data() + at, sizeof own);
      std::memcpy(&alone_value, expected.data() + at, sizeof alone_value);
      ASSERT_NEAR(own, alone_value, 1e-5);
    }
  }
}

struct Numbers : torch::data::Dataset<Numbers> {
  torch::data::Example<> get(size_t index) override {
    return {torch::tensor(static_cast<float>(index)), torch::tensor(static_cast<int64_t>(index))};
  }
  torch::optional<size_t> size() const override { return 38; }
};

// A loader with a worker: the body's loop is over batches.
void train_with_loader(const TemporaryFolder& folder, int rank, int world, int64_t steps, bool dies) {
  at::set_num_threads(1);
  const std::string name = std::to_string(rank);
  set_warning_handler([](const std::string&) {});
  Elastic elastic(c10::make_intrusive<c10d::FileStore>((folder / "store").string(), world), rank, world,
                  quick_options());
  elastic.run([&](ElasticRun& run) {
    const auto net = draw_net();
    FullyShardedDataParallel<torch::nn::Sequential> fsdp(net, run.comm(), by_linear());
    torch::optim::Adam adam(fsdp.parameters(), 1e-2);
    DistributedSampler sampler(38, run.comm()->rank(), run.comm()->size(), {.batch_numel = 2, .seed = 3});
    run.restore({fsdp, adam, sampler});
    add_segment(folder, rank, run, /*last_before=*/0);
    while (run.step() < steps) {
      auto loader = torch::data::make_data_loader(Numbers().map(torch::data::transforms::Stack<>()), sampler,
                                                  torch::data::DataLoaderOptions(2).workers(2));
      for (auto& batch : *loader) {
        const auto x = batch.data.unsqueeze(1) * torch::linspace(0.01, 0.08, 8);
        adam.zero_grad();
        torch::mse_loss(fsdp(x), x.sin()).backward();
        adam.step();
        std::ofstream items(folder / ("items-" + name), std::ios::app);
        items << run.generation() << " " << run.step();
        for (int64_t i = 0; i < batch.target.numel(); ++i) items << " " << batch.target[i].item<int64_t>();
        items << std::endl;
        run.commit();
        if (run.generation() == 0 && run.step() == 3) std::this_thread::sleep_for(milliseconds(300));  // it is copied
        if (dies && run.generation() == 0 && run.step() == 5) ::kill(::getpid(), SIGKILL);
        if (run.step() == steps) break;
      }
    }
  });
}

TEST(ElasticWrappers, ALoaderLosesAndRepeatsNoSample) {
  const TemporaryFolder folder;
  // An epoch is 3 steps of 6 items, which are copied, and 5 of 4.
  std::vector<pid_t> pids;
  for (int rank = 0; rank < 3; ++rank)
    pids.push_back(run_in_child([&] { train_with_loader(folder, rank, 3, 8, rank == 2); }));
  std::vector<int> codes;
  for (const pid_t pid : pids) {
    int status = 0;
    ::waitpid(pid, &status, 0);
    codes.push_back(WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
  }
  ASSERT_EQ(codes, (std::vector<int>{0, 0, SIGKILL}));
  const auto segments = segments_of(folder, 0);
  ASSERT_EQ(segments.size(), 2U);
  EXPECT_EQ(segments[1].step, 3);
  const auto counts = committed_items(folder, segments, 3);
  EXPECT_EQ(counts.size(), 38U);
  for (const auto& [item, count] : counts) EXPECT_EQ(count, 1) << item;
}

// A generator and a critic, with an optimizer each.
class GanLoop : public Loop {
 public:
  explicit GanLoop(const Comm& comm)
      : generator_(generator_net_, comm, by_linear()),
        critic_(critic_net_, comm),
        of_generator_(generator_.parameters(), torch::optim::AdamOptions(1e-2)),
        of_critic_(critic_net_->parameters(), torch::optim::RMSpropOptions(1e-2)),
        sampler_(40, comm->rank(), comm->size(), {.batch_numel = 2, .seed = 3}) {}
  TrainingState state() override {
    return {{"generator", generator_},
            {"critic", critic_},
            {"of_generator", of_generator_},
            {"of_critic", of_critic_},
            sampler_};
  }
  void step() override {
    const auto x = inputs_of(items = sampler_.next());
    of_critic_.zero_grad();
    (critic_(generator_(x).detach()).mean() - critic_(x.sin()).mean()).backward();
    of_critic_.step();
    of_generator_.zero_grad();
    (-critic_net_->forward(generator_(x)).mean()).backward();
    of_generator_.step();
  }
  std::string result() override {
    return sum_of_whole(generator_, *generator_net_) + sum_of(critic_net_->parameters());
  }

 private:
  torch::nn::Sequential generator_net_ = draw_net(1), critic_net_ = draw_net(2);
  FullyShardedDataParallel<torch::nn::Sequential> generator_;
  DistributedDataParallel<torch::nn::Sequential> critic_;
  torch::optim::Adam of_generator_;
  torch::optim::RMSprop of_critic_;
  DistributedSampler sampler_;
};

TEST(ElasticWrappers, TwoModelsAndTwoOptimizers) {
  expect_same({.make = [](const Comm& comm, int) { return std::make_unique<GanLoop>(comm); }, .victims = {2}});
}

// Steps in backward, which a death interrupts.
class BackwardLoop : public FsdpLoop<HostAdamW, torch::optim::AdamWOptions> {
 public:
  explicit BackwardLoop(const Comm& comm) : FsdpLoop(comm, by_linear(), 1e-2), step_(fsdp_, optimizer_) {}
  void step() override {
    const auto x = inputs_of(items = sampler_.next());
    optimizer_.zero_grad();
    torch::mse_loss(fsdp_(x), x.sin()).backward();
    step_.finish();
  }

 private:
  StepInBackward step_;
};

TEST(ElasticWrappers, StepInBackward) {
  expect_same({.make = [](const Comm& comm, int) { return std::make_unique<BackwardLoop>(comm); }});
}

class ExportedLoop : public Loop {
 public:
  explicit ExportedLoop(const Comm& comm)
      : model_((torch::manual_seed(1),
                load_exported(std::filesystem::path(built(TESSERA_EXPORTED_DATA)) / "decoder.pt2"))),
        fsdp_(model_, comm, {.auto_wrap = wrap_classes({"Block"})}),
        optimizer_(fsdp_.parameters(), torch::optim::AdamWOptions(1e-2)),
        sampler_(40, comm->rank(), comm->size(), {.seed = 3}) {}
  TrainingState state() override { return {fsdp_, optimizer_, sampler_}; }
  void step() override {
    items = sampler_.next();
    const auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(items[0]));
    const auto ids = at::randint(23, {3, 5}, generator, at::kLong);
    optimizer_.zero_grad();
    fsdp_(NamedInputs{{"ids", ids}, {"labels", ids}})["loss"].tensor().backward();
    optimizer_.step();
  }
  std::string result() override { return sum_of_whole(fsdp_, *model_); }

 private:
  std::shared_ptr<ExportedModule> model_;
  FullyShardedDataParallel<std::shared_ptr<ExportedModule>> fsdp_;
  torch::optim::AdamW optimizer_;
  DistributedSampler sampler_;
};

TEST(ElasticWrappers, AnExportedModel) {
  expect_same({.make = [](const Comm& comm, int) { return std::make_unique<ExportedLoop>(comm); }});
}

using AdamLoop = FsdpLoop<torch::optim::Adam, torch::optim::AdamOptions>;
std::unique_ptr<Loop> make_adam_loop(const Comm& comm, int) {
  return std::make_unique<AdamLoop>(comm, by_linear(), 1e-2);
}

TEST(ElasticWrappers, ALoopThatCatchesExceptionsOfItsSteps) { expect_same({.make = make_adam_loop, .catches = true}); }

// Saves to disk in the background after each step. The handle belongs to the body, or outlives it.
class SavingLoop : public AdamLoop {
 public:
  SavingLoop(const Comm& comm, std::filesystem::path folder, bool is_outside)
      : AdamLoop(comm, by_linear(), 1e-2), folder_(std::move(folder)), is_outside_(is_outside) {}
  void step() override {
    AdamLoop::step();
    static std::optional<PendingSave>* const outside = new std::optional<PendingSave>;
    (is_outside_ ? *outside : inside_) = save_checkpoint_async(folder_ / std::to_string(++saves_), state());
  }

 private:
  const std::filesystem::path folder_;
  const bool is_outside_;
  int saves_ = 0;
  std::optional<PendingSave> inside_;
};

TEST(ElasticWrappers, ASaveInFlightDoesNotDelayTheSurvivors) {
  for (const bool is_outside : {false, true}) {
    const TemporaryFolder folder;
    expect_same(folder, {.make = [&](const Comm& comm, int) {
                  return std::make_unique<SavingLoop>(comm, folder / "saved", is_outside);
                }});
    const std::string text = warnings_of(folder, 3);
    const auto at = text.find(" ended ", text.find("training goes on"));
    ASSERT_NE(at, std::string::npos) << text;
    EXPECT_LT(std::stod(text.substr(at + 7)), 4) << text;  // the group's timeout is 10 s
  }
}

// A model and an optimizer that outlive the body.
class OutsideLoop : public Loop {
 public:
  explicit OutsideLoop(const Comm& comm)
      : net_(objects().net),
        optimizer_(objects().optimizer),
        ddp_(net_, comm),
        sampler_(40, comm->rank(), comm->size(), {.batch_numel = 2, .seed = 3}) {}
  TrainingState state() override { return {ddp_, optimizer_, sampler_}; }
  void step() override {
    const auto x = inputs_of(items = sampler_.next());
    optimizer_.zero_grad();
    torch::mse_loss(ddp_(x), x.sin()).backward();
    optimizer_.step();
  }
  std::string result() override { return sum_of(net_->parameters()); }

 private:
  struct Objects {
    torch::nn::Sequential net = draw_net();
    torch::optim::Adam optimizer{net->parameters(), torch::optim::AdamOptions(1e-2)};
  };
  static Objects& objects() {
    static auto* const all = new Objects;
    return *all;
  }
  torch::nn::Sequential net_;
  torch::optim::Adam& optimizer_;
  DistributedDataParallel<torch::nn::Sequential> ddp_;
  DistributedSampler sampler_;
};

TEST(ElasticWrappers, ObjectsThatOutliveTheBodyAreRestored) {
  // Before the first copy of a step, too: no rank trains before the drawn state is copied.
  for (const int64_t kill_after : {1, 2, 8})
    expect_same(
        {.make = [](const Comm& comm, int) { return std::make_unique<OutsideLoop>(comm); }, .kill_after = kill_after});
}

// A frozen weight and a buffer that one step writes, without autograd's notice, and a buffer that all steps write.
class FrozenLoop : public Loop {
 public:
  FrozenLoop(const Comm& comm, int64_t written_in)
      : fsdp_(net_, comm, by_linear()),
        adam_(fsdp_.parameters(), torch::optim::AdamOptions(1e-2)),
        sampler_(40, comm->rank(), comm->size(), {.batch_numel = 2, .seed = 3}),
        written_in_(written_in) {}
  TrainingState state() override { return {fsdp_, adam_, sampler_}; }
  void step() override {
    const auto x = inputs_of(items = sampler_.next());
    adam_.zero_grad();
    torch::mse_loss(fsdp_(x), x.sin() * table_).backward();
    adam_.step();
    steps_.add_(1);
    if (steps_.item<int64_t>() != written_in_) return;
    table_.data().add_(1);
    for (const auto& parameter : fsdp_.parameters())
      if (!parameter.requires_grad()) parameter.data().add_(1);
  }
  std::string result() override { return sum_of_whole(fsdp_, *net_) + sum_of({table_, steps_}); }

 private:
  static torch::nn::Sequential draw() {
    auto net = draw_net();
    net->ptr(0)->as<torch::nn::Linear>()->weight.set_requires_grad(false);
    return net;
  }
  torch::nn::Sequential net_ = draw();
  at::Tensor table_ = net_->ptr(2)->register_buffer("table", torch::ones({8}));
  at::Tensor steps_ = net_->ptr(2)->register_buffer("steps", torch::zeros({1}, at::kLong));
  FullyShardedDataParallel<torch::nn::Sequential> fsdp_;
  torch::optim::Adam adam_;
  DistributedSampler sampler_;
  const int64_t written_in_;
};

TEST(ElasticWrappers, FrozenWeightsAndBuffers) {
  // Rank 0's part has the buffers. The write is before the copy of step 3, or between it and that of step 6.
  for (const int64_t written_in : {2, 5})
    expect_same({.make = [=](const Comm& comm, int) { return std::make_unique<FrozenLoop>(comm, written_in); },
                 .victims = {0}});
}

// Trains the first layer in some steps only, as in gradual unfreezing.
class ThawingLoop : public Loop {
 public:
  ThawingLoop(const Comm& comm, int stage, int64_t thaws_in, int64_t freezes_in)
      : zero_(zero(net_, torch::optim::AdamOptions(1e-2), comm, {.stage = stage, .fsdp = by_linear()})),
        sampler_(40, comm->rank(), comm->size(), {.batch_numel = 2, .seed = 3}),
        thaws_in_(thaws_in),
        freezes_in_(freezes_in) {}
  TrainingState state() override { return {zero_, sampler_}; }
  void step() override {
    const auto now = steps_.item<int64_t>();
    for (auto& parameter : net_->ptr(0)->parameters()) parameter.requires_grad_(now >= thaws_in_ && now < freezes_in_);
    const auto x = inputs_of(items = sampler_.next());
    zero_.zero_grad();
    torch::mse_loss(zero_(x), x.sin()).backward();
    zero_.step();
    steps_.add_(1);
  }
  std::string result() override {
    std::vector<at::Tensor> whole;
    for (const auto& entry : zero_.full_state_dict()) whole.push_back(entry.value());
    return sum_of(whole);
  }

 private:
  torch::nn::Sequential net_ = draw_net();
  at::Tensor steps_ = net_->ptr(2)->register_buffer("steps", torch::zeros({1}, at::kLong));
  Zero<torch::nn::Sequential, torch::optim::Adam> zero_;
  DistributedSampler sampler_;
  const int64_t thaws_in_, freezes_in_;
};

TEST(ElasticWrappers, LayersThatAreFrozenAndUnfrozen) {
  // The copies are of steps 0, 3 and 6. The layer changes between two of them, or has trained in one.
  for (int stage = 0; stage <= 3; ++stage)
    for (const auto& [thaws, freezes] : {std::pair<int64_t, int64_t>{1, 2}, {2, 5}, {4, 6}})
      expect_same(
          {.make = [=](const Comm& comm, int) { return std::make_unique<ThawingLoop>(comm, stage, thaws, freezes); },
           .victims = {stage % 3}});
}

// A scheduler's warning may arrive when the ranks have no group, or just before.
TEST(ElasticWrappers, ASignalToStopOutlivesAChangeOfTheGroup) {
  const TemporaryFolder folder;
  std::vector<pid_t> pids;
  for (int rank = 0; rank < 2; ++rank)
    pids.push_back(run_in_child([&, rank] {
      at::set_num_threads(1);
      set_warning_handler([](const std::string&) {});
      Elastic elastic(c10::make_intrusive<c10d::FileStore>((folder / "store").string(), 2), rank, 2, quick_options());
      int received = 0;
      elastic.run([&](ElasticRun& run) {
        torch::nn::Sequential net(torch::nn::Linear(4, 4));
        FullyShardedDataParallel<torch::nn::Sequential> fsdp(net, run.comm());
        torch::optim::SGD sgd(fsdp.parameters(), 0.1);
        run.restore({fsdp, sgd});
        received = stop_requested(run.comm());
        if (run.generation() > 0) return;
        ::raise(SIGTERM);
        throw CommError("as if a rank were lost");
      });
      if (received != SIGTERM) throw std::runtime_error("the signal is lost");
    }));
  expect_all_end_well(pids);
}

torch::nn::Sequential frozen_model(int64_t rows) {
  torch::nn::Sequential net(torch::nn::Embedding(rows, 8), torch::nn::Linear(8, 8));
  net->ptr(0)->as<torch::nn::Embedding>()->weight.set_requires_grad(false);
  return net;
}

// Most weights are frozen. Returns the bytes of rank 0's copies of two steps.
int64_t copied_bytes_of_frozen_model(int64_t rows, bool shares_memory) {
  const TemporaryFolder folder;
  std::vector<pid_t> pids;
  for (int rank = 0; rank < 2; ++rank)
    pids.push_back(run_in_child([&, rank] {
      at::set_num_threads(1);
      const rlimit little{1 << 20, RLIM_INFINITY};
      if (!shares_memory) ::setrlimit(RLIMIT_FSIZE, &little);
      Elastic elastic(c10::make_intrusive<c10d::FileStore>((folder / "store").string(), 2), rank, 2, quick_options());
      elastic.run([&](ElasticRun& run) {
        FullyShardedDataParallel<torch::nn::Sequential> fsdp(
            frozen_model(rows), run.comm(),
            {.auto_wrap = wrap_modules<torch::nn::EmbeddingImpl, torch::nn::LinearImpl>()});
        torch::optim::Adam adam(fsdp.parameters(), 1e-2);
        run.restore({fsdp, adam});
        while (run.step() < 10) {
          fsdp(torch::arange(4)).sum().backward();
          adam.step();
          run.commit();
        }
        if (rank == 0) std::ofstream(folder / "bytes") << run.copied_bytes();
      });
    }));
  expect_all_end_well(pids);
  return std::stoll(file_bytes(folder / "bytes"));
}

TEST(ElasticWrappers, FrozenWeightsAreCopiedOnce) {
  constexpr int64_t kRows = 1 << 20;
  const RunRecord record = dry_run(
      [&](Comm comm) {
        return zero(
            frozen_model(kRows), torch::optim::AdamOptions(1e-2), comm,
            {.stage = 3, .fsdp = {.auto_wrap = wrap_modules<torch::nn::EmbeddingImpl, torch::nn::LinearImpl>()}});
      },
      [](auto& training) {
        training(torch::arange(4)).sum().backward();
        training.step();
      },
      {.world_size = 2});
  const auto planned = static_cast<double>(copies_bytes(record, {.stage = 3}, 2, 1));
  for (const bool shares_memory : {true, false}) {  // false: as on different hosts
    const int64_t bytes = copied_bytes_of_frozen_model(kRows, shares_memory);
    // This rank's half and its partner's, and a few blocks that change for each of two steps.
    EXPECT_LT(bytes, kRows * 8 * 4 + (int64_t{12} << 20)) << shares_memory;
    EXPECT_GT(bytes, kRows * 8 * 4) << shares_memory;
    if (shares_memory) {
      EXPECT_NEAR(static_cast<double>(bytes) / planned, 1, 0.01);
    }
  }
}

// Trains the planned decoder for three copies. Returns the bytes of each rank's copies.
std::vector<int64_t> measured_copies(int world, const TrainingChoice& choice, const DecoderOptions& decoder,
                                     int copies) {
  const TemporaryFolder folder;
  std::vector<pid_t> pids;
  for (int rank = 0; rank < world; ++rank)
    pids.push_back(run_in_child([&, rank] {
      at::set_num_threads(1);
      ElasticOptions options = quick_options();
      options.copy_every = 1;
      options.copies = copies;
      Elastic elastic(c10::make_intrusive<c10d::FileStore>((folder / "store").string(), world), rank, world, options);
      elastic.run([&](ElasticRun& run) {
        auto training = zero<AdamW>(Decoder(decoder, false), torch::optim::AdamWOptions(1e-3), run.comm(),
                                    zero_options(choice, wrap_modules<DecoderBlockImpl>()));
        run.restore({training, training.optimizer()});
        const auto tokens = torch::arange(decoder.sequence).unsqueeze(0);
        while (run.step() < 3) {
          training.optimizer().zero_grad();
          training(tokens).square().mean().backward();
          training.step();
          run.commit();
        }
        // The last copy has arrived if ten looks of all ranks in turn see no change.
        int64_t bytes = -1;
        for (int unchanged = 0; unchanged < 10; ++unchanged) {
          const int64_t now = run.copied_bytes();
          const at::Tensor changes = torch::full({1}, now == bytes ? 0. : 1.);
          bytes = now;
          run.comm()->all_reduce(changes).wait();
          if (changes.item<float>() > 0) unchanged = -1;
          std::this_thread::sleep_for(milliseconds(50));
        }
        std::ofstream(folder / ("bytes-" + std::to_string(rank))) << bytes;
        run.comm()->barrier();
      });
    }));
  std::vector<int64_t> bytes;
  for (const pid_t pid : pids) {
    int status = 0;
    ::waitpid(pid, &status, 0);
    EXPECT_EQ(status, 0);
    bytes.push_back(std::stoll(file_bytes(folder / ("bytes-" + std::to_string(bytes.size())))));
  }
  return bytes;
}

TEST(ElasticWrappers, CopiesTakeThePlannedMemory) {
  const DecoderOptions decoder = decoder_of("gpt:layers=4,width=128,heads=4,vocab=500,sequence=16");
  const auto model = planned_decoder(decoder);
  for (const int stage : {0, 2, 3})
    for (const int copies : {1, 2}) {
      const TrainingChoice choice{.stage = stage};
      const int world = 3;
      const auto bytes = measured_copies(world, choice, decoder, copies);
      for (int rank = 0; rank < world; ++rank) {
        const auto planned =
            static_cast<double>(copies_bytes(model->run(choice, world, rank).record, choice, world, copies));
        EXPECT_NEAR(static_cast<double>(bytes[static_cast<size_t>(rank)]) / planned, 1, 0.05)
            << "stage " << stage << ", " << copies << " copies, rank " << rank;
      }
    }
}

// Rank 0 leaves the loop early: the run ends instead of regrouping for ever.
TEST(ElasticWrappers, RanksWithDifferentLoopsEndTheRun) {
  const TemporaryFolder folder;
  std::vector<pid_t> pids;
  for (int rank = 0; rank < 2; ++rank)
    pids.push_back(run_in_child([&, rank] {
      at::set_num_threads(1);
      set_warning_handler([](const std::string&) {});
      Elastic elastic(c10::make_intrusive<c10d::FileStore>((folder / "store").string(), 2), rank, 2, quick_options());
      try {
        elastic.run([&](ElasticRun& run) {
          const auto loop = make_adam_loop(run.comm(), 1);
          run.restore(loop->state());
          while (run.step() < (rank == 0 ? 4 : 8)) {
            loop->step();
            run.commit();
          }
        });
      } catch (const CommError& error) {
        std::ofstream(folder / ("error-" + std::to_string(rank))) << error.what();
      }
    }));
  for (int rank = 0; rank < 2; ++rank) {
    int status = 0;
    ::waitpid(pids[static_cast<size_t>(rank)], &status, 0);
    EXPECT_EQ(status, 0);
    const std::string error = file_bytes(folder / ("error-" + std::to_string(rank)));
    EXPECT_NE(error.find("ranks failed 3 times after step"), std::string::npos) << error;
  }
}

TEST(ElasticWrappers, ASamplerOfAnotherWorldIsRefused) {
  const TemporaryFolder folder;
  Elastic elastic(c10::make_intrusive<c10d::FileStore>((folder / "store").string(), 1), 0, 1, quick_options());
  elastic.run([&](ElasticRun& run) {
    const auto net = draw_net();
    DistributedDataParallel<torch::nn::Sequential> ddp(net, run.comm());
    DistributedSampler sampler(40, 1, 2);
    EXPECT_THROW(run.restore({ddp, sampler}), std::invalid_argument);
  });
}

}  // namespace
}  // namespace tessera::wrappers_test
