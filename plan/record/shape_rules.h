#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace tessera::internal {

// The arguments of an operator, with tensors on the meta device: shapes without data.
using MetaArguments = std::vector<c10::IValue>;

// Returns the shape rule of an operator, or null. Rules exist only for operators without a meta kernel in libtorch's
// C++. A rule returns meta tensors with the shapes, strides and dtypes of the CPU kernel's results.
using ShapeRule = std::function<std::vector<at::Tensor>(const MetaArguments&)>;
const ShapeRule* shape_rule_of(const std::string& operator_name);

// Returns a meta tensor with the geometry and dtype of `tensor`. A wrapped number remains a wrapped number.
at::Tensor meta_of(const at::Tensor& tensor);

// flop_of() returns the multiplications and additions of one call, as torch.utils.flop_counter counts matrix products,
// convolutions and attention. For other operators, returns 0, and has_flop() is false. Accepts tensors of any device.
bool has_flop(const std::string& operator_name);
int64_t flop_of(const std::string& operator_name, const std::vector<c10::IValue>& arguments,
                const std::vector<at::Tensor>& results);

}  // namespace tessera::internal
