// The average of parameters: split over ranks, compared with one process.
#include "tests/optim/given_gradients.h"
#include "tests/support/temporary_folder.h"

namespace tessera::ema_test {
using namespace internal;
namespace {

using namespace testing_support;

constexpr double kDecay = 0.9;

std::map<std::string, at::Tensor> copied(const torch::OrderedDict<std::string, at::Tensor>& tensors) {
  std::map<std::string, at::Tensor> copies;
  for (const auto& item : tensors) copies[item.key()] = item.value().detach().clone();
  return copies;
}

// The average by its formula, of whole parameters.
struct Expected {
  std::map<std::string, at::Tensor> averages{};
  void begin(const std::map<std::string, at::Tensor>& parameters) {
    for (const auto& [name, value] : parameters)
      averages[name] = value.to(value.scalar_type() == at::kDouble ? at::kDouble : at::kFloat, false, true);
  }
  void add(const std::map<std::string, at::Tensor>& parameters, double decay = kDecay) {
    for (auto& [name, average] : averages) average.lerp_(parameters.at(name).to(average.scalar_type()), 1 - decay);
  }
  std::map<std::string, at::Tensor> as(at::ScalarType dtype) const {
    std::map<std::string, at::Tensor> values;
    for (const auto& [name, average] : averages) values[name] = average.to(dtype);
    return values;
  }
};

// Averages SGD's parameters in one process.
std::map<std::string, at::Tensor> reference(int steps, bool warmup) {
  Expected expected;
  const auto sgd = torch::optim::SGDOptions(0.1);
  expected.begin(stepped<torch::optim::SGD>({}, sgd, 0, 0));
  for (int step = 0; step < steps; ++step)
    expected.add(stepped<torch::optim::SGD>({}, sgd, 0, step + 1),
                 warmup ? std::min(kDecay, (1.0 + step) / (10.0 + step)) : kDecay);
  return expected.as(at::kFloat);
}

template <class Body>
void under(const Layout& layout, at::ScalarType dtype, Body body) {
  on_ranks(layout.world, [&](std::shared_ptr<Communicator> comm) {
    ZeroOptions options{.stage = layout.stage};
    options.fsdp.auto_wrap = wrap_if([](const std::string& name, const torch::nn::Module&) { return name == "a"; });
    options.fsdp.hybrid.ranks_per_copy = layout.ranks_per_copy;
    options.fsdp.offload = {.params = layout.offload, .grads = layout.offload, .directory = layout.disk};
    auto model = zero(seeded(5, [&] { return Bare(dtype); }), torch::optim::SGDOptions(0.1), comm, options);
    Ema ema(model, {.decay = kDecay});
    body(model, ema);
  });
}

template <class Model>
void train(Model& model, Ema& ema, int begin, int end) {
  for (int step = begin; step < end; ++step) {
    give_gradients(model.named_shards(), step);
    model.step();
    ema.update();
  }
}

TEST(Ema, IsTheSameInEveryStageAtEveryWorldSize) {
  const TemporaryFolder disk;
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    std::vector<Layout> layouts{{4, 3, 2}, {2, 3, 0, true}, {2, 3, 0, true, disk.path().string()}};
    for (int world = 1; world <= 5; ++world)
      for (const int stage : {0, 2, 3})
        if (dtype == at::kFloat || world == 3) layouts.push_back({world, stage});
    for (const Layout& layout : layouts) {
      under(layout, dtype, [&](auto& model, Ema& ema) {
        Expected whole;
        whole.begin(copied(model.full_state_dict()));
        for (int step = 0; step < 3; ++step) {
          train(model, ema, step, step + 1);
          whole.add(copied(model.full_state_dict()));
        }
        const auto expected = whole.as(dtype);
        const auto own = copied(model.full_state_dict());
        {
          auto averaged = ema.swap_in();
          expect_same(copied(model.full_state_dict()), expected, 0, name_of(layout));
          EXPECT_THROW(ema.update(), std::logic_error);
          EXPECT_THROW(static_cast<void>(ema.swap_in()), std::logic_error);
        }
        expect_same(copied(model.full_state_dict()), own, 0, name_of(layout) + " afterwards");
        try {
          auto averaged = ema.swap_in();
          throw std::runtime_error("a validation that fails on every rank");
        } catch (const std::runtime_error&) {
        }
        expect_same(copied(model.full_state_dict()), own, 0, name_of(layout) + " after an exception");
        // Each element that ranks hold is averaged once.
        int64_t numel = 0;
        for (const NamedShard& shard : ema.named_shards()) numel += shard.tensor.numel();
        at::Tensor total = torch::tensor({numel}, at::kLong);
        model.comm()->all_reduce(total).wait();
        int64_t numel_of_all = 0;
        for (const auto& [name, value] : expected) numel_of_all += value.numel();
        EXPECT_EQ(total.item<int64_t>(), numel_of_all);
      });
    }
  }
}

// Averages that are inference tensors could not be updated outside InferenceMode.
TEST(Ema, MayBeMadeUnderInferenceMode) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    for (const int stage : {0, 3}) {
      auto model = zero(seeded(5, [] { return Bare(); }), torch::optim::SGDOptions(0.1), comm, {.stage = stage});
      std::optional<Ema> ema;
      {
        const c10::InferenceMode inference;
        ema.emplace(model, EmaOptions{.decay = kDecay});
      }
      train(model, *ema, 0, 2);
      const auto averaged = ema->swap_in();
      EXPECT_EQ(ema->updates(), 2);
      expect_same(copied(model.full_state_dict()), reference(2, false), 0, "stage " + std::to_string(stage));
    }
  });
}

// Averages the values of each rank: if copies are rounded, the averages of copies are those of rounded values.
TEST(Ema, AveragesWhatOwnersStepOnTheHostAndSendRounded) {
  const auto sgd = torch::optim::SGDOptions(0.1);
  for (const bool rounds : {false, true}) {
    on_ranks(3, [&](std::shared_ptr<Communicator> comm) {
      ZeroOptions options{.stage = rounds ? 1 : 2};
      options.oss.offload = {.params = true, .grads = true};
      if (rounds) options.oss.broadcast_dtype = at::kBFloat16;
      auto model = zero(seeded(5, [] { return Bare(); }), sgd, comm, options);
      Ema ema(model, {.decay = kDecay});
      train(model, ema, 0, 4);
      const auto expected = reference(4, false);
      auto averaged = ema.swap_in();
      const auto got = copied(model.module()->named_parameters());
      for (const auto& [name, value] : expected)
        EXPECT_TRUE(torch::allclose(got.at(name), value, rounds ? 1e-2 : 0, rounds ? 1e-2 : 0))
            << rounds << " " << name << (got.at(name) - value).abs().max().item<float>();
      for (const auto& [name, value] : got) {
        at::Tensor all = torch::empty({3 * value.numel()});
        comm->all_gather(all, value.contiguous().flatten()).wait();
        EXPECT_TRUE(torch::equal(all.narrow(0, 0, value.numel()), all.narrow(0, 2 * value.numel(), value.numel())));
      }
    });
  }
}

// torch::load() gives the module's parameters other data, with no forward after it.
TEST(Ema, AveragesValuesThatWereJustLoaded) {
  for (const int stage : {0, 1, 2, 3}) {
    on_ranks(2, [=](std::shared_ptr<Communicator> comm) {
      auto net = seeded(5, [] { return Bare(); });
      const auto first = copied(net->named_parameters());
      auto others = seeded(6, [] { return Bare(); });
      const auto loaded = copied(others->named_parameters());
      std::stringstream file;
      torch::save(others, file);
      auto model = zero(net, torch::optim::SGDOptions(0.1), comm, {.stage = stage});
      Ema updated(model, {.decay = 0.5}), kept(model, {.decay = 0.5});
      torch::load(net, file);
      updated.update();
      for (Ema* ema : {&updated, &kept}) {
        std::stringstream again(file.str());
        torch::load(net, again);
        auto averaged = ema->swap_in();
        for (const auto& [name, value] : copied(model.full_state_dict())) {
          const at::Tensor expected = ema == &kept ? first.at(name) : 0.5 * (first.at(name) + loaded.at(name));
          EXPECT_TRUE(torch::allclose(value, expected, 1e-5, 1e-6)) << stage << " " << name;
        }
        averaged.leave();
        for (const auto& [name, value] : copied(model.full_state_dict()))
          EXPECT_TRUE(torch::equal(value, loaded.at(name))) << stage << " " << name << " afterwards";
      }
    });
  }
}

TEST(Ema, ForgetsTheFirstValuesSoonWithWarmup) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    FullyShardedDataParallel fsdp(seeded(5, [] { return Bare(); }), comm);
    Ema ema(fsdp, {.decay = kDecay, .warmup = true});
    torch::optim::SGD sgd(fsdp.parameters(), 0.1);
    for (int step = 0; step < 4; ++step) {
      give_gradients(fsdp.named_shards(), step);
      sgd.step();
      ema.update();
    }
    auto averaged = ema.swap_in();
    expect_same(copied(fsdp.full_state_dict()), reference(4, true), 0, "with warmup");
  });
}

TEST(Ema, IsSavedWithTheModelAndGoesOnAtAnyWorldSize) {
  const TemporaryFolder folder;
  const auto expected = reference(6, false);
  const std::vector<Layout> chain{{3, 3}, {2, 1}, {4, 3, 2}, {5, 2}, {1, 3}, {4, 0}};
  for (int link = 0; link < 6; ++link) {
    under(chain[link], at::kFloat, [&](auto& model, Ema& ema) {
      const auto name = [&](int i) { return folder / ("step" + std::to_string(i)); };
      if (link > 0) load_checkpoint(name(link - 1), ema.with_model(), model.optimizer());
      EXPECT_EQ(ema.updates(), link);
      train(model, ema, link, link + 1);
      save_checkpoint(name(link), ema.with_model(), model.optimizer());
      if (link < 5) return;
      save_full(folder / "averages.safetensors", ema);
      auto averaged = ema.swap_in();
      expect_same(copied(model.full_state_dict()), expected, 0, "after the chain");
    });
  }
  // The averages alone, loaded into a model of one process.
  on_ranks(1, [&](std::shared_ptr<Communicator> comm) {
    DistributedDataParallel ddp(Bare(), comm);
    load_full(folder / "averages.safetensors", ddp);
    expect_same(copied(ddp.full_state_dict()), expected, 0, "from one file");
  });
}

TEST(Ema, MistakesAreNamed) {
  run_ranks(1, [](std::shared_ptr<Communicator> comm) {
    FullyShardedDataParallel fsdp(torch::nn::Linear(4, 4), comm);
    expect_contains(error_of<std::invalid_argument>([&] { Ema ema(fsdp, {.decay = 1}); }), "EmaOptions::decay is 1");
  });
}

}  // namespace
}  // namespace tessera::ema_test
