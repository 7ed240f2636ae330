#pragma once

#include <cstdint>
#include <vector>

#include <tessera/checkpoint/stateful.h>

namespace tessera {

// The items of a data set in an order that is random and starts anew each epoch: one endless sequence of permutations.
// A function of its arguments alone, the same with every standard library.
class EpochOrder {
 public:
  // Throws std::invalid_argument unless there is an item. `shuffle` false: in their own order, every epoch.
  EpochOrder(int64_t items_numel, uint64_t seed, bool shuffle = true);

  int64_t items_numel() const { return items_numel_; }  // of an epoch
  // The item at a place of the sequence; place / items_numel() is the epoch. One epoch's permutation is kept in memory,
  // 8 bytes an item.
  int64_t item(int64_t place);
  // Another number that belongs to an epoch, in [0, bound): where its windows begin, say. Drawn before the permutation.
  int64_t draw_of_epoch(int64_t epoch, int64_t bound);

 private:
  void prepare(int64_t epoch, int64_t bound);

  const int64_t items_numel_;
  const uint64_t seed_;
  const bool shuffle_;
  int64_t epoch_ = -1;  // that is in order_
  int64_t bound_ = 1;
  int64_t drawn_ = 0;
  std::vector<int64_t> order_;
};

// How the items of a step are spread over ranks. The same on all ranks.
struct DistributedSamplerOptions {
  int64_t batch_numel = 1;   // items of a rank in a micro-batch
  int64_t accumulation = 1;  // micro-batches in a step
  uint64_t seed = 0;
  bool shuffle = true;
};

// Which items a rank takes next, for training that goes on after a checkpoint with other ranks, too
// (torch.utils.data.DistributedSampler, but with a position). A step takes the next ranks * batch_numel * accumulation
// items of EpochOrder, rank r a run of batch_numel * accumulation of these. So ranks never share an item, every epoch
// has each item once (a step may end one epoch and begin the next), and any numbers of ranks with the same product see
// the same items in each step.
//
//   tessera::DistributedSampler sampler(dataset_numel, comm->rank(), comm->size(), {.batch_numel = 8, .seed = 1});
//   for (...) { auto items = sampler.next(); ... }
//   save_checkpoint(dir, {model, optimizer, sampler});
//
// Loaded by ranks that take another number of items in a step, it goes on where the step before ended. Nothing is
// collective.
class DistributedSampler : public Stateful {
 public:
  // Throws std::invalid_argument for counts below 1 and a rank outside the world.
  DistributedSampler(int64_t items_numel, int rank, int world_size, DistributedSamplerOptions options = {});

  // This rank's items of the next micro-batch, `batch_numel` of them.
  std::vector<int64_t> next();

  int64_t epoch() const { return first_ / order_.items_numel(); }  // of the step's first item
  int64_t micro_batch() const { return micro_batch_; }             // how many of the step's were taken: 0 between steps

  // "sampler": items, seed, whether it shuffles, and how many items all ranks have taken together. To be saved between
  // steps: state_values() throws std::logic_error within one.
  std::string state_name() const override { return "sampler"; }
  StateValues state_values() const override;  // the place in the sequence, and what it belongs to
  // Refuses a state of other data: another number of items, another seed or order.
  void check_state_values(const StateValues& values) const override;
  void load_state_values(const StateValues& values) override;  // goes on from there

 private:
  StateValues form() const;

  EpochOrder order_;
  const int64_t rank_, world_size_;
  const DistributedSamplerOptions options_;
  int64_t first_ = 0;  // place of the step's first item
  int64_t micro_batch_ = 0;
};

}  // namespace tessera
