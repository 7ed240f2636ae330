#pragma once

#include <torch/nn/module.h>
#include <torch/ordered_dict.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/communicator.h>
#include <tessera/detail/gradient_source.h>
#include <tessera/model/data_parallel.h>
#include <tessera/options/fsdp_options.h>
#include <tessera/visit_tensors.h>

namespace tessera {

namespace internal {
class Scheduler;
}

// The part of FullyShardedDataParallel that does not depend on the module's type.
class FullyShardedModule : public DataParallel, public internal::GradientSource {
 public:
  // parameters() returns this rank's part of every parameter, each once, in the module's order. The parts are 1-D leaf
  // tensors of the parameter's dtype, empty if the rank owns no element. They are on the communicator's device, or on
  // the host or a disk if FsdpOptions::offload.params is true, except units that offload.device_fraction keeps on the
  // device. Any torch::optim optimizer accepts them, in any groups. Writing to them (under NoGradGuard, or through
  // .data()) changes the model. After backward `.grad()` is the average over ranks, or undefined if no rank used the
  // parameter. After a backward that failed or ran under no_sync(), `.grad()` is a placeholder. Operators on it throw,
  // naming the parameter, until zero_grad(). After no_sync(), a backward that reduces also replaces the placeholder.

  GradNorm clip_grad_norm_on_device_(double max_norm, double norm_type = 2.0, bool error_if_nonfinite = false) override;

  // For an optimizer that steps during backward: see GradientSource and StepInBackward. Throws std::invalid_argument if
  // FsdpOptions::check_finite is set.
  ScopeExit on_gradients(Arrived arrived, Failed failed = nullptr) override;
  std::vector<at::Tensor> parameters_with_gradients() const override;  // shards that have a gradient now
  // While the scope exists, uses of parameters outside backward throw std::logic_error with `reason` (GradientSource).
  ScopeExit refuse_use(std::string reason) override;

  // While the scope exists, every parameter of the module (see SummonOptions) is unsharded on every rank, in its own
  // dtype despite mixed precision. Parameters may be read in any way, and changed under NoGradGuard. At the end of the
  // scope each rank copies its part into the shards if `writeback`, so all ranks must make equal changes. Only the call
  // is collective; the end of the scope is not. Throws std::logic_error inside a backward pass and while another such
  // scope is open. Throws std::invalid_argument for options that contradict each other and for unknown units.
  ScopeExit summon_full_params(SummonOptions options = {});

  // Returns full copies of all buffers and parameters (under each of their names). The copies are on the communicator's
  // device or, with offload_to_cpu, in host memory. Collective. Gathers one unit at a time.
  torch::OrderedDict<std::string, at::Tensor> full_state_dict(StateDictOptions options = {});

  // Calls visit(name, tensor) for each entry of full_state_dict(): parameters in the order of units, then buffers. The
  // tensor is valid only during the call of visit(). Collective. If rank0_only is set, only rank 0 calls visit(). A
  // rank holds at most one unit in addition to its shards, so a model of any size can be written to a file.
  void visit_full_state(const std::function<void(const std::string& name, const at::Tensor& tensor)>& visit,
                        StateDictOptions options = {});

  MemoryReport memory() const override;
  void reset_peak_memory() override;

  std::string describe() const;  // table of units: name, parameters, numbers of elements, dtypes, bytes per rank

  const std::shared_ptr<Communicator>& comm() const override;
  std::vector<NamedShard> named_shards() const override;
  std::vector<NamedShard> shards_to_save() const override;
  std::vector<HeldPart> held_by(int rank) const override;
  // Includes the parameters of FsdpOptions::ignored_modules, because checkpoints save them whole, like buffers.
  torch::OrderedDict<std::string, at::Tensor> named_buffers() const override;

 protected:
  FullyShardedModule(torch::nn::Module& module, std::shared_ptr<Communicator> comm, const FsdpOptions& options);
  ScopeExit begin_forward();  // the scope must live until forward ends
  // Must be called after a forward that did not throw. In no-grad mode, throws CommError if an all-gather was aborted,
  // because no later backward would detect the abort.
  void end_forward();
  // Return the dtype to which forward's floating-point arguments or results are converted; empty: not converted.
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
