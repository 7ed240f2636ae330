#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/communicator.h>
#include <tessera/model/data_parallel.h>
#include "core/gradients/backward_pass.h"
#include "core/gradients/binding.h"
#include "core/gradients/grad_placeholder.h"
#include "core/gradients/gradient_bucket.h"
#include "core/gradients/gradient_reducer.h"
#include "core/layout/bucket_plan.h"
#include "core/model/replica_comparison.h"
#include "core/model/step_check.h"

namespace tessera::internal {

struct ReplicatedOptions {
  BucketLimits limits;
  std::optional<at::ScalarType> wire_dtype;  // dtype of gradients in messages; empty: the parameters' dtype
  WireFormat wire = WireFormat::kDtype;      // format of gradients in messages; used only with owners
  bool gradients_are_views = true;           // whether gradients are views of their buckets
  bool must_use_all = false;                 // whether to throw if no rank has a parameter's gradient in an iteration
  int64_t compare_replicas_every = 0;        // see ReplicaComparison
  bool copies_are_equal = true;              // whether replicas are bit-equal; if not, they are never compared
  ReducerOptions reducer;
};

// The gradients of a wrapper whose ranks hold whole parameters. Under DDP, every rank receives each reduced bucket.
// Under SDP, only the owner of the bucket's parameters receives it.
//
// After backward, `.grad` is the average over ranks (GradState::kOrdinary); under SDP it is undefined on ranks that do
// not own the parameter. Under no_sync(), `.grad` is this rank's own sum (kAccumulating). After a failed backward,
// `.grad` is a placeholder (kLost), and steps throw until zero_grad(). The first pass reduces buckets in reverse
// registration order. Later passes use the order in which gradients arrived on rank 0.
class ReplicatedGradients : public BackwardPass {
 public:
  // Returns the rank that owns a parameter. Called again when buckets are planned again, for example after a change
  // of requires_grad. May throw. If the function is empty, every rank receives all gradients.
  using OwnerOf = std::function<int(const PlannedParameter&)>;
  static std::shared_ptr<ReplicatedGradients> make(std::shared_ptr<torch::nn::Module> module,
                                                   std::vector<PlannedParameter> parameters,
                                                   std::shared_ptr<Communicator> comm, std::string who,
                                                   OwnerOf owner_of, ReplicatedOptions options);

  ~ReplicatedGradients() override;

  // Begins a forward. Collective if it compares replicas. Throws, naming the parameter: std::logic_error if one was
  // added or converted, std::runtime_error if no rank used one in the last iteration (must_use_all) or replicas differ.
  // Returns whether the last forward or captured step trained, outside no_sync(). Returns false inside backward.
  bool begin_forward();
  // Must be called after each forward, with its result's tensors. Throws std::logic_error if it changed a parameter.
  void end_forward(const std::vector<at::Tensor>& outputs);
  void refresh_trainable();

  void set_divisor(double divisor) override;
  std::optional<double> divisor() const override;
  void prepare_capture() override;
  void prepare_replay() override;

  // Throws std::logic_error if a gradient is kAccumulating or kLost, or during a backward. A no-op if passes_through().
  void require_averages() const;

  void require_nothing_new() const { binding_.require_nothing_new(); }  // see Binding

  void report(MemoryReport& report) const;  // sets the bucket bytes of `report`
  void reset_peak();

 protected:
  void begin() override;
  void end() override;
  void fail() override;
  void abandon(bool reduced) override;
  std::string name() const override { return binding_.owner(); }

 private:
  struct ParameterState {
    bool trainable = false;
    bool used = false;              // whether any rank used the parameter in a backward since the last forward
    bool awaits_reduction = false;  // whether it required a gradient in a training forward since the last reduction
    GradState grad = GradState::kOrdinary;
    bool has_average = false;  // for kAccumulating: whether the sum includes an average
  };

  ReplicatedGradients(std::shared_ptr<torch::nn::Module> module, std::vector<PlannedParameter> parameters,
                      std::shared_ptr<Communicator> comm, std::string who, OwnerOf owner_of, ReplicatedOptions options);
  void install();
  void plan_trainable();
  void plan(const std::vector<size_t>& order);
  bool is_lost(size_t parameter) const;
  at::Tensor take(size_t parameter, const at::Tensor& gradient);
  void begin_own_sum(size_t parameter);
  void begin_own_sums_of_unused();
  // Whether this rank receives the average of the parameter's gradient.
  bool gets_average(size_t parameter) const {
    return reducer_.buckets()[reducer_.bucket_of(parameter)].result != nullptr;
  }
  void note_passed_through(size_t parameter);
  void agree_on_order();
  void require_all_used();
  void note_failed_forward();
  void note_what_came_before();
  void require_capturable() const;
  bool passes_through() const { return mesh_.world->size() == 1 && !reducer_.divisor(); }  // whether nothing is reduced

  const Mesh mesh_;
  const OwnerOf owner_of_;
  const ReplicatedOptions options_;
  Binding binding_;
  CollectiveLog log_;
  GradientReducer reducer_;
  std::vector<std::unique_ptr<GradientBuffer>> results_;
  std::vector<ParameterState> states_;
  std::shared_ptr<GradPlaceholder> placeholder_;
  std::optional<StepCheck> step_check_;
  ReplicaComparison comparison_;
  struct Flags {
    bool order_agreed = false;     // whether the buckets follow rank 0's order of gradients
    bool has_own_sums = false;     // whether any rank may hold own sums, made under no_sync()
    bool any_backward = false;     // whether a backward since the last forward had gradients
    bool is_forward_open = false;  // whether a training forward has begun and not returned
    bool first_backward = true;
    bool last_forward_trained = false;  // after a backward, also true after prepare_capture() and prepare_replay()
  };
  Flags flags_;
};

}  // namespace tessera::internal
