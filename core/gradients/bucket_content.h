#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/gradients/gradient_bucket.h"
#include "core/layout/unit_plan.h"
#include "core/memory/counted_buffers.h"
#include "core/runtime/stream_uses.h"

namespace tessera::internal {

// Allocates buffers for buckets. Counts the bytes of buffers and of borrowed gradients. Used by one thread at a time.
class BucketMemory {
 public:
  explicit BucketMemory(at::Device device) : buffers_(device, MemoryKind::kBuckets) {}

  at::Tensor take(int64_t numel, at::ScalarType dtype) {
    at::Tensor buffer = buffers_.take(numel, dtype);
    note_peak();
    return buffer;
  }
  // Counts the bytes of borrowed gradients; `bytes` is negative when gradients are returned.
  void count_borrowed(int64_t bytes) {
    borrowed_bytes_ += bytes;
    note_peak();
  }
  void forget_borrowed() { borrowed_bytes_ = 0; }

  int64_t bytes() const { return buffers_.lent_bytes() + borrowed_bytes_; }
  int64_t peak_bytes() const { return peak_bytes_; }
  void reset_peak() { peak_bytes_ = bytes(); }

 private:
  void note_peak() { peak_bytes_ = std::max(peak_bytes_, bytes()); }

  CountedBuffers buffers_;
  int64_t borrowed_bytes_ = 0;
  int64_t peak_bytes_ = 0;
};

// The gradients of one bucket in a pass. GradientCollector owns these objects and allocates their memory.
struct BucketContent {
  enum class Memory : uint8_t {
    kBucket,    // memory of BucketMemory, or of an adopted gradient
    kResult,    // memory of the bucket's `result`
    kBorrowed,  // memory of autograd's gradient, which must not be written
  };
  // The values of one piece of the bucket (BucketRoute::pieces).
  struct Part {
    at::Tensor values;  // [numel of the piece] of the bucket's dtype; undefined until needed
    Memory memory = Memory::kBucket;
    int64_t version = 0;  // version of a borrowed gradient when it was borrowed
  };
  std::vector<Part> parts{};   // empty before the first gradient
  std::vector<bool> filled{};  // by member: whether it has a gradient
  StreamUses uses{};           // streams that use the memory, since each hook runs on the stream of its operator
  // A small device gradient, which is kept until one kernel launch copies it together with other small gradients.
  struct Waiting {
    size_t member;
    at::Tensor gradient;
    int64_t version;  // the gradient's version when it was added
    c10::Stream stream;
  };
  std::vector<Waiting> waiting{};

  static BucketContent of(const GradientBucket& bucket);  // returns the content before the first gradient
  bool is_begun() const { return !parts.empty(); }

  // Uses the memory of a gradient as the values of a piece, without a copy.
  void borrow(size_t piece, const at::Tensor& values);
  int64_t borrowed_bytes() const;
  // Throws std::logic_error, naming parameter and rank, if a borrowed gradient was changed since borrow().
  void require_as_borrowed(const GradientBucket& bucket, const std::vector<PlannedParameter>& parameters,
                           int rank) const;

  // Whether wait_for_more() may keep the gradient, to copy it later together with others. True for small gradients on a
  // device, where a kernel launch costs more than the copy.
  static bool may_wait(const at::Tensor& gradient);
  // Keeps a gradient until copy_waiting().
  void wait_for_more(size_t member, const at::Tensor& gradient);
  // If `is_first`, copies a gradient to its place in the bucket; otherwise adds it to the gradient in that place.
  void put(const GradientBucket& bucket, size_t member, const at::Tensor& gradient, bool is_first);
  // Copies the waiting gradients to their places. Throws std::logic_error, naming parameter and rank, if a gradient was
  // changed after wait_for_more(). `parameters` is the reducer's list of parameters.
  void copy_waiting(const GradientBucket& bucket, const std::vector<PlannedParameter>& parameters, int rank);
  // Zeros the places of absent members. If `between_members`, also zeros the padding between and after members. All
  // parts must be allocated.
  void fill_gaps(const GradientBucket& bucket, bool between_members) const;
  // Forgets a member's gradient. Returns whether the bucket has no gradients left.
  bool forget(const GradientBucket& bucket, size_t member);

 private:
  bool copy_bytes(const GradientBucket& bucket, size_t member, const at::Tensor& gradient);
  // Returns the offset of the member in the values of its piece, in elements.
  static int64_t offset_of_place(const GradientBucket& bucket, size_t member);
  at::Tensor view_of_place(const GradientBucket& bucket, size_t member) const;
};

}  // namespace tessera::internal
