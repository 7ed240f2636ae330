// set_data() changes the strides of parameters that already have optimizer state: the elements are unaffected.
#include "checkpoint/load/offline.h"
#include "tests/optim/given_gradients.h"
#include "tests/support/temporary_folder.h"

namespace tessera::other_strides_test {
using namespace internal;
namespace {

using namespace testing_support;

constexpr int kTurnedAt = 2, kSteps = 5;

// Stores matrices in another memory order, with equal values.
void turn(torch::nn::Module& module) {
  for (at::Tensor& parameter : module.parameters()) {
    const at::Tensor values = parameter.detach();
    if (values.dim() == 4)
      parameter.set_data(values.contiguous(at::MemoryFormat::ChannelsLast));
    else if (values.dim() == 2)
      parameter.set_data(values.is_contiguous() ? values.t().contiguous().t() : values.contiguous());
  }
}

template <class Model>
std::map<std::string, at::Tensor> whole(Model& model) {
  std::map<std::string, at::Tensor> values;
  for (const auto& item : model.full_state_dict()) values[item.key()] = item.value();
  return values;
}

ZeroOptions options_for(int stage) {
  ZeroOptions options{.stage = stage};
  options.oss.broadcast_bucket_bytes = 3000;  // some parameters share buckets, some have their own
  return options;
}

template <class Options>
using Compare = std::function<void(const std::map<std::string, at::Tensor>& own,
                                   const std::map<std::string, at::Tensor>& expected, const std::string& where)>;

// Compares torch's optimizer, and every wrapper that keeps parameters whole, with a run in one memory order.
template <class Optimizer, class Options>
void expect_same_when_turned(const Options& options, const Compare<Options>& compare,
                             Grouping<Options> grouping = &one_group<Options>) {
  const auto expected = stepped<Optimizer>({}, options, 0, kSteps, grouping);
  {
    auto net = seeded(5, [] { return Bare(); });
    Optimizer optimizer(grouping(net->named_parameters(), options), options);
    for (int step = 0; step < kSteps; ++step) {
      if (step == kTurnedAt) turn(*net);
      give_gradients(whole_shards(*net), step);
      optimizer.step();
    }
    std::map<std::string, at::Tensor> own;
    for (const auto& item : net->named_parameters()) own[item.key()] = item.value().detach();
    compare(own, expected, "torch's way");
  }
  for (const Layout& layout : {Layout{2, 0}, Layout{3, 1}, Layout{2, 2}})
    on_ranks(layout.world, [&](std::shared_ptr<Communicator> comm) {
      auto net = seeded(5, [] { return Bare(); });
      ZeroOptions zero_options = options_for(layout.stage);
      zero_options.groups = [&](const ZeroOptions::Parameters& parameters) { return grouping(parameters, options); };
      auto model = zero<Optimizer>(net, options, comm, zero_options);
      for (int step = 0; step < kSteps; ++step) {
        if (step == kTurnedAt) turn(*net);
        give_gradients(model.named_shards(), step);
        model.step();
      }
      compare(whole(model), expected, name_of(layout));
    });
}

template <class Options>
Compare<Options> within(double tolerance) {
  return [tolerance](const auto& own, const auto& expected, const std::string& where) {
    expect_same(own, expected, tolerance, where);
  };
}

// Matrices to Muon, some of them to its AdamW.
std::vector<torch::optim::OptimizerParamGroup> muon_groups(
    const torch::OrderedDict<std::string, at::Tensor>& parameters, const MuonOptions& options) {
  std::vector<at::Tensor> matrices, others;
  for (const auto& item : parameters)
    (item.value().dim() < 2 || item.key() == "b.wide" ? others : matrices).push_back(item.value());
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(matrices, std::make_unique<MuonOptions>(options));
  groups.emplace_back(others, std::make_unique<MuonOptions>(MuonOptions(options).use_muon(false)));
  return groups;
}

TEST(OtherStrides, ChangeNoStep) {
  expect_same_when_turned<Muon, MuonOptions>(MuonOptions(2e-2).bfloat16(false), within<MuonOptions>(1e-4),
                                             &muon_groups);
  expect_same_when_turned<Adafactor, AdafactorOptions>(AdafactorOptions(1e-2), within<AdafactorOptions>(1e-5));
  expect_same_when_turned<Lion, LionOptions>(LionOptions(1e-2), within<LionOptions>(1e-6));
  expect_same_when_turned<ScheduleFreeAdamW, ScheduleFreeOptions>(ScheduleFreeOptions(1e-2),
                                                                  within<ScheduleFreeOptions>(1e-6));
  expect_same_when_turned<AdamW, torch::optim::AdamWOptions>(torch::optim::AdamWOptions(1e-2),
                                                             within<torch::optim::AdamWOptions>(1e-5));
  expect_same_when_turned<AdamW8bit, AdamW8bitOptions>(AdamW8bitOptions(1e-2).min_8bit_numel(100000),
                                                       within<AdamW8bitOptions>(1e-5));
}

// Other blocks round values differently: parameters' changes differ by a fraction.
TEST(OtherStrides, ChangeStatesIn8BitByTheirRounding) {
  const auto begun = stepped<AdamW8bit>({}, AdamW8bitOptions(1e-2), 0, 0);
  const Compare<AdamW8bitOptions> compare = [&](const auto& own, const auto& expected, const std::string& where) {
    for (const auto& [name, value] : expected) {
      if (value.dim() < 2 || value.numel() == 0) continue;
      const double way = (value - begun.at(name)).norm().template item<double>();
      EXPECT_LT((own.at(name) - value).norm().template item<double>(), 0.25 * way) << where << " " << name;
    }
  };
  expect_same_when_turned<AdamW8bit, AdamW8bitOptions>(AdamW8bitOptions(1e-2).min_8bit_numel(0), compare);
}

torch::nn::Sequential small_model() {
  auto net = seeded(
      3, [] { return torch::nn::Sequential(torch::nn::Linear(4, 7), torch::nn::Tanh(), torch::nn::Linear(7, 3)); });
  net->to(at::kDouble);
  return net;
}

TEST(OtherStrides, ChangeNoSearchOfLbfgs) {
  for (const int stage : {0, 1, 2})
    on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      auto trained = [&](bool turns) {
        auto net = small_model();
        auto model = zero(net, LbfgsOptions(0.5).max_iter(3), comm, {.stage = stage});
        for (int step = 0; step < 4; ++step) {
          if (turns && step == kTurnedAt) turn(*net);
          model.step([&] {
            model.zero_grad();
            const at::Tensor x = seeded(50 + comm->rank(), [] { return torch::randn({12, 4}, at::kDouble); });
            at::Tensor loss = (call(model, x) - x.narrow(1, 0, 3).sin()).square().mean();
            loss.backward();
            return loss;
          });
        }
        return whole(model);
      };
      expect_same(trained(true), trained(false), 1e-7, "stage " + std::to_string(stage));
    });
}

TEST(OtherStrides, ChangeNoAverage) {
  constexpr double kDecay = 0.5;
  for (const Layout& layout : {Layout{1, 0}, Layout{2, 0}, Layout{3, 1}, Layout{2, 2}})
    on_ranks(layout.world, [&](std::shared_ptr<Communicator> comm) {
      auto net = seeded(5, [] { return Bare(); });
      auto model = zero<SGD>(net, torch::optim::SGDOptions(0.1), comm, options_for(layout.stage));
      Ema ema(model, {.decay = kDecay});
      auto expected = whole(model);
      for (int step = 0; step < kSteps; ++step) {
        if (step == kTurnedAt) turn(*net);
        give_gradients(model.named_shards(), step);
        model.step();
        ema.update();
        for (auto& [name, value] : whole(model)) expected[name].lerp_(value, 1 - kDecay);
      }
      const auto own = whole(model);
      turn(*net);
      {
        auto averaged = ema.swap_in();
        expect_same(whole(model), expected, 1e-6, name_of(layout));
      }
      expect_same(whole(model), own, 0, name_of(layout) + " afterwards");
    });
}

// ---- checkpoints --------------------------------------------------------------------------------

// Some steps, up to a checkpoint or from one. The run from the start changes strides on the way.
struct Part {
  int begin = 0, end = kSteps;
  bool is_made_turned = false;
  Files files{};
};

template <class Optimizer, class Options>
std::map<std::string, at::Tensor> trained(const Layout& layout, const Options& options, const Part& part,
                                          Grouping<Options> grouping) {
  std::map<std::string, at::Tensor> result;
  on_ranks(layout.world, [&](std::shared_ptr<Communicator> comm) {
    auto net = seeded(5, [] { return Bare(); });
    if (part.is_made_turned) turn(*net);
    ZeroOptions zero_options = options_for(layout.stage);
    zero_options.groups = [&](const ZeroOptions::Parameters& parameters) { return grouping(parameters, options); };
    auto model = zero<Optimizer>(net, options, comm, zero_options);
    Ema ema(model, {.decay = 0.5});
    if (!part.files.load.empty()) load_checkpoint(part.files.load, ema.with_model(), model.optimizer());
    for (int step = part.begin; step <= part.end; ++step) {
      if (step == kTurnedAt && part.begin == 0) turn(*net);
      if (step == part.end) break;
      give_gradients(model.named_shards(), step);
      model.step();
      ema.update();
    }
    if (!part.files.save.empty()) save_checkpoint(part.files.save, ema.with_model(), model.optimizer());
    const auto own = whole(model);
    auto averaged = ema.swap_in();
    const auto averages = whole(model);
    if (comm->rank() != 0) return;
    result = own;
    for (const auto& [name, value] : averages) result["ema." + name] = value;
  });
  return result;
}

// Saves just after the strides have changed, and a step later.
template <class Optimizer, class Options>
void expect_checkpoints_go_on(const Options& options, double tolerance,
                              Grouping<Options> grouping = &one_group<Options>) {
  for (const Layout& layout : {Layout{2, 0}, Layout{3, 1}}) {
    const auto expected = trained<Optimizer>(layout, options, {}, grouping);
    for (const int saved_at : {kTurnedAt, kTurnedAt + 1}) {
      const TemporaryFolder folder;
      trained<Optimizer>(layout, options, {.end = saved_at, .files = {.save = folder / "a"}}, grouping);
      for (const bool is_made_turned : {false, true})
        expect_same(trained<Optimizer>(layout, options,
                                       {.begin = saved_at, .is_made_turned = is_made_turned, .files = {folder / "a"}},
                                       grouping),
                    expected, tolerance, name_of(layout) + c10::str(" ", saved_at, is_made_turned));
    }
  }
}

TEST(OtherStrides, GoThroughACheckpoint) {
  expect_checkpoints_go_on<Muon>(MuonOptions(2e-2).bfloat16(false), 1e-4, Grouping<MuonOptions>(&muon_groups));
  expect_checkpoints_go_on<Adafactor>(AdafactorOptions(1e-2), 1e-5);
  expect_checkpoints_go_on<AdamW>(torch::optim::AdamWOptions(1e-2), 1e-5);
  expect_checkpoints_go_on<AdamW8bit>(AdamW8bitOptions(1e-2).min_8bit_numel(100000), 1e-5);
}

// Each block consists of elements that are adjacent in memory.
TEST(OtherStrides, GoThroughACheckpointIn8BitIfTheModelHasThem) {
  const Layout layout{2, 0};
  const auto options = AdamW8bitOptions(1e-2).min_8bit_numel(0);
  const Grouping<AdamW8bitOptions> grouping = &one_group<AdamW8bitOptions>;
  const auto expected = trained<AdamW8bit>(layout, options, {}, grouping);
  for (const int saved_at : {kTurnedAt, kTurnedAt + 1}) {
    const TemporaryFolder folder;
    trained<AdamW8bit>(layout, options, {.end = saved_at, .files = {.save = folder / "a"}}, grouping);
    expect_same(trained<AdamW8bit>(layout, options,
                                   {.begin = saved_at, .is_made_turned = true, .files = {folder / "a"}}, grouping),
                expected, 0, c10::str("saved at ", saved_at));
    reshard_checkpoint(folder / "a", folder / "of3", 3);
    expect_same(trained<AdamW8bit>(layout, options,
                                   {.begin = saved_at, .is_made_turned = true, .files = {folder / "of3"}}, grouping),
                expected, 0, c10::str("saved at ", saved_at, ", resharded"));
    expect_contains(
        error_of<CheckpointMismatch>(
            [&] { trained<AdamW8bit>(layout, options, {.begin = saved_at, .files = {folder / "a"}}, grouping); }),
        "optim.exp_avg_scale.b.conv is of blocks in the order of memory [0, 2, 3, 1] of 'b.conv', the model "
        "has it in [0, 1, 2, 3]");
  }
}

// OSS's state dictionary includes the order of memory.
TEST(OtherStrides, GoThroughADictionary) {
  const auto options = AdamW8bitOptions(1e-2).min_8bit_numel(0);
  for (const bool is_loaded_turned : {false, true})
    on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      auto net = seeded(5, [] { return Bare(); }), other = seeded(5, [] { return Bare(); });
      turn(*net);
      if (is_loaded_turned) turn(*other);
      auto model = zero<AdamW8bit>(net, options, comm, options_for(1));
      auto next = zero<AdamW8bit>(other, options, comm, options_for(1));
      auto& from = dynamic_cast<ShardedOptimizer&>(model.optimizer());
      auto& to = dynamic_cast<ShardedOptimizer&>(next.optimizer());
      give_gradients(model.named_shards(), 0);
      model.step();
      from.consolidate_state_dict(-1);
      to.load_state_dict(from.state_dict());
      for (size_t i = 0; i < net->parameters().size(); ++i) {
        const at::NoGradGuard no_grad;
        other->parameters()[i].copy_(net->parameters()[i]);
      }
      for (auto* each : {&model, &next}) {
        give_gradients(each->named_shards(), 1);
        each->step();
      }
      const auto begun = whole(model);
      for (const auto& [name, value] : whole(next)) {
        if (is_loaded_turned) {
          EXPECT_TRUE(torch::equal(value, begun.at(name))) << name;
        } else if (value.numel() > 0) {
          EXPECT_LT((value - begun.at(name)).abs().max().item<float>(), 5e-3) << name;
        }
      }
    });
}

}  // namespace
}  // namespace tessera::other_strides_test
