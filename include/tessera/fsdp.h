#pragma once

#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>

#include <tessera/detail/converted_inputs.h>
#include <tessera/fully_sharded_module.h>

namespace tessera {

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
  // FsdpOptions::mixed_precision says; what forward puts into arguments, or writes to their tensors, comes to the
  // caller's. Gathered parameters that changed since are refreshed.
  // Throws std::invalid_argument if output_dtype is set and the result's type is none in which
  // tensors are looked for (include/tessera/visit_tensors.h).
  template <class... Args>
  decltype(auto) forward(Args&&... args) {
    const ScopeExit forward_goes_on = begin_forward();
    if constexpr ((... || kHoldsTensors<Args>)) {
      if (input_dtype()) {
        std::tuple<std::conditional_t<kHoldsTensors<Args>, std::decay_t<Args>, Opaque>...> copies;
        internal::ConvertedInputs inputs;
        return std::apply(
            [&](auto&... copy) -> decltype(auto) {
              return finished(
                  [&]() -> decltype(auto) {
                    return module_->forward(with_input_dtype(std::forward<Args>(args), copy, inputs)...);
                  },
                  [&] {
                    inputs.copy_changes();
                    (give_back<Args>(args, copy, inputs), ...);
                  });
            },
            copies);
      }
    }
    return finished([&]() -> decltype(auto) { return module_->forward(std::forward<Args>(args)...); }, [] {});
  }
  template <class... Args>
  decltype(auto) operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  // The module that was given: module()->eval().
  Holder module() const { return module_; }

 private:
  struct Opaque {};  // stands for the copy of an argument that needs none

  template <class Value, class Copy>
  decltype(auto) with_input_dtype(Value&& value, Copy& copy, internal::ConvertedInputs& inputs) {
    if constexpr (kHoldsTensors<Value>) {
      copy = value;
      visit_floating(copy, [&](at::Tensor& tensor) { tensor = inputs.convert(tensor, *input_dtype()); });
      return static_cast<Value&&>(copy);
    } else {
      return static_cast<Value&&>(value);
    }
  }

  // What forward has put into an argument that it may have taken by reference (a state, say) is the caller's.
  template <class Arg, class Value, class Copy>
  static void give_back(Value& value, Copy& copy, const internal::ConvertedInputs& inputs) {
    if constexpr (kHoldsTensors<Arg> && std::is_lvalue_reference_v<Arg> && !std::is_const_v<Value>) {
      visit_tensors(copy, [&](at::Tensor& tensor) { tensor = inputs.own_of(tensor); });
      if (internal::IsTaught<Copy> || !internal::ConvertedInputs::are_same(tensors_of(copy), tensors_of(value)))
        value = std::move(copy);
    }
  }

  template <class Call, class After>
  decltype(auto) finished(Call call, After after) {
    using Result = decltype(call());
    if constexpr (std::is_void_v<Result>) {
      if (output_dtype()) refuse_output_dtype();
      call();
      after();
      end_forward();
    } else if constexpr (!kHoldsTensors<Result>) {
      if (output_dtype()) refuse_output_dtype();
      decltype(auto) result = call();
      after();
      end_forward();
      return result;
    } else {
      std::decay_t<Result> result = call();
      after();
      end_forward();
      if (output_dtype()) visit_floating(result, [&](at::Tensor& tensor) { tensor = tensor.to(*output_dtype()); });
      return result;
    }
  }

  Holder module_;
};

}  // namespace tessera
