#include "core/paging/stand_in.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <iterator>
#include <string_view>
#include <utility>

#include "core/paging/boxed_tensors.h"
#include "core/paging/page_views.h"
#include "core/paging/residency.h"

namespace tessera::internal {

std::shared_ptr<StandIn> stand_in_of(const at::Tensor& tensor) {
  const Page::State* state = is_paged(tensor) ? page_state_of(tensor) : nullptr;
  return state == nullptr ? nullptr : state->stand_in.values;
}

at::Tensor stand_in_view(std::shared_ptr<StandIn> stand_in, const std::string& name, at::Device device,
                         at::ScalarType dtype, at::IntArrayRef sizes) {
  Page page(nullptr, 0, name, device);
  const at::Tensor view = page.view(dtype, sizes, c10::contiguous_strides(sizes), 0);
  Page::State* state = page_state_of(view);
  state->stand_in.values = std::move(stand_in);
  state->page = nullptr;
  return view;
}

namespace {

// An operator that computes at::linear: the positions of its arguments, and whether its weight argument is transposed.
struct LinearForm {
  std::string_view name;
  std::ptrdiff_t input, weight, bias;  // positions among the arguments; -1: none
  bool is_transposed;
};
constexpr LinearForm kLinearForms[] = {{"aten::linear", 0, 1, 2, false},
                                       {"aten::matmul", 0, 1, -1, true},
                                       {"aten::mm", 0, 1, -1, true},
                                       {"aten::addmm", 1, 2, 0, true}};

// If a stand-in computes the operator itself, returns the result; otherwise returns an undefined tensor.
at::Tensor computed_by_stand_in(const c10::FunctionSchema& schema, torch::jit::Stack::const_iterator arguments) {
  if (schema.name() == "aten::t" && arguments[0].toTensor().dim() == 2) {
    const at::Tensor& tensor = arguments[0].toTensor();
    const at::Tensor view = stand_in_view(stand_in_of(tensor), page_state_of(tensor)->name, tensor.device(),
                                          tensor.scalar_type(), {tensor.size(1), tensor.size(0)});
    page_state_of(view)->stand_in.is_transposed = !page_state_of(tensor)->stand_in.is_transposed;
    return view;
  }
  if (schema.name() == "aten::batch_norm") {
    for (std::ptrdiff_t i = 1; i <= 4; ++i)
      if (arguments[i].isTensor())
        if (const auto stand_in = stand_in_of(arguments[i].toTensor()))
          return stand_in->batch_norm(arguments[0].toTensor(), arguments[5].toBool(), arguments[6].toDouble(),
                                      arguments[7].toDouble());
    return {};
  }
  const auto form = std::ranges::find(kLinearForms, std::string_view(schema.name()), &LinearForm::name);
  if (form == std::end(kLinearForms) || !schema.overload_name().empty()) return {};
  const at::Tensor &input = arguments[form->input].toTensor(), &weight = arguments[form->weight].toTensor();
  const auto stand_in = stand_in_of(weight);
  const bool has_factors = form->bias == 0 && (arguments[3].toScalar().toDouble() != 1 ||  //
                                               arguments[4].toScalar().toDouble() != 1);
  if (!stand_in || stand_in_of(input) || has_factors || input.dim() == 0 ||
      page_state_of(weight)->stand_in.is_transposed != form->is_transposed)
    return {};
  const bool has_bias = form->bias >= 0 && arguments[form->bias].isTensor();
  return stand_in->linear(input, has_bias ? arguments[form->bias].toTensor() : at::Tensor());
}

}  // namespace

void call_with_stand_ins(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const auto arguments = stack->end() - static_cast<std::ptrdiff_t>(count);
  if (at::Tensor result = computed_by_stand_in(op.schema(), arguments); result.defined()) {
    torch::jit::drop(*stack, count);
    return torch::jit::push(*stack, std::move(result));
  }
  auto replaced = [&](const at::Tensor& tensor) {
    const auto stand_in = stand_in_of(tensor);
    if (!stand_in) return tensor;
    const at::Tensor values = stand_in->values_for(op.schema().name());
    return page_state_of(tensor)->stand_in.is_transposed ? values.t() : values;
  };
  for (auto value = arguments; value != stack->end(); ++value) replace_boxed_tensors(*value, replaced);
  op.callBoxed(stack);
}

}  // namespace tessera::internal
