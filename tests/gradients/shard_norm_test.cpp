// Clipping by the norm of tensors that are sharded over ranks.
#include "core/model/shard_norm.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <memory>
#include <vector>

#include <tessera/launch.h>

namespace tessera::shard_norm_test {
using namespace internal;
namespace {

// Rows of 3 elements: a shard of 7 has two, and a rest of 1.
TEST(ShardNorm, OfRowsEqualsThatOfTheWholeTensor) {
  const at::Tensor whole = torch::arange(1, 22, at::kDouble).view({3, 7});
  for (const double norm_type : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()})
    run_ranks(3, [&](std::shared_ptr<Communicator> comm) {
      const at::Tensor shard = whole[comm->rank()].clone();
      const std::vector<at::Tensor> shards{shard.narrow(0, 0, 7), torch::zeros({0}, at::kDouble)};
      const double norm = clip_shards_by_norm(shards, 1.0, norm_type, false, *comm, nullptr, /*row_numel=*/3);
      EXPECT_NEAR(norm, whole.norm(norm_type).item<double>(), 1e-9 * norm);
      EXPECT_TRUE(torch::allclose(shard, whole[comm->rank()] / norm, 1e-6));
    });
}

TEST(ShardNorm, WithoutClippingLeavesTheBits) {
  run_ranks(2, [](std::shared_ptr<Communicator> comm) {
    const at::Tensor values = torch::rand({10}), shard = values.clone();
    clip_shards_by_norm({shard}, 100, 2, false, *comm);
    EXPECT_TRUE(torch::equal(shard, values));
  });
}

}  // namespace
}  // namespace tessera::shard_norm_test
