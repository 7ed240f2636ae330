#pragma once

#include <torch/data/dataloader/stateless.h>
#include <torch/data/dataloader_options.h>
#include <torch/data/samplers/base.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <tessera/checkpoint/stateful.h>

namespace tessera {

// An endless sequence of permutations of a data set's items, one for each epoch. It depends only on its arguments, and
// is equal with every standard library.
class EpochOrder {
 public:
  // Throws std::invalid_argument unless items_numel > 0. If `shuffle` is false, every epoch has the original order.
  EpochOrder(int64_t items_numel, uint64_t seed, bool shuffle = true);

  int64_t items_numel() const { return items_numel_; }  // of an epoch
  // The item at position `place`; place / items_numel() is the epoch. Keeps the permutation of one epoch
  // in memory, 8 bytes an item.
  int64_t item(int64_t place);
  // A random number in [0, bound) of an epoch, for example the offset of its windows. Drawn before the permutation.
  int64_t draw_of_epoch(int64_t epoch, int64_t bound);

 private:
  void prepare(int64_t epoch, int64_t bound);

  int64_t items_numel_;
  uint64_t seed_;
  bool shuffle_;
  int64_t epoch_ = -1;  // of order_
  int64_t bound_ = 1;
  int64_t drawn_ = 0;
  std::vector<int64_t> order_;
};

// The assignment of items to ranks. Must be equal on all ranks.
struct DistributedSamplerOptions {
  int64_t batch_numel = 1;   // items of a rank in a micro-batch; a data loader's batch_size
  int64_t accumulation = 1;  // micro-batches in a step
  uint64_t seed = 0;
  bool shuffle = true;
  // The end of an epoch, if its last items do not fill a step of all ranks. Set at most one.
  bool drop_last = false;  // leaves these items out; a loader's drop_last(true) sets it
  bool partition = false;  // spreads them without repeats, for validation: some ranks may have one item, and so
                           // one batch, fewer than others. Loop with ranks_with_data() then.
};

// The items of each rank, in an order that survives a restart with another number of ranks
// (torch.utils.data.DistributedSampler with a position). A step takes the next ranks * batch_numel * accumulation items
// of EpochOrder, and each rank a run of batch_numel * accumulation of these. So ranks never share an item, and every
// epoch has each item once. If the product is equal, any number of ranks sees the same items in a step. Not collective.
//
// As the sampler of a libtorch data loader, with any number of workers:
//
//   tessera::DistributedSampler sampler(dataset_numel, comm->rank(), comm->size(), {.batch_numel = 32, .seed = 1});
//   auto loader = torch::data::make_data_loader(std::move(dataset), sampler, torch::data::DataLoaderOptions(32));
//   load_newest_checkpoint(dir, {model, optimizer, sampler});   // if there is one
//   while (sampler.epoch() < 10)
//     for (auto& batch : *loader) { ...; save_checkpoint(path, {model, optimizer, sampler}); }
//
// The first loop over the loader yields the rest of an epoch, each later loop a whole epoch. Ranks have equally many
// batches of equal sizes: the last step repeats items of the epoch's beginning (see the options). The position counts
// the batches that the loop has received, not batches that workers read ahead. So a saved run continues with the next
// batch. After a `break`, the next loop over a loader continues, too (with workers, libtorch then requires a new
// loader).
//
// Without a loader, next() returns endless batches, and one step may span two epochs:
//
//   for (...) { auto items = sampler.next(); ... }
//
// After a load, continues at the next step, even if a step now takes another number of items. Copies share the
// position: the loader's copy moves the caller's. Must be used by one thread at a time; a loader uses it on the loop's
// thread.
class DistributedSampler : public torch::data::samplers::Sampler<>, public Stateful {
 public:
  // Throws std::invalid_argument for counts below 1, for a rank outside the world, and for drop_last with partition or
  // with fewer items than a step takes.
  DistributedSampler(int64_t items_numel, int rank, int world_size, DistributedSamplerOptions options = {});

  // Returns this rank's items of the next micro-batch, `batch_numel` of them. Throws std::logic_error under
  // `partition`.
  std::vector<int64_t> next();

  // For data loaders: the next batch of the epoch, nullopt after the last. Throws std::invalid_argument unless
  // batch_numel is the option's.
  std::optional<std::vector<size_t>> next(size_t batch_numel) override;
  // For data loaders: begins the rest of the current epoch. If the number of items changes, restarts that epoch.
  void reset(std::optional<size_t> new_items_numel = std::nullopt) override;

  // Begins an epoch; is a no-op if it is the current epoch, so that a resumed loop continues within it. Must be called
  // between loops over a loader. Only needed to skip or repeat epochs.
  void set_epoch(int64_t epoch);
  int rank() const;              // as constructed
  int world_size() const;        // as constructed
  int64_t epoch() const;         // of the next step's first item; after an epoch's last batch, the next epoch
  int64_t micro_batch() const;   // micro-batches of this step received so far; 0 between steps: then call step()
  int64_t batches_left() const;  // not yet received by the loop over a loader: 0 in and after its last iteration

  // Its state "sampler": items, seed, shuffle, and the number of items that all ranks have taken. Must be saved between
  // steps: within a step, state_values() throws std::logic_error; also while a loader without enforce_ordering reads
  // ahead, because the received batches are then unknown.
  std::string state_name() const override { return "sampler"; }
  StateValues state_values() const override;  // the position, and the arguments that it belongs to
  // Throws std::invalid_argument for another number of items, another seed or another order.
  void check_state_values(const StateValues& values) const override;
  void load_state_values(const StateValues& values) override;  // continues at that position

  // Writes state_values() to one of libtorch's archives.
  void save(torch::serialize::OutputArchive& archive) const override;
  // Continues from an archive of save(). Throws like check_state_values().
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  // Records how far a loader with these options reads ahead. Throws std::invalid_argument for a loader's drop_last with
  // `partition`.
  void follow(const torch::data::FullDataLoaderOptions& loader);

 private:
  struct Position;

  std::shared_ptr<Position> position_;
};

namespace internal {

// The copy of the sampler that a loader owns.
class LoaderSampler : public DistributedSampler {
 public:
  LoaderSampler(const DistributedSampler& sampler, const torch::data::DataLoaderOptions& loader)
      : DistributedSampler(sampler) {
    follow(torch::data::FullDataLoaderOptions(loader));
  }
};

}  // namespace internal
}  // namespace tessera

namespace torch::data {

// Hands the loader's options to the sampler. A sampler otherwise sees only requests, which run ahead of the loop by
// max_jobs, and cannot know how many batches the loop has received.
template <typename Dataset>
class StatelessDataLoader<Dataset, tessera::DistributedSampler>
    : public StatelessDataLoader<Dataset, tessera::internal::LoaderSampler> {
 public:
  // Like the constructors of the general template.
  StatelessDataLoader(Dataset dataset, const tessera::DistributedSampler& sampler, DataLoaderOptions options)
      : StatelessDataLoader<Dataset, tessera::internal::LoaderSampler>(
            std::move(dataset), tessera::internal::LoaderSampler(sampler, options), options) {}
};

}  // namespace torch::data
