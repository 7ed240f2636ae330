// Gradients in buckets, without a wrapper: the order of reductions, wire formats, copies, the host, failures.
#include "core/gradients/gradient_reducer.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <tessera/errors.h>
#include <tessera/launch.h>
#include <tessera/plan.h>
#include "core/layout/unit_plan.h"
#include "core/runtime/copy_engine.h"
#include "tests/gradients/errors.h"

namespace tessera::gradient_reducer_test {
using namespace internal;
namespace {

using gradients_test::error_of;
using gradients_test::expect_contains;
using Cut = FlatLayout::Cut;
using Lines = std::vector<std::string>;

struct Config {
  std::vector<std::vector<int64_t>> numels = {{3, 2}, {5}};  // of each bucket's parameters
  Cut cut = Cut::kWhole;
  at::ScalarType dtype = at::kFloat;
  std::optional<at::ScalarType> wire_dtype = {};
  WireFormat wire = WireFormat::kDtype;
  int ranks_per_copy = 0;
  ReducerOptions options = {};
};

// One rank's reducer, with its parameters, buckets and result buffers. By owner, bucket b belongs to rank b % size.
class Rig {
 public:
  Rig(std::shared_ptr<Communicator> comm, Config given)
      : config(std::move(given)), mesh(make_mesh(std::move(comm), config.ranks_per_copy, 0)), parameters(plan()) {
    reducer.emplace(parameters, mesh, log, config.options);
    set_buckets();
  }

  int rank() const { return mesh.world->rank(); }
  int world() const { return mesh.world->size(); }
  // Small integers: exact in every dtype here, and so is their average over the ranks.
  at::Tensor gradient_of(size_t parameter, int rank) const {
    return torch::arange(parameters[parameter].tensor.numel()).add(parameter + 1).mul(2 * (rank + 1)).to(config.dtype);
  }
  at::Tensor gradient(size_t parameter) const { return gradient_of(parameter, rank()); }
  at::Tensor average(size_t parameter) const { return gradient_of(parameter, 0) * (world() + 1) / 2; }

  std::vector<size_t> all_buckets() const {
    std::vector<size_t> order(reducer->buckets().size());
    std::iota(order.begin(), order.end(), size_t{0});
    return order;
  }
  void add_all() {
    for (size_t i = 0; i < parameters.size(); ++i) reducer->add(i, gradient(i));
  }
  void run_pass() {
    reducer->begin(all_buckets());
    add_all();
    reducer->start_full_ones();
    reducer->finish();
  }
  int64_t bucket_bytes() const {
    MemoryReport report;
    reducer->report(report);
    return report.bucket_bytes;
  }
  void zero_grad() {
    for (at::Tensor& leaf : leaves) leaf.mutable_grad().reset();
  }
  // This rank's part of a parameter, and of a tensor of its shape.
  Range part(size_t parameter) const {
    const GradientBucket& bucket = reducer->buckets()[reducer->bucket_of(parameter)];
    return bucket.layout.owned(static_cast<int64_t>(parameter - bucket.members[0]), mesh.shard->rank());
  }
  at::Tensor part_of(size_t parameter, const at::Tensor& whole) const {
    return whole.narrow(0, part(parameter).begin, part(parameter).numel());
  }
  const at::Tensor& grad(size_t parameter) const { return leaves[parameter].grad(); }
  void expect_grad(size_t parameter, const at::Tensor& whole) const {
    if (part(parameter).numel() == 0) return;
    ASSERT_TRUE(grad(parameter).defined()) << "parameter " << parameter << " on rank " << rank();
    EXPECT_TRUE(torch::equal(grad(parameter), part_of(parameter, whole)))
        << "parameter " << parameter << " on rank " << rank() << ": " << grad(parameter);
  }
  void expect_averages() const {
    for (size_t i = 0; i < parameters.size(); ++i) expect_grad(i, average(i));
  }

  const Config config;
  const Mesh mesh;
  CollectiveLog log;
  const std::vector<PlannedParameter> parameters;
  std::vector<at::Tensor> leaves;  // by parameter: this rank's part of it
  std::optional<GradientReducer> reducer;

 private:
  std::vector<PlannedParameter> plan() const {
    std::vector<PlannedParameter> planned;
    for (const auto& bucket : config.numels)
      for (const int64_t numel : bucket)
        planned.push_back({"p" + std::to_string(planned.size()),
                           {},
                           torch::zeros({numel}, at::TensorOptions(config.dtype).requires_grad(true))});
    return planned;
  }
  void set_buckets() {
    std::vector<GradientBucket> buckets;
    for (const auto& numels : config.numels) {
      const int owner = static_cast<int>(buckets.size()) % mesh.shard->size();
      GradientBucket bucket{"bucket " + std::to_string(buckets.size()),
                            {},
                            {},
                            layout_of(numels, owner),
                            owner,
                            config.dtype,
                            config.wire_dtype,
                            config.wire};
      std::vector<GradientBuffer::Member> members;
      for (size_t i = 0; i < numels.size(); ++i) {
        const at::Tensor& parameter = parameters[leaves.size()].tensor;
        bucket.members.push_back(leaves.size());
        bucket.geometries.push_back(geometry_of(parameter));
        const auto index = static_cast<int64_t>(i);
        const Range owned = bucket.layout.owned(index, mesh.shard->rank());
        leaves.push_back(torch::zeros({owned.numel()}, parameter.options()).requires_grad_());
        members.push_back(
            {leaves.back(), geometry_of(leaves.back()), bucket.layout.offset_in_shard(index, mesh.shard->rank())});
      }
      bucket.is_offloaded = config.options.to_host != nullptr;
      if (const int64_t numel = bucket.layout.shard_numel(mesh.shard->rank());
          config.cut != Cut::kByOwner || owner == mesh.shard->rank()) {
        results_.push_back(std::make_unique<GradientBuffer>(
            std::move(members), numel, config.dtype,
            [](int64_t count, at::ScalarType dtype) { return torch::empty({count}, dtype); }));
        bucket.result = results_.back().get();
      }
      buckets.push_back(std::move(bucket));
    }
    reducer->set_buckets(std::move(buckets));
  }
  FlatLayout layout_of(const std::vector<int64_t>& numels, int owner) const {
    const int size = mesh.shard->size();
    switch (config.cut) {
      case Cut::kEvenly:
        return FlatLayout::evenly(numels, size, 1);
      case Cut::kByOwner:
        return FlatLayout::by_owner(numels, std::vector<int>(numels.size(), owner), size, 1);
      case Cut::kWhole:
        break;
    }
    return FlatLayout::whole(numels, size, 1);
  }

  std::vector<std::unique_ptr<GradientBuffer>> results_;
};

void on_ranks(int world, const Config& config, const std::function<void(Rig&)>& body) {
  run_ranks(world, [&](std::shared_ptr<Communicator> comm) {
    const torch::NoGradGuard no_grad;
    Rig rig(std::move(comm), config);
    body(rig);
    EXPECT_EQ(rig.bucket_bytes(), 0);
  });
}

// More than the bytes from which a gradient is sent without a copy.
constexpr int64_t kLarge = 70'000;

// ---- results ------------------------------------------------------------------------------------

TEST(GradientReducer, AveragesForEveryCutAndDtype) {
  for (const Cut cut : {Cut::kEvenly, Cut::kByOwner, Cut::kWhole})
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kComplexFloat})
      for (const int world : {1, 2, 3})
        on_ranks(world, {.numels = {{3, 2, 0}, {5}, {1}}, .cut = cut, .dtype = dtype}, [](Rig& rig) {
          for (int step = 0; step < 2; ++step) {
            rig.run_pass();
            rig.expect_averages();
            rig.zero_grad();
          }
        });
}

TEST(GradientReducer, AddsToAGradientThatIsThere) {
  on_ranks(2, {}, [](Rig& rig) {
    rig.run_pass();
    rig.run_pass();
    for (size_t i = 0; i < rig.parameters.size(); ++i) rig.expect_grad(i, rig.average(i) * 2);
  });
}

TEST(GradientReducer, DividesByTheDivisorInPlaceOfTheWorld) {
  for (const Cut cut : {Cut::kEvenly, Cut::kByOwner, Cut::kWhole})
    on_ranks(2, {.cut = cut}, [](Rig& rig) {
      rig.reducer->set_divisor(4);
      rig.run_pass();
      for (size_t i = 0; i < rig.parameters.size(); ++i) rig.expect_grad(i, rig.average(i) / 2);
    });
}

TEST(GradientReducer, AveragesOverTheCopiesOfAModel) {
  for (const WireFormat wire : {WireFormat::kDtype, WireFormat::kInt8Blocks})
    for (const int ranks_per_copy : {1, 2})
      on_ranks(4, {.cut = Cut::kEvenly, .wire = wire, .ranks_per_copy = ranks_per_copy}, [&](Rig& rig) {
        rig.run_pass();
        if (wire == WireFormat::kDtype || ranks_per_copy == 1) return rig.expect_averages();
        for (size_t i = 0; i < rig.parameters.size(); ++i)
          EXPECT_TRUE(torch::allclose(rig.grad(i), rig.part_of(i, rig.average(i)), 0.02, 0.2));
      });
}

TEST(GradientReducer, RoundsOnlyOnTheWire) {
  const double fine = 1 + 1.0 / 1024;  // 1 in bfloat16
  const Config config{.numels = {{2}}, .wire_dtype = at::kBFloat16};
  on_ranks(2, config, [&](Rig& rig) {
    rig.reducer->begin({0});
    rig.reducer->add(0, torch::full({2}, fine));
    rig.reducer->finish();
    EXPECT_EQ(rig.grad(0).scalar_type(), at::kFloat);
    EXPECT_TRUE(torch::equal(rig.grad(0), torch::ones({2})));
  });
}

TEST(GradientReducer, SendsInt8BlocksWithinHalfAScale) {
  for (const Cut cut : {Cut::kEvenly, Cut::kByOwner})
    on_ranks(3, {.numels = {{400, 200}, {300}}, .cut = cut, .wire = WireFormat::kInt8Blocks}, [](Rig& rig) {
      rig.run_pass();
      for (size_t i = 0; i < rig.parameters.size(); ++i) {
        if (rig.part(i).numel() == 0) continue;
        const double bound = rig.gradient_of(i, 2).max().item<double>() / 127;
        const at::Tensor error = rig.grad(i) - rig.part_of(i, rig.average(i));
        EXPECT_LE(error.abs().max().item<double>(), bound);
      }
    });
}

// ---- order --------------------------------------------------------------------------------------

TEST(GradientReducer, ReducesInTheGivenOrderWhateverIsFullFirst) {
  on_ranks(2, {}, [](Rig& rig) {
    rig.reducer->begin({1, 0});
    EXPECT_FALSE(rig.reducer->add(0, rig.gradient(0)));
    EXPECT_TRUE(rig.reducer->add(1, rig.gradient(1)));
    rig.reducer->start_full_ones();
    EXPECT_EQ(rig.log.lines(), Lines{});
    EXPECT_TRUE(rig.reducer->add(2, rig.gradient(2)));
    rig.reducer->start_full_ones();
    EXPECT_EQ(rig.log.lines(), (Lines{"all-reduce of bucket 1 (5 elements)", "all-reduce of bucket 0 (5 elements)"}));
    EXPECT_EQ(rig.reducer->arrivals(), (std::vector<size_t>{0, 1, 2}));
    rig.reducer->finish();
    rig.expect_averages();
  });
}

TEST(GradientReducer, ReducesUnforeseenBucketsLast) {
  on_ranks(2, {.cut = Cut::kEvenly}, [](Rig& rig) {
    rig.reducer->begin({1});
    rig.reducer->add(0, rig.gradient(0));
    rig.reducer->add(1, rig.gradient(1));
    rig.reducer->add(2, rig.gradient(2));
    rig.reducer->start_full_ones();
    EXPECT_EQ(rig.log.lines(),
              (Lines{"reduce-scatter of bucket 1 (6 elements)", "reduce-scatter of bucket 0 (6 elements)"}));
    rig.reducer->finish();
    rig.expect_averages();
  });
}

TEST(GradientReducer, StartsAfreshAfterRanksDisagreed) {
  on_ranks(2, {}, [](Rig& rig) {
    if (rig.rank() == 0) rig.log.add("a step");
    rig.reducer->begin({0, 1});
    rig.reducer->add(0, rig.gradient(0));  // and none for parameter 1, which waits for the result of the exchange
    rig.reducer->add(2, rig.gradient(2));
    expect_contains(error_of<std::invalid_argument>([&] { rig.reducer->finish(); }), "the ranks disagree about");
    rig.reducer->abandon();
    rig.zero_grad();
    rig.run_pass();
    rig.expect_averages();
  });
}

// ---- use ----------------------------------------------------------------------------------------

TEST(GradientReducer, FillsAbsentGradientsWithZerosIfAnotherRankHasOne) {
  for (const Cut cut : {Cut::kEvenly, Cut::kWhole})
    on_ranks(2, {.cut = cut}, [](Rig& rig) {
      rig.reducer->begin({0, 1});
      rig.reducer->add(0, rig.gradient(0));
      if (rig.rank() == 0) rig.reducer->add(1, rig.gradient(1));
      rig.reducer->add(2, at::Tensor());  // none, and that is known
      rig.reducer->finish();
      rig.expect_grad(0, rig.average(0));
      rig.expect_grad(1, rig.gradient_of(1, 0) / 2);
      EXPECT_FALSE(rig.grad(2).defined());
      EXPECT_TRUE(rig.reducer->was_used(1));
      EXPECT_FALSE(rig.reducer->was_used(2));
    });
}

TEST(GradientReducer, LeavesAGradientThatNoRankAddsTo) {
  on_ranks(2, {.numels = {{2, 2}}}, [](Rig& rig) {
    rig.leaves[1].mutable_grad() = torch::full({2}, 7.0);
    rig.reducer->begin({0});
    rig.reducer->add(0, rig.gradient(0));
    rig.reducer->finish();
    EXPECT_TRUE(torch::equal(rig.grad(1), torch::full({2}, 7.0)));
  });
}

TEST(GradientReducer, ReducesTwiceAPartThatIsComputedAgain) {
  for (const bool is_on_both : {true, false})
    on_ranks(2, {}, [&](Rig& rig) {
      rig.reducer->begin({0, 1});
      rig.add_all();
      rig.reducer->start_full_ones();
      const bool again = is_on_both || rig.rank() == 0;
      if (again) rig.reducer->add(0, rig.gradient(0));
      rig.reducer->finish();
      rig.expect_grad(0, is_on_both ? rig.average(0) * 2 : rig.average(0) + rig.gradient_of(0, 0) / 2);
      rig.expect_grad(1, rig.average(1));
    });
}

TEST(GradientReducer, TellsAnObserverOfFinalGradients) {
  on_ranks(2, {}, [](Rig& rig) {
    std::vector<size_t> seen;
    rig.reducer->set_observer([&](const std::vector<at::Tensor>& leaves) {
      for (const at::Tensor& leaf : leaves) {
        EXPECT_TRUE(leaf.grad().defined());
        for (size_t i = 0; i < rig.leaves.size(); ++i)
          if (rig.leaves[i].is_same(leaf)) seen.push_back(i);
      }
    });
    rig.reducer->begin({0, 1});
    rig.reducer->add(0, rig.gradient(0));  // parameter 1 gets none, as is known only at the end
    rig.reducer->add(2, rig.gradient(2));
    rig.reducer->finish();
    EXPECT_EQ(seen, (std::vector<size_t>{2, 0}));
  });
}

TEST(GradientReducer, RefusesToReduceTwiceUnderAnObserver) {
  on_ranks(1, {}, [](Rig& rig) {
    rig.reducer->set_observer([](const auto&) {});
    rig.reducer->begin({0, 1});
    rig.add_all();
    rig.reducer->start_full_ones();
    expect_contains(error_of<std::logic_error>([&] { rig.reducer->add(0, rig.gradient(0)); }),
                    "the gradients of bucket 0 come in several parts in one backward");
    rig.reducer->abandon();
  });
}

TEST(GradientReducer, ChecksThatGradientsAreFinite) {
  Config config;
  config.options.check_finite = true;
  on_ranks(2, config, [](Rig& rig) {
    rig.run_pass();
    rig.reducer->begin({0, 1});
    rig.add_all();
    if (rig.rank() == 1) rig.reducer->add(2, torch::full({5}, INFINITY));
    expect_contains(error_of<std::runtime_error>([&] { rig.reducer->finish(); }),
                    "bucket 1 in the parts of ranks 0, 1");
  });
}

// ---- accumulation -------------------------------------------------------------------------------

TEST(GradientReducer, KeepsSumsForALaterPass) {
  for (const int64_t numel : {int64_t{5}, kLarge})
    on_ranks(2, {.numels = {{3, 2}, {numel}}, .cut = Cut::kEvenly}, [](Rig& rig) {
      rig.reducer->begin({0, 1});
      rig.add_all();
      rig.reducer->end_without_reducing();
      EXPECT_TRUE(rig.reducer->keeps(0));
      EXPECT_FALSE(rig.grad(0).defined());
      EXPECT_GT(rig.bucket_bytes(), 0);
      rig.run_pass();
      EXPECT_FALSE(rig.reducer->keeps(0));
      for (size_t i = 0; i < rig.parameters.size(); ++i) rig.expect_grad(i, rig.average(i) * 2);
    });
}

TEST(GradientReducer, ReducesKeptSumsOfParametersWithoutAGradientNow) {
  on_ranks(2, {.cut = Cut::kEvenly}, [](Rig& rig) {
    rig.reducer->begin({0, 1});
    rig.add_all();
    rig.reducer->end_without_reducing();
    rig.reducer->begin({});
    rig.reducer->finish();
    rig.expect_averages();
  });
}

TEST(GradientReducer, ForgetsTheKeptSumOfOneParameter) {
  on_ranks(2, {}, [](Rig& rig) {
    rig.reducer->begin({0, 1});
    rig.add_all();
    rig.reducer->end_without_reducing();
    rig.reducer->forget(0);
    rig.reducer->forget(2);
    EXPECT_FALSE(rig.reducer->keeps(0));
    EXPECT_TRUE(rig.reducer->keeps(1));
    rig.run_pass();
    rig.expect_grad(0, rig.average(0));
    rig.expect_grad(1, rig.average(1) * 2);
    rig.expect_grad(2, rig.average(2));
  });
}

TEST(GradientReducer, TakesSumsThatWereKeptElsewhere) {
  on_ranks(2, {}, [](Rig& rig) {
    rig.reducer->begin({0, 1}, /*frozen_too=*/true);
    for (size_t i = 0; i < rig.parameters.size(); ++i) rig.reducer->add_kept(i, rig.gradient(i));
    rig.add_all();
    rig.reducer->finish();
    for (size_t i = 0; i < rig.parameters.size(); ++i) rig.expect_grad(i, rig.average(i) * 2);
  });
}

// ---- memory -------------------------------------------------------------------------------------

TEST(GradientReducer, ReducesALargeWholeGradientInItsOwnMemory) {
  on_ranks(2, {.numels = {{kLarge}}}, [](Rig& rig) {
    rig.reducer->begin({0});
    at::Tensor gradient = rig.gradient(0);
    const void* memory = gradient.data_ptr();
    rig.reducer->add(0, std::move(gradient));
    rig.reducer->finish();
    EXPECT_EQ(rig.grad(0).data_ptr(), memory);
    rig.expect_averages();
  });
}

TEST(GradientReducer, CopiesALargeGradientThatAHookKeeps) {
  on_ranks(2, {.numels = {{kLarge}}}, [](Rig& rig) {
    rig.reducer->begin({0});
    const at::Tensor gradient = rig.gradient(0), kept = gradient;
    rig.reducer->add(0, gradient);
    rig.reducer->finish();
    rig.expect_averages();
    EXPECT_TRUE(torch::equal(kept, rig.gradient(0)));
  });
}

TEST(GradientReducer, CountsTheBytesOfBucketsInFlight) {
  on_ranks(2, {.numels = {{3, 2}, {kLarge}}, .cut = Cut::kEvenly}, [](Rig& rig) {
    rig.run_pass();
    MemoryReport report;
    rig.reducer->report(report);
    EXPECT_EQ(report.bucket_bytes, 0);
    EXPECT_GE(report.peak_bucket_bytes, 4 * (6 + kLarge));
    EXPECT_LE(report.peak_bucket_bytes, 4 * (6 + kLarge) + 256);
    rig.reducer->reset_peak();
    rig.reducer->report(report);
    EXPECT_EQ(report.peak_bucket_bytes, 0);
  });
}

// ---- the host -----------------------------------------------------------------------------------

// A copy is made in wait(), or fails if `fails` was set at its start.
class SlowCopies final : public CopyEngine {
 public:
  SlowCopies() : CopyEngine(at::kCPU) {}
  bool fails = false;
  int copies = 0;

 protected:
  Copy start(CopyDirection, at::Tensor to, at::Tensor from) override {
    ++copies;
    return Copy(std::make_unique<Operation>(std::move(to), std::move(from), late_copies(), fails));
  }

 private:
  class Operation final : public CopyOperation {
   public:
    Operation(at::Tensor to, at::Tensor from, std::shared_ptr<std::atomic<int64_t>> late, bool fails)
        : CopyOperation(std::move(to), std::move(from), std::move(late)), fails_(fails) {}
    void order() override { finish(); }
    void order_device() override { finish(); }
    void finish() override {
      if (fails_) throw std::runtime_error("the copy failed");
      at::NoGradGuard no_grad;
      to_.copy_(from_);
    }

   private:
    const bool fails_;
  };
};

TEST(GradientReducer, MovesResultsToTheHost) {
  run_ranks(4, [](std::shared_ptr<Communicator> comm) {
    const torch::NoGradGuard no_grad;
    SlowCopies copies;
    CountedBuffers staging(at::kCPU, MemoryKind::kStaging);
    for (const int ranks_per_copy : {0, 2}) {
      Config config{.numels = {{3, 2}, {5}, {4}, {8}}, .cut = Cut::kEvenly, .ranks_per_copy = ranks_per_copy};
      config.options.to_host = &copies;
      config.options.staging = &staging;
      Rig rig(comm, config);
      copies.copies = 0;
      rig.run_pass();
      rig.expect_averages();
      EXPECT_EQ(copies.copies, 4);
      EXPECT_EQ(staging.lent_bytes(), 0);
    }
  });
}

// ---- failures -----------------------------------------------------------------------------------

TEST(GradientReducer, StartsAfreshAfterACopyToTheHostFailed) {
  run_ranks(2, [](std::shared_ptr<Communicator> comm) {
    const torch::NoGradGuard no_grad;
    SlowCopies copies;
    CountedBuffers staging(at::kCPU, MemoryKind::kStaging);
    Config config{.numels = {{3, 2}, {5}, {4}, {8}}, .cut = Cut::kEvenly};
    config.options.to_host = &copies;
    config.options.staging = &staging;
    Rig rig(std::move(comm), config);
    copies.fails = true;
    EXPECT_EQ(error_of<std::runtime_error>([&] { rig.run_pass(); }), "the copy failed");
    copies.fails = false;
    rig.reducer->abandon();
    EXPECT_EQ(rig.bucket_bytes(), 0);
    EXPECT_EQ(staging.lent_bytes(), 0);
    rig.zero_grad();
    rig.run_pass();
    rig.expect_averages();
  });
}

TEST(GradientReducer, RefusesAGradientThatWasChangedAfterItWasAdded) {
  for (const Cut cut : {Cut::kEvenly, Cut::kWhole})
    on_ranks(2, {.numels = {{kLarge}}, .cut = cut}, [](Rig& rig) {
      rig.reducer->begin({0});
      at::Tensor gradient = rig.gradient(0);
      rig.reducer->add(0, gradient);
      gradient.mul_(2);
      expect_contains(error_of<std::logic_error>([&] {
                        rig.reducer->start_full_ones();
                        rig.reducer->finish();
                      }),
                      "the gradient of parameter 'p0' on rank " + std::to_string(rig.rank()) + " was changed in place");
      rig.reducer->abandon();
      rig.zero_grad();
      rig.run_pass();
      rig.expect_averages();
    });
}

TEST(GradientReducer, AbandonsReductionsInFlight) {
  on_ranks(2, {.cut = Cut::kEvenly}, [](Rig& rig) {
    rig.reducer->begin({0, 1});
    rig.reducer->add(2, rig.gradient(2));
    rig.reducer->add(0, rig.gradient(0));
    rig.reducer->add(1, rig.gradient(1));
    rig.reducer->start_full_ones();
    rig.reducer->abandon();
    for (size_t i = 0; i < rig.parameters.size(); ++i) EXPECT_FALSE(rig.reducer->keeps(i));
    EXPECT_EQ(rig.log.lines(), Lines{});
    rig.zero_grad();
    rig.run_pass();
    rig.expect_averages();
  });
}

TEST(GradientReducer, ThrowsCommErrorIfAnotherRankAborts) {
  on_ranks(2, {}, [](Rig& rig) {
    rig.reducer->begin({0, 1});
    rig.add_all();
    if (rig.rank() == 1) {
      rig.mesh.world->abort("rank 1 ran out of memory");
    } else {
      rig.reducer->start_full_ones();
    }
    expect_contains(error_of<CommError>([&] { rig.reducer->finish(); }), "rank 1 ran out of memory");
    rig.zero_grad();
    rig.reducer.reset();
    rig.reducer.emplace(rig.parameters, rig.mesh, rig.log, rig.config.options);
  });
}

}  // namespace
}  // namespace tessera::gradient_reducer_test
