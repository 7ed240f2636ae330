// Copies of gradients to their places in a bucket.
#include "core/gradients/bucket_content.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "core/paging/residency.h"

namespace tessera::bucket_content_test {
using namespace internal;
namespace {

// Puts one gradient into the second place of a bucket of three parameters, and returns the bucket's memory.
at::Tensor memory_after(const at::Tensor& parameter, const at::Tensor& gradient, int additions = 0) {
  const int64_t numel = parameter.numel();
  GradientBucket bucket{"a bucket",
                        {0, 1, 2},
                        std::vector<ParameterGeometry>(3, geometry_of(parameter)),
                        FlatLayout::whole({numel, numel, numel}, /*world_size=*/1, /*alignment_numel=*/1)};
  bucket.dtype = parameter.scalar_type();
  bucket.route.pieces = {{{0, 3 * numel}}};
  bucket.route.piece_of = {0, 0, 0};
  BucketContent content = BucketContent::of(bucket);
  content.parts = {{torch::full({3 * numel}, -1, bucket.dtype)}};
  content.uses.begin(at::kCPU);
  for (int i = 0; i <= additions; ++i) content.put(bucket, 1, gradient, /*is_first=*/i == 0);
  return content.parts[0].values;
}

void expect_in_second_place(const at::Tensor& parameter, const at::Tensor& gradient) {
  for (const int additions : {0, 2}) {
    at::Tensor expected = torch::full({3 * parameter.numel()}, -1, parameter.scalar_type());
    view_in(expected, geometry_of(parameter), parameter.numel()).copy_(gradient).mul_(additions + 1);
    EXPECT_TRUE(torch::equal(memory_after(parameter, gradient, additions), expected)) << gradient.sizes();
  }
}

TEST(BucketContent, CopiesAGradientOfAnyStridesToItsPlace) {
  const at::Tensor parameter = torch::zeros({3, 4}), values = torch::arange(12.0).view({3, 4});
  expect_in_second_place(parameter, values);
  expect_in_second_place(parameter, values.t().contiguous().t());
  expect_in_second_place(parameter, torch::arange(24.0).view({6, 4}).slice(0, 2, 5));
  expect_in_second_place(parameter, torch::arange(24.0).view({3, 8}).slice(1, 0, 8, 2));
  expect_in_second_place(parameter, torch::tensor(2.0).expand({3, 4}));
  expect_in_second_place(torch::zeros({4, 3}).t(), values);
  expect_in_second_place(torch::zeros({1, 3, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast),
                         torch::arange(12.0).view({1, 3, 2, 2}));
}

TEST(BucketContent, CopiesAGradientOfAnyDtypeAndSize) {
  const at::Tensor values = torch::arange(12.0).view({3, 4});
  for (const at::ScalarType dtype : {at::kDouble, at::kHalf, at::kBFloat16, at::kComplexFloat}) {
    expect_in_second_place(torch::zeros({3, 4}, dtype), values.to(dtype));
    expect_in_second_place(torch::zeros({3, 4}, dtype), values);
  }
  expect_in_second_place(torch::zeros({0, 4}), torch::zeros({0, 4}));
  expect_in_second_place(torch::zeros({}), torch::full({}, 3.0));
  expect_in_second_place(torch::zeros({300, 400}), torch::arange(120000.0).view({300, 400}));  // above the small size
}

// Attaches a page of values when an operator uses it.
struct OnesPager : Pager {
  std::shared_ptr<void> use(const std::vector<Page*>& pages) override {
    for (Page* page : pages)
      if (!page->is_attached()) page->attach(torch::ones({12}));
    return nullptr;
  }
  bool refuse(const Page&, const at::Tensor&, const std::string&) override { return false; }
};

// A function of a DDP model may give a parameter of an FSDP model as gradient.
TEST(BucketContent, CopiesAGradientWhosePageIsDetached) {
  OnesPager pager;
  Page page(&pager, 0, "a page", at::kCPU);
  const at::Tensor parameter = torch::zeros({3, 4});
  const at::Tensor values = memory_after(parameter, page.view(at::kFloat, {3, 4}, {4, 1}, 0));
  EXPECT_TRUE(torch::equal(values.narrow(0, 12, 12), torch::ones({12})));
  page.detach_pager();
}

TEST(BucketContent, MakesGradientsThatAutogradDoesNotTrack) {
  const at::Tensor leaf = torch::zeros({3}, at::TensorOptions().requires_grad(true));
  GradientBuffer buffer({{leaf, geometry_of(leaf), 1}}, 4, at::kFloat,
                        [](int64_t numel, at::ScalarType dtype) { return torch::empty({numel}, dtype); });
  buffer.accept(torch::arange(4.0), {true});
  EXPECT_FALSE(leaf.grad().is_view());
  leaf.mutable_grad().detach_().zero_();  // as zero_grad(/*set_to_none=*/false) does
  EXPECT_EQ(leaf.grad().sum().item<float>(), 0);
}

}  // namespace
}  // namespace tessera::bucket_content_test
