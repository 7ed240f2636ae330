// The exchange of ranks at the end of a backward, and the differences that it refuses.
#include "core/gradients/backward_consistency_check.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <tessera/launch.h>
#include "core/layout/unit_plan.h"
#include "tests/gradients/errors.h"

namespace tessera::backward_consistency_check_test {
using namespace internal;
namespace {

using gradients_test::error_of;
using gradients_test::expect_contains;

// One rank's part of a check of two parameters in one bucket.
struct Side {
  explicit Side(std::shared_ptr<Communicator> comm, BackwardConsistencyCheck::Options options = {})
      : mesh{comm, comm, nullptr, nullptr}, reports(parameters, buckets, mesh, log, options) {}
  PassUse exchange(std::vector<bool> used, bool recomputed = false) {
    PassUse use = reports.exchange({std::move(used), {recomputed}}, [this] {
      ++asked;
      return false;
    });
    log.clear();
    return use;
  }
  // The error's text on a rank that refuses; both of two ranks must.
  template <class Error = std::invalid_argument>
  std::string refusal(std::vector<bool> used = {true, true}) {
    return error_of<Error>([&] { exchange(std::move(used)); });
  }
  int rank() const { return mesh.world->rank(); }

  const std::vector<PlannedParameter> parameters{{"a", {}, torch::zeros({2})}, {"b", {}, torch::zeros({3})}};
  const std::vector<GradientBucket> buckets{
      {"unit 'u'", {0, 1}, {}, FlatLayout::whole({2, 3}, mesh_size(), 1), 0, at::kFloat}};
  const std::string unit = "unit 'u'";
  Mesh mesh;
  CollectiveLog log;
  BackwardConsistencyCheck reports;
  int asked = 0;

 private:
  static int mesh_size() { return 2; }
};

void on_two_ranks(const std::function<void(Side&)>& body, BackwardConsistencyCheck::Options options = {}) {
  run_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    Side side(std::move(comm), options);
    body(side);
  });
}

TEST(BackwardConsistencyCheck, ShareEachRanksUse) {
  on_two_ranks([](Side& side) {
    const PassUse use = side.exchange({side.rank() == 0, false}, /*recomputed=*/side.rank() == 1);
    EXPECT_EQ(use.used, (std::vector<bool>{true, false}));
    EXPECT_EQ(use.recomputed, std::vector<bool>{true});
    EXPECT_EQ(side.asked, 1);
  });
}

TEST(BackwardConsistencyCheck, NameAnOperationOfOneRankAlone) {
  on_two_ranks([](Side& side) {
    side.log.add("all-gather", side.unit, 5);
    if (side.rank() == 1) side.log.add("reduce-scatter", side.unit, 5);
    expect_contains(side.refusal(), "the ranks disagree about what was gathered and reduced since the last backward");
    side.log.clear();
    side.exchange({true, true});  // and go on
  });
}

TEST(BackwardConsistencyCheck, NoticeAnotherOrderAndAnotherDivisor) {
  on_two_ranks([](Side& side) {
    const std::string other = "unit 'v'";
    const bool is_first = side.rank() == 0;
    side.log.add("all-gather", is_first ? side.unit : other, 5);
    side.log.add("all-gather", is_first ? other : side.unit, 5);
    EXPECT_NE(side.refusal(), "");
    side.log.clear();
    side.log.add("all-reduce", side.unit, 5, is_first ? 2.0 : 3.0);
    expect_contains(side.refusal(), "divided by");
    side.log.clear();
  });
}

TEST(BackwardConsistencyCheck, NameTheParameterWhoseGradientOneRankCleared) {
  on_two_ranks([](Side& side) {
    side.log.add_kept(true, /*is_empty=*/false);
    side.log.add_kept(side.rank() == 0, /*is_empty=*/false);
    expect_contains(side.refusal(), "parameter 'b' has a gradient to add to on rank 0, but none on rank 1");
  });
}

TEST(BackwardConsistencyCheck, IgnoreGradientsOfEmptyShards) {
  on_two_ranks([](Side& side) {
    const bool is_empty = side.rank() == 0;
    side.log.add_kept(is_empty, is_empty);  // not cleared: an optimizer may skip an empty shard
    EXPECT_EQ(side.refusal(), "");
  });
}

TEST(BackwardConsistencyCheck, CountForwardsButNotFailedOnes) {
  on_two_ranks([](Side& side) {
    side.log.add_forward();
    if (side.rank() == 0) side.log.add_forward();
    EXPECT_NE(side.refusal(), "");
    side.log.clear();
    side.log.add_forward();
    side.rank() == 0 ? side.log.add_forward() : side.log.add_failed_forward();
    EXPECT_EQ(side.refusal(), "");
  });
}

TEST(BackwardConsistencyCheck, RefuseUnevenUseIfAsked) {
  const auto body = [](Side& side) {
    EXPECT_EQ(side.refusal({true, false}), "");  // unused on all ranks
    expect_contains(side.refusal({true, side.rank() == 0}),
                    "parameter 'b' of unit 'u' had no gradient on rank 1, but had one on others");
  };
  on_two_ranks(body, {.refuse_uneven_use = true});
}

TEST(BackwardConsistencyCheck, OfAStaticGraphAreSentOnce) {
  const auto body = [](Side& side) {
    side.exchange({true, false});
    const int64_t sent = side.mesh.world->traffic().sent_bytes;
    EXPECT_EQ(side.exchange({true, false}).used, (std::vector<bool>{true, false}));
    EXPECT_EQ(side.mesh.world->traffic().sent_bytes, sent);
    EXPECT_EQ(side.asked, 2);
    expect_contains(side.refusal<std::logic_error>({true, true}),
                    "parameter 'b' on rank " + std::to_string(side.rank()) + " has a gradient, but had none");
    side.reports.forget_first_pass();
    EXPECT_EQ(side.exchange({true, true}).used, (std::vector<bool>{true, true}));
  };
  on_two_ranks(body, {.is_static = true});
}

}  // namespace
}  // namespace tessera::backward_consistency_check_test
