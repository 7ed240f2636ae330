// The optimizer's step unit by unit in backward: bit-equal to a step after it.
#include <sched.h>

#include <condition_variable>
#include <limits>
#include <mutex>
#include <set>
#include <thread>

#include "core/model/shard_norm.h"
#include "core/runtime/parallel_over.h"
#include "optim/state/optimizer_state.h"
#include "tests/support/matrix.h"
#include "tests/support/random_net.h"
#include "tests/support/reference.h"
#include "tests/support/temporary_folder.h"

namespace tessera::step_in_backward_test {
using namespace internal;
namespace {

using namespace testing_support;

at::Tensor batch(int seed) {
  return seeded(1000 + seed, [] { return torch::randn({4, kWidth}); });
}

struct Setting {
  std::optional<double> max_norm;
  bool accumulate = false;
  CpuOffload offload;
};

torch::OrderedDict<std::string, at::Tensor> train(std::shared_ptr<Communicator> comm, int tree, bool in_backward,
                                                  const Setting& setting) {
  auto model = seeded(7, [&] { return RandomNet(tree); });
  FullyShardedDataParallel fsdp(model, comm, {.auto_wrap = wrap_by_size(40), .offload = setting.offload});
  HostAdamW optimizer(fsdp.parameters(), torch::optim::AdamWOptions(1e-2));
  std::optional<StepInBackward> step;
  if (in_backward) step.emplace(fsdp, optimizer, StepInBackwardOptions{.max_norm = setting.max_norm});
  for (int i = 0; i < 6; ++i) {
    optimizer.zero_grad();
    auto backward = [&](int part) {
      at::Tensor loss = torch::mse_loss(fsdp(batch(100 * i + 10 * part + comm->rank())), batch(7 * i + part));
      if (loss.requires_grad()) loss.backward();
    };
    if (setting.accumulate) {
      auto guard = fsdp.no_sync();
      backward(1);
    }
    backward(0);
    if (in_backward) {
      const auto norm = step->finish();
      EXPECT_EQ(norm.has_value(), setting.max_norm.has_value());
    } else {
      if (setting.max_norm) fsdp.clip_grad_norm_(*setting.max_norm);
      optimizer.step();
    }
  }
  return fsdp.full_state_dict();
}

TEST(StepInBackward, IsTheStepAfterBackwardBitForBit) {
  for (const int world : fewer_on_devices<std::vector<int>>({1, 2, 3}, {2})) {
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      for (int kind = 0; kind < fewer_on_devices(6, 3); ++kind) {
        const Setting setting{kind % 3 == 1 ? std::optional(0.1) : std::nullopt, kind % 3 == 2,
                              kind % 2 == 0 || comm->device().is_cuda()
                                  ? CpuOffload{.params = true, .grads = true, .device_fraction = 0.5 * (kind % 4 / 2)}
                                  : CpuOffload{}};
        const auto expected = train(comm, 500 + kind, false, setting), own = train(comm, 500 + kind, true, setting);
        for (const auto& entry : expected)
          EXPECT_TRUE(same_values(entry.value(), own[entry.key()])) << kind << " " << entry.key();
      }
    });
  }
}

// Three layers, each a unit. A pass skips one of them, or none.
struct LayersByTurnsImpl : torch::nn::Module {
  LayersByTurnsImpl() {
    for (int i = 0; i < 3; ++i) layers->push_back(torch::nn::Linear(kWidth, kWidth));
    register_module("layers", layers);
  }
  at::Tensor forward(at::Tensor x) {
    for (int i = 0; i < 3; ++i)
      if (i != left_out) x = layers[i]->as<torch::nn::Linear>()->forward(x);
    return x;
  }
  torch::nn::Sequential layers;
  int left_out = -1;
};
TORCH_MODULE(LayersByTurns);

enum class Clearing { kZeros, kNone };

// A skipped layer has an older gradient: zeros, or that of another step.
std::vector<at::Tensor> train_by_turns(std::shared_ptr<Communicator> comm, Clearing clearing,
                                       const std::optional<StepInBackwardOptions>& in_backward,
                                       std::optional<double> max_norm) {
  auto model = seeded(7, [] { return LayersByTurns(); });
  FullyShardedDataParallel fsdp(model, comm, {.auto_wrap = wrap_modules<torch::nn::LinearImpl>()});
  HostAdamW optimizer(fsdp.parameters(), torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
  std::optional<StepInBackward> step;
  if (in_backward) step.emplace(fsdp, optimizer, *in_backward);
  for (int i = 0; i < 6; ++i) {
    if (clearing == Clearing::kZeros) optimizer.zero_grad(false);
    model->left_out = i == 0 ? -1 : i % 3;
    if (i == 3) {  // two micro-batches; the second skips fewer layers
      auto accumulating = fsdp.no_sync();
      torch::mse_loss(fsdp(batch(50 + comm->rank())), batch(6)).backward();
      if (in_backward && !max_norm) step->finish();  // no gradient was reduced: a no-op
      model->left_out = 1;
    }
    torch::mse_loss(fsdp(batch(10 * i + comm->rank())), batch(7 * i)).backward();
    if (step) {
      step->finish();
    } else {
      if (max_norm) fsdp.clip_grad_norm_(*max_norm);
      optimizer.step();
    }
  }
  std::vector<at::Tensor> parameters;
  for (const at::Tensor& parameter : fsdp.parameters()) parameters.push_back(parameter.detach().clone());
  return parameters;
}

TEST(StepInBackward, StepsWhatHasAGradientOfBefore) {
  for (const int world : {1, 2, 3})
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      for (const Clearing clearing : {Clearing::kZeros, Clearing::kNone})
        for (const std::optional<double> max_norm : {std::optional<double>(), std::optional(0.1), std::optional(1e6)}) {
          const auto expected = train_by_turns(comm, clearing, std::nullopt, max_norm);
          for (const bool speculative : {false, true}) {
            if (speculative && !max_norm) continue;
            const StepInBackwardOptions options{.max_norm = max_norm, .speculative = speculative};
            const auto own = train_by_turns(comm, clearing, options, max_norm);
            for (size_t i = 0; i < expected.size(); ++i)
              EXPECT_TRUE(same_values(own[i], expected[i]))
                  << world << " ranks, " << static_cast<int>(clearing) << " " << max_norm.value_or(0) << speculative
                  << " parameter " << i;
          }
        }
    });
}

// An optimizer that records its steps, and can block backward until it has stepped.
struct Observed : PartialStep {
  explicit Observed(PartialStep& inner) : optimizer(inner) {}
  void step_parameters(const std::vector<at::Tensor>& parameters) override {
    optimizer.step_parameters(parameters);
    std::lock_guard lock(mutex);
    ++steps;
    changed.notify_all();
  }
  std::unique_ptr<RevocableSteps> revocable_steps() override;
  bool wait_for_a_step() {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, std::chrono::seconds(60), [&] { return steps > 0; });
  }
  PartialStep& optimizer;
  std::mutex mutex;
  std::condition_variable changed;
  int steps = 0;
};

struct ObservedSteps : PartialStep::RevocableSteps {
  explicit ObservedSteps(Observed& of) : observed(of), inner(of.optimizer.revocable_steps()) {}
  void step(const std::vector<at::Tensor>& parameters) override {
    inner->step(parameters);
    std::lock_guard lock(observed.mutex);
    ++observed.steps;
    observed.changed.notify_all();
  }
  void roll_back() override { inner->roll_back(); }
  void keep() override { inner->keep(); }
  Observed& observed;
  std::unique_ptr<PartialStep::RevocableSteps> inner;
};
std::unique_ptr<PartialStep::RevocableSteps> Observed::revocable_steps() {
  return std::make_unique<ObservedSteps>(*this);
}

struct CallInBackward : torch::autograd::Function<CallInBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, int64_t call) {
    context->saved_data["call"] = call;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    (*reinterpret_cast<std::function<void()>*>(context->saved_data["call"].toInt()))();
    return {gradients[0], at::Tensor()};
  }
};

// Backward of the first layers waits for a step of the last: a deadlock if steps waited for backward.
TEST(StepInBackward, StepsWhileBackwardGoesOn) {
  run_ranks(1, [](std::shared_ptr<Communicator> comm) {
    torch::nn::Sequential model;
    for (int i = 0; i < 8; ++i) model->push_back(torch::nn::Linear(8, 8));
    FullyShardedDataParallel fsdp(
        model, comm, {.auto_wrap = wrap_modules<torch::nn::LinearImpl>(), .offload = {.params = true, .grads = true}});
    HostAdam optimizer(fsdp.parameters(), torch::optim::AdamOptions(1e-2));
    Observed observed(optimizer);
    StepInBackward step(fsdp, observed);
    std::function<void()> wait = [&] { EXPECT_TRUE(observed.wait_for_a_step()); };
    at::Tensor x = torch::ones({2, 8});
    for (int i = 0; i < 8; ++i) {
      x = model[i]->as<torch::nn::Linear>()->forward(x);
      if (i == 0) x = CallInBackward::apply(x, reinterpret_cast<int64_t>(&wait));
    }
    x.sum().backward();
    step.finish();
    EXPECT_EQ(observed.steps, 8);
  });
}

// Its steps wait for open().
struct Gated : Observed {
  using Observed::Observed;
  void step_parameters(const std::vector<at::Tensor>& parameters) override {
    {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return is_open; });
    }
    Observed::step_parameters(parameters);
  }
  void open() {
    std::lock_guard lock(mutex);
    is_open = true;
    changed.notify_all();
  }
  bool is_open = false;
};

TEST(StepInBackward, SuggestsThePartThatFinishWaitedFor) {
  run_ranks(1, [](std::shared_ptr<Communicator> comm) {
    for (const double fraction : {0.0, 0.5}) {
      torch::nn::Sequential model;
      for (int i = 0; i < 4; ++i) model->push_back(torch::nn::Linear(8, 8));
      FullyShardedDataParallel fsdp(model, comm,
                                    {.auto_wrap = wrap_modules<torch::nn::LinearImpl>(),
                                     .offload = {.params = true, .grads = true, .device_fraction = fraction}});
      HostAdam optimizer(fsdp.parameters(), torch::optim::AdamOptions(1e-2));
      const at::Tensor x = on_rank_device(torch::ones({2, 8}));
      {
        Gated gated(optimizer);
        StepInBackward step(fsdp, gated);
        EXPECT_EQ(step.suggested_device_fraction(), 0);
        fsdp(x).sum().backward();
        std::thread opens([&] {
          std::this_thread::sleep_for(std::chrono::milliseconds(20));  // finish() has usually begun
          gated.open();
        });
        step.finish();
        opens.join();
        EXPECT_GT(step.suggested_device_fraction(), comm->device().is_cpu() ? 0 : fraction);
        EXPECT_LE(step.suggested_device_fraction(), 1);
      }
      StepInBackward after_norm(fsdp, optimizer, {.max_norm = 1.0});
      optimizer.zero_grad();
      fsdp(x).sum().backward();
      after_norm.finish();
      EXPECT_EQ(after_norm.suggested_device_fraction(), 1);
    }
  });
}

TEST(StepInBackward, MistakesAreNamed) {
  run_ranks(1, [](std::shared_ptr<Communicator> comm) {
    torch::nn::Linear shared(8, 8);
    FullyShardedDataParallel fsdp(shared, comm);
    HostAdam optimizer(fsdp.parameters(), torch::optim::AdamOptions(1e-2));
    auto twice = [&] {
      at::Tensor x = torch::ones({2, 8}).set_requires_grad(true);
      x = checkpointed(shared, checkpointed(shared, x));  // gradients in two parts
      x.sum().backward();
    };
    {
      StepInBackward step(fsdp, optimizer);
      expect_contains(error_of<std::logic_error>([&] { StepInBackward second(fsdp, optimizer); }), "already");
      expect_contains(error_of<std::logic_error>(twice), "several parts");
      step.finish();
    }
    fsdp.zero_grad();
    twice();  // without it, it works
    FullyShardedDataParallel checked(torch::nn::Linear(2, 2), comm, {.check_finite = true});
    expect_contains(error_of<std::invalid_argument>([&] { StepInBackward step(checked, optimizer); }), "check_finite");
  });
}

struct OwnHostAdam : HostAdam {
  using HostAdam::HostAdam;
  at::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) override { return HostAdam::step(closure); }
};

TEST(StepInBackward, AnOptimizerWithAStepOfItsOwnIsRefused) {
  run_ranks(1, [](std::shared_ptr<Communicator> comm) {
    FullyShardedDataParallel fsdp(torch::nn::Linear(2, 2), comm, {.offload = {.params = true, .grads = true}});
    OwnHostAdam optimizer(fsdp.parameters(), torch::optim::AdamOptions(1e-2));
    expect_contains(error_of<std::invalid_argument>([&] { StepInBackward step(fsdp, optimizer); }), "OwnHostAdam");
  });
}

// Records the processors of a step's thread and of the threads that share its work.
struct Placed : PartialStep {
  void step_parameters(const std::vector<at::Tensor>&) override {
    threads = at::get_num_threads();
    parallel_over(0, 64, 1, [&](int64_t, int64_t) {
      cpu_set_t set;
      sched_getaffinity(0, sizeof(set), &set);
      std::lock_guard lock(mutex);
      for (int i = 0; i < CPU_SETSIZE; ++i)
        if (CPU_ISSET(i, &set)) processors.insert(i);
    });
  }
  std::mutex mutex;
  std::set<int> processors;
  int threads = 0;
};

TEST(StepInBackward, RunsOnTheProcessorsThatItIsGiven) {
  cpu_set_t usable;
  ASSERT_EQ(sched_getaffinity(0, sizeof(usable), &usable), 0);
  int last = -1, count = 0;
  for (int i = 0; i < CPU_SETSIZE; ++i)
    if (CPU_ISSET(i, &usable)) last = i, ++count;
  run_ranks(1, [&](std::shared_ptr<Communicator> comm) {
    at::set_num_threads(2);
    FullyShardedDataParallel fsdp(torch::nn::Linear(8, 8), comm, {.offload = {.params = true, .grads = true}});
    auto placed_by = [&](const std::vector<int>& processors) {
      Placed optimizer;
      StepInBackward step(fsdp, optimizer, {.processors = processors});
      fsdp(torch::ones({2, 8})).sum().backward();
      step.finish();
      fsdp.zero_grad();
      EXPECT_EQ(optimizer.threads, processors.empty() ? 2 : 1);
      return optimizer.processors;
    };
    EXPECT_EQ(placed_by({last}), std::set<int>{last});
    EXPECT_EQ(static_cast<int>(placed_by({}).size()), count);  // the caller's thread has not moved
    Placed optimizer;
    for (const int none : {-1, last + 1})
      expect_contains(
          error_of<std::invalid_argument>([&] { StepInBackward step(fsdp, optimizer, {.processors = {none}}); }),
          c10::str("processors has ", none, ", expected some of those"));
  });
}

// at::set_num_threads() on the step's thread would change the number of all later threads.
TEST(StepInBackward, LeavesTheThreadsOfLaterThreads) {
  const int before = at::get_num_threads();
  at::set_num_threads(3);
  run_ranks(1, [](std::shared_ptr<Communicator> comm) {
    FullyShardedDataParallel fsdp(torch::nn::Linear(8, 8), comm, {.offload = {.params = true, .grads = true}});
    Placed optimizer;
    const StepInBackward step(fsdp, optimizer, {.processors = {sched_getcpu()}});
    int of_later_thread = 0;
    std::thread([&] { of_later_thread = at::get_num_threads(); }).join();
    EXPECT_EQ(of_later_thread, 3);
  });
  at::set_num_threads(before);
}

struct Failing : PartialStep {
  void step_parameters(const std::vector<at::Tensor>&) override { throw std::runtime_error("no step today"); }
};

TEST(StepInBackward, AFailedStepReachesFinish) {
  run_ranks(1, [](std::shared_ptr<Communicator> comm) {
    FullyShardedDataParallel fsdp(torch::nn::Linear(8, 8), comm, {.offload = {.params = true, .grads = true}});
    Failing optimizer;
    StepInBackward step(fsdp, optimizer);
    fsdp(torch::ones({2, 8})).sum().backward();
    EXPECT_EQ(error_of<std::runtime_error>([&] { step.finish(); }), "no step today");
    step.finish();
  });
}

// One rank has taken all steps when backward ends; another takes them later, at random.
TEST(StepInBackward, StepsEndOnOneRankSoonerThanOnOthers) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    auto model = seeded(7, [&] { return RandomNet(503); });
    FullyShardedDataParallel fsdp(model, comm, {.auto_wrap = wrap_by_size(40)});
    HostAdamW optimizer(fsdp.parameters(), torch::optim::AdamWOptions(1e-2));
    std::vector<at::Tensor> later;
    const ScopeExit scope = fsdp.on_gradients([&](const std::vector<at::Tensor>& parameters) {
      if (comm->rank() == 0) return optimizer.step_parameters(parameters);
      later.insert(later.end(), parameters.begin(), parameters.end());
    });
    for (int i = 0; i < 3; ++i) {
      fsdp.zero_grad();
      torch::mse_loss(fsdp(batch(i)), batch(7 * i)).backward();
      optimizer.step_parameters(std::exchange(later, {}));
    }
  });
}

// ---- speculation ---------------------------------------------------------------------------------

constexpr double kMaxNorm = 0.5;
constexpr int kSteps = 12;
enum class Norms { kNever, kAlways, kAlternately, kNan, kInfinite };

// Returns the factor of a step's loss, for a norm that clips or not.
double loss_factor(Norms norms, int step) {
  const bool clips = norms == Norms::kAlways || (norms == Norms::kAlternately && step % 2 == 0);
  if (norms == Norms::kNan && step == kSteps - 2) return std::numeric_limits<double>::quiet_NaN();
  if (norms == Norms::kInfinite && step == kSteps - 2) return 1e30;  // its square overflows fp32
  return clips ? 100 : 1e-4;
}

std::string bits_of(const at::Tensor& tensor) {
  const at::Tensor own = tensor.detach().contiguous().cpu().clone();  // reads from disk, too
  return {static_cast<const char*>(own.const_data_ptr()), own.nbytes()};
}

// Returns the bits of parameters and state, including NaN; "" for a parameter without a state.
std::vector<std::string> bits_of(const FullyShardedModule& fsdp, torch::optim::Optimizer& optimizer) {
  std::vector<std::string> all;
  for (const at::Tensor& parameter : fsdp.parameters()) {
    all.push_back(bits_of(parameter));
    const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
    if (found == optimizer.state().end()) {
      all.emplace_back();
      continue;
    }
    const ParameterState state = read_state(*found->second);
    for (const auto& [name, number] : state.numbers) all.push_back(name + " " + std::to_string(number));
    for (const auto& [name, tensor] : state.tensors) all.push_back(name + " " + bits_of(tensor));
  }
  return all;
}

enum class Tier { kDevice, kPartlyHost, kHost, kHostBfloat16, kHostDouble, kDisk, kDiskBfloat16, kCopiesOfTwo };

FsdpOptions options_for(Tier tier, const std::string& folder) {
  FsdpOptions options{.auto_wrap = wrap_by_size(40)};
  if (tier == Tier::kCopiesOfTwo) options.hybrid.ranks_per_copy = 2;
  if (tier != Tier::kDevice) options.offload = {.params = true, .grads = true};
  if (tier == Tier::kPartlyHost) options.offload.device_fraction = 0.5;
  if (tier == Tier::kHostBfloat16 || tier == Tier::kDiskBfloat16)
    options.mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  if (tier == Tier::kDisk || tier == Tier::kDiskBfloat16) {
    options.offload.directory = folder;
    options.offload.disk_buffer_bytes = 24 * 8192;
  }
  return options;
}

struct Trained {
  std::vector<std::vector<std::string>> after;  // each step
  int64_t times_taken_back = 0;
};

template <class Optimizer, class Options>
Trained train_clipped(std::shared_ptr<Communicator> comm, Tier tier, Norms norms, const Options& options,
                      bool speculative) {
  const TemporaryFolder folder;
  const at::ScalarType dtype = tier == Tier::kHostDouble ? at::kDouble : at::kFloat;
  auto linear = [&] { return torch::nn::Linear(kWidth, kWidth); };
  torch::nn::Sequential linears = seeded(7, [&] { return torch::nn::Sequential(linear(), linear(), linear()); });
  torch::nn::Sequential model =
      tier <= Tier::kHost ? torch::nn::Sequential(seeded(7, [] { return RandomNet(503); })) : linears;
  model->to(dtype);
  FullyShardedDataParallel fsdp(model, comm, options_for(tier, folder.path()));
  Optimizer optimizer(fsdp.parameters(), options);
  StepInBackward step(fsdp, optimizer, {.max_norm = kMaxNorm, .speculative = speculative});
  Trained trained;
  for (int i = 0; i < kSteps; ++i) {
    optimizer.zero_grad();
    if (i % 3 == 1) {  // a step of two micro-batches
      auto accumulating = fsdp.no_sync();
      const at::Tensor out = fsdp(batch(100 * i + 50 + comm->rank()).to(dtype)).to(dtype);
      (torch::mse_loss(out, batch(7 * i + 1).to(dtype)) * loss_factor(norms, i)).backward();
    }
    const at::Tensor out = fsdp(batch(100 * i + comm->rank()).to(dtype)).to(dtype);
    (torch::mse_loss(out, batch(7 * i).to(dtype)) * loss_factor(norms, i)).backward();
    const double norm = *step.finish();
    if (norms <= Norms::kAlternately) {
      EXPECT_EQ(norm > kMaxNorm, loss_factor(norms, i) == 100) << norm;
    }
    trained.after.push_back(bits_of(fsdp, optimizer));
  }
  trained.times_taken_back = step.times_taken_back();
  return trained;
}

template <class Optimizer, class Options>
void compare(std::shared_ptr<Communicator> comm, Tier tier, Norms norms, const Options& options) {
  SCOPED_TRACE(
      c10::str("tier ", static_cast<int>(tier), ", norms ", static_cast<int>(norms), ", ", comm->size(), " ranks"));
  const Trained waiting = train_clipped<Optimizer>(comm, tier, norms, options, false),
                speculative = train_clipped<Optimizer>(comm, tier, norms, options, true);
  for (int i = 0; i < kSteps; ++i) EXPECT_EQ(waiting.after[i], speculative.after[i]) << "after step " << i;
  const int64_t expected = norms == Norms::kNever         ? 0
                           : norms == Norms::kAlways      ? kSteps
                           : norms == Norms::kAlternately ? kSteps / 2
                                                          : -1;
  if (expected >= 0) {
    EXPECT_EQ(speculative.times_taken_back, expected);
  } else {
    EXPECT_GT(speculative.times_taken_back, 0);
  }
}

TEST(Speculation, IsWaitingBitForBit) {
  const auto adamw = torch::optim::AdamWOptions(1e-2).weight_decay(0.1);
  for (const int world : fewer_on_devices<std::vector<int>>({1, 2, 3}, {2})) {
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      int turn = comm->size();
      for (const Tier tier : {Tier::kDevice, Tier::kPartlyHost, Tier::kHost, Tier::kHostBfloat16, Tier::kHostDouble,
                              Tier::kDisk, Tier::kDiskBfloat16}) {
        for (const Norms norms : {Norms::kNever, Norms::kAlways, Norms::kAlternately, Norms::kNan, Norms::kInfinite}) {
          const int kind = turn++ % 3;
          if (turn % fewer_on_devices(2, 4) != 1 && !has_full_matrix()) continue;
          if (kind == 0) {
            compare<HostAdamW>(comm, tier, norms, adamw);
          } else if (kind == 1) {
            compare<HostAdamW>(comm, tier, norms, torch::optim::AdamWOptions(adamw).amsgrad(true));
          } else {
            compare<HostAdam>(comm, tier, norms, torch::optim::AdamOptions(1e-2).weight_decay(0.01));
          }
        }
      }
    });
  }
}

TEST(Speculation, IsWaitingOverCopiesOfAModel) {
  on_ranks(4, [](std::shared_ptr<Communicator> comm) {
    compare<HostAdamW>(comm, Tier::kCopiesOfTwo, Norms::kAlternately, torch::optim::AdamWOptions(1e-2));
    compare<HostAdamW>(comm, Tier::kCopiesOfTwo, Norms::kNan, torch::optim::AdamWOptions(1e-2).amsgrad(true));
  });
}

TEST(Speculation, KnowsWhichNormsClip) {
  run_ranks(1, [](std::shared_ptr<Communicator> comm) {
    for (const double norm :
         {0.0, 0.5, 1 - 2e-6, 1 - 1e-6, std::nextafter(1 - 1e-6, 0.0), std::nextafter(1 - 1e-6, 2.0), 1 - 5e-7, 1.0,
          1 + 1e-9, 3.0, std::numeric_limits<double>::infinity()}) {
      const at::Tensor gradient = torch::full({1}, norm, at::kDouble);
      const at::Tensor before = gradient.clone();
      clip_shards_by_norm({gradient}, 1.0, 2.0, false, *comm);
      EXPECT_EQ(clips_gradients(norm, 1.0), !torch::equal(gradient, before)) << norm;
    }
    EXPECT_TRUE(clips_gradients(std::numeric_limits<double>::quiet_NaN(), 1.0));
  });
}

// Eight layers. The first one runs a callback in backward, after the gradients of the others have arrived.
struct Layers {
  explicit Layers(std::shared_ptr<Communicator> comm) : fsdp(make(), comm, options()) {}
  static torch::nn::Sequential make() {
    return seeded(3, [] {
      torch::nn::Sequential model;
      for (int i = 0; i < 8; ++i) model->push_back(torch::nn::Linear(kWidth, kWidth));
      return model;
    });
  }
  static FsdpOptions options() {
    return {.auto_wrap = wrap_modules<torch::nn::LinearImpl>(), .offload = {.params = true, .grads = true}};
  }
  at::Tensor loss(std::function<void()>& in_backward) const {
    torch::nn::Sequential model = fsdp.module();
    at::Tensor x = on_rank_device(torch::ones({2, kWidth}));
    for (int i = 0; i < 8; ++i) {
      x = model[i]->as<torch::nn::Linear>()->forward(x);
      if (i == 0) x = CallInBackward::apply(x, reinterpret_cast<int64_t>(&in_backward));
    }
    return x.square().sum();
  }
  FullyShardedDataParallel<torch::nn::Sequential> fsdp;
};

constexpr StepInBackwardOptions kSpeculative{.max_norm = 1e6, .speculative = true};

TEST(Speculation, StepsWhileBackwardGoesOn) {
  run_ranks(1, [](std::shared_ptr<Communicator> comm) {
    Layers layers(comm);
    HostAdam optimizer(layers.fsdp.parameters(), torch::optim::AdamOptions(1e-2));
    Observed observed(optimizer);
    StepInBackward step(layers.fsdp, observed, kSpeculative);
    std::function<void()> wait = [&] { EXPECT_TRUE(observed.wait_for_a_step()); };
    layers.loss(wait).backward();
    step.finish();
    EXPECT_EQ(observed.steps, 8);  // none after backward
    EXPECT_EQ(step.times_taken_back(), 0);
  });
}

// An optimizer of a program's own, which steps what it gets as often as it gets it.
struct Literal : PartialStep {
  explicit Literal(HostAdamW& of) : optimizer(of) {}
  void step_parameters(const std::vector<at::Tensor>& parameters) override {
    for (const at::Tensor& parameter : parameters) optimizer.step_parameters({parameter});
  }
  HostAdamW& optimizer;
};

// With max_norm, finish() takes all steps: of each parameter one, and none of a backward that failed.
TEST(StepInBackward, StepsOnceAfterBackwardsThatFailOrRepeat) {
  for (const int world : {1, 2}) {
    on_ranks(world, [](std::shared_ptr<Communicator> comm) {
      Layers layers(comm), undisturbed(comm);
      const torch::optim::AdamWOptions options(1e-2);
      HostAdamW optimizer(layers.fsdp.parameters(), options), expected(undisturbed.fsdp.parameters(), options);
      Literal literal(optimizer);
      StepInBackward step(layers.fsdp, literal, {.max_norm = 1e6});
      std::function<void()> nothing = [] {}, fail = [] { throw std::runtime_error("no backward today"); };
      for (const int backwards : {1, 2, 1}) {
        optimizer.zero_grad();
        EXPECT_EQ(error_of<std::runtime_error>([&] { layers.loss(fail).backward(); }), "no backward today");
        layers.fsdp.zero_grad();
        expected.zero_grad();
        for (int i = 0; i < backwards; ++i) {
          layers.loss(nothing).backward();
          undisturbed.loss(nothing).backward();
        }
        step.finish();
        undisturbed.fsdp.clip_grad_norm_(1e6);
        expected.step();
        EXPECT_EQ(bits_of(layers.fsdp, optimizer), bits_of(undisturbed.fsdp, expected)) << backwards;
      }
    });
  }
}

// Whichever way it fails, with or without states: everything is as before, and training continues.
TEST(Speculation, ABackwardThatFailsLeavesEverythingAsItWas) {
  for (const int world : {1, 2}) {
    on_ranks(world, [](std::shared_ptr<Communicator> comm) {
      Layers layers(comm), undisturbed(comm);
      const torch::optim::AdamWOptions options(1e-2);
      HostAdamW optimizer(layers.fsdp.parameters(), options), expected(undisturbed.fsdp.parameters(), options);
      Observed observed(optimizer);
      StepInBackward step(layers.fsdp, observed, kSpeculative);
      StepInBackward other(undisturbed.fsdp, expected, {.max_norm = 1e6});
      std::function<void()> nothing = [] {};
      std::function<void()> fail = [&] {
        EXPECT_TRUE(observed.wait_for_a_step());
        throw std::runtime_error("no backward today");
      };
      for (int i = 0; i < 3; ++i) {
        optimizer.zero_grad();
        observed.steps = 0;
        const auto before = bits_of(layers.fsdp, optimizer);
        EXPECT_EQ(error_of<std::runtime_error>([&] { layers.loss(fail).backward(); }), "no backward today");
        EXPECT_EQ(bits_of(layers.fsdp, optimizer), before);
        optimizer.zero_grad();
        layers.loss(nothing).backward();
        step.finish();
        expected.zero_grad();
        undisturbed.loss(nothing).backward();
        other.finish();
        EXPECT_EQ(bits_of(layers.fsdp, optimizer), bits_of(undisturbed.fsdp, expected));
        EXPECT_NE(bits_of(layers.fsdp, optimizer), before);
      }
    });
  }
}

// A program catches the error, validates, and repeats the batch. The lost gradient is named, and nothing changes until
// the wrapper clears gradients.
TEST(Speculation, AFailedBackwardIsCaughtValidatedAndTriedAgain) {
  for (const int world : {1, 2, 3}) {
    on_ranks(world, [](std::shared_ptr<Communicator> comm) {
      Layers layers(comm), undisturbed(comm);
      const torch::optim::AdamWOptions options(1e-2);
      HostAdamW optimizer(layers.fsdp.parameters(), options), expected(undisturbed.fsdp.parameters(), options);
      Observed observed(optimizer);
      StepInBackward step(layers.fsdp, observed, kSpeculative);
      std::function<void()> nothing = [] {};
      std::function<void()> fail = [&] {
        EXPECT_TRUE(observed.wait_for_a_step());
        throw std::runtime_error("no backward today");
      };
      for (int i = 0; i < 3; ++i) {
        optimizer.zero_grad();
        observed.steps = 0;
        try {
          layers.loss(fail).backward();
          ADD_FAILURE() << "it did not fail";
        } catch (const std::runtime_error&) {
        }
        const auto validated = [&](Layers& of) {
          const torch::NoGradGuard no_grad;
          return of.loss(nothing).item<double>();
        };
        EXPECT_EQ(validated(layers), validated(undisturbed));
        const auto before = bits_of(layers.fsdp, optimizer);
        expect_contains(error_of<std::logic_error>([&] {
                          layers.loss(nothing).backward();
                          step.finish();
                        }),
                        "a backward pass that failed has lost it: call zero_grad()");
        EXPECT_EQ(bits_of(layers.fsdp, optimizer), before);
        layers.fsdp.zero_grad();
        layers.loss(nothing).backward();
        step.finish();
        expected.zero_grad();
        undisturbed.loss(nothing).backward();
        undisturbed.fsdp.clip_grad_norm_(1e6);
        expected.step();
        EXPECT_EQ(bits_of(layers.fsdp, optimizer), bits_of(undisturbed.fsdp, expected));
      }
    });
  }
}

TEST(Speculation, ValuesThatMayBeTakenBackAreRefused) {
  run_ranks(1, [](std::shared_ptr<Communicator> comm) {
    Layers layers(comm);
    HostAdamW optimizer(layers.fsdp.parameters(), torch::optim::AdamWOptions(1e-2));
    std::function<void()> nothing = [] {};
    const auto before = bits_of(layers.fsdp, optimizer);
    {
      StepInBackward step(layers.fsdp, optimizer, kSpeculative);
      layers.loss(nothing).backward();
      auto refused = [&](const char* what, auto call) {
        const std::string error = error_of<std::logic_error>(call);
        expect_contains(error, what);
        expect_contains(error, "StepInBackward::finish()");
      };
      refused("forward() on rank 0", [&] { layers.fsdp(torch::ones({2, kWidth})); });
      refused("summon_full_params", [&] { const ScopeExit scope = layers.fsdp.summon_full_params(); });
      refused("full_state_dict", [&] { layers.fsdp.full_state_dict(); });
    }
    EXPECT_EQ(bits_of(layers.fsdp, optimizer), before);  // without finish() nothing is stepped
    layers.fsdp(torch::ones({2, kWidth}));
  });
}

TEST(StepInBackward, AForwardBeforeFinishIsRefused) {
  run_ranks(2, [](std::shared_ptr<Communicator> comm) {
    Layers layers(comm);
    HostAdamW optimizer(layers.fsdp.parameters(), torch::optim::AdamWOptions(1e-2));
    std::function<void()> nothing = [] {};
    StepInBackward step(layers.fsdp, optimizer);
    layers.loss(nothing).backward();
    expect_contains(error_of<std::logic_error>([&] { layers.loss(nothing); }), "StepInBackward::finish()");
    step.finish();
    layers.loss(nothing).backward();
    step.finish();
  });
}

// Fails after a step, or at the rollback.
struct Unreliable : PartialStep {
  explicit Unreliable(HostAdamW& inner) : optimizer(inner) {}
  void step_parameters(const std::vector<at::Tensor>& parameters) override { optimizer.step_parameters(parameters); }
  std::unique_ptr<RevocableSteps> revocable_steps() override {
    struct Steps : RevocableSteps {
      Steps(Unreliable& of) : own(of), inner(of.optimizer.revocable_steps()) {}
      void step(const std::vector<at::Tensor>& parameters) override {
        inner->step(parameters);
        if (own.fails_step) throw std::runtime_error("no step today");
        if (own.fails_again && parameters.size() > 2) throw std::runtime_error("no second step");  // of all at once
      }
      void roll_back() override {
        if (std::exchange(own.fails_rollback, false)) throw std::runtime_error("no way back");
        inner->roll_back();
      }
      void keep() override { inner->keep(); }
      Unreliable& own;
      std::unique_ptr<PartialStep::RevocableSteps> inner;
    };
    return std::make_unique<Steps>(*this);
  }
  HostAdamW& optimizer;
  bool fails_step = false, fails_again = false, fails_rollback = false;
};

TEST(Speculation, AFinishThatThrowsLeavesEverythingAsItWas) {
  run_ranks(1, [](std::shared_ptr<Communicator> comm) {
    Layers layers(comm);
    HostAdamW optimizer(layers.fsdp.parameters(), torch::optim::AdamWOptions(1e-2));
    Unreliable unreliable(optimizer);
    StepInBackward step(layers.fsdp, unreliable, {.max_norm = 1e-3, .speculative = true});
    std::function<void()> nothing = [] {};
    auto finish = [&] {
      optimizer.zero_grad();
      layers.loss(nothing).backward();
      step.finish();
    };
    finish();
    const auto before = bits_of(layers.fsdp, optimizer);
    unreliable.fails_step = true;
    EXPECT_EQ(error_of<std::runtime_error>(finish), "no step today");
    EXPECT_EQ(bits_of(layers.fsdp, optimizer), before);
    unreliable.fails_step = false;
    unreliable.fails_again = true;
    EXPECT_EQ(error_of<std::runtime_error>(finish), "no second step");
    EXPECT_EQ(bits_of(layers.fsdp, optimizer), before);
    unreliable.fails_again = false;
    unreliable.fails_rollback = unreliable.fails_step = true;  // the rollback after the failed step
    EXPECT_EQ(error_of<std::runtime_error>(finish), "no step today");
    EXPECT_NE(bits_of(layers.fsdp, optimizer), before);
    expect_contains(error_of<std::logic_error>([&] { layers.loss(nothing); }), "may be taken back");
    unreliable.fails_step = false;
    step.finish();  // only repeats the rollback
    EXPECT_EQ(bits_of(layers.fsdp, optimizer), before);
    finish();
    EXPECT_NE(bits_of(layers.fsdp, optimizer), before);
  });
}

TEST(Speculation, MistakesAreNamed) {
  run_ranks(1, [](std::shared_ptr<Communicator> comm) {
    Layers layers(comm);
    HostAdamW optimizer(layers.fsdp.parameters(), torch::optim::AdamWOptions(1e-2));
    Failing failing;
    expect_contains(
        error_of<std::invalid_argument>([&] { StepInBackward step(layers.fsdp, optimizer, {.speculative = true}); }),
        "speculative without max_norm");
    expect_contains(error_of<std::invalid_argument>([&] { StepInBackward step(layers.fsdp, failing, kSpeculative); }),
                    "speculative with a tessera::step_in_backward_test");
    std::function<void()> nothing = [] {};
    StepInBackward step(layers.fsdp, optimizer, kSpeculative);  // not subscribed to gradients yet
    const at::Tensor loss = layers.loss(nothing);
    const auto before = bits_of(layers.fsdp, optimizer);
    loss.backward({}, /*retain_graph=*/true);
    // Values used by forward have changed: autograd throws, or FSDP while the step is unconfirmed.
    EXPECT_NE(error_of<std::exception>([&] { loss.backward(); }), "");
    EXPECT_EQ(bits_of(layers.fsdp, optimizer), before);
    optimizer.zero_grad();
    layers.loss(nothing).backward();
    step.finish();
  });
}

}  // namespace
}  // namespace tessera::step_in_backward_test
