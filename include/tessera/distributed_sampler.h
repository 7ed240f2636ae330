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

// An endless sequence of a data set's items: one permutation of the items for each epoch. The permutations depend only
// on the constructor's arguments, not on the C++ standard library.
class EpochOrder {
 public:
  // Throws std::invalid_argument unless items_numel > 0. If `shuffle` is false, every epoch has the original order.
  EpochOrder(int64_t items_numel, uint64_t seed, bool shuffle = true);

  int64_t items_numel() const { return items_numel_; }  // number of items in an epoch
  // Returns the item at position `place` of the sequence, which is in epoch place / items_numel(). Keeps one epoch's
  // permutation in memory, 8 bytes an item. Throws std::invalid_argument for a negative place.
  int64_t item(int64_t place);
  // Returns a random number in [0, bound): the same in each call for an epoch. Throws std::invalid_argument unless
  // bound is above 0.
  int64_t draw_of_epoch(int64_t epoch, int64_t bound);

 private:
  void prepare(int64_t epoch, int64_t bound);

  int64_t items_numel_;
  uint64_t seed_;
  bool shuffle_;
  int64_t epoch_ = -1;  // the epoch of order_; -1: none yet
  int64_t bound_ = 1;
  int64_t drawn_ = 0;
  std::vector<int64_t> order_;
};

// Options of DistributedSampler. Must be equal on all ranks.
struct DistributedSamplerOptions {
  int64_t batch_numel = 1;   // items of each rank in a micro-batch; a loader's batch_size
  int64_t accumulation = 1;  // micro-batches of each rank in a step
  uint64_t seed = 0;
  bool shuffle = true;
  // If an epoch's last items do not fill a step of all ranks, the step repeats items unless one option below is true.
  bool drop_last = false;  // omits the last items; a loader's drop_last(true) sets this option
  bool partition = false;  // spreads the last items without repeats, for validation: some ranks may have
                           // one item, and so one batch, fewer than others. Such loops need ranks_with_data().
};

// Selects the items of each rank, in an order that continues after a restart with another world size
// (torch.utils.data.DistributedSampler with a position). A step takes the next ranks * batch_numel * accumulation items
// of EpochOrder. If this product stays equal, a step has the same items at any world size. Each rank receives
// consecutive items of the step. Ranks never share an item, unless the step repeats items. Not collective.
//
// Use with a libtorch data loader, with any number of workers:
//
//   tessera::DistributedSampler sampler(dataset_numel, comm->rank(), comm->size(), {.batch_numel = 32, .seed = 1});
//   auto loader = torch::data::make_data_loader(std::move(dataset), sampler, torch::data::DataLoaderOptions(32));
//   load_newest_checkpoint(dir, {model, optimizer, sampler});   // if a checkpoint exists
//   while (sampler.epoch() < 10)
//     for (auto& batch : *loader) { ...; save_checkpoint(path, {model, optimizer, sampler}); }
//
// The first loop over the loader yields the rest of an epoch, each later loop a whole epoch. All ranks have equally
// many batches of equal sizes, because the last step repeats items from the start of the epoch (see the options). The
// position counts the batches that the loop has received, but not those that workers have read ahead. So a resumed run
// continues with the next batch. A loop over the loader after a `break` also continues there. If the loader has
// workers, libtorch requires a new loader after a `break`.
//
// Without a loader, next() returns endless batches, and one step may span two epochs:
//
//   for (...) { auto items = sampler.next(); ... }
//
// After a load, the sampler continues at the next step, even if the number of items in a step has changed. Copies share
// one position: if a loader's copy advances, the caller's sampler does, too. Must be used by one thread at a time. A
// loader uses the sampler on the loop's thread.
class DistributedSampler : public torch::data::samplers::Sampler<>, public Stateful {
 public:
  // Throws std::invalid_argument for counts below 1 and for a rank outside the world. With drop_last, also throws if
  // `partition` is set, or if a step takes more items than there are.
  DistributedSampler(int64_t items_numel, int rank, int world_size, DistributedSamplerOptions options = {});

  // Returns this rank's items of the next micro-batch: [batch_numel]. If the option `partition` is set, throws
  // std::logic_error.
  std::vector<int64_t> next();

  // For data loaders: returns the next batch of the epoch, and nullopt after the last one. Throws std::invalid_argument
  // unless `batch_numel` equals the option of that name.
  std::optional<std::vector<size_t>> next(size_t batch_numel) override;
  // For data loaders: begins a loop over the rest of the epoch. If `new_items_numel` differs from the number of items,
  // adopts it and restarts the epoch.
  void reset(std::optional<size_t> new_items_numel = std::nullopt) override;

  // Begins an epoch; needed only to skip or repeat epochs. A no-op for the current epoch, so that a resumed loop
  // continues in it. Must not be called in a loop over a loader. Throws std::invalid_argument for a negative epoch.
  void set_epoch(int64_t epoch);
  int rank() const;              // the constructor's `rank`
  int world_size() const;        // the constructor's `world_size`
  int64_t epoch() const;         // epoch of the next batch's step; after an epoch's last batch, the next epoch
  int64_t micro_batch() const;   // received micro-batches of the current step; 0 after the step's last one
  int64_t batches_left() const;  // batches that the loop over a loader will still receive; 0 in the last iteration

  // Returns the name of the state. The state has items, seed, shuffle, and the number of items that all ranks have
  // taken. It must be saved between steps: within a step, state_values() throws std::logic_error. state_values() also
  // throws while a loader without enforce_ordering reads ahead: the number of received batches is then unknown.
  std::string state_name() const override { return "sampler"; }
  StateValues state_values() const override;  // items, seed, shuffle and position
  // Throws std::invalid_argument if items, seed or shuffle differ from this sampler's.
  void check_state_values(const StateValues& values) const override;
  void load_state_values(const StateValues& values) override;  // continues at the saved position

  // Writes state_values() to one of libtorch's archives.
  void save(torch::serialize::OutputArchive& archive) const override;
  // Continues from an archive of save(). Throws like check_state_values().
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  // Records the number of batches that a loader with these options reads ahead. If the loader has drop_last and the
  // sampler has `partition`, throws std::invalid_argument.
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

// Passes the loader's options to the sampler. The sampler observes only the loader's requests, which are up to max_jobs
// ahead of the loop. It needs the options to compute the number of batches that the loop has received.
template <typename Dataset>
class StatelessDataLoader<Dataset, tessera::DistributedSampler>
    : public StatelessDataLoader<Dataset, tessera::internal::LoaderSampler> {
 public:
  // Like the constructor of the general template.
  StatelessDataLoader(Dataset dataset, const tessera::DistributedSampler& sampler, DataLoaderOptions options)
      : StatelessDataLoader<Dataset, tessera::internal::LoaderSampler>(
            std::move(dataset), tessera::internal::LoaderSampler(sampler, options), options) {}
};

}  // namespace torch::data
