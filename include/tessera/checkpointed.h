#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <tessera/visit_tensors.h>
#include <tessera/wrap.h>

namespace tessera {

// What checkpointed() is below its templates. `compute` maps the tensors among the inputs to those
// among the outputs; it is called now, unrecorded, and again in backward. All defined.
std::vector<at::Tensor> run_checkpointed(std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)> compute,
                                         std::vector<at::Tensor> inputs);

namespace internal {

template <class Function, class... Inputs>
decltype(auto) call(Function& function, Inputs&... inputs) {
  if constexpr (requires { function->forward(inputs...); }) {
    return function->forward(inputs...);
  } else {
    return function(inputs...);
  }
}

// Of arguments that the caller would see changed: variables of its own.
template <class... Inputs, class Arguments>
std::vector<at::Tensor> tensors_by_reference(Arguments& arguments) {
  std::vector<at::Tensor> tensors;
  auto add = [&]<class Input>(std::type_identity<Input>, auto& argument) {
    if constexpr (std::is_lvalue_reference_v<Input> && !std::is_const_v<std::remove_reference_t<Input>>)
      visit_tensors(argument, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  };
  std::apply([&](auto&... each) { (add(std::type_identity<Inputs>(), each), ...); }, arguments);
  return tensors;
}
// Throws std::invalid_argument.
void require_same(const std::vector<at::Tensor>& before, const std::vector<at::Tensor>& after);

}  // namespace internal

// function(inputs...), or module->forward(inputs...) of a holder or pointer, without keeping what happens in between
// for backward: backward computes it again from the inputs (gradient checkpointing, Chen et al., 2016;
// torch.utils.checkpoint, reentrant). It costs one more forward of the part; memory is that of the inputs. It needs no
// wrapper; under FullyShardedDataParallel the part's units are gathered again when it is computed again.
//
//   x = tessera::checkpointed(block, x);
//   auto [y, state] = tessera::checkpointed([&](at::Tensor a, int steps) { ... }, x, 3);
//
// Gradients reach the tensors among the inputs (in all that include/tessera/visit_tensors.h knows or is taught) and the
// parameters that the function uses; tensors that a lambda captures and that are no leaves are not reached: pass them
// as inputs. Results that are no tensors are those of the first time. The function and the other inputs are copied, and
// must do the same when called again: random numbers (the default generators of the CPU, of the thread's current
// device, of inputs' and outputs') and autocast are set back for it. While a SavedInputs::Scope lives
// (ActivationOffload), the inputs' tensors are kept in host memory. Without autograd (NoGradGuard, InferenceMode) it is
// a plain call.
//
// Throws std::invalid_argument if the function changes one of its inputs in place or, where it takes a variable of the
// caller's by reference, puts another tensor there, and in backward if somebody else has changed one since, wherever it
// was kept; std::logic_error, in backward, if the second time gives other outputs (number, shape, dtype), and for
// create_graph. Exceptions of the function pass through. Backward must run on one thread at a time, as libtorch's does
// for one graph on CPUs.
template <class Function, class... Inputs>
auto checkpointed(Function function, Inputs&&... inputs) {
  std::tuple<std::decay_t<Inputs>...> arguments(std::forward<Inputs>(inputs)...);
  using Result =
      std::decay_t<decltype(std::apply([&](auto&... each) { return internal::call(function, each...); }, arguments))>;
  static_assert(
      kHoldsTensors<Result>,
      "checkpointed(): the function returns no tensors (see include/tessera/visit_tensors.h), so there is nothing to "
      "differentiate");

  using Tensors = std::vector<at::Tensor>;
  Tensors given;
  std::vector<bool> is_defined;
  visit_tensors(arguments, [&](at::Tensor& tensor) {
    is_defined.push_back(tensor.defined());
    if (tensor.defined()) given.push_back(std::exchange(tensor, at::Tensor()));
  });
  auto first = std::make_shared<std::optional<Result>>();
  auto compute = [function = std::move(function), arguments = std::move(arguments), is_defined = std::move(is_defined),
                  weak = std::weak_ptr(first)](const Tensors& tensors) mutable {
    auto own = arguments;
    size_t position = 0, next = 0;
    visit_tensors(own, [&](at::Tensor& tensor) {
      if (is_defined[position++]) tensor = tensors[next++];
    });
    const Tensors before = internal::tensors_by_reference<Inputs...>(own);
    Result result = std::apply([&](auto&... each) { return internal::call(function, each...); }, own);
    internal::require_same(before, internal::tensors_by_reference<Inputs...>(own));
    Tensors outputs;
    visit_tensors(result, [&](at::Tensor& tensor) {
      if (tensor.defined()) outputs.push_back(tensor);
    });
    if (auto kept = weak.lock()) *kept = std::move(result);
    return outputs;
  };
  const Tensors outputs = run_checkpointed(std::move(compute), std::move(given));
  size_t next = 0;
  visit_tensors(**first, [&](at::Tensor& tensor) {
    if (tensor.defined()) tensor = outputs[next++];
  });
  return std::move(**first);
}

// A Sequential whose children are checkpointed where `policy` says so (every one if it is empty),
// with their names as in the Sequential. Tensor in, tensor out.
//
//   auto blocks = tessera::CheckpointedSequential(sequential, tessera::wrap_modules<BlockImpl>());
class CheckpointedSequentialImpl : public torch::nn::Module {
 public:
  // The children are shared with `sequential`.
  explicit CheckpointedSequentialImpl(const torch::nn::Sequential& sequential, const WrapPolicy& policy = {});
  // Each child's result is the next one's input.
  at::Tensor forward(at::Tensor x);

 private:
  std::vector<std::pair<torch::nn::AnyModule, bool>> children_of_mine_;  // and whether they are checkpointed
};
TORCH_MODULE(CheckpointedSequential);

// The children of a ModuleList one after the other, each of one of these types, checkpointed:
// x = checkpointed_chain<BlockImpl>(blocks, x). Throws std::invalid_argument for a child of another type.
template <class... Modules>
at::Tensor checkpointed_chain(const torch::nn::ModuleList& list, at::Tensor x) {
  for (const auto& child : *list) {
    auto run_as = [&](auto* typed) {
      if (typed == nullptr) return false;
      x = checkpointed([child, typed](const at::Tensor& input) { return typed->forward(input); }, x);
      return true;
    };
    if (!(... || run_as(dynamic_cast<Modules*>(child.get()))))
      throw std::invalid_argument("checkpointed_chain: a child is a " + child->name() + ", none of the types given");
  }
  return x;
}

}  // namespace tessera
