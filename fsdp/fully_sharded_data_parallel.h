#pragma once

#include <torch/nn/module.h>
#include <torch/ordered_dict.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/flat/data_parallel.h"
#include "tessera/flat/gradient_source.h"
#include "tessera/flat/visit_tensors.h"
#include "tessera/fsdp/full_parameters.h"
#include "tessera/fsdp/options.h"

namespace tessera {

class Scheduler;

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
  Scope on_gradients(Arrived arrived, Failed failed = nullptr) override;
  Scope refuse_use(std::string reason) override;

  // While the scope lives, every parameter of the module is there in full, on every rank, and may
  // be read in any way and changed under NoGradGuard. On leaving, each rank keeps its own part of
  // what it sees (so change them alike on all ranks). In their own dtype, whatever mixed precision
  // computes in. Collective, at the beginning. Throws std::logic_error inside a backward pass and
  // inside another such scope, std::invalid_argument for options that do not go together and for
  // unknown units.
  Scope summon_full_params(SummonOptions options = {});

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
  torch::OrderedDict<std::string, at::Tensor> named_buffers() const override;

 protected:
  FullyShardedModule(torch::nn::Module& module, std::shared_ptr<Communicator> comm, const FsdpOptions& options);
  Scope begin_forward();  // lives as long as forward goes on
  // Floating-point tensors become of this type on their way into forward, and out of it.
  std::optional<at::ScalarType> input_dtype() const;
  std::optional<at::ScalarType> output_dtype() const;

  [[noreturn]] static void refuse_output_dtype();

  template <class Value>
  static void convert_floating(Value& value, at::ScalarType dtype) {
    visit_tensors(value, [&](at::Tensor& tensor) {
      if (tensor.defined() && at::isFloatingType(tensor.scalar_type())) tensor = tensor.to(dtype);
    });
  }

 private:
  BackwardPass& backward_pass() const override;

  std::shared_ptr<Scheduler> scheduler_;
};

// Trains an unmodified torch::nn module with its parameters, gradients and optimizer state split
// over the ranks: ZeRO stage 3 (Rajbhandari et al., 2020), as FairScale's and PyTorch's FSDP.
//
//   tessera::FullyShardedDataParallel fsdp(model, comm, {.auto_wrap = tessera::wrap_modules<BlockImpl>()});
//   torch::optim::AdamW optimizer(fsdp.parameters(), 1e-3);
//   auto loss = torch::mse_loss(fsdp(x), y);
//   loss.backward();  // gathers, reduces, releases
//   optimizer.step();
//
// Wrapping changes the module in place: each parameter keeps its identity (the module's members,
// ties, requires_grad) but becomes a view of its unit's storage, which holds data only while the
// unit is in use. Any operator that is given such a parameter makes the unit resident first, in
// forward, in backward and anywhere else, so modules need not be called through the wrapper; only
// reading a parameter behind the dispatcher (data_ptr) finds null. Changing one outside
// summon_full_params() throws std::logic_error; giving it other data of its shape and dtype (set_data()), alike on all
// ranks, is noticed by the next forward, which takes the values.
//
// `Holder` is a torch::nn module holder or a std::shared_ptr to a module. Ranks must run the same
// operators on the same units in the same order; they may differ in data. The wrapper is used by
// one thread at a time, the backward pass included.
template <class Holder>
class FullyShardedDataParallel : public FullyShardedModule {
 public:
  // Collective. Splits the parameters and frees the originals unit by unit. Throws
  // std::invalid_argument, on every rank and with the first difference by name, if ranks differ in
  // the model or the options, and for parameters that cannot be sharded (not on the
  // communicator's device, sharded already, sparse).
  FullyShardedDataParallel(Holder module, std::shared_ptr<Communicator> comm, FsdpOptions options = {})
      : FullyShardedModule(*module, std::move(comm), options), module_(std::move(module)) {}

  // What module->forward(args...) returns, with tensors converted on the way in and out as
  // FsdpOptions::mixed_precision says. Gathered parameters that changed since are refreshed.
  // Throws std::invalid_argument if output_dtype is set and the result's type is none in which
  // tensors are looked for (flat/visit_tensors.h).
  template <class... Args>
  decltype(auto) forward(Args&&... args) {
    const Scope forward_goes_on = begin_forward();
    if constexpr ((... || kHoldsTensors<Args>)) {
      if (input_dtype()) {
        std::tuple<std::conditional_t<kHoldsTensors<Args>, std::decay_t<Args>, Opaque>...> copies;
        return std::apply(
            [&](auto&... copy) -> decltype(auto) {
              return finished([&]() -> decltype(auto) {
                return module_->forward(with_input_dtype(std::forward<Args>(args), copy)...);
              });
            },
            copies);
      }
    }
    return finished([&]() -> decltype(auto) { return module_->forward(std::forward<Args>(args)...); });
  }
  template <class... Args>
  decltype(auto) operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  // The module that was given.
  const Holder& module() const { return module_; }

 private:
  struct Opaque {};  // stands for the copy of an argument that needs none

  template <class Value, class Copy>
  decltype(auto) with_input_dtype(Value&& value, Copy& copy) {
    if constexpr (kHoldsTensors<Value>) {
      copy = value;
      convert_floating(copy, *input_dtype());
      return static_cast<Value&&>(copy);
    } else {
      return static_cast<Value&&>(value);
    }
  }

  template <class Call>
  decltype(auto) finished(Call call) {
    using Result = decltype(call());
    if constexpr (std::is_void_v<Result> || !kHoldsTensors<Result>) {
      if (output_dtype()) refuse_output_dtype();
      return call();
    } else {
      std::decay_t<Result> result = call();
      if (output_dtype()) convert_floating(result, *output_dtype());
      return result;
    }
  }

  Holder module_;
};

}  // namespace tessera
