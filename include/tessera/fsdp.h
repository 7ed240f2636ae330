#pragma once

#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>

#include <tessera/detail/converted_inputs.h>
#include <tessera/model/fully_sharded_module.h>

namespace tessera {

// Trains an unmodified torch::nn module with its parameters, gradients and optimizer state split over the ranks: ZeRO
// stage 3 (Rajbhandari et al., 2020), as FairScale's and PyTorch's FSDP.
//
//   tessera::FullyShardedDataParallel fsdp(model, comm, {.auto_wrap = tessera::wrap_modules<BlockImpl>()});
//   torch::optim::AdamW optimizer(fsdp.parameters(), 1e-3);
//   auto loss = torch::mse_loss(fsdp(x), y);
//   loss.backward();  // unshards, reduces, reshards
//   optimizer.step();
//
// Wrapping changes the module in place. Each parameter keeps its identity (the module's members, ties, requires_grad)
// but becomes a view of its unit's storage. The storage has data only while the unit is unsharded. An operator with
// such an argument first unshards the unit, in forward, in backward and elsewhere, so modules may be called without the
// wrapper. Only data_ptr() bypasses the dispatcher: it is null while the unit is sharded. Changing a parameter outside
// summon_full_params() throws std::logic_error. If all ranks call set_data() with equal data of the parameter's shape
// and dtype, the next forward uses the new values.
//
// `Holder` is a torch::nn module holder or a std::shared_ptr to a module. Ranks must run the same operators on the same
// units in the same order, on any data. The wrapper must be used by one thread at a time, the backward pass included.
template <class Holder>
class FullyShardedDataParallel : public FullyShardedModule {
 public:
  // Collective. Splits the parameters and frees the originals unit by unit. If ranks differ in the model or the
  // options, throws std::invalid_argument on every rank, with the name of the first difference. Throws it also for a
  // parameter that cannot be sharded: not on the communicator's device, sharded already, or sparse.
  FullyShardedDataParallel(Holder module, std::shared_ptr<Communicator> comm, FsdpOptions options = {})
      : FullyShardedModule(*module, std::move(comm), options), module_(std::move(module)) {}

  // Returns module->forward(args...), with arguments and results converted by FsdpOptions::mixed_precision. If forward
  // changes a converted argument or its tensors, changes the caller's, too. Throws std::invalid_argument if
  // output_dtype is set and the result's type is not one of include/tessera/visit_tensors.h.
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
                    (copy_back<Args>(args, copy, inputs), ...);
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

  // The module given to the constructor: module()->eval().
  Holder module() const { return module_; }

 private:
  struct Opaque {};  // stands for an argument without tensors, which needs no copy

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

  // Copies a converted argument back to the caller's argument, if forward may have changed it through a reference.
  template <class Arg, class Value, class Copy>
  static void copy_back(Value& value, Copy& copy, const internal::ConvertedInputs& inputs) {
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
