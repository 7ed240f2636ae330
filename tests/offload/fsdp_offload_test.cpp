// FSDP with shards and gradients in host memory: bit-equal results, less device memory, copies that overlap
// computation.
#include <chrono>
#include <condition_variable>
#include <set>

#include "offload/streams/simulated_link.h"
#include "tests/support/random_net.h"
#include "tests/support/reference.h"
#include "tests/support/temporary_folder.h"

namespace tessera::fsdp_offload_test {
using namespace internal;
namespace {

using namespace testing_support;

struct Data {
  at::Tensor x, y;
};

Data batch(int step, int rows) {
  const auto both = seeded(
      1000 + step, [&] { return std::vector<at::Tensor>{torch::randn({rows, kWidth}), torch::randn({rows, kWidth})}; });
  return {both[0], both[1]};
}

int trees() { return trees_to_test(fewer_on_devices(6, 2)); }

FsdpOptions options(int kind, at::Device device) {
  FsdpOptions options;
  if (kind % 3 == 0) options.auto_wrap = wrap_modules<torch::nn::LinearImpl, torch::nn::GRUImpl>();
  if (kind % 3 == 1) options.auto_wrap = wrap_by_size(1);
  options.reshard_after_forward = kind % 2 == 0;
  options.prefetch = kind % 4;
  options.keep_recent = 1 + kind % 2;
  options.sync_module_states = kind % 3 != 2;
  options.offload.params = kind % 4 != 3;
  options.offload.grads = kind % 4 != 2;
  if (device.is_cuda()) options.offload.grads = options.offload.params;  // both or neither
  if (options.offload.params && options.offload.grads) options.offload.device_fraction = 0.3 * (kind % 3);
  options.offload.pin_memory = kind % 2 == 0;
  return options;
}

class OffloadParity : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, OffloadParity, testing::Values(1, 2, 3, 4, 5));

TEST_P(OffloadParity, RandomTreesTrainBitEqualToTheUnshardedLoop) {
  const int world = GetParam();
  constexpr int kRows = 4;
  const int steps = fewer_on_devices(8, 2);
  on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
    for (int kind = 0; kind < trees(); ++kind) {
      auto build = [&] { return seeded(7, [&] { return RandomNet(300 * world + kind); }); };
      auto reference = build();
      auto model = build();
      FullyShardedDataParallel fsdp(model, comm, options(kind, comm->device()));
      const auto adam = torch::optim::AdamOptions(1e-2).eps(adam_eps());
      torch::optim::Adam sharded(fsdp.parameters(), adam), whole(unique_parameters(*reference), adam);
      for (int step = 0; step < steps; ++step) {
        const Data data = batch(step, world * kRows);
        auto part = [&](auto& net, int rank) {
          return torch::mse_loss(net(data.x.narrow(0, rank * kRows, kRows)), data.y.narrow(0, rank * kRows, kRows));
        };
        sharded.zero_grad(step % 2 == 0);
        whole.zero_grad(step % 2 == 0);
        at::Tensor loss = part(fsdp, comm->rank());
        if (loss.requires_grad()) loss.backward();
        reference_backward(reference, world, [&](int rank) { return part(reference, rank); });
        sharded.step();
        whole.step();
      }
      expect_same_parameters(fsdp, *reference, "tree " + std::to_string(300 * world + kind) + ":");
      EXPECT_EQ(fsdp.memory().gathered_bytes + fsdp.memory().bucket_bytes + fsdp.memory().staging_bytes, 0);
      if (testing::Test::HasFailure()) return;
    }
  });
}

struct Chain {
  torch::nn::Sequential net;
  explicit Chain(int layers, int64_t width) {
    for (int i = 0; i < layers; ++i) net->push_back(torch::nn::Linear(width, width));
  }
};

torch::nn::Sequential chain(int layers, int64_t width) {
  return seeded(3, [&] { return Chain(layers, width).net; });
}

// All uses of gradients in one loop: both ways to accumulate, clipping, loss scaling with a skipped step, a frozen
// layer that is unfrozen.
template <class Optimizer, class Options>
torch::OrderedDict<std::string, at::Tensor> train(std::shared_ptr<Communicator> comm, FsdpOptions options,
                                                  Options adam) {
  options.auto_wrap = wrap_modules<torch::nn::LinearImpl>();
  auto model = chain(4, kWidth);
  for (auto& parameter : model[1]->parameters()) parameter.set_requires_grad(false);
  FullyShardedDataParallel fsdp(model, comm, options);
  Optimizer optimizer(fsdp.parameters(), adam);
  ShardedGradScaler scaler(comm, {.initial_scale = 1024});
  for (int step = 0; step < 8; ++step) {
    if (step == 5)
      for (auto& parameter : model[1]->parameters()) parameter.set_requires_grad(true);
    auto loss = [&](int part) {
      const Data data = batch(100 * step + 10 * part + comm->rank(), 4);
      return scaler.scale(torch::mse_loss(fsdp(data.x).to(at::kFloat), data.y)) * (step == 3 ? INFINITY : 1.0);
    };
    optimizer.zero_grad();
    if (step % 3 == 1) {
      auto guard = fsdp.no_sync();
      loss(1).backward();
    } else if (step % 3 == 2) {
      loss(2).backward();
    }
    loss(0).backward();
    scaler.unscale_(optimizer);
    if (step != 3) fsdp.clip_grad_norm_(0.05);
    EXPECT_EQ(scaler.step(optimizer), step != 3);
    scaler.update();
  }
  return fsdp.full_state_dict();
}

TEST(Offload, AccumulationClippingScalingAndFreezingStayExact) {
  for (const int world : fewer_on_devices<std::vector<int>>({1, 2, 3}, {2})) {
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      for (const bool mixed : {false, true}) {
        FsdpOptions plain;
        if (mixed) plain.mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
        FsdpOptions offloaded = plain;
        offloaded.offload = {.params = true, .grads = true};
        auto compare = [&](const auto& expected, const auto& own, const char* optimizer) {
          for (const auto& entry : expected)
            EXPECT_TRUE(same_values(entry.value(), own[entry.key()]))
                << optimizer << " " << entry.key() << (mixed ? " mixed, world " : " world ") << world << ": differs by "
                << (entry.value() - own[entry.key()]).abs().max().template item<float>();
        };
        const auto adamw = torch::optim::AdamWOptions(1.0 / 128);  // exact in fp32, to which devices round it
        compare(train<torch::optim::AdamW>(comm, plain, adamw), train<torch::optim::AdamW>(comm, offloaded, adamw),
                "torch's");
        const auto fused = train<AdamW>(comm, plain, adamw);
        compare(fused, train<AdamW>(comm, offloaded, adamw), "fused");
        FsdpOptions partly = offloaded;
        partly.offload.device_fraction = 0.5;
        compare(fused, train<AdamW>(comm, partly, adamw), "fused, half on the device");
        if (comm->device().is_cuda()) continue;  // its optimizers are not the host's
        compare(train<HostAdamW>(comm, plain, adamw), train<HostAdamW>(comm, offloaded, adamw), "host");
      }
    });
  }
}

TEST(Offload, GradientsReducedIn16BitAreTheSame) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    FsdpOptions plain;
    plain.mixed_precision = {.param_dtype = at::kHalf};
    FsdpOptions offloaded = plain;
    offloaded.offload = {.params = true, .grads = true};
    const auto adam = torch::optim::AdamOptions(1e-2);
    const bool is_host = comm->device().is_cpu();
    const auto expected = is_host ? train<HostAdam>(comm, plain, adam) : train<torch::optim::Adam>(comm, plain, adam);
    const auto own =
        is_host ? train<HostAdam>(comm, offloaded, adam) : train<torch::optim::Adam>(comm, offloaded, adam);
    for (const auto& entry : expected) EXPECT_TRUE(same_values(entry.value(), own[entry.key()])) << entry.key();
  });
}

TEST(Offload, CopiesOfTheModelAverageBeforeGradientsLeave) {
  on_ranks(4, [](std::shared_ptr<Communicator> comm) {
    FsdpOptions plain;
    plain.hybrid.ranks_per_copy = 2;
    FsdpOptions offloaded = plain;
    offloaded.offload = {.params = true, .grads = true};
    const auto adam = torch::optim::AdamOptions(1e-2);
    const auto expected = train<torch::optim::Adam>(comm, plain, adam),
               own = train<torch::optim::Adam>(comm, offloaded, adam);
    for (const auto& entry : expected) EXPECT_TRUE(same_values(entry.value(), own[entry.key()])) << entry.key();
  });
}

// Constructors allocate nothing; each unit's values move to the host as they are materialized.
TEST(Offload, DeferredModelsAreFilledIntoHostMemory) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    // Behind a pointer: there are no values to move to a device yet.
    auto model = seeded(
        3, [] { return std::make_unique<torch::nn::Sequential>(deferred([] { return Chain(4, kWidth).net; })); });
    FullyShardedDataParallel fsdp(
        *model, comm, {.auto_wrap = wrap_modules<torch::nn::LinearImpl>(), .offload = {.params = true, .grads = true}});
    EXPECT_GT(fsdp.memory().host_bytes, 0);
    EXPECT_EQ(fsdp.memory().device_bytes, 0);
    torch::NoGradGuard no_grad;
    const auto x = on_rank_device(torch::ones({2, kWidth}));
    EXPECT_TRUE(torch::equal(fsdp(x), chain(4, kWidth)->forward(x)));
  });
}

// The host optimizer writes the 16-bit copy; any other write to a shard makes the copy stale.
TEST(Offload, TheCopyIn16BitFollowsTheShard) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    auto model = chain(2, kWidth);
    FullyShardedDataParallel fsdp(model, comm,
                                  {.auto_wrap = wrap_modules<torch::nn::LinearImpl>(),
                                   .mixed_precision = {.param_dtype = at::kBFloat16},
                                   .offload = {.params = true, .grads = true}});
    HostAdamW optimizer(fsdp.parameters(), torch::optim::AdamWOptions(1e-2));
    auto expect_rounded = [&](const char* when) {
      const auto exact = fsdp.full_state_dict();
      torch::NoGradGuard no_grad;
      const auto x = on_rank_device(torch::eye(kWidth));
      const auto seen = torch::linear(
          torch::linear(x.to(at::kBFloat16), exact["0.weight"].to(at::kBFloat16), exact["0.bias"].to(at::kBFloat16)),
          exact["1.weight"].to(at::kBFloat16), exact["1.bias"].to(at::kBFloat16));
      EXPECT_TRUE(torch::equal(fsdp(x), seen)) << when;
    };
    expect_rounded("at the start");
    for (int step = 0; step < 3; ++step) {
      const Data data = batch(step + 10 * comm->rank(), 4);
      optimizer.zero_grad();
      torch::mse_loss(fsdp(data.x).to(at::kFloat), data.y).backward();
      optimizer.step();
      expect_rounded("after a step");
    }
    {
      torch::NoGradGuard no_grad;
      for (auto& shard : fsdp.parameters()) shard.mul_(1.01);
    }
    expect_rounded("after a write to the shards");
    {
      auto guard = fsdp.summon_full_params();
      torch::NoGradGuard no_grad;
      model[0]->parameters()[0].add_(0.3);
    }
    expect_rounded("after a write to the full parameters");
  });
}

TEST(Offload, DeviceMemoryIsThatOfTheUnitsInFlight) {
  constexpr int64_t kLayers = 8, kSide = 64, kUnitNumel = kSide * kSide + kSide, kUnitBytes = kUnitNumel * 4;
  for (const int world : {1, 2, 4}) {
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      auto train_memory = [&](CpuOffload offload) {
        FullyShardedDataParallel fsdp(
            chain(kLayers, kSide), comm,
            {.auto_wrap = wrap_modules<torch::nn::LinearImpl>(), .offload = offload, .prefetch = 1, .keep_recent = 1});
        torch::optim::Adam adam(fsdp.parameters(), 1e-2);
        for (int step = 0; step < 3; ++step) {
          adam.zero_grad();
          fsdp(on_rank_device(torch::ones({2, kSide}))).sum().backward();
          adam.step();
        }
        return fsdp.memory();
      };
      const MemoryReport plain = train_memory({}), offloaded = train_memory({.params = true, .grads = true});
      const int64_t shards = kLayers * kUnitBytes / world;
      EXPECT_EQ(plain.shard_bytes, shards);
      EXPECT_EQ(plain.device_bytes, 2 * shards);  // with gradients
      EXPECT_EQ(plain.host_bytes, 0);
      EXPECT_EQ(offloaded.device_bytes, 0);
      // Page-locked memory has page granularity.
      const int64_t page_bytes = comm->device().is_cuda() ? 4096 : 1;
      const int64_t pinned = 2 * kLayers * ((kUnitBytes / world + page_bytes - 1) / page_bytes * page_bytes);
      EXPECT_EQ(offloaded.host_bytes, pinned);
      EXPECT_EQ(offloaded.pinned_bytes, pinned);
      // One unit in use and one prefetched. In flight: a shard for each of these and one more, gradients being reduced,
      // and gradients being copied.
      EXPECT_LE(offloaded.peak_gathered_bytes, (world == 1 ? 3 : 2) * kUnitBytes);
      EXPECT_LE(offloaded.peak_staging_bytes, 7 * kUnitBytes / world);
      EXPECT_GT(offloaded.peak_staging_bytes, 0);
      const MemoryReport partly = train_memory({.params = true, .grads = true, .device_fraction = 0.4});
      EXPECT_EQ(partly.device_bytes, 2 * shards * 3 / kLayers);  // three units of eight, with gradients
      EXPECT_EQ(partly.host_bytes, pinned * 5 / kLayers);
      const MemoryReport pageable = train_memory({.params = true, .grads = true, .pin_memory = false});
      EXPECT_EQ(pageable.host_bytes, 2 * shards);
      EXPECT_EQ(pageable.pinned_bytes, 0);
      if (comm->device().is_cuda()) return;  // both or neither there
      const MemoryReport params_only = train_memory({.params = true});
      EXPECT_EQ(params_only.device_bytes, shards);
      EXPECT_EQ(params_only.host_bytes, shards);
    });
  }
}

TEST(Offload, HostMemoryBeyondItsLimitIsRefusedByName) {
  on_ranks(1, [](std::shared_ptr<Communicator> comm) {
    auto wrap = [&](int64_t limit) {
      FullyShardedDataParallel fsdp(chain(2, 64), comm,
                                    {.offload = {.params = true, .grads = true, .host_limit_bytes = limit}});
      fsdp(on_rank_device(torch::ones({1, 64}))).sum().backward();
    };
    constexpr int64_t kBytes = 2 * (64 * 64 + 64) * 4, kInPages = 9 * 4096;
    const int64_t bytes = comm->device().is_cuda() ? kInPages : kBytes;
    wrap(2 * bytes);
    expect_contains(error_of<std::runtime_error>([&] { wrap(2 * bytes - 1); }), "host memory for gradients on rank 0");
    expect_contains(error_of<std::runtime_error>([&] { wrap(bytes - 1); }), "host memory for the shards on rank 0");
    expect_contains(error_of<std::invalid_argument>([&] { wrap(-1); }), "host_limit_bytes is -1");
  });
}

TEST(Offload, ShardsBeyondTheLimitOfOneRankLeaveTheModuleAsItWas) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    auto model = chain(3, 64);
    const at::Tensor input = on_rank_device(torch::ones({1, 64})), expected = model->forward(input);
    FsdpOptions options{.auto_wrap = wrap_modules<torch::nn::LinearImpl>(), .offload = {.params = true, .grads = true}};
    if (comm->rank() == 1) options.offload.host_limit_bytes = 5 * 4096;  // two of three shards of 8,320 bytes
    const std::string error = error_of<std::exception>([&] { FullyShardedDataParallel fsdp(model, comm, options); });
    expect_contains(error, "host memory for the shards on rank 1");
    EXPECT_TRUE(torch::equal(model->forward(input), expected));
    options.offload.host_limit_bytes = 0;
    FullyShardedDataParallel fsdp(model, comm, options);
    EXPECT_TRUE(torch::equal(fsdp(input), expected));
  });
}

TEST(Offload, FractionsThatCannotBeKeptOnTheDeviceAreRefused) {
  on_ranks(1, [](std::shared_ptr<Communicator> comm) {
    const auto error = [&](CpuOffload offload) {
      return error_of<std::invalid_argument>(
          [&] { FullyShardedDataParallel fsdp(chain(1, 4), comm, {.offload = offload}); });
    };
    for (const double fraction : {-0.1, 1.1, static_cast<double>(NAN)})
      expect_contains(error({.params = true, .grads = true, .device_fraction = fraction}), ", expected 0 to 1");
    expect_contains(error({.device_fraction = 0.5}), "device_fraction is 0.5, but params or grads is false");
  });
}

TEST(Offload, RanksThatDisagreeAreNamed) {
  run_ranks(2, [](std::shared_ptr<Communicator> comm) {
    const std::string error = error_of<std::invalid_argument>(
        [&] { FullyShardedDataParallel fsdp(chain(1, 4), comm, {.offload = {.params = comm->rank() == 1}}); });
    expect_contains(error, "offload.params=");
  });
}

// ---- overlap, without a clock: a copy blocks until an event that would never happen if the wrapper waited for the
// copy.

class Events {
 public:
  void note(const std::string& event) {
    std::lock_guard lock(mutex_);
    seen_.insert(event);
    changed_.notify_all();
  }
  void forget() {
    std::lock_guard lock(mutex_);
    seen_.clear();
  }
  bool wait(const std::string& event) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(60), [&] { return seen_.contains(event); });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::set<std::string> seen_;
};

struct NoteBackward : torch::autograd::Function<NoteBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, int64_t note) {
    context->saved_data["note"] = note;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    (*reinterpret_cast<std::function<void()>*>(context->saved_data["note"].toInt()))();
    return {gradients[0], at::Tensor()};
  }
};

// Linears of different widths, so that bytes identify their copies.
struct LabelledImpl : torch::nn::Module {
  explicit LabelledImpl(Events& shared) : events(&shared) {
    for (int i = 0; i < 4; ++i) {
      layers->push_back(torch::nn::Linear(8 + 8 * i, 16 + 8 * i));
      notes.push_back([this, i] { events->note("backward " + std::to_string(i)); });
    }
    register_module("layers", layers);
  }
  at::Tensor forward(at::Tensor x) {
    for (int i = 0; i < 4; ++i) {
      x = layers[i]->as<torch::nn::Linear>()->forward(x);
      events->note("forward " + std::to_string(i));
      // Runs after the gradients of layer i + 1 and before those of layer i.
      x = NoteBackward::apply(x, reinterpret_cast<int64_t>(&notes[i]));
    }
    return x;
  }
  Events* events;
  std::vector<std::function<void()>> notes;
  torch::nn::ModuleList layers;
};
TORCH_MODULE(Labelled);

int layer_of(int64_t bytes) {
  for (int i = 0; i < 4; ++i)
    if (bytes == ((8 + 8 * i) * (16 + 8 * i) + 16 + 8 * i) * 4) return i;
  return -1;
}

TEST(Offload, ShardsComeWhileTheUnitsBeforeThemCompute) {
  Events events;
  std::atomic<bool> armed = false;
  run_ranks(1, [&](std::shared_ptr<Communicator> comm) {
    // The copy of layer i continues only after forward of layer i - 1, so it must have begun before.
    auto hold = [&](CopyDirection direction, int64_t bytes) {
      const int layer = layer_of(bytes);
      if (armed && direction == CopyDirection::kToDevice && layer > 1) {
        EXPECT_TRUE(events.wait("forward " + std::to_string(layer - 2))) << layer;
      }
      events.note("copy " + std::to_string(layer));
    };
    const SimulatedLinkScope link({.before_copy = hold});
    FullyShardedDataParallel fsdp(Labelled(events), comm,
                                  {.auto_wrap = wrap_modules<torch::nn::LinearImpl>(),
                                   .offload = {.params = true, .grads = true},
                                   .prefetch = 0,
                                   .keep_recent = 1});
    fsdp(torch::ones({2, 8})).sum().backward();  // records the order
    events.forget();
    armed = true;
    torch::NoGradGuard no_grad;
    fsdp(torch::ones({2, 8}));
    EXPECT_TRUE(events.wait("copy 3"));
  });
}

TEST(Offload, GradientsLeaveWhileBackwardGoesOn) {
  Events events;
  run_ranks(1, [&](std::shared_ptr<Communicator> comm) {
    // The gradient of layer i is copied only after backward of layer i - 1.
    auto hold = [&](CopyDirection direction, int64_t bytes) {
      const int layer = layer_of(bytes);
      if (direction == CopyDirection::kToHost && layer > 1) {
        EXPECT_TRUE(events.wait("backward " + std::to_string(layer - 2))) << layer;
      }
    };
    const SimulatedLinkScope link({.before_copy = hold});
    FullyShardedDataParallel fsdp(
        Labelled(events), comm,
        {.auto_wrap = wrap_modules<torch::nn::LinearImpl>(), .offload = {.params = true, .grads = true}});
    fsdp(torch::ones({2, 8})).sum().backward();
    for (const auto& shard : fsdp.parameters()) EXPECT_TRUE(shard.grad().defined());
  });
}

TEST(Offload, AFailedCopyIsAnErrorAndTheNextStepIsClean) {
  run_ranks(1, [](std::shared_ptr<Communicator> comm) {
    int failing = -1;
    auto fail = [&](CopyDirection direction, int64_t) {
      if (failing == static_cast<int>(direction)) throw std::runtime_error("the link is down");
    };
    const SimulatedLinkScope link({.before_copy = fail});
    FullyShardedDataParallel fsdp(
        chain(3, kWidth), comm,
        {.auto_wrap = wrap_modules<torch::nn::LinearImpl>(), .offload = {.params = true, .grads = true}});
    const auto x = torch::ones({2, kWidth});
    fsdp(x).sum().backward();
    std::vector<at::Tensor> expected;
    for (const auto& shard : fsdp.parameters()) expected.push_back(shard.grad().clone());
    for (const auto direction : {CopyDirection::kToDevice, CopyDirection::kToHost}) {
      fsdp.zero_grad();
      failing = static_cast<int>(direction);
      expect_contains(error_of<std::runtime_error>([&] { fsdp(x).sum().backward(); }), "the link is down");
      failing = -1;
      fsdp.zero_grad();
      fsdp(x).sum().backward();
      const auto shards = fsdp.parameters();
      for (size_t i = 0; i < shards.size(); ++i) EXPECT_TRUE(same_values(shards[i].grad(), expected[i])) << i;
      EXPECT_EQ(fsdp.memory().staging_bytes + fsdp.memory().gathered_bytes + fsdp.memory().bucket_bytes, 0);
    }
  });
}

TEST(Offload, SlowLinksChangeNothing) {
  on_ranks(3, [](std::shared_ptr<Communicator> comm) {
    FsdpOptions options;
    options.offload = {.params = true, .grads = true};
    const auto adam = torch::optim::AdamOptions(1e-2);
    const auto expected = train<torch::optim::Adam>(comm, options, adam);
    const SimulatedLinkScope slow({.bytes_per_s = 1e6});
    const auto own = train<torch::optim::Adam>(comm, options, adam);
    for (const auto& entry : expected) EXPECT_TRUE(same_values(entry.value(), own[entry.key()])) << entry.key();
  });
}

TEST(Offload, CheckpointsAndSummonedParametersSeeTheShards) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    auto model = chain(2, kWidth);
    FullyShardedDataParallel fsdp(
        model, comm, {.auto_wrap = wrap_modules<torch::nn::LinearImpl>(), .offload = {.params = true, .grads = true}});
    const auto before = fsdp.full_state_dict();
    {
      auto guard = fsdp.summon_full_params();
      torch::NoGradGuard no_grad;
      EXPECT_TRUE(torch::equal(model[0]->parameters()[0], before["0.weight"]));
      model[0]->parameters()[0].mul_(2);
    }
    EXPECT_TRUE(torch::equal(fsdp.full_state_dict()["0.weight"], 2 * before["0.weight"]));
  });
}

// Checkpoints do not depend on the part that stays on the device.
TEST(Offload, ACheckpointLoadsWithAnotherPartOnTheDevice) {
  const TemporaryFolder folder;
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    struct Training {
      FullyShardedDataParallel<torch::nn::Sequential> fsdp;
      AdamW optimizer;
      Training(const std::shared_ptr<Communicator>& comm, double device_fraction)
          : fsdp(chain(4, kWidth), comm,
                 {.auto_wrap = wrap_modules<torch::nn::LinearImpl>(),
                  .offload = {.params = true, .grads = true, .device_fraction = device_fraction}}),
            optimizer(fsdp.parameters(), torch::optim::AdamWOptions(1.0 / 128)) {}
      void step(int index) {
        optimizer.zero_grad();
        const Data data = batch(index, 4);
        torch::mse_loss(fsdp(data.x), data.y).backward();
        fsdp.clip_grad_norm_(0.05);
        optimizer.step();
      }
    };
    Training saved(comm, 0.5);
    for (int i = 0; i < 3; ++i) saved.step(i);
    save_checkpoint(folder / "checkpoint", saved.fsdp, saved.optimizer);
    saved.step(3);
    const auto expected = saved.fsdp.full_state_dict();
    for (const double fraction : {0.0, 0.25, 1.0}) {
      Training loaded(comm, fraction);
      load_checkpoint(folder / "checkpoint", loaded.fsdp, loaded.optimizer);
      loaded.step(3);
      const auto own = loaded.fsdp.full_state_dict();
      for (const auto& entry : expected) EXPECT_TRUE(same_values(entry.value(), own[entry.key()])) << entry.key();
    }
  });
}

}  // namespace
}  // namespace tessera::fsdp_offload_test
