#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <tessera/communicator.h>
#include "core/gradients/order_log.h"
#include "core/layout/as_wrapped.h"
#include "core/layout/flat_layout.h"
#include "core/layout/geometry.h"
#include "core/memory/counted_buffers.h"

namespace tessera::internal {

// How many bytes of its own a rank steps before it sends them, where it steps some after others: worth a call of an
// optimizer's operator. Tests have it step each bucket by itself.
inline int64_t least_step_bytes = int64_t{8} << 20;
// So many times as much on a device, which is that much faster than a processor, and not at being called.
inline constexpr int64_t kDeviceStepFactor = 32;

// Parameters that travel together from their owners to all ranks after a step.
//
// A bucket's memory is cut by owner, and its parameters are views of it: one all-gather straight out of and into them
// updates them all. Large parameters stay where they are, a bucket of their own each. So nothing is copied, in a step
// or for long at the start.
//
// But a parameter whose memory others share (a view that a module keeps, a second model) stays in it, and is copied
// out of the bucket and into it: what each rank finds for itself, since buckets travel the same.
class ParameterBuckets {
 public:
  // Moves the small parameters' values into buckets of at most `bucket_bytes` and makes them views
  // of these (same TensorImpl, so modules and hooks do not notice). `owners` by parameter.
  // broadcast_dtype: what values travel in; the owner's own stay as they are.
  ParameterBuckets(std::vector<at::Tensor> parameters, std::vector<int> owners, int64_t bucket_bytes,
                   std::optional<at::ScalarType> broadcast_dtype, Communicator& comm);

  // `values` of a parameter that another rank owns, as they are here when they have travelled: in broadcast_dtype. As
  // they are, where the parameter is this rank's, is not published, or travels in its own dtype.
  at::Tensor as_received(const at::Tensor& parameter, const at::Tensor& values) const;

  // Throws std::logic_error, naming it by its number, for a parameter to publish that is no longer of the dtype, shape
  // and device that it had when it came. Not collective.
  void require_unconverted() const;

  // Gives the parameters of buckets their place and order of memory back, where set_data() has given them others:
  // before a step, in which they stay where they are. Not collective.
  void bring_home();

  // Every parameter that requires a gradient <- its owner's, all buckets at once. Collective: starts it, notes in `log`
  // what it has started, and finish() ends it. With step_owned, which steps what it is given, this rank's parameters
  // travel as soon as they have been stepped, while it steps the next: in all it gets all that the rank owns, once.
  struct Flight;
  using StepOwned = std::function<void(const std::vector<at::Tensor>& parameters)>;
  std::vector<Flight> publish(OrderLog& log, const StepOwned& step_owned = nullptr);
  void finish(std::vector<Flight>& flights);

 private:
  struct Bucket {
    std::string name;
    std::vector<size_t> members;  // indices of parameters, by owner
    std::vector<ParameterGeometry> geometries;
    FlatLayout layout;
    std::vector<WrappedKind> kinds;
    at::Tensor flat;          // undefined: the only member's own memory
    std::vector<bool> stays;  // by member: it is no view of `flat`, and will be none
    // A member has required a gradient, at construction or in a step: it is published. Also where it is frozen now,
    // since it may have been frozen between a backward and this step.
    bool has_trained = false;
  };
  void plan(int64_t bucket_bytes);
  Bucket make_bucket(std::vector<size_t> members) const;
  void adopt(Bucket& bucket);        // makes members views of the bucket's memory
  void adopt_again(Bucket& bucket);  // the same again, where the user has given some of them other data
  bool is_in_place(const Bucket& bucket, size_t member) const;
  bool is_shared(const Bucket& bucket, size_t member) const;
  at::Tensor view_of(const Bucket& bucket, size_t member) const {
    return view_in(bucket.flat, bucket.geometries[member], bucket.layout.offset(static_cast<int64_t>(member)));
  }
  void note_trained();
  bool trains(const Bucket& bucket) const;
  bool is_rounded(at::ScalarType dtype) const;
  std::vector<at::Tensor> owned_outside_buckets() const;
  int64_t add_owned(const Bucket& bucket, std::vector<at::Tensor>& to) const;
  Flight start(Bucket& bucket);
  void finish(Flight& flight);

  const std::vector<at::Tensor> parameters_;
  const std::vector<int> owners_;
  const std::optional<at::ScalarType> broadcast_dtype_;
  Communicator& comm_;
  CountedBuffers buffers_;  // for what travels in another dtype
  std::vector<Bucket> buckets_;
};

struct ParameterBuckets::Flight {
  const Bucket* bucket;
  at::Tensor values;  // [layout.full_numel()]
  at::Tensor wire;    // what travels: the values, or a copy of another dtype
  Pending pending;
};

}  // namespace tessera::internal
