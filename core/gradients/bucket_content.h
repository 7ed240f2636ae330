#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <string>
#include <vector>

#include "core/gradients/gradient_bucket.h"
#include "core/layout/unit_plan.h"
#include "core/runtime/stream_uses.h"

namespace tessera::internal {

// The gradients that one bucket has got so far in a pass. Its owner, GradientReducer, gives it its memory.
struct BucketContent {
  // By piece of the bucket; none until the first gradient.
  struct Part {
    at::Tensor values;         // [numel of the piece] of the bucket's dtype, undefined until it is needed
    bool is_borrowed = false;  // it is a gradient of autograd's, which is not to be written
    int64_t version = 0;       // when it was borrowed
  };
  std::vector<Part> parts{};
  bool is_result = false;      // the only part is the result's own memory
  bool is_adopted = false;     // it is a gradient's, which the result takes over
  std::vector<bool> filled{};  // by member
  StreamUses uses{};           // of the memory: hooks run on the streams of the operators before them
  // On a device: small gradients, which are copied together when one launch is enough for all.
  struct Waiting {
    size_t member;
    at::Tensor gradient;
    int64_t version;  // when it came
    c10::Stream stream;
  };
  std::vector<Waiting> waiting{};

  // One without gradients, for so many members.
  static BucketContent of_members(size_t members);
  bool is_begun() const { return !parts.empty(); }

  // The part that is this gradient as it is, without copying it.
  void borrow(size_t piece, const at::Tensor& values);
  int64_t borrowed_bytes() const;
  // Throws std::logic_error, naming parameter and rank, if a borrowed gradient was changed since it came.
  void require_as_borrowed(const GradientBucket& bucket, const std::vector<PlannedParameter>& parameters,
                           int rank) const;

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
  // Zeros where no gradient has been put: between members only if asked for. All parts have their memory.
  void fill_gaps(const GradientBucket& bucket, bool between_members) const;
  // Forgets a member's gradient. Returns whether that was the last one.
  bool forget(const GradientBucket& bucket, size_t member);

 private:
  at::Tensor place_of(const GradientBucket& bucket, size_t member) const;
};

}  // namespace tessera::internal
