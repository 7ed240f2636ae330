#pragma once

#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>

#include <tessera/detail/converted_inputs.h>
#include <tessera/model/fully_sharded_module.h>

namespace tessera {

// Trains an unmodified torch::nn module and shards its parameters, gradients and optimizer state over the ranks: ZeRO
// stage 3 (Rajbhandari et al., 2020), like FSDP of FairScale and PyTorch.
//
//   tessera::FullyShardedDataParallel fsdp(model, comm, {.auto_wrap = tessera::wrap_modules<BlockImpl>()});
//   torch::optim::AdamW optimizer(fsdp.parameters(), 1e-3);
//   auto loss = torch::mse_loss(fsdp(x), y);
//   loss.backward();  // unshards, reduces, reshards
//   optimizer.step();
//
// Wrapping changes the module in place. Each parameter remains the same tensor object, and keeps its ties and
// requires_grad, but becomes a view of its unit's storage. The storage has data only while the unit is unsharded. Any
// operator that uses a parameter first unshards its unit, inside and outside forward and backward. So submodules may be
// called directly. data_ptr() does not unshard, and is null while the unit is sharded. Changing a parameter outside
// summon_full_params() throws std::logic_error. If all ranks call set_data() with equal data of the parameter's shape
// and dtype, the next forward uses the new values.
//
// `Holder` is a torch::nn module holder or a std::shared_ptr to a module. Ranks must run the same operators on the same
// units in the same order; their data may differ. Must be used by one thread at a time (see DataParallel).
template <class Holder>
class FullyShardedDataParallel : public FullyShardedModule {
 public:
  // Collective. Shards the parameters and frees the originals, one unit at a time. If the model or the options differ
  // between ranks, throws std::invalid_argument on every rank, with the name of the first difference. Also throws
  // std::invalid_argument if a parameter is sparse, already sharded, or not on the communicator's device. After these
  // errors, and after a lack of host memory or disk for offload, the module is unchanged. After a later error, such as
  // a lost rank, deferred tensors are deferred again, but a module that had values cannot be used.
  FullyShardedDataParallel(Holder module, std::shared_ptr<Communicator> comm, FsdpOptions options = {})
      : FullyShardedModule(internal::module_in_holder(module), std::move(comm), options), module_(std::move(module)) {}

  // Returns module->forward(args...). Converts arguments and results as FsdpOptions::mixed_precision specifies. Copies
  // in-place changes of a converted argument back to the caller's argument. Throws std::invalid_argument if
  // output_dtype is set and include/tessera/visit_tensors.h does not support the result's type.
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

  Holder module() const { return module_; }  // the wrapped module, for example for module()->eval()

 private:
  struct Opaque {};  // takes the place of an argument without tensors, which is not copied

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

  // If forward() replaced tensors in a non-const lvalue argument, assigns the new tensors to the caller's argument.
  // Always assigns a program's own struct, because its other members may have changed.
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
