// The life cycle of one unit, its secondary shard and its summoned parameters: states, memory and collectives, without
// other ranks.
#include "fsdp/sharded_model.h"

#include <tessera/plan.h>
#include "core/comm/collective.h"
#include "core/layout/unit_plan.h"
#include "core/runtime/copy_engine.h"
#include "fsdp/checks/parameter_checks.h"
#include "tests/support/reference.h"

namespace tessera::unit_test {
using namespace internal;
namespace {

using namespace testing_support;
using State = Unit::State;

// Rank 0 of a group whose other ranks have the same shard. An all-gather moves data in wait().
class EchoGroup : public Communicator {
 public:
  explicit EchoGroup(int size) : Communicator(0, size, at::kCPU, std::chrono::seconds(1)) {}
  int started() const { return started_; }
  int in_flight() const { return in_flight_; }

 private:
  struct Gather : AsyncOperation {
    Gather(Collective collective, int& in_flight) : own(std::move(collective)), counter(in_flight) { ++counter; }
    void finish() override {
      --counter;
      const at::Tensor shard = own.shard.clone();
      for (int64_t begin = 0; begin < own.full.numel(); begin += shard.numel())
        own.full.narrow(0, begin, shard.numel()).copy_(shard);
    }
    const Collective own;
    int& counter;
  };
  Pending start(Collective collective) override {
    EXPECT_EQ(collective.kind, Collective::kAllGather);
    ++started_;
    return Pending(std::make_unique<Gather>(std::move(collective), in_flight_));
  }
  void abort_this(const std::string&) noexcept override {}
  std::shared_ptr<Communicator> make_part(const std::string&, const std::vector<int>&, int) override { return nullptr; }

  int started_ = 0, in_flight_ = 0;
};

struct FreePager : Pager {  // allows every use
  std::shared_ptr<void> use(const std::vector<Page*>&) override { return nullptr; }
  bool refuse(const Page& page, const at::Tensor&, const std::string&) override { throw std::logic_error(page.name()); }
};

constexpr int64_t kWidth = 16, kFullBytes = kWidth * kWidth * 4;

// A unit of one weight [kWidth, kWidth], on rank 0 of `ranks`.
struct OneUnit {
  explicit OneUnit(int ranks, FlatParameterOptions options = {}, ShardSource source = {}, int secondary_ranks = 1)
      : group(ranks), secondary_group(secondary_ranks) {
    options.pager = &pager;
    const SecondaryGroup secondary{secondary_ranks > 1 ? &secondary_group : nullptr, &secondary_memory};
    unit.emplace(0, plan_units(*model, {}).at(0), UnitContext{group, memory, log, source, secondary}, options,
                 /*sync_module_states=*/false);
  }
  void use() {
    unit->unshard();
    unit->wait_for_unshard();
  }
  void write_to_shard(double value) {
    torch::NoGradGuard no_grad;
    unit->flat_parameters()[0]->flat.shard().fill_(value);
  }
  at::Tensor weight() const { return (model->weight + 0).detach(); }

  FreePager pager;
  EchoGroup group, secondary_group;
  CollectiveLog log;
  CountedBuffers memory{at::kCPU, MemoryKind::kGathered}, secondary_memory{at::kCPU, MemoryKind::kSecondary};
  torch::nn::Linear model{torch::nn::LinearOptions(kWidth, kWidth).bias(false)};
  std::optional<Unit> unit;
};

TEST(FlatSpecTest, SaysDtypesAndPartsWithoutRanks) {
  const std::vector<PlannedParameter> parameters{{"p", {}, torch::zeros({3, 5})}, {"q", {}, torch::zeros({7})}};
  constexpr int kWorld = 3;
  std::vector<at::Tensor> parts[2];
  for (int rank = 0; rank < kWorld; ++rank) {
    const FlatSpec spec("a group", parameters, rank, kWorld, at::kBFloat16, std::nullopt);
    EXPECT_EQ(spec.dtype(), at::kFloat);
    EXPECT_EQ(spec.gather_dtype(), at::kBFloat16);
    EXPECT_EQ(spec.reduce_dtype(), at::kBFloat16);
    EXPECT_EQ(spec.full_bytes(), spec.layout().full_numel() * 2);
    EXPECT_EQ(spec.unsharded_bytes(), 22 * 4);
    const at::Tensor full = torch::arange(spec.layout().full_numel());
    for (size_t i : {0, 1}) parts[i].push_back(spec.part_of(spec.own_part_of(full), i));
    if (rank + 1 < kWorld) continue;
    for (size_t i : {0, 1}) EXPECT_TRUE(torch::equal(torch::cat(parts[i]), spec.view_in(full, i).flatten()));
  }
  auto exempt = parameters;
  exempt[0].full_precision = true;
  EXPECT_FALSE(FlatSpec("exempt", exempt, 0, kWorld, at::kBFloat16, at::kHalf).is_cast());
  const FlatSpec integers("integers", {{"n", {}, torch::zeros({4}, at::kLong)}}, 0, kWorld, at::kBFloat16, {});
  EXPECT_EQ(integers.gather_dtype(), at::kLong);
}

TEST(Unit, IsUnshardedAndResharded) {
  OneUnit one(4);
  Unit& unit = *one.unit;
  one.write_to_shard(3);
  unit.wait_for_unshard();
  EXPECT_EQ(unit.state(), State::kSharded);
  EXPECT_EQ(one.memory.lent_bytes(), 0);
  for (int pass = 1; pass <= 2; ++pass) {
    unit.unshard();
    unit.unshard();
    EXPECT_EQ(unit.state(), State::kUnsharding);
    EXPECT_EQ(one.group.started(), pass);
    EXPECT_EQ(one.memory.lent_bytes(), kFullBytes);
    EXPECT_EQ(unit.full_bytes(), kFullBytes);
    unit.wait_for_unshard();
    EXPECT_EQ(unit.state(), State::kUnsharded);
    EXPECT_TRUE(one.weight().eq(3).all().item<bool>());
    unit.reshard();
    EXPECT_EQ(unit.state(), State::kSharded);
    EXPECT_EQ(one.memory.lent_bytes(), 0);
  }
}

TEST(Unit, ReshardsAfterTheAllGatherInFlight) {
  OneUnit one(2);
  one.unit->unshard();
  EXPECT_EQ(one.group.in_flight(), 1);
  one.unit->reshard();
  EXPECT_EQ(one.group.in_flight(), 0);
  EXPECT_EQ(one.unit->state(), State::kSharded);
}

TEST(Unit, OfASingleRankCostsNothing) {
  OneUnit one(1);
  EXPECT_EQ(one.unit->state(), State::kWhole);
  one.use();
  one.unit->reshard();
  EXPECT_EQ(one.unit->state(), State::kWhole);
  EXPECT_EQ(one.memory.peak_lent_bytes(), 0);
  OneUnit cast(1, {.gather_dtype = at::kBFloat16});
  EXPECT_EQ(cast.unit->state(), State::kSharded);
  cast.use();
  EXPECT_EQ(cast.weight().scalar_type(), at::kBFloat16);
  EXPECT_EQ(cast.memory.lent_bytes(), kFullBytes / 2);
}

TEST(Unit, IsStaleAfterAWriteToItsShard) {
  OneUnit one(2);
  one.use();
  EXPECT_FALSE(one.unit->is_stale());
  one.write_to_shard(5);
  EXPECT_TRUE(one.unit->is_stale());
  one.unit->reshard();
  one.use();
  EXPECT_FALSE(one.unit->is_stale());
  EXPECT_TRUE(one.weight().eq(5).all().item<bool>());
}

TEST(Unit, FetchesItsShardFromTheHost) {
  const auto engine = CopyEngine::make(at::kCPU);
  CountedBuffers staging(at::kCPU, MemoryKind::kStaging);
  auto on_host = [](int64_t numel, at::ScalarType dtype) { return at::zeros({numel}, dtype); };
  OneUnit one(4, {.shard_memory = on_host}, {engine.get(), &staging});
  Unit& unit = *one.unit;
  unit.start_fetch();
  EXPECT_EQ(unit.state(), State::kFetching);
  EXPECT_EQ(staging.lent_bytes(), kFullBytes / 4);
  EXPECT_EQ(one.memory.lent_bytes(), 0);
  one.use();
  EXPECT_EQ(staging.lent_bytes(), 0);
  EXPECT_EQ(one.memory.lent_bytes(), kFullBytes);
  unit.reshard();
  unit.start_fetch();
  unit.reshard();  // a fetch that no all-gather followed
  EXPECT_EQ(unit.state(), State::kSharded);
  EXPECT_EQ(staging.lent_bytes(), 0);
}

TEST(SecondaryShardTest, IsCutHeldEvictedAndDropped) {
  OneUnit one(4, {}, {}, /*secondary_ranks=*/2);
  Unit& unit = *one.unit;
  one.write_to_shard(3);
  one.use();
  unit.reshard();
  EXPECT_EQ(unit.secondary().state(), SecondaryShard::State::kNone);
  unit.secondary().keep();
  EXPECT_EQ(one.secondary_memory.lent_bytes(), 0);
  one.use();
  unit.reshard();
  EXPECT_EQ(unit.secondary().state(), SecondaryShard::State::kHeld);
  EXPECT_EQ(one.secondary_memory.lent_bytes(), kFullBytes / 2);
  one.use();  // from the secondary shard
  EXPECT_EQ(one.group.started(), 2);
  EXPECT_EQ(one.secondary_group.started(), 1);
  EXPECT_TRUE(one.weight().eq(3).all().item<bool>());
  unit.reshard();
  one.write_to_shard(5);
  one.use();  // the secondary shard is stale
  EXPECT_EQ(one.group.started(), 3);
  EXPECT_EQ(unit.secondary().state(), SecondaryShard::State::kWanted);
  EXPECT_EQ(one.secondary_memory.lent_bytes(), 0);
  unit.reshard();
  EXPECT_EQ(unit.secondary().state(), SecondaryShard::State::kHeld);
  unit.secondary().drop();
  EXPECT_EQ(unit.secondary().state(), SecondaryShard::State::kNone);
  EXPECT_EQ(one.secondary_memory.lent_bytes(), 0);
}

TEST(SecondaryShardTest, WithoutAGroupNothingIsKept) {
  OneUnit one(4);
  one.unit->secondary().keep();
  one.use();
  one.unit->reshard();
  EXPECT_EQ(one.unit->secondary().state(), SecondaryShard::State::kNone);
}

TEST(SummonedParametersTest, ChangesAreWrittenBackOrLost) {
  using Changes = SummonedParameters::Changes;
  for (const int ranks : {1, 4}) {
    for (const bool is_cast : {false, true}) {
      OneUnit one(ranks, {.gather_dtype = is_cast ? std::optional(at::kBFloat16) : std::nullopt});
      Unit& unit = *one.unit;
      const State before = unit.state();
      one.write_to_shard(3);
      torch::NoGradGuard no_grad;
      EXPECT_THROW(one.model->weight.fill_(4), std::logic_error);
      for (const Changes changes : {Changes::kWrittenBack, Changes::kLost}) {
        unit.summon(Summon::kOnDevice, changes);
        EXPECT_EQ(unit.state(), State::kSummoned);
        EXPECT_EQ(one.model->weight.scalar_type(), at::kFloat);
        one.model->weight.fill_(4);
        unit.unshard();  // a no-op, as reshard()
        unit.reshard();
        EXPECT_EQ(unit.state(), State::kSummoned);
        EXPECT_EQ(one.memory.lent_bytes(), before == State::kWhole ? 0 : kFullBytes);
        unit.dismiss(changes == Changes::kWrittenBack);
        EXPECT_EQ(unit.state(), before);
        EXPECT_EQ(one.memory.lent_bytes(), 0);
        const double expected = changes == Changes::kWrittenBack ? 4 : 3;
        EXPECT_TRUE(unit.flat_parameters()[0]->flat.shard().eq(expected).all().item<bool>()) << ranks << is_cast;
        one.write_to_shard(3);
      }
    }
  }
}

TEST(SummonedParametersTest, AreWrittenBackEarlyUnlessChangesAreLost) {
  using Changes = SummonedParameters::Changes;
  OneUnit one(4);
  torch::NoGradGuard no_grad;
  one.unit->summon(Summon::kOnDevice, Changes::kWrittenBack);
  one.model->weight.fill_(4);
  one.unit->write_back();
  EXPECT_TRUE(one.unit->flat_parameters()[0]->flat.shard().eq(4).all().item<bool>());
  one.unit->dismiss(true);
  one.unit->summon(Summon::kOnDevice, Changes::kLost);
  one.unit->write_back();  // no change
  one.model->weight.fill_(5);
  expect_contains(error_of<std::logic_error>([&] { one.unit->write_back(); }), "writeback = false, which loses that");
  one.unit->dismiss(false);
}

TEST(SummonedParametersTest, ElsewhereTheUnitOnlyTakesPart) {
  OneUnit one(4);
  one.unit->summon(Summon::kElsewhere, SummonedParameters::Changes::kLost);
  EXPECT_EQ(one.unit->state(), State::kSharded);
  EXPECT_EQ(one.group.started(), 1);
  EXPECT_EQ(one.memory.lent_bytes(), 0);
}

TEST(Reattach, TakesThePartOfThisRank) {
  OneUnit one(4);
  const at::Tensor given = torch::arange(kWidth * kWidth, at::kFloat).view({kWidth, kWidth});
  one.model->weight.set_data(given);
  expect_contains(error_of<std::logic_error>([&] { reattach(*one.unit, /*may_change=*/false); }),
                  "between a forward and its backward");
  reattach(*one.unit, /*may_change=*/true);
  const at::Tensor own = one.unit->flat_parameters()[0]->flat.shard();
  EXPECT_TRUE(own.eq(given.flatten().narrow(0, 0, own.numel())).all().item<bool>());
  EXPECT_EQ(one.unit->state(), State::kSharded);
}

}  // namespace
}  // namespace tessera::unit_test
