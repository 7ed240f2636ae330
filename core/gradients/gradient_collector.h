#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "core/gradients/bucket_content.h"
#include "core/gradients/gradient_bucket.h"
#include "core/layout/unit_plan.h"

namespace tessera::internal {

// Places the gradients of a pass in buckets, and counts the missing gradients of each bucket. Does not communicate:
// ReductionQueue reduces the contents. Used by one thread at a time, with autograd off.
class GradientCollector {
 public:
  struct Options {
    int rank = 0;                 // for errors
    bool may_fill_result = true;  // whether gradients may be placed in the result's memory
  };
  // The lists and the memory must outlive the collector.
  GradientCollector(const std::vector<PlannedParameter>& parameters, const std::vector<GradientBucket>& buckets,
                    BucketMemory& memory, Options options);

  // Must be called after the list of buckets was replaced. Drops all gradients.
  void rebuild();
  void begin_pass();

  // Whether a member of the bucket requires a gradient.
  bool trains(size_t bucket) const { return slots_[bucket].expected > 0; }
  bool is_full(size_t bucket) const { return slots_[bucket].missing == 0; }
  bool has_content(size_t bucket) const { return slots_[bucket].content.is_begun(); }
  size_t bucket_of(size_t parameter) const { return places_[parameter].bucket; }

  // Places a gradient of any layout. `is_recomputed` must be true if the reduction of the parameter's bucket has begun,
  // for example because backward recomputes a part of the model.
  void place(size_t parameter, const at::Tensor& gradient, bool is_recomputed);
  // Must be called when a parameter's gradient was placed or is absent. A bucket is full when all members have arrived.
  void note_arrival(size_t parameter);

  // Removes and returns the content of a bucket, with zeros for absent gradients.
  BucketContent take(size_t bucket);
  BucketContent take_recomputed(size_t bucket);
  // Copies gradients that belong to autograd, so that the next pass can add to them.
  void keep_for_next_pass();

  // Whether a bucket has a gradient of the parameter. forget() removes that gradient.
  bool keeps(size_t parameter) const;
  void forget(size_t parameter);
  void forget_recomputed();
  void forget_all();

  // Returns this rank's use in the pass: parameters with a gradient, and buckets with recomputed gradients.
  PassUse use() const;
  // Returns the parameters in the order in which their gradients arrived.
  const std::vector<size_t>& arrivals() const { return arrivals_; }

 private:
  static constexpr size_t kNowhere = static_cast<size_t>(-1);
  struct Place {
    size_t bucket = kNowhere, member = 0;
    bool has_arrived = false;
  };
  struct Slot {
    BucketContent content, recomputed;
    size_t expected = 0, missing = 0;  // gradients of this pass: all of them, and those that have not arrived
  };

  void collect(BucketContent& content, size_t bucket, size_t member, const at::Tensor& gradient);
  void make_room(BucketContent& content, size_t bucket, size_t piece);
  void copy_borrowed(BucketContent& content, size_t bucket, size_t piece);
  void copy_waiting(BucketContent& content, size_t bucket) const;
  void adopt(BucketContent& content, size_t bucket);
  BucketContent sealed(BucketContent content, size_t bucket);

  const std::vector<PlannedParameter>& parameters_;
  const std::vector<GradientBucket>& buckets_;
  BucketMemory& memory_;
  const Options options_;
  std::vector<Place> places_;  // by parameter: its bucket, and its index in the bucket
  std::vector<Slot> slots_;    // by bucket: its contents
  std::vector<bool> used_;     // by parameter: whether it has a gradient in this pass
  std::vector<size_t> arrivals_;
};

}  // namespace tessera::internal
