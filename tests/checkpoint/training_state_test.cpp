// Saves and loads Stateful objects with the model and its optimizer, in one call.
#include <tessera/checkpoint/training_state.h>

#include <torch/optim/schedulers/step_lr.h>

#include <algorithm>

#include "checkpoint/load/offline.h"
#include "tests/checkpoint/replicated.h"
#include "tests/support/reference.h"
#include "tests/support/temporary_folder.h"

namespace tessera::training_state_test {
using namespace internal;
namespace {

using namespace testing_support;

// A user's Stateful with tensors, sharded like the parameters.
class Averages : public Stateful {
 public:
  Averages(const ModelShards& model, double value) : shards_(model.named_shards()) {
    for (auto& shard : shards_) shard.tensor = torch::full_like(shard.tensor.detach(), value);
  }
  std::string state_name() const override { return "averages"; }
  StateValues state_values() const override { return {{"updates", updates}, {"decay", 0.5}}; }
  void check_state_values(const StateValues& values) const override {
    require_same_form(values, state_values(), "averages");
  }
  void load_state_values(const StateValues& values) override { updates = std::get<int64_t>(values.at("updates")); }
  std::vector<NamedShard> state_shards() const override { return shards_; }

  int64_t updates = 0;

 private:
  std::vector<NamedShard> shards_;
};

TEST(TrainingState, IsSavedByOneCallAndGoesOnOnAnyNumberOfRanks) {
  const TemporaryFolder folder;
  constexpr int64_t kItems = 50, kInStep = 12;
  std::vector<int64_t> expected;  // the items of the next steps
  auto under = [&](int world, auto body) {
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      auto net = seeded(1, [] { return torch::nn::Linear(7, 5); });
      FullyShardedDataParallel fsdp(net, comm);
      torch::optim::SGD sgd(fsdp.parameters(), torch::optim::SGDOptions(1.0));
      torch::optim::StepLR scheduler(sgd, 2, 0.5);
      ShardedGradScaler scaler(comm, {.initial_scale = 8.0});
      DistributedSampler sampler(kItems, comm->rank(), comm->size(),
                                 {.batch_numel = kInStep / comm->size(), .seed = 3});
      body(*comm, fsdp, sgd, scheduler, scaler, sampler);
    });
  };
  under(2, [&](auto& comm, auto& fsdp, auto& sgd, auto& scheduler, auto& scaler, auto& sampler) {
    Averages averages(fsdp, 4.0);
    averages.updates = 9;
    for (int i = 0; i < 3; ++i) scheduler.step();
    for (int i = 0; i < 5; ++i) static_cast<void>(sampler.next());
    scaler.load_state({32.0, 6});
    const TrainingState state{fsdp, sgd, scheduler, scaler, sampler, averages};
    save_checkpoint(folder / "a", state, {{"step", 5}});
    auto pending = save_checkpoint_async(folder / "b", {fsdp, sgd, {"other", scheduler}, averages});
    pending.wait();
    comm.barrier();
  });
  DistributedSampler all(kItems, 0, 1, {.batch_numel = kInStep, .seed = 3});
  for (int i = 0; i < 8; ++i) {
    const auto items = all.next();
    if (i >= 5) expected.insert(expected.end(), items.begin(), items.end());
  }
  for (int world : {1, 2, 3}) {
    std::vector<int64_t> seen(expected.size());
    under(world, [&](auto& comm, auto& fsdp, auto& sgd, auto& scheduler, auto& scaler, auto& sampler) {
      Averages averages(fsdp, 0.0);
      EXPECT_EQ(load_checkpoint(folder / "a", {fsdp, sgd, scheduler, scaler, sampler, averages})["step"], 5);
      EXPECT_EQ(scaler.get_scale(), 32.0);
      EXPECT_EQ(scaler.state().finite_steps, 6);
      EXPECT_EQ(averages.updates, 9);
      for (const auto& shard : averages.state_shards()) EXPECT_TRUE(shard.tensor.eq(4.0).all().template item<bool>());
      const size_t of_rank = static_cast<size_t>(kInStep / comm.size());
      for (size_t step = 0; step < 3; ++step) {
        const auto items = sampler.next();
        std::copy(items.begin(), items.end(), seen.begin() + static_cast<long>(step * kInStep + comm.rank() * of_rank));
      }
      // Three steps were taken before the save; the fifth halves the rate.
      auto rate = [&] { return static_cast<torch::optim::SGDOptions&>(sgd.param_groups()[0].options()).lr(); };
      const double before = rate();
      scheduler.step();
      EXPECT_EQ(rate(), before);
      scheduler.step();
      EXPECT_EQ(rate(), before / 2) << "world " << comm.size();
      comm.barrier();
    });
    EXPECT_EQ(seen, expected) << "world " << world;
  }
  under(2, [&](auto& comm, auto& fsdp, auto& sgd, auto& scheduler, auto& scaler, auto& sampler) {
    Averages averages(fsdp, 0.0);
    const auto error = error_of<CheckpointMismatch>(
        [&] { load_checkpoint(folder / "b", {fsdp, sgd, {"other", scheduler}, scaler, sampler}); });
    for (const char* part : {"the state 'grad_scaler'", "the state 'sampler'"}) expect_contains(error, part);
    LoadReport report;
    load_checkpoint(folder / "b", {fsdp, sgd, sampler, averages}, {.strict = false, .report = &report});
    EXPECT_EQ(report.missing, std::vector<std::string>{"the state 'sampler'"});
    EXPECT_EQ(averages.updates, 9);
    load_checkpoint(folder / "a", fsdp, sgd);  // Stateful objects may be omitted
    DistributedSampler other(kItems + 1, comm.rank(), comm.size(), {.seed = 3});
    expect_contains(error_of<CheckpointMismatch>([&] { load_checkpoint(folder / "a", {fsdp, sgd, other}); }),
                    "of other data: 'items' differs");
  });
}

// Lists objects as a program does. Each link of the chain resumes with another wrapper and number of ranks.
TEST(TrainingState, AveragesAreSavedBesideTheModelUnderEveryWrapper) {
  const TemporaryFolder folder;
  auto under = [&](int stage, int world, auto body) {
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      auto model = zero(seeded(1, [] { return torch::nn::Linear(7, 5); }), torch::optim::AdamWOptions(0.1), comm,
                        ZeroOptions{.stage = stage});
      torch::optim::StepLR scheduler(model.optimizer(), 2, 0.5);
      Ema ema(model, {.decay = 0.5});
      body(model, scheduler, ema);
    });
  };
  auto step = [](auto& model, auto& scheduler, Ema& ema) {
    model.zero_grad();
    model.forward(on_rank_device(torch::ones({2, 7}))).pow(2).sum().backward();
    model.step();
    scheduler.step();
    ema.update();
  };
  // The parameters, and their averages.
  auto weights = [](auto& model, Ema& ema) {
    const at::Tensor own = model.full_state_dict()["weight"].cpu().clone();
    auto averaged = ema.swap_in();
    return std::vector<at::Tensor>{own, model.full_state_dict()["weight"].cpu().clone()};
  };
  const std::vector<std::pair<int, int>> chain{{0, 2}, {1, 3}, {2, 1}, {3, 5}, {3, 2}};
  std::vector<at::Tensor> expected;
  under(0, 1, [&](auto& model, auto& scheduler, Ema& ema) {
    for (size_t i = 0; i < chain.size(); ++i) step(model, scheduler, ema);
    expected = weights(model, ema);
  });
  auto name = [&](size_t link) { return folder / ("step-" + std::to_string(link)); };
  for (size_t link = 0; link < chain.size(); ++link)
    under(chain[link].first, chain[link].second, [&](auto& model, auto& scheduler, Ema& ema) {
      auto& optimizer = model.optimizer();
      if (link > 0) load_checkpoint(name(link - 1), {model, optimizer, scheduler, ema});
      EXPECT_EQ(ema.updates(), static_cast<int64_t>(link));
      step(model, scheduler, ema);
      if (link % 2 == 0)
        save_checkpoint(name(link), {model, optimizer, scheduler, ema});
      else
        save_checkpoint_async(name(link), {model, optimizer, scheduler, ema}).wait();
      const auto own = weights(model, ema);
      for (size_t i = 0; link + 1 == chain.size() && i < 2; ++i) EXPECT_TRUE(own[i].allclose(expected[i]));
      model.comm()->barrier();
    });
  // Loads the model without averages; the averages as the model; and a file of the model alone.
  const auto last = name(chain.size() - 1);
  consolidate_checkpoint(last, folder / "m.safetensors", /*state=*/false);
  under(2, 2, [&](auto& model, auto&, Ema& ema) {
    load_checkpoint(last, {model, model.optimizer()});
    EXPECT_TRUE(weights(model, ema)[0].allclose(expected[0]));
    load_checkpoint(last, ema.with_model(), model.optimizer());
    EXPECT_TRUE(weights(model, ema)[1].allclose(expected[1]));
    model.comm()->barrier();
    DistributedDataParallel plain(on_rank_device(torch::nn::Linear(7, 5)), model.comm());
    load_full(folder / "m.safetensors", plain);
    EXPECT_TRUE(plain.full_state_dict()["weight"].cpu().allclose(expected[0]));
    // While swapped in, the averages would be saved as parameters.
    {
      auto averaged = ema.swap_in();
      for (const auto& error : {error_of<std::invalid_argument>([&] { save_checkpoint(folder / "no", {model, ema}); }),
                                error_of<CheckpointMismatch>([&] { load_checkpoint(last, {model, ema}); })})
        expect_contains(error, "Ema::swap_in()");
    }
    Ema slow(model, {.decay = 0.9});
    save_checkpoint(folder / "two", {model, ema, {"slow", slow}});
    ModelShards& averages = slow;
    load_checkpoint(folder / "two", {model, ema, {"slow", averages}});
    save_checkpoint(folder / "none", {model});
    expect_contains(error_of<CheckpointMismatch>([&] { load_checkpoint(folder / "none", {model, ema}); }),
                    "missing from the checkpoint: the state 'ema', beside.ema.weight");
  });
}

// Averages follow the parameter that they were saved with, whatever its name is now.
TEST(TrainingState, AveragesFollowTheirParametersToOtherNames) {
  struct Net : torch::nn::Module {
    Net(const char* first, const char* second) {
      register_module(first, torch::nn::Linear(3, 3));
      register_module(second, torch::nn::Linear(3, 3));
    }
  };
  const TemporaryFolder folder;
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    const at::NoGradGuard no_grad;
    const auto fill = [](ModelShards& model, const std::string& module, double value) {
      for (const NamedShard& shard : model.named_shards())
        if (shard.fqn.starts_with(module + ".")) shard.tensor.fill_(value);
    };
    const auto average = [](Ema& ema, ModelShards& model, const std::string& name) {
      auto averaged = ema.swap_in();
      for (const NamedShard& shard : model.named_shards())
        if (shard.fqn == name) return shard.tensor.detach().cpu().clone();
      return at::Tensor();
    };
    const auto all_are = [](const at::Tensor& tensor, double value) { return tensor.eq(value).all().item<bool>(); };
    const auto moments = [&](ModelShards& model, torch::optim::Adam& adam, double value) {
      for (NamedShard& shard : model.named_shards())
        shard.tensor.mutable_grad() = torch::full_like(shard.tensor, value);
      adam.step();
    };
    Replicated saved(std::make_shared<Net>("a", "b"), comm);
    fill(saved, "a", 1);
    fill(saved, "b", 2);
    Ema ema(saved);
    torch::optim::Adam adam(saved.parameters());
    moments(saved, adam, 1);
    fill(saved, "a", 5);
    fill(saved, "b", 6);
    save_checkpoint(folder / "x", {saved, adam, ema});
    // The names are swapped, or one is new.
    Replicated swapped(std::make_shared<Net>("a", "b"), comm), renamed(std::make_shared<Net>("trunk", "b"), comm);
    Ema of_swapped(swapped), of_renamed(renamed);
    const auto swap = [](const std::string& name) { return (name[0] == 'a' ? "b" : "a") + name.substr(1); };
    load_checkpoint(folder / "x", {swapped, of_swapped}, {.rename = swap});
    EXPECT_TRUE(all_are(swapped.parameters()[0].cpu(), 6));
    EXPECT_TRUE(all_are(average(of_swapped, swapped, "a.weight"), 2));
    EXPECT_TRUE(all_are(average(of_swapped, swapped, "b.weight"), 1));
    const auto rename = [](const std::string& name) { return name[0] == 'a' ? "trunk" + name.substr(1) : name; };
    load_checkpoint(folder / "x", {renamed, of_renamed}, {.rename = rename});
    EXPECT_TRUE(all_are(average(of_renamed, renamed, "trunk.weight"), 1));
    // A skipped parameter is new here, although it has the old name.
    Replicated fresh(std::make_shared<Net>("a", "b"), comm);
    fill(fresh, "a", 7);
    Ema of_fresh(fresh);
    torch::optim::Adam of_fresh_adam(fresh.parameters());
    const auto leave_out = [](const std::string& name) { return name[0] == 'a' ? std::string() : name; };
    LoadReport report;
    load_checkpoint(folder / "x", {fresh, of_fresh_adam, of_fresh},
                    {.strict = false, .report = &report, .rename = leave_out});
    EXPECT_EQ(report.missing,
              (std::vector<std::string>{"a.weight", "a.bias", "beside.ema.a.weight", "beside.ema.a.bias"}));
    EXPECT_TRUE(all_are(average(of_fresh, fresh, "a.weight"), 7));
    EXPECT_TRUE(all_are(average(of_fresh, fresh, "b.weight"), 2));
    EXPECT_EQ(of_fresh_adam.state().size(), 2U) << "of what was loaded";
  });
}

// A generator and its critic, each with an optimizer, a schedule and averages.
struct Gan {
  explicit Gan(const std::shared_ptr<Communicator>& comm)
      : g(seeded(1, [] { return torch::nn::Linear(5, 3); }), comm),
        critic(seeded(2, [] { return torch::nn::Linear(3, 1); }), comm),
        of_g(g.parameters(), torch::optim::AdamOptions(0.1)),
        of_critic(critic.parameters(), torch::optim::SGDOptions(0.05).momentum(0.9)),
        schedule(of_g, 2, 0.5),
        ema(g, {.decay = 0.5}) {}

  void step(int number) {
    const at::Tensor noise = on_rank_device(torch::full({2, 5}, 0.1 * number));
    of_critic.zero_grad();
    critic(g(noise).detach()).mean().backward();
    of_critic.step();
    of_g.zero_grad();
    critic.zero_grad();
    critic(g(noise)).pow(2).mean().backward();
    of_g.step();
    schedule.step();
    ema.update();
  }
  TrainingState state() {
    return {{"generator", g},         {"critic", critic},         {"of_generator", of_g},
            {"of_critic", of_critic}, {"of_generator", schedule}, {"averages", ema}};
  }
  std::vector<at::Tensor> weights() {
    return {g.full_state_dict()["weight"].cpu().clone(), critic.full_state_dict()["weight"].cpu().clone()};
  }

  FullyShardedDataParallel<torch::nn::Linear> g, critic;
  torch::optim::Adam of_g;
  torch::optim::SGD of_critic;
  torch::optim::StepLR schedule;
  Ema ema;
};

TEST(TrainingState, SeveralModelsAndOptimizersResumeTogetherOrAlone) {
  const TemporaryFolder folder;
  std::vector<at::Tensor> expected;
  on_ranks(1, [&](std::shared_ptr<Communicator> comm) {
    Gan gan(comm);
    for (int i = 0; i < 6; ++i) gan.step(i);
    expected = gan.weights();
  });
  const int worlds[] = {2, 3, 1};
  for (int link = 0; link < 3; ++link)
    on_ranks(worlds[link], [&](std::shared_ptr<Communicator> comm) {
      Gan gan(comm);
      if (link > 0) {
        EXPECT_EQ(load_newest_checkpoint(folder.path(), gan.state()).value().extra["step"], 2 * link);
      }
      EXPECT_EQ(gan.ema.updates(), 2 * link);
      for (int i = 2 * link; i < 2 * link + 2; ++i) gan.step(i);
      const auto path = folder / ("step-" + std::to_string(link));
      if (link == 1)
        save_checkpoint_async(path, gan.state(), {{"step", 2 * link + 2}}).wait();
      else
        save_checkpoint(path, gan.state(), {{"step", 2 * link + 2}});
      const auto own = gan.weights();
      for (size_t i = 0; link == 2 && i < 2; ++i) EXPECT_TRUE(own[i].allclose(expected[i]));
      comm->barrier();
    });
  EXPECT_EQ(verify_checkpoint(folder / "step-2"), std::vector<std::string>());
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    const auto path = folder / "step-2";
    Gan gan(comm);
    load_checkpoint(path, {{"generator", gan.g}, {"of_generator", gan.of_g}});
    EXPECT_TRUE(gan.weights()[0].allclose(expected[0]));
    EXPECT_FALSE(gan.weights()[1].allclose(expected[1])) << "the critic is not loaded";
    EXPECT_TRUE(gan.of_critic.state().empty());
    auto refused = [&](const TrainingState& state) {
      return error_of<CheckpointMismatch>([&] { load_checkpoint(path, state); });
    };
    expect_contains(refused({gan.g}), "models: the checkpoint has 'generator', 'critic', this is one without a name");
    expect_contains(refused({{"student", gan.g}}), "the checkpoint has 'generator', 'critic', not 'student'");
    expect_contains(refused({{"generator", gan.g}, gan.of_g}), "this is one without a name");
    expect_contains(refused({{"generator", gan.g}, {"adam", gan.of_g}}), "this is 'adam'");
    expect_contains(refused({{"generator", gan.g}, {"of_critic", gan.of_g}}), "the checkpoint's is SGD, this is Adam");
    // Without names, as another program that knows only the generator.
    load_checkpoint(path, {gan.g}, {.rename = [](const std::string& name) {
                      return name.starts_with("generator.") ? name.substr(10) : std::string();
                    }});
  });
}

// As Muon for matrices and AdamW for the rest.
TEST(TrainingState, AModelMayHaveSeveralOptimizers) {
  const TemporaryFolder folder;
  std::map<int, at::Tensor> states;
  for (int world : {1, 3})
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      FullyShardedDataParallel fsdp(seeded(1, [] { return torch::nn::Linear(5, 3); }), comm);
      const auto parameters = fsdp.parameters();
      torch::optim::Adam adam({parameters[0]}, torch::optim::AdamOptions(0.1));
      torch::optim::SGD sgd({parameters[1]}, torch::optim::SGDOptions(0.1).momentum(0.9));
      auto step = [&] {
        fsdp.zero_grad();
        fsdp(on_rank_device(torch::ones({2, 5}))).pow(2).sum().backward();
        adam.step();
        sgd.step();
      };
      if (world == 1) {
        step();
        save_checkpoint(folder / "a", {fsdp, {"adam", adam}, {"sgd", sgd}});
      } else {
        load_checkpoint(folder / "a", {fsdp, {"sgd", sgd}, {"adam", adam}});
      }
      step();
      const auto all = fsdp.full_state_dict();
      if (comm->rank() == 0) states[world] = torch::cat({all["weight"].flatten(), all["bias"]}).cpu().clone();
    });
  EXPECT_TRUE(states[1].allclose(states[3]));
}

TEST(TrainingState, GroupsInAnotherOrderAreNamedInOneLine) {
  const TemporaryFolder folder;
  on_ranks(1, [&](std::shared_ptr<Communicator> comm) {
    Replicated model(torch::nn::Linear(2, 2).ptr(), comm);
    const auto parameters = model.parameters();
    auto sgd = [&](size_t first) {
      std::vector<torch::optim::OptimizerParamGroup> groups;
      for (const size_t i : {first, 1 - first}) groups.push_back(torch::optim::OptimizerParamGroup({parameters[i]}));
      return torch::optim::SGD(groups, torch::optim::SGDOptions(0.1));
    };
    auto saved = sgd(0), other = sgd(1);
    save_checkpoint(folder / "a", model, saved);
    const auto error = error_of<CheckpointMismatch>([&] { load_checkpoint(folder / "a", model, other); });
    expect_contains(error,
                    "optimizer: its groups are in another order than the checkpoint's: groups 1, 0 of the "
                    "checkpoint are given as 0 to 1");
    EXPECT_EQ(error.find("did not have"), std::string::npos);
  });
}

TEST(TrainingState, MistakesAreRefused) {
  on_ranks(1, [](std::shared_ptr<Communicator> comm) {
    Replicated model(torch::nn::Linear(2, 2).ptr(), comm), second(torch::nn::Linear(2, 2).ptr(), comm);
    torch::optim::SGD sgd(model.parameters(), torch::optim::SGDOptions(1.0));
    torch::optim::StepLR scheduler(sgd, 2, 0.5);
    auto refused = [](std::initializer_list<TrainingState::StateRef> all) {
      return error_of<std::invalid_argument>([&] { TrainingState state(all); });
    };
    expect_contains(refused({sgd}), "no model");
    Ema ema(model);
    expect_contains(refused({ema, sgd}), "no model");
    expect_contains(refused({ema.with_model(), ema}), "two states are named 'ema'");
    expect_contains(refused({model, second}), "several models, of which one has no name");
    expect_contains(refused({{"a", model}, second}), "several models, of which one has no name");
    expect_contains(refused({{"a", model}, {"a", second}}), "two models named 'a'");
    expect_contains(error_of<std::invalid_argument>([&] { TrainingState::StateRef("a.b", model); }),
                    "'a.b' is not a name of a state");
    expect_contains(refused({model, sgd, sgd}), "two optimizers without a name");
    expect_contains(refused({model, sgd, {"b", sgd}}), "several optimizers, of which one has no name");
    expect_contains(refused({model, {"b", sgd}, {"b", sgd}}), "two optimizers named 'b'");
    const TemporaryFolder none;
    expect_contains(
        error_of<std::invalid_argument>([&] { save_checkpoint(none / "a", {model, {"a", sgd}, {"b", sgd}}); }),
        "is in two optimizers, 'a' and 'b'");
    struct OfOtherSize : Averages {
      using Averages::Averages;
      std::vector<NamedShard> state_shards() const override {
        auto shards = Averages::state_shards();
        shards[0].tensor = torch::zeros({3});
        return shards;
      }
    };
    OfOtherSize other(model, 0.5);
    expect_contains(error_of<std::invalid_argument>([&] { save_checkpoint(none / "a", {model, other}); }),
                    "has the shape [3]; expected [4] or [2, 2]");
    expect_contains(refused({model, scheduler, scheduler}), "two states are named 'scheduler'");
    expect_contains(refused({model, {"a.b", scheduler}}), "'a.b' is not a name of a state");
    DistributedSampler sampler(10, 0, 1, {.accumulation = 2});
    static_cast<void>(sampler.next());
    const TemporaryFolder folder;
    expect_contains(error_of<CheckpointError>([&] { save_checkpoint(folder / "a", {model, sampler}); }),
                    "saved between steps");
  });
  EXPECT_THROW(DistributedSampler(0, 0, 1), std::invalid_argument);
  EXPECT_THROW(DistributedSampler(4, 2, 2), std::invalid_argument);
  EXPECT_THROW(DistributedSampler(4, 0, 1, {.batch_numel = 0}), std::invalid_argument);
}

// A manifest cannot hold it: detected before anything is written, not when rank 0 commits.
TEST(TrainingState, TextsThatAreNotUtf8AreRefusedByName) {
  struct Mine : Stateful {
    StateValues values;
    std::string state_name() const override { return "tokenizer"; }
    StateValues state_values() const override { return values; }
    void check_state_values(const StateValues&) const override {}
    void load_state_values(const StateValues& loaded) override { values = loaded; }
  };
  struct Tied : torch::nn::Module {
    Tied() {
      register_parameter("weight", torch::ones({2}));
      register_parameter("of\xff", parameters()[0]);
    }
  };
  const TemporaryFolder folder;
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    Replicated model(torch::nn::Linear(2, 2).ptr(), comm), tied(std::make_shared<Tied>(), comm);
    Mine mine;
    auto errors = [&] {
      return std::vector<std::string>{
          error_of<std::invalid_argument>([&] { save_checkpoint(folder / "a", {model, mine}); }),
          error_of<std::invalid_argument>([&] { save_checkpoint_async(folder / "a", {model, mine}).wait(); })};
    };
    mine.values = {{"merges", "a\xff"}};
    for (const auto& error : errors())
      expect_contains(error, "'merges' of the state 'tokenizer' is a text that is not");
    mine.values = {{"\xff", int64_t{1}}};
    for (const auto& error : errors()) expect_contains(error, "the name of a value of the state 'tokenizer'");
    expect_contains(error_of<CheckpointError>([&] { save_checkpoint(folder / "a", tied); }), "name is not UTF-8");
    comm->barrier();
    EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
    mine.values = {{"merges", "\xc3\xa4"}};
    save_checkpoint(folder / "a", {model, mine});
    mine.values.clear();
    load_checkpoint(folder / "a", {model, mine});
    EXPECT_EQ(std::get<std::string>(mine.values.at("merges")), "\xc3\xa4");
  });
}

TEST(TrainingState, SamplersVisitEachItemOnceAnEpochWhateverTheRanks) {
  for (bool shuffle : {true, false})
    for (int64_t world : {1, 2, 3, 5}) {
      constexpr int64_t kItems = 31;
      std::vector<std::vector<int64_t>> of_step(kItems);
      for (int rank = 0; rank < world; ++rank) {
        DistributedSampler sampler(kItems, rank, static_cast<int>(world), {.seed = 5, .shuffle = shuffle});
        for (auto& step : of_step) step.push_back(sampler.next().front());
      }
      std::vector<int64_t> items;  // of `world` epochs
      for (const auto& step : of_step) items.insert(items.end(), step.begin(), step.end());
      for (int64_t epoch = 0; epoch < world; ++epoch) {
        std::vector<int64_t> own(items.begin() + epoch * kItems, items.begin() + (epoch + 1) * kItems);
        EXPECT_EQ(std::is_sorted(own.begin(), own.end()), !shuffle);
        std::sort(own.begin(), own.end());
        for (int64_t i = 0; i < kItems; ++i) EXPECT_EQ(own[i], i);
      }
    }
}

}  // namespace
}  // namespace tessera::training_state_test
