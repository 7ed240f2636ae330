#pragma once

#include <torch/nn/module.h>
#include <torch/ordered_dict.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/communicator.h>
#include <tessera/model/data_parallel.h>
#include <tessera/optim/gradient_source.h>
#include <tessera/options/fsdp_options.h>
#include <tessera/visit_tensors.h>

namespace tessera {

namespace internal {
class Scheduler;
}

// The part of the wrapper that does not depend on the module's type. See FullyShardedDataParallel.
class FullyShardedModule : public DataParallel, public GradientSource {
 public:
  // parameters(): this rank's part of every parameter, each once, in the module's order: 1-D leaf tensors on
  // the communicator's device (in host memory with FsdpOptions::offload), in the parameter's dtype, empty where the
  // rank owns none of it. Give them to any torch::optim optimizer, after wrapping, in any groups. Writing to them
  // (under NoGradGuard, or through .data()) changes the model. After backward `.grad()` is the gradient averaged over
  // ranks; undefined for a parameter that no rank used; after one under no_sync(), or one that failed, a tensor without
  // data that any operator refuses by name, until a backward that reduces, or zero_grad().

  GradNorm clip_grad_norm_on_device_(double max_norm, double norm_type = 2.0, bool error_if_nonfinite = false) override;

  // For an optimizer that steps while backward goes on; StepInBackward is the one that uses it. Throws
  // std::invalid_argument with FsdpOptions::check_finite.
  ScopeExit on_gradients(Arrived arrived, Failed failed = nullptr) override;
  std::vector<at::Tensor> parameters_with_gradients() const override;
  ScopeExit refuse_use(std::string reason) override;

  // While the scope lives, every parameter of the module is there in full, on every rank, and may
  // be read in any way and changed under NoGradGuard. On leaving, each rank keeps its own part of
  // what it sees (so change them alike on all ranks). In their own dtype, whatever mixed precision
  // computes in. Collective, at the beginning. Throws std::logic_error inside a backward pass and
  // inside another such scope, std::invalid_argument for options that do not go together and for
  // unknown units.
  ScopeExit summon_full_params(SummonOptions options = {});

  // All parameters (under each of their names) and buffers by name, in full, as copies on the
  // communicator's device, or the host. Collective. One unit at a time is gathered.
  torch::OrderedDict<std::string, at::Tensor> full_state_dict(StateDictOptions options = {});

  // Calls visit(name, tensor) for what full_state_dict() has, without keeping it: parameters in the
  // order of units, in full, then buffers. The tensor is the visitor's for the call only. Collective;
  // with rank0_only the other ranks are called with nothing. No rank holds more than one unit
  // beyond its shards, so that a model of any size can be written to a file.
  void visit_full_state(const std::function<void(const std::string& name, const at::Tensor& tensor)>& visit,
                        StateDictOptions options = {});

  MemoryReport memory() const override;
  void reset_peak_memory() override;

  // A table of units: name, parameters, numbers of elements, dtypes, bytes per rank.
  std::string describe() const;

  const std::shared_ptr<Communicator>& comm() const override;
  std::vector<NamedShard> named_shards() const override;
  std::vector<NamedShard> shards_to_save() const override;
  std::vector<HeldPart> held_by(int rank) const override;
  // With the parameters of FsdpOptions::ignored_modules, which are as whole, so that checkpoints have them.
  torch::OrderedDict<std::string, at::Tensor> named_buffers() const override;

 protected:
  FullyShardedModule(torch::nn::Module& module, std::shared_ptr<Communicator> comm, const FsdpOptions& options);
  ScopeExit begin_forward();  // lives as long as forward goes on
  // Of one that returns. Without gradients, nobody may come after who would find that a gather was aborted.
  void end_forward();
  // Floating-point tensors become of this type on their way into forward, and out of it.
  std::optional<at::ScalarType> input_dtype() const;
  std::optional<at::ScalarType> output_dtype() const;

  [[noreturn]] static void refuse_output_dtype();

  template <class Value, class Visit>
  static void visit_floating(Value& value, Visit visit) {
    visit_tensors(value, [&](at::Tensor& tensor) {
      if (tensor.defined() && at::isFloatingType(tensor.scalar_type())) visit(tensor);
    });
  }

 private:
  internal::BackwardPass& backward_pass() const override;

  std::shared_ptr<internal::Scheduler> scheduler_;
};

}  // namespace tessera
