#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/async/stream_uses.h"
#include "tessera/flat/gradient_bucket.h"
#include "tessera/flat/unit_plan.h"

namespace tessera {

// The gradients that one bucket has got so far in a pass. Its owner, GradientReducer, gives it its memory.
struct BucketContent {
  at::Tensor flat;           // [layout.full_numel()] of the bucket's dtype, undefined until the first gradient
  bool is_result = false;    // it is the result's own memory
  bool is_borrowed = false;  // it is a gradient of autograd's, which is not to be written
  std::vector<bool> filled;  // by member
  StreamUses uses{};         // of `flat`: hooks run on the streams of the operators before them
  // On a device: small gradients, which are copied together when one launch is enough for all.
  struct Waiting {
    size_t member;
    at::Tensor gradient;
    int64_t version;  // when it came
    c10::Stream stream;
  };
  std::vector<Waiting> waiting{};

  // A gradient that may wait for others: on a device a launch takes the host longer than the copy of so few bytes takes
  // the device.
  static bool may_wait(const at::Tensor& gradient);
  // Takes it, without copying it yet.
  void wait_for_more(size_t member, const at::Tensor& gradient);
  // Copies it to its place, or adds it to what is there.
  void put(const GradientBucket& bucket, size_t member, const at::Tensor& gradient, bool is_first);
  // Copies those that wait. `parameters` are the bucket's members' list, `rank` this one: throws std::logic_error, with
  // both, if one was changed since it came.
  void copy_waiting(const GradientBucket& bucket, const std::vector<PlannedParameter>& parameters, int rank);
  // Zeros where no gradient has been put: between members only if asked for.
  void fill_gaps(const GradientBucket& bucket, bool between_members) const;
  // Forgets a member's gradient. Returns whether that was the last one.
  bool forget(size_t member);

 private:
  at::Tensor place_of(const GradientBucket& bucket, size_t member) const;
};

}  // namespace tessera
