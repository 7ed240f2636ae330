// When a reduced value becomes `.grad` where it is, and when it is added to one.
#include "core/gradients/gradient_bucket.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <vector>

namespace tessera::gradient_buffer_test {
using namespace internal;
namespace {

GradientBuffer::Member member(const at::Tensor& leaf, int64_t offset) { return {leaf, geometry_of(leaf), offset}; }

at::Tensor leaf_of(int64_t numel) { return torch::zeros({numel}, at::TensorOptions().requires_grad(true)); }

// Two leaves: elements 0 to 2, and 4 to 5 of 8.
class GradientBuffers : public testing::Test {
 protected:
  GradientBuffer buffer_of(bool as_views = true) {
    return {{member(first, 0), member(second, 4)},
            8,
            at::kFloat,
            [this](int64_t numel, at::ScalarType dtype) {
              ++allocations;
              const at::Tensor room = torch::full({numel}, -1, dtype);
              memory = room.storage().getWeakStorageImpl();
              return room;
            },
            as_views};
  }
  static void reduce(GradientBuffer& buffer, double value, const std::vector<bool>& used = {true, true}) {
    buffer.accept(buffer.room(at::kFloat).fill_(value), used);
  }
  void zero_grad() const {
    first.mutable_grad().reset();
    second.mutable_grad().reset();
  }

  at::Tensor first = leaf_of(3), second = leaf_of(2);
  int allocations = 0;
  c10::weak_intrusive_ptr<c10::StorageImpl> memory{c10::intrusive_ptr<c10::StorageImpl>()};  // of the last room
};

TEST_F(GradientBuffers, MakeGradientsViewsOfOneAllocation) {
  GradientBuffer buffer = buffer_of();
  EXPECT_EQ(buffer.bytes(), 0);
  EXPECT_TRUE(buffer.is_free());
  reduce(buffer, 5);
  EXPECT_EQ(allocations, 1);
  EXPECT_EQ(buffer.bytes(), 32);
  EXPECT_FALSE(buffer.is_free());
  EXPECT_EQ(first.grad().data_ptr<float>() + 4, second.grad().data_ptr<float>());
  EXPECT_TRUE(torch::equal(second.grad(), torch::full({2}, 5.0)));
  EXPECT_EQ(buffer.whole_gradient().numel(), 8);
}

TEST_F(GradientBuffers, KeepNoMemoryAfterZeroGrad) {
  GradientBuffer buffer = buffer_of();
  reduce(buffer, 5);
  first.mutable_grad().reset();
  EXPECT_EQ(buffer.bytes(), 32);
  second.mutable_grad().reset();
  EXPECT_EQ(buffer.bytes(), 0);
  EXPECT_TRUE(memory.expired());
  reduce(buffer, 6);
  EXPECT_TRUE(torch::equal(second.grad(), torch::full({2}, 6.0)));
}

TEST_F(GradientBuffers, NeverOverwriteAGradientThatTheUserKept) {
  GradientBuffer buffer = buffer_of();
  reduce(buffer, 5);
  const at::Tensor kept = first.grad();
  zero_grad();
  reduce(buffer, 6);
  EXPECT_EQ(allocations, 2);
  EXPECT_TRUE(torch::equal(kept, torch::full({3}, 5.0)));
  EXPECT_TRUE(torch::equal(first.grad(), torch::full({3}, 6.0)));
}

TEST_F(GradientBuffers, AddToGradientsThatAreThere) {
  GradientBuffer buffer = buffer_of();
  reduce(buffer, 5);
  reduce(buffer, 1);
  EXPECT_TRUE(torch::equal(first.grad(), torch::full({3}, 6.0)));
  EXPECT_TRUE(buffer.whole_gradient().defined());
  first.mutable_grad() = torch::ones({3});  // the user's own
  EXPECT_FALSE(buffer.whole_gradient().defined());
  reduce(buffer, 1);
  EXPECT_TRUE(torch::equal(first.grad(), torch::full({3}, 2.0)));
  EXPECT_TRUE(torch::equal(second.grad(), torch::full({2}, 7.0)));
}

TEST_F(GradientBuffers, LeaveUnusedLeavesAlone) {
  GradientBuffer buffer = buffer_of();
  reduce(buffer, 5, {false, true});
  EXPECT_FALSE(first.grad().defined());
  EXPECT_TRUE(torch::equal(second.grad(), torch::full({2}, 5.0)));
  EXPECT_FALSE(buffer.whole_gradient().defined());
  ASSERT_EQ(buffer.leaves({false, true}).size(), 1U);
  EXPECT_TRUE(buffer.leaves({false, true})[0].is_same(second));
  EXPECT_EQ(buffer.leaves().size(), 2U);
}

TEST_F(GradientBuffers, ConvertValuesOfAnotherDtype) {
  GradientBuffer buffer = buffer_of();
  buffer.accept(buffer.room(at::kBFloat16).fill_(3), {true, true});
  EXPECT_EQ(first.grad().scalar_type(), at::kFloat);
  EXPECT_TRUE(torch::equal(first.grad(), torch::full({3}, 3.0)));
}

TEST_F(GradientBuffers, AddValuesThatWereAllocatedBeforeTheFirstArrived) {
  GradientBuffer buffer = buffer_of();
  const at::Tensor values = buffer.room(at::kFloat), more = buffer.room(at::kFloat);
  buffer.accept(values.fill_(1), {true, true});
  buffer.accept(more.fill_(2), {true, true});
  EXPECT_TRUE(torch::equal(first.grad(), torch::full({3}, 3.0)));
}

TEST_F(GradientBuffers, WithoutViewsHoldValuesOnlyOnTheirWay) {
  GradientBuffer buffer = buffer_of(/*as_views=*/false);
  reduce(buffer, 5);
  EXPECT_FALSE(first.grad().is_alias_of(second.grad()));
  EXPECT_EQ(buffer.bytes(), 20);
  EXPECT_FALSE(buffer.whole_gradient().defined());
}

TEST(GradientBufferOfOneLeaf, TakesMemoryWithoutACopyEvenWithoutViews) {
  for (const bool as_views : {true, false}) {
    const at::Tensor leaf = leaf_of(3), values = torch::full({3}, 4.0);
    GradientBuffer buffer({member(leaf, 0)}, 3, at::kFloat, nullptr, as_views);
    buffer.accept(values, {true});
    EXPECT_EQ(leaf.grad().data_ptr(), values.data_ptr());
    buffer.accept(torch::ones({3}), {true});
    EXPECT_TRUE(torch::equal(leaf.grad(), torch::full({3}, 5.0)));
    EXPECT_EQ(buffer.bytes(), 12);
  }
}

// A conjugate is a view of the same memory, whose bytes are not its values.
TEST(GradientBufferOfOneLeaf, AddsToTheConjugateThatAUserHasSet) {
  const at::Tensor leaf = torch::zeros({1}, at::TensorOptions(at::kComplexFloat).requires_grad(true));
  GradientBuffer buffer({member(leaf, 0)}, 1, at::kComplexFloat, nullptr);
  const at::Tensor value = torch::complex(torch::ones({1}), torch::full({1}, 2.0f));
  buffer.accept(value.clone(), {true});
  leaf.mutable_grad() = leaf.grad().conj();
  buffer.accept(value.clone(), {true});
  EXPECT_TRUE(torch::equal(leaf.grad().resolve_conj(), value + value.conj())) << leaf.grad();
}

}  // namespace
}  // namespace tessera::gradient_buffer_test
