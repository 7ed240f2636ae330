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

// Returns the shape rule of an operator without a meta kernel in libtorch's C++ (Python has some 100 more), or null. A
// rule returns meta tensors with the shapes, strides and dtypes of the CPU kernel's results.
using ShapeRule = std::function<std::vector<at::Tensor>(const MetaArguments&)>;
const ShapeRule* shape_rule_of(const std::string& operator_name);

// A tensor's geometry on the meta device; a wrapped number stays one.
at::Tensor meta_of(const at::Tensor& tensor);

// Multiplications and additions of one call, counted as torch.utils.flop_counter does: matrix products, convolutions,
// attention; 0 for other operators. Accepts tensors of any device.
bool has_flop(const std::string& operator_name);
int64_t flop_of(const std::string& operator_name, const std::vector<c10::IValue>& arguments,
                const std::vector<at::Tensor>& results);

}  // namespace tessera::internal
