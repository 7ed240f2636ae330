#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <tessera/visit_tensors.h>
#include <tessera/wrap.h>

namespace tessera {

// The part of checkpointed() that needs no templates. Returns compute(inputs), without recording its operators for
// autograd. Backward calls `compute` again. All inputs and outputs must be defined.
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

// Returns the tensors in arguments that were passed as non-const lvalues. The function must not replace these tensors.
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
// Throws std::invalid_argument if a tensor of `before` was replaced in `after`.
void require_same(const std::vector<at::Tensor>& before, const std::vector<at::Tensor>& after);

}  // namespace internal

// Calls function(inputs...), or module->forward(inputs...) for a holder or pointer, and keeps only the inputs for
// backward. Backward computes all intermediate results again (gradient checkpointing, Chen et al., 2016;
// torch.utils.checkpoint, reentrant). This costs one more forward of the function. Works with and without a wrapper.
// Under FullyShardedDataParallel, recomputation unshards the function's units again.
//
//   x = tessera::checkpointed(block, x);
//   auto [y, state] = tessera::checkpointed([&](at::Tensor a, int steps) { ... }, x, 3);
//
// Gradients flow to the tensors among the inputs (all types supported by include/tessera/visit_tensors.h) and to the
// parameters that the function uses. A lambda must not capture non-leaf tensors that need gradients; pass them as
// inputs. Results that are not tensors come from the first call. The function and its inputs other than tensors are
// copied. The second call of the function must compute equal results. For the second call, autocast and random
// generators are restored. These are the default generators of the CPU, of the thread's current device, and of the
// devices of inputs and outputs. While an ActivationOffload::Scope is open, input tensors are kept in host memory.
// Without autograd (NoGradGuard, InferenceMode), checkpointed() only calls the function.
//
// Throws std::invalid_argument if the function changes an input in place, or replaces a tensor that was passed by
// reference. Backward throws std::invalid_argument if an input has changed since the call. It throws std::logic_error
// for create_graph, for backward() restricted to `inputs`, and if the second call's outputs differ in number, shape or
// dtype. Exceptions of the function propagate. Backward must run on one thread at a time.
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

// A Sequential that checkpoints the children selected by `policy`, which receives their names. An empty policy selects
// all children. forward() takes and returns one tensor.
//
//   auto blocks = tessera::CheckpointedSequential(sequential, tessera::wrap_modules<BlockImpl>());
class CheckpointedSequentialImpl : public torch::nn::Module {
 public:
  // Shares the children with `sequential`.
  explicit CheckpointedSequentialImpl(const torch::nn::Sequential& sequential, const WrapPolicy& policy = {});
  // Passes each child's result to the next child.
  at::Tensor forward(at::Tensor x);

 private:
  std::vector<std::pair<torch::nn::AnyModule, bool>> children_of_mine_;  // true: the child is checkpointed
};
TORCH_MODULE(CheckpointedSequential);

// Runs the children of a ModuleList in order, each checkpointed: x = checkpointed_chain<BlockImpl>(blocks, x). Throws
// std::invalid_argument if a child has none of the given types.
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
