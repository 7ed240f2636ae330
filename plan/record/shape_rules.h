#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <functional>
#include <string>
#include <vector>

namespace tessera::internal {

// The arguments of an operator. Tensors are on the meta device, so they have shapes but no data.
using MetaArguments = std::vector<c10::IValue>;

// A shape rule returns meta tensors with the shapes, strides and dtypes of a CPU kernel's results. shape_rule_of()
// returns an operator's rule; null if there is none. Operators with a meta kernel need no rule, except for two losses.
using ShapeRule = std::function<std::vector<at::Tensor>(const MetaArguments&)>;
const ShapeRule* shape_rule_of(const std::string& operator_name);

// Returns a meta tensor with the geometry and dtype of `tensor`. Keeps the mark of a wrapped number.
at::Tensor meta_of(const at::Tensor& tensor);

// flop_of() returns the number of multiplications and additions in one call. Like torch.utils.flop_counter, it counts
// matrix products, convolutions and attention. For other operators, it returns 0, and has_flop() returns false.
bool has_flop(const std::string& operator_name);
int64_t flop_of(const std::string& operator_name, const std::vector<c10::IValue>& arguments,
                const std::vector<at::Tensor>& results);

}  // namespace tessera::internal
