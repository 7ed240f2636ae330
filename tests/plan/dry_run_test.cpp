// A dry run takes the memory of a run with data: to the byte, after every operator.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include <tessera/optim/adafactor.h>
#include <tessera/optim/ema.h>
#include <tessera/optim/host_adam.h>
#include <tessera/plan.h>
#include <tessera/sync_batch_norm.h>
#include "optim/state/optimizer_state.h"
#include "tests/plan/models.h"
#include "tests/plan/same_record.h"
#include "tests/support/temporary_folder.h"

namespace tessera::plan_tests {
using namespace internal;
namespace {

using namespace testing_support;

constexpr int64_t kBatch = 6;

// The model, and how it is trained.
struct Case {
  std::string name;
  std::string model;  // "mlp", "conv", "gpt", "checkpointed gpt", "recipe"
  int world;
  ZeroOptions zero{};
  bool accumulates = false;  // two backwards, the first under no_sync()
  bool clips = true;
  bool evaluates = false;
  bool on_host = false;  // stepped by HostAdamW
};

at::Tensor input_of(const std::string& model) {
  if (model == "mlp") return torch::randn({kBatch, 97});
  if (model == "conv") return torch::randn({kBatch, 3, 17, 19});
  return torch::randint(301, {kBatch, 24});
}

template <class Model>
void train(const Case& each, Model& model) {
  const int64_t targets = each.model.ends_with("gpt") ? kBatch * 24 : kBatch;
  const int64_t classes = each.model.ends_with("gpt") ? 301 : 11;
  auto loss = [&] {
    if (each.model == "recipe") return torch::mse_loss(model(torch::randn({20, 50})), torch::randn({20, 50}));
    return torch::cross_entropy_loss(model(input_of(each.model)), torch::randint(classes, {targets}));
  };
  if (each.evaluates) {
    torch::NoGradGuard no_grad;
    model.module()->eval();
    model(input_of(each.model));
    model.module()->train();
  }
  model.optimizer().zero_grad();
  if (each.accumulates) {
    auto guard = model.no_sync();
    loss().backward();
  }
  loss().backward();
  if (each.clips) model.clip_grad_norm_(1.0);
  model.step();
}

// Calls run(make_model), whose result trains with `train`.
template <class Run>
auto with_model(const Case& each, Run run) {
  auto wrap = [&](auto make) {
    return run([&each, make](std::shared_ptr<Communicator> comm) {
      return zero(seeded(1, make), torch::optim::AdamWOptions(1e-3), std::move(comm), each.zero);
    });
  };
  if (each.on_host)
    return run([&each](std::shared_ptr<Communicator> comm) {
      return zero<HostAdamW>(seeded(1, [] { return Gpt(); }), torch::optim::AdamWOptions(1e-3), std::move(comm),
                             each.zero);
    });
  if (each.model == "recipe")  // examples/zero_recipe, narrower
    return run([&each](std::shared_ptr<Communicator> comm) {
      const auto make = [] {
        torch::nn::Sequential model;
        for (int layer = 0; layer < 20; ++layer) model->push_back(torch::nn::Linear(50, 50));
        return model;
      };
      return zero(seeded(1, make), torch::optim::AdamOptions(0.01), std::move(comm), each.zero);
    });
  if (each.model == "mlp") return wrap([] { return Mlp(); });
  if (each.model == "conv") return wrap([] { return ConvNet(); });
  return wrap([checkpoints = each.model == "checkpointed gpt"] { return Gpt(checkpoints); });
}

// The reports of wrapper and optimizer in a run with data.
struct Said {
  MemoryReport memory;
  int64_t optimizer_bytes = 0;
  int64_t collectives = 0;
};
template <class Model>
Said ask(Model& model) {
  Said said{model.memory()};
  for (const auto& [parameter, state] : model.optimizer().state())
    for (const auto& [name, tensor] : read_state(*state).tensors)
      said.optimizer_bytes += static_cast<int64_t>(tensor.nbytes());
  return said;
}
void expect_as_said(const Case& each, const RunRecord& dry, const Said& said, const std::string& where) {
  if (each.world > 1) {
    EXPECT_EQ(static_cast<int64_t>(dry.collectives.size()), said.collectives) << where;
  }
  if (each.zero.stage == 0) {
    EXPECT_EQ(dry.end[MemoryKind::kOptimizer], said.optimizer_bytes) << where;
  }
  if (each.zero.stage != 3) return;
  const bool has_disk = !each.zero.fsdp.offload.directory.empty();
  EXPECT_EQ(dry.end[MemoryKind::kDisk], said.memory.disk_bytes) << where;
  EXPECT_EQ(dry.end[MemoryKind::kDisk] > 0, has_disk) << where;
  if (!each.zero.fsdp.offload.disk_units) {
    EXPECT_EQ(dry.end[MemoryKind::kOptimizer], each.on_host && has_disk ? 0 : said.optimizer_bytes) << where;
  }
  EXPECT_EQ(dry.most[MemoryKind::kGathered], said.memory.peak_gathered_bytes) << where;
  EXPECT_EQ(dry.most[MemoryKind::kSecondary], said.memory.peak_secondary_bytes) << where;
  EXPECT_EQ(dry.most[MemoryKind::kBuckets], said.memory.peak_bucket_bytes) << where;
  if (each.zero.fsdp.offload.params) {
    const int64_t expected_bytes = has_disk ? said.memory.host_bytes : said.memory.shard_bytes + said.memory.grad_bytes;
    EXPECT_EQ(dry.end[MemoryKind::kHost], expected_bytes) << where;
    return;
  }
  EXPECT_EQ(dry.end[MemoryKind::kGradients], said.memory.grad_bytes) << where;
  if (each.model != "conv") {
    EXPECT_EQ(dry.end[MemoryKind::kParameters], said.memory.shard_bytes) << where;  // no buffers
  }
}

ZeroOptions fsdp(FsdpOptions options) {
  if (!options.auto_wrap) options.auto_wrap = wrap_modules<BlockImpl, torch::nn::LinearImpl, torch::nn::Conv2dImpl>();
  return {.stage = 3, .fsdp = std::move(options)};
}
ZeroOptions stage(int number) {
  return {.stage = number, .ddp = {.bucket_bytes = 1 << 20}, .oss = {.broadcast_bucket_bytes = 65536}};
}

// Shards and state on disk: with memory for all of it, and for little more than one parameter and its state.
void add_disk_cases(std::vector<Case>& all, const std::string& folder) {
  const auto disk = [&](int64_t buffer_bytes, WrapPolicy units = {}) {
    FsdpOptions options{.auto_wrap = std::move(units)};
    options.offload = {.params = true, .grads = true, .directory = folder, .disk_buffer_bytes = buffer_bytes};
    return fsdp(options);
  };
  constexpr int64_t kAmple = int64_t{256} << 20, kTight = 208 << 10;
  all.push_back({.name = "FSDP, disk", .model = "gpt", .world = 2, .zero = disk(kAmple), .on_host = true});
  all.push_back({.name = "FSDP, disk, tight", .model = "gpt", .world = 2, .zero = disk(kTight), .on_host = true});
  all.push_back({.name = "FSDP, disk", .model = "mlp", .world = 3, .zero = disk(kAmple)});
  all.push_back({.name = "FSDP, disk, tight", .model = "gpt", .world = 3, .zero = disk(kTight)});
  Case& narrow = all.emplace_back(Case{"FSDP, disk, bf16, tight", "gpt", 2, disk(kTight)});
  narrow.zero.fsdp.mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  narrow.on_host = true;
  Case& some = all.emplace_back(Case{"FSDP, some units on a disk", "gpt", 1, disk(kAmple)});
  some.zero.fsdp.offload.disk_units = [](const std::string& unit) { return unit.size() % 2 == 0; };
  some.on_host = some.accumulates = some.evaluates = true;
}

std::vector<Case> cases() {
  const FsdpOptions bf16{.mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}};
  std::vector<Case> all;
  const auto add = [&](std::string name, std::string model, int world, ZeroOptions zero) -> Case& {
    return all.emplace_back(Case{std::move(name), std::move(model), world, std::move(zero)});
  };
  for (const std::string model : {"mlp", "conv", "gpt"}) {
    add("DDP", model, 2, stage(0));
    add("OSS + DDP", model, 3, stage(1));
    add("OSS + SDP", model, 2, stage(2));
    add("FSDP", model, 3, fsdp({}));
    add("FSDP, kept gathered", model, 2, fsdp({.reshard_after_forward = false}));
  }
  for (const int world : {1, 2, 4, 5}) add("FSDP", "gpt", world, fsdp({}));
  add("FSDP, bf16", "gpt", 2, fsdp(bf16));
  add("FSDP, bf16", "mlp", 3, fsdp(bf16));
  add("FSDP, one unit", "gpt", 2, fsdp({.auto_wrap = wrap_if([](const auto&, const auto&) { return false; })}));
  add("FSDP, prefetch 0", "gpt", 2, fsdp({.prefetch = 0}));
  add("hybrid", "gpt", 4, fsdp({.hybrid = {.ranks_per_copy = 2}}));
  add("hybrid", "mlp", 4, fsdp({.hybrid = {.ranks_per_copy = 2}}));
  add("secondary copies", "gpt", 4, fsdp({.hybrid = {.ranks_per_secondary_copy = 2}}));
  const CpuOffload in_host_memory{.params = true, .grads = true};
  add("FSDP, offload", "gpt", 2, fsdp({.offload = in_host_memory}));
  add("FSDP, offload", "mlp", 3, fsdp({.offload = in_host_memory}));
  add("FSDP, prefetch 2, linears", "gpt", 2, fsdp({.auto_wrap = wrap_modules<torch::nn::LinearImpl>(), .prefetch = 2}));
  add("hybrid, bf16", "gpt", 4, fsdp({.mixed_precision = bf16.mixed_precision, .hybrid = {.ranks_per_copy = 2}}));
  for (const int number : {1, 2})
    add("OSS, offload", "gpt", 2, stage(number)).zero.oss.offload = {.params = true, .grads = true};
  // Ranks that are threads share a generator, so it would be a race whether a checkpointed part drew numbers and keeps
  // the generator's state.
  add("FSDP", "checkpointed gpt", 1, fsdp({}));
  add("FSDP, bf16", "checkpointed gpt", 1, fsdp(bf16));
  add("OSS + SDP", "checkpointed gpt", 1, stage(2));
  add("DDP", "gpt", 1, stage(0));
  for (const int number : {0, 2, 3}) {
    Case& each = add("accumulating", "gpt", 2, number == 3 ? fsdp({}) : stage(number));
    each.accumulates = each.evaluates = true;
  }
  add("accumulating", "conv", 3, fsdp({})).accumulates = true;
  add("without clipping", "mlp", 5, stage(1)).clips = false;
  for (const int number : {0, 1, 2, 3}) {
    ZeroOptions options{.stage = number};
    options.fsdp.auto_wrap = wrap_modules<torch::nn::LinearImpl>();
    add("stage " + std::to_string(number), "recipe", 2, options).clips = false;
  }
  return all;
}

TEST(DryRun, TakesWhatARunWithDataTakes) {
  const TemporaryFolder folder;
  auto all = cases();
  add_disk_cases(all, folder.path());
  EXPECT_GE(all.size(), 30U);
  for (const Case& each : all) {
    const std::string where =
        each.name + (each.evaluates ? ", evaluating" : "") + " of " + each.model + " on " + std::to_string(each.world);
    SCOPED_TRACE(where);
    std::vector<RunRecord> real(static_cast<size_t>(each.world));
    std::vector<Said> said(real.size());
    on_ranks(each.world, [&](std::shared_ptr<Communicator> comm) {
      const auto rank = static_cast<size_t>(comm->rank());
      const int64_t before = comm->traffic().collectives;
      real[rank] = with_model(each, [&](auto make) {
        return record_run(
            make,
            [&](auto& model) {
              train(each, model);
              said[rank] = ask(model);
            },
            comm);
      });
      said[rank].collectives = comm->traffic().collectives - before;
    });
    for (int rank = 0; rank < each.world; ++rank) {
      Case elsewhere = each;
      if (!each.zero.fsdp.offload.directory.empty()) elsewhere.zero.fsdp.offload.directory = "/no/such/folder";
      const RunRecord dry = with_model(elsewhere, [&](auto make) {
        return dry_run(make, [&](auto& model) { train(each, model); }, {.world_size = each.world, .rank = rank});
      });
      const std::string of_rank = where + ", rank " + std::to_string(rank);
      expect_same(dry, real[static_cast<size_t>(rank)], of_rank);
      expect_as_said(each, dry, said[static_cast<size_t>(rank)], of_rank);
      if (::testing::Test::HasFailure()) return;
    }
  }
}

// Its statistics divide by a count that ranks exchange, whose value a dry run does not have.
TEST(RecordRun, RefusesANullCommunicator) {
  const std::string error = error_of<std::invalid_argument>(
      [] { record_run([](auto) { return std::make_unique<int>(0); }, [](auto&) {}, nullptr); });
  expect_contains(error, "record_run: the communicator is null");
}

TEST(DryRun, TakesSynchronizedBatchNorm) {
  const auto make = [](const std::shared_ptr<Communicator>& comm) {
    torch::nn::Sequential net(torch::nn::Conv2d(3, 8, 3), torch::nn::BatchNorm2d(8), torch::nn::Flatten(),
                              torch::nn::Linear(8 * 6 * 6, 5));
    convert_sync_batch_norm(*net, *comm);
    return std::make_unique<DistributedDataParallel<torch::nn::Sequential>>(net, comm);
  };
  const auto step = [](auto& model) { (*model)(torch::randn({4, 3, 8, 8})).mean().backward(); };
  for (const int world : {1, 3}) {
    std::vector<RunRecord> real(static_cast<size_t>(world));
    on_ranks(world, [&](const std::shared_ptr<Communicator>& comm) {
      real[static_cast<size_t>(comm->rank())] = record_run(make, step, comm);
    });
    for (int rank = 0; rank < world; ++rank)
      expect_same(dry_run(make, step, {.world_size = world, .rank = rank}), real[static_cast<size_t>(rank)],
                  std::to_string(world) + " ranks");
  }
}

// A rank that owns no parameter may still train, unless all are frozen.
TEST(DryRun, TakesWhatWholeParametersOptimizersTakeOfAFrozenModel) {
  constexpr int kWorld = 3;
  const auto make = [](std::shared_ptr<Communicator> comm) {
    torch::nn::Sequential model;
    for (int layer = 0; layer < 6; ++layer) model->push_back(torch::nn::Linear(50, 50));
    for (int layer = 0; layer < 5; ++layer)
      for (auto& parameter : model[layer]->parameters()) parameter.requires_grad_(false);
    return zero<Adafactor>(model, AdafactorOptions(1e-3), std::move(comm), {.stage = 3});
  };
  const auto train = [](auto& model) {
    model.optimizer().zero_grad();
    torch::mse_loss(model(torch::randn({4, 50})), torch::randn({4, 50})).backward();
    model.step();
  };
  std::vector<RunRecord> real(kWorld);
  on_ranks(kWorld, [&](std::shared_ptr<Communicator> comm) {
    const auto rank = static_cast<size_t>(comm->rank());
    real[rank] = record_run(make, train, comm);
  });
  for (int rank = 0; rank < kWorld; ++rank)
    expect_same(dry_run(make, train, {.world_size = kWorld, .rank = rank}), real[static_cast<size_t>(rank)],
                "rank " + std::to_string(rank));
}

TEST(DryRun, TakesAnAverageOverCopiesOfTheModel) {
  const auto record = dry_run(
      [](std::shared_ptr<Communicator> comm) {
        struct Averaged {
          explicit Averaged(std::shared_ptr<Communicator> comm)
              : fsdp(torch::nn::Linear(50, 50), std::move(comm), {.hybrid = {.ranks_per_copy = 2}}), ema(fsdp) {}
          FullyShardedDataParallel<torch::nn::Linear> fsdp;
          Ema ema;
        };
        return std::make_shared<Averaged>(std::move(comm));
      },
      [](auto& model) { model->ema.update(); }, {.world_size = 4});
  EXPECT_GT(record.peak_bytes(), 4 * 50 * 50 / 2);
}

// Some losses keep the memory of the values that they average, visible during backward.
TEST(DryRun, TakesWhatLossesTake) {
  using Loss = at::Tensor (*)(const at::Tensor& output, const at::Tensor& target);
  const std::pair<const char*, Loss> losses[] = {
      {"mse_loss", [](const at::Tensor& a, const at::Tensor& b) { return torch::mse_loss(a, b); }},
      {"huber_loss", [](const at::Tensor& a, const at::Tensor& b) { return torch::huber_loss(a, b); }},
      {"smooth_l1_loss", [](const at::Tensor& a, const at::Tensor& b) { return torch::smooth_l1_loss(a, b); }},
      {"soft_margin_loss", [](const at::Tensor& a, const at::Tensor& b) { return torch::soft_margin_loss(a, b); }},
      {"binary_cross_entropy",
       [](const at::Tensor& a, const at::Tensor& b) { return torch::binary_cross_entropy(a, b); }}};
  for (const auto& [name, loss] : losses) {
    const auto make = [](std::shared_ptr<Communicator> comm) {
      auto model = seeded(1, [] { return torch::nn::Sequential(torch::nn::Linear(97, 11), torch::nn::Sigmoid()); });
      return zero(model, torch::optim::AdamWOptions(1e-3), std::move(comm), {.stage = 0});
    };
    const auto train = [&, loss = loss](auto& model) {
      loss(model(torch::randn({kBatch, 97})), torch::full({kBatch, 11}, 0.5)).backward();
      model.step();
    };
    RunRecord real;
    on_ranks(1, [&](std::shared_ptr<Communicator> comm) { real = record_run(make, train, comm); });
    expect_same(dry_run(make, train, {.world_size = 1}), real, name);
  }
}

// As torch.utils.flop_counter counts them: each input element times a row of weights.
TEST(DryRun, CountsTransposedConvolutions) {
  for (const int groups : {1, 2}) {
    struct NetImpl : torch::nn::Module {
      explicit NetImpl(int groups)
          : up(torch::nn::ConvTranspose2dOptions(4, 6, 3).stride(2).groups(groups).bias(false)) {
        register_module("up", up);
      }
      at::Tensor forward(const at::Tensor& x) { return up(x); }
      torch::nn::ConvTranspose2d up;
    };
    const RunRecord record = dry_run(
        [&](std::shared_ptr<Communicator> comm) {
          return zero(std::make_shared<NetImpl>(groups), torch::optim::AdamWOptions(1e-3), std::move(comm),
                      {.stage = 3});
        },
        [&](auto& model) {
          model.optimizer().zero_grad();
          model(torch::zeros({2, 4, 5, 7}).requires_grad_()).sum().backward();
          model.step();
        });
    const int64_t forward = 2 * (2 * 4 * 5 * 7) * (6 / groups * 3 * 3);
    EXPECT_EQ(record.flop, 3 * forward) << groups << " groups\n" << record.summary();
  }
}

}  // namespace
}  // namespace tessera::plan_tests
