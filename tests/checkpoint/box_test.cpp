// Compares boxes with a loop over all elements.
#include "checkpoint/format/box.h"

#include <algorithm>
#include <random>

#include "tests/support/reference.h"

namespace tessera::box_test {
using namespace internal;
namespace {

using namespace testing_support;

std::vector<int64_t> draw_sizes(std::mt19937& random) {
  std::vector<int64_t> sizes(random() % 5);
  for (auto& size : sizes) size = static_cast<int64_t>(1 + random() % 5);
  return sizes;
}

// Strides for the sizes, with the dimensions in a random order.
std::vector<int64_t> draw_strides(const std::vector<int64_t>& sizes, std::mt19937& random) {
  std::vector<size_t> order(sizes.size());
  for (size_t d = 0; d < order.size(); ++d) order[d] = d;
  std::shuffle(order.begin(), order.end(), random);
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (const size_t d : order) {
    strides[d] = stride;
    stride *= sizes[d];
  }
  return strides;
}

// The indices of a box, row-major.
std::vector<std::vector<int64_t>> indices_of(const Box& box) {
  std::vector<std::vector<int64_t>> indices;
  for (int64_t i = 0; i < box.numel(); ++i) {
    std::vector<int64_t> index(box.sizes.size());
    int64_t rest = i;
    for (size_t d = index.size(); d-- > 0;) {
      index[d] = box.offsets[d] + rest % box.sizes[d];
      rest /= box.sizes[d];
    }
    indices.push_back(index);
  }
  return indices;
}

int64_t place(const std::vector<int64_t>& index, const std::vector<int64_t>& strides) {
  int64_t place = 0;
  for (size_t d = 0; d < index.size(); ++d) place += index[d] * strides[d];
  return place;
}

TEST(Box, SegmentsOfARangeAreItsElementsInTheirOrder) {
  std::mt19937 random(1);
  for (int round = 0; round < 3000; ++round) {
    const auto sizes = draw_sizes(random);
    const auto strides = draw_strides(sizes, random);
    const auto numel = static_cast<uint32_t>(numel_of(sizes));
    Range held{static_cast<int64_t>(random() % (numel + 1)), static_cast<int64_t>(random() % (numel + 1))};
    if (held.begin > held.end) std::swap(held.begin, held.end);
    const auto segments = segments_of(sizes, strides, held);
    EXPECT_LE(segments.size(), std::max<size_t>(1, 2 * sizes.size()));
    int64_t next = held.begin;
    for (const Segment& segment : segments) {
      EXPECT_EQ(segment.memory.begin, next);
      next = segment.memory.end;
      std::vector<int64_t> places;
      for (const auto& index : indices_of(segment.box)) places.push_back(place(index, strides));
      std::sort(places.begin(), places.end());
      for (size_t i = 0; i < places.size(); ++i) EXPECT_EQ(places[i], segment.memory.begin + static_cast<int64_t>(i));
      EXPECT_EQ(static_cast<int64_t>(places.size()), segment.memory.numel());
    }
    EXPECT_EQ(next, held.end);
  }
}

TEST(Box, RunsCopyTheSharedPart) {
  std::mt19937 random(2);
  auto draw_box = [&](const std::vector<int64_t>& sizes) {
    Box box;
    for (const int64_t size : sizes) {
      box.offsets.push_back(static_cast<int64_t>(random() % static_cast<uint32_t>(size)));
      box.sizes.push_back(static_cast<int64_t>(1 + random() % static_cast<uint32_t>(size - box.offsets.back())));
    }
    return box;
  };
  for (int round = 0; round < 3000; ++round) {
    const auto sizes = draw_sizes(random);
    const auto strides = draw_strides(sizes, random);
    const Box source = draw_box(sizes), wanted = draw_box(sizes);
    const auto part = intersection(source, wanted);
    std::vector<int64_t> target(numel_of(sizes), -1), expected(target);
    const auto indices = indices_of(source);
    for (size_t i = 0; i < indices.size(); ++i) {
      bool inside = true;
      for (size_t d = 0; d < sizes.size(); ++d)
        inside = inside && indices[i][d] >= wanted.offsets[d] && indices[i][d] < wanted.offsets[d] + wanted.sizes[d];
      if (inside) expected[place(indices[i], strides)] = static_cast<int64_t>(i);
    }
    int64_t last = -1;
    if (part)
      for_each_run(*part, source, strides, 0, [&](const tessera::internal::Run& run) {
        EXPECT_GT(run.source, last);
        last = run.source + run.numel - 1;
        for (int64_t i = 0; i < run.numel; ++i) target[run.target + i * run.target_step] = run.source + i;
      });
    EXPECT_EQ(target, expected) << to_string(source) << to_string(wanted);
  }
}

TEST(Box, ContiguousCopiesAreOneRun) {
  int runs = 0;
  for_each_run({{2, 0, 0}, {3, 4, 5}}, {{1, 0, 0}, {6, 4, 5}}, {20, 5, 1}, 40, [&](const tessera::internal::Run& run) {
    ++runs;
    EXPECT_EQ(run.source, 20);
    EXPECT_EQ(run.target, 0);
    EXPECT_EQ(run.numel, 60);
  });
  EXPECT_EQ(runs, 1);
}

TEST(Box, StridesWithHolesAreRefused) {
  EXPECT_THROW(memory_order({2, 3}, {6, 2}), std::invalid_argument);
  EXPECT_THROW(memory_order({2, 3}, {0, 1}), std::invalid_argument);
  EXPECT_EQ(memory_order({2, 1, 3}, {1, 77, 2}), (std::vector<int64_t>{2, 1, 0}));
  EXPECT_EQ(memory_order({0, 3}, {5, 5}).size(), 2U);
}

}  // namespace
}  // namespace tessera::box_test
