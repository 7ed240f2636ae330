#pragma once

#include <cstdint>
#include <vector>

#include <tessera/checkpoint/stateful.h>

namespace tessera {

// An endless sequence of permutations of a data set's items, one for each epoch. It depends only on its arguments, with
// every standard library.
class EpochOrder {
 public:
  // Throws std::invalid_argument unless items_numel > 0. If `shuffle` is false, every epoch has the original order.
  EpochOrder(int64_t items_numel, uint64_t seed, bool shuffle = true);

  int64_t items_numel() const { return items_numel_; }  // of an epoch
  // The item at position `place`; place / items_numel() is the epoch. Keeps the permutation of one epoch
  // in memory, 8 bytes an item.
  int64_t item(int64_t place);
  // A random number of an epoch, in [0, bound): the start of its windows, for example. Drawn before the permutation.
  int64_t draw_of_epoch(int64_t epoch, int64_t bound);

 private:
  void prepare(int64_t epoch, int64_t bound);

  const int64_t items_numel_;
  const uint64_t seed_;
  const bool shuffle_;
  int64_t epoch_ = -1;  // of order_
  int64_t bound_ = 1;
  int64_t drawn_ = 0;
  std::vector<int64_t> order_;
};

// The assignment of items to ranks. Must be equal on all ranks.
struct DistributedSamplerOptions {
  int64_t batch_numel = 1;   // items of a rank in a micro-batch
  int64_t accumulation = 1;  // micro-batches in a step
  uint64_t seed = 0;
  bool shuffle = true;
};

// The items of each rank, in an order that survives a restart with another number of ranks
// (torch.utils.data.DistributedSampler with a position). A step takes the next ranks * batch_numel * accumulation items
// of EpochOrder, and each rank a run of batch_numel * accumulation of these. So ranks never share an item, and every
// epoch has each item once (one step may span two epochs). If the product is equal, any number of ranks sees the same
// items in a step.
//
//   tessera::DistributedSampler sampler(dataset_numel, comm->rank(), comm->size(), {.batch_numel = 8, .seed = 1});
//   for (...) { auto items = sampler.next(); ... }
//   save_checkpoint(dir, {model, optimizer, sampler});
//
// After a load, it continues at the next step, even if a step now takes another number of items. Not collective.
class DistributedSampler : public Stateful {
 public:
  // Throws std::invalid_argument for counts below 1, and for a rank outside the world.
  DistributedSampler(int64_t items_numel, int rank, int world_size, DistributedSamplerOptions options = {});

  // Returns this rank's items of the next micro-batch, `batch_numel` of them.
  std::vector<int64_t> next();

  int64_t epoch() const { return first_ / order_.items_numel(); }  // of the step's first item
  int64_t micro_batch() const { return micro_batch_; }             // micro-batches taken of the step: 0 between steps

  // Its state "sampler": items, seed, shuffle, and the number of items that all ranks have taken. Must be saved between
  // steps: within a step, state_values() throws std::logic_error.
  std::string state_name() const override { return "sampler"; }
  StateValues state_values() const override;  // the position, and the arguments that it belongs to
  // Refuses the state of other data: another number of items, seed or order.
  void check_state_values(const StateValues& values) const override;
  void load_state_values(const StateValues& values) override;  // continues from there

 private:
  StateValues form() const;

  EpochOrder order_;
  const int64_t rank_, world_size_;
  const DistributedSamplerOptions options_;
  int64_t first_ = 0;  // position of the step's first item
  int64_t micro_batch_ = 0;
};

}  // namespace tessera
