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
#include "core/gradients/grad_state.h"
#include "core/gradients/gradient_buffer.h"
#include "core/gradients/gradient_reducer.h"
#include "core/gradients/step_check.h"
#include "core/layout/bucket_plan.h"
#include "core/model/replica_comparison.h"

namespace tessera::internal {

struct ReplicatedOptions {
  BucketLimits limits;
  std::optional<at::ScalarType> wire_dtype;  // what gradients travel in
  WireFormat wire = WireFormat::kDtype;      // with owners
  bool gradients_are_views = true;           // of buckets
  bool must_use_all = false;                 // a parameter that no backward of an iteration used is an error
  int64_t compare_replicas_every = 0;        // see ReplicaComparison
  bool copies_are_equal = true;              // replicas have the same bits; else they are never compared
  ReducerOptions reducer;
};

// The policy of wrappers whose ranks hold whole parameters: whom a bucket of gradients goes to (every rank: DDP; its
// parameters' owner: SDP), and what a gradient is that was made under no_sync().
//
// A parameter's .grad, once backward is over, is the average over ranks where the layout gives it to this rank, else
// undefined; under no_sync() this rank's own sum, on every rank. After a backward that failed it is a guard: a step
// is refused until zero_grad(). The order in which buckets are reduced is that of registration, reversed, at first;
// from then on the order in which rank 0 saw the gradients come.
class ReplicatedGradients : public BackwardPass {
 public:
  // `owner_of` is asked anew whenever requires_grad has changed, and may throw; empty: every rank gets all.
  using OwnerOf = std::function<int(const PlannedParameter&)>;
  static std::shared_ptr<ReplicatedGradients> make(std::shared_ptr<torch::nn::Module> module,
                                                   std::vector<PlannedParameter> parameters,
                                                   std::shared_ptr<Communicator> comm, std::string who,
                                                   OwnerOf owner_of, ReplicatedOptions options);

  // Looks for what has happened to the module. Throws std::logic_error by name for what cannot be trained.
  void begin_forward();
  // `outputs`: the tensors that forward returned.
  void end_forward(const std::vector<at::Tensor>& outputs);
  void refresh_trainable();

  void set_divisor(double divisor) override;

  // Throws std::logic_error, naming the parameter and the rank, if gradients here are not averages.
  void require_averages() const;

  // Throws std::logic_error, naming it, for a parameter that the module has got since it was wrapped.
  void require_nothing_new() const { binding_.require_nothing_new(); }

  void report(MemoryReport& report) const;  // the bytes of buckets
  void reset_peak();

 protected:
  void begin() override;
  void end() override;
  void fail() override;
  void abandon() override;

 private:
  struct ParameterState {
    bool trainable = false;
    bool used = false;              // by a backward since the last forward
    bool awaits_reduction = false;  // trained by a forward since the last pass that reduced, though frozen by now
    GradState grad = GradState::kEmpty;
    bool has_average = false;  // kAccumulating: an average is part of the sum
  };

  ReplicatedGradients(std::shared_ptr<torch::nn::Module> module, std::vector<PlannedParameter> parameters,
                      std::shared_ptr<Communicator> comm, std::string who, OwnerOf owner_of, ReplicatedOptions options);
  void install();
  void plan(const std::vector<size_t>& order);
  bool is_lost(size_t parameter) const;
  at::Tensor take(size_t parameter, const at::Tensor& gradient);
  void keep_own_sum(size_t parameter, bool adds);
  void note_passed_through(size_t parameter);
  void agree_on_order();
  void require_all_used();
  void note_failed_forward();
  void note_what_came_before();
  bool passes_through() const { return mesh_.world->size() == 1 && !reducer_.divisor(); }

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
    bool order_agreed = false;     // with the other ranks, by a backward
    bool has_own_sums = false;     // of a backward under no_sync() on a rank alone
    bool any_backward = false;     // gave a gradient, since the last forward
    bool is_forward_open = false;  // begun, and not ended
    bool first_backward = true;
  };
  Flags flags_;
};

}  // namespace tessera::internal
