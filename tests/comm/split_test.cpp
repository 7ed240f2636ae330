// Groups made of a part of the ranks.
#include "tests/support/reference.h"

namespace tessera::split_test {
namespace {

using namespace testing_support;

TEST(Split, RanksOfOneColorAreAGroupInOrderOfKey) {
  for (int world : {1, 2, 3, 4, 5}) {
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      const int rank = comm->rank();
      auto part = comm->split(rank % 2, /*key=*/-rank);  // the last rank becomes the first
      const int members = (world + 1 - rank % 2) / 2;
      ASSERT_EQ(part->size(), members);
      EXPECT_EQ(part->rank(), members - 1 - rank / 2);
      at::Tensor all = torch::empty({members}, at::kLong);
      part->all_gather(all, torch::tensor({rank})).wait();
      for (int i = 0; i < members; ++i) EXPECT_EQ(all[i].item<int64_t>(), rank % 2 + 2 * (members - 1 - i));
      auto none = comm->split(rank == 0 ? 0 : -1);
      EXPECT_EQ(none == nullptr, rank != 0);
      comm->barrier();  // the whole group goes on
    });
  }
}

TEST(Split, TrafficCountsInTheWholeGroupToo) {
  on_ranks(4, [](std::shared_ptr<Communicator> comm) {
    auto part = comm->split(comm->rank() / 2)->split(0);
    const auto before = comm->traffic();
    part->all_reduce(torch::ones({1000})).wait();
    EXPECT_EQ(part->traffic().sent_bytes, 4000);
    EXPECT_EQ(comm->traffic().sent_bytes - before.sent_bytes, 4000);
    EXPECT_EQ(comm->traffic().collectives - before.collectives, 1);
  });
}

// Rank 3 fails; rank 2 waits for it in a part, ranks 0 and 1 for each other's part.
TEST(Split, AFailureReachesEveryPartAndSaysWhere) {
  std::atomic<int> told = 0;
  const std::string error = error_of<std::runtime_error>([&] {
    on_ranks(4, [&](std::shared_ptr<Communicator> comm) {
      auto row = comm->split(comm->rank() / 2);
      auto column = comm->split(comm->rank() % 2);
      if (comm->rank() == 3) throw std::runtime_error("rank 3 runs out of luck");
      const std::string lost = error_of<CommError>([&] {
        (comm->rank() == 2 ? row : column)->all_reduce(torch::ones({10}), ReduceOp::kSum, "a test").wait();
        row->all_reduce(torch::ones({10}), ReduceOp::kSum, "a test").wait();
      });
      if (comm->rank() == 0) {
        expect_contains(lost, "in the group of ranks 0, 2 of 4");
      } else {
        expect_contains(lost, "rank 3 runs out of luck");
      }
      ++told;
      throw std::runtime_error(lost);
    });
  });
  EXPECT_EQ(error, "rank 3 runs out of luck");
  EXPECT_EQ(told, 3);
}

}  // namespace
}  // namespace tessera::split_test
