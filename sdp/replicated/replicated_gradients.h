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
#include "core/gradients/gradient_buffer.h"
#include "core/gradients/gradient_guard.h"
#include "core/gradients/gradient_keeper.h"
#include "core/gradients/gradient_reducer.h"
#include "core/layout/bucket_plan.h"
#include "sdp/replicated/copy_watch.h"
#include "sdp/replicated/taken_parameters.h"

namespace tessera::internal {

struct ReplicatedOptions {
  BucketLimits limits;
  std::optional<at::ScalarType> wire_dtype;  // what gradients travel in
  WireFormat wire = WireFormat::kDtype;      // with owners
  bool gradients_are_views = true;           // of buckets
  bool must_use_all = false;                 // a parameter that no backward of an iteration used is an error
  bool copies_are_equal = true;              // ranks have the same bits of parameters
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

  // Throws std::logic_error, naming the parameter, where that would divide an average once more.
  void set_divisor(double divisor) override;

  // Throws std::logic_error, naming the parameter and the rank, if gradients here are not averages.
  void require_averages() const;
  // The same, before they are scaled by their norm.
  void require_averages_to_clip();

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
  enum class Holds { kNothing, kOwnSum, kAverage };  // what a parameter's .grad is, where it is defined
  struct ParameterState {
    bool trainable = false;
    bool used = false;              // by a backward since the last forward
    bool awaits_reduction = false;  // trained by a forward since the last pass that reduced, though frozen by now
    Holds holds = Holds::kNothing;
    // Of an own sum: the divisor for which it has an average in it, and whether that is not zero (where it is known).
    std::optional<double> divisor_of_average;
    at::Tensor has_average;
  };

  ReplicatedGradients(std::shared_ptr<torch::nn::Module> module, std::vector<PlannedParameter> parameters,
                      std::shared_ptr<Communicator> comm, std::string who, OwnerOf owner_of, ReplicatedOptions options);
  void install();
  void plan(const std::vector<size_t>& order);
  std::string label(const std::vector<size_t>& members) const;
  at::Tensor take(size_t parameter, const at::Tensor& gradient);
  void keep_own_sum(size_t parameter, bool adds);
  void note_passed_through(size_t parameter);
  void agree_on_order();
  void hear(StepEvent event);
  void require_all_used();
  void note_failed_forward();
  void note_what_came_before();
  bool hands_out_gradients() const;
  bool passes_through() const { return mesh_.world->size() == 1 && !reducer_.divisor(); }

  const Mesh mesh_;
  const OwnerOf owner_of_;
  const ReplicatedOptions options_;
  Binding binding_;
  TakenParameters taken_;
  OrderLog log_;
  GradientReducer reducer_;
  CopyWatch copies_;
  std::vector<std::unique_ptr<GradientBuffer>> results_;
  std::vector<ParameterState> states_;
  std::shared_ptr<GradientGuard> guard_;
  std::optional<GradientKeeper> keeper_;
  ValueSamples seen_;  // when the last pass ended
  bool order_agreed_ = false;
  bool has_own_sums_ = false;  // that passed through
  bool any_backward_ = false;  // that gave a gradient, since the last forward
  bool is_forward_open_ = false;
  bool hands_out_gradients_ = false;  // the pass that goes on
  bool first_backward_ = true;
};

}  // namespace tessera::internal
