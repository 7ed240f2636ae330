// tessera::DistributedSampler in libtorch's data loaders.
#include <tessera/distributed_sampler.h>

#include <torch/data/dataloader.h>
#include <torch/data/datasets/base.h>
#include <torch/data/samplers/serialize.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <numeric>
#include <sstream>
#include <vector>

#include "tests/support/reference.h"

namespace tessera::data_loader_test {
using namespace internal;
namespace {

using namespace testing_support;

using Items = std::vector<int64_t>;

// Returns the requested indices.
struct Indices : torch::data::datasets::BatchDataset<Indices, Items> {
  explicit Indices(size_t items) : numel(items) {}
  Items get_batch(c10::ArrayRef<size_t> indices) override { return {indices.begin(), indices.end()}; }
  std::optional<size_t> size() const override { return numel; }
  size_t numel;
};

auto loader_of(DistributedSampler sampler, size_t batch, size_t workers = 0) {
  return torch::data::make_data_loader(Indices(0), sampler, torch::data::DataLoaderOptions(batch).workers(workers));
}

std::vector<DistributedSampler> samplers_of(int world, int64_t items, const DistributedSamplerOptions& options) {
  std::vector<DistributedSampler> all;
  for (int rank = 0; rank < world; ++rank) all.emplace_back(items, rank, world, options);
  return all;
}

Items sorted(Items items) {
  std::sort(items.begin(), items.end());
  return items;
}

Items range(int64_t numel) {
  Items all(static_cast<size_t>(numel));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

TEST(DataLoader, EveryEpochHasEachItemOnRanksWithEqualBatches) {
  for (size_t workers : {0u, 1u, 3u})
    for (int world : {1, 2, 3})
      for (int64_t items : {1, 7, 24, 31}) {
        auto samplers = samplers_of(world, items, {.batch_numel = 4, .seed = 3});
        Items before;
        for (int epoch = 0; epoch < 2; ++epoch) {
          Items seen;
          std::vector<std::vector<size_t>> sizes;
          for (auto& sampler : samplers) {
            EXPECT_EQ(sampler.epoch(), epoch);
            sizes.emplace_back();
            auto loader = loader_of(sampler, 4, workers);
            int64_t left = sampler.batches_left();
            for (const Items& batch : *loader) {
              EXPECT_EQ(sampler.batches_left(), --left);
              sizes.back().push_back(batch.size());
              seen.insert(seen.end(), batch.begin(), batch.end());
            }
            EXPECT_EQ(left, 0);
            EXPECT_EQ(sizes.back(), sizes.front());
            EXPECT_EQ(sampler.epoch(), epoch + 1);
          }
          EXPECT_LT(seen.size(), static_cast<size_t>(items + world));  // each rank repeats one at most
          EXPECT_TRUE(items <= 7 || seen != before);
          before = seen;
          seen = sorted(seen);
          seen.erase(std::unique(seen.begin(), seen.end()), seen.end());
          EXPECT_EQ(seen, range(items)) << items << " items, world " << world;
        }
      }
}

TEST(DataLoader, ReadingAheadDoesNotMoveTheSavedPosition) {
  for (size_t workers : {0u, 1u, 3u})
    for (int64_t received : {0, 1, 2, 5, 9, 10, 11, 20})  // batches, of 10 in an epoch
      for (int world_after : {1, 2, 4}) {
        DistributedSampler uninterrupted(40, 0, 1, {.batch_numel = 4, .seed = 9});
        Items expected, seen;
        for (int i = 0; i < 30; ++i)
          for (int64_t item : uninterrupted.next()) expected.push_back(item);
        StateValues saved;
        for (auto& sampler : samplers_of(1, 40, {.batch_numel = 4, .seed = 9})) {
          auto loader = loader_of(sampler, 4, workers);
          for (int64_t left = received; left > 0;)
            for (const Items& batch : *loader) {
              seen.insert(seen.end(), batch.begin(), batch.end());
              if (--left == 0) break;
            }
          saved = sampler.state_values();
        }
        std::vector<Items> after;  // of each rank
        for (auto& sampler : samplers_of(world_after, 40, {.batch_numel = 4 / world_after, .seed = 9})) {
          sampler.check_state_values(saved);
          sampler.load_state_values(saved);
          EXPECT_EQ(sampler.batches_left(), 10 - received % 10);
          auto loader = loader_of(sampler, static_cast<size_t>(4 / world_after), workers);
          after.emplace_back();
          while (sampler.epoch() < 3)
            for (const Items& batch : *loader) after.back().insert(after.back().end(), batch.begin(), batch.end());
        }
        const size_t of_rank = static_cast<size_t>(4 / world_after);
        for (size_t at = 0; at < after[0].size(); at += of_rank)
          for (const Items& own : after)
            seen.insert(seen.end(), own.begin() + static_cast<long>(at), own.begin() + static_cast<long>(at + of_rank));
        EXPECT_EQ(seen, expected) << workers << " workers, " << received << " received, world " << world_after;
      }
}

TEST(DataLoader, DropLastEndsWithTheLastFullStep) {
  const DistributedSamplerOptions options{.batch_numel = 4, .accumulation = 2, .drop_last = true};
  auto samplers = samplers_of(2, 50, options);  // three steps of 16
  for (auto& sampler : samplers) {
    auto loader = loader_of(sampler, 4, 2);
    for (int epoch = 0; epoch < 2; ++epoch) {
      int64_t steps = 0, batches = 0;
      for (const Items& batch : *loader) {
        EXPECT_EQ(batch.size(), 4u);
        ++batches;
        if (sampler.micro_batch() == 0) ++steps;
      }
      EXPECT_EQ(steps, 3);
      EXPECT_EQ(batches, 6);
    }
  }
  // A loader's drop_last(true) alone is the same; next() without a loader drops them, too.
  DistributedSampler of_loader(10, 0, 1, {.batch_numel = 4}), by_hand(10, 0, 1, {.batch_numel = 4, .drop_last = true});
  auto loader = torch::data::make_data_loader(Indices(10), of_loader,
                                              torch::data::DataLoaderOptions(4).workers(1).drop_last(true));
  for (int epoch = 0; epoch < 2; ++epoch)
    for (const Items& batch : *loader) EXPECT_EQ(batch, by_hand.next());
  EXPECT_EQ(of_loader.epoch(), 2);
  // A position in a dropped end, after a load, is the next epoch.
  StateValues saved = DistributedSampler(50, 0, 1, {}).state_values();
  saved["taken"] = int64_t{48};
  samplers[0].load_state_values(saved);
  EXPECT_EQ(samplers[0].epoch(), 1);
}

TEST(DataLoader, APartitionHasEachItemOnce) {
  for (int world : {1, 2, 3, 5})
    for (int64_t items : {1, 4, 23, 60}) {
      Items seen;
      std::vector<int64_t> batches;
      for (auto& sampler : samplers_of(world, items, {.batch_numel = 4, .shuffle = false, .partition = true})) {
        auto loader = loader_of(sampler, 4, 2);
        batches.push_back(0);
        for (const Items& batch : *loader) {
          seen.insert(seen.end(), batch.begin(), batch.end());
          ++batches.back();
        }
        EXPECT_EQ(sampler.epoch(), 1);
      }
      EXPECT_EQ(sorted(seen), range(items)) << items << " items, world " << world;
      EXPECT_LE(*std::max_element(batches.begin(), batches.end()),
                *std::min_element(batches.begin(), batches.end()) + 1);
    }
}

TEST(DataLoader, EpochsAreSetAsInPython) {
  DistributedSampler sampler(12, 0, 1, {.batch_numel = 4}), other(12, 0, 1, {.batch_numel = 4});
  auto loader = loader_of(sampler, 4), other_loader = loader_of(other, 4);
  auto epoch_of = [](auto& of) {
    std::vector<Items> all;
    for (const Items& batch : *of) all.push_back(batch);
    return all;
  };
  std::vector<std::vector<Items>> epochs;
  for (int epoch = 0; epoch < 3; ++epoch) {
    sampler.set_epoch(epoch);
    epochs.push_back(epoch_of(loader));
  }
  other.set_epoch(2);
  EXPECT_EQ(epoch_of(other_loader), epochs[2]);
  other.set_epoch(1);
  for (const Items& batch : *other_loader) {
    EXPECT_EQ(batch, epochs[1][0]);
    break;
  }
  other.set_epoch(1);  // the current one: continues within it
  EXPECT_EQ(epoch_of(other_loader), (std::vector<Items>{epochs[1][1], epochs[1][2]}));
  EXPECT_THROW(sampler.set_epoch(-1), std::invalid_argument);
  EXPECT_THROW(sampler.set_epoch(std::numeric_limits<int64_t>::max()), std::invalid_argument);
  sampler.reset(20);
  EXPECT_EQ(sampler.batches_left(), 5);
  EXPECT_EQ(sampler.epoch(), 3);
}

TEST(DataLoader, LibtorchsArchivesHaveThePosition) {
  DistributedSampler sampler(12, 0, 1, {.batch_numel = 4, .seed = 5}), other(12, 0, 1, {.batch_numel = 4, .seed = 5});
  static_cast<void>(sampler.next());
  auto written = [](const DistributedSampler& of) {
    torch::serialize::OutputArchive archive;
    of.save(archive);
    std::stringstream stream;
    archive.save_to(stream);
    return stream;
  };
  auto read = [](DistributedSampler& into, std::stringstream stream) {
    torch::serialize::InputArchive archive;
    archive.load_from(stream);
    into.load(archive);
  };
  read(other, written(sampler));
  EXPECT_EQ(other.next(), sampler.next());
  DistributedSampler of_other_data(13, 0, 1, {.batch_numel = 4, .seed = 5});
  expect_contains(error_of<std::invalid_argument>([&] { read(of_other_data, written(sampler)); }), "'items' differs");
}

TEST(DataLoader, ArchivesOfOtherObjectsAreRefusedByName) {
  auto refused = [](const c10::IValue& items, bool has_seed) {
    std::stringstream file;
    torch::serialize::OutputArchive written;
    written.write("items", items);
    if (has_seed) written.write("seed", c10::IValue("0"));
    written.write("shuffle", c10::IValue(true));
    written.write("taken", c10::IValue(int64_t{0}));
    written.save_to(file);
    torch::serialize::InputArchive archive;
    archive.load_from(file);
    DistributedSampler sampler(12, 0, 1);
    return error_of<std::invalid_argument>([&] { sampler.load(archive); });
  };
  EXPECT_EQ(refused(int64_t{12}, true), "");
  expect_contains(refused(int64_t{12}, false), "the state of a sampler has no 'seed'");
  expect_contains(refused(12.0, true), "the state of a sampler has no 'items'");
}

TEST(DataLoader, MisuseIsNamed) {
  auto read_all = [](auto& loader) {
    for (const Items& batch : *loader) static_cast<void>(batch);
  };
  DistributedSampler sampler(12, 0, 1, {.batch_numel = 4});
  auto other_batch = loader_of(sampler, 3);
  expect_contains(error_of<std::invalid_argument>([&] { read_all(other_batch); }),
                  "asks for batches of 3, the sampler has batch_numel 4");
  expect_contains(
      error_of<std::invalid_argument>([] { DistributedSampler(12, 0, 4, {.batch_numel = 4, .drop_last = true}); }),
      "drop_last leaves no item of 12");
  EXPECT_THROW(DistributedSampler(12, 0, 1, {.drop_last = true, .partition = true}), std::invalid_argument);
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  expect_contains(error_of<std::invalid_argument>([] { DistributedSampler(12, 0, 2, {.batch_numel = kMost}); }),
                  "batch_numel is 9223372036854775807, expected at most 549755813888");
  expect_contains(
      error_of<std::invalid_argument>([] { DistributedSampler(12, 0, 2, {.batch_numel = 8, .accumulation = kMost}); }),
      "accumulation is 9223372036854775807, expected at most 68719476736");
  StateValues saved = sampler.state_values();
  saved["taken"] = kMost;
  expect_contains(error_of<std::invalid_argument>([&] { sampler.check_state_values(saved); }),
                  "has taken 9223372036854775807 items, expected 0 to 4611686018427387904");
  DistributedSampler full_steps(12, 0, 1, {.batch_numel = 4, .drop_last = true});
  expect_contains(error_of<std::invalid_argument>([&] { full_steps.reset(3); }), "drop_last leaves no item of 3");
  EXPECT_EQ(full_steps.batches_left(), 3);
  DistributedSampler partition(12, 0, 1, {.partition = true});
  EXPECT_THROW(static_cast<void>(partition.next()), std::logic_error);
  auto unordered = torch::data::make_data_loader(Indices(12), sampler,
                                                 torch::data::DataLoaderOptions(4).workers(1).enforce_ordering(false));
  for (const Items& batch : *unordered) {
    EXPECT_EQ(batch.size(), 4u);
    if (sampler.batches_left() == 2) {
      EXPECT_THROW(static_cast<void>(sampler.state_values()), std::logic_error);
    }
  }
  EXPECT_NO_THROW(static_cast<void>(sampler.state_values()));
}

}  // namespace
}  // namespace tessera::data_loader_test
