// A state saved with one layout and number of ranks is equal when loaded with another.
#include <c10/core/impl/COW.h>
#include <atomic>
#include <chrono>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <thread>

#include "checkpoint/format/manifest.h"
#include "checkpoint/format/rank_files.h"
#include "checkpoint/format/slice_reader.h"
#include "checkpoint/load/find_checkpoints.h"
#include "checkpoint/load/offline.h"
#include "checkpoint/save/commit.h"
#include "core/comm/fingerprint.h"
#include "optim/state/optimizer_state.h"
#include "tests/checkpoint/replicated.h"
#include "tests/support/random_net.h"
#include "tests/support/reference.h"
#include "tests/support/temporary_folder.h"

namespace tessera::save_load_test {
using namespace internal;
namespace {

using namespace testing_support;
using torch::optim::Adam;
using torch::optim::AdamOptions;

int trees() { return trees_to_test(fewer_on_devices(12, 4)); }

std::set<std::string> names_in(const std::filesystem::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) names.insert(entry.path().filename());
  return names;
}

// Superseded files are removed in the background.
void expect_eventually(const std::filesystem::path& folder, const std::set<std::string>& names) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (names_in(folder) != names && std::chrono::steady_clock::now() < end)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_EQ(names_in(folder), names);
}

// A random module tree made by `seed`, with parameters and buffers from `values`.
RandomNet make_net(unsigned seed, uint64_t values) {
  return seeded(seed, [&] {
    RandomNet net(seed);
    const at::NoGradGuard no_grad;
    torch::manual_seed(values);
    for (auto& parameter : unique_parameters(*net))
      if (parameter.is_non_overlapping_and_dense()) parameter.normal_();
    for (auto& buffer : net->buffers())
      if (buffer.is_floating_point()) buffer.uniform_(0.5, 1.5);
    return net;
  });
}

// Gives every parameter that the optimizer keeps here a random state, as after some steps.
void fill_state(const std::vector<NamedShard>& shards, torch::optim::Optimizer& optimizer, uint64_t seed) {
  const at::NoGradGuard no_grad;
  const auto* owners = dynamic_cast<const OptimizerShards*>(&optimizer);
  for (const auto& group : optimizer.param_groups())
    for (const auto& parameter : group.params()) {
      if (owners != nullptr && !owners->owns(parameter)) continue;
      const NamedShard* shard = nullptr;
      for (const auto& known : shards)
        if (known.tensor.is_same(parameter)) shard = &known;
      ASSERT_NE(shard, nullptr);
      ParameterState values;
      const auto index = static_cast<int64_t>(Fingerprint().add(shard->fqn).value() % 10000);
      values.numbers = {{"step", 1 + index % 7}};
      for (const char* key : {"exp_avg", "exp_avg_sq"}) {
        // The whole tensor's values; each rank takes its part.
        const at::Tensor whole = seeded(seed + static_cast<uint64_t>(index) + (key[7] != 0), [&] {
          return at::rand({numel_of(shard->sizes)}, at::TensorOptions(parameter.scalar_type()));
        });
        at::Tensor own = at::empty_like(parameter, parameter.options().requires_grad(false));
        if (own.sizes() == at::IntArrayRef(shard->sizes) && own.dim() != 1) {
          own = at::empty_strided(shard->sizes, shard->strides, own.options());
          if (own.numel() > 0) own.as_strided({own.numel()}, {1}).copy_(whole);
        } else {
          own.copy_(whole.narrow(0, shard->held.begin, shard->held.numel()));
        }
        values.tensors.emplace_back(key, own);
      }
      optimizer.state()[parameter.unsafeGetTensorImpl()] = make_state("Adam", values);
    }
}

// Returns the whole training state of a checkpoint by name, row-major.
std::map<std::string, at::Tensor> contents(const std::filesystem::path& dir) {
  const Manifest manifest = read_manifest(dir);
  SliceReader reader(manifest.saved);
  std::map<std::string, at::Tensor> all;
  for (const auto& [name, tensor] : manifest.saved.tensors) all[name] = reader.read(name, whole_box(tensor.shape));
  for (const auto& [of, optimizer] : manifest.optimizers)
    for (const auto& [name, numbers] : optimizer.numbers)
      for (const auto& [key, number] : numbers) all["number." + key + "." + name] = torch::tensor({number});
  return all;
}

void expect_same(const std::map<std::string, at::Tensor>& a, const std::map<std::string, at::Tensor>& b,
                 const std::string& where) {
  ASSERT_EQ(a.size(), b.size()) << where;
  for (const auto& [name, tensor] : a) {
    ASSERT_TRUE(b.contains(name)) << where << name;
    EXPECT_TRUE(same_values(tensor, b.at(name))) << where << name;
  }
}

enum class Layout { kFsdp, kReplicated, kOwner, kHybrid };

// Runs `body(model, optimizer)` with the tree in a layout.
template <class Body>
void under(Layout layout, int world, unsigned seed, uint64_t values, Body body) {
  on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
    auto net = make_net(seed, values);
    Replicated whole(net.ptr(), comm);
    auto with = [&](ModelShards& model, const std::vector<at::Tensor>& parameters) {
      const AdamOptions options(0.25 + static_cast<double>(values));
      if (layout == Layout::kOwner) {
        OwnerAdam optimizer(parameters, comm->rank(), comm->size(), options);
        fill_state(model.named_shards(), optimizer, values);
        body(model, optimizer, comm);
      } else {
        Adam optimizer(parameters, options);
        fill_state(model.named_shards(), optimizer, values);
        body(model, optimizer, comm);
      }
    };
    if (layout == Layout::kFsdp) {
      FullyShardedDataParallel fsdp(net, comm, {.auto_wrap = wrap_by_size(60)});
      with(fsdp, fsdp.parameters());
    } else if (layout == Layout::kHybrid) {
      Hybrid hybrid(whole, 2);
      with(hybrid, hybrid.parameters());
    } else {
      with(whole, whole.parameters());
    }
  });
}

TEST(Checkpoint, AnyLayoutLoadsWhatAnyOtherSaved) {
  const std::vector<std::pair<Layout, int>> layouts = {
      {Layout::kFsdp, 1},       {Layout::kFsdp, 2},  {Layout::kFsdp, 3},  {Layout::kFsdp, 5},  {Layout::kReplicated, 1},
      {Layout::kReplicated, 3}, {Layout::kOwner, 4}, {Layout::kOwner, 2}, {Layout::kHybrid, 4}};
  for (int tree = 0; tree < trees(); ++tree) {
    const TemporaryFolder folder;
    const auto [from, from_world] = layouts[static_cast<size_t>(tree) % layouts.size()];
    const auto [to, to_world] = layouts[static_cast<size_t>(tree * 5 + 2) % layouts.size()];
    SaveOptions small{.block_bytes = 48};
    under(from, from_world, static_cast<unsigned>(tree), 3, [&](auto& model, auto& optimizer, auto&) {
      save_checkpoint(folder / "first", model, optimizer, {{"step", 17}}, small);
    });
    under(to, to_world, static_cast<unsigned>(tree), 4, [&](auto& model, auto& optimizer, auto&) {
      const auto extra = load_checkpoint(folder / "first", model, optimizer);
      EXPECT_EQ(extra["step"], 17);
      EXPECT_EQ(static_cast<AdamOptions&>(optimizer.param_groups()[0].options()).lr(), 3.25);
      save_checkpoint(folder / "second", model, optimizer);
    });
    expect_same(contents(folder / "first"), contents(folder / "second"), "tree " + std::to_string(tree) + " ");
  }
}

TEST(Checkpoint, HoldsTheModelsOwnValues) {
  for (int tree = 0; tree < trees(); ++tree) {
    const TemporaryFolder folder;
    under(Layout::kFsdp, 3, static_cast<unsigned>(tree), 3, [&](auto& model, auto& optimizer, auto&) {
      save_checkpoint(folder / "a", model, optimizer, {}, {.block_bytes = 64});
    });
    const auto saved = contents(folder / "a");
    auto net = make_net(static_cast<unsigned>(tree), 3);
    std::set<const void*> seen;
    for (const auto& parameter : net->named_parameters()) {
      if (!seen.insert(parameter.value().unsafeGetTensorImpl()).second) {
        EXPECT_FALSE(saved.contains(parameter.key())) << "a tied parameter is stored once";
        continue;
      }
      ASSERT_TRUE(saved.contains(parameter.key()));
      EXPECT_TRUE(torch::equal(saved.at(parameter.key()), parameter.value().detach())) << parameter.key();
    }
    for (const auto& buffer : net->named_buffers()) EXPECT_TRUE(torch::equal(saved.at(buffer.key()), buffer.value()));
  }
}

TEST(Checkpoint, TrainingGoesOnBitByBit) {
  const TemporaryFolder folder;
  on_ranks(3, [&](std::shared_ptr<Communicator> comm) {
    auto make = [&](uint64_t seed) {
      auto model = seeded(seed, [] {
        return torch::nn::Sequential(torch::nn::Linear(7, 9), torch::nn::Tanh(), torch::nn::Linear(9, 5));
      });
      return FullyShardedDataParallel(model, comm, {.auto_wrap = wrap_modules<torch::nn::LinearImpl>()});
    };
    auto train = [&](auto& fsdp, Adam& optimizer, int begin, int end) {
      std::vector<double> losses;
      for (int step = begin; step < end; ++step) {
        const at::Tensor x = seeded(100 + 10 * step + comm->rank(), [] { return torch::randn({4, 7}); });
        optimizer.zero_grad();
        const at::Tensor loss = fsdp(x).square().mean();
        loss.backward();
        optimizer.step();
        losses.push_back(loss.template item<double>());
      }
      return losses;
    };
    auto first = make(1);
    Adam optimizer(first.parameters(), AdamOptions(1e-2).amsgrad(true));
    train(first, optimizer, 0, 5);
    save_checkpoint(folder / "a", first, optimizer);
    auto second = make(2);
    Adam other(second.parameters(), AdamOptions(5).amsgrad(true));
    load_checkpoint(folder / "a", second, other);
    EXPECT_EQ(train(first, optimizer, 5, 10), train(second, other, 5, 10));
  });
}

TEST(Checkpoint, AFsdpCheckpointContinuesReplicatedAndBack) {
  const TemporaryFolder folder;
  auto values = [&](const char* name) { return contents(folder / name); };
  under(Layout::kFsdp, 3, 1, 3,
        [&](auto& model, auto& optimizer, auto&) { save_checkpoint(folder / "a", model, optimizer); });
  under(Layout::kOwner, 4, 1, 5, [&](auto& model, auto& optimizer, auto&) {
    load_checkpoint(folder / "a", model, optimizer);
    save_checkpoint(folder / "b", model, optimizer);
  });
  under(Layout::kFsdp, 2, 1, 6, [&](auto& model, auto& optimizer, auto&) {
    load_checkpoint(folder / "b", model, optimizer);
    save_checkpoint(folder / "c", model, optimizer);
  });
  expect_same(values("a"), values("b"), "b ");
  expect_same(values("a"), values("c"), "c ");
}

// Ignored modules stay whole on every rank.
TEST(Checkpoint, HasTheParametersOfIgnoredModules) {
  const TemporaryFolder folder;
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    const auto make = [&](double value) {
      auto net = on_rank_device(
          torch::nn::Sequential(torch::nn::Linear(7, 5), torch::nn::Linear(5, 5), torch::nn::Linear(5, 3)));
      const at::NoGradGuard no_grad;
      for (auto& parameter : net->parameters()) parameter.fill_(value);
      return net;
    };
    const FsdpOptions options{
        .auto_wrap = wrap_modules<torch::nn::LinearImpl>(),
        .ignored_modules = wrap_if([](const std::string& fqn, const torch::nn::Module&) { return fqn == "1"; })};
    const auto net = make(1), other_net = make(2), replicated_net = make(3);
    FullyShardedDataParallel fsdp(net, comm, options), other(other_net, comm, options);
    Replicated replicated(replicated_net.ptr(), comm);
    Adam adam(fsdp.parameters(), AdamOptions(0.1)), other_adam(other.parameters(), AdamOptions(0.1));
    const auto expect_all = [&](auto& model, double value, const std::string& how) {
      for (const auto& entry : model.named_buffers())
        EXPECT_TRUE(entry.value().detach().eq(value).all().template item<bool>()) << how << entry.key();
      for (const auto& shard : model.named_shards())
        EXPECT_TRUE(shard.tensor.detach().eq(value).all().template item<bool>()) << how << shard.fqn;
    };
    save_checkpoint(folder / "a", fsdp, adam);
    load_checkpoint(folder / "a", other, other_adam);
    EXPECT_EQ(other.named_buffers().keys(), (std::vector<std::string>{"1.weight", "1.bias"}));
    expect_all(other, 1, "FSDP ");
    load_checkpoint(folder / "a", replicated);
    expect_all(replicated, 1, "replicated ");
    {
      const at::NoGradGuard no_grad;
      for (auto& parameter : replicated_net->parameters()) parameter.fill_(4);
    }
    save_checkpoint(folder / "b", replicated);
    load_checkpoint(folder / "b", fsdp);
    expect_all(fsdp, 4, "from replicated ");
    save_full(folder / "model.safetensors", fsdp);
    load_full(folder / "model.safetensors", other);
    expect_all(other, 4, "whole ");
    EXPECT_TRUE(other_net->parameters()[2].requires_grad());
  });
  EXPECT_EQ(contents(folder / "a").size(), 6U);
}

TEST(Checkpoint, EachRankReadsOnlyWhatItNeeds) {
  const TemporaryFolder folder;
  constexpr int64_t kBlock = 256;
  auto model_of = [](std::shared_ptr<Communicator> comm) {
    auto model = seeded(1, [] { return torch::nn::Sequential(torch::nn::Linear(64, 96), torch::nn::Linear(96, 128)); });
    return FullyShardedDataParallel(model, comm, {.auto_wrap = wrap_modules<torch::nn::LinearImpl>()});
  };
  on_ranks(4, [&](std::shared_ptr<Communicator> comm) {
    auto fsdp = model_of(comm);
    save_checkpoint(folder / "a", fsdp, {}, {.block_bytes = kBlock});
  });
  const Manifest manifest = read_manifest(folder / "a");
  int64_t headers = 0;
  for (const auto& file : with_every_slice(manifest.saved).files) headers += file.header_bytes;
  for (int world : {1, 2, 3, 4, 5}) {
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      auto fsdp = model_of(comm);
      int64_t bytes_read = 0;
      load_checkpoint(folder / "a", fsdp, {.bytes_read = &bytes_read});
      int64_t own = 0, ends = 0;
      for (const auto& shard : fsdp.named_shards()) {
        own += static_cast<int64_t>(shard.tensor.nbytes());
        // Each box may begin and end inside a block. A shard has at most 3 boxes.
        ends += shard.held.numel() > 0 ? 2 * 3 : 0;
      }
      EXPECT_GE(bytes_read, own);
      EXPECT_LE(bytes_read, own + headers + ends * kBlock);
      if (world == 1) {
        EXPECT_EQ(bytes_read, own + headers);
      }
    });
  }
}

TEST(Checkpoint, WhatDoesNotFitIsListedAndNothingChanges) {
  const TemporaryFolder folder;
  struct NetImpl : torch::nn::Module {
    NetImpl(int64_t width, bool other, at::ScalarType dtype) {
      a = register_parameter("a", torch::full({width, 3}, 1.0));
      b = register_parameter("b", torch::full({4}, 2.0, dtype));
      c = register_parameter(other ? "new" : "old", torch::full({2}, 3.0));
      d = register_buffer("d", torch::full({2}, 4.0));
    }
    at::Tensor a, b, c, d;
  };
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    auto saved = std::make_shared<NetImpl>(5, false, at::kFloat);
    Replicated model(saved, comm);
    Adam optimizer(model.parameters(), AdamOptions(1));
    save_checkpoint(folder / "a", model, optimizer);
    auto net = std::make_shared<NetImpl>(6, true, at::kDouble);
    Replicated other(net, comm);
    Adam others({torch::optim::OptimizerParamGroup({net->a}), torch::optim::OptimizerParamGroup({net->b, net->c})},
                AdamOptions(7));
    {
      const at::NoGradGuard no_grad;
      net->d.zero_();
    }
    const auto error = error_of<CheckpointError>([&] { load_checkpoint(folder / "a", other, others); });
    for (const char* part :
         {"rank 0", "missing from the checkpoint: new", "not in the model: old", "a is [5, 3], the model has [6, 3]",
          "b is Float, the model has Double", "has 1 groups, this has 2"})
      expect_contains(error, part);
    EXPECT_EQ(net->d.sum().item<double>(), 0.0);
    EXPECT_EQ(static_cast<AdamOptions&>(others.param_groups()[0].options()).lr(), 7.0);
    torch::optim::SGD sgd(model.parameters(), 0.1);
    expect_contains(error_of<CheckpointError>([&] { load_checkpoint(folder / "a", model, sgd); }),
                    "is Adam, this is SGD");
    // Not strict: loads the common names.
    auto third = std::make_shared<NetImpl>(5, true, at::kFloat);
    Replicated lenient(third, comm);
    {
      const at::NoGradGuard no_grad;
      for (auto& parameter : third->parameters()) parameter.zero_();
    }
    load_checkpoint(folder / "a", lenient, {.strict = false});
    EXPECT_EQ(third->a.sum().item<double>(), 15.0);
    EXPECT_EQ(third->c.sum().item<double>(), 0.0);
    expect_contains(error_of<CheckpointError>([&] { load_checkpoint(folder / "none", model); }), "no such directory");
    expect_contains(error_of<CheckpointError>([&] { load_checkpoint(folder.path(), model); }),
                    "latest_checkpoint() gives");
  });
}

// If the number of groups differs, each group keeps its own options, which may need more state than was saved.
template <class Optimizer, class Options>
void step_after_loading_into_two_groups(const std::shared_ptr<Communicator>& comm, const std::filesystem::path& folder,
                                        const Options& before, const Options& after) {
  FullyShardedDataParallel fsdp(on_rank_device(torch::nn::Linear(6, 6)), comm);
  const auto train = [&](torch::optim::Optimizer& optimizer) {
    optimizer.zero_grad();
    fsdp(on_rank_device(torch::ones({2, 6}))).sum().backward();
    optimizer.step();
  };
  Optimizer one(fsdp.parameters(), before);
  train(one);
  save_checkpoint(folder, fsdp, one);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const at::Tensor& parameter : fsdp.parameters())
    groups.emplace_back(std::vector<at::Tensor>{parameter}, std::make_unique<Options>(after));
  Optimizer two(groups, after);
  load_checkpoint(folder, fsdp, two, {.strict = false});
  EXPECT_NO_THROW(train(two));
}

TEST(Checkpoint, StatesAreCompletedForTheOptionsOfTheirGroups) {
  using namespace torch::optim;
  const TemporaryFolder folder;
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    step_after_loading_into_two_groups<Adam>(comm, folder / "adam", AdamOptions(), AdamOptions().amsgrad(true));
    step_after_loading_into_two_groups<torch::optim::AdamW>(comm, folder / "adamw", AdamWOptions(),
                                                            AdamWOptions().amsgrad(true));
    step_after_loading_into_two_groups<RMSprop>(comm, folder / "rmsprop", RMSpropOptions(),
                                                RMSpropOptions().centered(true).momentum(0.9));
  });
}

TEST(Checkpoint, OptimizersWithStatesAlikeAreToldApart) {
  const TemporaryFolder folder;
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    Replicated model(torch::nn::Linear(3, 3).ptr(), comm);
    torch::optim::AdamW adamw(model.parameters(), torch::optim::AdamWOptions(0.5));
    Lamb lamb(model.parameters(), torch::optim::AdamWOptions(0.25));
    save_checkpoint(folder / "adamw", model, adamw);
    save_checkpoint(folder / "lamb", model, lamb);
    expect_contains(error_of<CheckpointError>([&] { load_checkpoint(folder / "adamw", model, lamb); }),
                    "the checkpoint's is AdamW, this is Lamb");
    expect_contains(error_of<CheckpointError>([&] { load_checkpoint(folder / "lamb", model, adamw); }),
                    "the checkpoint's is Lamb, this is AdamW");
    AdamW fused(model.parameters(), torch::optim::AdamWOptions(1));
    load_checkpoint(folder / "adamw", model, fused);
    EXPECT_EQ(static_cast<torch::optim::AdamWOptions&>(fused.param_groups()[0].options()).lr(), 0.5);
    for (auto& parameter : model.parameters()) parameter.mutable_grad() = torch::ones_like(parameter);
    lamb.step();
    save_checkpoint(folder / "lamb", model, lamb);
    Lamb other(model.parameters(), torch::optim::AdamWOptions(1));
    load_checkpoint(folder / "lamb", model, other);
    EXPECT_EQ(other.state().size(), lamb.state().size());
  });
}

TEST(Checkpoint, MisuseIsAnErrorOnEveryRank) {
  const TemporaryFolder folder;
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    auto net = torch::nn::Linear(3, 3);
    Replicated model(net.ptr(), comm);
    Adam foreign({torch::ones({2}).requires_grad_()}, AdamOptions(1));
    expect_contains(error_of<std::invalid_argument>([&] { save_checkpoint(folder / "a", model, foreign); }),
                    "not one of the model's");
    nlohmann::json deep = 1;
    for (int i = 0; i < 40; ++i) deep = nlohmann::json::array({deep});
    expect_contains(error_of<std::invalid_argument>([&] { save_checkpoint(folder / "a", model, deep); }), "deeper");
    for (int i = 0; i < 200'000; ++i) {  // a copy of the result would overflow the stack
      auto outer = nlohmann::json::array();
      outer.push_back(std::move(deep));
      deep = std::move(outer);
    }
    expect_contains(error_of<std::invalid_argument>([&] { save_checkpoint(folder / "a", model, deep); }), "deeper");
    expect_contains(error_of<std::invalid_argument>([&] { save_checkpoint(folder / "a", model, {{"text", "\xff"}}); }),
                    "JSON");
    const double infinity = std::numeric_limits<double>::infinity();
    expect_contains(
        error_of<std::invalid_argument>([&] { save_checkpoint(folder / "a", model, {{"losses", {2.5, infinity}}}); }),
        "`extra/losses/1` is inf");
    expect_contains(
        error_of<std::invalid_argument>([&] { auto save = save_checkpoint_async(folder / "a", model, std::nan("")); }),
        "`extra` is nan");
    // Values that would change or be lost.
    expect_contains(error_of<std::invalid_argument>(
                        [&] { save_checkpoint(folder / "a", model, {{"key", nlohmann::json::binary({1, 2})}}); }),
                    "`extra/key` is binary");
    expect_contains(error_of<std::invalid_argument>(
                        [&] { save_checkpoint(folder / "a", model, nlohmann::json::parse("{", nullptr, false)); }),
                    "is_discarded()");
    expect_contains(
        error_of<std::invalid_argument>([&] { save_checkpoint(folder / "a", model, {}, {.rng = comm->rank() == 0}); }),
        "the ranks disagree about where to save");
    expect_contains(error_of<std::invalid_argument>([&] {
                      comm->rank() == 0 ? save_checkpoint(folder / "a", model)
                                        : save_checkpoint_async(folder / "a", model).wait();
                    }),
                    "the ranks disagree about where to save a checkpoint: rank 0 has 'asynchronous 0'");
    expect_contains(
        error_of<std::invalid_argument>([&] { save_checkpoint(folder / "a", model, {}, {.block_bytes = 3}); }),
        "block_bytes");
    expect_contains(
        error_of<std::invalid_argument>([&] { save_checkpoint(folder / std::to_string(comm->rank()), model); }),
        "the ranks disagree about where to save");
    EXPECT_FALSE(latest_checkpoint(folder.path()));
    comm->barrier();
    save_checkpoint(folder / "a", model);  // the group still works
    EXPECT_EQ(latest_checkpoint(folder.path()), folder / "a");
    DistributedSampler sampler(8, comm->rank(), comm->size());
    const auto state = comm->rank() == 0 ? TrainingState{model} : TrainingState{model, sampler};
    expect_contains(error_of<std::invalid_argument>([&] { save_checkpoint(folder / "a", state); }),
                    "rank 0 has 'nothing more', rank 1 has 'beside the model sampler'");
    Adam adam(model.parameters(), AdamOptions(1));
    save_checkpoint(folder / "a", model, adam);
    expect_contains(error_of<std::invalid_argument>([&] {
                      comm->rank() == 0 ? load_checkpoint(folder / "a", model, adam)
                                        : load_checkpoint(folder / "a", model);
                    }),
                    "the ranks disagree about which checkpoint to load");
    expect_contains(error_of<std::invalid_argument>(
                        [&] { load_checkpoint(folder / "a", model, adam, {.strict = comm->rank() == 0}); }),
                    "strict");
    const auto rename = [&](const std::string& name) { return comm->rank() == 1 ? throw 1 : name; };
    expect_contains(error_of<CheckpointError>([&] { load_checkpoint(folder / "a", model, {.rename = rename}); }),
                    "rank 1: an exception of unknown type");
  });
}

// Fine-tuning: a body with new names and its moments, and a new head.
TEST(Checkpoint, LoadsWithAnOptimizerWhereNamesDifferAndSomeAreNew) {
  struct Net : torch::nn::Module {
    Net(const char* body, const char* head) {
      register_module(body, torch::nn::Linear(4, 4));
      register_module(head, torch::nn::Linear(4, 2));
    }
  };
  const TemporaryFolder folder;
  auto fill = [](ModelShards& model, torch::optim::Optimizer& optimizer, double value) {
    for (auto& shard : model.named_shards()) shard.tensor.mutable_grad() = torch::full_like(shard.tensor, value);
    optimizer.step();
  };
  auto moments = [](ModelShards& model, torch::optim::Optimizer& optimizer) {
    std::map<std::string, at::Tensor> all;
    for (const auto& shard : model.named_shards())
      if (const auto found = optimizer.state().find(shard.tensor.unsafeGetTensorImpl());
          found != optimizer.state().end())
        all[shard.fqn] = static_cast<torch::optim::AdamParamState&>(*found->second).exp_avg();
    return all;
  };
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    Replicated saved(seeded(1, [] { return std::make_shared<Net>("body", "head"); }), comm);
    Adam adam(saved.parameters(), AdamOptions(0.25));
    fill(saved, adam, 1);
    save_checkpoint(folder / "a", saved, adam);
    Replicated model(std::make_shared<Net>("trunk", "fresh"), comm);
    for (bool two_groups : {false, true}) {
      auto parameters = model.parameters();
      std::vector<torch::optim::OptimizerParamGroup> groups;
      if (two_groups) groups.emplace_back(std::vector<at::Tensor>(parameters.begin() + 2, parameters.end()));
      groups.emplace_back(two_groups ? std::vector<at::Tensor>(parameters.begin(), parameters.begin() + 2)
                                     : parameters);
      Adam other(groups, AdamOptions(0.5));
      fill(model, other, 9);
      const auto before = moments(model, other);
      LoadOptions options{.rename = [](const std::string& name) {
        return name.starts_with("body.") ? "trunk." + name.substr(5) : name;
      }};
      const auto error = error_of<CheckpointMismatch>([&] { load_checkpoint(folder / "a", model, other, options); });
      for (const char* part : {"missing from the checkpoint: fresh.weight", "not in the model: head.bias"})
        expect_contains(error, part);
      LoadReport report;
      options.strict = false;
      options.report = &report;
      load_checkpoint(folder / "a", model, other, options);
      EXPECT_EQ(report.missing, (std::vector<std::string>{"fresh.weight", "fresh.bias"}));
      EXPECT_EQ(report.unexpected.size(), 6u);  // two tensors and their moments
      EXPECT_EQ(report.optimizer.empty(), false);
      EXPECT_EQ(static_cast<torch::optim::AdamOptions&>(other.param_groups()[0].options()).lr(),
                two_groups ? 0.5 : 0.25);
      auto after = moments(model, other), expected = moments(saved, adam);
      EXPECT_TRUE(torch::equal(after["trunk.weight"], expected["body.weight"]));
      EXPECT_TRUE(torch::equal(after["fresh.bias"], before.at("fresh.bias")));
      EXPECT_TRUE(torch::equal(model.parameters()[0].detach(), saved.parameters()[0].detach()));
    }
  });
}

// parameters() lists a tied parameter under each name, and so do optimizers built from it. Checkpoints may also have it
// several times.
TEST(Checkpoint, ATiedParameterThatAGroupListsTwiceIsOne) {
  struct Tied : torch::nn::Module {
    Tied() {
      register_module("embedding", embedding);
      register_module("head", std::make_shared<torch::nn::Module>())->register_parameter("weight", embedding->weight);
    }
    torch::nn::Linear embedding{4, 4};
  };
  const TemporaryFolder folder;
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    const auto check = [&](const std::string& name, auto make) {
      const auto net = seeded(1, [] { return std::make_shared<Tied>(); });
      Replicated model(net, comm);
      ASSERT_EQ(net->parameters().size(), 3U);
      auto optimizer = make(net->parameters());
      const auto step = [&](double gradient) {
        for (auto& parameter : model.parameters()) parameter.mutable_grad() = torch::full_like(parameter, gradient);
        optimizer.step();
        return net->embedding->weight.detach().clone();
      };
      step(1);
      save_checkpoint(folder / name, model, optimizer);
      const at::Tensor next = step(2);
      comm->barrier();
      if (comm->rank() == 0) {
        Manifest manifest = read_manifest(folder / name);
        auto& names = manifest.optimizers.at("").groups.at(0).parameters;
        EXPECT_EQ(names, (std::vector<std::string>{"embedding.weight", "embedding.bias"}));
        names.emplace_back("embedding.weight");
        std::filesystem::copy(folder / name, folder / (name + "-twice"));
        std::ofstream(folder / (name + "-twice") / kManifestName) << format_manifest(manifest);
      }
      comm->barrier();
      for (const char* further : {"", "-twice"}) {
        load_checkpoint(folder / (name + further), model, optimizer);
        EXPECT_TRUE(torch::equal(step(2), next)) << name << further;
      }
    };
    check("torch", [](const auto& parameters) { return Adam(parameters, AdamOptions(0.1)); });
    check("oss", [&](const auto& parameters) { return OSS<Adam>(parameters, AdamOptions(0.1), comm); });
  });
}

// A checkpoint of this library has a tied parameter once, under one name, and lists its other names.
TEST(Checkpoint, ATiedParameterIsLoadedByTheNameThatIsNotLeftOut) {
  struct Tied : torch::nn::Module {
    Tied() {
      register_module("embed", embed);
      register_module("head", std::make_shared<torch::nn::Module>())->register_parameter("weight", embed->weight);
    }
    torch::nn::Linear embed{torch::nn::LinearOptions(4, 4).bias(false)};
  };
  struct Head : torch::nn::Module {
    Head() { register_module("head", head); }
    torch::nn::Linear head{torch::nn::LinearOptions(4, 4).bias(false)};
  };
  const TemporaryFolder folder;
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    Replicated saved(seeded(1, [] { return std::make_shared<Tied>(); }), comm);
    save_checkpoint(folder / "a", saved);
    Replicated model(seeded(2, [] { return std::make_shared<Head>(); }), comm);
    const auto without_embed = [](const std::string& name) { return name == "embed.weight" ? "" : name; };
    load_checkpoint(folder / "a", model, {.rename = without_embed});
    EXPECT_TRUE(torch::equal(model.parameters().at(0), saved.parameters().at(0)));
  });
}

TEST(Checkpoint, ConvertsParametersAndMomentsToTheModelsDtype) {
  const TemporaryFolder folder;
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    auto net = seeded(1, [] { return torch::nn::Linear(5, 3); });
    auto half = seeded(2, [] { return torch::nn::Linear(5, 3); });  // one generator for all threads
    half->to(at::kBFloat16);
    Replicated model(net.ptr(), comm), narrow(half.ptr(), comm);
    Adam adam(model.parameters(), AdamOptions(0.1)), other(narrow.parameters(), AdamOptions(0.1));
    for (auto& parameter : model.parameters()) parameter.mutable_grad() = torch::full_like(parameter, 0.3);
    adam.step();
    save_checkpoint(folder / "a", model, adam);
    EXPECT_THROW(load_checkpoint(folder / "a", narrow, other), CheckpointMismatch);
    load_checkpoint(folder / "a", narrow, other, {.convert_dtypes = true});
    for (size_t i = 0; i < 2; ++i) {
      const at::Tensor own = model.parameters()[i], taken = narrow.parameters()[i];
      EXPECT_TRUE(torch::equal(taken.detach(), own.detach().to(at::kBFloat16)));
      auto moment = [](Adam& optimizer, const at::Tensor& parameter) {
        return static_cast<torch::optim::AdamParamState&>(*optimizer.state().at(parameter.unsafeGetTensorImpl()))
            .exp_avg();
      };
      EXPECT_TRUE(torch::equal(moment(other, taken), moment(adam, own).to(at::kBFloat16)));
    }
  });
}

// Averages that an optimizer keeps in fp32 for 16-bit parameters stay in fp32.
TEST(Checkpoint, KeepsAveragesInFp32ForAModelOf16Bits) {
  const TemporaryFolder folder;
  on_ranks(1, [&](std::shared_ptr<Communicator> comm) {
    const auto expect_kept = [&]<class Optimizer, class Options>(Optimizer*, const Options& options) {
      auto net = seeded(1, [] { return torch::nn::Linear(5, 3); });
      auto half = seeded(2, [] { return torch::nn::Linear(5, 3); });
      half->to(at::kBFloat16);
      Replicated model(net.ptr(), comm), narrow(half.ptr(), comm);
      Optimizer own(model.parameters(), options), other(narrow.parameters(), options);
      for (auto& parameter : model.parameters()) parameter.mutable_grad() = torch::full_like(parameter, 0.3);
      own.step();
      save_checkpoint(folder / "a", model, own);
      load_checkpoint(folder / "a", narrow, other, {.convert_dtypes = true});
      for (size_t i = 0; i < 2; ++i) {
        const auto saved = read_state(*own.state().at(model.parameters()[i].unsafeGetTensorImpl()));
        const auto loaded = read_state(*other.state().at(narrow.parameters()[i].unsafeGetTensorImpl()));
        ASSERT_EQ(loaded.tensors.size(), saved.tensors.size());
        for (size_t k = 0; k < saved.tensors.size(); ++k)
          EXPECT_TRUE(same_values(loaded.tensors[k].second, saved.tensors[k].second)) << saved.tensors[k].first;
      }
      for (auto& parameter : narrow.parameters()) parameter.mutable_grad() = torch::full_like(parameter, 0.3);
      other.step();
    };
    expect_kept(static_cast<AdamW8bit*>(nullptr), AdamW8bitOptions(0.1));
    expect_kept(static_cast<Adafactor*>(nullptr), AdafactorOptions(0.1));
  });
}

TEST(Checkpoint, GeneratorsGoOnWhereTheyWere) {
  const TemporaryFolder folder;
  on_ranks(1, [&](std::shared_ptr<Communicator> comm) {
    Replicated model(torch::nn::Linear(3, 3).ptr(), comm);
    save_checkpoint(folder / "a", model);
    const at::Tensor next = torch::rand({5});
    load_checkpoint(folder / "a", model, {.rng = false});
    EXPECT_FALSE(torch::equal(torch::rand({5}), next));
    load_checkpoint(folder / "a", model);
    EXPECT_TRUE(torch::equal(torch::rand({5}), next));
  });
}

TEST(Checkpoint, TheNewestStayAndLatestIsTheLastSaved) {
  const TemporaryFolder folder;
  EXPECT_FALSE(latest_checkpoint(folder.path()));
  EXPECT_FALSE(latest_checkpoint(folder / "none"));
  std::filesystem::create_directories(folder / "notes");
  std::filesystem::create_directories(folder / ".step-1.saving-0123456789abcdef");
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    Replicated model(torch::nn::Linear(3, 3).ptr(), comm);
    for (const char* name : {"step-8", "step-9", "step-10", "step-2"})
      save_checkpoint(folder / name, model, {{"name", name}}, {.keep_last = 2});
  });
  EXPECT_EQ(latest_checkpoint(folder.path()), folder / "step-2");
  expect_eventually(folder.path(), {"notes", "step-10", "step-2"});
}

TEST(Checkpoint, KeepsWhatIsReadAndWhatIsNoCheckpointOfItsOwn) {
  const TemporaryFolder folder;
  auto save = [&](const std::string& name, int keep) {
    on_ranks(1, [&](std::shared_ptr<Communicator> comm) {
      Replicated model(torch::nn::Linear(3, 3).ptr(), comm);
      save_checkpoint((folder / name).string() + "/", model, {{"name", name}}, {.keep_last = keep});
    });
  };
  save("a", 0);
  save("b", 0);
  std::filesystem::create_directory_symlink("b", folder / "newest");
  {
    const ReadLock hold(folder / "a"), replaced(folder / "b");
    save("c", 1);
    expect_eventually(folder.path(), {"a", "b", "c", "newest"});
    save("b", 0);  // the old one's files stay for its readers
    EXPECT_EQ(names_in(folder.path()).size(), 5u);
  }
  save("d", 1);
  expect_eventually(folder.path(), {"d", "newest"});
  EXPECT_EQ(latest_checkpoint(folder.path()), folder / "d");
}

// For example, one job evaluates the newest checkpoint while another trains and replaces it.
TEST(Checkpoint, OneThatIsReplacedWhileItIsReadIsReadToItsEnd) {
  const TemporaryFolder folder;
  std::atomic<int> replacements = 0;
  struct Replaces : Stateful {
    std::function<void()> replace;
    std::string state_name() const override { return "mine"; }
    StateValues state_values() const override { return {}; }
    void check_state_values(const StateValues&) const override {
      if (replace) replace();
    }
    void load_state_values(const StateValues&) override {}
  };
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    FullyShardedDataParallel fsdp(on_rank_device(torch::nn::Linear(30, 30)), comm);
    Replaces mine;
    auto fill = [&](int value) {
      const at::NoGradGuard no_grad;
      for (auto& shard : fsdp.parameters()) shard.fill_(value);
    };
    for (int step : {1, 2}) {
      fill(step);
      save_checkpoint(folder / ("other/" + std::to_string(step)), {fsdp, mine}, {{"step", step}});
    }
    save_checkpoint(folder / "run/newest", {fsdp, mine}, {{"step", 2}});
    const int rank = comm->rank();
    mine.replace = [&, rank] {
      if (rank != 1) return;
      reshard_checkpoint(folder / ("other/" + std::to_string(1 + replacements % 2)), folder / "run/newest", 2);
      ++replacements;
    };
    for (int i = 0; i < 2; ++i) {
      fill(9);
      EXPECT_EQ(load_checkpoint(folder / "run/newest", {fsdp, mine})["step"], 2);
      for (const auto& shard : fsdp.parameters()) EXPECT_TRUE(shard.detach().eq(2).all().item<bool>());
      EXPECT_EQ(replacements, 2 * i + 2);
      comm->barrier();
    }
    const auto newest = load_newest_checkpoint(folder / "run", {fsdp, mine});
    ASSERT_TRUE(newest);
    EXPECT_EQ(newest->damaged, std::vector<std::string>());
    mine.replace = nullptr;
  });
}

// Such names would look like leftovers of a killed save, or make their folder look like a checkpoint.
TEST(Checkpoint, NamesThatMeanSomethingElseAreRefused) {
  const TemporaryFolder folder;
  on_ranks(1, [&](std::shared_ptr<Communicator> comm) {
    Replicated model(torch::nn::Linear(3, 3).ptr(), comm);
    for (const char* name : {".a.saving-0123456789abcdef", ".b.making-1", "tessera.json", ".manifest"})
      expect_contains(error_of<CheckpointError>([&] { save_checkpoint(folder / name, model); }),
                      "is not a name for a checkpoint");
    save_checkpoint(folder / "a.saving-1", model, {}, {.keep_last = 1});
  });
  EXPECT_EQ(names_in(folder.path()), std::set<std::string>{"a.saving-1"});
}

TEST(Checkpoint, ReplacesACheckpointAndNothingElse) {
  const TemporaryFolder folder;
  std::filesystem::create_directories(folder / "empty");
  std::filesystem::create_directories(folder / "mine");
  std::ofstream(folder / "mine/thesis.txt") << "years of work";
  std::filesystem::create_directories(folder / "disk/runs");
  std::filesystem::create_directory_symlink(folder / "disk/runs", folder / "runs");
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    Replicated model(torch::nn::Linear(3, 3).ptr(), comm);
    for (int step : {1, 2, 3}) save_checkpoint(folder / "a/b/", model, {{"step", step}});
    EXPECT_EQ(load_checkpoint(folder / "a/b", model)["step"], 3);
    save_checkpoint(folder / "empty", model);
    expect_contains(error_of<CheckpointError>([&] { save_checkpoint(folder / "mine", model); }),
                    "something else than a checkpoint");
    expect_contains(error_of<CheckpointError>([&] { save_checkpoint(folder / "mine/thesis.txt", model); }),
                    "not a directory");
    expect_contains(error_of<CheckpointError>([&] { save_checkpoint(folder / "mine/thesis.txt/a", model); }), "rank 0");
    // The system resolves `..` to the parent of the link's target.
    save_checkpoint(folder / "runs/../behind", model, {{"step", 7}});
    EXPECT_EQ(load_checkpoint(folder / "runs/../behind", model)["step"], 7);
    EXPECT_EQ(load_checkpoint(folder / "disk/behind", model)["step"], 7);
    save_checkpoint(folder / "missing/../beside", model, {{"step", 8}});
    EXPECT_EQ(load_checkpoint(folder / "missing/../beside", model)["step"], 8);
  });
  EXPECT_TRUE(std::filesystem::exists(folder / "mine/thesis.txt"));
  expect_eventually(folder / "a", {"b"});
}

// For example, a configuration file beside the weights: it must stay in the checkpoint of that name.
TEST(Checkpoint, WhatNoSaveHasWrittenIsNeverRemoved) {
  const TemporaryFolder folder;
  auto save = [&](const std::string& name, int keep = 0) {
    on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      Replicated model(torch::nn::Linear(3, 3).ptr(), comm);
      for (const bool in_background : {false, true})
        if (in_background)
          save_checkpoint_async(folder / name, model, {{"name", name}}, {.keep_last = keep}).wait();
        else
          save_checkpoint(folder / name, model, {{"name", name}}, {.keep_last = keep});
    });
  };
  const auto is_own = [&](const std::string& name) {
    return file_bytes(folder / (name + "/config.json")) == "mine" &&
           file_bytes(folder / (name + "/eval/a.txt")) == "too";
  };
  const std::set<std::string> saved{"tessera.json", "rank-00000-0.safetensors", "rank-00001-0.safetensors"};
  std::set<std::string> with_own = saved;
  with_own.insert({"config.json", "eval"});
  for (const std::string name : {"last", "step-1"}) {
    save(name);
    folder.write(name + "/config.json", "mine");
    folder.write(name + "/eval/a.txt", "too");
  }
  save("last");
  EXPECT_EQ(names_in(folder / "last"), with_own);
  EXPECT_TRUE(is_own("last"));
  {
    const ReadLock hold(folder / "last");  // a reader of the old checkpoint must not hide the user's files
    save("last");
    EXPECT_TRUE(is_own("last"));
  }
  save("last");
  EXPECT_EQ(verify_checkpoint(folder / "last"), std::vector<std::string>());
  expect_eventually(folder.path(), {"last", "step-1"});
  // As if the save was killed right after the exchange.
  std::filesystem::rename(folder / "step-1", folder / ".last.saving-0123456789abcdef");
  std::filesystem::remove_all(folder / "last/eval");
  std::filesystem::remove(folder / "last/config.json");
  save("last");
  EXPECT_TRUE(is_own("last"));
  expect_eventually(folder.path(), {"last"});
  // Removing a checkpoint leaves the user's files at its path.
  save("step-2", 1);
  expect_eventually(folder / "last", {"config.json", "eval"});
  EXPECT_TRUE(is_own("last"));
  expect_eventually(folder.path(), {"last", "step-2"});
  EXPECT_EQ(names_in(folder / "step-2"), saved);
}

TEST(Checkpoint, TheNewestThatIsSoundIsLoaded) {
  const TemporaryFolder folder;
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    auto net = seeded(1, [] { return torch::nn::Linear(3, 3); });
    Replicated model(net.ptr(), comm);
    Adam adam(model.parameters(), AdamOptions(0.1));
    EXPECT_FALSE(load_newest_checkpoint(folder.path(), model, adam));
    for (int step : {1, 2, 3}) save_checkpoint(folder / std::to_string(step), model, adam, {{"step", step}});
    EXPECT_EQ(load_newest_checkpoint(folder.path(), model, adam)->extra["step"], 3);
    comm->barrier();
    if (comm->rank() == 0) {
      std::filesystem::remove(folder / "3/rank-00000-0.safetensors");
      std::filesystem::resize_file(folder / "2/tessera.json", 400);
    }
    comm->barrier();
    const auto loaded = load_newest_checkpoint(folder.path(), model, adam);
    ASSERT_TRUE(loaded);
    EXPECT_EQ(loaded->path, folder / "1");
    ASSERT_EQ(loaded->damaged.size(), 2u);
    expect_contains(loaded->damaged[0], "2/tessera.json: not JSON");
    expect_contains(loaded->damaged[1], "No such file");
    Replicated wrong(torch::nn::Linear(4, 3).ptr(), comm);
    Adam of_wrong(wrong.parameters(), AdamOptions(0.1));
    comm->barrier();
    if (comm->rank() == 0) std::filesystem::remove(folder / "1/tessera.json");
    comm->barrier();
    expect_contains(error_of<CheckpointError>([&] { load_newest_checkpoint(folder.path(), model, adam); }),
                    "none of its checkpoints can be read");
    save_checkpoint(folder / "4", model, adam);
    EXPECT_THROW(load_newest_checkpoint(folder.path(), wrong, of_wrong), CheckpointMismatch);
  });
}

// The user gave a checkpoint in place of its folder. Without the error, a program that resumes would start anew.
TEST(Checkpoint, TheNewestInACheckpointIsRefusedByName) {
  const TemporaryFolder folder;
  folder.write("mine/tessera.json", "{}");  // of another program: no checkpoint, and no error
  folder.write("mine/notes.txt", "mine");
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    Replicated model(torch::nn::Linear(3, 3).ptr(), comm);
    save_checkpoint(folder / "last", model);
    for (const auto& error :
         {error_of<CheckpointError>([&] { static_cast<void>(load_newest_checkpoint(folder / "last", {model})); }),
          error_of<CheckpointError>([&] { latest_checkpoint(folder / "last"); })})
      expect_contains(error, (folder / "last").string() + ": is a checkpoint itself");
    EXPECT_FALSE(load_newest_checkpoint(folder / "mine", {model}));
    EXPECT_TRUE(load_newest_checkpoint(folder.path(), {model}));
    comm->barrier();
    if (comm->rank() == 0) std::filesystem::resize_file(folder / "last/tessera.json", 5);  // damaged; still the newest
    comm->barrier();
    expect_contains(
        error_of<CheckpointError>([&] { static_cast<void>(load_newest_checkpoint(folder / "last", {model})); }),
        "is a checkpoint itself");
  });
}

// A run that begins anew there could lose the progress of an older one: its disk may not be mounted.
TEST(Checkpoint, TheNewestInWhatIsNoFolderIsRefusedByName) {
  const TemporaryFolder folder;
  folder.write("file", "");
  std::filesystem::create_symlink(folder / "unmounted", folder / "link");
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    Replicated model(torch::nn::Linear(3, 3).ptr(), comm);
    for (const char* name : {"file", "link"})
      for (const auto& error :
           {error_of<CheckpointError>([&] { static_cast<void>(load_newest_checkpoint(folder / name, {model})); }),
            error_of<CheckpointError>([&] { latest_checkpoint(folder / name); })})
        expect_contains(error, (folder / name).string() + ": is not a directory");
    EXPECT_FALSE(load_newest_checkpoint(folder / "unmounted", {model}));
  });
}

// One unit is summoned. The other could be written, which would leave a half-loaded model.
TEST(CheckpointLoad, InsideSummonFullParamsIsRefusedBeforeAnythingHasChanged) {
  const TemporaryFolder folder;
  const auto refuses = [&](std::shared_ptr<Communicator> comm, const CpuOffload& offload) {
    auto net = on_rank_device(torch::nn::Sequential(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4)));
    FullyShardedDataParallel fsdp(net, comm, {.auto_wrap = wrap_modules<torch::nn::LinearImpl>(), .offload = offload});
    save_checkpoint(folder / "a", fsdp);
    {
      const at::NoGradGuard no_grad;
      for (auto& shard : fsdp.parameters()) shard.fill_(3);
    }
    {
      auto full = fsdp.summon_full_params({.units = {"1"}});
      expect_contains(error_of<CheckpointError>([&] { load_checkpoint(folder / "a", fsdp); }),
                      "inside summon_full_params()");
    }
    for (const auto& shard : fsdp.parameters()) EXPECT_TRUE(shard.detach().eq(3).all().item<bool>());
    load_checkpoint(folder / "a", fsdp);
    EXPECT_FALSE(fsdp.parameters()[0].detach().eq(3).all().item<bool>());
  };
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    refuses(comm, {});
    refuses(comm, {.params = true, .grads = true, .directory = folder.path()});
  });
}

// Its elements share memory, so they cannot all be written.
TEST(CheckpointLoad, ABufferThatIsExpandedIsLoadedOrRefusedBeforeAnythingHasChanged) {
  const TemporaryFolder folder;
  struct NetImpl : torch::nn::Module {
    NetImpl(double value, bool is_expanded) {
      weight = register_parameter("weight", torch::full({4}, value));
      const at::Tensor row = torch::full({1, 3}, value);
      buffer = register_buffer("buffer", is_expanded ? row.expand({2, 3}) : torch::arange(6.0).view({2, 3}));
    }
    at::Tensor weight, buffer;
  };
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    const auto net = std::make_shared<NetImpl>(1, true), other = std::make_shared<NetImpl>(2, true),
               whole = std::make_shared<NetImpl>(3, false);
    Replicated model(net, comm), to(other, comm), several(whole, comm);
    save_checkpoint(folder / "a", model);
    save_full(folder / "a.safetensors", model);
    save_checkpoint(folder / "b", several);
    load_checkpoint(folder / "a", to);
    EXPECT_TRUE(other->buffer.eq(1).all().item<bool>() && other->weight.eq(1).all().item<bool>());
    other->buffer.narrow(0, 0, 1).zero_();
    load_full(folder / "a.safetensors", to);
    EXPECT_TRUE(other->buffer.eq(1).all().item<bool>());
    expect_contains(error_of<CheckpointMismatch>([&] { load_checkpoint(folder / "b", to); }),
                    "expanded in the model, saved with several values: buffer");
    EXPECT_TRUE(other->weight.detach().eq(1).all().item<bool>());
  });
}

// Columns of a table, and an expanded value.
struct OddlyLaidImpl : torch::nn::Module {
  explicit OddlyLaidImpl(double value, bool is_expanded = true) : table(torch::full({4, 3}, value)) {
    columns = register_parameter("columns", table.slice(1, 0, 2));
    scale = register_parameter(
        "scale", is_expanded ? torch::full({1, 3}, value).expand({2, 3}) : torch::arange(6.0).view({2, 3}),
        /*requires_grad=*/false);
  }
  at::Tensor forward(const at::Tensor& input) { return input.matmul(columns) + scale.sum(); }
  at::Tensor table, columns, scale;
};
TORCH_MODULE(OddlyLaid);

TEST(CheckpointSave, ParametersOfAnyStridesAreSavedDenseAndLoaded) {
  const TemporaryFolder folder;
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    OddlyLaid net(1), other(2), several(3, /*is_expanded=*/false);
    DistributedDataParallel model(net, comm), to(other, comm), of_several(several, comm);
    Adam adam(model.parameters(), AdamOptions(0.1)), of_other(to.parameters(), AdamOptions(0.1));
    auto step = [](auto& wrapper, Adam& optimizer) {
      optimizer.zero_grad();
      wrapper.forward(torch::ones({2, 4})).pow(2).sum().backward();
      optimizer.step();
    };
    step(model, adam);
    save_checkpoint(folder / "a", model, adam);
    save_checkpoint_async(folder / "b", model, adam, {}, {.copy_in_background = true}).wait();
    save_full(folder / "a.safetensors", model);
    save_checkpoint(folder / "several", of_several);
    auto expect_loaded = [&](const std::string& name, const std::function<void()>& load) {
      const at::NoGradGuard no_grad;
      other->columns.fill_(7);
      other->scale.narrow(0, 0, 1).fill_(7);
      load();
      EXPECT_TRUE(torch::equal(other->columns, net->columns)) << name;
      EXPECT_TRUE(other->scale.eq(1).all().item<bool>()) << name;
      EXPECT_TRUE(other->table.select(1, 2).eq(2).all().item<bool>()) << name << ": what is not a parameter's";
    };
    for (const char* name : {"a", "b"}) expect_loaded(name, [&] { load_checkpoint(folder / name, to, of_other); });
    expect_loaded("full", [&] { load_full(folder / "a.safetensors", to); });
    FullyShardedDataParallel fsdp(OddlyLaid(4), comm);
    load_checkpoint(folder / "a", fsdp);
    EXPECT_TRUE(torch::equal(fsdp.full_state_dict()["columns"], net->columns.detach()));
    step(model, adam);
    step(to, of_other);
    EXPECT_TRUE(torch::equal(other->columns, net->columns)) << "the moments, too";
    expect_contains(error_of<CheckpointMismatch>([&] { load_checkpoint(folder / "several", to); }),
                    "expanded in the model, saved with several values: scale");
    EXPECT_TRUE(torch::equal(other->columns, net->columns)) << "nothing has changed";
  });
}

// Tensors whose memory differs from the values that operators see; large enough to be wrapped alone.
struct LazyImpl : torch::nn::Module {
  LazyImpl(double value, bool is_lazy) {
    const auto made = [&](const at::Tensor& tensor) { return is_lazy ? tensor : tensor.clone(); };
    const auto complex = [&] {
      return torch::complex(torch::full({400, 400}, value), torch::full({400, 400}, 2 * value));
    };
    conjugate = register_buffer("conjugate", made(complex().conj()));
    imaginary = register_buffer("imaginary", made(at::imag(complex().conj())));
    frozen = register_parameter("frozen", made(complex().conj()), /*requires_grad=*/false);
    weight = register_parameter("weight", made(at::_neg_view(torch::full({3, 2}, value))));
  }
  at::Tensor forward(const at::Tensor& input) { return input.matmul(weight); }
  at::Tensor conjugate, imaginary, frozen, weight;
};
TORCH_MODULE(Lazy);

TEST(CheckpointSave, HasTheValuesOfConjugateAndNegativeBits) {
  const TemporaryFolder folder;
  const auto moment = [](Adam& adam, const at::Tensor& parameter) -> at::Tensor& {
    return static_cast<torch::optim::AdamParamState&>(*adam.state().at(parameter.unsafeGetTensorImpl())).exp_avg();
  };
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    Lazy net(1, true);
    ASSERT_TRUE(net->conjugate.is_conj() && net->imaginary.is_neg() && net->frozen.is_conj() && net->weight.is_neg());
    DistributedDataParallel model(net, comm);
    Adam adam(model.parameters(), AdamOptions(0.1));
    model.forward(torch::ones({1, 3})).sum().backward();
    adam.step();
    at::Tensor& own = moment(adam, net->weight);
    own = at::_neg_view(own.neg());
    save_checkpoint(folder / "a", model, adam);
    save_checkpoint_async(folder / "b", model, adam).wait();
    save_full(folder / "a.safetensors", model);
    for (const bool is_lazy : {false, true}) {
      Lazy other(2, is_lazy);
      DistributedDataParallel to(other, comm);
      Adam of_other(to.parameters(), AdamOptions(0.1));
      const auto expect_loaded = [&](const std::string& name) {
        const at::NoGradGuard no_grad;
        for (const auto& [key, tensor] : {std::pair("conjugate", other->conjugate), {"imaginary", other->imaginary}})
          EXPECT_TRUE(torch::equal(tensor.clone(), net->named_buffers()[key].clone())) << name << key << is_lazy;
        for (const auto& [key, tensor] : {std::pair("frozen", other->frozen), {"weight", other->weight}})
          EXPECT_TRUE(torch::equal(tensor.clone(), net->named_parameters()[key].clone())) << name << key << is_lazy;
        for (const auto& tensor : {other->conjugate, other->imaginary, other->frozen, other->weight}) tensor.zero_();
      };
      for (const char* name : {"a", "b"}) {
        load_checkpoint(folder / name, to, of_other);
        expect_loaded(name);
        EXPECT_TRUE(torch::equal(moment(of_other, other->weight), own.clone())) << name;
      }
      load_full(folder / "a.safetensors", to);
      expect_loaded("full");
    }
  });
}

TEST(CheckpointSave, ASparseBufferIsRefusedByName) {
  struct Sparse : torch::nn::Module {
    Sparse() { register_buffer("mask", torch::eye(3).to_sparse()); }
  };
  const TemporaryFolder folder;
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    Replicated model(std::make_shared<Sparse>(), comm);
    for (const auto& error : {error_of<std::invalid_argument>([&] { save_checkpoint(folder / "a", model); }),
                              error_of<std::invalid_argument>([&] { save_full(folder / "a.safetensors", model); })})
      expect_contains(error, "rank 0: 'mask' has layout Sparse, expected a strided one");
    struct WithSparse : torch::nn::LinearImpl {
      WithSparse() : LinearImpl(2, 2) { register_buffer("mask", torch::eye(3).to_sparse()); }
    };
    for (const auto& error :
         {error_of<std::invalid_argument>([&] { DistributedDataParallel ddp(std::make_shared<WithSparse>(), comm); }),
          error_of<std::invalid_argument>(
              [&] { FullyShardedDataParallel fsdp(std::make_shared<WithSparse>(), comm); })})
      expect_contains(error, "buffer 'mask' has layout Sparse, expected a strided one");
  });
}

// Copies between ranks would lose the scales of quantized tensors, and fail without a name for nested or meta tensors.
TEST(CheckpointSave, QuantizedNestedAndMetaTensorsAreRefusedByName) {
  struct WithOther : torch::nn::LinearImpl {
    WithOther(const at::Tensor& other, bool is_buffer, at::Device device) : LinearImpl(2, 2) {
      to(device);  // `other` stays on the CPU: simulated devices cannot hold all kinds
      is_buffer ? register_buffer("other", other) : register_parameter("other", other, /*requires_grad=*/false);
    }
  };
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    for (const auto& [other, kind] : std::vector<std::pair<at::Tensor, std::string>>{
             {torch::quantize_per_tensor(torch::ones({3}), 0.5, 0, at::kQInt8), "is quantized"},
             {at::_nested_tensor_from_tensor_list({torch::ones({2}), torch::ones({3})}), "is nested"},
             {torch::empty({3}, at::kMeta), "is on meta"}})
      for (const bool is_buffer : {true, false}) {
        const auto model = std::make_shared<WithOther>(other, is_buffer, comm->device());
        const std::string name = is_buffer ? "buffer 'other' " : "parameter 'other' on rank ";
        for (const auto& error :
             {error_of<std::invalid_argument>([&] { DistributedDataParallel ddp(model, comm); }),
              error_of<std::invalid_argument>([&] { FullyShardedDataParallel fsdp(model, comm); })}) {
          expect_contains(error, name);
          expect_contains(error, kind + ", expected a strided one with values");
        }
      }
  });
}

// A module whose buffer was created in inference mode.
struct EvaluatedImpl : torch::nn::Module {
  explicit EvaluatedImpl(double value) {
    weight = register_parameter("weight", torch::full({3}, value));
    const c10::InferenceMode mode;
    table = register_buffer("table", torch::full({3}, value));
  }
  at::Tensor forward(const at::Tensor& input) { return input * weight; }
  at::Tensor weight, table;
};
TORCH_MODULE(Evaluated);

TEST(CheckpointLoad, WritesToBuffersThatWereMadeUnderInferenceMode) {
  const TemporaryFolder folder;
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    Evaluated net(1), other(2);
    ASSERT_TRUE(other->table.is_inference());
    DistributedDataParallel model(net, comm), to(other, comm);
    Adam adam(model.parameters(), AdamOptions(0.1)), of_other(to.parameters(), AdamOptions(0.1));
    const auto step = [](auto& wrapper, Adam& optimizer) {
      wrapper.forward(torch::ones({3})).sum().backward();
      optimizer.step();
    };
    step(model, adam);
    save_checkpoint(folder / "a", model, adam);
    for (const bool in_inference : {false, true}) {
      {
        const at::NoGradGuard no_grad;
        other->weight.fill_(7);
      }
      std::optional<c10::InferenceMode> mode;
      if (in_inference) mode.emplace();
      load_checkpoint(folder / "a", to, of_other);
      mode.reset();
      EXPECT_TRUE(other->table.eq(1).all().item<bool>());
      EXPECT_TRUE(torch::equal(other->weight, net->weight));
      step(to, of_other);  // states are ordinary tensors
    }
  });
}

// Detected before anything is written.
TEST(CheckpointLoad, ABufferThatNobodyCanWriteToIsNamedAndNothingChanges) {
  struct Zeros : torch::nn::Module {
    explicit Zeros(double value) {
      weight = register_parameter("weight", torch::full({3}, value));
      register_buffer("zeros", at::_efficientzerotensor({3}, at::TensorOptions(at::kFloat)));
    }
    at::Tensor weight;
  };
  const TemporaryFolder folder;
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    const auto net = std::make_shared<Zeros>(1), other = std::make_shared<Zeros>(2);
    Replicated model(net, comm), to(other, comm);
    save_checkpoint(folder / "a", model);
    expect_contains(error_of<CheckpointMismatch>([&] { load_checkpoint(folder / "a", to); }),
                    "cannot be written to: zeros (");
    EXPECT_TRUE(other->weight.detach().eq(2).all().item<bool>());
  });
}

// Saves the visible values, also those set by set_data() before any forward.
TEST(CheckpointSave, HasWhatTheModulesParametersShow) {
  const TemporaryFolder folder;
  for (const bool on_disk : {false, true})
    for (int world : {1, 2})
      on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
        auto net = on_rank_device(torch::nn::Sequential(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4)));
        FsdpOptions options{.auto_wrap = wrap_modules<torch::nn::LinearImpl>()};
        if (on_disk) options.offload = {.params = true, .grads = true, .directory = folder.path()};
        FullyShardedDataParallel fsdp(net, comm, options);
        const auto read_back = [&](auto save) {
          save();
          torch::nn::Sequential other(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
          Replicated loaded(other.ptr(), comm);
          std::filesystem::is_directory(folder / "a") ? void(load_checkpoint(folder / "a", loaded))
                                                      : void(load_full(folder / "a", loaded));
          comm->barrier();
          if (comm->rank() == 0) std::filesystem::remove_all(folder / "a");
          comm->barrier();
          return other->named_parameters()["1.weight"].detach();
        };
        const auto expect_saved = [&](double value) {
          const auto is_saved = [&](auto save) { return read_back(save).eq(value).all().template item<bool>(); };
          EXPECT_TRUE(is_saved([&] { save_checkpoint(folder / "a", fsdp); })) << value;
          EXPECT_TRUE(is_saved([&] { save_checkpoint_async(folder / "a", fsdp).wait(); })) << value;
          EXPECT_TRUE(is_saved([&] { save_full(folder / "a", fsdp); })) << value;
          EXPECT_TRUE(fsdp.full_state_dict()["1.weight"].eq(value).all().item<bool>()) << value;
        };
        const auto weight = [&] { return net->named_parameters()["1.weight"]; };
        const at::NoGradGuard no_grad;
        weight().set_data(on_rank_device(torch::full({4, 4}, 2.0)));
        expect_saved(2);
        {
          auto full = fsdp.summon_full_params();
          weight().fill_(3);
          expect_saved(3);
          weight().set_data(on_rank_device(torch::full({4, 4}, 4.0)));
          expect_saved(4);
          weight().add_(1);
        }
        expect_saved(5);
        {
          auto full = fsdp.summon_full_params({.writeback = false});
          expect_saved(5);
          weight().fill_(6);
          for (const auto& error :
               {error_of<CheckpointError>([&] { save_checkpoint(folder / "a", fsdp); }),
                error_of<CheckpointError>([&] { save_checkpoint_async(folder / "a", fsdp).wait(); }),
                error_of<CheckpointError>([&] { save_full(folder / "a", fsdp); })})
            expect_contains(error, "unit '1' on rank");
        }
        expect_saved(5);
      });
}

TEST(CheckpointAsync, IsTheStateWhenItWasCalled) {
  const TemporaryFolder folder;
  under(Layout::kFsdp, 3, 2, 3, [&](auto& model, auto& optimizer, auto& comm) {
    save_checkpoint(folder / "a", model, optimizer);
    auto pending = save_checkpoint_async(folder / "b", model, optimizer, {{"step", 5}});
    {
      const at::NoGradGuard no_grad;
      for (auto& shard : model.named_shards()) shard.tensor.fill_(7);
      for (auto& [key, state] : optimizer.state())
        for (auto& tensor : read_state(*state).tensors) tensor.second.fill_(9);
    }
    pending.wait();
    EXPECT_TRUE(pending.done());
    pending.wait();
    EXPECT_EQ(load_checkpoint(folder / "b", model, optimizer)["step"], 5);
    comm->barrier();
  });
  expect_same(contents(folder / "a"), contents(folder / "b"), "");
}

// The call copies all tensors, and puts none under copy on write: see [Note: no copy on write].
TEST(CheckpointAsync, AStepRightAfterTheCallChangesNothingOfWhatIsSaved) {
  const TemporaryFolder folder;
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    FullyShardedDataParallel fsdp(seeded(1, [] { return torch::nn::Linear(1500, 1500); }), comm);
    auto check = [&](auto optimizer, const std::string& name) {
      fsdp(on_rank_device(torch::ones({1, 1500}))).sum().backward();
      optimizer.step();
      save_checkpoint(folder / name, fsdp, optimizer);
      Ema ema(fsdp, {.decay = 0.5});
      for (const char* further : {"-b", "-c"}) {
        auto pending = save_checkpoint_async(folder / (name + further), {fsdp, optimizer, ema});
        for (auto& [key, state] : optimizer.state())
          for (const auto& [what, tensor] : read_state(*state).tensors)
            EXPECT_FALSE(c10::impl::cow::is_cow_data_ptr(tensor.storage().data_ptr())) << name << " " << what;
        optimizer.step();
        ema.update();
        pending.wait();
        load_checkpoint(folder / (name + further), {fsdp, optimizer, ema});
        EXPECT_EQ(ema.updates(), 0);
      }
    };
    check(torch::optim::AdamW(fsdp.parameters(), 0.1), "torch");
    check(AdamW(fsdp.parameters(), 0.1), "fused");
    check(torch::optim::SGD(fsdp.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)), "sgd");
  });
  for (const std::string name : {"torch", "fused", "sgd"})
    for (const char* further : {"-b", "-c"}) {
      EXPECT_EQ(verify_checkpoint(folder / (name + further)), std::vector<std::string>());
      for (const auto& difference : diff_checkpoints(folder / name, folder / (name + further)))
        EXPECT_TRUE(difference.name.starts_with("beside.ema.") || difference.name == "(beside)") << difference.name;
    }
}

TEST(CheckpointAsync, CopiesInTheBackgroundAreTheStateWhenItWasCalledOrAnError) {
  const TemporaryFolder folder;
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    auto net = seeded(1, [] { return torch::nn::Linear(400, 400); });
    FullyShardedDataParallel fsdp(net, comm);
    Adam adam(fsdp.parameters(), AdamOptions(0.1));
    auto step = [&] {
      adam.zero_grad();
      fsdp(on_rank_device(torch::ones({1, 400}))).sum().backward();
      adam.step();
    };
    step();
    save_checkpoint(folder / "a", fsdp, adam);
    auto pending = save_checkpoint_async(folder / "b", fsdp, adam, {}, {.copy_in_background = true});
    fsdp(on_rank_device(torch::ones({1, 400}))).sum().backward();
    pending.copied();
    adam.step();
    pending.wait();
    // Early writes are detected in either order, also those that bypass autograd.
    for (const bool through_data : {false, true}) {
      bool found = false;
      for (int i = 0; i < 200 && !found; ++i) {
        auto early = save_checkpoint_async(folder / "c", fsdp, adam, {}, {.copy_in_background = true});
        for (auto& shard : fsdp.parameters()) {
          const at::NoGradGuard no_grad;
          (through_data ? shard.data() : shard).add_(0);
        }
        const auto error = error_of<std::invalid_argument>([&] { early.wait(); });
        found = !error.empty();
        if (found) expect_contains(error, "was written to while it was copied");
      }
      EXPECT_TRUE(found) << through_data;
    }
    // torch's SGD does not count its writes, so the save copies at once, in spite of copy_in_background.
    torch::optim::SGD sgd(fsdp.parameters(), torch::optim::SGDOptions(0.1));
    auto safe = save_checkpoint_async(folder / "d", fsdp, sgd, {}, {.copy_in_background = true});
    sgd.step();
    safe.wait();
    comm->barrier();
  });
  expect_same(contents(folder / "a"), contents(folder / "b"), "");
}

// As in a loop that saves right after evaluation.
TEST(CheckpointAsync, BegunUnderInferenceModeIsAsOneOutsideIt) {
  for (const bool on_disk : {false, true}) {
    const TemporaryFolder folder;
    on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      FsdpOptions options;
      if (on_disk) options.offload = {.params = true, .grads = true, .directory = folder.path()};
      FullyShardedDataParallel fsdp(seeded(1, [] { return torch::nn::Linear(40, 40); }), comm, options);
      Adam adam(fsdp.parameters(), AdamOptions(0.1));
      const at::Tensor input = on_rank_device(torch::ones({1, 40}));
      fsdp(input).sum().backward();
      adam.step();
      save_checkpoint(folder / "a", fsdp, adam);
      for (const bool in_background : {false, true}) {
        std::optional<PendingSave> pending;
        const std::string name = in_background ? "c" : "b";
        const SaveOptions save_options{.copy_in_background = in_background};
        {
          const c10::InferenceMode mode;
          fsdp(input);
          pending.emplace(save_checkpoint_async(folder / name, fsdp, adam, {}, save_options));
        }
        pending->wait();
        // Reuses the memory.
        save_checkpoint_async(folder / (name + "-next"), fsdp, adam, {}, save_options).wait();
      }
    });
    for (const char* name : {"b", "b-next", "c", "c-next"})
      expect_same(contents(folder / "a"), contents(folder / name), name);
  }
}

TEST(CheckpointAsync, ASecondSaveWaitsForTheFirstAndNobodyNeedsToWait) {
  const TemporaryFolder folder;
  on_ranks(3, [&](std::shared_ptr<Communicator> comm) {
    Replicated model(torch::nn::Linear(300, 300).ptr(), comm);
    auto pending = save_checkpoint_async(folder / "a", model, {{"step", 1}});
    pending = save_checkpoint_async(folder / "b", model, {{"step", 2}});
    EXPECT_EQ(load_checkpoint(folder / "a", model)["step"], 1);  // complete before the second began
    { auto dropped = save_checkpoint_async(folder / "c", model, {{"step", 3}}); }
    save_checkpoint(folder / "d", model);
    EXPECT_EQ(load_checkpoint(folder / "c", model)["step"], 3);
  });
}

// An upload waits for each save, while the next save waits for it too.
TEST(CheckpointAsync, AThreadMayWaitForASaveWhileTheNextBegins) {
  for (int world : {1, 2}) {
    const TemporaryFolder folder;
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      Replicated model(torch::nn::Linear(300, 300).ptr(), comm);
      std::atomic<int> complete = 0;
      std::jthread uploads;
      for (int step = 0; step < 30; ++step) {
        const auto path = folder / std::to_string(step);
        auto pending = save_checkpoint_async(path, model, {{"step", step}});
        uploads = std::jthread([&complete, path, waited = std::make_shared<PendingSave>(std::move(pending))] {
          waited->wait();
          complete += std::filesystem::exists(path) ? 1 : 0;
        });
      }
      uploads.join();
      EXPECT_EQ(complete, 30);
    });
  }
}

// A load finds a save in flight, and does not overwrite data that is being copied.
TEST(CheckpointAsync, ALoadWaitsForTheSaveThatIsUnderWay) {
  const TemporaryFolder folder;
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    FullyShardedDataParallel fsdp(on_rank_device(torch::nn::Linear(1500, 1500)), comm);
    Adam adam(fsdp.parameters(), AdamOptions(0.1));
    fsdp(on_rank_device(torch::ones({1, 1500}))).sum().backward();
    adam.step();
    save_checkpoint(folder / "1", fsdp, adam, {{"step", 1}});
    for (const bool in_background : {false, true}) {
      const SaveOptions options{.copy_in_background = in_background};
      auto second = save_checkpoint_async(folder / "2", fsdp, adam, {{"step", 2}}, options);
      EXPECT_EQ(load_newest_checkpoint(folder.path(), fsdp, adam)->extra["step"], 2);
      second.wait();
      auto third = save_checkpoint_async(folder / "3", fsdp, adam, {{"step", 3}}, options);
      EXPECT_EQ(load_checkpoint(folder / "3", fsdp, adam)["step"], 3);
      third.wait();
      comm->barrier();
      if (comm->rank() == 0) std::filesystem::remove_all(folder / "2"), std::filesystem::remove_all(folder / "3");
      comm->barrier();
    }
  });
}

}  // namespace
}  // namespace tessera::save_load_test
