// Fused Adam and AdamW against torch's.
#include <sstream>

#include "tests/support/random_net.h"
#include "tests/support/reference.h"

namespace tessera::fused_adam_test {
using namespace internal;
namespace {

using namespace testing_support;

// Parameters of every kind, and gradients with other strides.
std::vector<at::Tensor> parameters(at::ScalarType dtype) {
  std::vector<at::Tensor> made{
      torch::randn({3, 5}),     torch::randn({1}),
      torch::randn({0}),        torch::randn({}),
      torch::randn({4, 6}).t(), torch::randn({2, 3, 4, 4}).contiguous(at::MemoryFormat::ChannelsLast)};
  for (auto& tensor : made) tensor = tensor.to(dtype).detach().set_requires_grad(true);
  return made;
}

template <class Fused, class Plain, class Options>
void expect_same_steps(Options options, at::ScalarType dtype, double tolerance) {
  auto own = seeded(1, [&] { return parameters(dtype); }), expected = seeded(1, [&] { return parameters(dtype); });
  Fused fused(own, options);
  Plain plain(expected, options);
  for (int step = 0; step < 12; ++step) {
    for (size_t i = 0; i < own.size(); ++i) {
      if ((step + i) % 4 == 0) {  // some gradients are missing each time
        own[i].mutable_grad() = expected[i].mutable_grad() = at::Tensor();
        continue;
      }
      at::Tensor gradient = seeded(100 * step + i, [&] { return torch::randn(own[i].sizes()); }).to(dtype);
      if (own[i].dim() == 2 && step % 2 == 0) gradient = gradient.t().contiguous().t();
      own[i].mutable_grad() = gradient;
      expected[i].mutable_grad() = gradient.clone();
    }
    fused.step();
    plain.step();
  }
  for (size_t i = 0; i < own.size(); ++i)
    EXPECT_TRUE(torch::allclose(own[i], expected[i], tolerance, tolerance)) << i << " " << own[i] - expected[i];
}

TEST(FusedAdam, EqualsTorchsToRounding) {
  for (const auto& [dtype, tolerance] : {std::pair{at::kFloat, 1e-5}, {at::kDouble, 1e-6}, {at::kBFloat16, 3e-2}}) {
    for (const bool amsgrad : {false, true}) {
      for (const double decay : {0.0, 0.1}) {
        expect_same_steps<Adam, torch::optim::Adam>(
            torch::optim::AdamOptions(1e-2).betas({0.8, 0.95}).amsgrad(amsgrad).weight_decay(decay), dtype, tolerance);
        expect_same_steps<AdamW, torch::optim::AdamW>(
            torch::optim::AdamWOptions(1e-2).betas({0.8, 0.95}).amsgrad(amsgrad).weight_decay(decay), dtype, tolerance);
      }
    }
  }
}

// model->parameters() lists a tied weight under each name, and torch's optimizers step it as often.
template <class Own, class Plain, class Options>
void expect_tied_weights_step_twice(const Options& options, double tolerance) {
  std::vector<at::Tensor> own, expected;
  for (std::vector<at::Tensor>* list : {&own, &expected}) {
    for (const int64_t numel : {5, 3}) list->push_back(torch::ones({numel}, at::kDouble).set_requires_grad(true));
    list->push_back(list->front());
  }
  Own fused(own, options);
  Plain plain(expected, options);
  for (int step = 0; step < 4; ++step) {
    for (size_t i = 0; i < 2; ++i)
      own[i].mutable_grad() = expected[i].mutable_grad() = torch::full_like(own[i].detach(), 0.5 + step * 0.1);
    fused.step();
    plain.step();
    for (size_t i = 0; i < 2; ++i)
      EXPECT_TRUE(torch::allclose(own[i], expected[i], tolerance, tolerance)) << step << own[i] << expected[i];
  }
}

TEST(FusedOptimizers, StepATiedWeightAsOftenAsItIsListed) {
  for (const double momentum : {0.0, 0.9})
    expect_tied_weights_step_twice<SGD, torch::optim::SGD>(
        torch::optim::SGDOptions(0.1).momentum(momentum).weight_decay(0.01), 1e-12);
  const auto adam = torch::optim::AdamOptions(0.1);
  expect_tied_weights_step_twice<Adam, torch::optim::Adam>(adam, 1e-9);
  expect_tied_weights_step_twice<HostAdam, torch::optim::Adam>(adam, 1e-9);
}

// Threads must not step one parameter at the same time: it is large enough for several parts.
TEST(FusedOptimizers, StepALargeTiedWeightOnTheHostOneTimeAfterTheOther) {
  const int threads = at::get_num_threads();
  const ScopeExit restore([threads] { at::set_num_threads(threads); });
  at::set_num_threads(2);
  const auto options = torch::optim::AdamWOptions(0.1);
  at::Tensor own = torch::ones({1 << 20}).set_requires_grad(true),
             expected = own.detach().clone().set_requires_grad(true);
  HostAdamW host(std::vector<at::Tensor>{own, own}, options);
  torch::optim::AdamW plain(std::vector<at::Tensor>{expected, expected}, options);
  EXPECT_EQ(host.revocable_steps(), nullptr);
  for (int step = 0; step < 3; ++step) {
    own.mutable_grad() = expected.mutable_grad() = torch::full_like(own.detach(), 0.5);
    host.step();
    plain.step();
  }
  EXPECT_TRUE(torch::allclose(own, expected, 1e-6, 1e-6));
}

// Gradients with a negative bit, and zeros without memory.
template <class Own, class Plain, class Options>
void expect_same_of_lazy_gradients(Options options) {
  auto own = torch::ones({5, 6}).set_requires_grad(true), expected = torch::ones({5, 6}).set_requires_grad(true);
  Own ours({own}, options);
  Plain plain({expected}, options);
  for (int step = 0; step < 4; ++step) {
    const at::Tensor gradient = step % 2 == 0 ? at::_neg_view(seeded(step, [] { return torch::randn({5, 6}); }))
                                              : at::_efficientzerotensor({5, 6}, at::TensorOptions(at::kFloat));
    own.mutable_grad() = gradient;
    expected.mutable_grad() = gradient.clone();
    ours.step();
    plain.step();
  }
  EXPECT_TRUE(torch::allclose(own, expected, 1e-5, 1e-5)) << own - expected;
}

TEST(FusedAdam, LazyGradientsHaveTheirValues) {
  expect_same_of_lazy_gradients<Adam, torch::optim::Adam>(torch::optim::AdamOptions(0.1));
  expect_same_of_lazy_gradients<AdamW, torch::optim::AdamW>(torch::optim::AdamWOptions(0.1));
  expect_same_of_lazy_gradients<SGD, torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9));
  expect_same_of_lazy_gradients<HostAdam, torch::optim::Adam>(torch::optim::AdamOptions(0.1));
  expect_same_of_lazy_gradients<HostAdamW, torch::optim::AdamW>(torch::optim::AdamWOptions(0.1).amsgrad(true));
}

TEST(FusedAdam, TrainsUnderFsdpInGroups) {
  for (int world : {1, 2, 3}) {
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      auto model = seeded(7, [] { return RandomNet(11); }), reference = seeded(7, [] { return RandomNet(11); });
      FullyShardedDataParallel fsdp(model, comm, {.auto_wrap = wrap_by_size(60)});
      auto grouped = [](const std::vector<at::Tensor>& all) {
        std::vector<torch::optim::OptimizerParamGroup> groups(2, torch::optim::OptimizerParamGroup({}));
        for (size_t i = 0; i < all.size(); ++i) groups[i % 2].params().push_back(all[i]);
        groups[1].set_options(
            std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(3e-3).weight_decay(0.2)));
        return groups;
      };
      AdamW sharded(grouped(fsdp.parameters()), torch::optim::AdamWOptions(1e-2));
      torch::optim::AdamW whole(grouped(unique_parameters(*reference)), torch::optim::AdamWOptions(1e-2));
      auto loss = [](auto& net, int rank) {
        return net(seeded(rank, [] { return torch::randn({4, testing_support::kWidth}); })).square().mean();
      };
      for (int step = 0; step < 5; ++step) {
        step_both(sharded, whole, [&] {
          loss(fsdp, comm->rank()).backward();
          reference_backward(reference, world, [&](int rank) { return loss(reference, rank); });
        });
      }
      auto state = fsdp.full_state_dict();
      for (const auto& entry : reference->named_parameters())
        EXPECT_TRUE(torch::allclose(state[entry.key()], entry.value().detach(), 1e-4, 1e-4)) << entry.key();
    });
  }
}

TEST(FusedAdam, ArchivesAreTorchs) {
  auto own = seeded(1, [] { return parameters(at::kFloat); });
  for (auto& parameter : own) parameter.mutable_grad() = torch::ones_like(parameter).detach();
  AdamW fused(own, torch::optim::AdamWOptions(1e-2));
  fused.step();
  std::stringstream file;
  torch::save(fused, file);
  torch::optim::AdamW plain(own, torch::optim::AdamWOptions(5e-1));
  torch::load(plain, file);
  const auto& state = static_cast<torch::optim::AdamWParamState&>(*plain.state().at(own[0].unsafeGetTensorImpl()));
  EXPECT_EQ(state.step(), 1);
  EXPECT_TRUE(torch::allclose(state.exp_avg(), torch::full({3, 5}, 0.1)));
}

TEST(FusedAdam, MistakesAreNamed) {
  auto weight = torch::ones({3, 2}).set_requires_grad(true);
  weight.mutable_grad() = torch::ones({3, 2}).to_sparse();
  Adam adam({weight}, 1e-2);
  expect_contains(error_of<std::invalid_argument>([&] { adam.step(); }), "layout");
  // Before any change, even of earlier groups.
  auto fine = torch::ones({2}).set_requires_grad(true);
  fine.mutable_grad() = torch::ones({2});
  std::vector<torch::optim::OptimizerParamGroup> groups{torch::optim::OptimizerParamGroup({fine}),
                                                        torch::optim::OptimizerParamGroup({weight})};
  Adam grouped(groups, 1e-2);
  expect_contains(error_of<std::invalid_argument>([&] { grouped.step(); }), "shape [3, 2] has a gradient of layout");
  EXPECT_TRUE(torch::equal(fine, torch::ones({2})));
}

// libtorch reads options of another class as if they were its own; 2.15 replaces them by the optimizer's.
TEST(FusedOptimizers, RefuseGroupsWithOptionsOfAnotherOptimizer) {
  const auto refuse = [](const auto& options, const auto make) {
    auto weight = torch::ones({2}).set_requires_grad(true);
    weight.mutable_grad() = torch::ones({2});
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<at::Tensor>{weight}, std::make_unique<std::decay_t<decltype(options)>>(options));
    const auto optimizer = make(std::move(groups));
    optimizer->param_groups()[0].set_options(std::make_unique<std::decay_t<decltype(options)>>(options));
    expect_contains(error_of<std::invalid_argument>([&] { optimizer->step(); }),
                    "a group has options of another optimizer");
    EXPECT_TRUE(torch::equal(weight.detach(), torch::ones({2})));
  };
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;
  const torch::optim::AdamOptions adam(0.1);
  const torch::optim::SGDOptions sgd(0.1);
  refuse(adam, [](const Groups& groups) { return std::make_unique<AdamW>(groups); });
  refuse(adam, [&](const Groups& groups) { return std::make_unique<SGD>(groups, sgd); });
  refuse(sgd, [](const Groups& groups) { return std::make_unique<HostAdamW>(groups); });
  refuse(torch::optim::AdamWOptions(0.1), [](const Groups& groups) { return std::make_unique<HostAdam>(groups); });
}

}  // namespace
}  // namespace tessera::fused_adam_test
