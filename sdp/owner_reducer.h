#pragma once

#include <torch/csrc/autograd/function.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/flat/unit_plan.h"
#include "tessera/memory/buffer_pool.h"
#include "tessera/sdp/reduce_plan.h"

namespace tessera {

// Takes gradients as autograd produces them and leaves each with the rank that owns the parameter,
// averaged over ranks.
//
// A hook before each parameter's gradient accumulator takes the gradient away. When a bucket has all
// of its gradients, its reduce to the owner starts and goes on while backward computes; the other
// ranks free theirs as soon as they are sent. All ranks must start the reduces in one order: a
// full bucket waits for those that were expected before it. What is not full when backward ends
// (parameters that this rank did not use) is filled with zeros. Then the ranks tell each other, in
// one small all-gather, which parameters had a gradient at all: those without one anywhere keep
// none. The order expected is that of registration, reversed, at first; from then on what rank 0 saw.
//
// What a parameter's .grad is: on its owner the average, as soon as backward is over; elsewhere
// undefined. Under no_sync: this rank's own sum, on every rank.
//
// The engine calls back from its own threads where a device has one; the mutex makes that safe.
class OwnerReducer : public std::enable_shared_from_this<OwnerReducer> {
 public:
  struct Options {
    int64_t buffer_numel = 0;
    std::optional<at::ScalarType> reduce_dtype;
  };
  // `owner_of` is asked anew whenever requires_grad has changed; it may throw.
  using OwnerOf = std::function<int(const PlannedParameter&)>;
  OwnerReducer(std::vector<PlannedParameter> parameters, OwnerOf owner_of, std::shared_ptr<Communicator> comm,
               Options options);

  void begin_forward();  // looks for changes of requires_grad; forgets a backward that has failed
  void expect_backward_of(const std::vector<at::Tensor>& outputs);
  void refresh_trainable();
  void set_sync(bool sync) { sync_ = sync; }
  bool sync() const { return sync_; }

  // Throws std::logic_error, naming the parameter and the rank, if gradients here are not averages.
  void require_reduced() const;

  int64_t bucket_bytes() const { return pool_.lent_bytes() + held_bytes_; }
  int64_t peak_bucket_bytes() const { return peak_bytes_; }
  void reset_peak() { peak_bytes_ = bucket_bytes(); }

 private:
  enum class Holds { kNothing, kOwnSum, kAverage };  // what a parameter's .grad is, where it is defined
  struct ParameterState {
    std::shared_ptr<torch::autograd::Node> accumulator;  // autograd itself holds it only weakly
    bool trainable = false;
    size_t bucket = 0, member = 0;
    Holds holds = Holds::kNothing;
    bool used = false;  // had a gradient in this backward
    at::Tensor late;    // what came after that was sent: a part computed again in backward brings more
  };
  struct BucketState {
    at::Tensor flat;            // gradients so far, [numel]; undefined until the first
    bool is_borrowed = false;   // flat is the pool's
    bool is_gradient = false;   // flat is `gradient`
    std::vector<bool> arrived;  // by member, in this backward
    size_t missing = 0;
    bool started = false;
    at::Tensor gradient;  // on the owner: memory of its parameters' gradients
    std::vector<at::Tensor> views;
  };
  struct Flight {
    size_t bucket;
    BucketState content;
    std::vector<bool> used;
    at::Tensor wire;  // content.flat, or its values in reduce_dtype
    Pending pending;
  };

  void install_hook(size_t parameter);
  void plan(const std::vector<size_t>& order);
  at::Tensor gradient_arrived(size_t parameter, const at::Tensor& gradient);
  at::Tensor keep_own_sum(size_t parameter, const at::Tensor& gradient);
  void deposit(size_t parameter, at::Tensor gradient);
  void make_room(size_t bucket);
  bool becomes_gradient(size_t bucket) const;
  void make_gradient(size_t bucket);
  at::Tensor place_of(const at::Tensor& flat, size_t parameter) const;
  at::Tensor part_of(const at::Tensor& flat, size_t bucket, size_t member) const;
  bool is_ours_alone(const BucketState& state) const;

  void enter_backward();
  void end_backward();
  void abandon_backward();
  void start_full_ones();
  void start(size_t bucket);
  void finish_oldest();
  void accept(Flight& flight, const std::vector<bool>& used);
  std::vector<uint8_t> exchange_marks();  // what ranks had of each parameter, the most of it
  void agree_on_used(const std::vector<uint8_t>& marks);
  void reduce_late_ones(const std::vector<uint8_t>& marks);
  void agree_on_order();
  void add(size_t parameter, const at::Tensor& gradient);
  void note_bytes();
  std::string label(size_t bucket) const;

  mutable std::mutex mutex_;
  const std::vector<PlannedParameter> parameters_;
  const OwnerOf owner_of_;
  const std::shared_ptr<Communicator> comm_;
  const Options options_;
  BufferPool pool_;
  std::vector<ParameterState> states_;
  std::vector<ReduceBucket> buckets_;
  std::vector<BucketState> contents_;  // by bucket
  std::vector<Flight> in_flight_;      // oldest first
  std::vector<Flight> undecided_;      // reduced, but perhaps some parameter was used by no rank
  std::vector<size_t> seen_;           // parameters in the order of their gradients, until agreed on
  size_t started_ = 0;
  bool order_agreed_ = false;
  bool in_backward_ = false;
  bool first_backward_ = true;
  bool sync_ = true;
  int64_t held_bytes_ = 0;  // of gradients that travel without being copied
  int64_t peak_bytes_ = 0;
};

}  // namespace tessera
