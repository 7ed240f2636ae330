#pragma once

#include <filesystem>

#include "tests/optim/bare_model.h"

namespace tessera::testing_support {
using namespace internal;

struct Layout {
  int world = 1;
  int stage = -1;  // of zero(); -1: torch's optimizer, without a wrapper
  int ranks_per_copy = 0;
  bool offload = false;
  std::string disk{};  // a folder
};

// Maps named parameters to groups, for zero().
template <class Options>
using Grouping = std::function<std::vector<torch::optim::OptimizerParamGroup>(
    const torch::OrderedDict<std::string, at::Tensor>&, const Options&)>;

template <class Options>
std::vector<torch::optim::OptimizerParamGroup> one_group(const torch::OrderedDict<std::string, at::Tensor>& parameters,
                                                         const Options& options) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(parameters.values(), std::make_unique<Options>(options));
  return groups;
}

// Returns the parameters of an unwrapped module like a wrapper in a world of one.
inline std::vector<NamedShard> whole_shards(const torch::nn::Module& module) {
  std::vector<NamedShard> shards;
  for (const auto& item : module.named_parameters())
    shards.push_back({item.key(),
                      {},
                      item.value().sizes().vec(),
                      item.value().strides().vec(),
                      {0, item.value().numel()},
                      item.value()});
  return shards;
}

// Checkpoints to load before a run and to save after it.
struct Files {
  std::filesystem::path load{}, save{};
};

// Returns the whole parameters, by name, after steps begin to end - 1 in a layout.
template <class Optimizer, class Options>
std::map<std::string, at::Tensor> stepped(const Layout& layout, const Options& options, int begin, int end,
                                          Grouping<Options> grouping = &one_group<Options>, const Files& files = {},
                                          at::ScalarType dtype = at::kFloat) {
  std::map<std::string, at::Tensor> result;
  on_ranks(layout.world, [&](std::shared_ptr<Communicator> comm) {
    auto net = seeded(5, [&] { return Bare(dtype); });
    if (layout.stage < 0) {
      Optimizer optimizer(grouping(net->named_parameters(), options), options);
      const std::vector<NamedShard> shards = whole_shards(*net);
      for (int step = begin; step < end; ++step) {
        give_gradients(shards, step);
        optimizer.step();
      }
      for (const auto& item : net->named_parameters()) result[item.key()] = item.value().detach().cpu();
      return;
    }
    ZeroOptions zero_options{.stage = layout.stage};
    zero_options.groups = [&](const ZeroOptions::Parameters& parameters) { return grouping(parameters, options); };
    zero_options.fsdp.auto_wrap =
        wrap_if([](const std::string& name, const torch::nn::Module&) { return name == "a"; });
    zero_options.fsdp.hybrid.ranks_per_copy = layout.ranks_per_copy;
    zero_options.fsdp.offload = {.params = layout.offload, .grads = layout.offload, .directory = layout.disk};
    zero_options.oss.offload = {.params = layout.offload, .grads = layout.offload};
    zero_options.oss.broadcast_bucket_bytes = 3000;
    auto model = zero<Optimizer>(net, options, comm, zero_options);
    if (!files.load.empty()) load_checkpoint(files.load, model, model.optimizer());
    for (int step = begin; step < end; ++step) {
      give_gradients(model.named_shards(), step);
      model.step();
    }
    if (!files.save.empty()) save_checkpoint(files.save, model, model.optimizer());
    auto state = model.full_state_dict();
    if (comm->rank() == 0)
      for (const auto& item : state) result[item.key()] = item.value().cpu();
  });
  return result;
}

inline void expect_same(const std::map<std::string, at::Tensor>& got, const std::map<std::string, at::Tensor>& expected,
                        double tolerance, const std::string& where) {
  ASSERT_EQ(got.size(), expected.size()) << where;
  for (const auto& [name, value] : expected) {
    const at::Tensor& other = got.at(name);
    EXPECT_TRUE(tolerance == 0 ? torch::equal(other, value) : torch::allclose(other, value, tolerance, tolerance))
        << where << ": " << name << " differs by " << (other - value).abs().max().item<float>();
  }
}

inline std::string name_of(const Layout& layout) {
  return "world " + std::to_string(layout.world) + " stage " + std::to_string(layout.stage) +
         (layout.ranks_per_copy > 0 ? " copies of " + std::to_string(layout.ranks_per_copy) : "") +
         (layout.offload ? " offloaded" : "") + (layout.disk.empty() ? "" : " to a disk");
}

// Compares every stage at 1 to 5 ranks, several replica shapes, and offload with the same optimizer class on whole
// parameters in one process.
template <class Optimizer, class Options>
void expect_exact_everywhere(const Options& options, double tolerance, Grouping<Options> grouping = &one_group<Options>,
                             at::ScalarType dtype = at::kFloat) {
  constexpr int kSteps = 4;
  const auto expected = stepped<Optimizer>({}, options, 0, kSteps, grouping, {}, dtype);
  std::vector<Layout> layouts{{4, 3, 2},       {4, 3, 1},       {6, 3, 3},      {6, 3, 2},
                              {2, 3, 0, true}, {2, 2, 0, true}, {3, 1, 0, true}};
  for (int world = 1; world <= 5; ++world)
    for (const int stage : {3, 2, world % 2}) layouts.push_back({world, stage});
  layouts = fewer_on_devices(layouts, {{4, 3, 2}, {2, 3, 0, true}, {3, 2}, {2, 1, 0, true}});
  for (const Layout& layout : layouts)
    expect_same(stepped<Optimizer>(layout, options, 0, kSteps, grouping, {}, dtype), expected, tolerance,
                name_of(layout));
}

}  // namespace tessera::testing_support
