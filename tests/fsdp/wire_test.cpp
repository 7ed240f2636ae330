// Parameters and gradients in 8 bit on the wire: error bounds, equal values on all ranks, and bytes.
#include "core/layout/int8_blocks.h"
#include "tests/support/reference.h"

namespace tessera::wire_test {
using namespace internal;
namespace {

using namespace testing_support;

constexpr int64_t kBlock = Int8Blocks::kWireBlockNumel;

// Half the scale of the block of each element.
at::Tensor bound_of(const at::Tensor& flat) {
  const int64_t numel = flat.numel(), rest = (kBlock - numel % kBlock) % kBlock;
  const at::Tensor rows = torch::constant_pad_nd(flat, {0, rest}).view({-1, kBlock}).abs();
  return (rows.amax(1, true) / 127 / 2 * 1.0001).expand_as(rows).flatten().narrow(0, 0, numel);
}

at::Tensor rounded(const at::Tensor& values) {
  const Int8Blocks blocks;
  at::Tensor bytes = torch::empty({blocks.encoded_bytes(values.numel())}, at::kByte), back = torch::empty_like(values);
  blocks.encode(values, bytes);
  blocks.decode(bytes, back);
  return back;
}

TEST(Int8BlocksTest, RoundsToHalfAScale) {
  for (const int64_t numel : {0, 1, 255, 256, 257, 5000}) {
    const at::Tensor values = seeded(numel, [&] { return torch::randn({numel}) * torch::randn({numel}).exp(); });
    EXPECT_TRUE(((rounded(values) - values).abs() <= bound_of(values)).all().item<bool>()) << numel;
    EXPECT_EQ(Int8Blocks().encoded_bytes(numel) % 16, 0);
    EXPECT_LE(Int8Blocks().encoded_bytes(numel), numel + (numel + kBlock - 1) / kBlock * 4 + 15);
  }
  const at::Tensor whole = torch::arange(-127, 128, at::kFloat);
  EXPECT_TRUE(torch::equal(rounded(whole), whole));
  EXPECT_TRUE(rounded(torch::zeros({300})).eq(0).all().item<bool>());
  EXPECT_TRUE(torch::equal(rounded(whole.to(at::kBFloat16)), whole.to(at::kBFloat16)));
}

// 180 / 127 of the smallest float is rounded to 1 of it, and 180 does not fit into 8 bit.
TEST(Int8BlocksTest, ChangesNoSignOfTinyValues) {
  const at::Tensor values = torch::arange(-180, 181, at::kFloat) * std::numeric_limits<float>::denorm_min();
  EXPECT_TRUE(rounded(values).eq(0).all().item<bool>());
  const at::Tensor normal = torch::arange(-127, 128, at::kFloat) * std::numeric_limits<float>::min();
  EXPECT_TRUE(torch::equal(rounded(normal), normal));
}

TEST(Int8BlocksTest, KeepsInfinityAndNaN) {
  for (const float bad : {INFINITY, -INFINITY, NAN}) {
    at::Tensor values = torch::ones({600});
    values[300] = bad;
    const at::Tensor back = rounded(values);
    EXPECT_TRUE(back.narrow(0, 256, 256).isnan().all().item<bool>());
    EXPECT_TRUE(back.narrow(0, 0, 256).eq(1).all().item<bool>() && back.narrow(0, 512, 88).eq(1).all().item<bool>());
  }
}

torch::nn::Sequential net() {
  return seeded(3, [] { return torch::nn::Sequential(torch::nn::Linear(40, 50), torch::nn::Linear(50, 40)); });
}

FsdpOptions options_with(WireFormats wire, int ranks_per_copy = 0) {
  FsdpOptions options{.auto_wrap = wrap_modules<torch::nn::LinearImpl>()};
  options.wire = wire;
  options.hybrid.ranks_per_copy = ranks_per_copy;
  return options;
}

at::Tensor batch(int rank) {
  return seeded(50 + rank, [] { return torch::randn({6, 40}); });
}

TEST(Wire, GathersTheSameRoundedParametersOnAllRanks) {
  for (const int world : {1, 2, 3, 4}) {
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      FullyShardedDataParallel fsdp(net(), comm, options_with({.parameters = WireFormat::kInt8Blocks}));
      auto* first = (*fsdp.module())[0]->as<torch::nn::LinearImpl>();
      const at::Tensor exact = net()[0]->as<torch::nn::LinearImpl>()->weight.detach();
      const at::Tensor used = (first->weight + 0).detach();  // an operator unshards
      if (world == 1) {
        EXPECT_TRUE(torch::equal(used, exact));
      } else {
        EXPECT_FALSE(torch::equal(used, exact));
        EXPECT_LE((used - exact).abs().max().item<double>(), exact.abs().max().item<double>() / 127 / 2 * 1.0001);
      }
      at::Tensor others = on_rank_device(torch::empty({world * used.numel()}));
      comm->all_gather(others, used.flatten()).wait();
      for (int rank = 0; rank < world; ++rank)
        EXPECT_TRUE(torch::equal(others.narrow(0, rank * used.numel(), used.numel()), used.flatten()));
      // Shards and full parameters are exact.
      EXPECT_TRUE(torch::equal(fsdp.full_state_dict()["0.weight"], exact));
      auto scope = fsdp.summon_full_params();
      EXPECT_TRUE(torch::equal(first->weight, exact));
    });
  }
}

// The error of each rank's gradient is at most half a scale of its own blocks.
TEST(Wire, ReducesGradientsWithinTheBound) {
  for (const int world : fewer_on_devices<std::vector<int>>({2, 3, 4}, {4})) {
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      auto grads = [&](WireFormats wire, int ranks_per_copy) {
        FullyShardedDataParallel fsdp(net(), comm, options_with(wire, ranks_per_copy));
        fsdp(batch(comm->rank())).square().mean().backward();
        std::vector<at::Tensor> found;
        for (const at::Tensor& shard : fsdp.parameters()) found.push_back(shard.grad().clone());
        return found;
      };
      double largest = 0;  // over the ranks
      for (int rank = 0; rank < world; ++rank) {
        auto whole = net();
        whole->forward(batch(rank)).square().mean().backward();
        for (const at::Tensor& parameter : whole->parameters())
          largest = std::max(largest, parameter.grad().abs().max().item<double>());
      }
      for (const int ranks_per_copy : {0, 2}) {
        if (ranks_per_copy > 0 && world != 4) continue;
        const auto exact = grads({}, ranks_per_copy);
        const auto coarse = grads({.gradients = WireFormat::kInt8Blocks}, ranks_per_copy);
        bool differs = false;
        for (size_t i = 0; i < exact.size(); ++i) {
          if (exact[i].numel() == 0) continue;
          EXPECT_LE((exact[i] - coarse[i]).abs().max().item<double>(), largest / 127 / 2 * 1.001) << world;
          differs = differs || !torch::equal(exact[i], coarse[i]);
        }
        EXPECT_TRUE(differs) << "rank " << comm->rank();
      }
    });
  }
}

// A block with an infinity makes the padding of its buffer NaN, which is no part of the norm.
TEST(Wire, ANormIsFiniteAfterAStepThatWasNot) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    FullyShardedDataParallel fsdp(seeded(3, [] { return torch::nn::Linear(5, 3); }), comm,
                                  options_with({.gradients = WireFormat::kInt8Blocks}));
    std::vector<bool> is_finite;
    for (int step = 0; step < 4; ++step) {
      for (const at::Tensor& shard : fsdp.parameters())
        if (shard.grad().defined()) shard.grad().zero_();
      const at::Tensor x = on_rank_device(torch::ones({2, 5}));
      (fsdp(x).square().mean() * (step == 1 ? INFINITY : 1.0)).backward();
      is_finite.push_back(std::isfinite(fsdp.clip_grad_norm_(0.1)));
    }
    EXPECT_EQ(is_finite, (std::vector<bool>{true, false, true, true}));
  });
}

TEST(Wire, SendsAQuarterOfTheBytes) {
  on_ranks(4, [](std::shared_ptr<Communicator> comm) {
    auto sent_by_a_step = [&](WireFormats wire) {
      auto large =
          seeded(3, [] { return torch::nn::Sequential(torch::nn::Linear(256, 256), torch::nn::Linear(256, 256)); });
      FullyShardedDataParallel fsdp(large, comm, options_with(wire));
      const int64_t before = comm->traffic().sent_bytes;
      fsdp(torch::ones({2, 256})).sum().backward();
      return static_cast<double>(comm->traffic().sent_bytes - before);
    };
    const double exact = sent_by_a_step({});
    const double coarse = sent_by_a_step({WireFormat::kInt8Blocks, WireFormat::kInt8Blocks});
    EXPECT_LT(coarse / exact, 0.27);
    EXPECT_GT(coarse / exact, 0.24);
  });
}

// Losses decrease as without 8 bit, and all ranks end with the same model.
TEST(Wire, TrainsInEveryStage) {
  on_ranks(3, [](std::shared_ptr<Communicator> comm) {
    const auto adam = torch::optim::AdamWOptions(1e-2);
    auto losses = [&](auto& model, torch::optim::Optimizer& optimizer) {
      double loss = 0;
      for (int step = 0; step < 15; ++step) {
        optimizer.zero_grad();
        const at::Tensor value = (call(model, batch(comm->rank())) - 1).square().mean();
        value.backward();
        optimizer.step();
        loss = value.template item<double>();
      }
      return loss;
    };
    auto fsdp_loss = [&](WireFormats wire, bool offload) {
      FsdpOptions options = options_with(wire);
      options.offload.params = options.offload.grads = offload;
      FullyShardedDataParallel fsdp(net(), comm, options);
      torch::optim::AdamW optimizer(fsdp.parameters(), adam);
      return losses(fsdp, optimizer);
    };
    auto sdp_loss = [&](WireFormat wire) {
      auto own = net();
      OSS<torch::optim::AdamW> optimizer(own->parameters(), adam, comm);
      ShardedDataParallel sdp(own, optimizer, comm, SdpOptions{.wire = wire});
      const double loss = losses(sdp, optimizer);
      for (const at::Tensor& parameter : own->parameters()) {
        at::Tensor all = on_rank_device(torch::empty({3 * parameter.numel()}));
        comm->all_gather(all, parameter.detach().flatten()).wait();
        EXPECT_TRUE(torch::equal(all.view({3, -1})[0], all.view({3, -1})[2]));
      }
      return loss;
    };
    const WireFormats both{WireFormat::kInt8Blocks, WireFormat::kInt8Blocks};
    const double exact = fsdp_loss({}, false);
    EXPECT_NEAR(fsdp_loss(both, false), exact, 0.05 * exact);
    EXPECT_EQ(fsdp_loss(both, true), fsdp_loss(both, false));
    EXPECT_NEAR(sdp_loss(WireFormat::kInt8Blocks), exact, 0.15 * exact);
    auto own = net();
    OSS<torch::optim::AdamW> optimizer(own->parameters(), adam, comm);
    expect_contains(error_of<std::invalid_argument>([&] {
                      ShardedDataParallel sdp(own, optimizer, comm,
                                              SdpOptions{.reduce_dtype = at::kHalf, .wire = WireFormat::kInt8Blocks});
                    }),
                    "SdpOptions::reduce_dtype is Half");
  });
}

}  // namespace
}  // namespace tessera::wire_test
